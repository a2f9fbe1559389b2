"""One change to a class or a module of another package: what it changes, why, and what it was
written against.

    class FasterPropose(Patch[NgramProposer], why="...", versions=">=0.22"):
        def propose(self, *args, **kwargs):
            return FasterPropose.original("propose")(self, *args, **kwargs)

    class Gate(Patch, target="vllm.utils.import_utils", why="..."):
        @staticmethod
        def has_arctic_inference() -> bool:
            return True

The keywords declare the patch, the body holds the new members. A target given by its dotted name
(`module` or `module:Class`) is imported by nobody but its user. This module knows how to lay one
patch over one target and take it off again; order, selection and imports are
`drafter_compat.registry`'s.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from drafter_compat import _layers
from drafter_compat._layers import MISSING, Layer
from drafter_compat._source import arguments_shape, signature_shape
from drafter_compat._words import nearest

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from drafter_compat.registry import PatchReport
    from drafter_compat.surface import Symbol

    Target = TypeVar("Target", default=Any)
else:
    from typing import TypeVar

    Target = TypeVar("Target")

__all__ = [
    "Lazy",
    "Patch",
    "PatchConflict",
    "PatchError",
    "PatchSpec",
    "ShapeChanged",
    "TargetName",
    "body_hash",
    "lazy",
]

WHENS = ("registration", "import", "worker")
"""When a patch is applied: at once, importing its target; when its target is first imported; in a
worker, once vLLM has started it."""


class PatchError(RuntimeError):
    """A patch that cannot be applied, taken off, or declared like this: which, why, the way out."""


class PatchConflict(PatchError):
    """Two patches change the same thing, and neither says that it comes after the other."""


class ShapeChanged(PatchError):
    """What a patch replaces is not what it was written against any more."""


@dataclass(frozen=True)
class TargetName:
    """What a patch changes: a module, or a class in it."""

    module: str
    qualname: str = ""
    given: type | ModuleType | None = field(default=None, compare=False, repr=False)
    """The class or module itself, where the patch names it so."""

    @classmethod
    def of(cls, target: object) -> TargetName:
        """From a class, a module, or `"module"` or `"module:Class"`."""
        if isinstance(target, type):
            return cls(target.__module__, target.__qualname__, target)
        if isinstance(target, ModuleType):
            return cls(target.__name__, given=target)
        if isinstance(target, str):
            module, _, qualname = target.partition(":")
            if all(part.isidentifier() for part in (*module.split("."), *qualname.split("."))) or (
                not qualname and all(part.isidentifier() for part in module.split("."))
            ):
                return cls(module, qualname)
        raise PatchError(
            f"a patch's target is a class, a module, 'module' or 'module:Class', not {target!r}"
        )

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}" if self.qualname else self.module

    def resolve(self) -> type | ModuleType:
        """The class or module itself, importing its module. Raises PatchError."""
        if self.given is not None:
            return self.given
        module = importlib.import_module(self.module)
        value: Any = module
        for part in self.qualname.split(".") if self.qualname else ():
            value = getattr(value, part, MISSING)
            if value is MISSING:
                raise PatchError(
                    f"{self.module} has no {self.qualname}{nearest(part, vars(module))}; "
                    f"correct the patch's target"
                )
        if not isinstance(value, (type, ModuleType)):
            raise PatchError(f"{self} is a {type(value).__name__}, not a class")
        return value


@dataclass(frozen=True)
class Lazy:
    """A member that is imported only when the patch is applied."""

    place: str
    """`module:name`."""

    def resolve(self) -> Any:
        """Import it. Raises what the import raises."""
        module, _, name = self.place.partition(":")
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
        return value


def lazy(place: str) -> Any:
    """A patch member by its place `module:name`, imported only when the patch is applied."""
    module, colon, name = place.partition(":")
    if not (module and colon and name):
        raise PatchError(f"a lazy member is written 'module:name', not {place!r}")
    return Lazy(place)


@dataclass(frozen=True)
class PatchSpec:
    """All that a patch declares about itself."""

    name: str
    target: TargetName
    members: Mapping[str, Any]
    """New value by name of the target's attribute, as the class body gives it."""
    module: str
    """The module that declares the patch."""
    why: str = ""
    upstream: str = ""
    """The issue or pull request that would make the patch needless."""
    remove_when: str = ""
    """When the patch is needless: a specifier (`>=0.35`), `has module:name`, or words."""
    versions: str = ""
    """Where the patch is needed; elsewhere it is skipped."""
    pins: tuple[str, ...] = ()
    """Exact versions that the patch was verified on; elsewhere it is refused. Empty: no rule."""
    requires: tuple[str, ...] = ()
    """Patches without which this one makes no sense: chosen with it, and applied before it."""
    after: tuple[str, ...] = ()
    """Patches on top of which this one may lie."""
    optional: bool = False
    """Whether start-up goes on if the patch fails."""
    default: bool = True
    """Whether the patch is applied where nobody chose."""
    when: str = "import"
    adds: tuple[str, ...] = ()
    """Members that the target does not have before."""
    expects: Mapping[str, str] | None = None
    """By member: the signature `(self, a)` or the body hash `sha256:...` of what it replaces."""
    on_change: str = "refuse"
    """What to do where that differs: `refuse` or `warn`."""
    rebind: bool = True
    """Whether a replaced function or class is also rebound in modules that from-imported it."""
    relies_on: tuple[Symbol, ...] = ()
    """Further symbols that the patch relies on: compared with the installed source before anything
    is applied, and part of the surface manifest."""


