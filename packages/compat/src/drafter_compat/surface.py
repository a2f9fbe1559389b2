"""The surface manifest: which symbols of another package a plugin relies on, and in which shape.

A manifest is one TOML file (``docs/architecture.md``, "The surface manifest"). This module reads,
checks and writes it. It knows the manifest and nothing else: it never looks at the package that the
manifest is about (`drafter_compat.check` does) and knows no patch.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

import tomli_w
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from drafter_compat._source import signature_shape
from drafter_compat._words import nearest
from drafter_compat.versions import applies, specifiers_overlap

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

__all__ = [
    "KINDS",
    "SCHEMA",
    "Anchor",
    "Attributes",
    "CallSites",
    "ClassShape",
    "Constant",
    "ConstructorCall",
    "EntryPointGroup",
    "FromImport",
    "FunctionShape",
    "MethodCall",
    "ReplacedClass",
    "Surface",
    "SurfaceError",
    "Symbol",
    "dump_surface",
    "load_builtin_surface",
    "load_surface",
    "parse_surface",
]

SCHEMA = 1
"""The version of the manifest's schema that this module reads and writes."""

Scalar = str | int | float | bool
Pairs = tuple[tuple[str, str], ...]


class SurfaceError(ValueError):
    """A manifest that cannot be used.

    The message names the file, the symbol, what is wrong and the right spelling.
    """


# --- reading one key --------------------------------------------------------
# A reader turns a TOML value into the field's value, or raises ValueError with what it expected.


def _read_text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a non-empty string")
    return value


def _read_flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _read_texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError("a list of strings")
    return tuple(value)


def _read_table(value: object) -> Pairs:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise ValueError("a table of strings")
    return tuple(value.items())


def _read_scalars(value: object) -> tuple[Scalar, ...]:
    if not isinstance(value, list) or not all(
        isinstance(item, (str, int, float)) for item in value
    ):
        raise ValueError("a list of strings, numbers or booleans")
    return tuple(value)


def _read_scalar(value: object) -> Scalar:
    if not isinstance(value, (str, int, float)):
        raise ValueError("a string, a number or a boolean")
    return value


_MATCHES = ("all", "at-least", "exactly")


def _read_match(value: object) -> str:
    if value not in _MATCHES:
        raise ValueError(f"one of {', '.join(_MATCHES)}{nearest(value, _MATCHES)}")
    return str(value)


def _read_place(value: object) -> str:
    text = _read_text(value)
    module, colon, name = text.partition(":")
    if not colon or not _is_dotted(module) or not _is_dotted(name):
        raise ValueError("'module:name', for instance 'vllm.plugins:load_general_plugins'")
    return text


def _read_places(value: object) -> tuple[str, ...]:
    return tuple(_read_place(item) for item in _read_texts(value))


def _read_signature(value: object) -> str:
    text = _read_text(value)
    try:
        signature_shape(text)
    except ValueError:
        raise ValueError("a signature from its bracket on, '(self, a, *, b=1) -> int'") from None
    return text


def _read_dotted(value: object) -> str:
    text = _read_text(value)
    if not _is_dotted(text):
        raise ValueError("a dotted name")
    return text


def _is_dotted(text: str) -> bool:
    return bool(text) and all(part.isidentifier() for part in text.split("."))


def _key(reader: Callable[[object], Any], *, toml: str | None = None, **options: Any) -> Any:
    """A field that the manifest holds; `toml` is its key there if that is not the field's name."""
    return field(metadata={"reader": reader, "toml": toml}, **options)


# --- the kinds of symbols ---------------------------------------------------


@dataclass(frozen=True)
class Symbol:
    """One thing that a plugin relies on. Immutable and hashable.

    `id` together with `versions` is unique within a surface. `versions` is the text of a specifier,
    or None for every version that the plugin claims.
    """

    kind: ClassVar[str] = ""

    id: str = _key(_read_text)
    why: str = _key(_read_text, kw_only=True)
    versions: str | None = _key(_read_text, default=None, kw_only=True)
    optional: bool = _key(_read_flag, default=False, kw_only=True)
    """The plugin copes without it (it catches the ImportError, asks with hasattr)."""

    def applies_to(self, version: str) -> bool:
        """Whether this symbol is relied on with that version of the package."""
        return self.versions is None or applies(self.versions, version)

    @property
    def places(self) -> tuple[str, ...]:
        """The modules that must be read to check this symbol, most telling first."""
        return (self.module,) if isinstance(self, _InModule) else ()

    def problem(self) -> str | None:
        """What is wrong with the combination of keys, or None."""
        return None


