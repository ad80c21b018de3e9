"""Pins, prefetch, draining swaps, revocation and limits through `LLM`, over the real runner and the loader
process.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.judge import CONFIGS, check_greedy, open_llm
from tests.prompts import prompt
from tests.waiting import LIMIT_S

from loraplex import LLM, SamplingParams
from loraplex.api import llm as api
from loraplex.core.errors import CallerError, CapacityError, ErrorCode
from loraplex.core.events import Event, RequestAdmitted
from loraplex.core.messages import EngineCall, PinAdapter

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("device")]

TOKENS = prompt(9, 1)
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


def state_of(llm: LLM, alias: str) -> str:
    return str(next(entry["state"] for entry in llm.adapters() if entry["alias"] == alias))


@pytest.mark.parametrize("loader", ["inline", "process"])
def test_limits_push_adapters_down_the_tiers_and_requests_bring_them_back(root: Path, loader: str) -> None:
    with open_llm(root, loader=loader, host_gb=0.25) as llm:
        before = llm.set_limits()
        llm.set_limits(pool_share=0.0, host_gb=0.0)
        assert {state_of(llm, name) for name in CONFIGS} == {"absent"}
        figures = llm.inspect()
        assert (figures["pages"]["adapter"], figures["host"]["used_bytes"]) == (0, 0)
        with pytest.raises(CapacityError) as refused:
            llm.generate([TOKENS], "plain", GREEDY)
        assert refused.value.code is ErrorCode.POOL_EXHAUSTED
        llm.set_limits(pool_share=1.0, host_gb=0.25)
        assert llm.set_limits()["adapter_pages"] == before["adapter_pages"]
        for name in CONFIGS:
            [output] = llm.generate([TOKENS], name, GREEDY)
            check_greedy(output, name, 6)
        assert llm.inspect()["host"]["fetches"] >= 2 * len(CONFIGS)


def test_a_pin_follows_its_alias_through_a_swap(root: Path) -> None:
    with open_llm(root, ["plain", "rslora"]) as llm:
        assert llm.pin_adapter("plain")["pinned"]
        llm.set_limits(resident_adapters=1)
        assert state_of(llm, "plain") in ("published", "idle")
        assert state_of(llm, "rslora") == "host_ready"
        with pytest.raises(CapacityError) as refused:
            llm.pin_adapter("rslora")
        assert refused.value.code is ErrorCode.ADAPTER_SLOTS_EXHAUSTED
        llm.set_limits(resident_adapters=3)
        assert llm.swap_adapter("plain", root / "patterns")["pinned"]
        assert llm.inspect()["pins"]["adapters"] == 1
        assert not llm.unpin_adapter("plain")["pinned"]
        llm.pin_adapter("plain")
        llm.remove_adapter("plain")
        assert llm.inspect()["pins"]["adapters"] == 0


class Admissions:
    """An event sink that knows when so many requests run."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._all = threading.Event()

    def emit(self, event: Event) -> None:
        self._left -= isinstance(event, RequestAdmitted)
        if self._left <= 0:
            self._all.set()

    def wait(self) -> None:
        assert self._all.wait(LIMIT_S)


@pytest.mark.parametrize("loader", ["inline", "process"])
def test_a_swap_under_load_fails_no_request(root: Path, loader: str) -> None:
    """Requests under way finish on the revision that they began with, later ones run on the new one."""
    longer = SamplingParams(max_tokens=24, temperature=0.0)
    begun = Admissions(4)
    with open_llm(root, ["plain", "rslora"], loader=loader, events=begun) as llm:
        names = ["plain", "rslora", None, "plain"]
        with ThreadPoolExecutor(1) as thread:
            asked = [prompt(5 + i, i) for i in range(4)]
            first = thread.submit(llm.generate, asked, names, longer)
            begun.wait()
            assert llm.swap_adapter("plain", root / "patterns")["revision"] == 2
            after = llm.generate([prompt(7 + i, 9 + i) for i in range(2)], "plain", longer)
            before = first.result()
        assert [output.adapter for output in after] == ["plain@2"] * 2
        for name, output in zip([*names, "patterns", "patterns"], [*before, *after], strict=True):
            check_greedy(output, name, 24)


def test_a_swap_without_room_drains_when_asked(root: Path) -> None:
    with open_llm(root, ["plain"]) as llm:
        pages = next(entry for entry in llm.inspect()["adapters"])["page_count"]
        total = llm.inspect()["pages"]["total"]
        llm.pin_adapter("plain")
        llm.set_limits(pool_share=(pages + 0.5) / total)
        with pytest.raises(CapacityError) as refused:
            llm.swap_adapter("plain", root / "patterns")
        assert refused.value.code is ErrorCode.POOL_EXHAUSTED
        assert [entry["key"] for entry in llm.inspect()["adapters"]] == [llm.adapters()[0]["semantic_digest"]]
        llm.set_limits(pool_share=1.0)
        assert llm.swap_adapter("plain", root / "patterns", drain=True)["revision"] == 2
        [output] = llm.generate([TOKENS], "plain", GREEDY)
        check_greedy(output, "patterns", 6)


def test_a_pin_that_cannot_follow_leaves_the_swap_made(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_llm(root, ["plain"]) as llm:
        llm.pin_adapter("plain")
        call = llm.call

        async def refusing(message: EngineCall) -> dict[str, Any]:
            if isinstance(message, PinAdapter) and message.pinned:
                raise CapacityError(ErrorCode.POOL_EXHAUSTED, "no room")
            return await call(message)

        monkeypatch.setattr(llm, "call", refusing)
        assert llm.swap_adapter("plain", root / "patterns", drain=True)["revision"] == 2
        assert [entry["key"] for entry in llm.inspect()["adapters"]] == [llm.adapters()[0]["semantic_digest"]]
        [output] = llm.generate([TOKENS], "plain", GREEDY)
        check_greedy(output, "patterns", 6)


def test_prefetch_and_revocation(root: Path) -> None:
    with open_llm(root, ["plain", "rslora"]) as llm:
        llm.set_limits(pool_share=0.0)
        llm.set_limits(pool_share=1.0)
        assert llm.prefetch_adapter("plain")["state"] == "published"
        llm.add_adapter("other", root / "plain")
        llm.revoke_adapter("plain")
        assert [entry["alias"] for entry in llm.adapters()] == ["rslora"]
        with pytest.raises(CallerError) as refused:
            llm.add_adapter("again", root / "plain")
        assert refused.value.code is ErrorCode.ADAPTER_REVOKED
        [output] = llm.generate([TOKENS], "rslora", GREEDY)
        check_greedy(output, "rslora", 6)


def test_a_model_whose_start_fails_late_is_closed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    build = api.build_engine

    def building(*args: Any) -> Any:
        built = build(*args)
        close = built.close
        monkeypatch.setattr(built, "close", lambda: (closed.append("engine"), close()), raising=True)
        return built

    def failing() -> None:
        raise CapacityError(ErrorCode.CATALOG_UNAVAILABLE, "no")

    monkeypatch.setattr(api, "build_engine", building)
    monkeypatch.setattr(api, "AdapterCatalog", failing)
    with pytest.raises(CapacityError):
        open_llm(root, ["plain"])
    assert closed == ["engine"]
