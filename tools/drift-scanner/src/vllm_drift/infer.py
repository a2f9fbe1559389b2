"""Writes a plugin's surface from its source, so that nobody has to keep a list by hand.

`infer_surface` reads the plugin (never imports it) and, where one is given, a release of the
package: with it, classes are told from functions, a member from an addition of the plugin's own,
and attributes are followed through the fields of configuration objects. Without it only what the
plugin's source proves is written.

Every symbol says in its `why` how the plugin uses it and where (`path:line`). This module turns
uses into symbols; how uses are found is in `infer_uses`, how values are followed in
`infer_plugin`.
"""

from __future__ import annotations

import ast
import configparser
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from packaging.requirements import InvalidRequirement, Requirement

from drafter_compat.surface import (
    Anchor,
    Attributes,
    ClassShape,
    Constant,
    EntryPointGroup,
    FromImport,
    FunctionShape,
    ReplacedClass,
    Surface,
    Symbol,
)
from vllm_drift.infer_plugin import Plugin, PluginClass
from vllm_drift.infer_release import Definition, Release, parse_quietly
from vllm_drift.infer_uses import Place, Use, Uses, find_uses, replacement_signature
from vllm_drift.infer_values import Local, Ref, signature_text
from vllm_drift.tree import SourceTree

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["infer_surface", "unreadable_modules"]

_GROUPS = {
    "general_plugins": "DEFAULT_PLUGINS_GROUP",
    "platform_plugins": "PLATFORM_PLUGINS_GROUP",
    "io_processor_plugins": "IO_PROCESSOR_PLUGINS_GROUP",
    "stat_logger_plugins": "STAT_LOGGER_PLUGINS_GROUP",
}
"""The constants of `vllm.plugins` that hold the groups' names (vLLM 0.11 to 0.33)."""
_VERBS = {
    "import": "imported",
    "patch": "patched",
    "subclass": "subclassed",
    "override": "overridden",
    "call": "called",
    "read": "read",
    "member": "read",
    "anchor": "looked for",
}
_PLACES = 3


def infer_surface(
    plugin: SourceTree, release: SourceTree | None = None, *, package: str = "vllm"
) -> Surface:
    """Infer what of a package a plugin relies on.

    Args:
        plugin: The plugin's source, with `METADATA`, `entry_points.txt` or `pyproject.toml` among
            its extras where they exist.
        release: A release of the package that the plugin works with. Without it, symbols whose
            existence the plugin's source does not prove are left out.
        package: The import package.

    Returns:
        A surface in the order of the plugin's modules; `why` names the places in the plugin. It
        may be empty: then the plugin uses nothing of the package.
    """
    known = Release.of(release) if release is not None else None
    model = Plugin(plugin, package=package, release=known)
    uses = find_uses(model)
    symbols = _Symbols(model, uses, known)
    return Surface(
        plugin=_distribution(plugin),
        package=package,
        versions=_claimed(plugin, package),
        symbols=(*symbols.build(), *_entry_points(plugin, package, known)),
        source=f"inferred from {plugin.label}",
    )


def unreadable_modules(plugin: SourceTree) -> list[str]:
    """The paths of the plugin's modules that this Python cannot parse, and that `infer` skips."""
    return [
        plugin.path(dotted)
        for dotted in plugin.modules()
        if parse_quietly(plugin.text(dotted) or "") is None
    ]


@dataclass
class _Gathered:
    """The uses that become one symbol."""

    kind: str
    module: str
    name: str
    uses: list[Use] = field(default_factory=list)
    reads: dict[str, list[Use]] = field(default_factory=dict)

    @property
    def id(self) -> str:
        suffix = {"attributes": " attributes", "replaced-class": " replaced"}.get(self.kind, "")
        if self.kind == "attributes" and self.optional:
            suffix = " optional attributes"
        return f"{self.module}:{self.name}{suffix}"

    @property
    def optional(self) -> bool:
        uses = [u for found in self.reads.values() for u in found]
        uses = uses or [u for u in self.uses if u.how != "import"] or self.uses
        return bool(uses) and all(u.optional for u in uses)

    def split(self) -> list[_Gathered]:
        """The attributes that the plugin must find, and those that it copes without."""
        parts = []
        for optional in (False, True):
            reads = {
                name: uses
                for name, uses in self.reads.items()
                if all(u.optional for u in uses) is optional
            }
            if reads:
                parts.append(_Gathered(self.kind, self.module, self.name, reads=reads))
        return parts


