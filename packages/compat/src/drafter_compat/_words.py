"""Hints in messages. Knows nothing of what the words mean."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["nearest"]


def nearest(word: object, known: Iterable[str]) -> str:
    """The hint ` (did you mean 'this'?)`, or nothing where no known word is near."""
    if not isinstance(word, str):
        return ""
    candidates = list(known)
    plain = word.lower().replace("_", "-")
    near = difflib.get_close_matches(plain, candidates, n=1, cutoff=0.6)
    near = near or difflib.get_close_matches(word, candidates, n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""
