"""Reads a plugin's modules and says what an expression in them stands for.

Names are followed through imports, local aliases, module globals that a function assigns, class
bodies, `self`, loops over literal tuples, and the arguments of calls inside the plugin. What
source does not tell is `UNKNOWN`; nothing is guessed. This module must not know surfaces, nor
which uses of a name matter (`infer_uses`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_drift.infer_release import (
    Definition,
    Release,
    annotation_names,
    child_nodes,
    parse_quietly,
)
from vllm_drift.infer_values import (
    UNKNOWN,
    Bound,
    Constant,
    Instance,
    Local,
    LocalInstance,
    PluginModule,
    Ref,
    SourceText,
    Super,
    Unknown,
    Value,
)
from vllm_drift.tree import SourceTree

__all__ = ["Plugin", "PluginClass", "Scope", "children", "dotted_text"]

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Values = tuple[Value, ...]
_DEPTH = 24
_MANY = 12
_METADATA = frozenset(
    [
        "__name__",
        "__qualname__",
        "__module__",
        "__doc__",
        "__dict__",
        "__class__",
        "__code__",
        "__annotations__",
        "__file__",
        "__path__",
        "__signature__",
        "__defaults__",
        "__kwdefaults__",
        "__mro__",
        "__bases__",
    ]
)
_SAME_OBJECT = frozenset(("__func__", "__wrapped__"))
_COPIES = frozenset(
    ("copy.copy", "copy.deepcopy", "copy", "deepcopy", "dataclasses.replace", "replace")
)
_TEXT_METHODS = frozenset(("replace", "strip", "lstrip", "rstrip", "expandtabs"))


@dataclass(eq=False)
class Scope:
    """A module, class or function of the plugin and the names that it binds."""

    kind: str
    node: ast.AST
    module: str
    qualname: str
    parent: Scope | None
    bindings: dict[str, list[_Binding]] = field(default_factory=dict)
    globals: set[str] = field(default_factory=set)
    nonlocals: set[str] = field(default_factory=set)

    @property
    def top(self) -> Scope:
        """The scope of the module."""
        scope = self
        while scope.parent is not None:
            scope = scope.parent
        return scope

    def enclosing(self, kind: str) -> Scope | None:
        """The nearest scope of a kind, this one included."""
        scope: Scope | None = self
        while scope is not None and scope.kind != kind:
            scope = scope.parent
        return scope


@dataclass(eq=False)
class _Binding:
    """One way in which a name gets its value.

    `how` is `value` (of `expression`), `element` (of `expression`), `annotated` (an object of the
    class that `expression` names), `import`, `from`, `definition`, `parameter` or `unknown`.
    """

    how: str
    scope: Scope
    expression: ast.expr | None = None
    node: ast.AST | None = None
    index: int = 0


@dataclass(eq=False)
class PluginClass:
    """A class of the plugin: its bases, and the target where it is a `Patch[Target]`."""

    local: Local
    scope: Scope
    node: ast.ClassDef
    target: Ref | None = None
    bases: Values = ()
    on_self: dict[str, list[tuple[ast.expr | None, Scope]]] = field(default_factory=dict)


@dataclass(frozen=True)
class CallSite:
    """A call inside the plugin."""

    call: ast.Call
    scope: Scope


class Plugin:
    """The modules of one plugin.

    Args:
        tree: The plugin's source.
        package: The import package that the plugin is for.
        release: A release of that package, where one is at hand: it tells classes from functions
            and of which class a field's value is.
    """

    def __init__(
        self, tree: SourceTree, *, package: str = "vllm", release: Release | None = None
    ) -> None:
        self.tree = tree
        self.package = package
        self.release = release
        self.unreadable: list[str] = []
        self.modules: dict[str, Scope] = {}
        self.scopes: dict[ast.AST, Scope] = {}
        self.classes: dict[ast.AST, PluginClass] = {}
        self.receivers: dict[ast.AST, list[Value]] = {}
        """What the first parameter of a function is, where it becomes a method of the package."""
        self.imported_modules: set[str] = {package}
        self._calls: dict[str, list[CallSite]] = {}
        self._memo: dict[tuple[int, int], Values] = {}
        self._names: dict[tuple[int, str], Values] = {}
        self._active: set[tuple[int, str]] = set()
        self._cuts = 0
        """How often a cycle was cut short: a value found meanwhile is not remembered."""
        self._overrides: dict[tuple[ast.AST, str], Values] = {}
        for dotted in tree.modules():
            if not _is_test(dotted):
                self._read(dotted)
        for info in self.classes.values():
            self._read_bases(info)
        self.forget()

    def forget(self) -> None:
        """Drop remembered values, after `receivers` has changed."""
        self._memo.clear()
        self._names.clear()

    # --- reading ---------------------------------------------------------------------------

    def _read(self, dotted: str) -> None:
        text = self.tree.text(dotted)
        tree = parse_quietly(text or "")
        if tree is None:
            self.unreadable.append(self.tree.path(dotted))
            return
        scope = Scope("module", tree, dotted, "", None)
        self.modules[dotted] = scope
        self.scopes[tree] = scope
        _Reader(self, scope).body(tree.body)

    def add_class(self, scope: Scope, node: ast.ClassDef, inner: Scope) -> None:
        """Remember a class statement (called while reading)."""
        local = Local(scope.module, inner.qualname, node)
        self.classes[node] = PluginClass(local, inner, node)

    def add_call(self, call: ast.Call, scope: Scope) -> None:
        """Remember a call by the last name of what is called (called while reading)."""
        name = (dotted_text(call.func) or "").rpartition(".")[2]
        if name:
            self._calls.setdefault(name, []).append(CallSite(call, scope))

    def _read_bases(self, info: PluginClass) -> None:
        outer = info.scope.parent
        if outer is None:
            raise AssertionError("a class has an enclosing scope")
        bases: list[Value] = []
        for base in info.node.bases:
            target = self._patch_target(base, outer)
            if target is not None:
                info.target = target
                continue
            plain = base.value if isinstance(base, ast.Subscript) else base
            bases.extend(self.evaluate(plain, outer) or (UNKNOWN,))
        info.bases = tuple(bases)

    def _patch_target(self, base: ast.expr, scope: Scope) -> Ref | None:
        """The target of `Patch[Target]`: a subscripted base that is about patching."""
        if not isinstance(base, ast.Subscript):
            return None
        name = (dotted_text(base.value) or "").rpartition(".")[2]
        if "patch" not in name.lower() and not self._has_class_getitem(base.value, scope):
            return None
        for value in self.evaluate(base.slice, scope):
            if isinstance(value, Ref):
                return value
            if isinstance(value, Constant):
                ref = self.ref_of_text(value.text)
                if ref is not None:
                    return ref
        return None

    def _has_class_getitem(self, base: ast.expr, scope: Scope) -> bool:
        return any(
            isinstance(v, Local)
            and isinstance(v.node, ast.ClassDef)
            and any(getattr(s, "name", "") == "__class_getitem__" for s in v.node.body)
            for v in self.evaluate(base, scope)
        )

    # --- names of the package --------------------------------------------------------------

    def ours(self, dotted: str) -> bool:
        """Whether a dotted name is of the package that the plugin is for."""
        return dotted == self.package or dotted.startswith(self.package + ".")

    def ref_of_text(self, text: str) -> Ref | None:
        """The name that a string such as `vllm.config:VllmConfig` spells."""
        dotted = text.replace(":", ".").strip()
        if not self.ours(dotted) or not re.fullmatch(r"[\w.]+", dotted):
            return None
        if self.release is not None:
            return Ref(*self.release.split(dotted))
        if ":" in text:
            return Ref(*text.strip().split(":", 1))
        head, _, last = dotted.rpartition(".")
        return Ref(head, last) if re.match(r"_?[A-Z]", last) else Ref(dotted)

    def normal(self, ref: Ref) -> Ref:
        """The same name, split at the longest module that is known."""
        dotted = str(ref)
        if self.release is not None:
            module, name = self.release.split(dotted)
            if len(module) >= len(ref.module) or not name:
                return Ref(module, name)
            return ref
        parts = dotted.split(".")
        for n in range(len(parts), 0, -1):
            if ".".join(parts[:n]) in self.imported_modules:
                return Ref(".".join(parts[:n]), ".".join(parts[n:]))
        return ref

    def definition(self, ref: Ref) -> Definition | None:
        """What the release says the name is."""
        return None if self.release is None else self.release.find(ref.module, ref.name)

    def is_class(self, ref: Ref) -> bool:
        """Whether the name is a class: the release tells, else its spelling."""
        if self.release is not None:
            found = self.definition(ref)
            if found is not None:
                return found.kind == "class"
        last = ref.name.rpartition(".")[2]
        return bool(re.match(r"_?[A-Z]\w*[a-z]", last))

    def _instances(self, found: Sequence[Definition]) -> Values:
        return tuple(Instance(Ref(d.module, d.name)) for d in found)

    # --- evaluating ------------------------------------------------------------------------

    def evaluate(self, expression: ast.expr | None, scope: Scope, depth: int = 0) -> Values:
        """What an expression can stand for in a scope; `(UNKNOWN,)` where source does not tell."""
        if expression is None:
            return (UNKNOWN,)
        if depth > _DEPTH:
            self._cuts += 1
            return (UNKNOWN,)
        key = (id(expression), id(scope))
        if not self._overrides and key in self._memo:
            return self._memo[key]
        cuts = self._cuts
        values = _distinct(self._evaluate(expression, scope, depth))
        if not self._overrides and self._cuts == cuts:
            self._memo[key] = values
        return values

    def _evaluate(self, expression: ast.expr, scope: Scope, depth: int) -> Values:
        if isinstance(expression, ast.Name):
            return self.lookup(expression.id, scope, depth + 1)
        if isinstance(expression, ast.Attribute):
            values: list[Value] = []
            for base in self.evaluate(expression.value, scope, depth + 1):
                values.extend(self.attribute(base, expression.attr, depth + 1))
            return tuple(values)
        if isinstance(expression, ast.Call):
            return self._call(expression, scope, depth + 1)
        if isinstance(expression, ast.Constant):
            if isinstance(expression.value, str):
                return (Constant(expression.value),)
            return () if expression.value is None else (UNKNOWN,)
        if isinstance(expression, ast.IfExp):
            return self.evaluate(expression.body, scope, depth + 1) + self.evaluate(
                expression.orelse, scope, depth + 1
            )
        if isinstance(expression, ast.BoolOp):
            found: list[Value] = []
            for part in expression.values:
                found.extend(self.evaluate(part, scope, depth + 1))
            return tuple(found)
        if isinstance(expression, ast.NamedExpr):
            return self.evaluate(expression.value, scope, depth + 1)
        if isinstance(expression, ast.Await):
            return self.evaluate(expression.value, scope, depth + 1)
        if isinstance(expression, ast.Subscript):
            return self._subscript(expression, scope, depth + 1)
        if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Add):
            return self._joined(expression, scope, depth + 1)
        if isinstance(expression, ast.Lambda):
            return (Local(scope.module, "<lambda>", expression),)
        return (UNKNOWN,)

    def _joined(self, expression: ast.BinOp, scope: Scope, depth: int) -> Values:
        left = self.evaluate(expression.left, scope, depth)
        right = self.evaluate(expression.right, scope, depth)
        if len(left) == len(right) == 1:
            a, b = left[0], right[0]
            if isinstance(a, Constant) and isinstance(b, Constant):
                return (Constant(a.text + b.text),)
        return (UNKNOWN,)

    def _subscript(self, expression: ast.Subscript, scope: Scope, depth: int) -> Values:
        if dotted_text(expression.value) in ("sys.modules", "modules"):
            return self._module_named(expression.slice, scope, depth)
        return (UNKNOWN,)

    def _module_named(self, expression: ast.expr, scope: Scope, depth: int) -> Values:
        if isinstance(expression, ast.Attribute) and expression.attr == "__module__":
            # sys.modules[Class.__module__]: the module that defines the class.
            found = []
            for value in self.evaluate(expression.value, scope, depth):
                definition = self.definition(value) if isinstance(value, Ref) else None
                if definition is not None and definition.kind in ("class", "function"):
                    found.append(Ref(definition.module))
            return tuple(found) or (UNKNOWN,)
        refs = [
            Ref(v.text)
            for v in self.evaluate(expression, scope, depth)
            if isinstance(v, Constant) and self.ours(v.text)
        ]
        self.imported_modules.update(str(r) for r in refs)
        return tuple(refs) or (UNKNOWN,)

    def lookup(self, name: str, scope: Scope, depth: int = 0) -> Values:
        """What a name stands for in a scope, over all of its assignments."""
        owner = self._owner(name, scope)
        if owner is None:
            return (UNKNOWN,)
        key = (id(owner), name)
        if not self._overrides and key in self._names:
            return self._names[key]
        if key in self._active or depth > _DEPTH:
            self._cuts += 1
            return ()
        self._active.add(key)
        cuts = self._cuts
        try:
            values: list[Value] = []
            for binding in owner.bindings[name]:
                values.extend(self._bound(name, binding, depth + 1))
        finally:
            self._active.discard(key)
        found = _distinct(values)
        if not self._overrides and (self._cuts == cuts or not self._active):
            self._names[key] = found
        return found

    def assigned(self, name: str, scope: Scope) -> list[ast.expr]:
        """The expressions that are assigned to a name, where it is seen from a scope."""
        owner = self._owner(name, scope)
        bindings = owner.bindings[name] if owner is not None else []
        return [b.expression for b in bindings if b.how == "value" and b.expression is not None]

    def _owner(self, name: str, scope: Scope) -> Scope | None:
        current: Scope | None = scope
        if scope.kind == "function" and name in scope.globals:
            current = scope.top
        while current is not None:
            visible = current.kind != "class" or current is scope
            if visible and name in current.bindings:
                return current
            current = current.parent
        return None

    def _bound(self, name: str, binding: _Binding, depth: int) -> Values:
        scope = binding.scope
        if binding.how == "value":
            return self.evaluate(binding.expression, scope, depth)
        if binding.how == "element":
            return self._element(binding.expression, scope, depth)
        if binding.how == "annotated":
            told = self.annotated(binding.expression, scope)
            # An annotation that tells nothing (`Callable | None`) leaves the word to assignments.
            return told or (() if binding.index else (UNKNOWN,))
        if binding.how == "import":
            return self._imported(binding.node, name)
        if binding.how == "from":
            return self._imported_from(binding, name, depth)
        if binding.how == "definition":
            inner = self.scopes[binding.node] if binding.node is not None else scope
            return (Local(scope.module, inner.qualname, inner.node),)
        if binding.how == "parameter":
            return self._parameter(name, binding, depth)
        return (UNKNOWN,)

    def _element(self, expression: ast.expr | None, scope: Scope, depth: int) -> Values:
        literal: ast.AST | None = expression
        if isinstance(expression, ast.Name):
            owner = self._owner(expression.id, scope)
            bindings = owner.bindings[expression.id] if owner is not None else []
            if len(bindings) == 1 and bindings[0].how == "value":
                literal, scope = bindings[0].expression, bindings[0].scope
        if isinstance(literal, (ast.Tuple, ast.List, ast.Set)):
            values: list[Value] = []
            for element in literal.elts:
                values.extend(self.evaluate(element, scope, depth))
            return tuple(values)
        return (UNKNOWN,)

    def annotated(self, annotation: ast.expr | None, scope: Scope) -> Values:
        """Objects of the classes that an annotation names; () where it says nothing useful."""
        values: list[Value] = []
        for name in annotation_names(annotation) or ():
            expression = ast.parse(name, mode="eval").body
            for value in self.evaluate(expression, scope):
                if isinstance(value, Ref) and self.is_class(value):
                    values.append(Instance(value))
                elif isinstance(value, Local) and isinstance(value.node, ast.ClassDef):
                    values.append(LocalInstance(value))
                else:
                    return ()
        return tuple(values)

    def _imported(self, node: ast.AST | None, name: str) -> Values:
        if not isinstance(node, ast.Import):
            return (UNKNOWN,)
        for alias in node.names:
            if alias.asname == name or (
                alias.asname is None and alias.name.partition(".")[0] == name
            ):
                dotted = alias.name if alias.asname else name
                if self.ours(dotted):
                    return (Ref(dotted),)
                return (PluginModule(dotted),) if self._is_plugin(dotted) else (UNKNOWN,)
        return (UNKNOWN,)

    def _imported_from(self, binding: _Binding, name: str, depth: int) -> Values:
        node = binding.node
        if not isinstance(node, ast.ImportFrom):
            return (UNKNOWN,)
        source = self.absolute(node, binding.scope.module)
        original = next((a.name for a in node.names if (a.asname or a.name) == name), name)
        if source is None:
            return (UNKNOWN,)
        if node.level == 0 and self.ours(source):
            return (Ref(source, original),)
        return self.plugin_attribute(source, original, depth)

    def absolute(self, node: ast.ImportFrom, module: str) -> str | None:
        """The module that a from-import names."""
        if not node.level:
            return node.module
        base = module.split(".")
        if not self.tree.is_package(module):
            base = base[:-1]
        base = base[: len(base) - (node.level - 1)]
        return ".".join([*base, *([node.module] if node.module else [])]) or None

    def _is_plugin(self, dotted: str) -> bool:
        return dotted in self.modules or any(m.startswith(dotted + ".") for m in self.modules)

    def plugin_attribute(self, module: str, name: str, depth: int = 0) -> Values:
        """A name of one of the plugin's modules, or a submodule."""
        scope = self.modules.get(module)
        if scope is not None and name in scope.bindings:
            return self.lookup(name, scope, depth + 1)
        if self._is_plugin(f"{module}.{name}"):
            return (PluginModule(f"{module}.{name}"),)
        return (UNKNOWN,)

    # --- parameters ------------------------------------------------------------------------

    def _parameter(self, name: str, binding: _Binding, depth: int) -> Values:
        function = binding.node
        if function is None:
            return (UNKNOWN,)
        if (function, name) in self._overrides:
            return self._overrides[function, name]
        annotated = self.annotated(binding.expression, binding.scope.parent or binding.scope)
        if annotated:
            return annotated
        if binding.index == 0:
            receiver = self._receiver(function)
            if receiver:
                return receiver
        if isinstance(function, ast.Lambda):
            return (UNKNOWN,)
        values: list[Value] = []
        for bound in self.arguments_of(function):
            values.extend(bound.get(name, ()))
            if len(values) > _MANY:
                return (UNKNOWN,)
        return tuple(values) or (UNKNOWN,)

    def _receiver(self, function: ast.AST) -> Values:
        if function in self.receivers:
            return tuple(self.receivers[function])
        scope = self.scopes.get(function)
        outer = scope.parent if scope is not None else None
        if outer is None or outer.kind != "class":
            return ()
        decorators = {
            dotted_text(d) for d in getattr(function, "decorator_list", ()) if dotted_text(d)
        }
        if "staticmethod" in decorators:
            return ()
        info = self.classes[outer.node]
        if self._patches_module(info):
            return ()
        name = getattr(function, "name", "")
        if "classmethod" in decorators or name in ("__new__", "__init_subclass__"):
            return (info.local,)
        return (LocalInstance(info.local),)

    def _patches_module(self, info: PluginClass) -> bool:
        return info.target is not None and self.is_module(info.target)

    def is_module(self, ref: Ref) -> bool:
        """Whether the name is a module, as far as the release or the plugin's imports tell."""
        ref = self.normal(ref)
        if self.release is not None:
            found = self.definition(ref)
            return found is not None and found.kind == "module"
        return not ref.name

    def arguments_of(self, function: ast.AST) -> Iterator[Mapping[str, Values]]:
        """For each call of a plugin function inside the plugin: values by parameter."""
        name = getattr(function, "name", "")
        for site in self._calls.get(name, ()):
            key = (id(site.call), "call")
            if key in self._active:
                self._cuts += 1
                continue
            self._active.add(key)
            try:
                called = self.evaluate(site.call.func, site.scope)
                if any(isinstance(v, Local) and v.node is function for v in called):
                    yield self._bind(function, site)
            finally:
                self._active.discard(key)

    def _bind(self, function: ast.AST, site: CallSite) -> Mapping[str, Values]:
        arguments = function.args  # type: ignore[attr-defined]
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
        bound: dict[str, Values] = {}
        for name, argument in zip(names, site.call.args, strict=False):
            if isinstance(argument, ast.Starred):
                break
            bound[name] = self.evaluate(argument, site.scope)
        for keyword in site.call.keywords:
            if keyword.arg is not None:
                bound[keyword.arg] = self.evaluate(keyword.value, site.scope)
        return bound

    def per_call(self, scope: Scope) -> Iterator[None]:
        """Run the loop body once for each call of the function around, with its arguments.

        Once without any where the scope is no function or nothing in the plugin calls it. Values
        that belong together (a target and the name to patch on it) so stay together.
        """
        function = scope.enclosing("function")
        sites = [] if function is None else list(self.arguments_of(function.node))
        if function is None or not sites:
            yield None
            return
        for bound in sites:
            before = self._overrides
            self._overrides = {**before, **{(function.node, k): v for k, v in bound.items()}}
            try:
                yield None
            finally:
                self._overrides = before

    # --- attributes ------------------------------------------------------------------------

    def attribute(self, base: Value, name: str, depth: int = 0) -> Values:
        """What `base.name` can stand for."""
        if depth > _DEPTH:
            return (UNKNOWN,)
        if isinstance(base, Ref):
            return self._attribute_of_ref(base, name)
        if isinstance(base, Instance):
            return self._attribute_of_instance(base, name)
        if isinstance(base, PluginModule):
            return self.plugin_attribute(base.dotted, name, depth)
        if isinstance(base, Bound) and name in _SAME_OBJECT:
            return (base.ref,)
        if isinstance(base, Local):
            info = self.classes.get(base.node)
            return (UNKNOWN,) if info is None else self._member(info, name, depth, on_object=False)
        if isinstance(base, LocalInstance):
            info = self.classes.get(base.of.node)
            return (UNKNOWN,) if info is None else self._member(info, name, depth, on_object=True)
        if isinstance(base, Super):
            info = self.classes.get(base.of.node)
            return (UNKNOWN,) if info is None else self._inherited(info, name, depth, True)
        return (UNKNOWN,)

    def _attribute_of_ref(self, base: Ref, name: str) -> Values:
        if name in _SAME_OBJECT:
            return (base,)
        if name in _METADATA:
            return (UNKNOWN,)
        base = self.normal(base)
        found = self.definition(base) if base.name else None
        if found is not None and found.kind == "constant" and self.release is not None:
            types = self.release.type_of_constant(found)
            if len(types) == 1:
                return self._attribute_of_instance(
                    Instance(Ref(types[0].module, types[0].name)), name
                )
            return (UNKNOWN,)
        if found is not None and found.kind == "function":
            return (UNKNOWN,)
        if found is None and base.name and self.release is not None:
            return (UNKNOWN,)
        return (self.normal(base.child(name)),)

    def _attribute_of_instance(self, base: Instance, name: str) -> Values:
        if name in _METADATA:
            return (base.of,) if name == "__class__" else (UNKNOWN,)
        if self.release is not None:
            owner = self.definition(base.of)
            if owner is not None and owner.kind == "class":
                types = self.release.type_of_member(owner, name)
                if len(types) == 1:
                    return self._instances(types)
        return (Bound(base.of.child(name)),)

    def _member(self, info: PluginClass, name: str, depth: int, *, on_object: bool) -> Values:
        values: list[Value] = []
        if name in info.scope.bindings:
            for value in self.lookup(name, info.scope, depth + 1):
                # A method of the package kept in the class body is bound when read off an object.
                if on_object and isinstance(value, Ref) and "." in value.name:
                    values.append(Bound(value))
                else:
                    values.append(value)
        if on_object:
            for expression, scope in info.on_self.get(name, ()):
                values.extend(self.evaluate(expression, scope, depth + 1))
        if values or name in info.on_self:
            return tuple(values) or (UNKNOWN,)
        return self._inherited(info, name, depth, on_object)

    def _inherited(self, info: PluginClass, name: str, depth: int, on_object: bool) -> Values:
        known = True
        for base in (*info.bases, *([info.target] if info.target else [])):
            if isinstance(base, Local):
                inner = self.classes.get(base.node)
                found = (
                    self._member(inner, name, depth + 1, on_object=on_object)
                    if inner is not None
                    else (UNKNOWN,)
                )
                if any(not isinstance(v, Unknown) for v in found):
                    return found
            elif isinstance(base, Ref):
                if self.release is not None:
                    owner = self.definition(base)
                    if owner is None or owner.kind != "class":
                        known = False
                        continue
                    if self.release.member(owner, name) is None:
                        continue
                elif not known:
                    continue
                value: Value = Instance(base) if on_object else base
                return self.attribute(value, name, depth + 1)
            else:
                known = False
        return (UNKNOWN,)

    # --- calls -----------------------------------------------------------------------------

    def _call(self, call: ast.Call, scope: Scope, depth: int) -> Values:
        special = self._special_call(call, scope, depth)
        if special is not None:
            return special
        values: list[Value] = []
        for called in self.evaluate(call.func, scope, depth):
            values.extend(self._result(called, depth))
        return tuple(values) or (UNKNOWN,)

    def _result(self, called: Value, depth: int) -> Values:
        if isinstance(called, Ref):
            if self.is_class(called):
                return (Instance(called),)
            found = self.definition(called)
            types = self.release.returned(found) if self.release and found else ()
            return self._instances(types) or (UNKNOWN,)
        if isinstance(called, Bound):
            found = self.definition(called.ref)
            types = self.release.returned(found) if self.release and found else ()
            return self._instances(types) or (UNKNOWN,)
        if isinstance(called, Local):
            if isinstance(called.node, ast.ClassDef):
                return (LocalInstance(called),)
            return self._returned(called, depth)
        return (UNKNOWN,)

    def _returned(self, function: Local, depth: int) -> Values:
        node = function.node
        scope = self.scopes.get(node)
        if scope is None or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return (UNKNOWN,)
        annotated = self.annotated(node.returns, scope.parent or scope)
        if annotated:
            return annotated
        values: list[Value] = []
        for inner in _own_nodes(node):
            if isinstance(inner, (ast.Yield, ast.YieldFrom)):
                return (UNKNOWN,)
            if isinstance(inner, ast.Return) and inner.value is not None:
                values.extend(self.evaluate(inner.value, scope, depth + 1))
        return tuple(values) or (UNKNOWN,)

    def _special_call(self, call: ast.Call, scope: Scope, depth: int) -> Values | None:
        """Calls whose meaning is fixed: getattr, super, type, cast, copies, import, getsource."""
        name = dotted_text(call.func) or ""
        last = name.rpartition(".")[2]
        first = call.args[0] if call.args else None
        if name == "super":
            return self._super(call, scope)
        if last in _TEXT_METHODS and isinstance(call.func, ast.Attribute):
            texts = [
                v for v in self.evaluate(call.func.value, scope, depth) if isinstance(v, SourceText)
            ]
            return tuple(texts) or None
        if first is None:
            return None
        if name == "getattr" and len(call.args) >= 2:
            return self._getattr(call, scope, depth)
        if name == "type" and len(call.args) == 1:
            return tuple(
                v.of if isinstance(v, (Instance, LocalInstance)) else UNKNOWN
                for v in self.evaluate(first, scope, depth)
            )
        if last == "cast" and len(call.args) == 2:
            return self.annotated(first, scope) or (UNKNOWN,)
        if name in _COPIES or last in ("wraps", "partial"):
            return self.evaluate(first, scope, depth)
        if last == "import_module" or name == "__import__":
            return self._module_named(first, scope, depth)
        if name in ("sys.modules.get", "modules.get"):
            return self._module_named(first, scope, depth)
        if last == "getsource":
            return tuple(
                SourceText(self.normal(v.ref if isinstance(v, Bound) else v))
                for v in self.evaluate(first, scope, depth)
                if isinstance(v, (Ref, Bound))
            ) or (UNKNOWN,)
        if last in ("dedent", "cleandoc"):
            return tuple(
                v for v in self.evaluate(first, scope, depth) if isinstance(v, SourceText)
            ) or (UNKNOWN,)
        if last in ("sub", "subn") and len(call.args) >= 3:
            return tuple(
                v for v in self.evaluate(call.args[2], scope, depth) if isinstance(v, SourceText)
            ) or (UNKNOWN,)
        return None

    def _getattr(self, call: ast.Call, scope: Scope, depth: int) -> Values:
        values: list[Value] = []
        for name in self.evaluate(call.args[1], scope, depth):
            for base in self.evaluate(call.args[0], scope, depth):
                if isinstance(name, Constant):
                    values.extend(self.attribute(base, name.text, depth))
        if len(call.args) > 2:
            values.extend(self.evaluate(call.args[2], scope, depth))
        return tuple(values) or (UNKNOWN,)

    def _super(self, call: ast.Call, scope: Scope) -> Values:
        if len(call.args) == 2:
            # super(Target, cls): what comes after Target, which the plugin does not override.
            return (UNKNOWN,)
        owner = scope.enclosing("class")
        if owner is None or owner.node not in self.classes:
            return (UNKNOWN,)
        return (Super(self.classes[owner.node].local),)


