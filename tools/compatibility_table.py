"""Writes the table of what works with which vLLM into README.md, from pins.toml and the surface
manifest.

    python tools/compatibility_table.py            # write it
    python tools/compatibility_table.py --check    # exit 1 if the README says something else

Only what a pin lists as `verified` is claimed. Runs where drafter-compat is installed; states no
version itself.
"""

from __future__ import annotations

import argparse
import importlib.resources
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from vllm_env import Pin, load_pins

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

README = Path(__file__).resolve().parent.parent / "README.md"
START, END = "<!-- table: pins.toml -->", "<!-- end of table -->"

# What each session proves, in the words of the README.
CLAIMS = {
    "contract": "gates and the runner's call, in the real package",
    "engine": "generation on the real engine",
    "compare": "beside arctic-inference on the real engine",
    "demo": "the demo",
}
MENDED = (
    "**As shipped its CPU build cannot speculate with any method**; what ran on the real engine "
    "ran with it [mended for the tests](docs/pins.md)"
)


def runner_call(surface: dict[str, Any], version: str) -> str:
    """Return how the runner of a release calls the proposer, in short."""
    for symbol in surface["symbol"]:
        applies = SpecifierSet(symbol.get("versions", surface["versions"])).contains(version)
        if symbol["id"] == "proposer-propose" and applies:
            words = [text.removeprefix("self.") for text in symbol["args"]]
            return f"`propose({', '.join([*words, *symbol.get('keywords', {})])})`"
    raise LookupError(f"the surface manifest has no proposer-propose for vLLM {version}")


def has_custom_class(surface: dict[str, Any], version: str) -> bool:
    """Say whether a release has the official extension point."""
    (symbol,) = [s for s in surface["symbol"] if s["id"] == "custom-class-method"]
    return bool(SpecifierSet(symbol["versions"]).contains(version))


def rows(pins: list[Pin], surface: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the table's rows; neighbours about which the same is true share one."""

    def truth(pin: Pin) -> tuple[str, ...]:
        verified = "; ".join(CLAIMS[name] for name in CLAIMS if name in pin.verified)
        if pin.mended:
            verified += f". {MENDED}"
        custom = "yes" if has_custom_class(surface, pin.vllm) else "-"
        return runner_call(surface, pin.vllm), custom, verified or "not yet"

    for same, group in groupby(pins, truth):
        releases = [pin.vllm for pin in group]
        yield (" to ".join(dict.fromkeys([releases[-1], releases[0]])), *same)


def table() -> str:
    """Return the table in markdown."""
    manifest = importlib.resources.files("drafter_compat") / "surfaces" / "vllm_drafter.toml"
    surface = tomllib.loads(manifest.read_text(encoding="utf-8"))
    pins, _ = load_pins()
    head = ("vLLM", "the runner's call", "`custom_class`", "verified here")
    lines = [head, ("---",) * len(head), *rows(list(pins.values()), surface)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    """Write or check the table in README.md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args().check
    text = README.read_text()
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    wanted = f"{before}{START}\n{table()}\n{END}{after}"
    if text == wanted:
        return 0
    if check:
        print(
            "README.md: its table is not what pins.toml and the surface manifest say; "
            "`python tools/compatibility_table.py` writes it",
            file=sys.stderr,
        )
        return 1
    README.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
