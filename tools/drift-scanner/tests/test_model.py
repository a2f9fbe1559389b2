"""What the model of one module says: pieces, facts, narrowing, normal forms."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path

import pytest
from drift_small_tree import model_of

from vllm_drift import normal
from vllm_drift.cache import Cache
from vllm_drift.collect import NotParsed, collect, cut_parsed, parse_signature
from vllm_drift.facts import Call
from vllm_drift.model import FactStore, ModuleModel
from vllm_drift.segments import UncertainCut, cut, walk

STDLIB = Path(sysconfig.get_path("stdlib"))
REAL_MODULES = [*sorted(STDLIB.glob("*.py"))[::7], STDLIB / "turtle.py", STDLIB / "typing.py"]


# cutting without parsing


def shape(segments: object) -> list[tuple[str, str, int, int, int, int]]:
    return [(s.kind, s.name, s.line, s.start, s.body, s.end) for s in walk(segments)]  # type: ignore[arg-type]


@pytest.mark.parametrize("path", REAL_MODULES, ids=lambda p: p.name)
def test_cutting_real_modules_gives_what_a_parser_gives(path: Path) -> None:
    text = path.read_text("utf-8", errors="replace")
    assert shape(cut(text)) == shape(cut_parsed(text))


@pytest.mark.parametrize(
    "text",
    [
        'x = """\ndef not_a_function():\n    pass\n"""\n\ndef f():\n    pass\n',
        "x = (\n    1,\n)\nclass A:\n    y = [\n1,\n]\n\n    def m(self): pass\n",
        "@decorator\n# a comment\n@other(\n    1\n)\ndef f(\n    a,\n): return a\n",
        "if x:\n    def f(): pass\nelse:\n    def g(): pass\n\ndef h(): pass\n",
        "try:\n    import a\nexcept ImportError:\n    a = None\nfinally:\n    pass\nclass C: "
        "pass\n",
        "async def f():\n    pass\n\n\nasync def g(): ...\n",
        "class A:\n    '''doc\n\n    def no(): '''\n    def yes(self):\n        pass\n    x = "
        "1\n    y = 2\n",
        "x = 1 \\\n  + 2\ndef f(): pass\n",
        "x = 'a # b' # c\n\n# comment\n\ndef f(): pass  # end",
        "",
        "# only a comment",
    ],
)
def test_cutting_awkward_text_gives_what_a_parser_gives(text: str) -> None:
    assert shape(cut(text)) == shape(cut_parsed(text))


@pytest.mark.parametrize(
    "text",
    [
        'value = f"{ "(" }"\ndef f(a):\n    return a\n',  # a bracket in a quote in a quote
        'value = f"{ ")" }"\nclass C:\n    x = 1\ndef f(a):\n    return a\n',
    ],
)
def test_a_cut_that_went_wrong_is_made_again_with_a_parser(text: str) -> None:
    with pytest.raises(UncertainCut):
        cut(text)
    model = model_of(text)
    assert "f" in model.names()
    function = model.function("f")
    assert function is not None
    assert str(function.signature) == "(a)"


def test_a_module_that_is_not_python_says_so_and_defines_nothing() -> None:
    model = model_of("def f(:\n    pass\n")
    assert model.functions("f") == ()
    assert model.broken is not None
    assert "line 1" in model.broken.lower() or "syntax" in model.broken.lower()


# definitions


def test_functions_are_found_with_their_full_signature() -> None:
    model = model_of(
        """
        class Runner:
            @classmethod
            async def make(cls, a: int, /, b: "str" = 'x', *args, c, d=None, **kw) -> Optional[int]:
                pass
        """
    )
    function = model.function("Runner.make")
    assert function is not None
    assert function.kind == "classmethod"
    assert function.signature.is_async
    assert (
        str(function.signature)
        == "(cls, a: int, /, b: str = 'x', *args, c, d=None, **kw) -> int | None"
    )


def test_a_header_is_read_without_the_body() -> None:
    model = model_of("def f(a, b=1):\n    return g(a)\n")
    header = model.header("f")
    assert header is not None
    assert (header.line, header.end, header.calls) == (1, 2, ())
    assert str(header.signature) == "(a, b=1)"


@pytest.mark.parametrize(
    ("decorators", "kind"),
    [
        ("", "method"),
        ("@property", "property"),
        ("@functools.cached_property", "property"),
        ("@staticmethod", "staticmethod"),
        ("@typing.overload", "overload"),
        ("@value.setter", "setter"),
    ],
)
def test_the_kind_of_a_method_is_told_by_its_decorators(decorators: str, kind: str) -> None:
    model = model_of(f"class C:\n    {decorators or '# none'}\n    def value(self): pass\n")
    assert [f.kind for f in model.functions("C.value")] == [kind]


def test_of_several_definitions_the_one_that_counts_at_run_time_is_given() -> None:
    model = model_of(
        """
        from typing import overload
        @overload
        def f(a: int) -> int: ...
        @overload
        def f(a: str) -> str: ...
        def f(a): return a
        """
    )
    function = model.function("f")
    assert function is not None
    assert (function.kind, function.line) == ("function", 7)
    assert len(model.functions("f")) == 3


def test_definitions_in_conditional_blocks_are_found_and_marked() -> None:
    model = model_of(
        """
        if TYPE_CHECKING:
            def f(a): ...
        else:
            def f(a, b): ...
        class C:
            if x:
                def m(self): ...
        """
    )
    assert [f.condition for f in model.functions("f")] == ["type-checking", "conditional"]
    function = model.function("f")
    assert function is not None
    assert len(function.signature.parameters) == 2
    assert model.function("C.m") is not None
    assert model.members("C") == ("m",)


def test_classes_have_bases_fields_and_attributes_of_self() -> None:
    model = model_of(
        """
        @dataclass
        class C(Base, Generic[T], metaclass=Meta):
            a: int
            b: "str" = field(default='x')
            C: ClassVar[int] = 1
            def __init__(self):
                self.d = 1
                text = '''
                self.not_one = 1
                '''
                self.e: int = 2
                self.f, self.g = 1, 2
        """
    )
    cls = model.class_("C")
    assert cls is not None
    assert cls.bases == ("Base", "Generic[T]")
    assert cls.keywords == (("metaclass", "Meta"),)
    assert [(f.target, f.annotation, f.value) for f in cls.fields] == [
        ("a", "int", ""),
        ("b", "str", "field(default='x')"),
        ("C", "ClassVar[int]", "1"),
    ]
    assert [n for n in "defgx" if model.assigned_to_self("C", n)] == ["d", "e", "f", "g"]
    assert model.assigned_to_self("C", "not_one") is None


def test_nested_functions_are_reached_and_their_calls_belong_to_the_outer_one() -> None:
    model = model_of(
        """
        def outer():
            def inner():
                target(1)
            return inner
        """
    )
    assert model.function("outer.<locals>.inner") is not None
    outer = model.function("outer")
    assert outer is not None
    assert [c.name for c in outer.calls] == ["target"]


# names


def test_imports_say_module_name_level_and_condition() -> None:
    model = model_of(
        """
        import a.b
        import a.c as ac
        from .. import x
        from .m import y as z
        from s import *
        if TYPE_CHECKING:
            from t import T
        try:
            import u
        except ImportError:
            u = None
        """
    )
    found = {(i.module, i.name, i.bound, i.level, i.condition) for i in model.imports()}
    assert found == {
        ("a.b", "", "a", 0, ""),
        ("a.c", "", "ac", 0, ""),
        ("", "x", "x", 2, ""),
        ("m", "y", "z", 1, ""),
        ("s", "*", "*", 0, ""),
        ("t", "T", "T", 0, "type-checking"),
        ("u", "", "u", 0, "conditional"),
    }
    assert [b.kind for b in model.bindings("u")] == ["import", "assignment"]


def test_relative_imports_start_from_the_package() -> None:
    text = "from ..config import A\nfrom . import b\n"
    module = ModuleModel("vllm.v1.core", text)
    package = ModuleModel("vllm.v1", text, is_package=True)
    assert [module.imported_from(i) for i in module.imports()] == ["vllm.config", "vllm.v1"]
    assert [package.imported_from(i) for i in package.imports()] == ["vllm.config", "vllm.v1"]


def test_reads_leave_out_locals_and_name_their_lines() -> None:
    model = model_of(
        """
        def f(a):
            b = a + flag
            return [c for c in b if c in known]
        def g():
            from m import flag
            return flag
        def h():
            flag = 1
            return flag
        def i(x=flag):
            global other
            other = 1
            return lambda known: known
        """
    )
    read = {f.qualname: [(r.name, r.line) for r in f.reads] for f in model.all_functions()}
    assert read == {
        "f": [("flag", 3), ("known", 4)],
        "g": [],
        "h": [],
        "i": [],
    }


# calls and narrowing


def calls(text: str) -> list[Call]:
    function = collect(text).functions[0]
    return list(function.calls)


def test_calls_have_positional_and_keyword_arguments_as_normal_text() -> None:
    (call,) = calls("def f():\n    x.y.go(a, ( b ), *c, k = 'v', **d)\n")
    assert (call.callee, call.receiver, call.name, call.line) == ("x.y.go", "x.y", "go", 2)
    assert call.positional == ("a", "b", "*c")
    assert call.keywords == (("k", "'v'"), ("**", "d"))


NARROWING = {
    "an assert": "    assert isinstance(self.d, C)\n    self.d.go()\n",
    "an if": "    if isinstance(self.d, C):\n        self.d.go()\n",
    "an if with and": "    if x and isinstance(self.d, C) and y:\n        self.d.go()\n",
    "a tuple of classes": "    assert isinstance(self.d, (B, C))\n    self.d.go()\n",
    "a union": "    assert isinstance(self.d, B | C)\n    self.d.go()\n",
    "an early return": "    if not isinstance(self.d, C):\n        return\n    self.d.go()\n",
    "a conditional expression": "    return self.d.go() if isinstance(self.d, C) else None\n",
    "an and": "    return isinstance(self.d, C) and self.d.go()\n",
    "a cast": "    d = cast(C, self.d)\n    d.go()\n",
    "a cast in quotes": "    d = cast('C', self.d)\n    d.go()\n",
    "an alias": "    assert isinstance(self.d, C)\n    d = self.d\n    d.go()\n",
    "a walrus": "    if isinstance(d := self.d, C):\n        d.go()\n",
    "a nested block": "    assert isinstance(self.d, C)\n    for i in r:\n        self.d.go()\n",
}


@pytest.mark.parametrize("body", NARROWING.values(), ids=NARROWING)
def test_isinstance_narrows_the_receiver(body: str) -> None:
    (call,) = [c for c in calls(f"def f(self):\n{body}") if c.name == "go"]
    assert "C" in call.narrowed


NOT_NARROWING = {
    "nothing": "    self.d.go()\n",
    "the else": "    if isinstance(self.d, C):\n        pass\n    else:\n        self.d.go()\n",
    "after the branch": "    if isinstance(self.d, C):\n        pass\n    self.d.go()\n",
    "a new value": "    assert isinstance(self.d, C)\n    self.d = x\n    self.d.go()\n",
    "a new owner": "    assert isinstance(self.d, C)\n    self = x\n    self.d.go()\n",
    "an or": "    if isinstance(self.d, C) or x:\n        self.d.go()\n",
    "a negation": "    if not isinstance(self.d, C):\n        self.d.go()\n",
    "another value": "    assert isinstance(self.e, C)\n    self.d.go()\n",
}


@pytest.mark.parametrize("body", NOT_NARROWING.values(), ids=NOT_NARROWING)
def test_what_isinstance_does_not_say_does_not_narrow(body: str) -> None:
    (call,) = [c for c in calls(f"def f(self):\n{body}") if c.name == "go"]
    assert call.narrowed == ()


def test_attribute_uses_know_stores_and_hasattr_guards() -> None:
    function = collect(
        "def f(self):\n"
        "    self.a.b = 1\n"
        "    if hasattr(self.a, 'c'):\n"
        "        self.a.c()\n"
        "    self.a.c()\n"
    ).functions[0]
    uses = [
        (u.value, u.name, u.store, u.guarded) for u in function.attributes if u.value == "self.a"
    ]
    assert uses == [
        ("self.a", "b", True, False),
        ("self.a", "c", False, True),
        ("self.a", "c", False, False),
    ]


def test_source_in_newer_syntax_than_the_interpreter_is_read() -> None:
    block = collect("def f[T](x: T) -> T:\n    match x:\n        case C(a=1): return x\n")
    assert [f.qualname for f in block.functions] == ["f"]
    assert block.functions[0].reads[0].name == "C"


def test_every_function_of_real_modules_is_collected() -> None:
    for path in (STDLIB / "argparse.py", STDLIB / "dataclasses.py"):
        text = path.read_text("utf-8")
        model = ModuleModel(path.stem, text)
        expected = {
            (n.name, n.lineno)
            for n in ast.walk(ast.parse(text))
            if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
        }
        found = set()
        todo = list(model.all_functions())
        while todo:
            function = todo.pop()
            found.add((function.name, function.line))
            todo += function.nested
            for cls in function.nested_classes:
                todo += cls.functions
        assert found == expected


# normal forms


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("def f():\n    return a+b # c\n", "def f():\n\n    return (a + b)\n"),
        ("def f():\n    'doc'\n    g( 'x', )\n", 'def f():\n    g("x")\n'),
        ("def f():\n    x: 'int' = 1\n", "def f():\n    x: int = 1\n"),
        ("def f():\n    import a\n    import b\n", "def f():\n    import b\n    import a\n"),
        ("def f():\n    from m import (b, a)\n", "def f():\n    from m import a, b\n"),
        ("    def f(self):\n        return 1\n", "def g(self, x):\n    return 1\n"),
        ("def f():\n    x = cast('T', y)\n", "def f():\n    x = cast(T, y)\n"),
    ],
)
def test_bodies_that_do_the_same_are_equal_in_normal_form(first: str, second: str) -> None:
    assert normal.body(first) == normal.body(second)


def test_bodies_that_differ_are_not_equal_in_normal_form() -> None:
    assert normal.body("def f():\n    return a - b\n") != normal.body(
        "def f():\n    return b - a\n"
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("'VllmConfig'", "VllmConfig"),
        ("Optional[int]", "int | None"),
        ("Union[str, int, None]", "None | int | str"),
        ("typing.List['int']", "list[int]"),
        ("Dict[str, 'torch.Tensor']", "dict[str, torch.Tensor]"),
    ],
)
def test_annotations_that_mean_the_same_are_equal(first: str, second: str) -> None:
    assert normal.annotation(first) == normal.annotation(second)


def test_literals_keep_their_strings() -> None:
    assert normal.annotation("Literal['a', 'b']") == "Literal['a', 'b']"


def test_a_signature_is_read_from_source_text() -> None:
    assert str(parse_signature("(self, x: int = 0, *, y) -> bool")) == (
        "(self, x: int = 0, *, y) -> bool"
    )
    with pytest.raises(NotParsed):
        parse_signature("(self")


# keeping facts


def test_facts_are_kept_by_content_and_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def f(a):\n    g(a)\n"
    first = ModuleModel("m", text, store=FactStore(Cache(tmp_path)), digest="d")
    before = first.function("f")
    first.save()
    monkeypatch.setattr("vllm_drift.model.collect", lambda *a, **k: pytest.fail("parsed again"))
    again = ModuleModel("m", text, store=FactStore(Cache(tmp_path)), digest="d")
    assert again.function("f") == before


def test_facts_of_a_damaged_cache_are_computed_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    store = FactStore(cache)
    model = ModuleModel("m", "def f(a): pass\n", store=store, digest="d")
    model.function("f")
    model.save()
    for path in (tmp_path / "facts").rglob("*"):
        if path.is_file():
            path.write_bytes(b"damaged")
    again = ModuleModel("m", "def f(a): pass\n", store=FactStore(cache), digest="d")
    assert again.function("f") is not None


def test_annotations_of_a_functions_own_variables_are_no_reads() -> None:
    (function,) = collect("def f(self):\n    x: Plain = 1\n    self.y: 'Quoted' = Read\n").functions
    assert [r.name for r in function.reads] == ["Read"]
