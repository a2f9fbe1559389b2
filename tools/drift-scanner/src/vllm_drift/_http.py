"""HTTP as the index and its file host need it: retries, credentials, byte ranges.

httpx is imported when the first connection is opened: a run from the cache needs none, and does
not wait for the import. Knows servers and bytes. Must not know releases, wheels or pip's
configuration files (it is given `IndexSettings`).
"""

from __future__ import annotations

import netrc
import re
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Lock
from typing import IO, TYPE_CHECKING, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

from vllm_drift._pipconf import IndexSettings
from vllm_drift.errors import NetworkError, SourceError

if TYPE_CHECKING:
    import httpx

__all__ = ["Answer", "Http", "NoByteRanges", "Progress", "redact"]

Progress = Callable[[str, int, "int | None"], None]
"""Called with what is being fetched, bytes so far, and bytes in all where that is known."""

_T = TypeVar("_T")
_RETRIES = 3
_PAUSES = (0.3, 1.0, 3.0)
"""Seconds before each retry, unless the server says how long to wait."""
_LONGEST_PAUSE = 20.0
_RETRY_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class NoByteRanges(SourceError):
    """The server answers a request for a byte range with the whole file, or not at all."""


@dataclass(frozen=True)
class Answer:
    """An answer that was read to its end."""

    status: int
    headers: httpx.Headers
    body: bytes
    url: str


