"""Tenants' accounts: completed service, what is compared, lifts, limits; malformed limits and debits."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from loraplex.core import limits
from loraplex.core.errors import CallerError, ErrorCode, InternalFault
from loraplex.core.tenants import TenantLimits
from loraplex.schedule.tenant_service import BUCKETS, ServiceWeights, TenantService, rank_bucket

ONE = ServiceWeights(1.0, 1.0, 1.0)


def column(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def served(service: TenantService, tenant: str, outputs: int, bucket: int = 0) -> None:
    """One committed step of a tenant's request."""
    number = list(service.figures()).index(tenant)
    service.debit(column(number), column(bucket), column(0), column(0), column(outputs))


def two(weights: ServiceWeights = ONE) -> TenantService:
    service = TenantService(weights)
    service.arrive("a")
    service.arrive("b")
    return service


def test_each_kind_of_token_counts_at_its_weight_and_by_bucket() -> None:
    service = two(ServiceWeights(computed=1.0, cached=0.125, output=2.0))
    tenants, buckets = service.debit(
        column(0, 1, 0), column(0, 2, 2), column(10, 0, 5), column(0, 16, 8), column(1, 1, 0)
    )
    assert tenants == (("a", 15, 8, 1), ("b", 0, 16, 1))
    assert buckets == (("base", 10, 0, 1), ("<=16", 5, 24, 1))
    assert (service.completed("a"), service.completed("b")) == (15 + 1 + 2, 2 + 2)
    assert service.virtual_service("a") == 18
    assert service.completed("nobody") == 0.0


def test_the_worked_selection() -> None:
    """0x09G: service 3 against 1 at one urgency; the tenant with 1 is first."""
    service = two()
    served(service, "a", 3)
    served(service, "b", 1)
    assert min("ab", key=service.virtual_service) == "b"


def test_service_is_compared_by_weight_and_a_new_weight_counts_from_now_on() -> None:
    service = two()
    service.set_limits([TenantLimits("a", weight=4)])
    served(service, "a", 8)
    served(service, "b", 8)
    assert (service.virtual_service("a"), service.virtual_service("b")) == (2.0, 8.0)
    service.set_limits([])
    served(service, "a", 8)
    assert service.virtual_service("a") == 10.0
    assert service.completed("a") == 16


def test_who_comes_back_is_lifted_to_the_least_of_the_active() -> None:
    service = two()
    served(service, "b", 5)
    service.end_waiting("a")
    service.arrive("c")
    served(service, "c", 90)
    served(service, "b", 50)
    service.arrive("a")
    assert service.virtual_service("a") == 55.0  # b's, the least
    assert service.completed("a") == 0.0  # a lift is no service
    service.end_waiting("c")
    service.arrive("c")
    assert service.virtual_service("c") == 95.0  # who is ahead stays ahead


def test_the_level_outlives_an_idle_engine() -> None:
    """Nobody is there when a tenant comes: it starts where the last one left."""
    service = TenantService(ONE)
    service.arrive("a")
    served(service, "a", 100)
    service.end_waiting("a")
    service.arrive("b")
    assert service.virtual_service("b") == 100.0
    assert service.virtual_service("never seen") == 100.0


def test_a_second_request_lifts_nobody() -> None:
    service = two()
    served(service, "b", 7)
    service.arrive("a")
    assert service.virtual_service("a") == 0.0


def test_limits_count_who_waits_and_who_runs() -> None:
    service = TenantService()
    assert service.may_wait("a")
    assert service.may_run("a")
    service.set_limits([TenantLimits("a", max_running=1, max_waiting=2)])
    service.arrive("a")
    assert service.may_wait("a")
    service.arrive("a")
    assert not service.may_wait("a")
    service.start("a", 7)
    assert service.may_wait("a")
    assert not service.may_run("a")
    assert service.full_since_ns("a") == 7
    service.requeue("a")
    assert service.may_run("a")
    service.set_limits([])
    assert service.may_wait("a")
    service.start("a", 9)
    service.end_running("a")
    service.end_waiting("a")
    service.check({}, {})


def test_accounts_that_do_not_add_up_are_found() -> None:
    service = two()
    for waiting, running in (({"a": 1}, {}), ({"a": 1, "b": 1}, {"b": 1}), ({}, {})):
        with pytest.raises(InternalFault) as caught:
            service.check(waiting, running)
        assert caught.value.code is ErrorCode.SERVICE_LEDGER
    service.check({"a": 1, "b": 1}, {})
    service._by_bucket[0, 0] += 1
    with pytest.raises(InternalFault):
        service.check({"a": 1, "b": 1}, {})