@dataclass(frozen=True)
class _InModule(Symbol):
    module: str = _key(_read_dotted, kw_only=True)


@dataclass(frozen=True)
class FromImport(_InModule):
    """`module` from-imports `name` from `source`, maybe lazily; the functions `read_in` read it."""

    kind: ClassVar[str] = "from-import"

    name: str = _key(_read_dotted, kw_only=True)
    source: str = _key(_read_dotted, kw_only=True)
    read_in: tuple[str, ...] = _key(_read_texts, default=(), kw_only=True)

    @property
    def places(self) -> tuple[str, ...]:
        """The importing module, then the defining one."""
        return (self.module, self.source)


@dataclass(frozen=True)
class ReplacedClass(_InModule):
    """The class `name` is defined in `source` and bound in `module`, where the plugin rebinds it.

    `isinstance_in` are the functions of `module` that test `isinstance(value, name)`. `provides`
    maps each member of the class that the plugin puts there (its own bases included) to its
    signature, or to the empty text where it is no method; empty where the plugin does not say.
    """

    kind: ClassVar[str] = "replaced-class"

    name: str = _key(_read_dotted, kw_only=True)
    source: str = _key(_read_dotted, kw_only=True)
    isinstance_in: tuple[str, ...] = _key(_read_texts, default=(), kw_only=True)
    provides: tuple[tuple[str, str], ...] = _key(_read_table, default=(), kw_only=True)

    @property
    def places(self) -> tuple[str, ...]:
        """The importing module, then the defining one."""
        return (self.module, self.source)


@dataclass(frozen=True)
class ConstructorCall(_InModule):
    """How `function` constructs `name`: source texts of positional arguments and keywords."""

    kind: ClassVar[str] = "constructor-call"

    function: str = _key(_read_dotted, kw_only=True)
    name: str = _key(_read_dotted, kw_only=True)
    args: tuple[str, ...] = _key(_read_texts, default=(), kw_only=True)
    keywords: tuple[tuple[str, str], ...] = _key(_read_table, default=(), kw_only=True)


@dataclass(frozen=True)
class MethodCall(_InModule):
    """How `function` calls `method` of a value.

    The value is the one that `function` narrows with `isinstance(value, name)`, or, where it
    narrows nothing, the one whose source text is `value`. Exactly one of `name` and `value` is
    given.
    """

    kind: ClassVar[str] = "method-call"

    function: str = _key(_read_dotted, kw_only=True)
    method: str = _key(_read_dotted, kw_only=True)
    name: str | None = _key(_read_dotted, default=None, kw_only=True)
    value: str | None = _key(_read_text, default=None, kw_only=True)
    args: tuple[str, ...] = _key(_read_texts, default=(), kw_only=True)
    keywords: tuple[tuple[str, str], ...] = _key(_read_table, default=(), kw_only=True)

    def problem(self) -> str | None:
        """As in Symbol."""
        if (self.name is None) == (self.value is None):
            return "give exactly one of 'name' (the class tested with isinstance) and 'value'"
        return None


@dataclass(frozen=True)
class Attributes(_InModule):
    """Attributes of the class `name` (fields, properties, or set on self) that the plugin reads."""

    kind: ClassVar[str] = "attributes"

    name: str = _key(_read_dotted, kw_only=True)
    reads: tuple[str, ...] = _key(_read_texts, kw_only=True)


