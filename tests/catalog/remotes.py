"""Remote sources that are really there: an S3-compatible server, and a web server with ranges and entity
tags.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

BUCKET = "adapters"


@contextmanager
def s3_server() -> Iterator[str]:
    """An S3-compatible server with an empty bucket; yields its URL."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def s3_environment(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """What an operator sets so that the server finds its object store."""
    for name, value in (
        ("AWS_ENDPOINT_URL", url),
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)


def upload(folder: Path, prefix: str) -> str:
    """Put a folder's files under a prefix of the bucket, which is made; the source's text."""
    import obstore

    store = bucket()
    for path in folder.iterdir():
        obstore.put(store, f"{prefix}/{path.name}", path.read_bytes())
    return f"s3://{BUCKET}/{prefix}"


def bucket() -> object:
    """The bucket, as a library sees it."""
    from obstore.store import S3Store

    return S3Store(BUCKET, client_options={"allow_http": True}, virtual_hosted_style_request=False)


class WebServer:
    """Files by path. down_after: requests of bytes that are answered before connections break; None: all.

    moved: paths that lead elsewhere. says: status for a path instead of its file. body: what a request of
    bytes gets, of what it should get. headers: said instead of the right ones.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, str, str | None]] = []
        self.tags = True
        self.down_after: int | None = None
        self.moved: dict[str, str] = {}
        self.says: dict[str, int] = {}
        self.body: Callable[[bytes], Iterable[bytes]] = lambda part: [part]
        self.headers: dict[str, str] = {}
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def answer(self, *, body: bool) -> None:
                wanted = self.headers.get("range")
                owner.asked.append((self.command, self.path, wanted))
                data = owner.files.get(self.path)
                if body and owner.down_after is not None:
                    if owner.down_after == 0:
                        self.close_connection = True
                        return
                    owner.down_after -= 1
                if self.path in owner.moved or self.path in owner.says:
                    self.send_response(owner.says.get(self.path, 302))
                    if self.path in owner.moved:
                        self.send_header("location", owner.moved[self.path])
                    self.send_header("content-length", "0")
                    self.end_headers()
                    return
                if data is None:
                    self.send_response(404)
                    self.send_header("content-length", "0")
                    self.end_headers()
                    return
                tag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
                if owner.tags and self.headers.get("if-match") not in (None, tag):
                    self.send_response(412)
                    self.send_header("content-length", "0")
                    self.end_headers()
                    return
                part, size = data, len(data)
                if body and wanted:
                    low, _, high = wanted.removeprefix("bytes=").partition("-")
                    part = data[int(low) : int(high) + 1]
                    self.send_response(206)
                    place = f"bytes {low}-{int(low) + len(part) - 1}/{size}"
                    self.send_header("content-range", owner.headers.get("content-range", place))
                else:
                    self.send_response(200)
                self.send_header("content-length", owner.headers.get("content-length", str(len(part))))
                if owner.tags:
                    self.send_header("etag", tag)
                self.send_header("last-modified", "Mon, 30 Nov 2026 00:00:00 GMT")
                self.end_headers()
                if body:
                    with suppress(OSError):  # whoever reads no more than it asked for goes away
                        for piece in owner.body(part):
                            self.wfile.write(piece)
                    self.close_connection = "content-length" in owner.headers

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> WebServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def publish(self, folder: Path, prefix: str) -> None:
        """Serve a folder's files under a path."""
        for path in folder.iterdir():
            self.files[f"{prefix}/{path.name}"] = path.read_bytes()

    def bytes_asked(self, name: str) -> list[str | None]:
        """Ranges of a file that were asked for, in order."""
        return [wanted for method, path, wanted in self.asked if method == "GET" and path.endswith(name)]
