"""Every malformed adapter of the corpus again, through the command and through `LLM`: the same code, nothing
left behind.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from tests.artifact.corpus import CASES
from tests.artifact.corpus_config import Mutation
from tests.artifact.tiny import tiny_model, write_lora

from loraplex import LLM, cli
from loraplex.core.errors import CODES, ErrorCode, LoraplexError, Root

IDS = [f"{case[0]}: {case[1]}" for case in CASES]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    model = tiny_model()
    model.config.save_pretrained(folder)
    save_file(
        {name: value.contiguous() for name, value in model.state_dict().items()}, folder / "model.safetensors"
    )
    return folder


@pytest.fixture(scope="module")
def llm(base: Path) -> Iterator[LLM]:
    with LLM(base, device="cpu", dtype="float32", pool_gb=0.01) as running:
        yield running


@pytest.mark.parametrize(("group", "name", "mutate", "code"), CASES, ids=IDS)
def test_verify_refuses_it(
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    group: str,
    name: str,
    mutate: Mutation,
    code: ErrorCode,
) -> None:
    folder = write_lora(tmp_path / "adapter")
    mutate(folder)
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", str(folder), "--base", str(base), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["error"]["code"]) == (False, code.value)
    assert ended.value.code == (2 if CODES[code].root is Root.CALLER else 1)


@pytest.mark.parametrize(("group", "name", "mutate", "code"), CASES, ids=IDS)
def test_llm_refuses_it(
    llm: LLM, tmp_path: Path, group: str, name: str, mutate: Mutation, code: ErrorCode
) -> None:
    folder = write_lora(tmp_path / "adapter")
    mutate(folder)
    before = llm.inspect()
    with pytest.raises(LoraplexError) as caught:
        llm.add_adapter("a", folder)
    assert caught.value.code is code
    assert llm.adapters() == []
    assert llm.inspect() == before


def test_verify_says_what_differs_and_is_strict_where_asked(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def verify(*words: str) -> dict[str, Any]:
        with pytest.raises(SystemExit):
            cli.main(["verify", str(folder), "--base", str(base), "--json", *words])
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    folder = write_lora(tmp_path / "adapter", base_model_name_or_path="owner/another")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    found = verify()
    assert (found["ok"], [note["kind"] for note in found["notes"]]) == (True, ["other_base", "chat_template"])
    assert verify("--strict-base")["error"]["code"] == ErrorCode.ADAPTER_BASE_MISMATCH.value
    folder = write_lora(tmp_path / "same", base_model_name_or_path=f"owner/{base.name}")
    assert verify("--strict-base")["notes"] == []


def test_the_good_one_passes_both(
    base: Path, llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_lora(tmp_path / "adapter")
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", str(folder), "--base", str(base)])
    assert ended.value.code == 0
    assert "12 of 12 tensors applied, 6 modules" in capsys.readouterr().out
    assert llm.add_adapter("good", folder)["tensors_applied"] == 12
    llm.remove_adapter("good")
    print(f"{len(CASES)} malformed adapters and configurations")
