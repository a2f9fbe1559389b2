"""Where pip would look for packages: its configuration files and variables, read as pip does.

Reads files only and never runs pip, which takes half a second to start. Knows nothing of releases.
"""

from __future__ import annotations

import configparser
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["IndexSettings", "default_index_url", "read_pip_settings"]


def default_index_url() -> str:
    """The simple index that pip uses where nothing is configured."""
    try:
        from pip._internal.models.index import PyPI
    except ImportError:
        # An environment without pip. This takes ten times as long to import.
        from pypi_simple import PYPI_SIMPLE_ENDPOINT

        return PYPI_SIMPLE_ENDPOINT.rstrip("/")
    return str(PyPI.simple_url).rstrip("/")


@dataclass(frozen=True)
class IndexSettings:
    """The part of pip's configuration that says where packages come from."""

    index_urls: tuple[str, ...] = field(default_factory=lambda: (default_index_url(),))
    """The index and the extra indexes; empty with `no-index`."""
    find_links: tuple[str, ...] = ()
    """Directories, `file:` URLs or pages of links."""
    cert: str | None = None
    """A PEM bundle to verify servers with."""
    client_cert: str | None = None
    proxy: str | None = None
    trusted_hosts: tuple[str, ...] = ()
    """Hosts whose certificates are not verified."""
    timeout: float = 15.0
    """Seconds without an answer before a request is given up."""


def read_pip_settings(environ: Mapping[str, str] | None = None) -> IndexSettings:
    """Read the settings that `pip install` would use in this environment.

    As in pip, later files win over earlier ones, `[install]` over `[global]`, and `PIP_*` variables
    over files. A file that does not parse is skipped, as there is nothing this program could add to
    pip's own complaint about it.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, str] = {}
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}}
    for path in _config_files(environ):
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError):
            continue
        for section in sections:
            if parser.has_section(section):
                sections[section].update((k.replace("_", "-"), v) for k, v in parser.items(section))
    values.update(sections["global"])
    values.update(sections["install"])
    for name, value in environ.items():
        if name.startswith("PIP_") and value:
            values[name[4:].lower().replace("_", "-")] = value
    return _settings(values)


def _settings(values: Mapping[str, str]) -> IndexSettings:
    if values.get("no-index", "").lower() in {"1", "true", "yes", "on"}:
        urls: list[str] = []
    else:
        urls = [values.get("index-url") or values.get("pypi-url") or default_index_url()]
        urls += values.get("extra-index-url", "").split()
    try:
        timeout = float(values.get("timeout", values.get("default-timeout", "15")))
    except ValueError:
        timeout = 15.0
    return IndexSettings(
        index_urls=tuple(dict.fromkeys(url.rstrip("/") for url in urls)),
        find_links=tuple(values.get("find-links", "").split()),
        cert=values.get("cert") or None,
        client_cert=values.get("client-cert") or None,
        proxy=values.get("proxy") or None,
        trusted_hosts=tuple(values.get("trusted-host", "").split()),
        timeout=timeout,
    )


def _config_files(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield pip's configuration files, the weakest first."""
    chosen = environ.get("PIP_CONFIG_FILE")
    if chosen == os.devnull:
        return
    home = Path(environ.get("HOME") or environ.get("USERPROFILE") or Path.home())
    prefix = Path(environ.get("VIRTUAL_ENV") or sys.prefix)
    if sys.platform == "win32":
        yield Path(environ.get("PROGRAMDATA", r"C:\ProgramData")) / "pip" / "pip.ini"
        yield home / "pip" / "pip.ini"
        yield Path(environ.get("APPDATA", str(home))) / "pip" / "pip.ini"
        yield prefix / "pip.ini"
    else:
        if sys.platform == "darwin":
            yield Path("/Library/Application Support/pip/pip.conf")
        for directory in environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":"):
            if directory:
                yield Path(directory) / "pip" / "pip.conf"
        yield Path("/etc/pip.conf")
        yield home / ".pip" / "pip.conf"
        if sys.platform == "darwin":
            yield home / "Library" / "Application Support" / "pip" / "pip.conf"
        yield Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf"
        yield prefix / "pip.conf"
    if chosen:
        yield Path(chosen)
