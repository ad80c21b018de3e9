"""`loraplex bench decode` on a tiny model beside its peer, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.artifact.tiny import tiny_model, write_lora
from tests.waiting import until_gone

from loraplex import cli
from loraplex.bench.decode import DecodeRow, table
from loraplex.bench.engines import Vllm

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base, adapter = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("adapter")
    model = tiny_model()
    model.config.max_position_embeddings = 256
    model.save_pretrained(base)
    return base, write_lora(adapter / "lora")


def test_rows_of_both_engines(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter = folders
    out = tmp_path / "decode.json"
    with pytest.raises(SystemExit) as ended:
        cli.main(
            [
                "bench",
                "decode",
                str(base),
                "--adapter",
                f"a={adapter}",
                "--dtype",
                "float32",
                "--repeats",
                "1",
                "--json",
                str(out),
            ]
        )
    assert ended.value.code == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["engine"] for row in rows} == {"loraplex", "transformers + PEFT"}
    assert [row["case"] for row in rows if row["engine"] == "loraplex"] == [
        "1 x base",
        "8 x base",
        "8 over 1 adapter",
    ]
    assert all(row["tokens_per_s"] > 0 for row in rows)
    assert "8 over 1 adapter" in capsys.readouterr().out


def test_an_adapter_that_is_no_folder_is_refused(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "decode", str(folders[0]), "--adapter", "a=/nowhere"])
    assert ended.value.code == 2
    assert "config_invalid" in capsys.readouterr().err


def test_ratios_are_to_the_same_case_and_to_our_base() -> None:
    rows = [
        DecodeRow("8 x base", "loraplex", 200.0, 0, 0),
        DecodeRow("8 over 8 adapters", "loraplex", 150.0, 0, 0),
        DecodeRow("8 over 8 adapters", "transformers + PEFT", 50.0, 0, 0),
    ]
    assert table(rows)[1] == ("8 over 8 adapters", "150.0", "50.0", "3.00", "", "", "0.75")


def test_verify_says_what_an_adapter_is_and_why_one_is_refused(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter = folders
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", str(adapter), "--base", str(base), "--json"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", str(tmp_path), "--base", str(base), "--json"])
    assert ended.value.code == 2
    record = json.loads(capsys.readouterr().out)
    assert (record["ok"], record["error"]["code"]) == (False, "adapter_source_missing")


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """A folder with a `vllm` that starts a process of its own, notes both, and never answers a request."""
    package = tmp_path / "path" / "vllm"
    (package / "lora").mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE_VLLM.replace("FOLDER", repr(str(tmp_path))))
    (package / "lora" / "request.py").write_text("LoRARequest = None\n")
    return tmp_path / "path"


FAKE_VLLM = """
import http.client  # Python's own, and no module of ours
import os, pathlib, subprocess, sys, threading

SamplingParams = dict

class LLM:
    def __init__(self, **options):
        other = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
        new = pathlib.Path(FOLDER) / "new"
        new.write_text(f"{os.getpid()} {other.pid}")
        new.rename(pathlib.Path(FOLDER) / "pids")

    def generate(self, *arguments, **more):
        threading.Event().wait()
"""


def test_the_vllm_process_loads_and_ends_with_what_it_started(
    tmp_path: Path, vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(vllm))
    engine = Vllm(Path(sys.executable), tmp_path, [], "bfloat16", 1, 8)
    processes = [psutil.Process(int(pid)) for pid in (tmp_path / "pids").read_text().split()]
    assert engine.cpu_seconds() > 0
    engine.close()
    until_gone(*processes)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_measurement_that_is_ended_leaves_no_process_of_a_peer(
    folders: tuple[Path, Path], tmp_path: Path, vllm: Path, number: signal.Signals
) -> None:
    base, _ = folders
    words = ["bench", "decode", str(base), "--dtype", "float32", "--no-peer", "--vllm", sys.executable]
    path = os.pathsep.join((str(ROOT / "src"), str(vllm)))
    with subprocess.Popen(
        [sys.executable, "-m", "loraplex.cli", *words],
        # A shell that starts the tests in the background leaves interrupts ignored, and children inherit
        # that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        assert command.stderr is not None
        told = [next(line for line in command.stderr if "warming up: vllm" in line)]
        processes = [psutil.Process(int(pid)) for pid in (tmp_path / "pids").read_text().split()]
        command.send_signal(number)
        until_gone(*processes)
        out, err = command.communicate()
    assert told
    assert out == ""
    assert "Traceback" not in err
    assert command.returncode == (-number if number is signal.SIGKILL else 128 + number)
