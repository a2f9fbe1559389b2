"""`drafter-core simulate` replays a log and reports to people, programs and browsers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="the command is the extra drafter-core[simulate]")
pytest.importorskip("plotly", reason="the command is the extra drafter-core[simulate]")
tokenizers = pytest.importorskip("tokenizers", reason="the extra drafter-core[simulate]")
pytest.importorskip("jinja2", reason="the command is the extra drafter-core[simulate]")

from click.testing import Result  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from drafter_core import commands  # noqa: E402
from drafter_core.commands import app  # noqa: E402
from drafter_core.tokenizer import FileTokenizer, TokenizerError  # noqa: E402

TEXT = list(range(100, 160))


def words(output: str) -> str:
    """What is said, without the frame and the line breaks of a terminal."""
    return " ".join(output.replace("│", " ").split())


def command(*arguments: str, stdout: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    code = "from drafter_core.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], stdout=stdout, stderr=subprocess.PIPE,
        text=True, encoding="utf-8", check=False,
    )  # fmt: skip


def simulate(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    lines: list[Any] = [{"prompt": TEXT, "response": TEXT}] * 3
    lines += [{"prompt": "text", "response": "text"}, {"prompt": [1]}, {"prompt": [2]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "not json\n")
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with a tokenizer of whole words and a chat template."""
    words = {word: at for at, word in enumerate(["[UNK]", "ask", "say", "this", "that", "<s>"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    directory = tmp_path / "model"
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    template = (
        "{{ bos_token }}{% for m in messages %} {{ m['role'] }} {{ m['content'] }}{% endfor %} say"
    )
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template, "bos_token": {"content": "<s>"}})
    )
    return directory