def redact(url: str) -> str:
    """Return the URL without user name and password, for messages."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return urlunsplit(parts._replace(netloc="****@" + parts.netloc.rpartition("@")[2]))


class Http:
    """One pool of connections for a run. Safe to use from several threads."""

    def __init__(self, settings: IndexSettings) -> None:
        self._settings = settings
        self._clients: dict[bool, httpx.Client] = {}
        self._lock = Lock()
        self._passwords = dict(_passwords_in(settings.index_urls + settings.find_links))
        self.bytes_received = 0
        """How many bytes of bodies were read, for benchmarks and messages."""

    def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            client.close()

    def get(self, url: str, headers: dict[str, str] | None = None) -> Answer:
        """Read a whole answer, whatever its status below 500. Raises NetworkError after the
        retries.
        """

        def attempt() -> Answer:
            with self._stream(url, headers or {}) as response:
                body = b"".join(self._counted(response.iter_bytes()))
                return Answer(response.status_code, response.headers, body, str(response.url))

        return self._retrying(url, attempt)

    def get_range(self, url: str, start: int | None, length: int) -> tuple[bytes, int]:
        """Read `length` bytes from `start`, or the last ones where it is None, and the file's size.

        Raises NoByteRanges where the server sends the file instead, and NetworkError after the
        retries.
        """
        wanted = f"bytes=-{length}" if start is None else f"bytes={start}-{start + length - 1}"
        headers = {"Range": wanted, "Accept-Encoding": "identity"}

        def attempt() -> tuple[bytes, int]:
            with self._stream(url, headers) as response:
                if response.status_code in {200, 416}:
                    raise NoByteRanges(f"{redact(url)} does not serve byte ranges")
                _expect(response, url, 206)
                found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
                if found is None or found[3] == "*":
                    raise NoByteRanges(f"{redact(url)} answers a byte range without saying which")
                first, last, size = int(found[1]), int(found[2]), int(found[3])
                if start is not None and first != start:
                    raise NoByteRanges(f"{redact(url)} answers with another byte range")
                data = b"".join(self._counted(response.iter_raw()))
                if len(data) != last - first + 1:
                    raise _Incomplete(f"{len(data)} bytes came of {last - first + 1}")
                return data, size

        return self._retrying(url, attempt)

    def download(
        self, url: str, into: IO[bytes], name: str, progress: Progress | None = None
    ) -> None:
        """Read a whole file into `into`, from the start again after a failure. Raises NetworkError
        after the retries.
        """

        def attempt() -> None:
            into.seek(0)
            into.truncate()
            with self._stream(url, {"Accept-Encoding": "identity"}) as response:
                _expect(response, url, 200)
                header = response.headers.get("Content-Length")
                total = int(header) if header else None
                done = 0
                for piece in self._counted(response.iter_raw()):
                    into.write(piece)
                    done += len(piece)
                    if progress is not None:
                        progress(name, done, total)
                if total is not None and done != total:
                    raise _Incomplete(f"{done} bytes came of {total}")

        self._retrying(url, attempt)

    # ----------------------------------------------------------------------------------------------

    def _counted(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            self.bytes_received += len(piece)
            yield piece

    @contextmanager
    def _stream(self, url: str, headers: dict[str, str]) -> Iterator[httpx.Response]:
        client = self._client(urlsplit(url).hostname or "")
        with client.stream("GET", url, headers=headers, auth=self._auth(url)) as response:
            if response.status_code in _RETRY_STATUS:
                raise _TryAgain(response.status_code, response.headers.get("Retry-After"))
            yield response

    def _retrying(self, url: str, attempt: Callable[[], _T]) -> _T:
        import httpx

        failure: Exception | None = None
        for number in range(_RETRIES + 1):
            try:
                return attempt()
            except _TryAgain as e:
                failure = e
                pause = e.wait
            except (httpx.TransportError, _Incomplete) as e:
                failure = e
                pause = None
            except (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.TooManyRedirects) as e:
                raise SourceError(f"cannot read {redact(url)}: {e}") from e
            if number < _RETRIES:
                time.sleep(min(_PAUSES[number] if pause is None else pause, _LONGEST_PAUSE))
        reason = str(failure) or type(failure).__name__
        raise NetworkError(
            f"{redact(url)} could not be read after {_RETRIES + 1} attempts: {reason}. Check the "
            f"network, the proxy and the index that pip is configured with (pip config list); "
            f"releases that were read before can be scanned with --offline."
        ) from failure

    def _client(self, host: str) -> httpx.Client:
        import httpx

        verify = host not in {h.partition(":")[0] for h in self._settings.trusted_hosts}
        with self._lock:
            if verify not in self._clients:
                self._clients[verify] = httpx.Client(
                    verify=_ssl_context(self._settings) if verify else False,
                    proxy=self._settings.proxy,
                    timeout=httpx.Timeout(
                        self._settings.timeout, connect=min(self._settings.timeout, 15.0)
                    ),
                    follow_redirects=True,
                    headers={"User-Agent": "vllm-drift"},
                )
            return self._clients[verify]

    def _auth(self, url: str) -> tuple[str, str] | None:
        parts = urlsplit(url)
        if parts.username:
            return unquote(parts.username), unquote(parts.password or "")
        host = parts.hostname or ""
        if host in self._passwords:
            return self._passwords[host]
        with suppress(OSError, netrc.NetrcParseError):
            found = netrc.netrc().authenticators(host)
            if found:
                return found[0], found[2] or ""
        return None


class _Incomplete(Exception):
    """An answer ended before it was whole."""


class _TryAgain(Exception):
    """The server asks to be left alone for a while."""

    def __init__(self, status: int, retry_after: str | None) -> None:
        super().__init__(f"the server answers {status}")
        self.wait = float(retry_after) if retry_after and retry_after.isdigit() else None


def _expect(response: httpx.Response, url: str, status: int) -> None:
    if response.status_code != status:
        raise SourceError(
            f"{redact(url)} answers {response.status_code} {response.reason_phrase}, "
            f"expected {status}"
        )


def _ssl_context(settings: IndexSettings) -> ssl.SSLContext | bool:
    if settings.cert is None and settings.client_cert is None:
        return True
    try:
        context = ssl.create_default_context(cafile=settings.cert)
        if settings.client_cert:
            context.load_cert_chain(settings.client_cert)
    except OSError as e:
        raise SourceError(
            f"the certificate {settings.cert or settings.client_cert} that pip is configured with "
            f"cannot be read: {e}"
        ) from e
    return context


def _passwords_in(urls: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, str]]]:
    for url in urls:
        parts = urlsplit(url)
        if parts.username and parts.hostname:
            yield parts.hostname, (unquote(parts.username), unquote(parts.password or ""))
