"""The README's programs run as they stand there, against a server that is started as it says, and print what
it shows.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.tiny_server import free_port
from tests.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(
    r"^```(\w*)\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)
PROGRAMS = [text for language, text in BLOCKS if language == "python"]
ADDRESS = "http://127.0.0.1:8000"

pytestmark = pytest.mark.e2e


def run(*words: str) -> str:
    """What a program prints, run from the repository's folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def url() -> Iterator[str]:
    """The demo, served as `make serve` does, at a port of its own."""
    port = free_port()
    command = [sys.executable, "-m", "loraplex.cli", "serve", "--demo", "--adapter-dir", "demo/adapters"]
    with subprocess.Popen(
        [*command, "--port", str(port)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        try:
            assert any("ready on" in line for line in server.stdout), "it ended before it was ready"
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def answers(text: str) -> dict[str, tuple[str, str]]:
    """Model -> answer and the name of what answered. Digests also cover the type that the processor is best
    at.
    """
    lines = re.findall(r"^([\w.-]+): (.*)  \[([\w.@-]+):[0-9a-f]{16}\]$", text, re.MULTILINE)
    return {model: (answer, revision) for model, answer, revision in lines}


def test_the_base_and_three_adapters_answer_as_shown_and_a_swap_is_a_new_revision(url: str) -> None:
    program = PROGRAMS[0].replace(ADDRESS, url)
    assert program != PROGRAMS[0]
    (shown,) = [answers(text) for _, text in BLOCKS if answers(text)]
    assert len(shown) == 4
    assert answers(run("-c", program)) == shown
    run("-m", "loraplex.cli", "adapters", "swap", "iso-date", "demo/adapters/sql", "--url", url)
    after = answers(run("-c", program))
    assert after["iso-date"][1] == "iso-date@2"
    assert after["sql"] == shown["sql"]


def test_the_program_in_one_process_runs() -> None:
    said = run("-c", PROGRAMS[1])
    assert "sql@1" in said
    assert said.startswith("None ")


def test_the_readme_is_short_and_names_public_things_only() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 90
    assert set(re.findall(r"(?:from|import) (loraplex[\w.]*)", text)) == {"loraplex"}
