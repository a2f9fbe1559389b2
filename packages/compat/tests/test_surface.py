"""The manifest: what it accepts, how it says what is wrong, and how it chooses by version."""

from __future__ import annotations

import pickle
import textwrap

import pytest

from drafter_compat.surface import (
    KINDS,
    CallSites,
    MethodCall,
    Surface,
    SurfaceError,
    dump_surface,
    load_builtin_surface,
    load_surface,
    parse_surface,
)

HEAD = 'schema = 1\nplugin = "p"\npackage = "lib"\nversions = ">=0.1,<2"\n'

EVERY_KIND = HEAD + textwrap.dedent("""
    [[symbol]]
    id = "a"
    kind = "from-import"
    module = "lib.m"
    name = "f"
    source = "lib.n"
    read_in = ["C.g"]
    why = "w"
    [[symbol]]
    id = "b"
    kind = "replaced-class"
    module = "lib.m"
    name = "C"
    source = "lib.n"
    isinstance_in = ["g"]
    why = "w"
    [[symbol]]
    id = "c"
    kind = "constructor-call"
    module = "lib.m"
    function = "g"
    name = "C"
    args = ["self.config"]
    keywords = { eager = "True" }
    why = "w"
    [[symbol]]
    id = "d"
    kind = "method-call"
    module = "lib.m"
    function = "g"
    name = "C"
    method = "run"
    args = ["x"]
    versions = "<1"
    why = "w"
    [[symbol]]
    id = "d"
    kind = "method-call"
    module = "lib.m"
    function = "g"
    value = "self.c"
    method = "run"
    args = ["y", "x"]
    versions = ">=1"
    why = "w"
    [[symbol]]
    id = "e"
    kind = "attributes"
    module = "lib.m"
    name = "C"
    reads = ["x", "y"]
    why = "w"
    [[symbol]]
    id = "f"
    kind = "function"
    module = "lib.m"
    name = "C.g"
    signature = "(self, a, *, b=1)"
    async = true
    decorators = []
    why = "w"
    [[symbol]]
    id = "g"
    kind = "class"
    module = "lib.m"
    name = "C"
    bases = ["Base"]
    methods = ["g"]
    fields = { x = "1", y = "" }
    why = "w"
    [[symbol]]
    id = "h"
    kind = "constant"
    module = "lib.m"
    name = "METHODS"
    contains = ["a", 2]
    why = "w"
    [[symbol]]
    id = "i"
    kind = "constant"
    module = "lib.m"
    name = "DEBUG"
    value = false
    why = "w"
    [[symbol]]
    id = "j"
    kind = "call-sites"
    callee = "lib.m:load"
    match = "exactly"
    sites = ["lib.n:C.g"]
    why = "w"
    [[symbol]]
    id = "k"
    kind = "anchor"
    module = "lib.m"
    function = "g"
    text = "x = 1"
    why = "w"
    [[symbol]]
    id = "l"
    kind = "entry-point-group"
    module = "lib.m"
    name = "GROUP"
    group = "lib.plugins"
    why = "w"
    """)


def one(**changes: str) -> str:
    """A manifest with one from-import symbol; a change of a key to '' leaves the key out."""
    keys = {
        "id": '"gate"',
        "kind": '"from-import"',
        "module": '"lib.m"',
        "name": '"f"',
        "source": '"lib.n"',
        "why": '"w"',
    }
    keys.update(changes)
    lines = (f"{key} = {value}" for key, value in keys.items() if value)
    return HEAD + "[[symbol]]\n" + "\n".join(lines) + "\n"


def error_of(text: str) -> str:
    with pytest.raises(SurfaceError) as caught:
        parse_surface(text, source="my.toml")
    return str(caught.value)


def test_every_kind_can_be_read_and_is_the_class_of_its_kind() -> None:
    surface = parse_surface(EVERY_KIND)
    assert {symbol.kind for symbol in surface} == set(KINDS)
    assert all(type(symbol) is KINDS[symbol.kind] for symbol in surface)


def test_writing_and_reading_again_gives_an_equal_surface() -> None:
    surface = parse_surface(EVERY_KIND)
    assert parse_surface(dump_surface(surface)) == surface


def test_symbols_are_hashable_and_can_be_sent_to_another_process() -> None:
    surface = parse_surface(EVERY_KIND)
    assert len(set(surface.symbols)) == len(surface)
    assert pickle.loads(pickle.dumps(surface)) == surface


def test_call_sites_match_at_least_unless_said_otherwise() -> None:
    text = EVERY_KIND.replace('match = "exactly"\n', "")
    symbol = parse_surface(text).get("j")
    assert isinstance(symbol, CallSites)
    assert symbol.match == "at-least"


def test_a_version_selects_one_shape_per_id() -> None:
    surface = parse_surface(EVERY_KIND)
    old, new = surface.get("d", "0.9"), surface.get("d", "1.0")
    assert isinstance(old, MethodCall)
    assert isinstance(new, MethodCall)
    assert (old.args, new.args) == (("x",), ("y", "x"))
    assert len(surface.for_version("1.0")) == len(surface) - 1


def test_a_symbol_without_versions_applies_to_unclaimed_versions_too() -> None:
    surface = parse_surface(EVERY_KIND)
    assert not surface.claims("3.0")
    assert surface.for_version("3.0").get("a").id == "a"


