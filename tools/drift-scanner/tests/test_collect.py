"""The facts of a piece are the same whichever parser read it."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest

from vllm_drift import collect, collect_cst
from vllm_drift.facts import Read
from vllm_drift.sources import Sources

EVERYTHING = '''
"""A module."""
from __future__ import annotations
import os, sys as system
import a.b.c
from . import near
from ..far import (one as eins, two)
from typing import TYPE_CHECKING, cast
if TYPE_CHECKING:
    from x import Y
elif os.name == "nt":
    import ntpath
else:
    import posixpath

LIMIT: "int" = 3; other = LIMIT
first = second = a.b.c(LIMIT, *os.args, key="it's", **{"ü": 1, **system.more})
table["key"], (low, *high) = f"{LIMIT!r:>{other}} and {a.b(one)}" "more", [2]
counter += 1 if first else second

@decorate(first, by=[x for x in other if isinstance(x, eins) and x.ready])
class Thing(Base["T"], *mixins, metaclass=Meta, **options):
    """Says what it is."""
    field: "list[int]" = dataclasses.field(default_factory=list)
    bare: Optional[Y]

    if system.version_info >= (3, 11):
        def conditional(self): return self.field

    @property
    def size(self) -> "int": return len(self.field)

    @size.setter
    def size(self, value): self.field = [value] * 2

    async def run(self, one, /, two: Y | None = None, *rest, key=LIMIT, **more) -> None:
        global counter
        if isinstance(two, Y) and two.go(key) and hasattr(two, "extra") and two.extra:
            two.go(*rest, key, last=True, **more)
        elif not isinstance(one, (Y, a.b.Z)):
            raise TypeError(f"""{one.name
            } is none""")
        one.go()
        async with self.lock(key) as held, two.open():
            held.use((lambda q, w=key: q.x(w, one))(two))
        try:
            for i, self.seen[one] in enumerate(rest): self.step(i)
            else: self.end()
        except (ValueError, a.Error) as error:
            del error, self.seen[one]
        finally:
            two = cast("Y", one); two.go()
        while (line := self.read()) is not None: line.strip()
        match one:
            case Point(x=0, y=where) if where: where.go()
            case [eins, *others] | {"k": _, **remaining}: others.go(remaining)
            case None: pass
        def inner(z=counter):
            nonlocal two
            class Local(Thing):
                def go(self): return two.deep(z)
            return Local().go()
        return await inner(two.a.b(1)(2)[3:4].c)
'''


def test_both_parsers_give_the_same_facts() -> None:
    assert _facts(collect, EVERYTHING) == _facts(collect_cst, EVERYTHING)
    assert collect.cut_parsed(EVERYTHING) == collect_cst.cut_parsed(EVERYTHING)


def test_both_parsers_give_the_same_facts_of_an_indented_member() -> None:
    text = "    # why\n    @classmethod\n    def make(cls, n: int = 1): return cls(n)\n"

    assert _facts(collect, text, in_class=True) == _facts(collect_cst, text, in_class=True)


@pytest.mark.network
@pytest.mark.parametrize(
    "module",
    [
        "vllm.v1.worker.gpu_model_runner",
        "vllm.config.speculative",
        "vllm.engine.arg_utils",
        "vllm.v1.core.sched.scheduler",
        "vllm.model_executor.models.registry",
    ],
)
def test_both_parsers_give_the_same_facts_of_a_real_module(module: str) -> None:
    with Sources() as sources:
        (release,) = sources.expand(["0.33.0"])
        text = sources.load(release).text(module)

    assert text is not None
    assert _facts(collect, text) == _facts(collect_cst, text)
    assert collect.cut_parsed(text) == collect_cst.cut_parsed(text)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="this Python knows the syntax")
def test_a_syntax_that_is_newer_than_the_interpreter_is_read_all_the_same() -> None:
    block = collect.collect("def first[T](items: list[T]) -> T:\n    return items[0]\n")

    assert [f.qualname for f in block.functions] == ["first"]
    assert str(block.functions[0].signature) == "(items: list[T]) -> T"


def test_what_no_parser_reads_says_why() -> None:
    with pytest.raises(collect.NotParsed, match="Syntax Error"):
        collect.collect("def broken(:\n")


def _facts(parser: Any, text: str, **options: bool) -> Any:
    return _without_words(parser.collect(text, **options))


def _without_words(fact: Any) -> Any:
    """Leave out reads of `None`, `True` and `False`, which are names to one parser only."""
    if isinstance(fact, tuple):
        return tuple(
            _without_words(item)
            for item in fact
            if not (isinstance(item, Read) and item.name in ("None", "True", "False"))
        )
    if dataclasses.is_dataclass(fact) and not isinstance(fact, type):
        values = {f.name: _without_words(getattr(fact, f.name)) for f in dataclasses.fields(fact)}
        return dataclasses.replace(fact, **values)
    return fact
