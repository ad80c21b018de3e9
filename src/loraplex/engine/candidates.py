"""What a policy sees of waiting requests, counted from the engine's state when they come up.

Specification: 0x09C.
"""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.engine.request_state import RequestRecord
from loraplex.engine.state import EngineState
from loraplex.schedule.cost import Cost
from loraplex.schedule.policy import Candidate, Policy, ordered
from loraplex.schedule.queue import Ticket
from loraplex.schedule.tenant_service import rank_bucket


def in_order(state: EngineState, tickets: Sequence[Ticket]) -> list[RequestRecord]:
    """The requests of `tickets` in the order in which the policy tries them."""
    records = [state.records[ticket.request_id] for ticket in tickets]
    if len(records) < 2:
        return records
    now = state.clock.now_ns()
    policy = state.limits.policy
    candidates = [_candidate(state, policy, record) for record in records]
    return [state.records[candidate.request_id] for candidate in ordered(policy, candidates, now)]


def _candidate(state: EngineState, policy: Policy, record: RequestRecord) -> Candidate:
    ticket, entry = record.ticket, record.entry
    ranks = entry.ranks if entry is not None and policy.buckets else ()
    return Candidate(
        record.request_id,
        record.tenant,
        ticket.urgency,
        int(state.service.virtual_service(record.tenant)),
        record.arrival_ns,
        ticket.order,
        cost_of(state, record),
        rank_bucket(max(rank for rank, _ in ranks)) if ranks else 0,
        record.owed,
    )


def cost_of(state: EngineState, record: RequestRecord) -> Cost:
    """What a waiting request would cost now. No basis is shared and no shard exchanges anything here, and
    rows run at their true rank.
    """
    entry, tokens = record.entry, int(record.tokens.size)
    kv_pages = state.limits.kv.pages_for(tokens)
    if entry is None:
        return Cost(kv_pages=kv_pages)
    cold = not entry.resident
    rank_rows = entry.rank_sum * tokens
    return Cost(
        load_bytes=state.image_bytes(entry) if cold else 0,
        runs=int(not entry.refcount),
        true_rank_rows=rank_rows,
        padded_rank_rows=rank_rows,
        adapter_pages=entry.own_pages if cold else 0,
        kv_pages=kv_pages,
    )
