"""A module as the analysis sees it: what it defines, binds, calls and reads, parsed piece by piece.

A `ModuleModel` cuts its text (`segments`), and parses (`collect`) only the pieces that a question
needs. Facts are kept by the text of the piece, so a function that did not change between two
releases is parsed once, and on disk by the content of the module. Knows one module at a time;
following names into other modules is `resolve`'s business.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from vllm_drift import normal
from vllm_drift.cache import Cache
from vllm_drift.collect import NotParsed, collect, cut_parsed
from vllm_drift.facts import (
    Assignment,
    Block,
    Class,
    Function,
    Import,
    placed_block,
)
from vllm_drift.segments import Segment, UncertainCut, cut, masked, walk
from vllm_drift.tree import SourceTree

__all__ = ["FACTS_VERSION", "Binding", "FactStore", "ModuleModel", "load_module"]

FACTS_VERSION = 5
"""Raise it whenever `segments`, `collect`, `facts` or `normal` say something else about the same
text.
"""

_ENVIRONMENT = f"{FACTS_VERSION}-{sys.version_info[0]}.{sys.version_info[1]}"


@dataclass(frozen=True)
class Binding:
    """One statement of a module body that gives a name its value."""

    kind: str
    """`function`, `class`, `import` or `assignment`."""
    name: str
    line: int
    condition: str = ""
    """"" (always), `type-checking`, or `conditional`."""
    fact: Import | Assignment | None = None
    """What the import or assignment says; None for functions and classes (ask the model for
    those).
    """

    @property
    def at_runtime(self) -> bool:
        """False for what only a type checker sees."""
        return self.condition != "type-checking"


class FactStore:
    """The facts of pieces by their text, in memory, and by module in a cache directory."""

    def __init__(self, cache: Cache | None = None) -> None:
        self._cache = cache if cache is not None else Cache(None)
        self._blocks: dict[tuple[bytes, bool], Block] = {}
        self._modules: dict[str, dict[object, object]] = {}

    def load(self, digest: str) -> dict[object, object]:
        """What is known about the module of that content, to be added to; empty if nothing is."""
        if digest not in self._modules:
            self._modules[digest] = self._read(digest)
        return self._modules[digest]

    def _read(self, digest: str) -> dict[object, object]:
        data = self._cache.get("facts", f"module {_ENVIRONMENT} {digest}")
        if data is None:
            return {}
        try:
            stored = pickle.loads(data)
        except (
            pickle.UnpicklingError,
            AttributeError,
            ImportError,
            TypeError,
            ValueError,
            EOFError,
        ):
            return {}
        return stored if isinstance(stored, dict) else {}

    def save(self, digest: str, stored: dict[object, object]) -> None:
        """Store what is known about a module."""
        self._cache.put("facts", f"module {_ENVIRONMENT} {digest}", pickle.dumps(stored, 5))

    def block(self, text: str, in_class: bool) -> Block:
        """The facts of a piece. Raises NotParsed."""
        key = piece_key(text, in_class)
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = collect(text, in_class=in_class)
        return block

    def remember(self, key: tuple[bytes, bool], block: Block) -> None:
        """Add facts that were loaded."""
        self._blocks.setdefault(key, block)


def piece_key(text: str, in_class: bool) -> tuple[bytes, bool]:
    """What identifies the facts of a piece."""
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=16).digest(), in_class


def load_module(tree: SourceTree, dotted: str, store: FactStore) -> ModuleModel | None:
    """The model of a module of a tree, or None if the tree has no such module."""
    text = tree.text(dotted)
    if text is None:
        return None
    return ModuleModel(
        dotted,
        text,
        path=tree.path(dotted),
        is_package=tree.is_package(dotted),
        store=store,
        digest=tree.digest(dotted),
    )


class ModuleModel:
    """What a module's source says. Every question parses only the pieces that it needs.

    Attributes:
        dotted: Its name, `vllm.v1.worker.gpu_model_runner`.
        text: Its source.
        path: Its path in the tree.
        is_package: Whether it is an `__init__.py`; relative imports start from another package
        then. broken: Why it could not be parsed, or None. Set by the first question that meets the
        fault;
            such a module defines nothing.
    """

    def __init__(
        self,
        dotted: str,
        text: str,
        *,
        path: str = "",
        is_package: bool = False,
        store: FactStore | None = None,
        digest: str = "",
    ) -> None:
        self.dotted = dotted
        self.text = text
        self.path = path or dotted.replace(".", "/") + ".py"
        self.is_package = is_package
        self.broken: str | None = None
        self._store = store if store is not None else FactStore()
        self._digest = digest
        self._placed: dict[tuple[int, int], Block] = {}
        self._stored = self._store.load(digest) if digest else {}
        self._known = len(self._stored)
        for key, block in self._stored.items():
            if isinstance(block, Block):
                self._store.remember(key, block)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"ModuleModel({self.dotted!r})"

    def save(self) -> None:
        """Put what was parsed since into the cache, if there is anything new."""
        if self._digest and len(self._stored) > self._known:
            self._store.save(self._digest, self._stored)
            self._known = len(self._stored)

    # pieces ---------------------------------------------------------------------------------------

    @cached_property
    def lines(self) -> list[str]:
        """The text's lines, without line ends."""
        return self.text.split("\n")

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The statements of the module body; classes are cut into their members."""
        stored = self._stored.get("segments")
        if stored is None:
            stored = self._stored["segments"] = self._cut()
        return stored  # type: ignore[return-value]

    def _cut(self) -> tuple[Segment, ...]:
        try:
            return cut(self.text)
        except UncertainCut:
            pass
        self._stored["parsed"] = True
        try:
            return cut_parsed(self.text)
        except NotParsed as error:
            self.broken = str(error)
            return ()

    @cached_property
    def _by_name(self) -> dict[str, list[Segment]]:
        found: dict[str, list[Segment]] = {}
        for segment in walk(self.segments):
            if segment.name:
                found.setdefault(segment.name, []).append(segment)
        return found

    def segment_text(self, segment: Segment) -> str:
        """The source text of a segment, whole lines, decorators included."""
        return "\n".join(self.lines[segment.start - 1 : segment.end - 1])

    def block(self, segment: Segment) -> Block:
        """The facts of a segment: of a class that was cut, those of its header only."""
        key = (segment.start, segment.end)
        if key not in self._placed:
            self._placed[key] = self._block(segment)
        return self._placed[key]

    def _block(self, segment: Segment) -> Block:
        if self.broken is not None:
            return Block()
        prefix = segment.name.rpartition(".")[0] if segment.name else self._owner(segment)
        text = self._piece(segment)
        in_class = bool(prefix)
        key = piece_key(text, in_class)
        try:
            block = self._store.block(text, in_class)
        except NotParsed:
            if self._recut():
                # The cut was wrong; ask again with one that a parser made.
                again = self._same_segment(segment)
                return self._block(again) if again is not None else Block()
            return Block()
        self._stored.setdefault(key, block)
        return placed_block(block, segment.start - 1, f"{prefix}." if prefix else "")

    def _piece(self, segment: Segment) -> str:
        if segment.kind != "class" or segment.body >= segment.end:
            return self.segment_text(segment)
        return self._header_text(segment)

    def _header_text(self, segment: Segment) -> str:
        header = self.lines[segment.start - 1 : segment.body - 1]
        indent = re.match(r"[ \t]*", self.lines[segment.line - 1])
        return "\n".join([*header, f"{indent.group() if indent else ''}  pass"])

    def _owner(self, segment: Segment) -> str:
        """The qualified name of the class whose member an unnamed segment is."""
        owner = ""
        for other in walk(self.segments):
            if other.kind == "class" and other.body <= segment.start < other.end and other.members:
                owner = other.name
        return owner

    def _recut(self) -> bool:
        """Cut again with a parser. False if that cannot help; `broken` is set if it cannot
        parse.
        """
        if self._stored.get("parsed"):
            self.broken = self.broken or "a piece of the module cannot be parsed"
            return False
        try:
            segments = cut_parsed(self.text)
        except NotParsed as error:
            self.broken = str(error)
            return False
        self._stored["segments"], self._stored["parsed"] = segments, True
        self.__dict__["segments"] = segments
        self.__dict__.pop("_by_name", None)
        self._placed.clear()
        return True

    def _same_segment(self, segment: Segment) -> Segment | None:
        if segment.name:
            candidates = [s for s in self._by_name.get(segment.name, ()) if s.line == segment.line]
            return candidates[0] if candidates else None
        return next((s for s in walk(self.segments) if s.start == segment.start), None)

    # definitions ----------------------------------------------------------------------------------

    def names(self) -> tuple[str, ...]:
        """Qualified names of the functions and classes of the module body and of its classes'
        bodies, in source order. Those inside `if` or `try` blocks are left out.
        """
        return tuple(self._by_name)

    def places(self, qualname: str) -> tuple[tuple[str, int], ...]:
        """The kind (`function`, `class`) and line of each definition among `names`, without
        parsing.
        """
        return tuple((s.kind, s.line) for s in self._by_name.get(qualname, ()))

    def is_class(self, qualname: str) -> bool:
        """Whether a class statement of that qualified name exists."""
        return self.class_(qualname) is not None

    def functions(self, qualname: str) -> tuple[Function, ...]:
        """Every definition of the function, in source order: overloads, property parts, and those
        in
        `if` or `try` blocks included. Nested functions are asked for as `outer.<locals>.inner`.
        """
        if "<locals>" in qualname:
            outer = qualname.partition(".<locals>.")[0]
            return tuple(
                f
                for top in self.functions(outer)
                for f in _all_nested(top)
                if f.qualname == qualname
            )
        found = [
            f
            for segment in self._by_name.get(qualname, ())
            if segment.kind == "function"
            for f in self.block(segment).functions
        ]
        prefix, _, last = qualname.rpartition(".")
        for block in self._loose_blocks(prefix, last):
            found += [f for f in block.functions if f.qualname == qualname]
            found += [
                f
                for c in _all_classes(block.classes)
                for f in c.functions
                if f.qualname == qualname
            ]
        found = list(dict.fromkeys(found))
        found.sort(key=lambda f: f.line)
        return tuple(found)

    def header(self, qualname: str) -> Function | None:
        """What `function` returns, of which only the header is needed: name, line, kind, signature,
        decorators. The body is not parsed, so that its calls and reads may be missing.
        """
        segments = self._by_name.get(qualname, [])
        if len(segments) != 1 or segments[0].kind != "function":
            return self.function(qualname)
        segment = segments[0]
        if segment.body >= segment.end or self.broken is not None:
            return self.function(qualname)
        if (segment.start, segment.end) in self._placed:
            return self.function(qualname)
        prefix = qualname.rpartition(".")[0]
        text = self._header_text(segment)
        try:
            block = self._store.block(text, bool(prefix))
        except NotParsed:
            return self.function(qualname)
        self._stored.setdefault(piece_key(text, bool(prefix)), block)
        found = placed_block(block, segment.start - 1, f"{prefix}." if prefix else "").functions
        return dataclasses.replace(found[0], end=self._last_line(segment)) if found else None

    def _last_line(self, segment: Segment) -> int:
        """The last line of a segment that is not blank."""
        end = segment.end - 1
        while end > segment.line and not self.lines[end - 1].strip():
            end -= 1
        return end

    def function(self, qualname: str) -> Function | None:
        """The definition that counts at run time: the last one that is no overload, setter, deleter
        or type-checking stand-in, an unconditional one first.
        """
        found = [
            f
            for f in self.functions(qualname)
            if f.kind not in ("overload", "setter", "deleter") and f.condition != "type-checking"
        ]
        always = [f for f in found if not f.condition]
        counting = always or found
        return counting[-1] if counting else None

    def class_(self, qualname: str) -> Class | None:
        """The class of that qualified name with the fields and imports of its body; `functions` and
        `classes` hold only what stands in `if` or `try` blocks of the body. None if there is none.
        """
        for segment in reversed(self._by_name.get(qualname, [])):
            if segment.kind != "class":
                continue
            blocks = self.block(segment)
            if not blocks.classes:
                return None
            cls = blocks.classes[-1]
            if not segment.members:
                return cls
            inner = [self.block(m) for m in segment.members if m.kind == "other"]
            return dataclasses.replace(
                cls,
                end=self._last_line(segment),
                fields=tuple(a for b in inner for a in b.assignments),
                imports=tuple(i for b in inner for i in b.imports),
                functions=tuple(f for b in inner for f in b.functions),
                classes=tuple(c for b in inner for c in b.classes),
            )
        prefix, _, last = qualname.rpartition(".")
        for block in self._loose_blocks(prefix, last):
            for cls in _all_classes(block.classes):
                if cls.qualname == qualname:
                    return cls
        return None

    def class_header(self, qualname: str) -> Class | None:
        """The class's name, bases, keywords and decorators, without its body; None if there is
        none.
        """
        for segment in reversed(self._by_name.get(qualname, [])):
            if segment.kind == "class":
                classes = self.block(segment).classes
                return classes[-1] if classes else None
        return self.class_(qualname)

    def members(self, qualname: str) -> tuple[str, ...]:
        """The plain names of the functions and classes that the class's body defines, in order."""
        cls = self.class_(qualname)
        if cls is None:
            return ()
        found = [
            m.name.rpartition(".")[2]
            for segment in self._by_name.get(qualname, ())
            for m in segment.members
            if m.name
        ]
        found += [f.name for f in cls.functions] + [c.name for c in cls.classes]
        return tuple(dict.fromkeys(found))

    def methods_mentioning(self, qualname: str, *words: str) -> Iterator[Function]:
        """Yield the functions of the class's body whose text contains one of the words."""
        for segment in self._by_name.get(qualname, ()):
            for member in segment.members:
                if member.kind == "function" and _mentions(self.segment_text(member), words):
                    yield from self.block(member).functions
        cls = self.class_(qualname)
        if cls is not None:
            yield from cls.functions

    def assigned_to_self(self, qualname: str, name: str) -> int | None:
        """The line of the first assignment to that attribute of the object in a method of the
        class's body, or None. Read off the text, strings and comments left out.
        """
        store = re.compile(
            rf"(?:^|[,(;:])[ \t]*\*?(\w+)\.{re.escape(name)}[ \t]*"
            rf"(?:=(?!=)|:[^\n]*|,[^\n]*?=(?!=)|\)?[ \t]*=(?!=))",
            re.MULTILINE,
        )
        for segment in self._by_name.get(qualname, ()):
            for member in segment.members:
                if member.kind != "function":
                    continue
                text = self.segment_text(member)
                if f".{name}" not in text:
                    continue
                me = re.search(r"\bdef\s+\w+\s*(?:\[[^\]]*\])?\(\s*(\w+)", text)
                for match in store.finditer(masked(text)) if me else ():
                    if me is not None and match.group(1) == me.group(1):
                        return member.start + text.count("\n", 0, match.start(1))
        return None

    def functions_mentioning(self, *words: str) -> Iterator[Function]:
        """Yield every function of the module and of its classes whose text contains one of the
        words, nested ones and those in `if` blocks with their outer statement.
        """
        for segment in walk(self.segments):
            if segment.kind == "class":
                continue
            if _mentions(self.segment_text(segment), words):
                block = self.block(segment)
                yield from block.functions
                for cls in _all_classes(block.classes):
                    yield from cls.functions

    def blocks_mentioning(self, *words: str) -> Iterator[Block]:
        """Yield the facts of the statements, outside functions, whose text contains one of the
        words: module level and class level code.
        """
        for segment in walk(self.segments):
            if segment.kind == "function":
                continue
            if segment.kind == "class" and segment.body < segment.end:
                text = self._piece(segment)
            else:
                text = self.segment_text(segment)
            if _mentions(text, words):
                yield self.block(segment)

    def all_functions(self) -> Iterator[Function]:
        """Yield every function; parses the whole module."""
        return self.functions_mentioning("")

    # names ----------------------------------------------------------------------------------------

    def bindings(self, name: str) -> tuple[Binding, ...]:
        """What the module body binds to a name, in source order; star imports are not looked
        into.
        """
        found = []
        word = re.compile(rf"\b{re.escape(name)}\b")
        for segment in self.segments:
            if segment.kind == "other":
                if _may_bind(self.segment_text(segment), word):
                    found += [b for b in _bindings_of(self.block(segment)) if b.name == name]
            elif segment.name == name:
                found.append(Binding(segment.kind, name, segment.line))
        return tuple(found)

    def all_bindings(self) -> tuple[Binding, ...]:
        """Everything that the module body binds, in source order."""
        found: list[Binding] = []
        for segment in self.segments:
            if segment.kind == "other":
                found += _bindings_of(self.block(segment))
            else:
                found.append(Binding(segment.kind, segment.name, segment.line))
        return tuple(found)

    def star_imports(self) -> tuple[Import, ...]:
        """The star imports of the module body."""
        if "import *" not in self.text:
            return ()
        return tuple(
            fact
            for segment in self.segments
            if segment.kind == "other" and "*" in self.segment_text(segment)
            for fact in self.block(segment).imports
            if fact.name == "*"
        )

    def imports(self) -> tuple[Import, ...]:
        """Every import of the module body."""
        return tuple(
            fact
            for segment in self.segments
            if segment.kind == "other" and "import" in self.segment_text(segment)
            for fact in self.block(segment).imports
        )

    def imported_from(self, fact: Import) -> str:
        """The absolute name of the module that an import names, relative dots resolved."""
        if not fact.level:
            return fact.module
        package = self.dotted.split(".")
        drop = fact.level - (1 if self.is_package else 0)
        base = package[: len(package) - drop] if drop else package
        return ".".join([*base, *([fact.module] if fact.module else [])])

    def _loose_blocks(self, prefix: str, last: str) -> Iterator[Block]:
        """Facts of the uncut statements (`if`, `try`, ...) that may define `prefix.last`."""
        levels = [self.segments]
        levels += [s.members for s in self._by_name.get(prefix, ()) if s.members]
        outer = prefix.partition(".")[0]
        for level in levels:
            for segment in level:
                if segment.kind != "other" and segment.members:
                    continue
                text = self.segment_text(segment)
                if segment.kind == "other" and not ("def " in text or "class " in text):
                    continue
                if segment.kind == "function":
                    continue
                if last in text and (not prefix or outer in text or level is not self.segments):
                    yield self.block(segment)

    # texts ----------------------------------------------------------------------------------------

    def text_of(self, qualname: str) -> str | None:
        """The source text of a function or class, decorators included; of several definitions the
        one that counts at run time.
        """
        segments = self._by_name.get(qualname, [])
        if len(segments) == 1:
            return self.segment_text(segments[0])
        function = self.function(qualname)
        if function is not None:
            for segment in segments:
                if segment.kind == "function" and segment.line == function.line:
                    return self.segment_text(segment)
            return "\n".join(self.lines[function.line - 1 : function.end])
        for segment in reversed(segments):
            if segment.kind == "class":
                return self.segment_text(segment)
        cls = self.class_(qualname)
        return None if cls is None else "\n".join(self.lines[cls.line - 1 : cls.end])

    def normal_body(self, qualname: str) -> str | None:
        """The normalised body of a function or class (`normal.body`), or None if there is none."""
        key = f"body {qualname}"
        stored = self._stored.get(key)
        if stored is None:
            text = self.text_of(qualname)
            if text is None:
                return None
            stored = self._stored[key] = normal.body(text)
        return str(stored)


