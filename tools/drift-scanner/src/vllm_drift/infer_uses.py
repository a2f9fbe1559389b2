"""Lists how a plugin uses the package: what it imports, patches, subclasses, calls and reads.

Walks every module of the plugin once for patches (they tell of which class the first parameter of
a replacement is) and once for everything else. A use carries its place in the plugin. What becomes
of the uses (`infer`) is not known here.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from vllm_drift.infer_plugin import Plugin, PluginClass, Scope, children, dotted_text
from vllm_drift.infer_release import partial_call, walk
from vllm_drift.infer_values import (
    Bound,
    Constant,
    Instance,
    Local,
    LocalInstance,
    Ref,
    SourceText,
    Super,
    Unknown,
    Value,
    call_shape,
    call_text,
    signature_text,
)

__all__ = ["Place", "Use", "Uses", "find_uses"]

_CAUGHT = frozenset(
    ("ImportError", "ModuleNotFoundError", "AttributeError", "Exception", "BaseException")
)
_TYPE_CHECKING = frozenset(("TYPE_CHECKING", "typing.TYPE_CHECKING"))
_PROBES = frozenset(("hasattr", "signature", "find_spec", "__dataclass_fields__", "co_varnames"))
_CLASS_MACHINERY = frozenset(
    [
        "__slots__",
        "__module__",
        "__qualname__",
        "__doc__",
        "__dict__",
        "__weakref__",
        "__parameters__",
        "__annotations__",
        "__orig_bases__",
        "__class_getitem__",
        "__init_subclass__",
        "__match_args__",
    ]
)


@dataclass(frozen=True, order=True)
class Place:
    """A place in the plugin: path below its root, and line from 1."""

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True)
class Use:
    """One use of a name of the package.

    `how` is one of

    * `import`: the plugin imports `ref`;
    * `patch`: it assigns to `ref` (a member of a class or a name of a module);
    * `subclass`: it subclasses the class `ref`;
    * `override`: its subclass of a class defines a member; `ref` is that member on the base;
    * `call`: it calls `ref`, with the arguments `text`;
    * `read`: it reads `ref` off a module or class;
    * `member`: it reads `ref` off an object;
    * `anchor`: it looks for `text` in the source of `ref`.
    """

    how: str
    ref: Ref
    place: Place
    text: str = ""
    shape: str = ""
    """Equal for calls that pass the same parameters."""
    optional: bool = False
    """The plugin catches its absence, or asks first."""
    on_object: bool = False
    """A patch of one object: the function that it puts there takes no receiver."""
    replacement: Local | None = None
    """What a patch or an override puts there, where it is a function or class of the plugin."""


@dataclass
class Uses:
    """All uses, and the subclasses and written names that say what is the plugin's own."""

    uses: list[Use] = field(default_factory=list)
    written: set[Ref] = field(default_factory=set)
    """Names that the plugin itself assigns on objects, classes or modules of the package."""
    subclasses: dict[Ref, list[PluginClass]] = field(default_factory=dict)


def find_uses(plugin: Plugin) -> Uses:
    """List every use of the package in the plugin, in the order of its modules."""
    uses = Uses()
    for pass_ in (_Patches, _Everything):
        for dotted, scope in plugin.modules.items():
            pass_(plugin, uses, plugin.tree.path(dotted), scope).run()
        plugin.forget()
    uses.uses = list(dict.fromkeys(uses.uses))
    return uses


