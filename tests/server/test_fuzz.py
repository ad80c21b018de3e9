"""A stranger's bytes: mutated bodies, mutated requests on a raw socket. No 5xx, no hang, nothing
left behind.
"""

from __future__ import annotations

import json
import random
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.server.fuzzing import Target, check_answer, target
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.e2e

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b", 1]}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "x"},
]
SEEDS: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/v1/completions", {"model": "tiny", "prompt": "hello", "max_tokens": 4, "stop": ["a"], "n": 2,
    "seed": 1}),
    ("POST", "/v1/completions", {"model": "one", "prompt": [[70, 71], [72]], "max_tokens": 2, "logprobs": 2,
    "echo": True}),
    ("POST", "/v1/completions", {"model": "two", "prompt": "h", "max_tokens": 3, "logit_bias": {"5": 1.5},
    "top_p": 0.5}),
    ("POST", "/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "temperature": 0.5,
    "user": "u"}),
    ("POST", "/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}}),
    ("POST", "/v1/chat/completions", {**CHAT, "max_tokens": 40, "response_format": FORMAT}),
    ("POST", "/v1/responses", {"model": "tiny", "input": ITEMS, "max_output_tokens": 4,
     "metadata": {"a": "b"}}),
    ("POST", "/v1/responses", {"model": "one", "input": "h", "stream": True, "max_output_tokens": 4,
     "text": {"format": {"type": "json_object"}}}),
    ("PUT", "/v1/adapters/one", {"source": "/nowhere", "expected_revision": 7}),
    ("POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/etc"}),
    ("POST", "/v1/unload_lora_adapter", {"lora_name": "nobody"}),
]  # fmt: skip
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 1 << 31, 1 << 53, 1 << 63, 1 << 64, 10**40, 0.5, -0.0, 1e308, 5e-324, "",
    "0", "tiny", "one@1",
    "one@999999999999999999999", "\u0000", "\ud7ff", "𝔸", "e\u0301" * 40, "a" * 3000, "../../etc/passwd",
    "%00", [], [[]],
    [None], {}, {"": None}, {"type": "text"}, [[[[[[]]]]]], [0] * 200, ["x"] * 300, {"a": {"b": {"c": []}}},
]  # fmt: skip
RAW = [
    b"", b"null", b"[]", b"{", b"}", b"\xff\xfe", b"\xef\xbb\xbf{}", b"NaN", b"1e999", b'{"model":1e999}',
    b"[" * 100_000,
    b'{"a":' * 50_000, b'{"model":"tiny","model":"one","prompt":"h","max_tokens":1}',
    b'{"prompt":"\xc3\x28"}',
    b'{"model":"tiny","prompt":"\\ud800","max_tokens":1}',
    b'{"model":"tiny","prompt":"\\u0000","max_tokens":1}',
    b"\x00" * 64, b'"' + b"a" * 70_000 + b'"', b'{"model":"tiny","prompt":"h","max_tokens":1}garbage',
    b'{"model":"tiny","prompt":"h","seed":' + b"9" * 5000 + b"}",
    b'{"model":"tiny","prompt":"h","temperature":1e400}',
    b'{"model":"tiny","prompt":"h","temperature":NaN}',
    b'{"model":"tiny","prompt":"h","logit_bias":{"1":Infinity}}',
]  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with target(tmp_path_factory.mktemp("fuzz")) as found:
        yield found


def mutate(value: Any, rng: random.Random, rate: float = 0.15) -> Any:
    """A copy with odd values here and there."""
    if rng.random() < rate:
        return rng.choice(ODD)
    if isinstance(value, dict):
        out = {key: mutate(item, rng, rate) for key, item in value.items() if rng.random() > rate / 2}
        if rng.random() < rate / 2:
            out[rng.choice(["foo", "model", "stream", "n", "stop", "tools", ""])] = rng.choice(ODD)
        return out
    if isinstance(value, list):
        return [mutate(item, rng, rate) for item in value for _ in range(rng.choice((1, 1, 1, 0, 2)))]
    return value


