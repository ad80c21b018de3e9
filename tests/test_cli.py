"""The command line: what it starts, what it refuses and with which status, and adapters of a running
server.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from cyclopts import App

from loraplex import cli
from loraplex.config import ServeConfig
from tests.conftest import Result


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeConfig]:
    configs: list[ServeConfig] = []

    def run_server(config: ServeConfig) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr(cli, "run_server", run_server)
    return configs


def test_serve_understands_the_documented_options(
    loraplex: Callable[..., Result], served: list[ServeConfig]
) -> None:
    words = (
        "serve MODEL --adapter a=/x --adapter b=/y --adapter-dir /d --adapter-dir /e --host ::1 --port 9000 "
        "--device cpu --dtype float32 --pool-gb 1.5 --max-model-len 512 --tensor-parallel 1 --load-format "
        "dummy"
    )
    assert loraplex(*words.split()).status == 0
    assert served == [
        ServeConfig(
            model="MODEL",
            adapters=(("a", "/x"), ("b", "/y")),
            adapter_dirs=("/d", "/e"),
            host="::1",
            port=9000,
            device="cpu",
            dtype="float32",
            pool_gb=1.5,
            max_model_len=512,
            load_format="dummy",
        )
    ]
    assert loraplex("serve", "--demo").status == 0
    assert served[1] == ServeConfig(demo=True)


@pytest.mark.parametrize(
    ("words", "code", "names"),
    [
        ("serve", "config_invalid", "--demo"),
        ("serve M --tensor-parallel 2", "unsupported_option", "--tensor-parallel"),
        ("serve M --policy lottery", "unsupported_option", "--policy"),
        ("serve M --store-gb 0", "config_invalid", "store_gb"),
        ("serve M --adapter sql", "config_invalid", "NAME=SOURCE"),
        ("serve M --host 0.0.0.0", "config_invalid", "--api-key-file"),
        ("adapters list --url ftp://x", "config_invalid", "http://HOST"),
        ("adapters list --url http://127.0.0.1:abc", "config_invalid", "http://HOST"),
        ("adapters list --url http://127.0.0.1:99999", "config_invalid", "http://HOST"),
        ("adapters list --url http://[::1", "config_invalid", "http://HOST"),
        ("adapters list --url http://x?y=1", "config_invalid", "http://HOST"),
        ("adapters list --api-key s\u00e9cret", "config_invalid", "--api-key"),
        ("verify A --base B --page-tokens 0", "config_invalid", "--page-tokens"),
        ("verify A --base B --page-tokens -5", "config_invalid", "--page-tokens"),
    ],
)
def test_refusals_have_a_code_and_a_status(
    loraplex: Callable[..., Result], served: list[ServeConfig], words: str, code: str, names: str
) -> None:
    result = loraplex(*words.split())
    assert (result.status, served) == (2, [])
    assert f"[{code}]" in result.err
    assert names in result.err


@pytest.mark.parametrize("words", ["serve M --nope", "serve M --device tpu", "serve M --port x", "nope"])
def test_what_is_not_an_option_is_refused(
    loraplex: Callable[..., Result], served: list[ServeConfig], words: str
) -> None:
    assert loraplex(*words.split()).status != 0
    assert served == []


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--adapter x=/nonexistent", "adapter_source_missing"),
        ("--adapter @=/nonexistent", "invalid_request"),
        ("--adapter-dir /nonexistent", "config_invalid"),
    ],
)
def test_sources_are_looked_at_before_a_model_is(
    loraplex: Callable[..., Result], words: str, code: str
) -> None:
    result = loraplex("serve", "/no/model", *words.split())
    assert result.status == 2
    assert f"[{code}]" in result.err


@pytest.mark.parametrize("command", ["check", "history x", "grants", "withdraw t a"])
def test_a_catalog_that_is_not_there_is_not_taken_for_a_sound_one(
    loraplex: Callable[..., Result], tmp_path: Path, command: str
) -> None:
    url = f"sqlite:///{tmp_path}/none.db"
    for where in (url, "sqlite://"):
        result = loraplex("catalog", *command.split(), "--catalog", where)
        assert result.status == 2
        assert "there is no catalog" in result.err
    assert list(tmp_path.iterdir()) == []
    assert loraplex("catalog", "grant", "t", "a", "use", "--catalog", url).status == 0
    assert loraplex("catalog", *command.split(), "--catalog", url).status == 0


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from loraplex import cli\n"
        "try: cli.app(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'zmq', 'granian', 'tokenizers', 'numpy', 'rich.progress'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_env()
    )
    assert "serve" in done.stdout
    assert done.stderr.strip() == "[]"


def _options(app: App, path: str = "loraplex") -> Iterator[tuple[str, str | None]]:
    """(command and option, what its help says) of every command below `app`."""
    for name in app:
        if not name.startswith("-"):
            yield from _options(app[name], f"{path} {name}")
    if app.default_command is not None:
        for argument in app.assemble_argument_collection(parse_docstring=True):
            if argument.name.startswith("--"):
                yield f"{path} {argument.name}", argument.parameter.help


def test_every_option_says_what_it_is() -> None:
    options = dict(_options(cli.app))
    assert {"loraplex serve --pool-gb", "loraplex verify --manifest", "loraplex bench ops --plot"} <= set(
        options
    )
    assert [name for name, text in options.items() if not text] == []


def _env() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1] / "src")}


ADAPTER = {
    "alias": "sql", "revision": 3, "method": "lora", "ranks": [8, 16], "state": "idle", "leases": 0,
    "tier_bytes": {"device": 1 << 20, "host": 1 << 20}, "semantic_digest": "ab" * 32, "tensors_applied": 4,
    "tensors_total": 4,
}  # fmt: skip


class FakeServer(BaseHTTPRequestHandler):
    """Answers the adapter endpoints, and keeps what it was sent."""

    asked: list[tuple[str, str, Any, str | None]] = []  # noqa: RUF012 - one server at a time

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.asked.append(
            (self.command, self.path, json.loads(body) if body else None, self.headers.get("authorization"))
        )
        if "missing" in self.path:
            error = {
                "message": "adapter 'missing' is not registered",
                "type": "t",
                "param": "alias",
                "code": "adapter_not_found",
            }
            self.reply(404, json.dumps({"error": error}))
        elif self.path == "/v1/load_lora_adapter":
            self.reply(200, "Success")
        elif self.path.startswith("/v1/adapters?"):
            self.reply(200, json.dumps({"object": "list", "data": [ADAPTER], "has_more": False}))
        else:
            self.reply(200, json.dumps(ADAPTER))

    do_GET = do_PUT = do_POST = do_DELETE = handle_any

    def reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    FakeServer.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeServer) as running:
        thread = Thread(target=running.serve_forever)
        thread.start()
        monkeypatch.setenv("LORAPLEX_URL", f"http://127.0.0.1:{running.server_port}")
        yield running
        running.shutdown()
        thread.join()


@pytest.mark.usefixtures("server")
def test_adapters_of_a_running_server(loraplex: Callable[..., Result]) -> None:
    listed = loraplex("adapters", "list", "--api-key", "secret")
    assert (listed.status, "sql" in listed.out, "8/16" in listed.out) == (0, True, True)
    assert json.loads(loraplex("adapters", "list", "--json").out) == [ADAPTER]
    assert json.loads(loraplex("adapters", "show", "sql").out) == ADAPTER
    assert "4 of 4 tensors applied" in loraplex("adapters", "add", "a/b", "/x").out
    assert "sql@3" in loraplex("adapters", "swap", "sql", "/y").out
    assert loraplex("adapters", "swap", "sql", "/y", "--expected", "2", "--drain").status == 0
    assert loraplex("adapters", "add", "c", "/x", "--text", "base").status == 0
    assert loraplex("adapters", "swap", "sql", "/y", "--expected", "3", "--text", "adapter").status == 0
    assert loraplex("adapters", "add", "c", "/x", "--text", "mine").status != 0
    assert "sql is removed" in loraplex("adapters", "remove", "sql").out
    assert FakeServer.asked[0] == ("GET", "/v1/adapters?limit=1000", None, "Bearer secret")
    assert [(m, p, b) for m, p, b, _ in FakeServer.asked[3:]] == [
        ("POST", "/v1/load_lora_adapter", {"lora_name": "a/b", "lora_path": "/x"}),
        ("GET", "/v1/adapters/a%2Fb", None),
        ("GET", "/v1/adapters/sql", None),
        ("PUT", "/v1/adapters/sql", {"source": "/y", "expected_revision": 3, "drain": False}),
        ("PUT", "/v1/adapters/sql", {"source": "/y", "expected_revision": 2, "drain": True}),
        ("POST", "/v1/load_lora_adapter", {"lora_name": "c", "lora_path": "/x", "text": "base"}),
        ("GET", "/v1/adapters/c", None),
        (
            "PUT",
            "/v1/adapters/sql",
            {"source": "/y", "expected_revision": 3, "drain": False, "text": "adapter"},
        ),
        ("DELETE", "/v1/adapters/sql", None),
    ]


@pytest.mark.usefixtures("server")
def test_a_long_alias_is_whole_in_a_pipe(
    loraplex: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    alias = "team/" + "customer-" * 12 + "1"
    monkeypatch.setitem(ADAPTER, "alias", alias)
    [line] = [text for text in loraplex("adapters", "list").out.splitlines() if "team" in text]
    assert line.split() == [alias, "3", "lora", "8/16", "idle", "0", "1,024", "KiB", "ab" * 6]


@pytest.mark.usefixtures("server")
def test_residency_of_a_running_server(
    loraplex: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    for action in ("pin", "unpin", "prefetch"):
        assert "idle" in loraplex("adapters", action, "sql").out
    monkeypatch.setitem(ADAPTER, "revoked", ["sql@3", "other@1"])
    assert loraplex("adapters", "revoke", "sql").out == "revoked: sql@3, other@1\n"
    assert loraplex("adapters", "limits").status == 0
    assert loraplex("adapters", "limits", "--pool-share", "0.5", "--resident", "3").status == 0
    assert [(m, p, b) for m, p, b, _ in FakeServer.asked] == [
        ("POST", "/v1/adapters/sql/pin", None),
        ("POST", "/v1/adapters/sql/unpin", None),
        ("POST", "/v1/adapters/sql/prefetch", None),
        ("POST", "/v1/adapters/sql/revoke", None),
        ("GET", "/v1/limits", None),
        ("PUT", "/v1/limits", {"pool_share": 0.5, "resident_adapters": 3}),
    ]


@pytest.mark.usefixtures("server")
def test_a_server_s_refusal_is_the_command_s(loraplex: Callable[..., Result]) -> None:
    result = loraplex("adapters", "show", "missing")
    assert result.status == 2
    assert "adapter 'missing' is not registered [adapter_not_found]" in result.err


def test_no_server_is_said(loraplex: Callable[..., Result]) -> None:
    result = loraplex("adapters", "list", "--url", "http://127.0.0.1:9")
    assert result.status == 1
    assert "[engine_unavailable]" in result.err
