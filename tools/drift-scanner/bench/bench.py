"""How long the scanner takes, from an empty cache and from a full one, and beside what.

    cd tools/drift-scanner/bench
    python bench.py --rounds 5 --json bench.json --markdown ../../../docs/drift/bench.md

Every measurement is a process of its own, as a user starts it. The rounds alternate between all
measurements, so that a slow minute of the machine or the network hits all of them; the table has
medians. Cold means an empty cache directory (what the operating system and the index's servers keep
is beyond us). CPU seconds are those of the process and its children: they say what the work is
where other programs share the machine.

Beside it: `griffe` compares the same two releases once their sources are on disk, and
`pip download` fetches a release as a whole. Both are run only where they are installed
(`pip install griffelib`) and wanted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SURFACE = ROOT / "packages/compat/src/drafter_compat/surfaces/vllm_drafter.toml"
NEWEST, OLD, NEW = "0.33.0", "0.25.1", "0.26.0"
PLUGIN = "arctic-inference==0.3.0"
EVERY = ">=0.11.0,<=0.33.0"


@dataclass(frozen=True)
class Run:
    """One process: wall and CPU seconds, and how it ended."""

    seconds: float
    cpu: float
    exit_code: int
    load: float
    """The machine's load average of the last minute when it started."""


@dataclass(frozen=True)
class Measurement:
    """Something to measure. `prepare` runs before each round and is not measured."""

    name: str
    says: str
    command: Callable[[Path], list[str]]
    prepare: Callable[[Path], None]
    limit: float | None = None
    """The most seconds that it should take on two cores, where there is such a promise."""
    expect: tuple[int, ...] = (0, 1)


def scanner(*arguments: str) -> Callable[[Path], list[str]]:
    """Return what makes the command line of the scanner for a cache directory."""
    return lambda cache: [
        sys.executable,
        "-m",
        "vllm_drift",
        *arguments,
        "--json",
        "--cache-dir",
        str(cache),
    ]


def empty(cache: Path) -> None:
    """Start from nothing."""
    shutil.rmtree(cache, ignore_errors=True)


def without_results(cache: Path) -> None:
    """Leave releases and facts about modules: as after an edit of the manifest."""
    shutil.rmtree(cache / "results", ignore_errors=True)


def as_it_is(cache: Path) -> None:
    """Start from what the round before left."""


SCAN = ("scan", NEWEST, "--surface", str(SURFACE))
LEDGER = ("ledger", EVERY, "--surface", str(SURFACE))
CHECK = ("check", PLUGIN, "--from", OLD, "--to", NEW)


def measurements(sources: Path) -> list[Measurement]:
    """List what is measured; a warm one comes after the cold one that fills its cache."""
    found = [
        Measurement("scan cold", f"our surface in {NEWEST}, empty cache", scanner(*SCAN), empty, 3),
        Measurement("scan warm", "the same again", scanner(*SCAN), as_it_is),
        Measurement(
            "ledger cold",
            f"our surface in every final release {EVERY}",
            scanner(*LEDGER),
            empty,
            60,
        ),
        Measurement("ledger warm", "the same again", scanner(*LEDGER), as_it_is, 8),
        Measurement(
            "ledger edited",
            "the same after an edit of the manifest",
            scanner(*LEDGER),
            without_results,
        ),
        Measurement(
            "check cold", f"{PLUGIN}, {OLD} to {NEW}, empty cache", scanner(*CHECK), empty, 15
        ),
        Measurement("check warm", "the same again", scanner(*CHECK), as_it_is),
    ]
    if util.find_spec("griffe") is not None:
        here = str(Path(__file__).with_name("griffe_check.py"))
        found.append(
            Measurement(
                "griffe",
                f"every public object of vLLM, {OLD} to {NEW}, sources on disk",
                lambda _: [sys.executable, here, str(sources / OLD), str(sources / NEW)],
                as_it_is,
            )
        )
    return found