class _Reader:
    """Fills scopes with bindings."""

    def __init__(self, plugin: Plugin, scope: Scope) -> None:
        self.plugin = plugin
        self.scope = scope

    def bind(
        self,
        name: str,
        how: str,
        expression: ast.expr | None = None,
        node: ast.AST | None = None,
        index: int = 0,
    ) -> None:
        scope = self.scope
        owner = scope
        if name in scope.globals:
            owner = scope.top
        elif name in scope.nonlocals and scope.parent is not None:
            owner = self.plugin._owner(name, scope.parent) or scope
        owner.bindings.setdefault(name, []).append(_Binding(how, scope, expression, node, index))

    def body(self, statements: Sequence[ast.stmt]) -> None:
        # Declarations first: they say where the names of the whole body live.
        for statement in statements:
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            for node in _own_nodes(statement):
                if isinstance(node, ast.Global):
                    self.scope.globals.update(node.names)
                elif isinstance(node, ast.Nonlocal):
                    self.scope.nonlocals.update(node.names)
        for statement in statements:
            self.visit(statement)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self._function(node)
            return
        if isinstance(node, ast.ClassDef):
            self._class(node)
            return
        if isinstance(node, ast.Lambda):
            self._lambda(node)
            return
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            for generator in node.generators:
                self._target(generator.target, "element", generator.iter)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if self.plugin.ours(alias.name):
                    self.plugin.imported_modules.add(alias.name)
                self.bind(alias.asname or alias.name.partition(".")[0], "import", node=node)
        elif isinstance(node, ast.ImportFrom):
            source = self.plugin.absolute(node, self.scope.module)
            if source and not node.level and self.plugin.ours(source):
                self.plugin.imported_modules.add(source)
            for alias in node.names:
                self.bind(alias.asname or alias.name, "from", node=node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._target(target, "value", node.value)
        elif isinstance(node, ast.AnnAssign):
            self._annotated(node)
        elif isinstance(node, ast.NamedExpr):
            self._target(node.target, "value", node.value)
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            self._target(node.target, "element", node.iter)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                if item.optional_vars is not None:
                    self._target(item.optional_vars, "unknown", None)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            self.bind(node.name, "unknown")
        elif isinstance(node, ast.Call):
            self.plugin.add_call(node, self.scope)
        for child in children(node):
            self.visit(child)

    def _target(self, target: ast.expr, how: str, value: ast.expr | None) -> None:
        if isinstance(target, ast.Name):
            self.bind(target.id, how, value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            elements: list[ast.expr] | None = None
            if how == "value" and isinstance(value, (ast.Tuple, ast.List)):
                elements = list(value.elts)
            for place, part in enumerate(target.elts):
                if elements is not None and len(elements) == len(target.elts):
                    self._target(part, "value", elements[place])
                else:
                    self._target(part, "unknown", None)
        elif isinstance(target, ast.Starred):
            self._target(target.value, "unknown", None)
        elif isinstance(target, ast.Attribute):
            self._on_self(target, value if how == "value" else None)

    def _on_self(self, target: ast.Attribute, value: ast.expr | None) -> None:
        """Remember `self.name = value` in a method of a class of the plugin."""
        outer = self.scope.parent
        if (
            self.scope.kind != "function"
            or outer is None
            or outer.kind != "class"
            or not isinstance(target.value, ast.Name)
        ):
            return
        arguments = self.scope.node.args  # type: ignore[attr-defined]
        parameters = [*arguments.posonlyargs, *arguments.args]
        if parameters and parameters[0].arg == target.value.id:
            info = self.plugin.classes[outer.node]
            info.on_self.setdefault(target.attr, []).append((value, self.scope))

    def _annotated(self, node: ast.AnnAssign) -> None:
        if isinstance(node.target, ast.Name):
            if self.scope.kind == "class" and node.value is None:
                self.bind(node.target.id, "annotated", node.annotation)
            elif annotation_names(node.annotation):
                others = int(node.value is not None)
                self.bind(node.target.id, "annotated", node.annotation, index=others)
                if node.value is not None:
                    self.bind(node.target.id, "value", node.value)
            else:
                self.bind(node.target.id, "value" if node.value else "unknown", node.value)
        elif isinstance(node.target, ast.Attribute):
            self._on_self(node.target, node.value)

    def _inner(self, kind: str, node: ast.AST, name: str) -> _Reader:
        outer = self.scope
        prefix = outer.qualname
        if prefix and outer.kind == "function":
            prefix += ".<locals>"
        scope = Scope(kind, node, outer.module, f"{prefix}.{name}" if prefix else name, outer)
        self.plugin.scopes[node] = scope
        return _Reader(self.plugin, scope)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        inner = self._inner("function", node, node.name)
        self.bind(node.name, "definition", node=node)
        for part in (*node.decorator_list, *node.args.defaults, *node.args.kw_defaults):
            if part is not None:
                self.visit(part)
        inner.parameters(node.args)
        inner.body(node.body)

    def _lambda(self, node: ast.Lambda) -> None:
        inner = self._inner("function", node, "<lambda>")
        inner.parameters(node.args)
        inner.visit(node.body)

    def parameters(self, arguments: ast.arguments) -> None:
        for index, argument in enumerate((*arguments.posonlyargs, *arguments.args)):
            self.bind(argument.arg, "parameter", argument.annotation, self.scope.node, index)
        for argument in arguments.kwonlyargs:
            self.bind(argument.arg, "parameter", argument.annotation, self.scope.node, 1)
        for rest in (arguments.vararg, arguments.kwarg):
            if rest is not None:
                self.bind(rest.arg, "unknown")

    def _class(self, node: ast.ClassDef) -> None:
        inner = self._inner("class", node, node.name)
        self.plugin.add_class(self.scope, node, inner.scope)
        self.bind(node.name, "definition", node=node)
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(part)
        inner.body(node.body)


def _is_test(dotted: str) -> bool:
    """Whether a module is of the plugin's own tests, which a user never runs."""
    parts = dotted.split(".")
    return (
        bool({"test", "tests"} & set(parts[:-1]))
        or parts[-1].startswith("test_")
        or parts[-1] in ("conftest", "tests")
    )


def children(node: ast.AST) -> list[ast.AST]:
    """The nodes right below a node, remembered on it: a plugin is walked several times."""
    kept: list[ast.AST] | None = node.__dict__.get("_children")
    if kept is None:
        kept = child_nodes(node)
        node.__dict__["_children"] = kept
    return kept


def dotted_text(expression: ast.AST | None) -> str | None:
    """`a.b.c` of a chain of attributes, or None."""
    if isinstance(expression, ast.Name):
        return expression.id
    if isinstance(expression, ast.Attribute):
        base = dotted_text(expression.value)
        return None if base is None else f"{base}.{expression.attr}"
    return None


def _distinct(values: Sequence[Value]) -> Values:
    return tuple(dict.fromkeys(values))


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes inside, not those of functions and classes in it (itself excepted)."""
    todo = [node]
    first = True
    while todo:
        current = todo.pop()
        yield current
        if first or not isinstance(
            current, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
        ):
            todo.extend(children(current))
        first = False