def test_json_holds_every_figure(log: Path) -> None:
    result = simulate(log, "--batch", 1, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["requests"] == 3
    assert report["response_tokens"] == 3 * len(TEXT)
    assert report["tokens_per_step"] > 4
    assert report["steps_without_drafts"] == 3 * (len(TEXT) - 1)
    assert report["accepted"] == sum(row["accepted"] for row in report["by_position"])
    assert report["drafted"] == sum(row["drafted"] for row in report["by_match_length"])
    assert report["draft_us_per_step"]["median"] > 0
    assert report["start_and_end_us_per_request"] > 0
    ends_of_prompts = report["memory"]["cached_tokens"] - 3 * len(TEXT)
    assert 0 < ends_of_prompts <= 3 * 24
    assert report["cost_model"]["speed_up"] > 2
    assert [one["line"] for one in report["skipped"]] == [4, 5, 6, 7]


@pytest.mark.parametrize("name", ["simulate", "build"])
def test_help_shows_the_forms_of_a_line_as_they_are_typed(name: str) -> None:
    help_text = words(CliRunner().invoke(app, [name, "--help"]).output)
    assert '{"prompt": "text" or [ids], "response": "text" or [ids]}' in help_text
    assert '{"prompt_token_ids": [ids], "response_token_ids": [ids]}' in help_text
    assert '{"messages": [{"role": "user", "content": "..."}, ...]}' in help_text


def test_the_exact_mode_can_be_asked_for(log: Path) -> None:
    report = json.loads(simulate(log, "--mode", "exact", "--json").stdout)
    assert report["settings"]["mode"] == "exact"
    assert report["accepted"] > 0


def test_the_report_and_the_page_say_what_was_measured(log: Path, tmp_path: Path) -> None:
    warm, page = tmp_path / "warm.snapshot", tmp_path / "page.html"
    CliRunner().invoke(app, ["build", str(log), "-o", str(warm)])
    asked = {"max_depth": 12, "max_cached_requests": 7, "verify_tokens": 48, "snapshot": str(warm),
             "batch": 2, "max_tokens": 9, "max_spec_factor": 2.0, "min_token_prob": 0.2,
             "budget": 30}  # fmt: skip
    options = [part for name, value in asked.items()
               for part in (f"--{name.replace('_', '-')}", value)]  # fmt: skip
    result = simulate(log, "--json", "--html", page, *options)
    said = json.loads(result.stdout)["settings"]
    assert asked | {"mode": "default", "max_spec_offset": 0.0} == said
    html = page.read_text(encoding="utf-8")
    for name, value in said.items():
        assert f"{name} {value}" in html
    assert "Starting and ending requests" in html
    assert "starting and ending requests" in words(simulate(log).output)


def test_a_dearer_verification_lowers_the_expected_speed_up(log: Path) -> None:
    speeds = [
        json.loads(simulate(log, "--json", "--verify-us", cost).stdout)["cost_model"]["speed_up"]
        for cost in (0, 1_000, 100_000)
    ]
    assert speeds[0] > speeds[1] > speeds[2]


def test_people_read_which_lines_were_skipped_and_why(log: Path) -> None:
    output = " ".join(simulate(log).output.split())
    assert "tokens per step" in output
    assert "4 lines were skipped" in output
    assert "line 5, 6: there is no" in output
    assert "line 7: not JSON" in output


def test_the_page_needs_nothing_else_and_escapes_what_it_shows(log: Path, tmp_path: Path) -> None:
    odd = log.rename(tmp_path / "<b>odd.jsonl")
    page = tmp_path / "report.html"
    assert simulate(odd, "--html", page).exit_code == 0
    html = page.read_text(encoding="utf-8")
    head = html[: html.index("<script")]
    assert "&lt;b&gt;odd.jsonl" in head
    assert "<b>odd" not in html
    assert "<script src" not in html
    assert "<link" not in html
    assert html.count("Plotly.newPlot(") >= 5
    assert "4 lines were skipped" in html


def test_text_is_replayed_with_a_tokenizer(tmp_path: Path, model: Path) -> None:
    log = tmp_path / "text.jsonl"
    messages = [{"role": "ask", "content": "this"}, {"role": "assistant", "content": "this that"}]
    log.write_text(
        json.dumps({"messages": messages}) + "\n" + json.dumps({"prompt": "ask", "response": "say"})
    )
    report = json.loads(simulate(log, "--tokenizer", model, "--json").stdout)
    assert report["skipped"] == []
    assert (report["requests"], report["response_tokens"]) == (2, 3)
    assert report["prompt_tokens"] == len(["<s>", "ask", "this", "say"]) + len(["ask"])


def test_without_a_chat_template_messages_are_paragraphs(model: Path) -> None:
    (model / "tokenizer_config.json").unlink()
    tokenizer = FileTokenizer(model / "tokenizer.json")
    assert not tokenizer.has_chat_template
    assert tokenizer.render([{"role": "user", "content": "x"}]) == "user: x\n\nassistant: "


def test_a_template_in_a_file_of_its_own_goes_first(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ messages[0]['content'] }} that")
    assert FileTokenizer(model).render([{"role": "user", "content": "this"}]) == "this that"


def test_a_template_cannot_reach_out_of_its_sandbox(model: Path) -> None:
    (model / "chat_template.jinja").write_text(
        "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    )
    with pytest.raises(Exception, match="unsafe"):
        FileTokenizer(model).render([])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% generation %}a{% set x = 1 %}{% endgeneration %}{{ x }}b", "ab"),
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
         "<é>"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{{ messages[0].content | tojson }}", '"<é>"'),
        ("{{ 'no' if tools is not none }}{{ bos_token }}", "<s>"),
    ],
)  # fmt: skip
def test_a_template_may_use_what_transformers_provides(
    model: Path, template: str, expected: str
) -> None:
    (model / "chat_template.jinja").write_text(template)
    assert FileTokenizer(model).render([{"role": "user", "content": "<é>"}]) == expected


