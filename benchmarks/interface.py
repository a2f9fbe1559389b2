"""Whether drafter_core.suffix_decoding has the interface of arctic-inference as installed.

Compares the public members of both classes: names, parameters, their order, kinds and defaults.
Exit code 1 with what differs. `nox -s parity` runs it before the drafts are compared.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import arctic_inference.suffix_decoding as peer

import drafter_core.suffix_decoding as ours

LEFT_OUT = {"SuffixDecodingDraft.from_native": "it takes the draft of the peer's C++ extension"}


def interface(module: Any) -> dict[str, Any]:
    """What the module's classes offer: for each function its parameters."""
    found: dict[str, Any] = {"__all__": sorted(module.__all__)}
    for owner in module.__all__:
        for name, member in vars(getattr(module, owner)).items():
            if callable(member) and (name == "__init__" or not name.startswith("_")):
                parameters = inspect.signature(member).parameters.values()
                found[f"{owner}.{name}"] = [
                    (p.name, p.kind.name, repr(p.default)) for p in parameters
                ]
            elif not name.startswith("_"):
                found[f"{owner}.{name}"] = (
                    "property" if isinstance(member, property) else repr(member)
                )
    return found


def main() -> int:
    """Compare, say what differs, and return the exit code."""
    wanted, found = interface(peer), interface(ours)
    names = (wanted.keys() | found.keys()) - LEFT_OUT.keys()
    different = sorted(name for name in names if wanted.get(name) != found.get(name))
    for name in different:
        print(f"{name}: peer {wanted.get(name)}, ours {found.get(name)}", file=sys.stderr)
    missing = ", ".join(f"{name} ({why})" for name, why in LEFT_OUT.items())
    print(f"{len(names) - len(different)} of {len(names)} members agree; left out: {missing}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
