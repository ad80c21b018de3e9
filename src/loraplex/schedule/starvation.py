"""Two kinds of starvation, each with its clock: a tenant that could run and completes nothing, an adapter
that is waited for and never published.

A tenant can run while a live request of it has its adapter, or needs none; its clock starts with the first of
them and again with each completion. An adapter is waited for while a live request leased it and it is not
there; its clock ends with its publication. A cold request is no starved tenant: which of the two speaks says
whether loading or selection is at fault.

Owns clocks and counts, oldest first, so that a look costs the same however many wait. Changes nothing and
decides nothing.

Specification: 0x09H (both predicates), 0x09A (separate clocks).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from loraplex.core.events import LoadStarved, TenantStarved

K = TypeVar("K")


class _Clocks(Generic[K]):
    """When each started, oldest first: a clock that is started again goes to the end."""

    def __init__(self, limit_ns: int) -> None:
        self._limit_ns = limit_ns
        self._armed: dict[K, int] = {}
        self.since: dict[K, int] = {}

    def start(self, key: K, now_ns: int) -> None:
        self.stop(key)
        self.since[key] = self._armed[key] = now_ns

    def stop(self, key: K) -> None:
        self.since.pop(key, None)
        self._armed.pop(key, None)

    def due(self, now_ns: int) -> list[K]:
        """Those that ran for the limit since they started or were last told of."""
        found: list[K] = []
        for key, armed in self._armed.items():
            if now_ns - armed < self._limit_ns:
                break
            found.append(key)
        for key in found:
            del self._armed[key]
            self._armed[key] = now_ns
        return found


@dataclass(slots=True)
class _Awaited:
    """One adapter with live requests: its name, how many each tenant has, whether it is there."""

    key: str
    tenants: Counter[str] = field(default_factory=Counter)
    there: bool = False


class StarvationWatch:
    """Clocks over all live requests. An adapter is told by a number of its caller's, for as long as a live
    request leased it: two with one name may be there at once.
    """

    def __init__(self, service_ns: int, load_ns: int) -> None:
        """How long each kind may last before it is told, and before it is told again."""
        self._tenants: _Clocks[str] = _Clocks(service_ns)
        self._loads: _Clocks[int] = _Clocks(load_ns)
        self._able: Counter[str] = Counter()
        self._adapters: dict[int, _Awaited] = {}

    def opened(
        self, tenant: str, now_ns: int, adapter: int = 0, key: str = "", *, there: bool = True
    ) -> None:
        """A live request more. adapter: 0 for the base. there: whether rows may bind the adapter."""
        if adapter:
            awaited = self._adapters.setdefault(adapter, _Awaited(key, there=there))
            awaited.tenants[tenant] += 1
            if not awaited.there:
                if adapter not in self._loads.since:
                    self._loads.start(adapter, now_ns)
                return
        self._count(tenant, 1, now_ns)

    def closed(self, tenant: str, now_ns: int, adapter: int = 0) -> None:
        """A live request less."""
        if adapter:
            awaited = self._adapters[adapter]
            awaited.tenants[tenant] -= 1
            if not awaited.tenants[tenant]:
                del awaited.tenants[tenant]
            if not awaited.tenants:
                del self._adapters[adapter]
                self._loads.stop(adapter)
            if not awaited.there:
                return
        self._count(tenant, -1, now_ns)

    def moved(self, adapter: int, now_ns: int, *, there: bool) -> None:
        """An adapter was published, or left the device."""
        awaited = self._adapters.get(adapter)
        if awaited is None or awaited.there == there:
            return
        awaited.there = there
        for tenant, count in awaited.tenants.items():
            self._count(tenant, count if there else -count, now_ns)
        if there:
            self._loads.stop(adapter)
        else:
            self._loads.start(adapter, now_ns)

    def completed(self, tenants: list[str], now_ns: int) -> None:
        """Work of these tenants was committed."""
        for tenant in tenants:
            if self._able[tenant]:
                self._tenants.start(tenant, now_ns)

    def waits_since(self, adapter: int) -> int | None:
        """Since when an adapter is waited for; None where it is not."""
        return self._loads.since.get(adapter)

    def due(self, now_ns: int) -> list[TenantStarved | LoadStarved]:
        """Whoever starves for as long as may be, once each time that it lasts that long."""
        found: list[TenantStarved | LoadStarved] = [
            TenantStarved(now_ns, tenant, now_ns - self._tenants.since[tenant], self._able[tenant])
            for tenant in self._tenants.due(now_ns)
        ]
        for adapter in self._loads.due(now_ns):
            awaited = self._adapters[adapter]
            waited = now_ns - self._loads.since[adapter]
            found.append(LoadStarved(now_ns, awaited.key, waited, awaited.tenants.total()))
        return found

    def _count(self, tenant: str, more: int, now_ns: int) -> None:
        before = self._able[tenant]
        after = before + more
        if after:
            self._able[tenant] = after
            if not before:
                self._tenants.start(tenant, now_ns)
        else:
            del self._able[tenant]
            self._tenants.stop(tenant)