class _Symbols:
    """Decides which symbol each use belongs to."""

    def __init__(self, plugin: Plugin, uses: Uses, release: Release | None) -> None:
        self.plugin = plugin
        self.uses = uses
        self.release = release
        self.gathered: dict[tuple[str, str, str], _Gathered] = {}
        self.by_ref: dict[Ref, list[Use]] = {}
        self.spelled: dict[Definition, Ref] = {}
        """How the plugin's imports spell a class, for a member that was found by the release."""
        for use in uses.uses:
            self.by_ref.setdefault(use.ref, []).append(use)
            if use.how == "import" and "." not in use.ref.name:
                found = plugin.definition(use.ref)
                if found is not None and found.kind == "class":
                    self.spelled.setdefault(found, use.ref)

    def build(self) -> Iterator[Symbol]:
        for use in self.uses.uses:
            if use.how == "anchor":
                continue
            self._place(use)
        self._modules()
        for group in self.gathered.values():
            if group.kind == "attributes":
                yield from (self._attributes(part) for part in group.split())
                continue
            rebound = self._rebound(group)
            if rebound is None:
                yield self._symbol(group)
                continue
            # The function itself is judged where it is defined, once.
            if not self._patched_at(rebound.source, group.name):
                yield self._symbol(group)
            yield rebound
        yield from self._anchors()

    def _gather(self, kind: str, module: str, name: str) -> _Gathered:
        key = (kind, module, name)
        return self.gathered.setdefault(key, _Gathered(kind, module, name))

    # --- deciding --------------------------------------------------------------------------

    def _place(self, use: Use) -> None:
        if not use.ref.name:
            return
        found = self.plugin.definition(use.ref)
        if self.release is not None and found is None:
            self._place_missing(use)
            return
        use = self._as_spelled(use)
        kind = found.kind if found is not None else self._guess(use.ref)
        if kind == "module" or not kind:
            return
        owner, _, member = use.ref.name.rpartition(".")
        if owner and self._is_attribute(use, found, kind):
            self._gather("attributes", use.ref.module, owner).reads.setdefault(member, []).append(
                use
            )
        elif kind == "class" and use.how == "patch" and not owner:
            self._gather("replaced-class", use.ref.module, use.ref.name).uses.append(use)
        else:
            self._gather(kind, use.ref.module, use.ref.name).uses.append(use)

    def _as_spelled(self, use: Use) -> Use:
        """The use with the owner of its member named as the plugin imports it."""
        owner, _, member = use.ref.name.rpartition(".")
        found = self.plugin.definition(Ref(use.ref.module, owner)) if owner else None
        spelled = self.spelled.get(found) if found is not None else None
        return use if spelled is None else replace(use, ref=spelled.child(member))

    def _is_attribute(self, use: Use, found: Definition | None, kind: str) -> bool:
        """Whether a member of a class is something to read, not to call."""
        if kind == "constant":
            return True
        return found is not None and use.how == "member" and _is_property(found.node)

    def _place_missing(self, use: Use) -> None:
        """The release does not have it: the plugin's own addition, or already wrong there."""
        ref = use.ref
        owner, _, member = ref.name.rpartition(".")
        if use.how in ("patch", "override", "member", "call") or use.optional:
            return
        module_there = self.release is not None and self.release.is_module(ref.module)
        if ref in self.uses.written and (module_there or use.how != "import"):
            return
        if not owner:
            kind = "class" if self.plugin.is_class(ref) else "constant"
            if kind != "class" and any(u.how == "call" for u in self.by_ref[ref]):
                kind = "function"
            self._gather(kind, ref.module, ref.name).uses.append(use)
            return
        parent = self.plugin.definition(Ref(ref.module, owner))
        if parent is not None and parent.kind == "class" and self.release is not None:
            lineage, complete = self.release.lineage(parent)
            dynamic = any(self._dynamic(d) for d in lineage)
            if complete and not dynamic and not member.startswith("__"):
                self._gather("attributes", ref.module, owner).reads.setdefault(member, []).append(
                    use
                )

    def _dynamic(self, definition: Definition) -> bool:
        members = self.release.class_of(definition) if self.release is not None else None
        return members is None or bool(members.members.keys() & {"__getattr__", "__getattribute__"})

    def _guess(self, ref: Ref) -> str:
        """What a name is, without a release: by how the plugin uses it, and by its spelling.

        Empty where the plugin does not prove that the package has it.
        """
        owner, _, _ = ref.name.rpartition(".")
        if owner and not self.plugin.is_class(Ref(ref.module, owner)):
            return ""  # a member of an object or module that nothing tells
        uses = self.by_ref[ref]
        hows = {u.how for u in uses}
        put = [u.replacement.node for u in uses if u.replacement is not None]
        if hows <= {"patch", "override"}:
            return ""
        if owner:
            functions = any(not isinstance(n, ast.ClassDef) for n in put)
            return "function" if functions or "call" in hows else "constant"
        if "subclass" in hows or self.plugin.is_class(ref):
            return "class"
        if str(ref) in self.plugin.imported_modules:
            return "module"
        return "function" if "call" in hows or put else "constant"

    def _modules(self) -> None:
        """An imported module of which no name is known to be used is relied on by itself."""
        mentioned = {g.module for g in self.gathered.values()}
        for use in self.uses.uses:
            ref = use.ref
            if use.how != "import" or ref.name or ref.module in mentioned or "." not in ref.module:
                continue
            if any(m.startswith(ref.module + ".") for m in mentioned):
                continue
            parent, _, name = ref.module.rpartition(".")
            self._gather("constant", parent, name).uses.append(use)

    # --- writing ---------------------------------------------------------------------------

    def _symbol(self, group: _Gathered) -> Symbol:
        common = {
            "id": group.id,
            "module": group.module,
            "name": group.name,
            "why": _why(group.uses),
            "optional": group.optional,
        }
        if group.kind == "class":
            return ClassShape(
                **common,  # type: ignore[arg-type]
                calls=_calls(group.uses),
                provides=self._provides(Ref(group.module, group.name)),
            )
        if group.kind == "replaced-class":
            return self._replaced(group)
        if group.kind == "function" and not self._only_named(group):
            return self._function(group)
        return self._existing(group, common)

    def _only_named(self, group: _Gathered) -> bool:
        """Whether the plugin relies on a function being there, and on nothing of its shape."""
        return not _calls(group.uses) and all(
            u.how not in ("patch", "override") for u in group.uses
        )

    def _existing(self, group: _Gathered, common: dict[str, object]) -> Symbol:
        owner, _, member = group.name.rpartition(".")
        if owner:
            common = {**common, "name": owner}
            return Attributes(reads=(member,), **common)  # type: ignore[arg-type]
        return Constant(**common)  # type: ignore[arg-type]

    def _attributes(self, group: _Gathered) -> Symbol:
        parts = [f"{name} ({_places(found)})" for name, found in group.reads.items()]
        return Attributes(
            id=group.id,
            module=group.module,
            name=group.name,
            reads=tuple(group.reads),
            why="reads or sets " + ", ".join(parts),
            optional=group.optional,
        )

    def _function(self, group: _Gathered) -> Symbol:
        put = [u for u in group.uses if u.how in ("patch", "override")]
        signatures = {s for s in (replacement_signature(u) for u in put) if s is not None}
        own = put[0].replacement if put else None
        one = len(signatures) == 1
        return FunctionShape(
            id=group.id,
            module=group.module,
            name=group.name,
            why=_why(group.uses),
            optional=group.optional,
            replacement=signatures.pop() if one else None,
            replaced_by=_local_place(own) if one and own is not None else None,
            calls=_calls(group.uses),
            rebound="." not in group.name and any(u.how == "patch" for u in put),
        )

    def _replaced(self, group: _Gathered) -> Symbol:
        source = group.module
        readers: tuple[str, ...] = ()
        if self.release is not None:
            imported = self.release.imported_from(group.module, group.name)
            source = imported[0] if imported is not None else group.module
            readers = tuple(self.release.isinstance_in(group.module, group.name))
        put = group.uses[0].replacement
        info = self.plugin.classes.get(put.node) if put is not None else None
        inherits = info is not None and any(isinstance(b, Ref) for b in info.bases)
        return ReplacedClass(
            id=group.id,
            module=group.module,
            name=group.name,
            source=source,
            isinstance_in=readers,
            why=_why(group.uses),
            # What a subclass of the replaced class lacks, it inherits.
            provides=() if info is None or inherits else tuple(self._members(info).items()),
        )

    def _rebound(self, group: _Gathered) -> FromImport | None:
        """Where the rebound name is from-imported: that the module still reads it there."""
        patched = [u for u in group.uses if u.how == "patch"]
        if not patched or "." in group.name or self.release is None:
            return None
        if group.kind not in ("function", "constant"):
            return None
        imported = self.release.imported_from(group.module, group.name)
        if imported is None:
            return None
        return FromImport(
            id=f"{group.module}:{group.name} from-import",
            module=group.module,
            name=group.name,
            source=imported[0],
            read_in=tuple(self.release.readers(group.module, group.name)),
            why=_why(patched),
        )

    def _patched_at(self, module: str, name: str) -> bool:
        found = self.gathered.get(("function", module, name))
        return found is not None and any(u.how == "patch" for u in found.uses)

    def _anchors(self) -> Iterator[Symbol]:
        seen: dict[tuple[Ref, str], list[Use]] = {}
        for use in self.uses.uses:
            if use.how == "anchor":
                seen.setdefault((use.ref, use.text), []).append(use)
        counts: dict[Ref, int] = {}
        for (ref, text), found in seen.items():
            counts[ref] = counts.get(ref, 0) + 1
            yield Anchor(
                id=f"{ref.module}:{ref.name or '*'} anchor {counts[ref]}",
                module=ref.module,
                function=ref.name or None,
                text=text,
                why=_why(found),
            )

    # --- what the plugin's classes provide -------------------------------------------------

    def _provides(self, ref: Ref) -> tuple[tuple[str, str], ...]:
        """The members that every subclass of a class has in the plugin, with signatures."""
        infos = self.uses.subclasses.get(ref, [])
        based = {base.node for info in infos for base in info.bases if isinstance(base, Local)}
        tables = [self._members(info) for info in infos if info.node not in based]
        if not tables:
            return ()
        shared = set(tables[0]).intersection(*tables[1:])
        return tuple((name, text) for name, text in tables[0].items() if name in shared)

    def _members(self, info: PluginClass, depth: int = 0) -> dict[str, str]:
        members: dict[str, str] = {}
        for base in reversed(info.bases):
            if isinstance(base, Local) and base.node in self.plugin.classes and depth < 8:
                members.update(self._members(self.plugin.classes[base.node], depth + 1))
        for name in info.on_self:
            members[name] = ""
        for name, bindings in info.scope.bindings.items():
            node = bindings[-1].node
            members[name] = ""
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not _is_property(node):
                members[name] = signature_text(node)
        return members


