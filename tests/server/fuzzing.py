"""What the fuzzing tests share: one server process over the virtual engine, and what it must look like
afterwards.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from tests.process import engines
from tests.server.processes import ROOT
from tests.server.tiny_server import free_port, write_adapter, write_model
from tests.text.tiny_text import byte_tokenizer, write_folder
from tests.waiting import LIMIT_S, until

CONTEXT = 128
"""Positions of a request: an answer without a limit of its own ends soon."""


def _unused(pages: dict[str, int]) -> int:
    """Pages that no request holds."""
    return pages["free"] + pages["adapter"] + pages["prefix"]


class Target:
    """A running server, and the state that it must come back to."""

    def __init__(self, url: str, process: subprocess.Popen[str], key: str) -> None:
        self.url = url
        self.host, self.port = "127.0.0.1", int(url.rpartition(":")[2])
        self.process = process
        self.http = httpx.Client(base_url=url, timeout=LIMIT_S, headers={"authorization": f"Bearer {key}"})
        self.before = self.pages()

    def residency(self) -> dict[str, Any]:
        """The engine's figures."""
        return dict(self.http.get("/v1/residency").raise_for_status().json())

    def pages(self) -> dict[str, int]:
        """Pages by state, once no request lives and the step that it was in has let go of its pages."""
        until(self.at_rest)
        return dict(self.residency()["pages"])

    def at_rest(self) -> bool:
        """No request lives, and no page is theirs."""
        figures = self.residency()
        pages = figures["pages"]
        return not (figures["requests"]["live"] or pages["kv"] or pages["reserved"])

    def check_unharmed(self) -> None:
        """It answers, and nothing that it was sent holds anything."""
        assert self.process.poll() is None, "the server ended"
        # A request that was sent last may still be on its way to the engine. Adapters may have been evicted
        # and prefixes kept; whatever they left is free.
        until(lambda: _unused(self.pages()) == _unused(self.before))
        assert self.residency()["pages"]["total"] == self.before["total"]
        figures = self.residency()
        assert all(entry["leases"] == 0 for entry in figures["adapters"])
        answer = self.http.post(
            "/v1/completions", json={"model": "tiny", "prompt": [70, 71], "max_tokens": 3, "ignore_eos": True}
        )
        assert answer.json()["usage"]["completion_tokens"] == 3

    @property
    def rss(self) -> int:
        """Bytes that server and engine hold."""
        parent = psutil.Process(self.process.pid)
        return sum(p.memory_info().rss for p in [parent, *parent.children(recursive=True)])


@contextmanager
def target(
    folder: Path, builder: str = engines.VIRTUAL, key: str = "none", **fields: Any
) -> Iterator[Target]:
    """A server with text and two adapters. key: an admin's, where there are keys. fields: of its
    configuration.
    """
    write_folder(write_model(folder / "tiny"), byte_tokenizer())
    for seed, name in enumerate(("one", "two")):
        write_adapter(folder / "adapters" / name, seed=seed)
    config = {
        "model": str(folder / "tiny"), "log_level": "error", "port": free_port(), "max_model_len": CONTEXT,
        "adapter_dirs": [str(folder / "adapters")], **fields,
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.server.bare_server", json.dumps(config), builder]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    with subprocess.Popen(
        [*command, str(folder / "work"), "real"], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if "ready on" in line:
                    break
            found = Target(f"http://127.0.0.1:{config['port']}", process, key)
            yield found
            found.http.close()
        finally:
            process.terminate()
            try:
                process.wait(30)
            finally:
                process.kill()


def check_answer(status: int, kind: str, body: bytes) -> None:
    """An answer that a client can rely on: no fault of ours, and every refusal typed."""
    code = json.loads(body)["error"]["code"] if status >= 400 and body else ""
    assert status < 500 or code == "deadline_exceeded", (status, body[:300])
    if status >= 400 and body:
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
        assert kind == "application/json"
