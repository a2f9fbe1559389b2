"""The plugin's own settings: the environment variables `VLLM_DRAFTER` and `VLLM_DRAFTER_*`.

The drafter's settings are vLLM's (`suffix_decoding_*` in the speculative config), and are not
repeated here. Must not know vLLM.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "KNOBS",
    "ROUTE",
    "SHARING",
    "SNAPSHOT",
    "SWITCH",
    "Knob",
    "SettingError",
    "Settings",
    "is_switched_off",
    "read_settings",
]

SWITCH = "VLLM_DRAFTER"
ROUTE = "VLLM_DRAFTER_ROUTE"
SHARING = "VLLM_DRAFTER_SHARING"
LOG_SECONDS = "VLLM_DRAFTER_LOG_SECONDS"
VERIFY_TOKENS = "VLLM_DRAFTER_VERIFY_TOKENS"
SNAPSHOT = "VLLM_DRAFTER_SNAPSHOT"
SNAPSHOT_MINUTES = "VLLM_DRAFTER_SNAPSHOT_MINUTES"
PREFIX = "VLLM_DRAFTER_"

ON_CPU, ELSEWHERE = 24, 256
"""What VLLM_DRAFTER_VERIFY_TOKENS is where nobody says, by device."""

_ON = ("1", "true", "on", "yes")
_OFF = ("0", "false", "off", "no")


class SettingError(ValueError):
    """A setting that cannot be used, ours (`VLLM_DRAFTER_*`) or one of vLLM's that we read: which,
    what is expected, what was found."""


@dataclass(frozen=True)
class Knob:
    """One environment variable."""

    name: str
    default: str
    """The text that has the same meaning as leaving the variable out."""
    values: str
    """What may be given, in words."""
    meaning: str
    parse: Callable[[str], Any]
    """Text to value; raises ValueError for a text that is not among `values`."""


@dataclass(frozen=True)
class Settings:
    """The settings of one process."""

    enabled: bool = True
    """False: the plugin does nothing at all."""
    stamps: Path | None = None
    """File to which each process appends its stamps, one JSON object a line."""
    log_seconds: float = 60.0
    """Seconds between two lines in the log of a process that drafts; 0: no such lines."""
    route: str = "patch"
    """How vLLM gets to our drafter: `patch`, `custom_class` or `shim`."""
    sharing: str = "global"
    """Whose answers a request may be drafted from: `global`, `lora` or `none`."""
    verify_tokens: int | None = None
    """Tokens in a forward pass that take as long as the pass itself; 0: drafts ignore the load;
    None: what is usual for the device."""
    snapshot: Path | None = None
    """File that the cached answers are loaded from and saved to."""
    snapshot_minutes: float = 10.0
    """Minutes between two saves while the engine serves; 0: only when the process ends."""


def _parse_switch(text: str) -> bool:
    word = text.strip().lower()
    if word not in _ON + _OFF:
        raise ValueError(text)
    return word in _ON


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(text)
        return text

    return parse


def _parse_appendable_file(text: str) -> Path | None:
    if not text:
        return None
    path = Path(text)
    writable = path if path.exists() else path.absolute().parent
    if path.is_dir() or not writable.exists() or not os.access(writable, os.W_OK):
        raise ValueError(text)
    return path


def _parse_replaceable_file(text: str) -> Path | None:
    if not text:
        return None
    path = Path(text).absolute()
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(text)
    return path


def _parse_seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise ValueError(text)
    return seconds


def _parse_tokens(text: str) -> int | None:
    if text == "auto":
        return None
    tokens = int(text)
    if not 0 <= tokens <= 1 << 30:
        raise ValueError(text)
    return tokens


KNOBS: tuple[Knob, ...] = (
    Knob(
        SWITCH,
        "1",
        "1 or 0",
        "0 leaves vLLM untouched, as if the plugin were not installed.",
        _parse_switch,
    ),
    Knob(
        "VLLM_DRAFTER_STAMPS",
        "",
        "the path of a file that can be appended to, in a directory that exists",
        "Each process that registers the plugin or builds a proposer appends one JSON line.",
        _parse_appendable_file,
    ),
    Knob(
        LOG_SECONDS,
        "60",
        "a number of seconds, or 0 for no such lines",
        "How often a process that drafts logs one line of what it did.",
        _parse_seconds,
    ),
    Knob(
        ROUTE,
        "patch",
        "patch, custom_class or shim",
        "patch: our class takes the place of vLLM's. custom_class: vLLM is not changed, and drafts "
        'with us by its own method="custom_class" only. shim: vLLM is not changed; a package '
        "arctic_inference is provided, for whatever imports that name, and refused where the real "
        "one is installed.",
        _one_of("patch", "custom_class", "shim"),
    ),
    Knob(
        SHARING,
        "global",
        "global, lora or none",
        "Whose answers a request may be drafted from. global: everyone's. lora: those to requests "
        "for the same LoRA adapter. none: its own. vLLM tells a drafter of no other tenant: a "
        "request's cache_salt does not reach the workers.",
        _one_of("global", "lora", "none"),
    ),
    Knob(
        VERIFY_TOKENS,
        "auto",
        "a number of tokens up to 2**30, 0 for drafts that ignore the load, or auto: "
        f"{ON_CPU} on a CPU, {ELSEWHERE} elsewhere",
        "How many tokens in a forward pass take as long as the pass itself. The more requests are "
        "in a step, the more probable a token must be to be drafted.",
        _parse_tokens,
    ),
    Knob(
        SNAPSHOT,
        "",
        "the path of a file, there or not, in a directory that can be written to",
        "The cached answers are loaded from it at start-up and saved to it, by one process.",
        _parse_replaceable_file,
    ),
    Knob(
        SNAPSHOT_MINUTES,
        "10",
        "a number of minutes, or 0 to save only when the process ends",
        "How often the cached answers are saved while the engine is busy; idle, it saves at once.",
        _parse_seconds,
    ),
)
"""Every variable that the plugin reads."""


def is_switched_off(environ: Mapping[str, str] | None = None) -> bool:
    """Whether `VLLM_DRAFTER` turns the plugin off. SettingError if its value means nothing."""
    return not _read(KNOBS[0], os.environ if environ is None else environ)


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read and check every variable. SettingError names the first wrong one, or an unknown name and
    its nearest.

    A plugin that is turned off reads nothing else: a wrong value must not keep anyone from turning
    it off.
    """
    environ = os.environ if environ is None else environ
    if is_switched_off(environ):
        return Settings(enabled=False)
    known = {knob.name: knob for knob in KNOBS}
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            raise SettingError(_unknown(name, list(known)))
    settings = Settings(
        log_seconds=_read(known[LOG_SECONDS], environ),
        stamps=_read(known["VLLM_DRAFTER_STAMPS"], environ),
        route=_read(known[ROUTE], environ),
        sharing=_read(known[SHARING], environ),
        verify_tokens=_read(known[VERIFY_TOKENS], environ),
        snapshot=_read(known[SNAPSHOT], environ),
        snapshot_minutes=_read(known[SNAPSHOT_MINUTES], environ),
    )
    if settings.snapshot is not None and settings.sharing != "global":
        raise SettingError(
            f"{SNAPSHOT}={environ[SNAPSHOT]!r}: expected {SHARING}=global with it, found "
            f"{SHARING}={settings.sharing}: a snapshot holds the answers to everyone. Unset one "
            "of the two."
        )
    if settings.snapshot is not None and settings.route == "shim":
        raise SettingError(
            f"{SNAPSHOT}={environ[SNAPSHOT]!r}: expected {ROUTE}=patch or custom_class with it: "
            "with the shim vLLM's own proposer owns the cache. Unset one of the two."
        )
    if settings.sharing == "lora" and settings.route == "custom_class":
        raise SettingError(
            f"{SHARING}=lora: expected global or none with {ROUTE}=custom_class, because vLLM "
            f"tells a custom class of no LoRA adapter. Choose one of them, or {ROUTE}=patch."
        )
    return settings


def _read(knob: Knob, environ: Mapping[str, str]) -> Any:
    text = environ.get(knob.name, knob.default)
    try:
        return knob.parse(text)
    except ValueError as error:
        raise SettingError(
            f"{knob.name}={text!r}: expected {knob.values}. {knob.meaning} "
            f"Correct the variable, or unset it for the default ({knob.default!r})."
        ) from error


def _unknown(name: str, known: list[str]) -> str:
    words = {other.removeprefix(PREFIX): other for other in known if other != SWITCH}
    near = difflib.get_close_matches(name.removeprefix(PREFIX), list(words), n=1, cutoff=0.6)
    hint = f" Did you mean {words[near[0]]}?" if near else ""
    return (
        f"{name} is not a setting of vllm-drafter.{hint} "
        f"The settings are {', '.join(known)}; correct the name or unset the variable."
    )