_RESERVED = {"spec", "original", "apply", "revert", "_owner", "_target"}
_CLASS_MACHINERY = {
    "__module__",
    "__qualname__",
    "__doc__",
    "__annotations__",
    "__annotate__",
    "__annotate_func__",
    "__annotations_cache__",
    "__classdictcell__",
    "__conditional_annotations__",
    "__dict__",
    "__firstlineno__",
    "__orig_bases__",
    "__parameters__",
    "__static_attributes__",
    "__weakref__",
}


class _Targeted:
    """`Patch["module"]` in a list of bases: carries the target to `__init_subclass__`."""

    def __init__(self, target: object) -> None:
        self.target = target

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        return (type("Patch", (Patch,), {"_target": self.target, "_is_base": True}),)


class Patch(Generic[Target]):
    """Subclass it to declare a patch; see the module. A patch is never instantiated."""

    spec: ClassVar[PatchSpec]
    _target: ClassVar[object] = None
    _is_base: ClassVar[bool] = True
    _owner: ClassVar[type | ModuleType | None] = None
    """The target while the patch lies over it: an engine may call `original` at every step."""

    def __class_getitem__(cls, target: object) -> Any:
        if isinstance(target, TypeVar):
            return super().__class_getitem__(target)  # type: ignore[misc]
        return _Targeted(target)

    def __init_subclass__(cls, *, target: object = None, **declared: Any) -> None:
        super().__init_subclass__()
        if vars(cls).get("_is_base"):
            return
        parent = cls.__mro__[1]
        if not vars(parent).get("_is_base"):
            raise PatchError(f"{cls.__name__}: a patch is not subclassed; declare another one")
        cls._is_base = False
        cls.spec = _declare(
            cls, target if target is not None else vars(parent).get("_target"), declared
        )

    def __new__(cls, *args: object, **kwargs: object) -> Patch[Target]:
        """Refuse: a patch is applied, not instantiated."""
        raise TypeError(f"a patch is not instantiated: call {cls.__name__}.apply()")

    @classmethod
    def original(cls, name: str) -> Any:
        """What was at `name` beneath this patch: the function, or the value of an attribute.

        Of a classmethod or staticmethod it is the plain function, of a property the property.
        Raises AttributeError if there was nothing.
        """
        owner = cls._owner if cls._owner is not None else cls.spec.target.resolve()
        raw = _layers.beneath(owner, name, cls)
        if raw is MISSING:
            raise AttributeError(f"{cls.spec.target} had no {name!r} before {cls.spec.name}")
        return raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw

    @classmethod
    def apply(cls) -> PatchReport:
        """Apply this patch by itself. A patch that is applied stays as it is."""
        from drafter_compat.registry import lone_registry

        return lone_registry(cls).apply()

    @classmethod
    def revert(cls) -> None:
        """Take this patch off again, leaving exactly what would be there without it."""
        from drafter_compat.registry import lone_registry

        lone_registry(cls).revert()


