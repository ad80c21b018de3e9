"""`loraplex bench decode` on a tiny model beside its peer, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.artifact.tiny import tiny_model, write_lora

from loraplex import cli
from loraplex.bench import decode
from loraplex.bench.decode import DecodeRow, table

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
            ["bench", "decode", str(base), "--adapter", f"a={adapter}", "--dtype", "float32", "--repeats", "1",
             "--json", str(out)]
        )  # fmt: skip
    assert ended.value.code == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["engine"] for row in rows} == {"loraplex", "transformers + PEFT"}
    assert [row["case"] for row in rows if row["engine"] == "loraplex"] == [
        "1 x base", "8 x base", "8 over 1 adapter",
    ]  # fmt: skip
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


def test_the_vllm_process_finds_no_module_of_ours_in_place_of_pythons_own(tmp_path: Path) -> None:
    """A script's folder comes first on its path, and ours has an `http.py`."""
    (tmp_path / "vllm" / "lora").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text(
        "import http.client\nLLM = SamplingParams = lambda **options: None\n"
    )
    (tmp_path / "vllm" / "lora" / "request.py").write_text("LoRARequest = None\n")
    options = {
        "model": "m",
        "dtype": "bfloat16",
        "requests": 1,
        "positions": 8,
        "adapters": [],
        "max_rank": 0,
    }
    ended = subprocess.run(
        [sys.executable, str(Path(decode.__file__).with_name("vllm_peer.py")), json.dumps(options)],
        input="", capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (0, '{"ready": true}\n'), ended.stderr
