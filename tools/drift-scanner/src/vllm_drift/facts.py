"""What the analysis knows of a piece of source: small immutable values, picklable, without
positions in any tree.

Texts of expressions are normalised (`vllm_drift.normal`), so that equal texts mean equal code
however it was laid out. Lines count from 1. Must not know how facts are collected or judged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = [
    "Argument",
    "Assignment",
    "AttributeUse",
    "Block",
    "Call",
    "Class",
    "Function",
    "Import",
    "InstanceTest",
    "Parameter",
    "Read",
    "Signature",
    "function_kind",
    "placed_class",
    "placed_function",
]


@dataclass(frozen=True)
class Parameter:
    """One parameter of a signature."""

    name: str
    kind: str
    """`positional-only`, `positional`, `*args`, `keyword-only` or `**kwargs`."""
    default: str | None = None
    annotation: str | None = None

    @property
    def required(self) -> bool:
        """Whether a call must supply it."""
        return self.default is None and self.kind not in ("*args", "**kwargs")

    @property
    def by_position(self) -> bool:
        """Whether a positional argument can supply it."""
        return self.kind in ("positional-only", "positional")

    def __str__(self) -> str:
        text = {"*args": "*", "**kwargs": "**"}.get(self.kind, "") + self.name
        if self.annotation is not None:
            text += f": {self.annotation}"
        if self.default is not None:
            text += f" = {self.default}" if self.annotation is not None else f"={self.default}"
        return text


@dataclass(frozen=True)
class Signature:
    """A function's parameters in order, its return annotation, and whether it is `async def`."""

    parameters: tuple[Parameter, ...] = ()
    returns: str | None = None
    is_async: bool = False

    def get(self, name: str) -> Parameter | None:
        """The parameter of that name, or None."""
        return next((p for p in self.parameters if p.name == name), None)

    def __str__(self) -> str:
        parts: list[str] = []
        for i, parameter in enumerate(self.parameters):
            before = self.parameters[i - 1].kind if i else ""
            if before == "positional-only" and parameter.kind != "positional-only":
                parts.append("/")
            if parameter.kind == "keyword-only" and before not in ("keyword-only", "*args"):
                parts.append("*")
            parts.append(str(parameter))
        if self.parameters and self.parameters[-1].kind == "positional-only":
            parts.append("/")
        return f"({', '.join(parts)})" + (f" -> {self.returns}" if self.returns else "")


@dataclass(frozen=True)
class Argument:
    """One argument of a call: its text, its keyword where it has one, and `*` or `**` for an
    unpacking.
    """

    text: str
    keyword: str | None = None
    star: str = ""


@dataclass(frozen=True)
class Call:
    """A call. `callee` is the text of what is called; `receiver` and `name` are its two halves
    around the last dot (`receiver` is empty for a plain name).
    """

    callee: str
    receiver: str
    name: str
    args: tuple[Argument, ...]
    line: int
    narrowed: tuple[str, ...] = ()
    """Names of classes one of which the receiver is an instance of here, by `isinstance` or
    `cast`.
    """

    @property
    def positional(self) -> tuple[str, ...]:
        """Texts of the positional arguments, an unpacking as `*text`."""
        return tuple(a.star + a.text for a in self.args if a.keyword is None and a.star != "**")

    @property
    def keywords(self) -> tuple[tuple[str, str], ...]:
        """Keyword arguments as (name, text) in order; an unpacking has the name `**`."""
        return tuple(
            (a.keyword or "**", a.text)
            for a in self.args
            if a.keyword is not None or a.star == "**"
        )


@dataclass(frozen=True)
class AttributeUse:
    """`value.name` where `value` is a dotted name or `cast(...)`; `store` when it is assigned or
    deleted.
    """

    value: str
    name: str
    line: int
    store: bool = False
    narrowed: tuple[str, ...] = ()
    guarded: bool = False
    """Within a branch that `hasattr(value, 'name')` opened."""


@dataclass(frozen=True)
class InstanceTest:
    """`isinstance(value, classes)`: the dotted names of the classes in order."""

    value: str
    classes: tuple[str, ...]
    line: int


@dataclass(frozen=True)
class Import:
    """One name that an import statement binds.

    `import a.b as c`: module `a.b`, name "", bound `c`. `import a.b`: bound `a`.
    `from m import n as k`: module `m`, name `n`, bound `k`; a star import has the name `*`.
    """

    module: str
    """Without the leading dots of a relative import; may be empty then."""
    name: str
    bound: str
    line: int
    level: int = 0
    """Number of leading dots."""
    condition: str = ""
    """"" (always), `type-checking`, `conditional` (under `if`, `try`, ...)."""


@dataclass(frozen=True)
class Assignment:
    """A target given a value: `=`, an annotation, `+=`, `for`, `with ... as`, `del`.

    `value` is empty text where there is none (a bare annotation, a loop variable).
    """

    target: str
    value: str
    line: int
    annotation: str | None = None
    condition: str = ""
    operator: str = "="
    """`=`, `+=` and so on, `for`, `with`, `del`."""


@dataclass(frozen=True)
class Read:
    """A name read that is not a local of the function it is read in."""

    name: str
    line: int


