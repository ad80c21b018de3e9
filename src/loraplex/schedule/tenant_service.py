"""Completed service of tenants: who got how much, who may run, who may wait.

Service moves at commits alone: a computed prompt token, a cached one and an output token each once, at stated
weights. What is recomputed after a preemption, what a plan computed for a request that had ended, and what
failed is none. The same work by rank bucket of the adapter is a projection of its own and no tenant's
fairness: an adapter has many tenants, a tenant many adapters.

Virtual service is what policies compare: it grows by completed service over the tenant's weight, and a tenant
that had no request is lifted to the least of those who have some when it comes back, so that nobody saves up.
Owns no order and selects nobody.

Specification: 0x09C (W over weight), 0x09H (completed service, projections), 0x09K; rulings "Scheduling".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.packed import I32
from loraplex.core.tenants import TenantLimits, check_tenants

I64 = npt.NDArray[np.int64]
BUCKET_RANKS: Final = (0, 8, 16, 32, 64, 128)
"""Largest rank of each bucket but the last; the first is the base's."""
BUCKETS: Final = ("base", *(f"<={rank}" for rank in BUCKET_RANKS[1:]), f">{BUCKET_RANKS[-1]}")


def rank_bucket(rank: int) -> int:
    """Index into `BUCKETS` of an adapter's largest rank; 0 is the base."""
    return sum(rank > most for most in BUCKET_RANKS)


@dataclass(frozen=True, slots=True)
class ServiceWeights:
    """What a token counts: of a prompt, computed or cached, and of an output.

    An output token takes about as long as two computed prompt tokens where many requests run. A cached one
    costs no row, but its page is held and read.
    """

    computed: float = 1.0
    cached: float = 0.125
    output: float = 2.0


Row = tuple[str, int, int, int]


@dataclass(slots=True)
class _Account:
    """One tenant's requests: those that wait and those that run or load. full_since_ns: when as many ran as
    may.
    """

    limits: TenantLimits
    waiting: int = 0
    running: int = 0
    full_since_ns: int = 0


