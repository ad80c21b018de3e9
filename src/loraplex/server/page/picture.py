"""What one viewer of the operator's page sees at one moment, as plain values.

A tenant sees its own requests, its own figures, the adapters that it may list, and the totals that everybody
shares; the operator sees everything. Asks nobody: figures and names are given.

Specification: interface "HTTP" (`GET /ui/events`); rulings "Tenants".
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from loraplex.adapters.manager import AdapterService
from loraplex.catalog.records import Revision
from loraplex.core import limits
from loraplex.memory.residency import BINDABLE, AdapterState
from loraplex.server.auth import Caller
from loraplex.server.page.journal import Burst, Journal, Live, Second

_POOL: Final = ("total", "free", "reserved", "adapter", "kv", "prefix", "page_bytes")
_LIMITS: Final = ("adapter_pages", "resident_adapters", "host_bytes", "max_requests")
_ON_THE_WAY: Final = (AdapterState.RESERVED, AdapterState.LOADING, AdapterState.VALIDATED)
_LATEST: Final = 3
"""Seconds that every picture repeats: events come a little late."""


@dataclass(frozen=True, slots=True)
class Names:
    """What a tenant may list. of: (its name, revision) by semantic digest. recent: the newest publications
    first.
    """

    of: Mapping[str, Sequence[tuple[str, Revision]]]
    recent: Sequence[tuple[str, Revision]]

    @classmethod
    def seen_by(cls, adapters: AdapterService, tenant: str) -> Names:
        """Those of a tenant now."""
        of: dict[str, list[tuple[str, Revision]]] = {}
        visible = adapters.visible(tenant)
        for name, revision in visible:
            of.setdefault(revision.key, []).append((name, revision))
        newest = sorted(visible, key=lambda item: item[1].at_ms, reverse=True)
        return cls(of, newest[: limits.PAGE_INCIDENTS])


@dataclass(frozen=True, slots=True)
class Moment:
    """What a picture is made from. now_ns: of the engine's clock. at_ms: since 1970. figures: the engine's
    reply to `Inspect`, None while there is none.
    """

    number: int
    now_ns: int
    at_ms: int
    figures: Mapping[str, Any] | None


def shown_keys(journal: Journal, names: Names, caller: Caller) -> list[str]:
    """The adapters that a viewer is shown, a bounded number: on the device or on the way, then the most
    recently used, then by name.
    """

    def candidates() -> Iterator[str]:
        yield from (key for key, state in journal.states.items() if state in BINDABLE or state in _ON_THE_WAY)
        yield from reversed(journal.use)
        yield from names.of

    known = (
        key
        for key in candidates()
        if key in names.of or (caller.operator and key in journal.states)  # others are gone
    )
    return list(islice(dict.fromkeys(islice(known, 4 * limits.PAGE_ROWS)), limits.PAGE_ROWS))


def waiting_of(journal: Journal, caller: Caller) -> list[tuple[str, Live]]:
    """Requests that wait and that a viewer may see, the longest first."""
    waiting = [
        (name, live)
        for name, live in journal.live.items()
        if not live.running and (caller.operator or live.tenant == caller.tenant)
    ]
    return sorted(waiting, key=lambda item: item[1].since_ns)


class Picture:
    """One viewer's view of one moment. caller: who looks. whole: with all that happened lately, or only what
    is new since the number `since` of incidents.
    """

    def __init__(
        self,
        moment: Moment,
        journal: Journal,
        adapters: AdapterService,
        names: Names,
        caller: Caller,
        called: Mapping[str, str],
    ) -> None:
        """called: what adapters that no name stands for any more were called, by semantic digest."""
        self._called = called
        self._moment, self._journal, self._adapters = moment, journal, adapters
        self._names, self._caller = names, caller
        self._tenant = None if caller.operator else caller.tenant
        self._figures: Mapping[str, Any] = moment.figures or {}
        self._live = [
            (name, live) for name, live in journal.live.items() if self._tenant in (None, live.tenant)
        ]

    def values(self, since: int | None) -> dict[str, Any]:
        """The whole picture. since: only incidents after this number and the last seconds; None for all that
        is remembered.
        """
        keys = shown_keys(self._journal, self._names, self._caller)
        entries = {entry["key"]: entry for entry in self._figures.get("adapters", ())}
        rows = [self._row(key, entries.get(key)) for key in keys]
        return {
            "number": self._moment.number,
            "whole": since is None,
            "at_ms": self._moment.at_ms,
            "now_s": self._moment.now_ns // 1_000_000_000,
            "viewer": {
                "tenant": self._caller.tenant,
                "role": self._caller.role.value,
                "operator": self._caller.operator,
            },
            "pool": self._pool(rows),
            "host": self._host(),
            "limits": {
                name: value for name, value in self._figures.get("limits", {}).items() if name in _LIMITS
            },
            "requests": Counter("running" if live.running else "waiting" for _, live in self._live),
            "queue": self._queue(),
            "adapters": {"rows": rows, "total": self._total(), "states": self._states()},
            "tenants": self._tenants(),
            "incidents": self._incidents(since),
            "publications": self._publications(),
            "seconds": self._seconds(since is None),
        }

    # Memory

    def _pool(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Pages by state, and of those that adapters hold the largest owners among the rows."""
        pages = self._figures.get("pages", {})
        owners = sorted((row for row in rows if row["pages"]), key=lambda row: -row["pages"])
        return {name: pages.get(name, 0) for name in _POOL} | {
            "owners": [
                {"name": row["name"], "pages": row["pages"], "state": row["state"]}
                for row in owners[: limits.PAGE_OWNERS]
            ]
        }

    def _host(self) -> dict[str, int] | None:
        host = self._figures.get("host")
        if host is None or self._tenant is not None:
            return None
        return {"used_bytes": host["used_bytes"], "limit_bytes": host["limit_bytes"]}

    # Adapters

    def _row(self, key: str, entry: Mapping[str, Any] | None) -> dict[str, Any]:
        listed = self._names.of.get(key, ())
        if entry is not None and self._tenant is not None:
            entry = self._adapters.seen_by(self._tenant, entry, [revision for _, revision in listed])
        entry = entry or {}
        use = self._journal.use.get(key)
        name, revision = listed[0] if listed else (self._label(key), None)
        own = [name for name, revision in listed if revision.namespace == self._caller.tenant]
        seen = use is not None and self._tenant is None
        return {
            "name": own[0] if own else name,
            "names": len(listed),
            "own": bool(own),
            "revision": None if revision is None else revision.revision,
            "method": None if revision is None else revision.artifact.method,
            "digest": key[:16],
            "state": entry.get("state", "unknown"),
            "pages": entry.get("device_pages", 0),
            "device_bytes": entry.get("device_bytes", 0),
            "host_bytes": entry.get("host_bytes", 0) if entry.get("on_host") else 0,
            "leases": entry.get("leases", 0),
            "pinned": entry.get("pinned", False),
            "failures": entry.get("failures", 0),
            "hits": use.hits if seen and use else 0,
            "misses": use.misses if seen and use else 0,
        }

    def _total(self) -> int:
        keys = self._names.of.keys()
        return len(keys | self._journal.states.keys()) if self._tenant is None else len(keys)

    def _states(self) -> dict[str, int] | None:
        """How many adapters are in each state, for the operator."""
        return dict(Counter(self._journal.states.values())) if self._tenant is None else None

    # Requests and tenants

    def _queue(self) -> dict[str, Any]:
        """Who waits, why, and the longest first."""
        waiting = waiting_of(self._journal, self._caller)
        asked = {sample["request_id"]: sample["reason"] for sample in self._figures.get("asked", ())}
        reasons = {name: asked.get(name) or self._reason(live) for name, live in waiting}
        return {
            "reasons": dict(Counter(reasons.values())),
            "oldest": [
                {
                    "id": name,
                    "tenant": live.tenant,
                    "adapter": None if live.adapter is None else self._label(live.adapter),
                    "prompt_tokens": live.prompt_tokens,
                    "age_s": round(max(0, self._moment.now_ns - live.since_ns) / 1e9, 3),
                    "reason": reasons[name],
                }
                for name, live in waiting[: limits.PAGE_WAITING]
            ],
        }

    def _reason(self, live: Live) -> str:
        """What a request waits for that the engine was not asked about, or has admitted by now: its adapter,
        or else its turn.
        """
        state = None if live.adapter is None else self._journal.states.get(live.adapter, AdapterState.ABSENT)
        if state is None or state in BINDABLE:
            return "turn"
        if state in _ON_THE_WAY:
            return "adapter_loading"
        return "adapter_absent" if state == AdapterState.ABSENT else "adapter_cold"

    def _tenants(self) -> list[dict[str, Any]]:
        under_way = Counter((live.tenant, live.running) for _, live in self._live)
        shares = self._figures.get("tenants", {})
        known = dict.fromkeys([*(tenant for tenant, _ in under_way), *reversed(self._journal.served)])
        rows = []
        for tenant in islice((t for t in known if self._tenant in (None, t)), limits.PAGE_TENANTS):
            served = self._journal.served.get(tenant)
            rows.append(
                {
                    "tenant": tenant,
                    "running": under_way[tenant, True],
                    "waiting": under_way[tenant, False],
                    "ended": served.ended if served else 0,
                    "failed": served.failed if served else 0,
                    "computed_tokens": served.computed_tokens if served else 0,
                    "cached_tokens": served.cached_tokens if served else 0,
                    "output_tokens": served.output_tokens if served else 0,
                    "weight": shares.get(tenant, {}).get("weight"),
                    "service": shares.get(tenant, {}).get("service"),
                }
            )
        return rows

    # Lately

    def _incidents(self, since: int | None) -> list[dict[str, Any]]:
        """What went wrong or was taken away; a tenant's: of its requests, and of adapters of its own."""
        return [
            {
                "id": incident.first,
                "age_s": round((self._moment.now_ns - incident.at_ns) / 1e9, 1),
                "level": incident.level.value,
                "kind": incident.kind,
                "text": incident.text,
                "tenant": incident.tenant,
                "adapter": None if incident.adapter is None else self._label(incident.adapter),
                "count": incident.count,
            }
            for incident in self._journal.incidents
            if (since is None or incident.number > since)
            and self._concerned(incident.adapter, incident.tenant)
        ]

    def _concerned(self, adapter: str | None, tenant: str | None) -> bool:
        if self._tenant is None:
            return True
        if tenant is not None or adapter is None:
            return tenant == self._tenant
        return any(revision.namespace == self._tenant for _, revision in self._names.of.get(adapter, ()))

    def _publications(self) -> list[dict[str, Any]]:
        """Aliases that were published or swapped within what the timeline shows."""
        return [
            {
                "name": name,
                "revision": revision.revision,
                "age_s": round((self._moment.at_ms - revision.at_ms) / 1e3, 1),
            }
            for name, revision in self._names.recent
            if self._moment.at_ms - revision.at_ms <= limits.PAGE_TIMELINE_S * 1e3
        ]

    def _seconds(self, whole: bool) -> list[dict[str, Any]]:
        """Past seconds that are over, in order; seconds in which nothing happened are left out."""
        now_s = self._moment.now_ns // 1_000_000_000
        first = now_s - (limits.PAGE_SECONDS if whole else _LATEST)
        return [self._point(second) for second in self._journal.seconds if first <= second.at_s < now_s]

    def _point(self, second: Second) -> dict[str, Any]:
        burst = second.bursts.get(self._tenant, Burst())
        times = sorted(burst.first_ms)
        point = {
            "s": second.at_s,
            "tokens": burst.tokens,
            "ended": burst.ended,
            "failed": burst.failed,
            "first_ms": round(statistics.median(times), 2) if times else None,
            "first_p95_ms": round(times[min(len(times) - 1, len(times) * 95 // 100)], 2) if times else None,
        }
        if self._tenant is None and second.steps:
            point |= {
                "step_ms": round(second.step_ns / second.steps / 1e6, 3),
                "running": second.running,
                "waiting": second.waiting,
            }
        return point

    def _label(self, key: str) -> str:
        """An adapter's name for the viewer, or the beginning of its digest; the operator is told also what
        it was called.
        """
        listed = self._names.of.get(key, ())
        if listed:
            return listed[0][0]
        return self._called.get(key, key[:12]) if self._tenant is None else key[:12]
