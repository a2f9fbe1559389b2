"""What griffe says about two releases whose sources are on disk: `griffe_check.py OLD NEW`."""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter

import griffe

logging.getLogger("griffe").setLevel(logging.CRITICAL)


def main() -> None:
    """Print how many breaking changes griffe finds, by kind."""
    old, new = (
        griffe.load("vllm", search_paths=[path], allow_inspection=False, resolve_aliases=False)
        for path in sys.argv[1:3]
    )
    kinds = Counter(str(b.kind.value) for b in griffe.find_breaking_changes(old, new))
    print(json.dumps({"breakages": sum(kinds.values()), "kinds": kinds}, indent=2))


if __name__ == "__main__":
    main()
