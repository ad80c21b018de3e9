"""Fixed sizes of one engine. Parsed and checked elsewhere; here they are just numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from loraplex.core import limits
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.layout import KvShape
from loraplex.core.plan_check import PlanBounds
from loraplex.identity.canonical import check_digest
from loraplex.memory.eviction import RANKINGS
from loraplex.schedule.policy import DEFICIT, Policy
from loraplex.schedule.select import MixedBound

UNBOUNDED: Final = MixedBound(1 << 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Sizes that the control plane plans with.

    num_pages: pages of the pool, the null page included. max_model_len: positions of one request.
    token_budget: rows of one iteration. mixed: of them, prefill rows of an iteration that also decodes.
    policy: who is let in first. depth: plans launched ahead of the newest commit, 0 or 1.
    copies_on_compute_stream: adapter copies are ordered with compute, so that a freed page may be overwritten
    at once. scrub: freed pages are filled with 0xFF (tests). vocab_size: ids the model knows. host_bytes:
    host images together, None for no bound. adapter_pages: pages that adapters may take, None for all; both
    change at run time. adapter_floor: pages of adapters that KV pressure leaves alone. ranking: name in
    `memory.eviction.RANKINGS`. copy_bytes_per_s: what bringing a page back is priced at. base_abi: of the
    model, and cache_abi: of its KV rows; digests, needed where prefix_cache is on. prefix_floor: pages of
    cached prefixes that nobody takes while requests run. shared_tenants: those whose cached prefixes are one
    namespace. prefill_tokens_per_s: what computing a cached block again is priced at. load_retry_ns: pause
    after a first failed load. copies_in_flight: copies that the backend is given at a time. copy_starts: of
    them, how many a step with rows starts.
    service_starved_ns, load_starved_ns: how long a tenant, an adapter may starve before an event says so.
    early_abort_ns: a request whose first token cannot come so long after its arrival is refused; 0: none is.
    """

    kv: KvShape
    num_pages: int
    max_requests: int
    max_model_len: int
    token_budget: int
    vocab_size: int
    mixed: MixedBound = UNBOUNDED
    policy: Policy = DEFICIT
    depth: int = 1
    max_adapter_slots: int = 1025
    max_waiting: int = limits.MAX_WAITING_REQUESTS
    growth_horizon: int = limits.GROWTH_HORIZON_TOKENS
    copies_on_compute_stream: bool = False
    host_bytes: int | None = None
    adapter_pages: int | None = None
    adapter_floor: int = 0
    ranking: str = "restore_cost"
    copy_bytes_per_s: int = 4_000_000_000
    base_abi: str = ""
    cache_abi: str = ""
    prefix_cache: bool = False
    prefix_floor: int = 0
    shared_tenants: frozenset[str] = frozenset()
    prefill_tokens_per_s: int = limits.PREFILL_TOKENS_PER_S_CPU
    load_retry_ns: int = limits.LOAD_RETRY_NS
    copies_in_flight: int = limits.MAX_COPIES_IN_FLIGHT
    copy_starts: int = 1
    service_starved_ns: int = limits.SERVICE_STARVED_NS
    load_starved_ns: int = limits.LOAD_STARVED_NS
    early_abort_ns: int = 0
    scrub: bool = False

    def __post_init__(self) -> None:
        if self.depth not in (0, 1):
            raise CallerError(ErrorCode.CONFIG_INVALID, f"pipeline depth must be 0 or 1, got {self.depth}")
        for name in (
            "max_requests",
            "max_model_len",
            "token_budget",
            "vocab_size",
            "max_adapter_slots",
            "copies_in_flight",
            "copy_starts",
            "prefill_tokens_per_s",
        ):
            if getattr(self, name) < 1:
                raise CallerError(
                    ErrorCode.CONFIG_INVALID, f"{name} must be at least 1, got {getattr(self, name)}"
                )
        if self.ranking not in RANKINGS:
            raise CallerError(
                ErrorCode.CONFIG_INVALID,
                f"ranking must be one of {', '.join(RANKINGS)}, got {self.ranking!r}",
            )
        if self.prefix_cache:
            check_digest("base_abi", self.base_abi)
            check_digest("cache_abi", self.cache_abi)
        if self.early_abort_ns < 0:
            raise CallerError(
                ErrorCode.CONFIG_INVALID, f"early_abort_ns must be at least 0, got {self.early_abort_ns}"
            )
        if not 0 <= self.prefix_floor < self.num_pages:
            raise CallerError(
                ErrorCode.CONFIG_INVALID,
                f"prefix_floor must be from 0 to {self.num_pages - 1} pages, got {self.prefix_floor}",
            )
        if self.num_pages < 2:
            raise CallerError(
                ErrorCode.CONFIG_INVALID, f"the pool has {self.num_pages} pages; at least 2 are needed"
            )

    @property
    def max_pages_per_request(self) -> int:
        """Page-table entries of one request."""
        return self.kv.pages_for(self.max_model_len)

    @property
    def bounds(self) -> PlanBounds:
        """What a plan is checked against."""
        return PlanBounds(
            max_requests=self.max_requests,
            max_adapter_slots=self.max_adapter_slots,
            num_pages=self.num_pages,
            max_pages_per_request=self.max_pages_per_request,
            vocab_size=self.vocab_size,
        )