@dataclass(frozen=True)
class Function:
    """A function or method. What its nested functions do is included in its own facts."""

    qualname: str
    line: int
    """Of the `def` keyword."""
    end: int
    """The last line."""
    kind: str
    """`function`, `method`, `classmethod`, `staticmethod`, `property`, `setter`, `deleter` or
    `overload`.
    """
    signature: Signature
    decorators: tuple[str, ...] = ()
    condition: str = ""
    imports: tuple[Import, ...] = ()
    calls: tuple[Call, ...] = ()
    attributes: tuple[AttributeUse, ...] = ()
    tests: tuple[InstanceTest, ...] = ()
    assignments: tuple[Assignment, ...] = ()
    reads: tuple[Read, ...] = ()
    local_names: tuple[str, ...] = ()
    global_names: tuple[str, ...] = ()
    """Names declared `global`."""
    nested: tuple[Function, ...] = ()
    nested_classes: tuple[Class, ...] = ()

    @property
    def name(self) -> str:
        """The last part of the qualified name."""
        return self.qualname.rpartition(".")[2]


@dataclass(frozen=True)
class Class:
    """A class statement: what its header and its body say, methods of `if` blocks included."""

    qualname: str
    line: int
    end: int
    bases: tuple[str, ...] = ()
    keywords: tuple[tuple[str, str], ...] = ()
    decorators: tuple[str, ...] = ()
    condition: str = ""
    fields: tuple[Assignment, ...] = ()
    """Assignments and annotations of the class body, in order."""
    imports: tuple[Import, ...] = ()
    functions: tuple[Function, ...] = ()
    classes: tuple[Class, ...] = ()

    @property
    def name(self) -> str:
        """The last part of the qualified name."""
        return self.qualname.rpartition(".")[2]


@dataclass(frozen=True)
class Block:
    """The facts of one piece of source: what its statements bind, call and read at their own
    level.
    """

    imports: tuple[Import, ...] = ()
    assignments: tuple[Assignment, ...] = ()
    functions: tuple[Function, ...] = ()
    classes: tuple[Class, ...] = ()
    calls: tuple[Call, ...] = ()
    attributes: tuple[AttributeUse, ...] = ()
    tests: tuple[InstanceTest, ...] = ()
    reads: tuple[Read, ...] = ()
    strings: tuple[tuple[str, int], ...] = ()
    """String literals that are statements of their own (docstrings), with their lines."""


def placed_function(function: Function, lines: int, prefix: str) -> Function:
    """The function `lines` further down, its qualified name behind `prefix`."""
    if not lines and not prefix:
        return function
    return dataclasses.replace(
        function,
        qualname=prefix + function.qualname,
        line=function.line + lines,
        end=function.end + lines,
        imports=_moved(function.imports, lines),
        calls=_moved(function.calls, lines),
        attributes=_moved(function.attributes, lines),
        tests=_moved(function.tests, lines),
        assignments=_moved(function.assignments, lines),
        reads=_moved(function.reads, lines),
        nested=tuple(placed_function(f, lines, prefix) for f in function.nested),
        nested_classes=tuple(placed_class(c, lines, prefix) for c in function.nested_classes),
    )


def placed_class(cls: Class, lines: int, prefix: str) -> Class:
    """The class `lines` further down, its qualified name behind `prefix`."""
    if not lines and not prefix:
        return cls
    return dataclasses.replace(
        cls,
        qualname=prefix + cls.qualname,
        line=cls.line + lines,
        end=cls.end + lines,
        fields=_moved(cls.fields, lines),
        imports=_moved(cls.imports, lines),
        functions=tuple(placed_function(f, lines, prefix) for f in cls.functions),
        classes=tuple(placed_class(c, lines, prefix) for c in cls.classes),
    )


def placed_block(block: Block, lines: int, prefix: str) -> Block:
    """The block `lines` further down, the qualified names that it defines behind `prefix`."""
    return Block(
        imports=_moved(block.imports, lines),
        assignments=_moved(block.assignments, lines),
        functions=tuple(placed_function(f, lines, prefix) for f in block.functions),
        classes=tuple(placed_class(c, lines, prefix) for c in block.classes),
        calls=_moved(block.calls, lines),
        attributes=_moved(block.attributes, lines),
        tests=_moved(block.tests, lines),
        reads=_moved(block.reads, lines),
        strings=tuple((text, line + lines) for text, line in block.strings),
    )


def _moved(facts: tuple, lines: int) -> tuple:  # type: ignore[type-arg]
    if not lines:
        return facts
    return tuple(dataclasses.replace(fact, line=fact.line + lines) for fact in facts)


def walk_functions(functions: tuple[Function, ...]) -> Iterator[Function]:
    """Yield the functions and, after each, its nested ones."""
    for function in functions:
        yield function
        yield from walk_functions(function.nested)
        for cls in function.nested_classes:
            yield from walk_functions(cls.functions)


def function_kind(name: str, decorators: tuple[str, ...], in_class: bool) -> str:
    """`Function.kind` of a definition with that name and those decorators."""
    for decorator in decorators:
        head = decorator.partition("(")[0]
        last = head.rpartition(".")[2]
        if last in ("setter", "deleter") and "." in head:
            return last
        if last == "overload":
            return "overload"
        if last in ("property", "cached_property", "abstractproperty"):
            return "property"
        if last in ("classmethod", "staticmethod"):
            return last
    if not in_class:
        return "function"
    if name in ("__init_subclass__", "__class_getitem__"):
        return "classmethod"
    return "staticmethod" if name == "__new__" else "method"
