"""`LLM` from several threads: what they ask runs together, each gets its own answers, and a closed one
refuses all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.judge import NAMES, check_greedy, open_llm
from tests.prompts import prompt
from tests.waiting import LIMIT_S

from loraplex import LLM, SamplingParams
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.events import Event, IterationCompleted, RequestQueued

pytestmark = pytest.mark.e2e
GREEDY = SamplingParams(max_tokens=16, temperature=0.0)


class Sink:
    """Calls `seen` with each event."""

    def __init__(self, seen: Callable[[Event], object]) -> None:
        self.seen = seen

    def emit(self, event: Event) -> None:
        self.seen(event)


def test_threads_share_batches_and_get_their_own_answers(root: Path) -> None:
    threads, together, queued = len(NAMES), [0], threading.Barrier(len(NAMES))

    def seen(event: Event) -> None:
        if isinstance(event, IterationCompleted):
            together[0] = max(together[0], event.requests)

    with open_llm(root, events=Sink(seen)) as llm, ThreadPoolExecutor(threads) as pool:

        def ask(index: int) -> list[Any]:
            queued.wait(LIMIT_S)
            return [llm.generate([prompt(4 + index, round_)], NAMES[index], GREEDY)[0] for round_ in range(6)]

        for name, outputs in zip(NAMES, pool.map(ask, range(threads)), strict=True):
            for output in outputs:
                check_greedy(output, name, 16)
        assert together[0] > 1
        assert llm.inspect()["requests"]["live"] == 0


def test_a_refused_call_does_not_disturb_another_threads(root: Path) -> None:
    queued = threading.Event()
    seen = Sink(lambda event: queued.set() if isinstance(event, RequestQueued) else None)
    with open_llm(root, ["plain"], events=seen) as llm, ThreadPoolExecutor(1) as pool:
        running = pool.submit(llm.generate, [prompt(5, 1)], "plain", GREEDY)
        assert queued.wait(LIMIT_S)
        with pytest.raises(CallerError) as raised:
            llm.generate([[1], []], sampling=GREEDY)
        assert raised.value.code is ErrorCode.EMPTY_PROMPT
        check_greedy(running.result()[0], "plain", 16)


def test_closing_ends_what_waits_in_other_threads(root: Path) -> None:
    begun = threading.Event()
    seen = Sink(lambda event: begun.set() if isinstance(event, IterationCompleted) else None)
    llm = open_llm(root, [], events=seen)
    longer = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: [llm.generate([[1, 2]], None, longer) for _ in range(1000)])
        assert begun.wait(LIMIT_S)
        llm.close()
        with pytest.raises(CallerError) as raised:
            running.result()
    assert raised.value.code is ErrorCode.INVALID_REQUEST
    assert "closed" in raised.value.message


@pytest.mark.parametrize("use", [LLM.close, LLM.inspect])
def test_an_event_sink_that_uses_its_own_llm_is_refused(root: Path, use: Callable[[LLM], object]) -> None:
    refused: list[ErrorCode] = []

    def seen(event: Event) -> None:
        try:
            use(llm)
        except CallerError as error:
            refused.append(error.code)

    sink = Sink(lambda event: None)
    with open_llm(root, [], events=sink) as llm:
        sink.seen = seen
        check_greedy(llm.generate([[1, 2]], None, GREEDY)[0], None, 16)
        sink.seen = lambda event: None
    assert set(refused) == {ErrorCode.INVALID_REQUEST}
