"""Paths on the command line that lead nowhere, to the wrong kind of thing or to no JSON: one sentence, status
2, a code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from loraplex.core.errors import CODES, ErrorCode, Root
from tests.artifact.tiny import tiny_model, write_lora
from tests.conftest import Result

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound base and adapter, and everything that is mistaken for one."""
    root = tmp_path_factory.mktemp("paths")
    tiny_model().save_pretrained(root / "base")
    write_lora(root / "a")
    (root / "empty").mkdir()
    for name, text in {"blank": "", "text": "hello", "list.json": "[1]", "object.json": '{"a": 1}'}.items():
        (root / name).write_text(text)
    (root / "bytes").write_bytes(b"\xff\xfe\x00")
    (root / "dangling").symlink_to(root / "nowhere")
    (root / "loop").symlink_to(root / "loop")
    return root


NOWHERE = ["nowhere", "dangling", "loop", "text/below", "x" * 300]
FILES = ["blank", "text", "bytes", "list.json", "object.json"]


def refused(result: Result, *names: str) -> ErrorCode:
    """The code of a refusal that is the caller's."""
    assert result.status == 2, result.err
    # What took a while says so first, as "Hashing the weights of the base ...".
    [line] = [line for line in result.err.strip().splitlines() if not line.endswith(" ...")]
    code = ErrorCode(line.rpartition("[")[2].rstrip("]"))
    assert CODES[code].root is Root.CALLER
    for name in names:
        assert name in line
    return code


@pytest.mark.parametrize("name", [*NOWHERE, *FILES, "empty"])
def test_manifest(here: Path, loraplex: Run, name: str) -> None:
    words = ("verify", str(here / "a"), "--base", str(here / "base"), "--manifest", str(here / name))
    read = name in FILES
    assert refused(loraplex(*words), str(here / name)).value == (
        "manifest_invalid" if read else "config_invalid"
    )
    result = loraplex(*words, "--json")
    assert (result.status, json.loads(result.out)["error"]["param"]) == (2, "manifest")


def test_a_manifest_is_looked_at_before_the_base(here: Path, loraplex: Run) -> None:
    words = ("verify", str(here / "nowhere"), "--base", str(here / "nowhere"))
    assert refused(loraplex(*words, "--manifest", str(here / "text"))) is ErrorCode.MANIFEST_INVALID


@pytest.mark.parametrize("name", [*NOWHERE, *FILES, "empty"])
def test_base_and_adapter(here: Path, loraplex: Run, name: str) -> None:
    wrong = str(here / name)
    assert refused(loraplex("verify", str(here / "a"), "--base", wrong), name)
    assert (
        refused(loraplex("verify", wrong, "--base", str(here / "base"))) is ErrorCode.ADAPTER_SOURCE_MISSING
    )
    served = loraplex("serve", str(here / "base"), "--adapter", f"x={wrong}")
    assert refused(served) is ErrorCode.ADAPTER_SOURCE_MISSING
    if name != "empty":
        assert refused(loraplex("serve", wrong), name) is ErrorCode.MODEL_SOURCE_MISSING
        folder = loraplex("serve", str(here / "base"), "--adapter-dir", wrong)
        assert refused(folder, name) is ErrorCode.CONFIG_INVALID
    if name != "blank":  # which SQLite takes for a database without a table
        for command in ("check", "grants"):
            catalog = loraplex("catalog", command, "--catalog", f"sqlite:///{wrong}")
            assert refused(catalog, name) is ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["folder", "loop", "gone"])
def test_a_base_with_a_file_that_is_none(
    here: Path, tmp_path: Path, loraplex: Run, file: str, kind: str
) -> None:
    for path in (here / "base").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / file).unlink()
    if kind == "folder":
        (tmp_path / file).mkdir()
    elif kind == "loop":
        (tmp_path / file).symlink_to(tmp_path / file)
    refused(loraplex("verify", str(here / "a"), "--base", str(tmp_path)), str(tmp_path))


@pytest.mark.parametrize("name", ["nowhere/file", "empty", "text/below", "loop"])
@pytest.mark.parametrize(
    "words",
    ["step --steps 1", "decode", "identity", "load", "http", "ops", "decode --device cuda"],
)
def test_a_report_that_cannot_be_written_is_refused_before_anything_is_measured(
    here: Path, loraplex: Run, words: str, name: str
) -> None:
    result = loraplex("bench", *words.split(), "--json", str(here / name))
    assert refused(result, str(here / name)) is ErrorCode.CONFIG_INVALID
    assert not result.out


def test_looking_whether_a_report_can_be_written_leaves_nothing(
    here: Path, tmp_path: Path, loraplex: Run
) -> None:
    fresh, kept = tmp_path / "fresh.json", tmp_path / "kept.json"
    kept.write_text("before")
    for path in (fresh, kept):
        words = ("bench", "decode", "--json", str(path), "--vllm", str(here / "nowhere"))
        assert refused(loraplex(*words), "--vllm") is ErrorCode.CONFIG_INVALID
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]
    assert kept.read_text() == "before"


@pytest.mark.parametrize("name", NOWHERE)
def test_adapters_of_a_benchmark(here: Path, loraplex: Run, name: str) -> None:
    result = loraplex("bench", "decode", str(here / "base"), "--adapter", f"x={here / name}")
    assert refused(result, "--adapter") is ErrorCode.CONFIG_INVALID
