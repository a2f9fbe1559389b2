"""Follow names through a release: imports, re-exports, aliases, star imports, inheritance.

Answers are witnesses: where a name was found and over which steps. Where source does not tell (a
module outside the tree, a module-level `__getattr__`, a base class that is computed) the answer
says so instead of guessing. Knows no surface and no verdict.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_drift import normal
from vllm_drift.facts import Assignment, Class, Function, Import
from vllm_drift.findings import Location
from vllm_drift.model import Binding, FactStore, ModuleModel, load_module
from vllm_drift.tree import SourceTree

__all__ = ["Member", "Resolution", "Resolver", "preferred"]

_KNOWN_OUTSIDE = frozenset(
    [
        "object",
        "ABC",
        "Generic",
        "Protocol",
        "NamedTuple",
        "TypedDict",
        "Enum",
        "IntEnum",
        "StrEnum",
        "IntFlag",
        "Flag",
        "str",
        "int",
        "float",
        "tuple",
        "list",
        "dict",
        "set",
        "type",
        "Exception",
        "ValueError",
        "RuntimeError",
        "Struct",
    ]
)
"""Bases from outside the tree that add no attribute of a name somebody would look for here."""


@dataclass(frozen=True)
class Resolution:
    """Where a name leads.

    `status` is `found` (a definition in the tree), `outside` (the definition is in another
    package),
    `missing` (nothing binds the name) or `unknown` (source does not tell; `reason` says why).
    """

    status: str
    module: str
    qualname: str
    kind: str = ""
    """`function`, `class`, `assignment` or `module`."""
    line: int = 1
    path: str = ""
    hops: tuple[str, ...] = ()
    """The modules on the way that only hand the name on, `module:line`, first to last."""
    reason: str = ""

    @property
    def found(self) -> bool:
        """Whether there is a definition in the tree."""
        return self.status == "found"

    @property
    def target(self) -> str:
        """`module:qualified.name`."""
        return f"{self.module}:{self.qualname}" if self.qualname else self.module

    @property
    def location(self) -> Location | None:
        """Where the definition is, or the place where the search ended."""
        return Location(self.path, self.line) if self.path else None


@dataclass(frozen=True)
class Member:
    """An attribute of a class: which class of the hierarchy has it, and what it is there."""

    kind: str
    """`method`, `property`, `field`, `class`, `self` (assigned to self in a method)."""
    module: str
    owner: str
    """Qualified name of the class that has it."""
    name: str
    location: Location


class Resolver:
    """Follows names in one release. Keeps the models of the modules that it met."""

    def __init__(self, tree: SourceTree, store: FactStore | None = None) -> None:
        self.tree = tree
        self.store = store if store is not None else FactStore()
        self._models: dict[str, ModuleModel | None] = {}
        self._resolved: dict[tuple[str, str, bool], Resolution] = {}

    def __repr__(self) -> str:
        return f"Resolver({self.tree!r})"

    def model(self, dotted: str) -> ModuleModel | None:
        """The model of a module, or None if the tree has none."""
        if dotted not in self._models:
            self._models[dotted] = load_module(self.tree, dotted, self.store)
        return self._models[dotted]

    def save(self) -> None:
        """Put what was parsed into the cache."""
        for model in self._models.values():
            if model is not None:
                model.save()

    def where(self, dotted: str, line: int = 1) -> Location | None:
        """A location in a module, or None if there is no such module."""
        model = self.model(dotted)
        return None if model is None else Location(model.path, line)

    # names ----------------------------------------------------------------------------------------

    def resolve(self, module: str, name: str, *, typing: bool = False) -> Resolution:
        """Find what a dotted name means in a module's namespace.

        `typing` also follows what only a type checker sees. Methods are found in base classes too.
        """
        key = (module, name, typing)
        if key not in self._resolved:
            self._resolved[key] = self._resolve(module, name.split("."), typing, (), frozenset())
        return self._resolved[key]

    def _resolve(
        self,
        module: str,
        parts: list[str],
        typing: bool,
        hops: tuple[str, ...],
        seen: frozenset[tuple[str, str]],
    ) -> Resolution:
        name, rest = parts[0], parts[1:]
        model = self.model(module)
        if model is None:
            status = "missing" if self._inside(module) else "outside"
            return Resolution(
                status, module, ".".join(parts), hops=hops, reason=f"no module {module}"
            )
        if (module, name) in seen:
            return Resolution(
                "unknown", module, name, path=model.path, hops=hops, reason="imports in a circle"
            )
        seen |= {(module, name)}
        bindings = model.bindings(name)
        if model.broken is not None:
            return Resolution(
                "unknown", module, name, path=model.path, hops=hops,
                reason=f"{model.path} cannot be parsed: {model.broken}",
            )  # fmt: skip
        bindings = tuple(b for b in bindings if typing or b.at_runtime)
        if not bindings:
            return self._unbound(model, parts, typing, hops, seen)
        outcomes = [
            self._follow(model, binding, rest, typing, hops, seen)
            for binding in preferred(bindings)
        ]
        return next((o for o in outcomes if o.found), outcomes[0])

    def _follow(
        self,
        model: ModuleModel,
        binding: Binding,
        rest: list[str],
        typing: bool,
        hops: tuple[str, ...],
        seen: frozenset[tuple[str, str]],
    ) -> Resolution:
        fact = binding.fact
        if isinstance(fact, Import):
            hops = (*hops, f"{model.dotted}:{fact.line}")
            target = model.imported_from(fact)
            if not fact.name:
                base = target if binding.name != target.partition(".")[0] else binding.name
                return self._in_module(base, rest, typing, hops, seen, model, fact.line)
            if self.model(target) is not None:
                found = self._resolve(target, [fact.name, *rest], typing, hops, seen)
                if found.status != "missing" or self.model(f"{target}.{fact.name}") is None:
                    return found
            return self._in_module(
                f"{target}.{fact.name}", rest, typing, hops, seen, model, fact.line
            )
        if isinstance(fact, Assignment):
            if re.fullmatch(r"[A-Za-z_][\w.]*", fact.value) and fact.value not in (
                "None",
                "True",
                "False",
            ):
                hop = (*hops, f"{model.dotted}:{fact.line}")
                alias = self._resolve(
                    model.dotted, [*fact.value.split("."), *rest], typing, hop, seen
                )
                if alias.found:
                    return alias
            if rest:
                return Resolution(
                    "unknown",
                    model.dotted,
                    ".".join([binding.name, *rest]),
                    "assignment",
                    binding.line,
                    model.path,
                    hops,
                    f"{binding.name} is {_short(fact.value)}, computed at run time",
                )
            return Resolution(
                "found", model.dotted, binding.name, "assignment", binding.line, model.path, hops
            )
        if not rest:
            return Resolution(
                "found", model.dotted, binding.name, binding.kind, binding.line, model.path, hops
            )
        if binding.kind == "class":
            return self._class_member(model, binding.name, rest, hops)
        if rest[0] == "<locals>":
            function = model.function(".".join([binding.name, *rest]))
            if function is not None:
                return Resolution(
                    "found",
                    model.dotted,
                    function.qualname,
                    "function",
                    function.line,
                    model.path,
                    hops,
                )
        return Resolution(
            "missing",
            model.dotted,
            ".".join([binding.name, *rest]),
            "",
            binding.line,
            model.path,
            hops,
            f"{binding.name} is a function",
        )

    def _in_module(
        self,
        module: str,
        rest: list[str],
        typing: bool,
        hops: tuple[str, ...],
        seen: frozenset[tuple[str, str]],
        importer: ModuleModel,
        line: int,
    ) -> Resolution:
        """A name bound to a module: go on inside it."""
        while rest and self.model(f"{module}.{rest[0]}") is not None:
            module, rest = f"{module}.{rest[0]}", rest[1:]
        model = self.model(module)
        if model is None:
            status = "missing" if self._inside(module) else "outside"
            head, _, last = module.rpartition(".")
            return Resolution(
                status, head or module, ".".join([last, *rest]), "", line, importer.path, hops,
                f"{module} is not in {self.tree.label}",
            )  # fmt: skip
        if not rest:
            return Resolution("found", module, "", "module", 1, model.path, hops)
        return self._resolve(module, rest, typing, hops, seen)

    def _unbound(
        self,
        model: ModuleModel,
        parts: list[str],
        typing: bool,
        hops: tuple[str, ...],
        seen: frozenset[tuple[str, str]],
    ) -> Resolution:
        """No statement binds the name: star imports, submodules, `__getattr__`."""
        name = parts[0]
        outside: list[str] = []
        for star in model.star_imports():
            target = model.imported_from(star)
            if self.model(target) is None:
                outside.append(target)
                continue
            if not self.exports(target, name):
                continue
            found = self._resolve(
                target, parts, typing, (*hops, f"{model.dotted}:{star.line}"), seen
            )
            if found.status != "missing":
                return found
        if model.is_package and self.model(f"{model.dotted}.{name}") is not None:
            return self._in_module(
                f"{model.dotted}.{name}", parts[1:], typing, hops, seen, model, 1
            )
        getattr_ = [b for b in model.bindings("__getattr__") if b.kind == "function"]
        if getattr_:
            lazy = _lazy_target(model, name)
            line = _answered(model, name)
            if lazy is None and line is not None and len(parts) == 1:
                return Resolution(
                    "found", model.dotted, name, "assignment", line, model.path, hops,
                    f"{model.dotted} answers it in its __getattr__",
                )  # fmt: skip
            if lazy is None and _answers_tables_only(model):
                return Resolution(
                    "missing", model.dotted, ".".join(parts), "", getattr_[0].line, model.path,
                    hops, f"{model.dotted} binds no {name}, and its __getattr__ knows none",
                )  # fmt: skip
            if lazy is not None:
                target, attribute = lazy
                hop = (*hops, f"{model.dotted}:{getattr_[0].line}")
                return self._resolve(target, [attribute, *parts[1:]], typing, hop, seen)
            return Resolution(
                "unknown", model.dotted, ".".join(parts), "", getattr_[0].line, model.path, hops,
                f"{model.dotted} answers unknown names in its __getattr__",
            )  # fmt: skip
        if outside:
            return Resolution(
                "unknown", model.dotted, ".".join(parts), "", 1, model.path, hops,
                f"it may come with the star import from {outside[0]}, which is not in "
                f"{self.tree.label}",
            )  # fmt: skip
        return Resolution(
            "missing", model.dotted, ".".join(parts), "", 1, model.path, hops,
            f"{model.dotted} binds no {name}",
        )  # fmt: skip

    def exports(self, module: str, name: str) -> bool:
        """Whether a star import of the module brings the name, as far as `__all__` tells."""
        model = self.model(module)
        if model is None:
            return False
        listed: set[object] = set()
        complete = False
        for binding in model.bindings("__all__"):
            if isinstance(binding.fact, Assignment):
                values = normal.literal_values(binding.fact.value)
                if values is None or values[1]:
                    return True
                listed |= values[0]
                complete = True
        return name in listed if complete else not name.startswith("_")

    def _inside(self, module: str) -> bool:
        return module.partition(".")[0] == self.tree.package or any(
            module.startswith(f"{top}.") or module == top for top in (self.tree.package,)
        )

    # classes --------------------------------------------------------------------------------------

    def _class_member(
        self, model: ModuleModel, cls: str, rest: list[str], hops: tuple[str, ...]
    ) -> Resolution:
        name = ".".join([cls, *rest])
        members = list(self.mro(model.dotted, cls))
        for owner_module, owner in members:
            owner_model = self.model(owner_module)
            if owner_model is None or owner is None:
                continue
            qualname = ".".join([owner, *rest])
            places = owner_model.places(qualname)
            if len(places) == 1:
                kind, line = places[0]
                return Resolution(
                    "found", owner_module, qualname, kind, line, owner_model.path, hops
                )
            function = owner_model.function(qualname)
            if function is not None:
                return Resolution(
                    "found",
                    owner_module,
                    qualname,
                    "function",
                    function.line,
                    owner_model.path,
                    hops,
                )
            inner = owner_model.class_(qualname)
            if inner is not None:
                return Resolution(
                    "found", owner_module, qualname, "class", inner.line, owner_model.path, hops
                )
            if len(rest) == 1:
                here = owner_model.class_(owner)
                for field in here.fields if here is not None else ():
                    if field.target == rest[0]:
                        return Resolution(
                            "found", owner_module, qualname, "assignment", field.line,
                            owner_model.path, hops,
                        )  # fmt: skip
        here = model.class_(cls)
        line = here.line if here is not None else 1
        unknown = [owner_module for owner_module, owner in members if owner is None]
        if unknown:
            return Resolution(
                "unknown", model.dotted, name, "", line, model.path, hops,
                f"{cls} has a base outside {self.tree.label}: {unknown[0]}",
            )  # fmt: skip
        return Resolution(
            "missing", model.dotted, name, "", line, model.path, hops, f"{cls} has no {rest[0]}"
        )

    def mro(self, module: str, cls: str) -> Iterator[tuple[str, str | None]]:
        """Yield the class and its bases, depth first, as (module, qualified name).

        A base whose source is not in the tree is yielded as (its text, None), except those that add
        no attributes of their own (`object`, `ABC`, `Protocol`, ...).
        """
        return self._mro(module, cls, set())

    def _mro(
        self, module: str, cls: str, seen: set[tuple[str, str]]
    ) -> Iterator[tuple[str, str | None]]:
        if (module, cls) in seen:
            return
        seen.add((module, cls))
        model = self.model(module)
        facts = model.class_header(cls) if model is not None else None
        if facts is None:
            return
        yield module, cls
        for base in facts.bases:
            head = base.partition("[")[0]
            if head.rpartition(".")[2] in _KNOWN_OUTSIDE:
                continue
            found = self.resolve(module, head) if re.fullmatch(r"[\w.]+", head) else None
            if found is not None and found.found and found.kind == "class":
                yield from self._mro(found.module, found.qualname, seen)
            else:
                yield base, None

    def class_facts(self, module: str, cls: str) -> Class | None:
        """The class's own facts, or None."""
        model = self.model(module)
        return None if model is None else model.class_(cls)

    def function_facts(self, module: str, name: str) -> Function | None:
        """The function that a dotted name in a module leads to, in its own module's place; or
        None.
        """
        found = self.resolve(module, name)
        if not found.found or found.kind != "function":
            return None
        model = self.model(found.module)
        return None if model is None else model.function(found.qualname)

    def member(self, module: str, cls: str, name: str) -> Member | None:
        """Find an attribute of a class or of its bases: method, property, field, or assigned to
        self.
        """
        for owner_module, owner in self.mro(module, cls):
            if owner is None:
                continue
            model = self.model(owner_module)
            if model is None:
                continue
            found = _own_member(model, owner, name)
            if found is not None:
                return found
        return None

    def open_bases(self, module: str, cls: str) -> tuple[str, ...]:
        """Why the class may have attributes that source does not show: bases outside the tree, and
        `__getattr__`.
        """
        reasons = []
        for owner_module, owner in self.mro(module, cls):
            if owner is None:
                reasons.append(f"base {owner_module} is not in {self.tree.label}")
                continue
            model = self.model(owner_module)
            if model is not None and model.function(f"{owner}.__getattr__") is not None:
                reasons.append(f"{owner} has a __getattr__")
        return tuple(reasons)


