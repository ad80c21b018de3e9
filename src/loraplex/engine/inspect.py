"""The engine's figures, counted from its state when asked."""

from __future__ import annotations

from typing import Any

from loraplex.engine.residency import describe
from loraplex.engine.state import EngineState


def inspect_engine(state: EngineState) -> dict[str, Any]:
    """Pages, requests and the residency of each adapter, as plain values."""
    counts = state.pool.counts()
    return {
        "pages": {
            "total": counts.total,
            "free": counts.free,
            "reserved": counts.reserved,
            "adapter": counts.adapter,
            "kv": counts.kv,
            "page_bytes": counts.page_bytes,
        },
        "requests": {"running": len(state.by_slot), "waiting": len(state.queue), "live": len(state.records)},
        "steps": {"launched": state.launched, "committed": state.committed},
        "preemptions": state.preemptions,
        "adapters": [describe(entry) for entry in state.adapters.values()]
        + [describe(entry) for entry, _ in state.departing],
        "limits": {
            "max_requests": state.limits.max_requests,
            "max_model_len": state.limits.max_model_len,
            "token_budget": state.limits.token_budget,
            "pipeline_depth": state.limits.depth,
        },
    }