def _declare(cls: type[Patch], target: object, declared: dict[str, Any]) -> PatchSpec:
    where = f"patch {declared.get('name', cls.__name__)}"
    if target is None:
        raise PatchError(f"{where}: has no target; write Patch[Class] or target='module'")
    fields = PatchSpec.__dataclass_fields__
    allowed = [key for key in fields if key not in ("target", "members", "module")]
    for key in declared:
        if key not in allowed:
            raise PatchError(f"{where}: unknown keyword {key!r}{nearest(key, allowed)}")
    members = {
        name: value
        for name, value in vars(cls).items()
        if name not in _CLASS_MACHINERY and name not in ("_is_base", "spec")
    }
    for name, value in members.items():
        _check_member(where, name, value)
    for key in ("requires", "after", "pins", "adds", "relies_on"):
        if isinstance(declared.get(key), str):
            raise PatchError(f"{where}: {key!r} is a tuple, not the string {declared[key]!r}")
        declared[key] = tuple(declared.get(key, ()))
    declared.setdefault("name", cls.__name__)
    spec = PatchSpec(
        target=TargetName.of(target), members=members, module=cls.__module__, **declared
    )
    _check_spec(where, spec)
    return spec


def _check_member(where: str, name: str, value: Any) -> None:
    if name in _RESERVED:
        raise PatchError(f"{where}: a member cannot be called {name!r}, a patch needs that name")
    function = inspect.unwrap(value.__func__) if hasattr(value, "__func__") else value
    if isinstance(function, FunctionType) and "__class__" in function.__code__.co_freevars:
        raise PatchError(
            f"{where}: super() in {name!r} would look above the patch, not above its target; "
            f"call original({name!r}), or super(Target, self)"
        )


def _check_spec(where: str, spec: PatchSpec) -> None:
    if spec.when not in WHENS:
        raise PatchError(f"{where}: when is one of {', '.join(WHENS)}, not {spec.when!r}")
    if spec.on_change not in ("refuse", "warn"):
        raise PatchError(f"{where}: on_change is 'refuse' or 'warn', not {spec.on_change!r}")
    try:
        SpecifierSet(spec.versions)
    except InvalidSpecifier:
        raise PatchError(f"{where}: versions {spec.versions!r} is no version specifier") from None
    for pin in spec.pins:
        try:
            Version(pin)
        except InvalidVersion:
            raise PatchError(
                f"{where}: pins are exact versions such as '0.32.0', not {pin!r}; "
                f"a range goes into 'versions'"
            ) from None
    if not spec.members:
        raise PatchError(f"{where}: changes nothing; put the new members into its body")
    for key, names in (("adds", spec.adds), ("expects", spec.expects or ())):
        for name in names:
            if name not in spec.members:
                raise PatchError(
                    f"{where}: {key} names {name!r}, which is no member of it"
                    f"{nearest(name, spec.members)}"
                )
    for name, shape in (spec.expects or {}).items():
        try:
            shape.startswith("sha256:") or signature_shape(shape)
        except (AttributeError, ValueError):
            raise PatchError(
                f"{where}: expects of {name!r} is a signature such as '(self, a, b=1)', or a body "
                f"hash 'sha256:...', not {shape!r}"
            ) from None


# --- laying a patch over its target ---------------------------------------------------------


@dataclass(frozen=True)
class AppliedPatch:
    """The layers that one patch has put down, and how to take them off."""

    patch: type[Patch]
    layers: tuple[tuple[type | ModuleType, str, Layer], ...]

    @property
    def places(self) -> tuple[str, ...]:
        """`module.name` or `module:Class.name` of everything changed, rebound names included."""
        return tuple(_place(owner, name) for owner, name, _ in self.layers)

    def revert(self) -> list[str]:
        """Take every layer off; return the places that something else changed, left alone."""
        self.patch._owner = None
        foreign = []
        for owner, name, layer in reversed(self.layers):
            if _layers.remove_layer(owner, name, layer) is not MISSING:
                foreign.append(_place(owner, name))
        if self.patch.spec.rebind:
            for owner, name, layer in self.layers:
                if isinstance(owner, ModuleType):
                    _give_back(self.patch, layer.value, vars(owner).get(name, MISSING))
        return foreign


def _give_back(patch: type[Patch], value: Any, current: Any) -> None:
    """Rebind modules that from-imported the replacement while it was in place.

    The plugin's own modules, and those of the package that the replacement is from, keep it.
    """
    if not _has_identity(value) or current is MISSING or current is value:
        return
    keepers = {_package(patch.spec.module), _package(getattr(value, "__module__", None) or "")}
    for module, alias in _holders(value):
        if _package(module.__name__) not in keepers:
            setattr(module, alias, current)


def _package(module: str) -> str:
    return module.partition(".")[0]