def _own_member(model: ModuleModel, owner: str, name: str) -> Member | None:
    qualname = f"{owner}.{name}"
    cls = model.class_(owner) if not model.places(qualname) else model.class_header(owner)
    if cls is None:
        return None
    function = model.header(qualname) or next(iter(model.functions(qualname)), None)
    if function is not None:
        kind = "property" if function.kind == "property" else "method"
        return Member(kind, model.dotted, owner, name, Location(model.path, function.line))
    for field in cls.fields:
        if field.target == name and field.operator != "del":
            return Member("field", model.dotted, owner, name, Location(model.path, field.line))
    inner = model.class_(qualname)
    if inner is not None:
        return Member("class", model.dotted, owner, name, Location(model.path, inner.line))
    line = model.assigned_to_self(owner, name)
    if line is not None:
        return Member("self", model.dotted, owner, name, Location(model.path, line))
    for function in model.methods_mentioning(owner, f".{name}"):
        if not function.signature.parameters or function.kind == "staticmethod":
            continue
        me = function.signature.parameters[0].name
        for use in function.attributes:
            if use.store and use.value == me and use.name == name:
                return Member("self", model.dotted, owner, name, Location(model.path, use.line))
    return None


def preferred(bindings: tuple[Binding, ...]) -> list[Binding]:
    """Bindings in the order in which to try them: unconditional ones first, the last one of those;
    then conditional ones in source order, `None` placeholders at the end.
    """

    def is_none(binding: Binding) -> bool:
        return isinstance(binding.fact, Assignment) and binding.fact.value in ("None", "")

    always = [b for b in reversed(bindings) if not b.condition and not is_none(b)]
    sometimes = [b for b in bindings if b.condition and not is_none(b)]
    return always + sometimes + [b for b in bindings if is_none(b)]