@dataclass(frozen=True)
class FunctionShape(_InModule):
    """A function or method: its qualified name and, where given, signature, async and decorators.

    `signature` is source text from the opening bracket on, `(self, config: VllmConfig, *,
    eager=False) -> int`. How the plugin uses it, as far as it says: `replacement` is the signature
    of what the plugin puts in its place (a patch, or the override in a subclass), `replaced_by`
    where that stands in the plugin (`module:name`), `calls` how the plugin calls it (`(query,
    scale=1.0)`, without self). With `rebound` the plugin assigns to the name in `module`, so only
    what reads the name there sees the replacement.
    """

    kind: ClassVar[str] = "function"

    name: str = _key(_read_dotted, kw_only=True)
    signature: str | None = _key(_read_signature, default=None, kw_only=True)
    is_async: bool | None = _key(_read_flag, toml="async", default=None, kw_only=True)
    decorators: tuple[str, ...] | None = _key(_read_texts, default=None, kw_only=True)
    replacement: str | None = _key(_read_signature, default=None, kw_only=True)
    replaced_by: str | None = _key(_read_place, default=None, kw_only=True)
    calls: tuple[str, ...] = _key(_read_texts, default=(), kw_only=True)
    rebound: bool = _key(_read_flag, default=False, kw_only=True)


@dataclass(frozen=True)
class ClassShape(_InModule):
    """A class that the plugin subclasses or constructs.

    `fields` maps a field to the text of its default; the empty text says that it has none. `bases`
    is compared only where given. `calls` is how the plugin constructs it (`(n=1, max_tokens=8)`),
    `provides` maps each member of the plugin's subclass to its signature, or to the empty text
    where it is no method.
    """

    kind: ClassVar[str] = "class"

    name: str = _key(_read_dotted, kw_only=True)
    bases: tuple[str, ...] | None = _key(_read_texts, default=None, kw_only=True)
    methods: tuple[str, ...] = _key(_read_texts, default=(), kw_only=True)
    fields: tuple[tuple[str, str], ...] = _key(_read_table, default=(), kw_only=True)
    calls: tuple[str, ...] = _key(_read_texts, default=(), kw_only=True)
    provides: tuple[tuple[str, str], ...] = _key(_read_table, default=(), kw_only=True)


@dataclass(frozen=True)
class Constant(_InModule):
    """A constant with its `value`, or a `Literal` or collection that `contains` these values.

    With neither, only that the module has the name.
    """

    kind: ClassVar[str] = "constant"

    name: str = _key(_read_dotted, kw_only=True)
    contains: tuple[str | int | float | bool, ...] = _key(_read_scalars, default=(), kw_only=True)
    value: str | int | float | bool | None = _key(_read_scalar, default=None, kw_only=True)

    def problem(self) -> str | None:
        """As in Symbol."""
        if self.contains and self.value is not None:
            return "give at most one of 'contains' and 'value'"
        return None


@dataclass(frozen=True)
class CallSites(Symbol):
    """Which functions (`sites`, each `module:function`) call `callee` (`module:name`).

    `match` is `at-least` (each site calls it, others may), `all` (every caller is among the sites)
    or `exactly` (both).
    """

    kind: ClassVar[str] = "call-sites"

    callee: str = _key(_read_place, kw_only=True)
    sites: tuple[str, ...] = _key(_read_places, kw_only=True)
    match: str = _key(_read_match, default="at-least", kw_only=True)

    @property
    def places(self) -> tuple[str, ...]:
        """The modules of the call sites, then the callee's."""
        return tuple(dict.fromkeys(place.partition(":")[0] for place in (*self.sites, self.callee)))


@dataclass(frozen=True)
class Anchor(_InModule):
    """Source text that must occur exactly once in `module`, or in its `function` where given."""

    kind: ClassVar[str] = "anchor"

    text: str = _key(_read_text, kw_only=True)
    function: str | None = _key(_read_dotted, default=None, kw_only=True)


@dataclass(frozen=True)
class EntryPointGroup(_InModule):
    """The constant `name` of `module` holds the name of the entry-point group."""

    kind: ClassVar[str] = "entry-point-group"

    name: str = _key(_read_dotted, kw_only=True)
    group: str = _key(_read_text, kw_only=True)


KINDS: Mapping[str, type[Symbol]] = {
    cls.kind: cls
    for cls in (
        FromImport,
        ReplacedClass,
        ConstructorCall,
        MethodCall,
        Attributes,
        FunctionShape,
        ClassShape,
        Constant,
        CallSites,
        Anchor,
        EntryPointGroup,
    )
}
"""Every kind by its name in the manifest."""


