"""The sessions of vllm-drafter: `nox -l` lists them, `nox` runs the default ones.

    nox               lint, types, unit and isolation: minutes, no vLLM needed
    nox -s demo       the main job: real vLLM with and without our drafter, every token compared
    nox -s engine     the tests on the real engine

`pins.toml` says which releases of vLLM there are sessions for. What follows `--` goes to the
program that a session runs: `nox -s unit -- -k evict`, `nox -s demo -- --rounds 1`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import nox
import nox.project

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["lint", "types", "unit", "isolation"]
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "tools"))

from vllm_env import (  # noqa: E402
    Environment,
    EnvironmentUnavailable,
    Pin,
    load_pins,
    torch_options,
)

try:
    PINS, _default = load_pins()
except ValueError as error:
    sys.exit(f"error: {error}")
DEFAULT_PIN = PINS[_default]

# In the order in which they depend on each other.
PLUGIN = ("packages/drafter-core", "packages/compat", "packages/vllm-plugin")
PATCHES = "packages/vllm-patches"
SCANNER = "tools/drift-scanner"
PACKAGES = (*PLUGIN, PATCHES, SCANNER)
TEST_TOOLS = ("pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.100")

MODELS = "build/models"
MENDED = ROOT / "tests" / "mended"
WHEELS = ROOT / "build" / "wheels"


@nox.session
def lint(session: nox.Session) -> None:
    """Style and common mistakes: ruff; and whether the README's table is what pins.toml says."""
    session.install("ruff~=0.17.6", "-e", "packages/compat")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("python", "tools/compatibility_table.py", "--check")


@nox.session
def types(session: nox.Session) -> None:
    """Types: mypy, strict, on every package."""
    # tomli: the code for Python 3.10 is checked too, wherever this runs.
    session.install("mypy>=1.14", "tomli>=2", *_editable())
    session.run("mypy", *[f"{package}/src" for package in PACKAGES])


@nox.session
def unit(session: nox.Session) -> None:
    """Unit and property tests of every package, on the Python that runs nox."""
    _unit_tests(session)


@nox.session(name="unit-pythons", python=["3.10", "3.11", "3.12", "3.13"])
def unit_pythons(session: nox.Session) -> None:
    """The unit tests on each supported Python that is installed; the others are skipped."""
    _unit_tests(session)