def _is_property(node: ast.AST | None) -> bool:
    names = {ast.unparse(d).rpartition(".")[2] for d in getattr(node, "decorator_list", ())}
    return bool(names & {"property", "cached_property", "setter"})


def _calls(uses: Iterable[Use]) -> tuple[str, ...]:
    """One call of each shape that the plugin makes without asking first what there is."""
    shapes: dict[str, str] = {}
    for use in uses:
        if use.how == "call" and not use.optional and use.text:
            shapes.setdefault(use.shape, use.text)
    return tuple(shapes.values())


def _local_place(local: Local) -> str | None:
    name = local.name.replace(".<locals>", "")
    return f"{local.module}:{name}" if "<" not in name else None


def _why(uses: list[Use]) -> str:
    """`patched (a.py:3); called (b.py:7, b.py:9)`."""
    by_verb: dict[str, list[Use]] = {}
    called = {u.place for u in uses if u.how == "call"}
    for use in uses:
        if use.how in ("read", "member") and use.place in called:
            continue  # the name in a call is read, too
        by_verb.setdefault(_VERBS[use.how], []).append(use)
    if len(by_verb) > 1:
        by_verb.pop("imported", None)
    return "; ".join(f"{verb} ({_places(found)})" for verb, found in by_verb.items())


def _places(uses: Iterable[Use]) -> str:
    places: list[Place] = list(dict.fromkeys(u.place for u in uses))
    text = ", ".join(str(p) for p in places[:_PLACES])
    return text if len(places) <= _PLACES else f"{text} and {len(places) - _PLACES} more"


