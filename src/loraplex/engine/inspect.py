"""The engine's figures, counted from its state when asked."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from loraplex.engine.holds import describe_request
from loraplex.engine.residency.feasibility import pinned_pages
from loraplex.engine.residency.registration import describe
from loraplex.engine.residency.wants import limits_of
from loraplex.engine.state import EngineState


def inspect_engine(
    state: EngineState, keys: tuple[str, ...] | None = None, requests: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Pages, tenants and the residency of each adapter, or of those with these keys, as plain values; and the
    live ones of these requests.
    """
    counts = state.pool.counts()
    entries = (
        list(state.adapters.values())
        if keys is None
        else [state.adapters[key] for key in dict.fromkeys(keys) if key in state.adapters]
    )
    return {
        "pages": {
            "total": counts.total,
            "free": counts.free,
            "reserved": counts.reserved,
            "adapter": counts.adapter,
            "kv": counts.kv,
            "prefix": counts.prefix,
            "page_bytes": counts.page_bytes,
        },
        "prefix": {
            "blocks": len(state.prefix),
            "bytes": counts.prefix * counts.page_bytes,
            "unreferenced": state.prefix.unreferenced,
            "floor": state.limits.prefix_floor,
            "queried_tokens": state.reuse.queried,
            "reused_tokens": state.reuse.reused,
            "published": state.reuse.published,
            "given_up": dict(state.reuse.given_up),
        },
        "slabs": asdict(state.pool.slabs.counts()),
        "requests": {"running": len(state.by_slot), "waiting": len(state.queue), "live": len(state.records)},
        "asked": [describe_request(state, state.records[name]) for name in requests if name in state.records],
        "tenants": state.service.figures(),
        "steps": {"launched": state.newest_launch, "committed": state.committed_launch},
        "preemptions": state.preemptions,
        "pins": {"adapters": len(state.pinned), "pages": pinned_pages(state)},
        "host": {
            "images": len(state.host),
            "fetching": state.host.fetching,
            "used_bytes": state.host.used_bytes,
            "limit_bytes": state.host.limit_bytes,
            "fetches": state.host.fetches,
            "fetched_bytes": state.host.fetched_bytes,
            "failures": state.host.failures,
            "evictions": state.host.evictions,
        },
        "loads": {
            "under_way": len(state.loads),
            "wanted": len(state.wants),
            "published": state.traffic.loads,
            "copied_pages": state.traffic.copied_pages,
            "copied_bytes": state.traffic.copied_bytes,
            "failures": state.traffic.failures,
            "restorations": state.traffic.restorations,
            "by_purpose": dict(state.traffic.by_purpose),
        },
        "prefetch": asdict(state.speculation),
        "early_abort": None if state.early_abort is None else state.early_abort.figures,
        "adapters": [describe(state, entry) for entry in entries]
        + [describe(state, entry) for entry, _ in state.departing if keys is None],
        "limits": {
            "max_requests": state.limits.max_requests,
            "max_model_len": state.limits.max_model_len,
            "token_budget": state.limits.token_budget,
            "pipeline_depth": state.limits.depth,
            **limits_of(state),
        },
    }
