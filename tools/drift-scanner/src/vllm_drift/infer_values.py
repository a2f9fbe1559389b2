"""What an expression in a plugin can stand for, as far as source tells.

Plain values. Must not know how they are found (`infer_plugin`) or what becomes of them
(`infer_uses`).
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

__all__ = [
    "UNKNOWN",
    "Bound",
    "Constant",
    "Instance",
    "Local",
    "LocalInstance",
    "PluginModule",
    "Ref",
    "SourceText",
    "Super",
    "Unknown",
    "Value",
    "call_shape",
    "call_text",
    "signature_text",
]


@dataclass(frozen=True)
class Unknown:
    """Something that source does not tell."""


UNKNOWN = Unknown()


@dataclass(frozen=True)
class Ref:
    """A module, or a name of a module, of the package that the plugin is for.

    `module` is spelled as the plugin's import spells it; `name` is empty for the module itself and
    dotted for a member (`Class.method`).
    """

    module: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module

    def child(self, attribute: str) -> Ref:
        """The attribute of this name."""
        return Ref(self.module, f"{self.name}.{attribute}" if self.name else attribute)


@dataclass(frozen=True)
class Instance:
    """An object of a class of the package."""

    of: Ref


@dataclass(frozen=True)
class Bound:
    """A member read off an object: a method bound to it, or an attribute of unknown class."""

    ref: Ref


@dataclass(frozen=True)
class Local:
    """A function or class that the plugin defines, by its place (`module`, qualified name)."""

    module: str
    name: str
    node: ast.AST = field(compare=False, repr=False)


@dataclass(frozen=True)
class LocalInstance:
    """An object of a class that the plugin defines."""

    of: Local


@dataclass(frozen=True)
class Super:
    """`super()` in a method of the plugin's class."""

    of: Local


@dataclass(frozen=True)
class PluginModule:
    """A module of the plugin."""

    dotted: str


@dataclass(frozen=True)
class SourceText:
    """Text got with `inspect.getsource` of a name of the package."""

    of: Ref


@dataclass(frozen=True)
class Constant:
    """A string that source spells out."""

    text: str


Value = (
    Unknown
    | Ref
    | Instance
    | Bound
    | Local
    | LocalInstance
    | Super
    | PluginModule
    | SourceText
    | Constant
)

_LONG = 48


def call_text(call: ast.Call, *, skip_first: bool = False) -> str:
    """The arguments of a call as source text, `(query, scale=1.0, **kwargs)`.

    An argument whose text is long or spans lines is shortened to `...`: the shape is what counts.
    """
    positional = call.args[1:] if skip_first else call.args
    parts = [f"*{_short(a.value)}" if isinstance(a, ast.Starred) else _short(a) for a in positional]
    for keyword in call.keywords:
        text = _short(keyword.value)
        parts.append(f"**{text}" if keyword.arg is None else f"{keyword.arg}={text}")
    return f"({', '.join(parts)})"


def call_shape(call: ast.Call, *, skip_first: bool = False) -> str:
    """What two calls have in common that pass the same parameters: `2,*,scale,**`."""
    positional = call.args[1:] if skip_first else call.args
    plain = sum(not isinstance(a, ast.Starred) for a in positional)
    names = sorted(k.arg for k in call.keywords if k.arg is not None)
    stars = ["*"] * (plain < len(positional)) + ["**"] * any(k.arg is None for k in call.keywords)
    return ",".join([str(plain), *names, *stars])


def _short(expression: ast.expr) -> str:
    text = ast.unparse(expression)
    return text if len(text) <= _LONG and "\n" not in text else "..."


def signature_text(function: ast.AST) -> str:
    """The signature of a function as source text, without annotations: `(self, x=1, **kwargs)`."""
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        raise TypeError(f"not a function: {type(function).__name__}")
    source = function.args

    def bare(item: ast.arg | None) -> ast.arg | None:
        return None if item is None else ast.arg(item.arg)

    stripped = ast.arguments(
        posonlyargs=[ast.arg(a.arg) for a in source.posonlyargs],
        args=[ast.arg(a.arg) for a in source.args],
        vararg=bare(source.vararg),
        kwonlyargs=[ast.arg(a.arg) for a in source.kwonlyargs],
        kw_defaults=list(source.kw_defaults),
        kwarg=bare(source.kwarg),
        defaults=list(source.defaults),
    )
    return f"({ast.unparse(stripped)})"