# --- the distribution ----------------------------------------------------------------------


def _distribution(plugin: SourceTree) -> str:
    match = re.search(r"^Name:\s*(\S+)", plugin.extras.get("METADATA", ""), re.MULTILINE)
    if match:
        return match.group(1)
    name = _project(plugin).get("name")
    return name if isinstance(name, str) else plugin.package


def _project(plugin: SourceTree) -> dict[str, object]:
    try:
        project = tomllib.loads(plugin.extras.get("pyproject.toml", "")).get("project", {})
    except tomllib.TOMLDecodeError:
        return {}
    return project if isinstance(project, dict) else {}


def _claimed(plugin: SourceTree, package: str) -> str:
    """The specifier of the package in the plugin's requirements, `>=0` where it has none."""
    lines = re.findall(r"^Requires-Dist:\s*(.+)$", plugin.extras.get("METADATA", ""), re.MULTILINE)
    declared = _project(plugin).get("dependencies", [])
    if isinstance(declared, list):
        lines += [d for d in declared if isinstance(d, str)]
    extras = _project(plugin).get("optional-dependencies", {})
    if isinstance(extras, dict):
        lines += [d for found in extras.values() if isinstance(found, list) for d in found]
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.name.lower() == package and str(requirement.specifier):
            return str(requirement.specifier)
    return ">=0"


