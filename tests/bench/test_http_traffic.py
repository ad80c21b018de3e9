"""`bench http` with a device: what traffic is drawn, what figures are made, and a small real server
under it.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.model.tiny import save

from loraplex.bench.http_target import write_tokenizer
from loraplex.bench.http_traffic import HttpOptions, cases_of, run_traffic
from loraplex.bench.traffic import CASES, Done, Seen, Traffic, draws, line, mixed, row
from loraplex.core.errors import CallerError


def test_parts_of_a_closed_loop_take_adapters_in_turn_between_them() -> None:
    traffic = Traffic(clients=4, adapters=6)
    parts = [list(islice(draws(traffic, 0, part, 2), 6)) for part in range(2)]
    assert [ask.adapter for ask in parts[0]] == [0, 2, 4, 0, 2, 4]
    assert [ask.adapter for ask in parts[1]] == [1, 3, 5, 1, 3, 5]
    assert {(ask.prompt, ask.new, ask.after_s) for ask in parts[0]} == {(128, 128, 0.0)}


def test_mixed_lengths_arrivals_and_popularity_have_their_distributions() -> None:
    traffic = mixed(rate=40.0)
    asks = list(islice(draws(traffic, 1, 0, 4), 4000))
    assert np.median([ask.prompt for ask in asks]) == pytest.approx(220, rel=0.05)
    assert np.median([ask.new for ask in asks]) == pytest.approx(130, rel=0.05)
    assert max(ask.prompt for ask in asks) <= 2000
    assert max(ask.new for ask in asks) <= 600
    assert np.mean([ask.after_s for ask in asks]) == pytest.approx(4 / 40, rel=0.05)
    counts = np.bincount([ask.adapter for ask in asks], minlength=256)
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.5)
    assert asks == list(islice(draws(traffic, 1, 0, 4), 4000))


def test_figures_of_a_case() -> None:
    seen = [Seen(done=[Done(100.0, 10.0, 30.0), Done(700.0, 12.0, 40.0)], tokens=600.0), Seen(tokens=400.0)]
    figures = row(Traffic(clients=2), seen, 2.0, 1.0, 3.0)
    assert (figures.tokens_per_s, figures.requests, figures.good, figures.goodput) == (500.0, 2, 0.5, 0.5)
    assert figures.ttft[0] == 400.0
    assert (figures.server_cores, figures.engine_cores) == (0.5, 1.5)
    assert "C=2, base, 128/128" in line(figures)


def test_cases_are_chosen_by_number() -> None:
    assert cases_of("cuda", (3,), text=True) == [msgspec.structs.replace(CASES[3], text=True)]
    with pytest.raises(CallerError, match="numbers from 0 to 2"):
        cases_of("cpu", (7,), text=False)


@pytest.mark.e2e
def test_a_server_under_closed_loop_and_arrivals(tmp_path: Path) -> None:
    """Every request that ends is counted, from ids and from text, and nothing is left running."""
    model = write_tokenizer(save("llama", tmp_path / "llama"))
    options = HttpOptions(model, "cpu", "float32", warm=0.5, seconds=5.0, rank=2)
    cases = [
        Traffic(clients=4, adapters=3, prompt=6, new=4),
        Traffic(rate=20.0, adapters=3, zipf=1.0, prompt=6, new=4, text=True),
    ]
    said: list[str] = []
    rows = run_traffic(options, cases, said.append)
    assert "3 adapters ready" in said[0]
    for figures in rows:
        assert figures.requests > 0
        assert figures.tokens_per_s > 0
        assert 0 < figures.ttft[0] <= figures.ttft[1]
        assert figures.engine_cores > 0


@pytest.mark.e2e
def test_a_refused_request_ends_the_benchmark(tmp_path: Path) -> None:
    model = write_tokenizer(save("llama", tmp_path / "llama"))
    options = HttpOptions(model, "cpu", "float32", warm=0.1, seconds=10_000, rank=2)
    with pytest.raises(CallerError, match="requests of C=1, base, 9000/4 failed"):
        run_traffic(options, [Traffic(clients=1, prompt=9000, new=4)], lambda line: None)
