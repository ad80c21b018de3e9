"""Web sources: what is read is what was permitted, whole, in bounded time and memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import pytest
from tests.catalog.remotes import WebServer

from loraplex.catalog import web
from loraplex.catalog.remote import RemoteFile, RemoteFolder
from loraplex.catalog.sources import RemoteSource, parse_source
from loraplex.core.errors import ErrorCode, LoraplexError

DATA = bytes(range(256)) * 16


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    monkeypatch.setattr(web, "PAUSE_S", 0.0)
    with WebServer() as running:
        running.files["/a/file"] = DATA
        yield running


def folder(server: WebServer, path: str = "/a") -> RemoteFolder:
    source = parse_source(server.url + path)
    assert isinstance(source, RemoteSource)
    return RemoteFolder(source)


def looked(server: WebServer) -> RemoteFile:
    found = folder(server).look("file")
    assert found is not None
    return found


def ask(server: WebServer, file: RemoteFile | None) -> None:
    """Look at the file, or read a range of the one that was looked at."""
    if file is None:
        folder(server).look("file")
    else:
        folder(server).read(file, 16, 1040)


def code_of(server: WebServer, *, read: bool) -> tuple[ErrorCode, str]:
    file = looked(server) if read else None
    with pytest.raises(LoraplexError) as caught:
        ask(server, file)
    return caught.value.code, caught.value.message


def test_a_file_and_its_ranges(server: WebServer) -> None:
    file = looked(server)
    assert (file.name, file.size) == ("file", len(DATA))
    assert folder(server).read(file, 16, 1040) == DATA[16:1040]
    assert folder(server).look("nothing") is None
    assert folder(server, "/a%20b").look("file") is None
    assert server.asked[-1][1] == "/a%20b/file"  # not escaped twice
    assert folder(server, "/é").look("file") is None
    assert server.asked[-1][1] == "/%C3%A9/file"


@pytest.mark.parametrize("read", [False, True])
def test_a_redirection_is_refused_and_not_followed(server: WebServer, read: bool) -> None:
    file = looked(server) if read else None
    with WebServer() as other:
        other.files["/secret/file"] = DATA
        for target in (f"{other.url}/secret/file", f"{server.url}/b/file", "file:///etc/hostname", "/b/file"):
            server.moved["/a/file"] = target
            server.files["/b/file"] = DATA
            with pytest.raises(LoraplexError) as caught:
                ask(server, file)
            assert caught.value.code is ErrorCode.ADAPTER_SOURCE_FORBIDDEN
            assert "is not followed" in caught.value.message
        assert other.asked == []
    assert all(path == "/a/file" for _, path, _ in server.asked)


@pytest.mark.parametrize(
    ("status", "code", "asked"),
    [
        (401, ErrorCode.ADAPTER_SOURCE_FORBIDDEN, 1),
        (403, ErrorCode.ADAPTER_SOURCE_FORBIDDEN, 1),
        (400, ErrorCode.ADAPTER_SOURCE_UNAVAILABLE, 1),
        (429, ErrorCode.ADAPTER_SOURCE_UNAVAILABLE, web.ATTEMPTS),
        (500, ErrorCode.ADAPTER_SOURCE_UNAVAILABLE, web.ATTEMPTS),
    ],
)
def test_statuses(server: WebServer, status: int, code: ErrorCode, asked: int) -> None:
    server.says["/a/file"] = status
    assert code_of(server, read=False)[0] is code
    assert len(server.asked) == asked


def test_another_version_is_said_to_be_one(server: WebServer) -> None:
    file = looked(server)
    server.files["/a/file"] = DATA[::-1]
    with pytest.raises(LoraplexError) as caught:
        folder(server).read(file, 0, 16)
    assert caught.value.code is ErrorCode.ADAPTER_SOURCE_CHANGED
    del server.files["/a/file"]
    with pytest.raises(LoraplexError) as caught:
        folder(server).read(file, 0, 16)
    assert caught.value.code is ErrorCode.ADAPTER_SOURCE_CHANGED


def test_another_range_than_was_asked_for_is_refused(server: WebServer) -> None:
    server.headers["content-range"] = f"bytes 0-1023/{len(DATA)}"
    assert code_of(server, read=True)[0] is ErrorCode.ADAPTER_SOURCE_CHANGED
    server.headers["content-range"] = "bytes 16-1039/*"
    assert code_of(server, read=True)[0] is ErrorCode.ADAPTER_SOURCE_UNAVAILABLE


def test_no_more_is_read_than_was_asked_for(server: WebServer) -> None:
    sent = 0

    def flood(part: bytes) -> Iterable[bytes]:
        nonlocal sent
        for _ in range(1 << 12):  # 4 GiB, if somebody reads them
            sent += 1
            yield part * 1024

    server.headers["content-length"] = str(1 << 32)
    server.body = flood
    code, message = code_of(server, read=True)
    assert code is ErrorCode.ADAPTER_SOURCE_UNAVAILABLE
    assert "more than the 1024 bytes" in message
    assert sent < 64  # what fits between two sockets


def test_a_body_that_breaks_off_is_asked_for_again_and_then_refused(server: WebServer) -> None:
    file = looked(server)
    server.body = lambda part: [part[: len(part) // 2]]
    server.headers["content-length"] = "1024"
    server.asked.clear()
    with pytest.raises(LoraplexError) as caught:
        folder(server).read(file, 16, 1040)
    assert caught.value.code is ErrorCode.ADAPTER_SOURCE_UNAVAILABLE
    assert len(server.asked) == web.ATTEMPTS


def test_a_server_that_goes_on_for_ever_is_cut_off(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()

    def drip(part: bytes) -> Iterable[bytes]:
        for byte in part:
            yield bytes([byte])
            over.wait(0.05)

    file = looked(server)
    monkeypatch.setattr(web, "REQUEST_S", 0.3)
    server.body = drip
    server.asked.clear()
    with pytest.raises(LoraplexError) as caught:
        folder(server).read(file, 16, 1040)
    over.set()
    assert caught.value.code is ErrorCode.ADAPTER_SOURCE_UNAVAILABLE
    assert len(server.asked) == 1  # it had its time


@pytest.mark.parametrize("read", [False, True])
def test_a_server_that_is_reached_too_late_is_not_spoken_to(
    server: WebServer, read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names and addresses that take their time to resolve and connect come out of the request's own."""
    file, tried = looked(server) if read else None, 0
    cut, reach = threading.Event(), web.HTTPConnection.connect
    take = web.WebFolder._cut

    def slow(connection: web.HTTPConnection) -> None:
        nonlocal tried
        tried += 1
        reach(connection)
        assert cut.wait(60)

    def tell(own: web.WebFolder) -> None:
        take(own)
        cut.set()

    monkeypatch.setattr(web, "REQUEST_S", 0.01)
    monkeypatch.setattr(web.HTTPConnection, "connect", slow)
    monkeypatch.setattr(web.WebFolder, "_cut", tell)
    server.asked.clear()
    with pytest.raises(LoraplexError) as caught:
        ask(server, file)
    assert caught.value.code is ErrorCode.ADAPTER_SOURCE_UNAVAILABLE
    assert (tried, server.asked) == (1, [])