# --- the surface ------------------------------------------------------------


@dataclass(frozen=True)
class Surface:
    """What a plugin relies on. Iterating gives its symbols in the order of the manifest."""

    plugin: str
    """The plugin's distribution name."""
    package: str
    """The import package that the symbols are of."""
    versions: str
    """The specifier of the package's versions that the plugin claims to work with."""
    symbols: tuple[Symbol, ...]
    source: str = field(default="<memory>", compare=False)
    """Where the manifest was read from; for messages only."""

    def __post_init__(self) -> None:
        _check_overlaps(self)

    def __iter__(self) -> Iterator[Symbol]:
        return iter(self.symbols)

    def __len__(self) -> int:
        return len(self.symbols)

    def claims(self, version: str) -> bool:
        """Whether the plugin says that it works with that version of the package."""
        return applies(self.versions, version)

    def for_version(self, version: str) -> Surface:
        """The surface with the symbols that apply to `version` only, at most one per id.

        A symbol without `versions` applies to every version, claimed or not: whoever looks at a
        release that the plugin does not claim yet wants to know what would hold there.
        """
        return dataclasses.replace(
            self, symbols=tuple(symbol for symbol in self.symbols if symbol.applies_to(version))
        )

    def get(self, id: str, version: str | None = None) -> Symbol:
        """The symbol with that id, of `version` where the id has several shapes; else KeyError."""
        for symbol in self.symbols if version is None else self.for_version(version).symbols:
            if symbol.id == id:
                return symbol
        raise KeyError(
            f"{self.source}: no symbol {id!r}{nearest(id, [s.id for s in self.symbols])}"
        )


def load_surface(path: str | Path) -> Surface:
    """Read a manifest. SurfaceError names the file, the symbol and the right spelling."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise SurfaceError(f"{path}: cannot be read: {error.strerror or error}") from error
    return parse_surface(text, source=str(path))


def load_builtin_surface(name: str) -> Surface:
    """Read a manifest that drafter-compat ships, by the plugin's import name."""
    folder = resources.files("drafter_compat") / "surfaces"
    known = sorted(
        item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml")
    )
    if name not in known:
        raise SurfaceError(
            f"no built-in surface {name!r}; there is {', '.join(known)}{nearest(name, known)}"
        )
    return parse_surface(
        (folder / f"{name}.toml").read_text(encoding="utf-8"), source=f"{name}.toml"
    )


def parse_surface(text: str, *, source: str = "<text>") -> Surface:
    """Read a manifest from its text; `source` names it in messages. SurfaceError if it is wrong."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SurfaceError(f"{source}: not TOML: {error}") from error
    _refuse_unknown(document, ("schema", "plugin", "package", "versions", "symbol"), where=source)
    if document.get("schema") != SCHEMA:
        raise SurfaceError(
            f"{source}: schema is {document.get('schema')!r}; this "
            f"drafter-compat reads schema = {SCHEMA}"
        )
    head = {
        key: _read_key(document, key, _read_text, where=source)
        for key in ("plugin", "package", "versions")
    }
    _check_specifier(head["versions"], where=source)
    tables = document.get("symbol", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise SurfaceError(f"{source}: 'symbol' must be tables written [[symbol]]")
    symbols = tuple(
        _parse_symbol(table, source, place) for place, table in enumerate(tables, start=1)
    )
    return Surface(symbols=symbols, source=source, **head)


def dump_surface(surface: Surface) -> str:
    """The manifest's text. `parse_surface(dump_surface(s)) == s`."""
    document = {
        "schema": SCHEMA,
        "plugin": surface.plugin,
        "package": surface.package,
        "versions": surface.versions,
        "symbol": [_dump_symbol(symbol) for symbol in surface.symbols],
    }
    return tomli_w.dumps(document)


