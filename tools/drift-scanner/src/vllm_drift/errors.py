"""What can stop a run before it has looked at anything. The command line turns each into exit code
2.
"""

from __future__ import annotations

__all__ = ["NetworkError", "NoSuchRelease", "SourceError"]


class SourceError(Exception):
    """Source could not be read. The message says what was wanted, what was found and what to do."""


class NetworkError(SourceError):
    """The index or its file host did not answer, or stopped answering, after the retries."""


class NoSuchRelease(SourceError):
    """The index has no release that fits; the message names the nearest ones."""