def test_the_template_named_default_is_taken(model: Path) -> None:
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert FileTokenizer(model).render([]) == "yes"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("chat_template.jinja", b"a\n{% for m in messages %}", "line 2 of the chat template"),
        ("chat_template.jinja", b"{% generation %}", "line 1 of the chat template"),
        ("chat_template.jinja", b"{{ x | no_such_filter }}", "line 1 of the chat template"),
        ("chat_template.jinja", b"{{ " + b"(" * 5000, "the chat template is wrong"),
        ("chat_template.jinja", b"\x80\xff", "cannot be read as UTF-8"),
        ("tokenizer_config.json", b"\x80\xff", "cannot be read as UTF-8"),
        ("tokenizer_config.json", b"{", "is not JSON"),
        ("tokenizer_config.json", b"[" * 5000, "is not JSON"),
        ("tokenizer_config.json", b"[]", "the file is [], and an object"),
        ("tokenizer_config.json", b'{"chat_template": 5}', "chat_template is 5, and text"),
        ("tokenizer_config.json", b'{"chat_template": ["a"]}', "chat_template is ['a'], and"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}', "chat_template is"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "a", "template": "b"}]}',
         'one of them named "default"'),
        ("tokenizer_config.json", b'{"chat_template": "{% if %}"}', "line 1 of the chat template"),
        ("tokenizer_config.json", b'{"chat_template": "a", "bos_token": {"a": 1}}',
         "bos_token is {'a': 1}, and text"),
    ],
)  # fmt: skip
def test_a_wrong_file_beside_the_tokenizer_is_an_error_with_a_way_out(
    log: Path, model: Path, name: str, content: bytes, expected: str
) -> None:
    (model / name).write_bytes(content)
    with pytest.raises(TokenizerError) as caught:
        FileTokenizer(model)
    for part in (str(model / name), expected, "Take the file from the model again"):
        assert part in str(caught.value)
    result = simulate(log, "--tokenizer", model)
    assert result.exit_code == 2
    assert "Take the file" in result.output


@pytest.mark.parametrize("content", ["{", '{"model": 5}'])
def test_a_file_that_is_no_tokenizer_is_an_error_with_a_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(TokenizerError, match=r"is not a tokenizer\.json"):
        FileTokenizer(path)


def test_a_missing_tokenizer_is_a_usage_error_with_a_way_out(log: Path, tmp_path: Path) -> None:
    result = simulate(log, "--tokenizer", tmp_path)
    assert result.exit_code == 2
    assert "save_pretrained" in result.output


def test_a_log_without_a_usable_line_ends_with_one(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("{}\n")
    result = simulate(empty)
    assert result.exit_code == 1
    assert "holds no line that can be used" in " ".join(result.output.split())


def test_a_log_that_is_no_text_ends_with_one(tmp_path: Path) -> None:
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00\x01")
    result = simulate(binary)
    assert result.exit_code == 1
    assert "line 1: not UTF-8 (byte 0xff" in " ".join(result.output.split())


def test_lines_that_are_no_text_are_skipped_and_the_others_replayed(
    tmp_path: Path, model: Path
) -> None:
    log = tmp_path / "odd.jsonl"
    log.write_bytes(
        b'\xef\xbb\xbf{"prompt": "ask", "response": "say"}\n'
        b'{"prompt": "\xff", "response": "say"}\n'
        b'{"prompt": "a \\ud800 b", "response": "say"}\n'
        b'{"prompt": "ask", "response": "this that"}\r\n'
    )
    result = simulate(log, "--tokenizer", model, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["requests"], report["response_tokens"]) == (2, 3)
    assert [one["line"] for one in report["skipped"]] == [2, 3]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("missing/x.html", "there is no directory"),
        (".", "is a directory"),
        ("log.jsonl", "is what is read"),
    ],
)
def test_a_page_that_cannot_be_written_is_known_before_anything_is_read(
    log: Path, monkeypatch: pytest.MonkeyPatch, name: str, expected: str
) -> None:
    monkeypatch.setattr(commands, "_read", None)
    result = simulate(log, "--html", log.parent / name)
    assert result.exit_code == 2
    assert expected in words(result.output)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_page_that_fails_all_the_same_leaves_the_report(log: Path) -> None:
    done = command("simulate", str(log), "--html", "/dev/full", "--json", stdout=subprocess.PIPE)
    assert done.returncode == 1
    assert json.loads(done.stdout)["requests"] == 3
    assert "/dev/full could not be written: No space left" in words(done.stderr)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("extra", [(), ("--json",)])
