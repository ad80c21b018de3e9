"""`loraplex bench prefix` over a tiny model: what it counts as reused, its rows and charts, and what it
refuses.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.artifact.tiny import tiny_model

from loraplex import cli
from loraplex.bench.prefix_bench import PrefixOptions, as_json, run_prefix
from loraplex.bench.prefix_report import draw, table
from loraplex.bench.prefix_scenarios import ALORA, LORA, Prompts, Sizes
from loraplex.bench.turns import OurTurns, Turn, VllmTurns

SIZES = Sizes(
    clients=3, turns=3, first=40, own=20, answer=4, system=64, question=5, reply=3,
    contexts=(40, 90), draft=6, verdict=2, fresh=(2, 48),
)  # fmt: skip
PAGE = 16


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    model = tiny_model()
    model.config.max_position_embeddings = 256
    model.save_pretrained(folder)
    return folder


def test_rows_of_every_scenario(base: Path) -> None:
    told: list[str] = []
    options = PrefixOptions(base, dtype="float32", sizes=SIZES, pool_gb=0.02)
    measured = run_prefix(options, told.append)
    rows = {(row.scenario, row.engine): row for row in measured.reuse}
    on, off = "loraplex, cache on", "loraplex, cache off"
    assert [row.engine for row in measured.reuse] == [on, off, on, off, on]
    talk = rows["conversations", "loraplex, cache on"]
    prompts = [40, 64, 88]
    assert talk.prompt_tokens == 3 * sum(prompts)
    assert talk.possible == 3 * sum(before + SIZES.answer for before in prompts[:-1])
    # The KV row of an answer's last token is not computed, and only full blocks are reused.
    assert talk.reused == 3 * sum((before + SIZES.answer - 1) // PAGE * PAGE for before in prompts[:-1])
    assert len(talk.by_turn_ms) == SIZES.turns
    cold, again = rows["system prompt", talk.engine], rows["system prompt again", talk.engine]
    assert (cold.possible, cold.reused) == (2 * 64, 2 * 64)
    assert (again.possible, again.reused, again.share) == (3 * 64, 3 * 64, 1.0)
    assert len(cold.by_turn_ms) == SIZES.clients
    assert {row.reused for row in measured.reuse if row.engine.endswith("off")} == {0}
    assert all(0 < row.ttft_p50_ms <= row.ttft_p99_ms and row.tokens_per_s > 0 for row in measured.reuse)
    for one, context in zip(measured.pipeline, SIZES.contexts, strict=True):
        assert one.context == context
        assert one.reused == {LORA: 0, ALORA: (context + SIZES.draft - 1) // PAGE * PAGE}
        assert one.ratio > 0
    [cost] = measured.cost
    assert (cost.prompts, cost.prompt_tokens) == (2, 96)
    assert cost.prefill_ms > 0 < cost.cached_host_ms
    record = json.loads(as_json(options, measured))
    assert [len(record[part]) for part in ("reuse", "pipeline", "cost")] == [5, 2, 1]
    assert len(table(measured)) == 1 + 5 + 2 + 1
    assert draw(measured).count('font-weight="bold"') == 4
    assert "warming up: loraplex, cache on" in told


def test_a_client_asks_over_all_that_was_said_before(base: Path) -> None:
    engine = OurTurns(base, {}, cached=True, dtype="float32", pool_gb=0.02)
    drawn = Prompts(engine.vocab, 1)
    own = [drawn.draw(20), drawn.draw(7), drawn.draw(30)]
    done = engine.converse([[Turn(own[0], None, 5), Turn(own[1], None, 4)], [Turn(own[2], None, 1)]])
    engine.close()
    assert {(one.client, one.turn, one.prompt) for one in done.turns} == {(0, 0, 20), (0, 1, 32), (1, 0, 30)}
    assert done.tokens == 5 + 4 + 1
    assert done.host_ms > 0
    assert all(0 < one.ttft_ms <= one.whole_ms for one in done.turns)


FAKE_VLLM = """
class SamplingParams:
    def __init__(self, max_tokens, **options):
        self.max_tokens = max_tokens

class Output:
    def __init__(self, request, tokens, cached, finished):
        self.request_id, self.num_cached_tokens, self.finished = request, cached, finished
        self.outputs = [type("One", (), {"token_ids": tokens})]

class Engine:
    def __init__(self):
        self.open = {}
    def add_request(self, request, prompt, params, lora_request=None):
        self.open[request] = [prompt["prompt_token_ids"], params.max_tokens, [], lora_request]
    def step(self):
        out = []
        for request, (prompt, count, tokens, lora) in list(self.open.items()):
            tokens.append(len(prompt) + (0 if lora is None else lora))
            out.append(Output(request, list(tokens), len(prompt) // 2, len(tokens) == count))
            if len(tokens) == count:
                del self.open[request]
        return out

class LLM:
    def __init__(self, enable_prefix_caching, **options):
        assert enable_prefix_caching is True
        self.llm_engine = Engine()
"""


def test_the_vllm_process_runs_the_same_loop(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "vllm"
    (package / "lora").mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE_VLLM)
    (package / "lora" / "request.py").write_text(
        "def LoRARequest(name, number, folder):\n    return 100 * number\n"
    )
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"r": 8}')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    engine = VllmTurns(Path(sys.executable), base, {"a": adapter}, "float32", 2, 64, cached=True)
    done = engine.converse([[Turn([1, 2], "a", 3), Turn([4], "a", 1)], [Turn([5, 6, 7, 8], None, 2)]])
    engine.close()
    assert engine.name == "vllm, cache on"
    assert sorted((one.client, one.turn, one.prompt, one.cached) for one in done.turns) == [
        (0, 0, 2, 1), (0, 1, 6, 3), (1, 0, 4, 2),
    ]  # fmt: skip
    assert done.tokens == 3 + 1 + 2


@pytest.mark.parametrize(
    "words",
    [
        ["--scenario", "e"],
        ["--repeats", "0"],
        ["--vllm", "/nowhere/python"],
        ["--scenario", "c,d", "--vllm", sys.executable],
        ["--device", "cuda", "--vllm", sys.executable],
    ],
)
def test_nonsense_is_refused(base: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "prefix", str(base), *words])
    assert ended.value.code == 2
    assert "config_invalid" in capsys.readouterr().err
