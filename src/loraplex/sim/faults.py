"""Which faults a seed switches on, and when they strike: swarm testing.

Each seed draws a machine (pool, depth, stream order, load) and a subset of fault kinds, because faults hide
each other when all of them are always on. `Injector` decides each occurrence and counts it; when it is
stopped, nothing strikes any more and the liveness phase can ask that everything finishes.

Specification: 0x05H, 0x07I, 0x07K, 0x09L (what fails); rulings "Tests" (seeded swarm faults).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from typing import Final

from loraplex.core.layout import KvShape
from loraplex.engine.sizes import EngineLimits
from loraplex.identity.canonical import digest
from loraplex.schedule.policy import POLICIES, Policy
from loraplex.schedule.select import MixedBound
from loraplex.sim.device import CopyFate, Costs, Faults

VOCAB: Final = 499
BASE: Final = digest("base")
CACHE: Final = digest("cache")
"""Base and cache ABI of the simulated replica."""


class Fault(StrEnum):
    """Kinds of faults."""

    FAILED_COPY = "failed_copy"
    SLOW_COPY = "slow_copy"
    SLOW_FETCH = "slow_fetch"
    TORN_COPY = "torn_copy"
    DIGEST_MISMATCH = "digest_mismatch"
    LOST_HOST_SOURCE = "lost_host_source"
    LATE_KV_WRITE = "late_kv_write"
    CANCELLED_CLIENT = "cancelled_client"
    DUPLICATE_COMPLETION = "duplicate_completion"
    LATE_EVENT = "late_event"
    SWAP_STORM = "swap_storm"
    POOL_EXHAUSTION = "pool_exhaustion"
    REPLICA_RESTART = "replica_restart"
    FAILED_STEP = "failed_step"
    STALE_PLAN = "stale_plan"
    NOT_FINITE = "not_finite"
    MALFORMED_MESSAGE = "malformed_message"


COPY_FATES: Final = {
    Fault.FAILED_COPY: CopyFate.FAILED,
    Fault.TORN_COPY: CopyFate.TORN,
    Fault.DIGEST_MISMATCH: CopyFate.CORRUPT,
    Fault.LOST_HOST_SOURCE: CopyFate.LOST,
}


class Operation(StrEnum):
    """What an operator may do beside swaps."""

    PIN = "pin"
    PREFETCH = "prefetch"
    LOAD = "load"
    LIMITS = "limits"
    REVOKE = "revoke"


RATES: Final[dict[Fault, float]] = {
    Fault.FAILED_COPY: 0.1,
    Fault.SLOW_COPY: 0.2,
    Fault.SLOW_FETCH: 0.2,
    Fault.TORN_COPY: 0.1,
    Fault.DIGEST_MISMATCH: 0.1,
    Fault.LOST_HOST_SOURCE: 0.1,
    Fault.LATE_KV_WRITE: 0.1,
    Fault.CANCELLED_CLIENT: 0.02,
    Fault.DUPLICATE_COMPLETION: 0.2,
    Fault.LATE_EVENT: 0.3,
    Fault.SWAP_STORM: 0.004,
    Fault.POOL_EXHAUSTION: 0.004,
    Fault.REPLICA_RESTART: 0.0007,
    Fault.FAILED_STEP: 0.003,
    Fault.STALE_PLAN: 0.01,
    Fault.NOT_FINITE: 0.003,
    Fault.MALFORMED_MESSAGE: 0.01,
}
"""Chance of each kind where it is switched on: of a copy, a plan, a finished copy or a tick, whichever it
strikes.
"""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a seed draws. aliases: adapters by name. small_share: those that take a block of a slab page.
    arrivals: requests a tick. cap: live requests at most. tenants: who asks. alike: requests whose prompt
    begins as others' do, or goes on where one ended. activated: adapters that act from an invocation on.
    bounded: requests that bound what their answers are made of.
    zipf: exponent of the popularity of names, 0 for a square. urgent: requests with a priority or a deadline.
    """

    seed: int
    limits: EngineLimits
    costs: Costs
    aliases: int
    adapter_pages: int
    base_share: float
    arrivals: float
    cap: int
    swaps: float
    prompt_tokens: int
    output_tokens: int
    fetch_ns: int
    operations: frozenset[Operation]
    faults: frozenset[Fault]
    small_share: float = 0.0
    tenants: int = 1
    alike: float = 0.0
    activated: float = 0.0
    zipf: float = 0.0
    urgent: float = 0.0
    bounded: float = 0.0

    def record(self) -> dict[str, object]:
        """The setup as plain values."""
        limits = self.limits
        return {
            "depth": limits.depth,
            "pages": limits.num_pages - 1,
            "page_tokens": limits.kv.page_tokens,
            "max_requests": limits.max_requests,
            "token_budget": limits.token_budget,
            "growth_horizon": limits.growth_horizon,
            "copy_stream": not limits.copies_on_compute_stream,
            "scrub": limits.scrub,
            "aliases": self.aliases,
            "small_share": self.small_share,
            "prefix_cache": limits.prefix_cache,
            "prefix_floor": limits.prefix_floor,
            "tenants": self.tenants,
            "alike": self.alike,
            "activated": self.activated,
            "policy": limits.policy.name,
            "urgent": self.urgent,
            "bounded": self.bounded,
            "early_abort_ns": limits.early_abort_ns,
            "arrivals_per_tick": self.arrivals,
            "ranking": limits.ranking,
            "operations": sorted(kind.value for kind in self.operations),
            "faults": sorted(kind.value for kind in self.faults),
        }


