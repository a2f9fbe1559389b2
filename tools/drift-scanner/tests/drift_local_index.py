"""A package index on this machine, with wheels and sdists made here, that can misbehave."""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def wheel_bytes(files: Mapping[str, bytes | str], *, name: str = "vllm", version: str) -> bytes:
    """Make a wheel: the given files, its metadata, and a library before and between them."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        noise = hashlib.shake_256(b"a library").digest(400_000)
        archive.writestr(f"{name}/_first.so", noise)
        for number, (path, content) in enumerate(files.items()):
            archive.writestr(path, content)
            if number == 0:
                archive.writestr(f"{name}/_between.so", noise)
        archive.writestr(f"{name}-{version}.dist-info/METADATA", f"Name: {name}\n")
        archive.writestr(f"{name}-{version}.dist-info/RECORD", "")
    return out.getvalue()


def sdist_bytes(files: Mapping[str, bytes | str], *, top: str) -> bytes:
    """Make an sdist with the given files below the directory `top`."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for path, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(f"{top}/{path}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


@dataclass
class LocalIndex:
    """A simple index over HTTP. Its attributes say how it behaves from now on."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    yanked: dict[str, str] = field(default_factory=dict)
    html: bool = False
    ranges: bool = True
    etag: bool = True
    hashes: bool = True
    sizes: bool = True
    cut_after: int | None = None
    """Close the connection after that many bytes of a file."""
    cuts: int = 0
    """How many answers to cut."""
    statuses: list[int] = field(default_factory=list)
    """What to answer to the next requests, whatever they ask for."""
    requests: list[tuple[str, str | None, int]] = field(default_factory=list)
    """Path, Range header and status of every request so far."""

    def add_wheel(
        self,
        version: str,
        files: Mapping[str, bytes | str],
        *,
        dist: str = "vllm",
        tags: str = "cp38-abi3-manylinux1_x86_64",
        build: str = "",
        yanked: str | None = None,
    ) -> str:
        middle = f"{version}-{build}" if build else version
        filename = f"{dist}-{middle}-{tags}.whl"
        self.files[filename] = wheel_bytes(files, name=dist, version=version)
        if yanked is not None:
            self.yanked[filename] = yanked
        return filename

    def add_sdist(self, version: str, files: Mapping[str, bytes | str], dist: str = "vllm") -> str:
        filename = f"{dist}-{version}.tar.gz"
        self.files[filename] = sdist_bytes(files, top=f"{dist}-{version}")
        return filename

    def fetched(self, suffix: str) -> list[tuple[str, str | None, int]]:
        return [r for r in self.requests if r[0].endswith(suffix)]

    def page(self, dist: str) -> tuple[bytes, str] | None:
        names = [n for n in self.files if re.split(r"-\d", n)[0] == dist.replace("-", "_")]
        if not names:
            return None
        if self.html:
            links = []
            for name in names:
                mark = f' data-yanked="{self.yanked[name]}"' if name in self.yanked else ""
                digest = hashlib.sha256(self.files[name]).hexdigest()
                links.append(f'<a href="/files/{name}#sha256={digest}"{mark}>{name}</a>')
            return f"<html><body>{''.join(links)}</body></html>".encode(), "text/html"
        entries = []
        for name in names:
            data = self.files[name]
            entry: dict[str, object] = {"filename": name, "url": f"{self.url}/files/{name}"}
            entry["hashes"] = {"sha256": hashlib.sha256(data).hexdigest()} if self.hashes else {}
            entry["yanked"] = self.yanked.get(name, False)
            if self.sizes:
                entry["size"] = len(data)
            entries.append(entry)
        page = {"meta": {"api-version": "1.1"}, "name": dist, "files": entries}
        return json.dumps(page).encode(), "application/vnd.pypi.simple.v1+json"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    index: LocalIndex

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        index, asked = self.index, self.headers.get("Range")
        if index.statuses:
            self._answer(index.statuses.pop(0), b"", asked)
            return
        if self.path.startswith("/simple/"):
            found = index.page(self.path.strip("/").split("/")[1])
            if found is None:
                self._answer(404, b"", asked)
                return
            body, kind = found
            tag = f'"{hashlib.sha256(body).hexdigest()}"'
            if index.etag and self.headers.get("If-None-Match") == tag:
                self._answer(304, b"", asked)
                return
            self._answer(200, body, asked, {"Content-Type": kind, "ETag": tag})
            return
        data = index.files.get(self.path.rpartition("/")[2])
        if data is None:
            self._answer(404, b"", asked)
        elif asked and index.ranges:
            first, last = re.fullmatch(r"bytes=(\d*)-(\d*)", asked).groups()  # type: ignore[union-attr]
            start = int(first) if first else max(len(data) - int(last), 0)
            end = min(int(last), len(data) - 1) if first and last else len(data) - 1
            place = f"bytes {start}-{end}/{len(data)}"
            self._answer(206, data[start : end + 1], asked, {"Content-Range": place})
        else:
            self._answer(200, data, asked)

    def _answer(
        self, status: int, body: bytes, asked: str | None, headers: Mapping[str, str] | None = None
    ) -> None:
        index = self.index
        index.requests.append((self.path, asked, status))
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        is_file = self.path.startswith("/files/") and status in (200, 206)
        if is_file and index.cuts > 0 and index.cut_after is not None:
            index.cuts -= 1
            self.wfile.write(body[: index.cut_after])
            self.close_connection = True
        else:
            self.wfile.write(body)


@contextmanager
def served() -> Iterator[LocalIndex]:
    """Serve an empty index until the block ends."""
    local = LocalIndex()
    handler = type("Handler", (_Handler,), {"index": local})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    local.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield local
    finally:
        server.shutdown()
        server.server_close()