@nox.session
def isolation(session: nox.Session) -> None:
    """drafter-core alone: its wheel passes its tests where neither torch nor vLLM can be had."""
    wheel = _wheels(session, "python", ["packages/drafter-core"])
    session.install("--force-reinstall", "--no-deps", *wheel)
    session.install(*wheel, *TEST_TOOLS)
    for name in ("torch", "vllm", "vllm_drafter", "drafter_compat"):
        found = f"import importlib.util as u, sys; sys.exit(u.find_spec({name!r}) is not None)"
        session.run("python", "-c", found, silent=True)
    # Away from the sources, so that the tests meet nothing but the installed wheel.
    tests = ROOT / session.create_tmp() / "tests"
    shutil.rmtree(tests, ignore_errors=True)
    shutil.copytree(ROOT / "packages/drafter-core/tests", tests)
    config = ("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tests.parent))
    with session.chdir(tests.parent):
        session.run("pytest", *config, str(tests), *session.posargs)


@nox.session(python=False)
def demo(session: nox.Session) -> None:
    """The main job: real vLLM without speculation and with our drafter, every token compared."""
    python = _vllm_with_our_wheels(session, DEFAULT_PIN)
    session.run(python, "tools/demo/make_model.py", MODELS, external=True)
    path = {"PYTHONPATH": str(ROOT / "tools")}
    session.run(python, "-m", "demo.run", *session.posargs, env=path, external=True)


def _engine_session(name: str, pin: Pin) -> None:
    @nox.session(name=name, python=False)
    def engine(session: nox.Session) -> None:
        _test_on_vllm(session, "tests/engine", pin)

    engine.__doc__ = f"The tests on the real engine: vLLM {pin.vllm} on the CPU, our built wheels."


_engine_session("engine", DEFAULT_PIN)
for _pin in PINS.values():
    if _pin.level == "engine":
        _engine_session(f"engine(vllm='{_pin.vllm}')", _pin)


@nox.session(python=False)
def patches(session: nox.Session) -> None:
    """The four patches on the real engine, each by what the engine then does."""
    _test_on_vllm(session, "tests/patches", DEFAULT_PIN, (*PLUGIN, PATCHES))


@nox.session
def example(session: nox.Session) -> None:
    """The plugin template: makes a plugin, and runs the plugin's own sessions with our wheels."""
    session.install("cookiecutter>=2.6", "nox>=2024.4.15", "virtualenv")
    wheels = _wheels(session, "python", ["packages/compat", SCANNER])
    made = ROOT / session.create_tmp() / "vllm-abort-log"
    template = "examples/patch-plugin"
    options = ("--no-input", "--overwrite-if-exists", "-o", str(made.parent))
    session.run("cookiecutter", *options, template)
    # Our packages are on no index yet.
    folders = " ".join(sorted({str(Path(wheel).parent) for wheel in wheels}))
    links = " ".join(filter(None, (os.environ.get("PIP_FIND_LINKS"), folders)))
    with session.chdir(made):
        session.run("nox", "-s", "tests", "drift", *session.posargs, env={"PIP_FIND_LINKS": links})


@nox.session(python=False)
def traffic(session: nox.Session) -> None:
    """Hard traffic on the real engine, every token compared, and what the metrics show of it."""
    _test_on_vllm(session, "tests/traffic", DEFAULT_PIN)


@nox.session
def soak(session: nox.Session) -> None:
    """Half an hour of mixed load on one server, watched: docs/soak.md; -- --minutes 5."""
    python = _vllm_with_our_wheels(session, DEFAULT_PIN)
    session.run(python, "tools/demo/make_model.py", MODELS, external=True)
    session.install("matplotlib>=3.8")
    folder = "build/soak"  # of numbers: one file for each method, and one for the drafter alone
    session.run(python, "tests/traffic/soak_alone.py", f"{folder}/alone.json", external=True)
    session.run(python, "tests/traffic/soak.py", folder, *session.posargs, external=True)
    session.run("python", "tests/traffic/soak_report.py", folder, "docs/soak.md")


def _contract_session(pin: Pin) -> None:
    @nox.session(name=f"contract(vllm='{pin.vllm}')", python=False)
    def contract(session: nox.Session) -> None:
        # One environment serves every release: what vLLM requires is there, and the release's own
        # source, read from the index without its compiled half, comes before the vLLM in it.
        python = _vllm_with_our_wheels(session, DEFAULT_PIN, (*PLUGIN, SCANNER))
        releases = ROOT / "build" / "releases"
        script = ("tests/contract/release.py", pin.vllm, str(releases))
        session.run(python, *script, external=True)
        environment = {
            "PYTHONPATH": os.pathsep.join([str(releases / pin.vllm), str(ROOT / "tests/contract")]),
            "DRAFTER_CONTRACT_VLLM": pin.vllm,
            "HF_HUB_OFFLINE": "1",
        }
        pytest = str(Path(python).with_name("pytest"))
        session.run(pytest, "tests/contract", *session.posargs, env=environment, external=True)

    contract.__doc__ = f"The gates and the runner's call, in the real package of vLLM {pin.vllm}."


for _pin in PINS.values():
    _contract_session(_pin)


def _compare_session(pin: Pin) -> None:
    @nox.session(name=f"compare(vllm='{pin.vllm}')", python=False)
    def compare(session: nox.Session) -> None:
        python = _vllm_with_our_wheels(session, pin)
        session.run(python, "tools/demo/make_model.py", MODELS, external=True)
        path = {"PYTHONPATH": str(ROOT / "tools")}
        command = [python, "-m", "demo.compare", "--arctic", str(_peer(session, python))]
        if pin.mended:
            command += ["--path", str(MENDED)]
        page = ("--page", "docs/engines.md")
        session.run(*command, *(session.posargs or page), env=path, external=True)

    compare.__doc__ = f"Our drafter beside arctic-inference in one run, on vLLM {pin.vllm}."


for _pin in PINS.values():
    if _pin.level == "engine":
        _compare_session(_pin)


@nox.session(python=False)
def settings(session: nox.Session) -> None:
    """The plugin's settings on the real engine: the route `shim`, and what is shared."""
    _test_on_vllm(session, "tests/settings", DEFAULT_PIN)


@nox.session(python=False)
def processes(session: nox.Session) -> None:
    """Which processes load the plugin, and where it drafts, in each layout of workers."""
    python = _vllm_with_our_wheels(session, DEFAULT_PIN, PACKAGES)
    session.run(python, "tools/demo/make_model.py", MODELS, external=True)
    page = ("--page", "docs/processes.md")
    session.run(python, "tools/processes.py", *(session.posargs or page), external=True)


@nox.session
def parity(session: nox.Session) -> None:
    """Equality with arctic-inference 0.3.0, built here: a million drafts and more."""
    _bench_environment(session)
    session.run("python", "benchmarks/interface.py")
    report = ["--report", "docs/parity.md"]
    session.run("python", "benchmarks/parity.py", *(session.posargs or report))


@nox.session
def bench(session: nox.Session) -> None:
    """Speed, memory and start-up beside arctic-inference, as ratios from one run; -- --quick."""
    _bench_environment(session)
    report = ["--report", "docs/bench-core.md"]
    session.run("python", "benchmarks/bench.py", *(session.posargs or report))


@nox.session
def acceptance(session: nox.Session) -> None:
    """Accepted tokens on every trace, exact and default mode, alone and under load."""
    _bench_environment(session)
    report = ["--report", "docs/acceptance.md"]
    session.run("python", "benchmarks/acceptance.py", *(session.posargs or report))


@nox.session
def fuzz(session: nox.Session) -> None:
    """Random operations on drafters of every kind, checking the whole structure: an hour."""
    session.install("-r", "benchmarks/requirements.txt", "-e", "packages/drafter-core")
    report = ["--report", "docs/fuzz.md"]
    session.run("python", "benchmarks/fuzz.py", *(session.posargs or report))


@nox.session
def drift(session: nox.Session) -> None:
    """Our surface in every final release of vLLM since 0.11.0, from the index: docs/drift/."""
    packages = ("packages/compat", "tools/drift-scanner")
    session.install(*[word for p in packages for word in ("-e", f"{p}[test]")], *TEST_TOOLS)
    session.run("pytest", "-m", "network", *[f"{package}/tests" for package in packages])
    surface = "packages/compat/src/drafter_compat/surfaces/vllm_drafter.toml"
    ledger = [("markdown", "md"), ("json", "json"), ("html", "html")]
    write = [f"--write={style}=docs/drift/ledger.{ending}" for style, ending in ledger]
    # --facts-only: no vLLM source in the repository.
    options = ("--surface", surface, "--facts-only", *write, *session.posargs)
    session.run("vllm-drift", "ledger", ">=0.11.0", *options)


def _bench_environment(session: nox.Session) -> None:
    session.install("-r", "benchmarks/requirements.txt", *_editable())

    def run(command: Sequence[str]) -> int:
        return subprocess.run(command, check=False, capture_output=True).returncode

    # The peer is built against torch and installed without what else it requires, vLLM above all.
    options = torch_options(Path(session.bin, "python"), DEFAULT_PIN.torch, run)
    torch = f"torch=={DEFAULT_PIN.torch}+cpu"
    session.install(torch, "-r", "benchmarks/build-peer.txt", *options)
    session.install("--no-deps", "--no-build-isolation", "-r", "benchmarks/peer.txt")


def _peer(session: nox.Session, python: str) -> Path:
    """Build arctic-inference once, into a directory that only the engine to compare with sees."""
    folder, tools = ROOT / "build" / "peer", ROOT / "build" / "peer-tools"
    if folder.exists():
        return folder

    def listed(file: str) -> list[str]:
        lines = (ROOT / "benchmarks" / file).read_text().splitlines()
        return [line for line in lines if line and not line.startswith("#")]

    (peer,) = [line for line in listed("peer.txt") if line.startswith("arctic-inference")]
    build = [line for line in listed("build-peer.txt") if not line.startswith("torch")]
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade")
    session.run(*pip, "--target", str(tools), *build, external=True)
    path = {
        "PYTHONPATH": str(tools),
        "PATH": os.pathsep.join([str(tools / "bin"), os.environ.get("PATH", "")]),
    }
    partial = folder.with_name("peer-partial")
    shutil.rmtree(partial, ignore_errors=True)
    options = ("--no-deps", "--no-build-isolation", "--target", str(partial))
    session.run(*pip, *options, peer, env=path, external=True)
    partial.rename(folder)
    return folder


def _editable() -> list[str]:
    """Return pip's arguments for every package with its extras, and what its own tests need."""
    extras = {"packages/drafter-core": "simulate,test"}
    named = [f"{package}[{extras.get(package, 'test')}]" for package in PACKAGES]
    return [word for name in named for word in ("-e", name)]


def _unit_tests(session: nox.Session) -> None:
    session.install(*TEST_TOOLS, *_editable())
    tests = [f"{package}/tests" for package in (*PACKAGES, "tools/demo")]
    # What needs the index belongs to the drift session.
    session.run("pytest", "-m", "not network", *tests, *session.posargs)


def _test_on_vllm(
    session: nox.Session, tests: str, pin: Pin, packages: tuple[str, ...] = PLUGIN
) -> None:
    """Run tests of the real engine, with the models that they serve."""
    python = _vllm_with_our_wheels(session, pin, packages)
    session.run(python, "tools/demo/make_model.py", MODELS, external=True)
    environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
    if pin.mended:
        environment["PYTHONPATH"] = str(MENDED)
    # `python -m pytest` would put the repository itself on the path.
    pytest = str(Path(python).with_name("pytest"))
    session.run(pytest, tests, *session.posargs, env=environment, external=True)


def _vllm_with_our_wheels(
    session: nox.Session, pin: Pin, packages: tuple[str, ...] = PLUGIN
) -> str:
    """Return the interpreter of an environment with real vLLM and our packages as built wheels."""
    environment = Environment(pin)
    try:
        python = str(environment.ensure())
    except EnvironmentUnavailable as error:
        session.error(str(error))
    wheels = _wheels(session, python, packages)
    notes = environment.path / "our-wheels.json"
    installed = json.loads(notes.read_text()) if notes.exists() else {}
    wanted = {Path(wheel).name: _digest([Path(wheel)]) for wheel in wheels}
    if not wanted.items() <= installed.items():
        notes.unlink(missing_ok=True)
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        session.run(*pip, "--force-reinstall", "--no-deps", *wheels, external=True)
        session.run(*pip, *wheels, external=True)
        notes.write_text(json.dumps({**installed, **wanted}))
    return python


def _wheels(session: nox.Session, python: str, packages: Iterable[str]) -> list[str]:
    """Build the wheels of some packages, unless their sources are as they were, and return them."""
    wheels = []
    for package in packages:
        folder = WHEELS / Path(package).name
        sources = _digest(path for path in (ROOT / package).rglob("*") if _is_source(path))
        stamp = folder / "sources.txt"
        if not stamp.exists() or stamp.read_text() != sources:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            pip = (python, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check")
            session.run(*pip, "--no-deps", "-w", str(folder), package, external=True)
            stamp.write_text(sources)
        wheels += [str(wheel) for wheel in folder.glob("*.whl")]
    return wheels


def _is_source(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts and "tests" not in path.parts


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(os.fsencode(path.name) + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