def _lazy_target(model: ModuleModel, name: str) -> tuple[str, str] | None:
    """What a table for a module-level `__getattr__` says of a name: `"Name":
    ".module:attribute"`.
    """
    quoted = re.escape(name)
    match = re.search(rf"""["']{quoted}["']\s*:\s*["'](\.*)([\w.]+):([\w.]+)["']""", model.text)
    if match is None:
        return None
    dots, module, attribute = match.groups()
    fact = Import(module, attribute, name, 1, len(dots))
    return model.imported_from(fact), attribute


def _answered(model: ModuleModel, name: str) -> int | None:
    """The line where a module with a `__getattr__` deals with a name: a key of a table, or a
    test.
    """
    quoted = re.escape(name)
    match = re.search(rf"""["']{quoted}["']\s*:|==\s*["']{quoted}["']""", model.text)
    return model.text.count("\n", 0, match.start()) + 1 if match else None


def _answers_tables_only(model: ModuleModel) -> bool:
    """Whether a module's `__getattr__` answers the keys of literal tables, and raises for the rest.

    `if name in TABLE: return ...` and `if name == "x": ...`, then `raise AttributeError`, where
    each table is one literal dict that nothing adds to.
    """
    try:
        node = ast.parse(model.text_of("__getattr__") or "").body[-1]
    except (SyntaxError, ValueError, IndexError):
        return False
    if not isinstance(node, ast.FunctionDef) or not node.args.args:
        return False
    parameter, rest = node.args.args[0].arg, node.body
    *tests, last = [s for s in rest if not (isinstance(s, ast.Expr) and _is_text(s.value))]
    raised = ast.unparse(last.exc) if isinstance(last, ast.Raise) and last.exc else ""
    if not raised.startswith("AttributeError"):
        return False
    for statement in tests:
        test = statement.test if isinstance(statement, ast.If) and not statement.orelse else None
        if not isinstance(test, ast.Compare) or len(test.ops) != 1:
            return False
        table, compared = test.comparators[0], ast.unparse(test.left) == parameter
        if compared and isinstance(test.ops[0], ast.Eq) and _is_text(table):
            continue
        if not (compared and isinstance(test.ops[0], ast.In) and isinstance(table, ast.Name)):
            return False
        if not _is_literal_table(model, table.id):
            return False
    return True


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_literal_table(model: ModuleModel, name: str) -> bool:
    """Whether a name is bound once, to a dict with literal keys, and nothing adds to it."""
    bindings = [b for b in model.bindings(name) if b.at_runtime]
    if len(bindings) != 1 or not isinstance(bindings[0].fact, Assignment):
        return False
    try:
        table = ast.parse(bindings[0].fact.value, mode="eval").body
    except (SyntaxError, ValueError):
        return False
    added = rf"\b{re.escape(name)}(?:\.(?:update|setdefault)\(|\[[^\]\n]*\]\s*=[^=]|\s*\|=)"
    return (
        isinstance(table, ast.Dict)
        and all(key is not None and _is_text(key) for key in table.keys)
        and re.search(added, model.text) is None
    )


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
