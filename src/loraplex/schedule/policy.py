"""Who is preferred among those who may run: a lexicographic key, and what bounds it.

The key of 0x09C, lower first: urgency; whose turn it is; completed service of the tenant in quanta; age in
classes, the older first; cost in quanta; arrival. Service and age are compared in quanta and classes so that
cost decides inside one and never across. Every policy is that key with parts left out, over a window of
candidates, and states how often a request may be overtaken. A policy orders legal work and repairs nothing:
whether a candidate may run is `predicates`' to say, and no clock is read here.

Specification: 0x09C, 0x09G, 0x09M; rulings "Scheduling".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from loraplex.core.errors import CallerError, ErrorCode
from loraplex.schedule.cost import FREE, Cost, in_quanta

AGE_UNIT_NS: Final = 100_000_000
SERVICE_QUANTUM: Final = 1024
WHOLE: Final = 1 << 62
"""A quantum that only tells nothing from something."""


class Candidate(NamedTuple):
    """A waiting request as a policy sees it.

    urgency: see `queue.Ticket`. service: completed service of its tenant by weight. cost: beside what runs
    now. bucket: of its adapter's largest rank. owed: it was overtaken as often as the policy
    allows.
    """

    request_id: str
    tenant: str
    urgency: int
    service: int
    arrival_ns: int
    order: int
    cost: Cost = FREE
    bucket: int = 0
    owed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A key and its bounds.

    bound: a request that this many later ones of its tenant and urgency were let in before, or that was
    passed over in this many steps for lack of pages, comes first and holds back everybody behind it. window:
    candidates among which cost may change the order of arrival. service_quantum: weighted tokens in which
    tenants' service is compared, 0 for not at all. age_unit_ns: of the first age class, 0 for none. quanta:
    of each part of the cost, 0 for a part that is not compared. buckets: those of the first one's rank bucket
    go first.
    """

    name: str
    bound: int
    window: int
    service_quantum: int = SERVICE_QUANTUM
    age_unit_ns: int = AGE_UNIT_NS
    quanta: Cost = FREE
    buckets: bool = False

    def __post_init__(self) -> None:
        for name, low in (("bound", 1), ("window", 1), ("service_quantum", 0), ("age_unit_ns", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < low:
                raise CallerError(
                    ErrorCode.CONFIG_INVALID,
                    f"{name} of policy {self.name!r} is {value!r}, not {low} or more",
                )
        if any(type(part) is not int or part < 0 for part in self.quanta):
            raise CallerError(
                ErrorCode.CONFIG_INVALID, f"quanta of policy {self.name!r} are {self.quanta}, not counts"
            )

    def service_class(self, service: int | float) -> int:
        """Completed service of a tenant, by weight, in whole quanta; 0 where tenants are not compared."""
        return int(service // self.service_quantum) if self.service_quantum else 0

    def age_class(self, age_ns: int) -> int:
        """0 below one unit, then one more for each doubling: 1 from one unit on, 2 from two, 3 from four."""
        return max(age_ns // self.age_unit_ns, 0).bit_length() if self.age_unit_ns else 0


def ordered(policy: Policy, candidates: Sequence[Candidate], now_ns: int) -> list[Candidate]:
    """`candidates` in the order in which they are tried; the same for any order in which they come."""
    if len(candidates) < 2 or (policy.window == 1 and not policy.service_quantum and not policy.age_unit_ns):
        return sorted(candidates, key=_by_arrival)
    lead = min(candidates, key=_by_arrival).bucket if policy.buckets else None

    def key(candidate: Candidate) -> tuple[object, ...]:
        return (
            candidate.urgency,
            not candidate.owed,
            policy.service_class(candidate.service),
            -policy.age_class(now_ns - candidate.arrival_ns),
            lead is not None and candidate.bucket != lead,
            in_quanta(candidate.cost, policy.quanta),
            candidate.order,
            candidate.request_id,
        )

    return sorted(candidates, key=key)


def _by_arrival(candidate: Candidate) -> tuple[int, bool, int]:
    return (candidate.urgency, not candidate.owed, candidate.order)


COLD: Final = Cost(load_bytes=WHOLE, basis_bytes=WHOLE)
DEFICIT: Final = Policy(name="deficit", bound=256, window=16, quanta=COLD)
POLICIES: Final = {
    policy.name: policy
    for policy in (
        DEFICIT,
        Policy(name="fcfs", bound=256, window=1, service_quantum=0, age_unit_ns=0),
        Policy(name="resident-greedy", bound=1024, window=64, service_quantum=0, age_unit_ns=0, quanta=COLD),
        Policy(name="clustered", bound=64, window=32, age_unit_ns=0, quanta=COLD._replace(runs=1)),
        Policy(name="rank-bucketed", bound=64, window=32, age_unit_ns=0, buckets=True),
    )
}
"""By name, the default first. What each protects: `deficit` by service, age classes and the bound; `fcfs` by
arrival and loads that block nobody; `resident-greedy` by the bound alone; `clustered` and `rank-bucketed` by
service, their windows and the bound.
"""