def mangle(data: bytes, rng: random.Random) -> bytes:
    """Flip, cut, repeat or insert bytes."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(4):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                del out[at : at + rng.randint(1, 8)]
            case 2:
                out[at:at] = out[at : at + rng.randint(1, 30)]
            case _:
                out[at:at] = rng.randbytes(rng.randint(1, 6))
    return bytes(out)


def bodies(server: Target, count: int, seed: int) -> None:
    rng = random.Random(seed)
    for number in range(count):
        method, path, body = rng.choice(SEEDS)
        data = json.dumps(mutate(body, rng)).encode()
        if rng.random() < 0.3:
            data = mangle(data, rng)
        answer = server.http.request(method, path, content=data, headers={"content-type": "application/json"})
        try:
            check_answer(answer.status_code, answer.headers["content-type"], answer.content)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, body {number}: {method} {path} {data[:2000]!r}") from error
    server.check_unharmed()


def test_bodies(server: Target) -> None:
    for data in RAW:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/load_lora_adapter"):
            answer = server.http.post(path, content=data, headers={"content-type": "application/json"})
            check_answer(answer.status_code, answer.headers["content-type"], answer.content)
    bodies(server, 300, seed=1)


def request(method: str, path: str, body: bytes, *headers: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    lines = [
        f"{method} {path} HTTP/1.1".encode(),
        b"host: x",
        b"content-type: application/json",
        b"content-length: %d" % size,
        *headers,
    ]
    return b"\r\n".join([*lines, b"", body])


GOOD = json.dumps({"model": "tiny", "prompt": [70, 71], "max_tokens": 2, "ignore_eos": True}).encode()
LONG = json.dumps(
    {"model": "tiny", "prompt": [70, 71], "max_tokens": 120, "stream": True, "ignore_eos": True}
).encode()


def talk(server: Target, data: bytes, *, half_close: bool = True) -> bytes:
    """Send bytes, then nothing more, and read until the server closes; one that does neither is hung."""
    with socket.create_connection((server.host, server.port), timeout=LIMIT_S) as sock:
        try:
            sock.sendall(data)
            if half_close:
                sock.shutdown(socket.SHUT_WR)
        except OSError:
            return b""  # it closed already
        out = b""
        try:
            while part := sock.recv(65536):
                out += part
        except ConnectionResetError:
            pass
        return out


def check_raw(out: bytes) -> None:
    """Only well-formed answers, none of them a fault."""
    assert not out or out.startswith(b"HTTP/1.")
    assert all(status < 500 for status in statuses_of(out)), out[:500]


def statuses_of(out: bytes) -> list[int]:
    """Status codes of the answers of one connection."""
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d+)", out)]


def raw(server: Target, count: int, seed: int) -> None:
    rng = random.Random(seed)
    close = b"connection: close"
    makers: list[Callable[[], bytes]] = [
        lambda: mangle(request("POST", "/v1/completions", GOOD, close), rng),
        lambda: request("POST", "/v1/completions", GOOD, length=rng.choice([0, 1, 10, 10**9, 10**30])),
        lambda: request("POST", "/v1/completions", GOOD)[: rng.randrange(220)],
        lambda: request("POST", "/v1/completions", LONG)[: rng.choice([9999, 200])],
        lambda: request("GET", "/v1/models", b"") * rng.randint(2, 30),
        lambda: request("POST", "/v1/completions", GOOD) * rng.randint(2, 6),
        lambda: mangle(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            b"5\r\nhello\r\n0\r\n\r\n",
            rng,
        ),
        lambda: b"GET /" + rng.randbytes(rng.randint(1, 3000)) + b" HTTP/1.1\r\n\r\n",
        lambda: b"GET /health HTTP/1.1\r\n" + b"x: " + b"y" * rng.choice([10, 70_000, 600_000]) + b"\r\n\r\n",
        lambda: b"GET /health HTTP/1.1\r\n" + b"".join(b"h%d: v\r\n" % k for k in range(rng.choice([5, 90,
        3000]))) + b"\r\n",
        lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(40),
        lambda: b"\x16\x03\x01" + rng.randbytes(rng.randint(1, 200)),
        lambda: rng.randbytes(rng.randint(1, 500)),
    ]  # fmt: skip
    for number in range(count):
        data = makers[number % len(makers)]()
        try:
            check_raw(talk(server, data))
        except (AssertionError, TimeoutError) as error:
            raise AssertionError(f"seed {seed}, connection {number}: {data[:1000]!r}") from error
    server.check_unharmed()


def test_connections(server: Target) -> None:
    raw(server, 150, seed=2)


def test_pipelined_requests_are_answered_in_order(server: Target) -> None:
    data = request("GET", "/v1/models/tiny", b"") + request("POST", "/v1/completions", GOOD)
    data += request("GET", "/nothing", b"", b"connection: close")
    out = talk(server, data, half_close=False)
    assert statuses_of(out) == [200, 200, 404]
    server.check_unharmed()


def test_a_chunked_body_is_a_body(server: Target) -> None:
    parts = [GOOD[:10], GOOD[10:11], GOOD[11:]]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    )
    out = talk(server, head + b"transfer-encoding: chunked\r\n\r\n" + chunks, half_close=False)
    assert out.startswith(b"HTTP/1.1 200")
    assert b'"completion_tokens":2' in out


def test_a_client_that_waits_to_be_told_to_go_on(server: Target) -> None:
    """`expect: 100-continue`, as curl sends it before a body of a megabyte."""
    head = request(
        "POST", "/v1/completions", b"", b"expect: 100-continue", b"connection: close", length=len(GOOD)
    )
    with socket.create_connection((server.host, server.port), timeout=LIMIT_S) as sock:
        sock.sendall(head)
        assert sock.recv(4096).startswith(b"HTTP/1.1 100")
        sock.sendall(GOOD)
        assert b" 200 OK" in sock.recv(4096)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_many_bodies_and_connections(server: Target) -> None:
    bodies(server, 200, seed=3)
    before = server.rss
    for seed in range(10, 30):
        bodies(server, 400, seed)
        raw(server, 200, seed)
    assert server.rss - before < 64 << 20