_PLAIN = re.compile(
    r"(?!(?:import|from|if|try|for|while|with|match|async|del)\b)"
    r"[A-Za-z_][\w.]*(?:[ \t]*[,:=]|[ \t]*\Z)"
)


def _may_bind(text: str, word: re.Pattern[str]) -> bool:
    """Whether a statement may bind the word: a plain assignment only left of its last `=` outside
    strings and brackets, everything else wherever the word occurs outside strings.
    """
    if word.search(text) is None:
        return False
    if _PLAIN.match(text):
        first = text.partition("\n")[0]
        target = first.partition("=")[0]
        if "(" not in target and "[" not in target.partition(":")[0] and "=" in first:
            rest = first.partition("=")[2]
            chained = re.match(r"[^\n\"'(\[{#]*=", rest)
            if chained is None:
                return word.search(target.partition(":")[0]) is not None
    return word.search(masked(text)) is not None


def _mentions(text: str, words: tuple[str, ...]) -> bool:
    return any(word in text for word in words)


def _bindings_of(block: Block) -> list[Binding]:
    """What the statements of a block bind, in source order."""
    found = [Binding("import", i.bound, i.line, i.condition, i) for i in block.imports]
    found += [
        Binding("assignment", a.target, a.line, a.condition, a)
        for a in block.assignments
        if a.operator != "del" and "." not in a.target and "[" not in a.target
    ]
    found += [Binding("function", f.qualname, f.line, f.condition) for f in block.functions]
    found += [Binding("class", c.qualname, c.line, c.condition) for c in block.classes]
    return sorted(found, key=lambda b: b.line)


def _all_classes(classes: tuple[Class, ...]) -> Iterator[Class]:
    for cls in classes:
        yield cls
        yield from _all_classes(cls.classes)


def _all_nested(function: Function) -> Iterator[Function]:
    for inner in function.nested:
        yield inner
        yield from _all_nested(inner)
    for cls in function.nested_classes:
        for inner in cls.functions:
            yield inner
            yield from _all_nested(inner)
