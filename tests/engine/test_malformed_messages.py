"""Messages, launch snapshots and step results with one wrong field, through the engine's ports.

Each is refused with the code of its invariant; the engine goes on, and a request that was running ends as it
would alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.engine.rig import VOCAB, Rig, sampling
from tests.sections import changed

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.messages import (
    LoadAdapter,
    PinAdapter,
    PrefetchAdapter,
    RegisterAdapter,
    RemoveAdapter,
    RevokeAdapter,
    SetLimits,
    Submit,
)
from loraplex.core.plan import BatchPlan, PageDeltaColumns, StepResult
from loraplex.engine.launch import make_flight, validate_launch
from loraplex.schedule.select import select_rows

DIGEST = "ab" * 32
REGISTER = RegisterAdapter(900, "new", DIGEST, 2, ((4, 2),), (0, 1), 100)
SUBMIT = Submit("new", np.array([1, 2, 3], dtype="<i4").tobytes(), sampling(max_tokens=4), "a")


def words(*tokens: int) -> bytes:
    return np.array(tokens, dtype="<i4").tobytes()


SUBMISSIONS: list[tuple[str, Any, str]] = [
    ("prompt", b"", "empty_prompt"),
    ("prompt", b"\x01", "invalid_request"),
    ("prompt", b"\x01\x00\x00", "invalid_request"),
    ("prompt", words(-1), "token_out_of_range"),
    ("prompt", words(VOCAB), "token_out_of_range"),
    ("prompt", words(1, 2, 1 << 30), "token_out_of_range"),
    ("prompt", words(*[1] * 61), "context_length_exceeded"),
    ("request_id", "running", "duplicate_request"),
    ("adapter", "nobody", "adapter_not_found"),
    ("adapter", "", "adapter_not_found"),
    ("arrival_ns", -1, "invalid_request"),
    ("deadline_ns", -1, "invalid_request"),
    ("deadline_ns", 1, "deadline_exceeded"),
    ("sampling", sampling(max_tokens=0), "plan_malformed"),
    ("sampling", sampling(max_tokens=-4), "plan_malformed"),
    ("sampling", sampling(max_tokens=62), "context_length_exceeded"),
    ("sampling", sampling(sampled_ids=-1), "plan_malformed"),
    ("sampling", sampling(sampled_ids=VOCAB + 1), "plan_malformed"),
    ("sampling", sampling(stop_token_ids=(-1,)), "token_out_of_range"),
    ("sampling", sampling(stop_token_ids=(VOCAB,)), "token_out_of_range"),
    ("sampling", sampling(logit_bias=((VOCAB, 1.0),)), "token_out_of_range"),
    ("sampling", sampling(logit_bias=((-1, 1.0),)), "token_out_of_range"),
]
CALLS: list[tuple[Any, str]] = [
    *[(msgspec.structs.replace(REGISTER, kernel_digest=bad), "identity_invalid")
      for bad in ("", "ab", "AB" * 32, "zz" * 32, "ab" * 33, "../" + "a" * 61)],
    (msgspec.structs.replace(REGISTER, key=""), "identity_invalid"),
    (msgspec.structs.replace(REGISTER, key="a"), "identity_invalid"),
    *[(msgspec.structs.replace(REGISTER, pages=bad), "operator_layout") for bad in (0, -1)],
    (msgspec.structs.replace(REGISTER, pages=33), "adapter_too_large"),
    (msgspec.structs.replace(REGISTER, host_bytes=-1), "operator_layout"),
    *[(msgspec.structs.replace(REGISTER, ranks=bad), "operator_layout") for bad in (((0, 1),), ((-1, 1),),
    ((4, 0),))],
    *[(msgspec.structs.replace(REGISTER, pages=1, size_class=bad), "operator_layout") for bad in (-1, 2, 7)],
    (msgspec.structs.replace(REGISTER, size_class=1), "operator_layout"),
    *[(kind(900, "nobody"), "adapter_not_found")
      for kind in (RemoveAdapter, LoadAdapter, PrefetchAdapter, RevokeAdapter)],
    (PinAdapter(900, "nobody", True), "adapter_not_found"),
    (PinAdapter(900, "a", False), "lease_underflow"),
    *[(SetLimits(900, **{name: bad}), "config_invalid")
      for name, bads in (("adapter_pages", (-1, 33)), ("resident_adapters", (-1, 8)), ("host_bytes", (-1,)))
      for bad in bads],
]  # fmt: skip


def running() -> Rig:
    rig = Rig(depth=1, pages=33, scrub=False)
    rig.register("a")
    rig.run()
    rig.submit("running", [1, 2, 3, 4, 5], "a", max_tokens=20)
    for _ in range(4):
        rig.step()
    return rig


@pytest.mark.parametrize("index", range(len(SUBMISSIONS)), ids=lambda i: f"{SUBMISSIONS[i][0]}-{i}")
def test_a_submission_is_refused(index: int) -> None:
    field, value, code = SUBMISSIONS[index]
    rig = running()
    message = msgspec.structs.replace(SUBMIT, **{field: value})
    rig.mailbox.inbox.append(message)
    rig.run()
    assert code in [end.code for end in rig.mailbox.ended[message.request_id]]
    rig_answers(rig)


@pytest.mark.parametrize("index", range(len(CALLS)), ids=lambda i: f"{type(CALLS[i][0]).__name__}-{i}")
def test_a_call_is_refused(index: int) -> None:
    message, code = CALLS[index]
    rig = running()
    rig.mailbox.inbox.append(message)
    rig.run()
    assert rig.mailbox.replies[900].code == code
    assert set(rig.engine.state.adapters) == {"a"}
    rig_answers(rig)


def rig_answers(rig: Rig) -> None:
    assert rig.mailbox.tokens["running"] == rig.expected("running")
    assert rig.mailbox.ended["running"][-1].finish_reason == "length"


# ---------------------------------------------------------------- launch snapshots

STALE_REQUEST, STALE_SLOT = ErrorCode.STALE_REQUEST_GENERATION, ErrorCode.STALE_SLOT_GENERATION
FRONTIER, PAGES = ErrorCode.STALE_KV_FRONTIER, ErrorCode.PLAN_PAGE_TABLE


@dataclass(frozen=True)
class Snapshot:
    """One wrong column of one planned request, or one wrong cell of a page delta."""

    column: str
    change: int
    code: ErrorCode
    section: str = "requests"


SNAPSHOTS = [
    *[Snapshot("incarnation", by, STALE_REQUEST) for by in (-1, 1, 7)],
    *[Snapshot("adapter_slot", by, STALE_SLOT) for by in (-1, 1)],
    *[Snapshot("adapter_generation", by, STALE_SLOT) for by in (-1, 1, 2)],
    *[Snapshot("kv_start", by, FRONTIER) for by in (-1, 1, 5)],
    *[Snapshot("rows", by, PAGES) for by in (40, 64)],
    *[Snapshot("frontier", by, FRONTIER) for by in (-1, 1)],
    *[Snapshot("page", by, PAGES, "page_deltas") for by in (-1, 1)],
    *[Snapshot("index", by, PAGES, "page_deltas") for by in (1, 2)],
]


def flight(rig: Rig) -> BatchPlan:
    state = rig.engine.state
    for slot in state.by_slot:  # pages that the plan tells of, so that page deltas are there to be wrong
        pages = state.table.own_pages(slot)
        state.deltas.page_table(
            PageDeltaColumns.filled(pages.size, slot=slot, index=np.arange(pages.size), page=pages)
        )
    made = make_flight(state, select_rows(state.table, state.limits.token_budget, state.limits.mixed))
    assert made is not None
    return made.plan


@pytest.mark.parametrize("case", SNAPSHOTS, ids=lambda c: f"{c.section}-{c.column}-{c.change}")
def test_a_launch_snapshot_is_compared_with_its_owners(case: Snapshot) -> None:
    rig = running()
    plan = flight(rig)
    validate_launch(rig.engine.state, plan)
    section = changed(getattr(plan, case.section), 0, **{case.column: lambda value: value + case.change})
    with pytest.raises(InternalFault) as caught:
        validate_launch(rig.engine.state, replace(plan, **{case.section: section}))
    assert caught.value.code is case.code


@pytest.mark.parametrize("gone", ["ended", "preempting", "lease"])
def test_a_launch_needs_its_requests_alive(gone: str) -> None:
    rig = running()
    state = rig.engine.state
    plan = flight(rig)
    (slot,) = state.by_slot
    if gone == "lease":
        state.by_slot[slot].entry.generation += 1  # type: ignore[union-attr]
    elif gone == "ended":
        state.table.active[slot] = False
    else:
        state.table.stopping[slot] = True
    with pytest.raises(InternalFault) as caught:
        validate_launch(state, plan)
    assert caught.value.code is (STALE_SLOT if gone == "lease" else STALE_REQUEST)


# ---------------------------------------------------------------- results

RESULTS: list[tuple[str, Any]] = [
    ("generation", lambda r: r.generation + 1),
    ("generation", lambda r: r.generation - 1),
    ("tokens", lambda r: r.tokens[:-1]),
    ("tokens", lambda r: np.append(r.tokens, r.tokens)),
    ("logprob_indptr", lambda r: r.logprob_indptr[:-1]),
    ("logprob_indptr", lambda r: np.append(r.logprob_indptr, r.logprob_indptr[-1:])),
    ("prompt_logprob_indptr", lambda r: np.zeros(2, dtype=np.int32)),
    ("prompt_logprob_indptr", lambda r: np.zeros(0, dtype=np.int32)),
    ("prompt_logprob_ranks", lambda r: np.zeros(1, dtype=np.int32)),
]


@pytest.mark.parametrize("index", range(len(RESULTS)), ids=lambda i: f"{RESULTS[i][0]}-{i}")
def test_a_result_answers_exactly_its_plan(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    field, change = RESULTS[index]
    rig = running()
    real = rig.device.collect

    def collect() -> bytes:
        result = StepResult.unpack(real())
        return replace(result, **{field: change(result)}).pack()

    monkeypatch.setattr(rig.device, "collect", collect)
    with pytest.raises(InternalFault) as caught:
        rig.engine.step()
    assert caught.value.code is ErrorCode.RESULT_MALFORMED


def test_count(capsys: pytest.CaptureFixture[str]) -> None:
    cases = len(SUBMISSIONS) + len(CALLS) + len(SNAPSHOTS) + 3 + len(RESULTS)
    codes = Counter([code for *_, code in SUBMISSIONS] + [code for _, code in CALLS])
    with capsys.disabled():
        print(f"\nmalformed messages, launches and results: {cases}; messages by code {dict(codes)}")
    assert cases > 70