class _Walker:
    """Walks a module with the scope, the guards and the conditions around each node."""

    def __init__(self, plugin: Plugin, uses: Uses, path: str, scope: Scope) -> None:
        self.plugin = plugin
        self.uses = uses
        self.path = path
        self.scope = scope
        self.optional = False
        self.typing_only = False

    def run(self) -> None:
        for statement in self.scope.node.body:  # type: ignore[attr-defined]
            self.walk(statement)

    def place(self, node: ast.AST) -> Place:
        return Place(self.path, getattr(node, "lineno", 1))

    def walk(self, node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            self._enter(node)
        elif isinstance(node, ast.Try):
            self._try(node)
        elif isinstance(node, (ast.If, ast.IfExp)):
            self._if(node)
        else:
            self.see(node)
            self._children(node)

    def _children(self, node: ast.AST) -> None:
        for child in children(node):
            self.walk(child)

    def _enter(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
    ) -> None:
        self.see(node)
        outer = self.scope
        outside: list[ast.AST] = []
        if isinstance(node, ast.ClassDef):
            outside = [*node.decorator_list, *node.bases, *node.keywords]
        else:
            outside = [*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)]
            if not isinstance(node, ast.Lambda):
                outside += node.decorator_list
        for part in outside:
            self.walk(part)
        self.scope = self.plugin.scopes[node]
        inside: Sequence[ast.AST] = [node.body] if isinstance(node, ast.Lambda) else node.body
        for statement in inside:
            self.walk(statement)
        self.scope = outer

    def _try(self, node: ast.Try) -> None:
        before = self.optional
        self.optional = before or any(_catches(h) for h in node.handlers)
        for statement in (*node.body, *node.orelse):
            self.walk(statement)
        self.optional = before
        for handler in node.handlers:
            # What stands in for something that failed to import is an alternative to it.
            self.optional = before or _catches_import(handler)
            for statement in handler.body:
                self.walk(statement)
        self.optional = before
        for statement in node.finalbody:
            self.walk(statement)

    def _if(self, node: ast.If | ast.IfExp) -> None:
        typing_only, optional = self.typing_only, self.optional
        self.walk(node.test)
        self.typing_only = typing_only or dotted_text(node.test) in _TYPE_CHECKING
        self.optional = optional or self._asks(node.test)
        for part in node.body if isinstance(node.body, list) else [node.body]:
            self.walk(part)
        self.typing_only = typing_only
        for part in node.orelse if isinstance(node.orelse, list) else [node.orelse]:
            self.walk(part)
        self.optional = optional

    def _asks(self, test: ast.expr) -> bool:
        """Whether a condition asks what the installed release has."""
        if isinstance(test, ast.Constant):
            return False
        return any(_probes(e) or self._calls_probe(e) for e in self._behind(test))

    def _behind(self, test: ast.expr) -> Iterator[ast.expr]:
        """The condition, and what the names in it were assigned."""
        yield test
        for node in walk(test):
            if isinstance(node, ast.Name):
                yield from self.plugin.assigned(node.id, self.scope)

    def _calls_probe(self, expression: ast.expr) -> bool:
        """Whether an expression calls a function of the plugin that asks."""
        return any(
            isinstance(value, Local)
            and not isinstance(value.node, ast.ClassDef)
            and _probes(value.node)
            for node in walk(expression)
            if isinstance(node, ast.Call)
            for value in self.plugin.evaluate(node.func, self.scope)
        )

    def see(self, node: ast.AST) -> None:
        raise NotImplementedError

    def add(
        self,
        how: str,
        ref: Ref,
        node: ast.AST,
        *,
        text: str = "",
        shape: str = "",
        optional: bool | None = None,
        replacement: Local | None = None,
        on_object: bool = False,
    ) -> None:
        use = Use(
            how,
            self.plugin.normal(ref),
            self.place(node),
            text,
            shape,
            self.optional if optional is None else optional,
            on_object,
            replacement,
        )
        self.uses.uses.append(use)