def test_a_report_that_cannot_be_printed_is_an_error_in_one_line(
    log: Path, extra: tuple[str, ...]
) -> None:
    with Path("/dev/full").open("w") as full:
        done = command("simulate", str(log), *extra, stdout=full)
    assert done.returncode == 1
    (said,) = filter(None, done.stderr.splitlines())
    assert "the output could not be written: No space left" in said


def test_a_name_that_no_encoding_expresses_is_escaped(log: Path, tmp_path: Path) -> None:
    odd = log.rename(tmp_path / os.fsdecode(b"log\xff.jsonl"))
    page = tmp_path / os.fsdecode(b"page[b]\xff.html")
    done = command("simulate", str(odd), "--html", str(page), stdout=subprocess.PIPE)
    assert done.returncode == 0, done.stderr
    assert r"page[b]\udcff.html" in done.stdout.replace("\n", "")
    assert r"log\udcff.jsonl" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "option",
    [
        ("--batch", 10**13), ("--max-tokens", 10**13), ("--max-depth", 10**13),
        ("--max-cached-requests", 10**30), ("--budget", 10**30), ("--verify-tokens", 10**30),
        ("--step-ms", "inf"), ("--step-ms", "nan"), ("--step-ms", "1e308"),
        ("--verify-us", "inf"), ("--verify-us", "nan"), ("--verify-us", "1e308"),
        ("--max-spec-factor", "inf"), ("--max-spec-factor", "nan"), ("--min-token-prob", "nan"),
    ],
)  # fmt: skip
def test_a_value_beyond_reason_is_a_usage_error(log: Path, option: tuple[str, object]) -> None:
    result = simulate(log, *option)
    assert result.exit_code == 2
    assert option[0] in result.output


def test_the_largest_values_give_json_without_infinities(log: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    largest = ("--batch", 65_536, "--max-tokens", 4096, "--max-depth", 4096, "--step-ms", 1e6,
               "--verify-us", 1e9, "--max-spec-factor", 4096, "--budget", 2**30,
               "--max-cached-requests", 2**30, "--verify-tokens", 2**30)  # fmt: skip
    result = simulate(log, "--json", *largest)
    assert result.exit_code == 0, result.output
    json.loads(result.stdout, parse_constant=refuse)


def test_too_little_memory_is_an_error_that_says_what_takes_it(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(commands, "replay", exhausted)
    result = simulate(log)
    assert result.exit_code == 1
    assert "no memory is left" in words(result.output)


def test_a_log_of_responses_of_one_token_gains_and_loses_nothing(tmp_path: Path) -> None:
    log, page = tmp_path / "short.jsonl", tmp_path / "page.html"
    log.write_text('{"response": [1]}\n')
    report = json.loads(simulate(log, "--json", "--html", page).stdout)
    assert (report["steps"], report["steps_without_drafts"]) == (0, 0)
    assert report["cost_model"]["speed_up"] == 1.0
    assert page.exists()


def test_a_missing_log_is_a_usage_error(tmp_path: Path) -> None:
    assert simulate(tmp_path / "nothing.jsonl").exit_code == 2


def test_without_the_extra_the_command_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None\nfrom drafter_core.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'drafter-core[simulate]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_replay_and_traces_need_no_extra() -> None:
    code = (
        "import sys\nfor name in ('typer', 'rich', 'plotly', 'tokenizers', 'jinja2'):\n"
        "    sys.modules[name] = None\n"
        "import drafter_core.simulate, drafter_core.traces, drafter_core.suffix_decoding"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
