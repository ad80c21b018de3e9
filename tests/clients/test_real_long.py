"""Real clients against a real server with the tool-calling demo adapter, each in an environment of its own.

A test installs its client at the versions of `pins.toml` and runs its program, which checks what it gets. It
is skipped where nothing can be installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.tiny_server import free_port
from tests.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
PINS = tomllib.loads((HERE / "pins.toml").read_text(encoding="utf-8"))
PYTHON = {
    "openai_python": ["openai"],
    "langchain_agent": ["langchain-openai"],
    "pydantic_ai_agent": ["pydantic-ai-slim[openai]"],
    "openai_agents": ["openai-agents"],
    "litellm_calls": ["litellm"],
}
NODE = {
    "openai_node": ["openai", "zod"],
    "vercel_ai": ["ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod"],
}
NOT_HERE = (
    *(
        "ConnectionError",
        "NewConnectionError",
        "ProxyError",
        "ENOTFOUND",
        "ECONNREFUSED",
        "ETIMEDOUT",
        "EAI_AGAIN",
    ),
    *("ConnectTimeout", "ReadTimeout", "No matching distribution", "ETARGET", "E404"),
)
"""What package managers say where they reach nobody, or who has not these versions; all else is a fault."""

pytestmark = [pytest.mark.long, pytest.mark.e2e]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The demo with its tool-calling adapter, served as a user would."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "loraplex.cli", "serve", "--demo", "--dtype", "float32", "--pool-gb", "0.3"),
        *("--adapter", "tools=demo/adapters/tools", "--max-model-len", "2048", "--port", str(port)),
    ]
    log = tmp_path_factory.mktemp("clients") / "server.log"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "2"}
    with (
        log.open("w") as said,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=said, text=True
        ) as server,
    ):
        assert server.stdout is not None
        try:
            assert any("ready on" in line for line in server.stdout), log.read_text()
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()


def call(words: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program without this repository in its way."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        words,
        cwd=folder,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def install(words: list[str], folder: Path) -> None:
    """Have a package manager install, or skip where it cannot fetch."""
    try:
        done = call(words, folder)
    except subprocess.TimeoutExpired:
        pytest.skip(f"the packages did not come within {LIMIT_S:g} s")
    said = done.stdout + done.stderr
    reasons = [line for line in said.splitlines() if any(word in line for word in NOT_HERE)]
    if done.returncode != 0 and reasons:
        pytest.skip(f"the packages cannot be fetched here: {reasons[-1][:200]}")
    assert done.returncode == 0, said


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A place for a client, which takes hundreds of megabytes; nothing of it stays."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def check(program: list[str], folder: Path, url: str) -> None:
    """The program ends well; it checks what it gets itself."""
    done = call(
        program,
        folder,
        BASE_URL=url,
        MODEL="tools",
        LITELLM_LOCAL_MODEL_COST_MAP="True",
        OPENAI_API_KEY="none",
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("name", sorted(PYTHON))
def test_a_python_client_works(folder: Path, url: str, name: str) -> None:
    (folder / "pins.txt").write_text("\n".join(PINS["python"]))
    made = call([sys.executable, "-m", "venv", "env"], folder)
    assert made.returncode == 0, made.stderr
    python = str(folder / "env" / "bin" / "python")
    options = ["--no-input", "--only-binary=:all:", "--no-compile", "--retries", "2", "-q", "-c", "pins.txt"]
    install([python, "-m", "pip", "install", *options, *PYTHON[name]], folder)
    check([python, str(HERE / "programs" / f"{name}.py")], folder, url)


@pytest.mark.parametrize("name", sorted(NODE))
def test_a_node_client_works(folder: Path, url: str, name: str) -> None:
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("npm or node is not installed")
    packages = [f"{package}@{PINS['node'][package]}" for package in NODE[name]]
    (folder / "package.json").write_text("{}")
    install([npm, "install", "--no-audit", "--no-fund", "--prefer-offline", *packages], folder)
    program = folder / f"{name}.mjs"  # beside its packages, where node looks for them
    program.write_text((HERE / "programs" / program.name).read_text(encoding="utf-8"), encoding="utf-8")
    check([node, program.name], folder, url)