class TenantService:
    """Accounts of all tenants that ever sent a request; there are as many as the key file names.

    A tenant is named by a string at intake and by its number, given once, in arrays.
    """

    def __init__(self, weights: ServiceWeights = ServiceWeights()) -> None:
        self._weights = np.array([weights.computed, weights.cached, weights.output])
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._accounts: list[_Account] = []
        self._limits: dict[str, TenantLimits] = {}
        self._tokens = np.zeros((0, 3), dtype=np.int64)
        self._virtual = np.zeros(0)
        self._shares = np.ones(0)
        self._active = np.zeros(0, dtype=np.bool_)
        self._by_bucket = np.zeros((len(BUCKETS), 3), dtype=np.int64)
        self._level = 0.0

    # ------------------------------------------------------------ limits

    def set_limits(self, tenants: Sequence[TenantLimits]) -> None:
        """Weights and limits in place of all before. Raises `config_invalid`, and then changes nothing.

        A new weight counts for service from now on.
        """
        check_tenants(tenants)
        self._limits = {given.tenant: given for given in tenants}
        for tenant, number in self._numbers.items():
            account = self._accounts[number]
            account.limits = self._limits.get(tenant, TenantLimits(tenant))
            self._shares[number] = account.limits.weight

    def limits_of(self, tenant: str) -> TenantLimits:
        """Weight and limits of a tenant."""
        return self._limits.get(tenant, TenantLimits(tenant))

    def may_wait(self, tenant: str) -> bool:
        """Whether one more request of the tenant may wait."""
        number = self._numbers.get(tenant)
        most = self.limits_of(tenant).max_waiting
        return most is None or number is None or self._accounts[number].waiting < most

    def may_run(self, tenant: str) -> bool:
        """Whether one more request of the tenant may run, or load its adapter."""
        number = self._numbers.get(tenant)
        most = self.limits_of(tenant).max_running
        return most is None or number is None or self._accounts[number].running < most

    def full_since_ns(self, tenant: str) -> int:
        """Since when as many requests of the tenant run as may, where `may_run` is false."""
        return self._accounts[self._numbers[tenant]].full_since_ns

    # ------------------------------------------------------------ requests

    def arrive(self, tenant: str) -> int:
        """A request was accepted and waits; the tenant's number. One that had none is lifted."""
        number = self._numbers.get(tenant)
        if number is None:
            number = self._open(tenant)
        if not self._active[number]:
            self._virtual[number] = max(self._virtual[number], self._floor())
            self._active[number] = True
        self._accounts[number].waiting += 1
        return number

    def start(self, tenant: str, now_ns: int) -> None:
        """A waiting request takes a place among those that run."""
        account = self._move(tenant, -1, 1)
        if account.running == account.limits.max_running:
            account.full_since_ns = now_ns

    def requeue(self, tenant: str) -> None:
        """A running request waits again: it was preempted, or its load failed."""
        self._move(tenant, 1, -1)

    def end_waiting(self, tenant: str) -> None:
        """A waiting request ended."""
        self._move(tenant, -1, 0)

    def end_running(self, tenant: str) -> None:
        """A running request ended and gave its place back."""
        self._move(tenant, 0, -1)

    def _open(self, tenant: str) -> int:
        number = self._numbers[tenant] = len(self._accounts)
        self._names.append(tenant)
        limits = self.limits_of(tenant)
        self._accounts.append(_Account(limits))
        if number == self._virtual.size:
            more = max(number, 8)
            self._tokens = np.concatenate([self._tokens, np.zeros((more, 3), dtype=np.int64)])
            self._virtual = np.concatenate([self._virtual, np.zeros(more)])
            self._shares = np.concatenate([self._shares, np.ones(more)])
            self._active = np.concatenate([self._active, np.zeros(more, dtype=np.bool_)])
        self._shares[number] = limits.weight
        return number

    def _floor(self) -> float:
        """The least virtual service of those who have requests, or of the last who had some."""
        if self._active.any():
            self._level = max(self._level, float(self._virtual[self._active].min()))
        return self._level

    def _move(self, tenant: str, waiting: int, running: int) -> _Account:
        number = self._numbers.get(tenant, -1)
        account = self._accounts[number] if number >= 0 else _Account(TenantLimits(tenant))
        if account.waiting + waiting < 0 or account.running + running < 0:
            raise InternalFault(
                ErrorCode.SERVICE_LEDGER,
                f"a request of tenant {tenant[:80]!r} left, of which {account.waiting} wait and "
                f"{account.running} run",
            )
        account.waiting += waiting
        account.running += running
        if account.waiting + account.running == 0:
            self._floor()  # the last tenant to leave takes its level along: whoever comes next starts there
            self._active[number] = False
        return account

    # ------------------------------------------------------------ service

    def virtual_service(self, tenant: str) -> float:
        """Service over weight, lifted: what a policy compares; less runs first. A tenant that never asked
        starts at the floor.
        """
        number = self._numbers.get(tenant)
        return self._floor() if number is None else float(self._virtual[number])

    def debit(
        self, tenants: I32, buckets: I32, computed: I32, cached: I32, outputs: I32
    ) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
        """Completed work of a commit, request by request; who got what, by tenant and by rank bucket.

        All [N]: tenants by number, buckets into `BUCKETS`, tokens >= 0. Raises `service_ledger`.
        """
        tokens = self._checked(tenants, buckets, computed, cached, outputs)
        by_tenant = _sums(tenants, tokens, len(self._accounts))
        by_bucket = _sums(buckets, tokens, len(BUCKETS))
        count = len(self._accounts)
        self._tokens[:count] += by_tenant
        self._by_bucket += by_bucket
        self._virtual[:count] += by_tenant @ self._weights / self._shares[:count]
        return _rows(by_tenant, self._names), _rows(by_bucket, BUCKETS)

    def _checked(self, tenants: I32, buckets: I32, *tokens: I32) -> I64:
        """The token counts as [N, 3]."""
        if any(column.shape != tenants.shape for column in (buckets, *tokens)):
            raise InternalFault(
                ErrorCode.SERVICE_LEDGER, "a debit names tenants, buckets and tokens unevenly"
            )
        counts = np.stack(tokens, axis=1).astype(np.int64)
        for name, column, most in (
            ("tenant", tenants, len(self._accounts)),
            ("bucket", buckets, len(BUCKETS)),
        ):
            if column.size and not (int(column.min()) >= 0 and int(column.max()) < most):
                raise InternalFault(
                    ErrorCode.SERVICE_LEDGER, f"a debit names a {name} outside the {most} that there are"
                )
        if counts.size and int(counts.min()) < 0:
            raise InternalFault(ErrorCode.SERVICE_LEDGER, f"a debit takes {-int(counts.min())} tokens back")
        return counts

    def completed(self, tenant: str) -> float:
        """W of 0x09H: weighted tokens that were completed for the tenant, never lifted."""
        number = self._numbers.get(tenant)
        return 0.0 if number is None else float(self._tokens[number] @ self._weights)

    def figures(self) -> dict[str, dict[str, float | int | None]]:
        """Each tenant's account, by name."""
        return {
            tenant: {
                "weight": account.limits.weight,
                "max_running": account.limits.max_running,
                "max_waiting": account.limits.max_waiting,
                "running": account.running,
                "waiting": account.waiting,
                "computed_tokens": int(self._tokens[number, 0]),
                "cached_tokens": int(self._tokens[number, 1]),
                "output_tokens": int(self._tokens[number, 2]),
                "service": self.completed(tenant),
                "virtual_service": self.virtual_service(tenant),
            }
            for (tenant, number), account in zip(self._numbers.items(), self._accounts, strict=True)
        }

    def check(self, waiting: dict[str, int], running: dict[str, int]) -> None:
        """Raise `service_ledger` unless accounts and projection add up. waiting, running: requests
        by tenant.
        """
        for tenant, number in self._numbers.items():
            account = self._accounts[number]
            if (account.waiting, account.running) != (waiting.get(tenant, 0), running.get(tenant, 0)):
                raise InternalFault(
                    ErrorCode.SERVICE_LEDGER,
                    f"tenant {tenant[:80]!r} has {waiting.get(tenant, 0)} requests that wait and "
                    f"{running.get(tenant, 0)} that run, {account.waiting} and {account.running} are counted",
                )
        if (self._tokens.sum(axis=0) != self._by_bucket.sum(axis=0)).any():
            raise InternalFault(
                ErrorCode.SERVICE_LEDGER, "tenants and rank buckets do not amount to the same work"
            )


def _sums(groups: I32, tokens: I64, count: int) -> I64:
    """Tokens [N, 3] summed by group -> [count, 3]."""
    width = tokens.shape[1]
    cells = (groups[:, None] * width + np.arange(width)).reshape(-1)
    return np.bincount(cells, tokens.reshape(-1), count * width).reshape(count, width).astype(np.int64)


def _rows(sums: I64, names: Sequence[str]) -> tuple[Row, ...]:
    touched = np.flatnonzero(sums.any(axis=1))
    counts = sums[touched].tolist()
    return tuple(
        (names[index], computed, cached, outputs)
        for index, (computed, cached, outputs) in zip(touched.tolist(), counts, strict=True)
    )