def _entry_points(
    plugin: SourceTree, package: str, release: Release | None
) -> Iterator[EntryPointGroup]:
    """The entry-point groups of the package in which the plugin registers itself."""
    module = f"{package}.plugins"
    for group, where in _groups(plugin, package).items():
        name = _GROUPS.get(group.rpartition(".")[2])
        if release is not None:
            name = release.constant_with_value(module, group) or name
        if name is not None:
            yield EntryPointGroup(
                id=f"entry points {group}",
                module=module,
                name=name,
                group=group,
                why=f"the plugin is loaded through it ({where})",
            )


def _groups(plugin: SourceTree, package: str) -> dict[str, str]:
    found: dict[str, str] = {}
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None, strict=False)
    try:
        parser.read_string(plugin.extras.get("entry_points.txt", ""))
    except configparser.Error:
        parser = configparser.ConfigParser()
    for group in parser.sections():
        if group.startswith(package + "."):
            found[group] = "entry_points.txt"
    declared = _project(plugin).get("entry-points", {})
    for group in declared if isinstance(declared, dict) else ():
        if group.startswith(package + "."):
            found.setdefault(group, "pyproject.toml")
    for script in ("setup.py", "setup.cfg"):
        for match in re.finditer(
            rf"""["']?({re.escape(package)}\.\w+_plugins)["']?\s*[:=]""",
            plugin.extras.get(script, ""),
        ):
            found.setdefault(match.group(1), script)
    return found