def test_two_overlapping_shapes_of_one_id_are_refused_naming_a_shared_version() -> None:
    message = error_of(EVERY_KIND.replace('versions = ">=1"', 'versions = ">=0.5"'))
    assert "my.toml: symbol 'd' is declared twice for" in message
    assert "once for <1, once for >=0.5" in message


def test_the_same_id_twice_without_versions_is_refused() -> None:
    text = one()
    with pytest.raises(SurfaceError, match="declared twice"):
        parse_surface(text + text.removeprefix(HEAD))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"sauce": '"lib.n"'}, "unknown key 'sauce' (did you mean 'source'?)"),
        ({"kind": '"from_import"'}, "unknown kind 'from_import' (did you mean 'from-import'?)"),
        ({"kind": '"fromimport"'}, "unknown kind 'fromimport' (did you mean 'from-import'?)"),
        ({"kind": ""}, "has no 'kind'"),
        ({"source": ""}, "has no 'source'"),
        ({"why": ""}, "has no 'why'"),
        ({"module": '"lib m"'}, "'module' must be a dotted name, not 'lib m'"),
        ({"read_in": '"g"'}, "'read_in' must be a list of strings, not 'g'"),
        ({"versions": '">=0.15<0.24"'}, "(did you mean '>=0.15,<0.24'?)"),
        ({"versions": '"=>1"'}, "(did you mean '>=1'?)"),
        ({"versions": '"1.2"'}, "(did you mean '==1.2'?)"),
        ({"versions": '"soon"'}, "is 'soon', which is no version specifier"),
    ],
)
def test_a_wrong_symbol_names_file_symbol_and_the_nearest_right_spelling(
    change: dict[str, str], expected: str
) -> None:
    message = error_of(one(**change))
    assert message.startswith("my.toml: symbol 'gate'")
    assert expected in message


def test_a_symbol_without_an_id_is_named_by_its_place() -> None:
    assert error_of(one(id="")).startswith("my.toml: symbol 1 (from-import): has no 'id'")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("schema = 1", "schema = 2", "schema is 2"),
        ('plugin = "p"\n', "", "has no 'plugin'"),
        ('plugin = "p"', 'plugni = "p"', "unknown key 'plugni' (did you mean 'plugin'?)"),
        ('">=0.1,<2"', '">=0.1 <2"', "(did you mean '>=0.1,<2'?)"),
        ("schema = 1", "schema 1", "not TOML"),
    ],
)
def test_a_wrong_head_is_refused(old: str, new: str, expected: str) -> None:
    message = error_of(one().replace(old, new))
    assert message.startswith("my.toml: ")
    assert expected in message


@pytest.mark.parametrize(
    ("kind_keys", "expected"),
    [
        ('function = "g"\nmethod = "run"', "exactly one of 'name'"),
        ('function = "g"\nmethod = "run"\nname = "C"\nvalue = "c"', "exactly one of 'name'"),
    ],
)
def test_a_method_call_names_its_value_in_exactly_one_way(kind_keys: str, expected: str) -> None:
    text = (
        HEAD + f'[[symbol]]\nid = "x"\nkind = "method-call"\nmodule = "m"\nwhy = "w"\n{kind_keys}'
    )
    assert expected in error_of(text)


def test_a_constant_does_not_say_both_its_value_and_what_it_contains() -> None:
    text = HEAD + '[[symbol]]\nid = "x"\nkind = "constant"\nmodule = "m"\nname = "N"\nwhy = "w"\n'
    assert len(parse_surface(text)) == 1
    assert "at most one of 'contains' and 'value'" in error_of(text + "contains = [1]\nvalue = 1\n")


def test_a_call_site_is_a_module_and_a_function() -> None:
    message = error_of(EVERY_KIND.replace('"lib.n:C.g"', '"lib.n.C.g"'))
    assert "'sites' must be 'module:name'" in message


def test_a_signature_is_one() -> None:
    message = error_of(EVERY_KIND.replace('"(self, a, *, b=1)"', '"self, a, *, b=1"'))
    assert "'signature' must be a signature from its bracket on" in message


def test_an_unknown_match_names_the_nearest_one() -> None:
    assert "(did you mean 'exactly'?)" in error_of(EVERY_KIND.replace("exactly", "exact"))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(SurfaceError, match=r"nowhere\.toml: cannot be read"):
        load_surface("nowhere.toml")


def test_an_unknown_builtin_surface_names_the_nearest_one() -> None:
    with pytest.raises(SurfaceError, match="did you mean 'vllm_drafter'"):
        load_builtin_surface("vllm-drafter")


def test_the_builtin_surface_says_why_for_every_symbol_and_claims_its_versions() -> None:
    surface = load_builtin_surface("vllm_drafter")
    assert isinstance(surface, Surface)
    assert surface.claims("0.11.1")
    assert surface.claims("0.33.0+cpu")
    assert not surface.claims("0.11.0")
    assert not surface.claims("0.34.0")
    assert all(symbol.why for symbol in surface)


def test_an_unknown_symbol_is_a_key_error_with_the_nearest_id() -> None:
    with pytest.raises(KeyError, match="proposer-propose"):
        load_builtin_surface("vllm_drafter").get("proposer-propse")