def download(cache: Path) -> list[str]:
    """Return the command that fetches a whole wheel."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    platforms = ["--only-binary=:all:", "--platform", "manylinux_2_28_x86_64"]
    return [*pip, *platforms, "--python-version", "3.12", "--dest", str(cache), f"vllm=={NEWEST}"]


def run(command: list[str]) -> Run:
    """Run one process to its end."""
    load = os.getloadavg()[0]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Run(seconds, cpu, done.returncode, load)


def extract(sources: Path) -> None:
    """Put the sources of both releases on disk, for griffe."""
    from vllm_drift.sources import Sources

    with Sources() as opened:
        for label in (OLD, NEW):
            (candidate,) = opened.expand([label])
            tree = opened.load(candidate)
            for module in tree.modules():
                path = sources / label / tree.path(module)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(tree.data(module) or b"")


def measure(rounds: int, wanted: list[str], with_download: bool) -> dict[str, list[Run]]:
    """Run every measurement once per round."""
    results: dict[str, list[Run]] = {}
    with tempfile.TemporaryDirectory(prefix="vllm-drift-bench-") as name:
        sources = Path(name) / "sources"
        listed = measurements(sources)
        if with_download:
            what = f"pip download of {NEWEST}"
            listed.append(Measurement("download", what, download, empty, expect=(0,)))
        if any(m.name == "griffe" for m in listed):
            extract(sources)
        listed = [m for m in listed if not wanted or m.name.split()[0] in wanted]
        for number in range(rounds):
            for m in listed:
                cache = Path(name) / f"cache-{m.name.split()[0]}"
                m.prepare(cache)
                result = run(m.command(cache))
                if result.exit_code not in m.expect:
                    sys.exit(f"{m.name} ended with {result.exit_code}; that is no measurement")
                results.setdefault(m.name, []).append(result)
                print(
                    f"round {number + 1}: {m.name:14} {result.seconds:7.2f} s, "
                    f"{result.cpu:6.2f} CPU s, load {result.load:.1f}",
                    file=sys.stderr,
                    flush=True,
                )
    return results


def table(results: dict[str, list[Run]]) -> str:
    """Return the medians as a Markdown table."""
    by_name = {m.name: m for m in measurements(Path())}
    by_name["download"] = Measurement("download", f"`pip download` of {NEWEST}", download, empty)
    rows = [
        "| | median, s | fastest, s | CPU, s | at most, s | what |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for name, runs in results.items():
        m = by_name[name]
        limit = "" if m.limit is None else f"{m.limit:g}"
        seconds = [r.seconds for r in runs]
        cpu = statistics.median(r.cpu for r in runs)
        rows.append(
            f"| {name} | {statistics.median(seconds):.2f} | {min(seconds):.2f} | {cpu:.2f} "
            f"| {limit} | {m.says} |"
        )
    return "\n".join(rows)


def machine(results: dict[str, list[Run]]) -> str:
    """Say on what it was measured."""
    loads = [r.load for runs in results.values() for r in runs]
    versions = ", ".join(
        f"{name} {metadata.version(name)}"
        for name in ("vllm-drift", "libcst", "griffelib")
        if _installed(name)
    )
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"{versions}; load average while measuring {min(loads):.1f} to {max(loads):.1f}, "
        f"{len(next(iter(results.values())))} rounds."
    )


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def main() -> None:
    """Measure, print, and write what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", nargs="*", default=[], help="scan, ledger, check, griffe, download"
    )
    parser.add_argument("--download", action="store_true", help="also fetch a whole wheel, 336 MB")
    parser.add_argument("--json", type=Path, help="write every run here")
    parser.add_argument(
        "--markdown", type=Path, help="put the table between its marks in this file"
    )
    arguments = parser.parse_args()
    results = measure(arguments.rounds, arguments.only, arguments.download)
    text = f"{table(results)}\n\n{machine(results)}"
    print(text)
    if arguments.json:
        runs = {name: [asdict(r) for r in found] for name, found in results.items()}
        arguments.json.write_text(json.dumps(runs, indent=2) + "\n")
    if arguments.markdown:
        begin, end = "<!-- figures -->", "<!-- end of figures -->"
        page = arguments.markdown.read_text(encoding="utf-8")
        before, _, rest = page.partition(begin)
        after = rest.partition(end)[2]
        page = f"{before}{begin}\n{text}\n{end}{after}"
        arguments.markdown.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