class _Patches(_Walker):
    """Finds assignments onto names of the package, and patch classes."""

    def _asks(self, test: ast.expr) -> bool:
        return False  # a patch that may not happen is a patch

    def see(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assigned(target, node.value, node)
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
            self._assigned(node.target, node.value, node)
        elif isinstance(node, ast.Call):
            self._called(node)
        elif isinstance(node, ast.ClassDef):
            info = self.plugin.classes[node]
            if info.target is not None:
                self._patch_class(info, info.target)

    def _assigned(self, target: ast.expr, value: ast.expr | None, node: ast.AST) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for part in target.elts:
                self._assigned(part, None, node)
            return
        if isinstance(target, ast.Attribute):
            name = (Constant(target.attr),)
            bases = self.plugin.evaluate(target.value, self.scope)
            if len(bases) == 1:
                self._patch(bases, name, value, node)
            elif any(isinstance(b, (Ref, Instance, LocalInstance)) for b in bases):
                for _ in self.plugin.per_call(self.scope):
                    bases = self.plugin.evaluate(target.value, self.scope)
                    self._patch(bases, name, value, node)

    def _called(self, call: ast.Call) -> None:
        name = dotted_text(call.func) or ""
        last = name.rpartition(".")[2]
        if name in ("setattr", "builtins.setattr") and len(call.args) == 3:
            base, attribute, value = call.args
        elif last == "setattr" and len(call.args) == 3 and "patch" in name.lower():
            base, attribute, value = call.args  # monkeypatch.setattr(target, name, value)
        elif last == "wrap_function_wrapper" and len(call.args) == 3:
            base, attribute, value = call.args
        elif last == "object" and name.endswith("patch.object") and len(call.args) >= 3:
            base, attribute, value = call.args[:3]
        else:
            return
        for _ in self.plugin.per_call(self.scope):
            bases: list[Value] = []
            for found in self.plugin.evaluate(base, self.scope):
                ref = self.plugin.ref_of_text(found.text) if isinstance(found, Constant) else None
                bases.append(ref if ref is not None else found)
            names = self.plugin.evaluate(attribute, self.scope)
            self._patch(tuple(bases), names, value, call)

    def _patch(
        self,
        bases: Sequence[Value],
        names: Sequence[Value],
        value: ast.expr | None,
        node: ast.AST,
    ) -> None:
        for base in bases:
            if isinstance(base, Ref) and self._is_constant(base):
                continue
            owner = base.of if isinstance(base, Instance) else base
            if isinstance(owner, LocalInstance):
                self._written_on_own(owner.of, names)
            if not isinstance(owner, Ref):
                continue
            for name in names:
                if not isinstance(name, Constant):
                    continue
                ref = self.plugin.normal(Ref(owner.module, owner.name)).child(name.text)
                self.uses.written.add(ref)
                if not isinstance(base, Instance):
                    self._record(owner, ref, value, node)
                elif len(bases) == 1:
                    self._record_on_object(ref, value, node)

    def _is_constant(self, ref: Ref) -> bool:
        found = self.plugin.definition(self.plugin.normal(ref))
        return found is not None and found.kind in ("constant", "function")

    def _written_on_own(self, local: Local, names: Sequence[Value]) -> None:
        """An attribute set on an object of the plugin's subclass or patch is not the base's."""
        info = self.plugin.classes.get(local.node)
        if info is None or info.target is None:
            return
        for name in names:
            if isinstance(name, Constant):
                self.uses.written.add(self.plugin.normal(info.target).child(name.text))

    def _record(self, owner: Ref, ref: Ref, value: ast.expr | None, node: ast.AST) -> None:
        found = self.plugin.evaluate(value, self.scope) if value is not None else ()
        locals_ = [v for v in found if isinstance(v, Local)]
        replacement = locals_[0] if len(locals_) == 1 else None
        # An assignment that puts the original back is no patch of its own.
        if any(isinstance(v, Ref) and self.plugin.normal(v) == ref for v in found):
            return
        self.add("patch", ref, node, optional=False, replacement=replacement)
        if replacement is not None and self.plugin.is_class(owner):
            self._receives(replacement, owner)

    def _record_on_object(self, ref: Ref, value: ast.expr | None, node: ast.AST) -> None:
        """A method of one object replaced by a function: patched, for that object."""
        found = self.plugin.definition(ref)
        values = self.plugin.evaluate(value, self.scope) if value is not None else ()
        if found is None or found.kind != "function" or len(values) != 1:
            return
        if isinstance(values[0], Local) and not isinstance(values[0].node, ast.ClassDef):
            self.add("patch", ref, node, optional=False, replacement=values[0], on_object=True)

    def _receives(self, function: Local, owner: Ref) -> None:
        node = function.node
        decorators = {dotted_text(d) for d in getattr(node, "decorator_list", ())}
        if isinstance(node, ast.ClassDef) or "staticmethod" in decorators:
            return
        value: Value = owner if "classmethod" in decorators else Instance(owner)
        known = self.plugin.receivers.setdefault(node, [])
        if value not in known:
            known.append(value)

    def _patch_class(self, info: PluginClass, target: Ref) -> None:
        target = self.plugin.normal(target)
        for name, bindings in info.scope.bindings.items():
            if name in _CLASS_MACHINERY:
                continue
            ref = target.child(name)
            node = bindings[-1].node or bindings[-1].expression or info.node
            values = self.plugin.lookup(name, info.scope)
            kept = [v for v in values if isinstance(v, Ref)]
            self.uses.written.add(ref)
            if kept and self.plugin.normal(kept[0]) != ref:
                continue  # the original, kept under another name: read, not replaced
            if bindings[-1].how in ("import", "from"):
                continue
            locals_ = [v for v in values if isinstance(v, Local)]
            self.add(
                "patch",
                ref,
                node,
                optional=False,
                replacement=locals_[0] if len(locals_) == 1 else None,
            )
        for name in info.on_self:
            self.uses.written.add(target.child(name))


class _Everything(_Walker):
    """Finds imports, subclasses, calls, reads and anchors."""

    def see(self, node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self._decorated(node)
        if isinstance(node, ast.ImportFrom):
            self._import_from(node)
        elif isinstance(node, ast.Import):
            self._import(node)
        elif isinstance(node, ast.ClassDef):
            self._class(node)
        elif isinstance(node, ast.Call):
            self._call(node)
        elif isinstance(node, ast.Attribute):
            self._read(node)
        elif isinstance(node, ast.Compare):
            self._compare(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            self._named_in_text(node, node.value)

    def _import_from(self, node: ast.ImportFrom) -> None:
        if node.level or not node.module or not self.plugin.ours(node.module):
            return
        if self.typing_only:
            return
        for alias in node.names:
            if alias.name != "*":
                self.add("import", Ref(node.module, alias.name), alias)

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            if self.plugin.ours(alias.name) and not self.typing_only:
                self.add("import", Ref(alias.name), alias)

    def _named_in_text(self, node: ast.Constant, text: str) -> None:
        """A class or function named by its path in a string, where the release has it."""
        if "." not in text or not self.plugin.ours(text.replace(":", ".")):
            return
        ref = self.plugin.ref_of_text(text)
        found = self.plugin.definition(ref) if ref is not None else None
        if ref is not None and found is not None and found.kind in ("class", "function"):
            self.add("read", ref, node)

    # --- subclasses ------------------------------------------------------------------------

    def _class(self, node: ast.ClassDef) -> None:
        info = self.plugin.classes[node]
        for base in self._roots(info):
            self.uses.subclasses.setdefault(self.plugin.normal(base), []).append(info)
            if base in info.bases:
                self.add("subclass", base, node)
            for name, bindings in info.scope.bindings.items():
                if name in _CLASS_MACHINERY or bindings[-1].how in ("import", "from"):
                    continue
                member = bindings[-1].node or bindings[-1].expression or node
                locals_ = [v for v in self.plugin.lookup(name, info.scope) if isinstance(v, Local)]
                self.add(
                    "override",
                    base.child(name),
                    member,
                    replacement=locals_[0] if len(locals_) == 1 else None,
                )

    def _roots(self, info: PluginClass, depth: int = 0) -> list[Ref]:
        """The classes of the package at the end of a plugin class's bases."""
        roots = []
        for base in info.bases:
            if isinstance(base, Ref):
                roots.append(base)
            elif isinstance(base, Local) and base.node in self.plugin.classes and depth < 8:
                roots.extend(self._roots(self.plugin.classes[base.node], depth + 1))
        return roots

    # --- calls and reads -------------------------------------------------------------------

    def _call(self, call: ast.Call) -> None:
        name = dotted_text(call.func) or ""
        if name in ("getattr", "hasattr") and len(call.args) >= 2:
            self._asked(call, name)
        self._anchors(call)
        prepared = partial_call(call)
        if prepared is not None:
            self._call(prepared)
        called = self.plugin.evaluate(call.func, self.scope)
        targets = [v for v in called if isinstance(v, (Ref, Bound))]
        if not targets or any(isinstance(v, Unknown) for v in called):
            return
        # Where a name can be several things, which arguments go where is open.
        optional = True if len(called) > 1 else None
        for target in targets:
            ref = self.plugin.normal(target.ref if isinstance(target, Bound) else target)
            if ref.name:
                skip = self._passes_receiver(call, ref, target)
                text = call_text(call, skip_first=skip)
                shape = call_shape(call, skip_first=skip)
                self.add("call", ref, call, text=text, shape=shape, optional=optional)

    def _decorated(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        """A decorator is called with what it decorates."""
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call):
                continue
            for value in self.plugin.evaluate(decorator, self.scope):
                if isinstance(value, Ref) and value.name:
                    self.add("call", value, decorator, text=f"({node.name})", shape="1")

    def _passes_receiver(self, call: ast.Call, ref: Ref, target: Value) -> bool:
        """Whether the first argument is the object: `Class.method(self, x)`."""
        if isinstance(target, Bound) or not self._is_method(ref) or self.plugin.is_class(ref):
            return False
        if self._bound_to_class(call, ref):
            return False
        return bool(call.args) and not isinstance(call.args[0], ast.Starred)

    def _is_method(self, ref: Ref) -> bool:
        owner, _, _ = ref.name.rpartition(".")
        return bool(owner) and self.plugin.is_class(Ref(ref.module, owner))

    def _bound_to_class(self, call: ast.Call, ref: Ref) -> bool:
        """Whether `Class.method` is a static or class method, called without a receiver."""
        found = self.plugin.definition(ref)
        decorators = (
            {dotted_text(d) for d in getattr(found.node, "decorator_list", ())} if found else set()
        )
        if "staticmethod" in decorators:
            return True
        return "classmethod" in decorators and not (dotted_text(call.func) or "").endswith(
            "__func__"
        )

    def _read(self, node: ast.Attribute) -> None:
        if self.typing_only:
            return
        for base in self.plugin.evaluate(node.value, self.scope):
            if isinstance(base, Unknown):
                return
        bases = self.plugin.evaluate(node.value, self.scope)
        single = len(bases) == 1
        for base in bases:
            if isinstance(base, Ref):
                if not isinstance(node.ctx, ast.Load):
                    continue  # a patch
                for value in self.plugin.attribute(base, node.attr):
                    if isinstance(value, Ref):
                        self.add("read", value, node)
                    elif isinstance(value, Bound) and single:
                        self.add("member", value.ref, node)
            elif isinstance(base, Instance) and single:
                self.add("member", base.of.child(node.attr), node)
            elif isinstance(base, (LocalInstance, Super, Local)) and single:
                self._read_inherited(base, node)

    def _read_inherited(self, base: LocalInstance | Super | Local, node: ast.Attribute) -> None:
        """A member that a plugin class does not have itself, read off an object of it."""
        local = base.of if isinstance(base, (LocalInstance, Super)) else base
        info = self.plugin.classes.get(local.node)
        if info is None:
            return
        if not isinstance(base, Super) and node.attr in info.scope.bindings:
            return
        # What the plugin sets on self may be the package's own: the release tells.
        if node.attr in info.on_self and self.plugin.release is None:
            return
        for ref in self._inherited_from(info, node.attr):
            self.add("member", ref.child(node.attr), node)

    def _inherited_from(self, info: PluginClass, name: str, depth: int = 0) -> list[Ref]:
        """The class of the package from which a member comes, [] where the plugin has it."""
        for base in (*info.bases, *([info.target] if info.target else [])):
            if isinstance(base, Local) and base.node in self.plugin.classes and depth < 8:
                inner = self.plugin.classes[base.node]
                if name in inner.scope.bindings:
                    return []
                found = self._inherited_from(inner, name, depth + 1)
                if found:
                    return found
            elif isinstance(base, Ref):
                if self.plugin.release is None:
                    return [base]
                owner = self.plugin.definition(base)
                if owner is not None and self.plugin.release.member(owner, name) is not None:
                    return [base]
        return []

    def _asked(self, call: ast.Call, how: str) -> None:
        """`getattr(x, "name")` reads; with a default, or hasattr, the plugin copes without."""
        names = self.plugin.evaluate(call.args[1], self.scope)
        bases = self.plugin.evaluate(call.args[0], self.scope)
        optional = True if how == "hasattr" or len(call.args) > 2 else None
        for name in names:
            for base in bases:
                if isinstance(name, Constant) and isinstance(base, Ref):
                    self.add("read", base.child(name.text), call, optional=optional)
                elif isinstance(name, Constant) and isinstance(base, Instance) and len(bases) == 1:
                    self.add("member", base.of.child(name.text), call, optional=optional)

    # --- anchors ---------------------------------------------------------------------------

    def _anchors(self, call: ast.Call) -> None:
        """`source.replace(anchor, ...)`, `.count`, `.index`, `.find`, and `re.sub` of an anchor."""
        if not isinstance(call.func, ast.Attribute) or not call.args:
            return
        if call.func.attr in ("replace", "count", "index", "find", "partition", "split"):
            self._anchor(call.func.value, call.args[0], call)

    def _compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1 and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            self._anchor(node.comparators[0], node.left, node)

    def _anchor(self, source: ast.expr, anchor: ast.expr, node: ast.AST) -> None:
        refs = [v.of for v in self.plugin.evaluate(source, self.scope) if isinstance(v, SourceText)]
        if not refs:
            return
        for _ in self.plugin.per_call(self.scope):
            for text in self.plugin.evaluate(anchor, self.scope):
                if isinstance(text, Constant) and text.text.strip():
                    for ref in refs:
                        self.add("anchor", ref, node, text=text.text, optional=False)


def _catches(handler: ast.ExceptHandler) -> bool:
    """Whether a handler catches a missing name and goes on without raising."""
    if handler.body and isinstance(handler.body[-1], ast.Raise):
        return False
    return handler.type is None or any(
        (dotted_text(t) or "").rpartition(".")[2] in _CAUGHT for t in _types(handler)
    )


def _catches_import(handler: ast.ExceptHandler) -> bool:
    return _catches(handler) and any(
        (dotted_text(t) or "") in ("ImportError", "ModuleNotFoundError", "AttributeError")
        for t in _types(handler)
    )


@functools.lru_cache(maxsize=4096)
def _probes(node: ast.AST) -> bool:
    """Whether code asks what the installed release has, by hasattr, a signature or a version."""
    for inner in walk(node):
        name = ""
        if isinstance(inner, ast.Name):
            name = inner.id
        elif isinstance(inner, ast.Attribute):
            name = inner.attr
        if name in _PROBES or "version" in name.lower():
            return True
    return False


def _types(handler: ast.ExceptHandler) -> list[ast.expr]:
    if isinstance(handler.type, ast.Tuple):
        return handler.type.elts
    return [handler.type] if handler.type is not None else []


def replacement_signature(use: Use) -> str | None:
    """The signature of the function that a use puts in place, or None."""
    node = use.replacement.node if use.replacement is not None else None
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        text = signature_text(node)
        if use.on_object:
            text = f"(self, {text[1:]}" if text != "()" else "(self)"
        return text
    return None