def _dump_symbol(symbol: Symbol) -> dict[str, Any]:
    table: dict[str, Any] = {"id": symbol.id, "kind": symbol.kind}
    for item in dataclasses.fields(symbol):
        value = getattr(symbol, item.name)
        if item.name == "id" or value == item.default:
            continue
        if item.metadata["reader"] is _read_table:
            value = dict(value)
        elif isinstance(value, tuple):
            value = list(value)
        table[item.metadata["toml"] or item.name] = value
    return table


def _parse_symbol(table: dict[str, Any], source: str, place: int) -> Symbol:
    where = (
        f"{source}: symbol {table['id']!r}"
        if isinstance(table.get("id"), str)
        else f"{source}: symbol {place}"
    )
    if "kind" not in table:
        raise SurfaceError(f"{where}: has no 'kind'; the kinds are {', '.join(KINDS)}")
    kind = table["kind"]
    if kind not in KINDS:
        raise SurfaceError(
            f"{where}: unknown kind {kind!r}{nearest(kind, KINDS)}; "
            f"the kinds are {', '.join(KINDS)}"
        )
    cls = KINDS[kind]
    keys = {(item.metadata["toml"] or item.name): item for item in dataclasses.fields(cls)}
    where = f"{where} ({kind})"
    _refuse_unknown(table, ("kind", *keys), where=where)
    values: dict[str, Any] = {}
    for key, item in keys.items():
        if key in table:
            values[item.name] = _read_key(table, key, item.metadata["reader"], where=where)
        elif item.default is dataclasses.MISSING:
            raise SurfaceError(f"{where}: has no {key!r}")
    if values.get("versions") is not None:
        _check_specifier(values["versions"], where=where)
    symbol = cls(**values)
    if (problem := symbol.problem()) is not None:
        raise SurfaceError(f"{where}: {problem}")
    return symbol


def _read_key(
    table: Mapping[str, Any], key: str, reader: Callable[[object], Any], *, where: str
) -> Any:
    if key not in table:
        raise SurfaceError(f"{where}: has no {key!r}")
    try:
        return reader(table[key])
    except ValueError as error:
        raise SurfaceError(f"{where}: {key!r} must be {error}, not {table[key]!r}") from error


def _refuse_unknown(table: Mapping[str, Any], known: Sequence[str], *, where: str) -> None:
    for key in table:
        if key not in known:
            raise SurfaceError(
                f"{where}: unknown key {key!r}{nearest(key, known)}; "
                f"the keys are {', '.join(known)}"
            )


def _check_specifier(text: str, *, where: str) -> None:
    try:
        SpecifierSet(text)
    except InvalidSpecifier as error:
        raise SurfaceError(
            f"{where}: 'versions' is {text!r}, which is no version specifier"
            f"{_repaired_specifier(text)}"
        ) from error


def _repaired_specifier(text: str) -> str:
    """The hint ' (did you mean ...?)' with the nearest specifier that is right, or nothing."""
    repaired = re.sub(r"=([<>!~])(?!=)", r"\1=", re.sub(r"\s+", "", text))
    repaired = re.sub(r"(?<![<>=!~])=(?!=)", "==", repaired)
    repaired = re.sub(
        r"(?<=[\w*.])\.?[,;]?(?=[<>=!~])", ",", repaired.replace("&", ",").replace(";", ",")
    )
    repaired = re.sub(r",,+", ",", repaired).strip(",")
    repaired = ",".join(
        part if part[:1] in "<>=!~" else f"=={part}" for part in repaired.split(",")
    )
    try:
        SpecifierSet(repaired)
    except InvalidSpecifier:
        return ""
    return f" (did you mean {repaired!r}?)"


def _check_overlaps(surface: Surface) -> None:
    by_id: dict[str, list[Symbol]] = {}
    for symbol in surface.symbols:
        for other in by_id.setdefault(symbol.id, []):
            shared = specifiers_overlap(
                symbol.versions or surface.versions, other.versions or surface.versions
            )
            if shared is not None:
                raise SurfaceError(
                    f"{surface.source}: symbol {symbol.id!r} is declared twice for {shared}: "
                    f"once for {other.versions or 'all versions'}, "
                    f"once for {symbol.versions or 'all versions'}; "
                    f"make the 'versions' of one id disjoint"
                )
        by_id[symbol.id].append(symbol)