def test_many_tenants_keep_their_accounts() -> None:
    service = TenantService(ONE)
    names = [f"t{number}" for number in range(100)]
    for number, name in enumerate(names):
        assert service.arrive(name) == number
        served(service, name, number + 1)
    assert [service.completed(name) for name in names] == list(range(1, 101))


@pytest.mark.parametrize(
    ("rank", "bucket"), [(0, "base"), (1, "<=8"), (8, "<=8"), (9, "<=16"), (128, "<=128"), (512, ">128")]
)
def test_rank_buckets(rank: int, bucket: str) -> None:
    assert BUCKETS[rank_bucket(rank)] == bucket


# ---------------------------------------------------------------- malformed (0x09N)

GRANT = TenantLimits("a", 2, 3, 4)
WRONG_LIMITS: list[tuple[str, list[TenantLimits]]] = [
    *[("weight", [msgspec.structs.replace(GRANT, weight=bad)])
      for bad in (0, -1, limits.MAX_TENANT_WEIGHT + 1)],
    *[("max_running", [msgspec.structs.replace(GRANT, max_running=bad)])
      for bad in (0, -1, limits.MAX_WAITING_REQUESTS + 1)],
    *[("max_waiting", [msgspec.structs.replace(GRANT, max_waiting=bad)])
      for bad in (0, -1, limits.MAX_WAITING_REQUESTS + 1)],
    ("tenant", [msgspec.structs.replace(GRANT, tenant="")]),
    ("tenant", [GRANT, GRANT]),
    ("tenant", [GRANT, TenantLimits("b"), msgspec.structs.replace(GRANT, weight=3)]),
    ("tenant", [TenantLimits(f"t{number}") for number in range(limits.MAX_TENANTS + 1)]),
]  # fmt: skip


@pytest.mark.parametrize(("param", "given"), WRONG_LIMITS, ids=range(len(WRONG_LIMITS)))
def test_malformed_limits_are_refused_and_change_nothing(param: str, given: list[TenantLimits]) -> None:
    service = TenantService()
    service.set_limits([TenantLimits("a", 7)])
    with pytest.raises(CallerError) as caught:
        service.set_limits(given)
    assert (caught.value.code, caught.value.param) == (ErrorCode.CONFIG_INVALID, param)
    assert service.limits_of("a") == TenantLimits("a", 7)


DEBIT: dict[str, Any] = {
    "tenants": column(0, 1), "buckets": column(0, 1), "computed": column(3, 0), "cached": column(0, 4),
    "outputs": column(1, 1),
}  # fmt: skip
WRONG_DEBITS: list[tuple[str, Any]] = [
    ("tenants", column(0, 2)),
    ("tenants", column(-1, 0)),
    ("tenants", column(0)),
    ("buckets", column(0, len(BUCKETS))),
    ("buckets", column(-1, 0)),
    ("buckets", column(0)),
    *[(name, column(*bad)) for name in ("computed", "cached", "outputs") for bad in ((-1, 0), (0, -9), (1,))],
]


@pytest.mark.parametrize(("name", "bad"), WRONG_DEBITS, ids=range(len(WRONG_DEBITS)))
def test_malformed_debits_are_refused_and_change_nothing(name: str, bad: Any) -> None:
    service = two()
    before = service.figures()
    with pytest.raises(InternalFault) as caught:
        service.debit(**{**DEBIT, name: bad})
    assert caught.value.code is ErrorCode.SERVICE_LEDGER
    assert service.figures() == before
    service.debit(**DEBIT)


@pytest.mark.parametrize("tenant", ["a", "nobody"])
@pytest.mark.parametrize("move", ["start", "requeue", "end_waiting", "end_running"])
def test_a_request_that_was_not_counted_cannot_leave(move: str, tenant: str) -> None:
    service = TenantService()
    service.arrive("a")
    service.end_waiting("a")
    with pytest.raises(InternalFault) as caught:
        getattr(service, move)(tenant, *([0] if move == "start" else []))
    assert caught.value.code is ErrorCode.SERVICE_LEDGER
    service.check({}, {})