def _holders(value: object) -> Iterator[tuple[ModuleType, str]]:
    """Every imported module, and its name, that holds this very object."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            for alias, held in list(vars(module).items()):
                if held is value:
                    yield module, alias


def _place(owner: type | ModuleType, name: str) -> str:
    if isinstance(owner, ModuleType):
        return f"{owner.__name__}.{name}"
    return f"{owner.__module__}:{owner.__qualname__}.{name}"


def lay_over(patch: type[Patch], warn: Callable[[str], None]) -> AppliedPatch:
    """Apply a patch to its target, which must be imported already. All of it or, on an error,
    nothing.

    Raises PatchError, or whatever importing a lazy member raises. `warn` is told about a changed
    shape where the patch says to warn.
    """
    spec = patch.spec
    owner = spec.target.resolve()
    values = {
        name: value.resolve() if isinstance(value, Lazy) else value
        for name, value in spec.members.items()
    }
    changes = []
    for name, value in values.items():
        if isinstance(owner, ModuleType) and isinstance(value, staticmethod):
            value = value.__func__
        _check_target_has(spec, owner, name)
        _check_shape(patch, owner, name, warn)
        changes.append((owner, name, value, _above(patch, owner, name)))
        if spec.rebind and isinstance(owner, ModuleType) and name not in spec.adds:
            for module, alias in _from_importers(spec, owner, name):
                changes.append((module, alias, value, _above(patch, module, alias)))
    done: list[tuple[type | ModuleType, str, Layer]] = []
    try:
        for where, name, value, above in changes:
            layer = Layer(patch, value)
            _layers.add_layer(where, name, layer, below=above)
            done.append((where, name, layer))
            if isinstance(where, type) and hasattr(type(value), "__set_name__"):
                value.__set_name__(where, name)
    except BaseException:
        AppliedPatch(patch, tuple(done)).revert()
        raise
    patch._owner = owner
    return AppliedPatch(patch, tuple(done))


def _check_target_has(spec: PatchSpec, owner: type | ModuleType, name: str) -> None:
    has = inspect.getattr_static(owner, name, MISSING) is not MISSING
    if name in spec.adds and has:
        raise PatchError(
            f"patch {spec.name} adds {name!r} to {spec.target}, which has it already: look whether "
            f"the patch is needed any more, or take {name!r} out of its 'adds'"
        )
    if name not in spec.adds and not has:
        raise PatchError(
            f"patch {spec.name} replaces {name!r} of {spec.target}, which has no such attribute"
            f"{nearest(name, dir(owner))}; correct the name, or list it in 'adds' if it is new"
        )


def _above(patch: type[Patch], owner: type | ModuleType, name: str) -> list[Any]:
    """The patches on that name that lie above this one; PatchConflict for any in no order."""
    above = []
    for stack in _layers.stacks():
        if not _same_attribute(stack, owner, name):
            continue
        for layer in stack.layers:
            other = layer.patch
            if other is patch:
                continue
            if _comes_after(other, patch):
                if stack.owner is owner:
                    above.append(other)
            elif not _comes_after(patch, other):
                raise PatchConflict(
                    f"{_place(owner, name)} is changed by two patches: {describe_owner(other)} and "
                    f"{describe_owner(patch)}. To use both, one must say "
                    f"after=({other.spec.name!r},) "
                    f"and call original({name!r}); to use one, leave the other out with "
                    f"VLLM_PATCHES "
                    f"or VLLM_PLUGINS"
                )
    return above


def _same_attribute(stack: _layers.Stack, owner: type | ModuleType, name: str) -> bool:
    """Whether a layer of that stack and one on `owner.name` would shadow each other."""
    if stack.owner is owner:
        return stack.name == name
    if isinstance(owner, ModuleType) and isinstance(stack.owner, ModuleType):
        # The name as a consumer bound it: patched there and here, under any alias.
        value = _layers.before(owner, name)
        held = (stack.base, *(layer.value for layer in stack.layers))
        return _has_identity(value) and any(item is value for item in held)
    if stack.name != name or not (isinstance(owner, type) and isinstance(stack.owner, type)):
        return False
    if issubclass(owner, stack.owner):
        return _layers.before(owner, name) is MISSING
    return issubclass(stack.owner, owner) and stack.base is MISSING


def _comes_after(later: type[Patch], earlier: type[Patch]) -> bool:
    return bool({earlier.spec.name, earlier} & {*later.spec.after, *later.spec.requires})


def describe_owner(patch: type[Patch]) -> str:
    """`FasterPropose of vllm_lens.patches (distribution vllm-lens)`."""
    from drafter_compat.versions import distribution_of

    distribution = distribution_of(patch.spec.module)
    suffix = f" (distribution {distribution})" if distribution else ""
    return f"{patch.spec.name} of {patch.spec.module}{suffix}"


def _from_importers(
    spec: PatchSpec, owner: ModuleType, name: str
) -> Iterator[tuple[ModuleType, str]]:
    """The modules, and their names, that hold the very object that is replaced.

    Numbers, strings and the like are the same object in many unrelated places, so only what has an
    identity of its own is looked for. The module that declares the patch keeps what it imported.
    """
    value = vars(owner).get(name, MISSING)
    if _has_identity(value):
        for module, alias in _holders(value):
            if module is not owner and module.__name__ != spec.module:
                yield module, alias


def _has_identity(value: object) -> bool:
    return isinstance(value, type) or (callable(value) and hasattr(value, "__module__"))


# --- the shape that a patch was written against ---------------------------------------------


def _check_shape(
    patch: type[Patch], owner: type | ModuleType, name: str, warn: Callable[[str], None]
) -> None:
    spec = patch.spec
    expected = (spec.expects or {}).get(name)
    if expected is None:
        return
    # Other patches may lie over it already; this one was written against what the package has.
    function = _function_in(_layers.beneath_all(owner, name))
    if expected.startswith("sha256:"):
        wanted, found = expected, body_hash(function)
        fits = wanted == found
    else:
        wanted, found = _bracketed(expected), _live_signature(function)
        # A default is an expression in the source (`r=REGISTRY`) and a value in the function.
        fits = wanted == found or wanted == _source_signature(function)
    if fits:
        return
    message = (
        f"patch {spec.name} replaces {_place(owner, name)}, written against {wanted}, but the "
        f"running "
        f"one is {found}: read what changed, adapt the patch, then update its 'expects'"
    )
    if spec.on_change == "refuse":
        raise ShapeChanged(message)
    warn(message)


def _bracketed(signature: str) -> str:
    return f"({', '.join(signature_shape(signature))})"


def _function_in(raw: Any) -> Any:
    """The function of a classmethod, staticmethod or property; anything else as it is."""
    if isinstance(raw, (staticmethod, classmethod)):
        return raw.__func__
    if isinstance(raw, functools.cached_property):
        return raw.func
    return raw.fget if isinstance(raw, property) else raw


def _source_signature(function: Any) -> str | None:
    """As `_bracketed`, of the function's own source; None where that cannot be read."""
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    return f"({', '.join(arguments_shape(node.args))})"


