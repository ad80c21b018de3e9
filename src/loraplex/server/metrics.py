"""Prometheus metrics of a server. Labels are from fixed sets: never an alias, a tenant or anything that a
caller chose.

Owns what the server counts itself, the figures that it asks the engine for, and the registry; what events say
is counted in `telemetry/engine_metrics.py`.

Specification: rulings "Promise".
"""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from loraplex.core.errors import CODES, ErrorCode, LoraplexError, Root
from loraplex.memory.residency import AdapterState
from loraplex.telemetry.engine_metrics import EngineMetrics

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
TTFT_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ROOTS: Final = {Root.CALLER: "refused", Root.CAPACITY: "capacity", Root.OURS: "fault"}


def outcome_of(error: LoraplexError) -> str:
    """The outcome label of a request that ended with an error."""
    if error.code in (ErrorCode.ABORTED, ErrorCode.SLOW_CLIENT):
        return "aborted"
    return _ROOTS[CODES[error.code].root]


class Metrics:
    """The registry of one server and its instruments."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "loraplex_requests",
            "Generation requests by how they ended.",
            ["endpoint", "outcome"],
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "loraplex_prompt_tokens", "Prompt tokens of ended requests.", registry=registry
        )
        self.output_tokens = Counter("loraplex_output_tokens", "Tokens generated.", registry=registry)
        self.ttft = Histogram(
            "loraplex_time_to_first_token_seconds",
            "From arrival to the first token.",
            registry=registry,
            buckets=TTFT_BUCKETS_S,
        )
        self.duration = Histogram(
            "loraplex_request_seconds", "From arrival to the end.", registry=registry, buckets=TTFT_BUCKETS_S
        )
        self.engine = EngineMetrics(registry)
        self._ready = Gauge("loraplex_ready", "Whether requests are taken.", registry=registry)
        self._engine_requests = Gauge(
            "loraplex_engine_requests", "Requests in the engine.", ["state"], registry=registry
        )
        self._pages = Gauge("loraplex_pages", "Pages of the pool by state.", ["state"], registry=registry)
        self._page_bytes = Gauge("loraplex_page_bytes", "Size of a page.", registry=registry)
        self._slabs = Gauge(
            "loraplex_slab_bytes", "Bytes of slab pages by state.", ["state"], registry=registry
        )
        self._adapters = Gauge("loraplex_adapters", "Adapters by residency.", ["state"], registry=registry)
        self._steps = Gauge("loraplex_engine_steps", "Steps committed by the engine.", registry=registry)
        self._host = Gauge(
            "loraplex_host_image_bytes_held", "Adapter images in host memory.", ["what"], registry=registry
        )
        self._loads = Gauge("loraplex_loads", "Adapter loads.", ["what"], registry=registry)
        self._pins = Gauge("loraplex_pinned_adapters", "Adapters with a pin.", registry=registry)
        self._preemptions = Gauge("loraplex_preemptions", "Preemptions by the engine.", registry=registry)

    def render(self, ready: bool, figures: Mapping[str, Any] | None) -> bytes:
        """The exposition. figures: the engine's reply to `Inspect`; None while there is no engine."""
        self._ready.set(ready)
        if figures is not None:
            for state in ("running", "waiting"):
                self._engine_requests.labels(state).set(figures["requests"][state])
            for state in ("free", "reserved", "adapter", "kv", "prefix"):
                self._pages.labels(state).set(figures["pages"][state])
            self._page_bytes.set(figures["pages"]["page_bytes"])
            for state in ("free", "reserved", "owned", "tail"):
                self._slabs.labels(state).set(figures["slabs"][f"{state}_bytes"])
            self._steps.set(figures["steps"]["committed"])
            self._preemptions.set(figures["preemptions"])
            for what in ("used", "limit"):
                self._host.labels(what).set(figures["host"][f"{what}_bytes"])
            for what in ("under_way", "wanted"):
                self._loads.labels(what).set(figures["loads"][what])
            self._pins.set(figures["pins"]["adapters"])
            states = Count(entry["state"] for entry in figures["adapters"])
            for known in AdapterState:
                self._adapters.labels(known.value).set(states[known.value])
        return generate_latest(self.registry)
