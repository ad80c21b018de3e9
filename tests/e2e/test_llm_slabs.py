"""Two dozen tiny adapters through `LLM` in a pool of a few pages: served as PEFT does, evicted, brought back,
swapped.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.e2e.judge import TINY, check_greedy, judge_of
from tests.prompts import prompt

from loraplex import LLM, SamplingParams
from loraplex.cli import main

pytestmark = pytest.mark.e2e

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, logprobs=5)
PAGE_BYTES = 6144


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny adapters' folders, by name."""
    parent = tmp_path_factory.mktemp("tiny")
    for name in TINY:
        judge_of(name).save_pretrained(parent / name)
    return {name: parent / name for name in TINY}


def test_many_tiny_adapters_share_a_few_pages(root: Path, folders: dict[str, Path]) -> None:
    with LLM(
        root / "base",
        folders,
        dtype="float32",
        pool_gb=7 * PAGE_BYTES / 2**30,
        page_tokens=16,
        scrub=True,
        max_requests=3,
        max_model_len=32,
    ) as llm:
        names = [None, *TINY]
        for turn in range(2):
            outputs = llm.generate([prompt(3 + i % 5, turn + i) for i in range(len(names))], names, GREEDY)
            for name, output in zip(names, outputs, strict=True):
                check_greedy(output, name, 4)
        figures = llm.inspect()
        assert figures["pages"]["page_bytes"] == PAGE_BYTES
        assert figures["pages"]["total"] == 6
        shown = {entry["alias"]: entry for entry in llm.adapters()}
        assert {entry["tier_bytes"]["device"] for entry in shown.values()} <= {0, PAGE_BYTES // 16}
        assert (
            sum(entry["tier_bytes"]["device"] for entry in shown.values()) == figures["slabs"]["owned_bytes"]
        )
        llm.swap_adapter("tiny0", folders["tiny1"])
        [output] = llm.generate([prompt(6, 9)], "tiny0", GREEDY)
        check_greedy(output, "tiny1", 4)


def test_verify_says_that_it_shares_a_page(
    root: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["verify", str(folders["tiny0"]), "--base", str(root / "base"), "--dtype", "float32"]
    with pytest.raises(SystemExit, match="0"):
        main([*arguments, "--json"])
    record = json.loads(capsys.readouterr().out)
    assert record["pages"] == 1
    assert record["size_class"] > 0
    assert record["tier_bytes"]["device"] == record["tier_bytes"]["host"] < record["page_bytes"]
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    assert f"a block of 1/{1 << record['size_class']}" in capsys.readouterr().out