def _live_signature(function: Any) -> str:
    """As `_bracketed`, of a function object. Defaults are compared as their repr."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ShapeChanged(f"{function!r} has no signature to compare: {error}") from error
    bare = signature.replace(
        parameters=[p.replace(annotation=p.empty) for p in signature.parameters.values()],
        return_annotation=signature.empty,
    )
    try:
        return _bracketed(str(bare))
    except ValueError:
        return str(bare)


def body_hash(function: Any) -> str:
    """`sha256:...` of what a function does: its code without layout, comments, docstrings,
    annotations.

    Equal on every Python from 3.10 on. Raises PatchError where the source cannot be read.
    """
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
        node = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError) as error:
        raise PatchError(f"the source of {function!r} cannot be read: {error}") from error
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        raise PatchError(f"{function!r} is no plain function")
    return "sha256:" + hashlib.sha256(canonical(node).encode()).hexdigest()[:32]


_NO_MEANING = {"annotation", "returns", "type_comment", "type_params", "kind", "ctx"}


def canonical(node: object) -> str:
    """A text that two syntax trees share if they mean the same, on every Python."""
    if isinstance(node, list):
        return f"[{','.join(map(canonical, node))}]"
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        node = ast.Assign(targets=[node.target], value=node.value)
    if not isinstance(node, ast.AST):
        return repr(node)
    parts = []
    for name, value in ast.iter_fields(node):
        if name in _NO_MEANING or value is None or value == []:
            continue
        if name == "body" and isinstance(value, list):
            value = [item for item in value if not _is_string(item)]
        parts.append(f"{name}={canonical(value)}")
    return f"{type(node).__name__}({','.join(parts)})"


def _is_string(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