def draw_setup(
    seed: int,
    *,
    depth: int | None = None,
    faults: frozenset[Fault] | None = None,
    cached: bool | None = None,
) -> Setup:
    """The machine, load and fault kinds of a seed. depth, faults: instead of drawn ones.

    cached: whether prefixes are; without it there are no tenants, no prompts alike, no activated adapters and
    nothing urgent either, and who comes first is served first. Where it is given, no answer is bounded: such
    timelines are older than that.
    """
    rng = Random(f"{seed}/setup")
    page_tokens = rng.choice([1, 2, 4, 8])
    adapter_pages = rng.randint(1, 5)
    prompt_tokens, output_tokens = rng.choice([(6, 6), (12, 10), (24, 16)])
    max_model_len = 64
    alone = -(-(prompt_tokens + output_tokens) // page_tokens) + adapter_pages + 1
    pages = alone + rng.randint(2, 3 * alone)
    drawn_depth = rng.randint(0, 1)
    copy_stream = rng.random() < 0.5
    kinds = frozenset(kind for kind in Fault if rng.random() < 0.5)
    kv = KvShape(8, 1, 1, 4, page_tokens)  # 64 bytes a token, so that a token's part of a page can be a block
    limits = EngineLimits(
        kv=kv,
        num_pages=pages + 1,
        max_requests=rng.randint(2, 8),
        max_model_len=max_model_len,
        token_budget=rng.choice([1, 3, 8, 16, 32]),
        mixed=MixedBound(1 + seed % 7, seed % 3),
        vocab_size=VOCAB,
        depth=drawn_depth if depth is None else depth,
        max_adapter_slots=rng.choice([3, 5, 16]),
        growth_horizon=rng.choice([0, 2, 8]),
        copies_on_compute_stream=not copy_stream,
        scrub=rng.random() < 0.6,
        load_retry_ns=300_000,
        ranking=rng.choice(["restore_cost", "lru"]),
        adapter_floor=rng.choice([0, 0, adapter_pages]),
        host_bytes=rng.choice([None, 3 * adapter_pages * kv.page_bytes]),
    )
    prefix = Random(f"{seed}/prefix")
    on = prefix.random() < 0.8 if cached is None else cached
    if on:
        limits = _with_prefixes(limits, prefix)
    early = Random(f"{seed}/early").choice([0, 0, 0, 50_000_000]) if faults is None else 0
    limits = replace(limits, policy=_drawn_policy(seed, on), early_abort_ns=early)
    step_ns = 100_000
    costs = Costs(step_ns, 2_000, rng.choice([0, 20_000, 300_000]), rng.choice([1_000, 50_000, 400_000]))
    return Setup(
        seed=seed,
        limits=limits,
        costs=costs,
        aliases=rng.randint(1, 10),
        adapter_pages=adapter_pages,
        base_share=rng.choice([0.0, 0.2, 0.8]),
        arrivals=rng.choice([0.05, 0.15, 0.4]),
        cap=rng.choice([4, 12, 30]),
        swaps=rng.choice([0.0, 0.005, 0.03]),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        fetch_ns=rng.choice([0, 100_000, 2_000_000]),
        operations=frozenset(kind for kind in Operation if rng.random() < 0.4),
        faults=kinds if faults is None else faults,
        small_share=Random(f"{seed}/small").choice([0.0, 0.3, 0.6, 0.95]) if page_tokens > 1 else 0.0,
        tenants=prefix.choice([1, 3]) if on else 1,
        alike=prefix.choice([0.3, 0.8, 0.95]) if on else 0.0,
        activated=prefix.choice([0.0, 0.4]) if on else 0.0,
        urgent=Random(f"{seed}/urgency").choice([0.0, 0.3]) if on else 0.0,
        bounded=Random(f"{seed}/bounded").choice([0.0, 0.2, 0.6]) if cached is None else 0.0,
    )


def _with_prefixes(limits: EngineLimits, rng: Random) -> EngineLimits:
    """Prefixes are cached."""
    shared = frozenset(rng.choice([(), ("t0", "t1")]))
    floor = rng.choice([0, 0, (limits.num_pages - 1) // 3])
    return replace(
        limits,
        prefix_cache=True,
        base_abi=BASE,
        cache_abi=CACHE,
        prefix_floor=floor,
        shared_tenants=shared,
        prefill_tokens_per_s=rng.choice([1_000, 1_000_000]),
    )


def _drawn_policy(seed: int, on: bool) -> Policy:
    """A policy, with the bound that it states or a short one."""
    rng = Random(f"{seed}/policy")
    policy = rng.choice(list(POLICIES.values())) if on else POLICIES["fcfs"]
    return replace(policy, bound=rng.choice([policy.bound, 8]))


class Injector:
    """Decides each fault of one simulation from its own random stream, and counts what struck."""

    def __init__(self, setup: Setup) -> None:
        self._rng = Random(f"{setup.seed}/faults")
        self._on = setup.faults
        self.counts: Counter[Fault] = Counter()
        self.stopped = False
        self.struck_images: set[int] = set()

    def strikes(self, kind: Fault) -> bool:
        """Whether a fault of this kind happens here; counted when it does."""
        if self.stopped or kind not in self._on or self._rng.random() >= RATES[kind]:
            return False
        self.counts[kind] += 1
        return True

    def pick(self, count: int) -> int:
        """A number below `count`, from the faults' own stream."""
        return self._rng.randrange(count)

    def device_faults(self) -> Faults:
        """The device's view of this injector."""
        return Faults(fate=self._fate, report=self._report, slower=self._slower)

    def _fate(self, image: int) -> tuple[CopyFate, int]:
        slower = 30 if self.strikes(Fault.SLOW_COPY) else 1
        for kind, fate in COPY_FATES.items():
            if self.strikes(kind):
                self.struck_images.add(image)
                return fate, slower
        return CopyFate.INTACT, slower

    def _report(self) -> tuple[int, int]:
        later = 1 + self._rng.randrange(12) if self.strikes(Fault.LATE_EVENT) else 0
        return later, 2 if self.strikes(Fault.DUPLICATE_COMPLETION) else 1

    def _slower(self) -> int:
        return 20 if self.strikes(Fault.LATE_KV_WRITE) else 1
