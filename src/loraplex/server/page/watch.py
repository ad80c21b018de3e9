"""Who looks at the operator's page, and what they are told: one question to the engine a second at most,
whoever looks, and none while nobody does.

Viewers are bounded. Each takes the picture of the moment when it is ready for one, so that nothing is kept
for a slow one; one that does not read at all is given up as any answer is (`exchange.py`).

Specification: interface "HTTP" (`GET /ui/events`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from loraplex import __version__
from loraplex.core import limits
from loraplex.core.errors import CapacityError, ErrorCode, LoraplexError
from loraplex.core.messages import Inspect
from loraplex.server.answers import event
from loraplex.server.auth import Caller
from loraplex.server.page.journal import Journal
from loraplex.server.page.picture import Moment, Names, Picture, shown_keys, waiting_of
from loraplex.server.service import Service


class Watch:
    """One server's viewers. journal: what they are shown of the past."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.journal = Journal(lambda: service.supervisor.restarts)
        self._viewers: Counter[Caller] = Counter()
        self._making = asyncio.Lock()
        self._moment: Moment | None = None
        self._next_s = 0.0
        self._audience: frozenset[Caller] = frozenset()
        self._names: dict[str, tuple[int, Names]] = {}
        self._frames: dict[tuple[Caller, bool], bytes] = {}
        self._incidents = (0, 0)
        self._called: OrderedDict[str, str] = OrderedDict()

    @contextmanager
    def viewing(self, caller: Caller) -> Iterator[None]:
        """Count a viewer while it looks. Raises `too_many_viewers`.

        Operators have places of their own: who looks for other tenants cannot keep them out.
        """
        same = sum(n for who, n in self._viewers.items() if who.tenant == caller.tenant)
        others = sum(n for who, n in self._viewers.items() if not who.operator)
        if same >= limits.MAX_VIEWERS_OF_TENANT or (not caller.operator and others >= limits.MAX_VIEWERS):
            raise CapacityError(
                ErrorCode.TOO_MANY_VIEWERS,
                f"{same} viewers of tenant {caller.tenant!r} and {others} of all tenants look at the page, "
                f"the limits are {limits.MAX_VIEWERS_OF_TENANT} and {limits.MAX_VIEWERS}; close one",
            )
        self._viewers[caller] += 1
        try:
            yield
        finally:
            self._viewers[caller] -= 1
            self._viewers = +self._viewers

    async def frame(self, caller: Caller, seen: int) -> tuple[int, bytes]:
        """The number and the event of the next picture after `seen`, 0 for none; waits until it is due.

        Whoever has not seen the one before it gets all that is remembered of the past.
        """
        loop = asyncio.get_running_loop()
        while True:
            async with self._making:
                if self._moment is None or loop.time() >= self._next_s:
                    await self._look()
                moment = self._moment
                if moment is not None and moment.number > seen and caller in self._audience:
                    whole = not seen or seen != moment.number - 1
                    return moment.number, self._frame(moment, caller, whole)
            await asyncio.sleep(max(0.0, self._next_s - loop.time()))

    async def _look(self) -> None:
        """Make the next moment: ask the engine once, for everything that anybody is shown."""
        service, loop = self._service, asyncio.get_running_loop()
        callers = frozenset(self._viewers)
        names = {caller: self._names_of(caller.tenant) for caller in callers}
        keys = [key for caller in callers for key in shown_keys(self.journal, names[caller], caller)]
        self._remember([known for caller, known in names.items() if caller.operator], keys)
        asked = [waiting_of(self.journal, caller)[: limits.PAGE_ASKED] for caller in callers]
        requests = dict.fromkeys(name for waiting in asked for name, _ in waiting)
        question = Inspect(0, tuple(dict.fromkeys(keys)), tuple(requests))
        figures: dict[str, Any] | None = None
        if service.ready:
            try:
                async with asyncio.timeout(limits.PAGE_INSPECT_S):
                    figures = await service.client.call(question)
            except (TimeoutError, LoraplexError):
                figures = None  # the page says that the engine does not answer
        number = 1 if self._moment is None else self._moment.number + 1
        self._moment = Moment(number, service.clock.now_ns(), time.time_ns() // 1_000_000, figures)
        self._incidents = (self._incidents[1], self.journal.newest())
        self._audience, self._frames = callers, {}
        tenants = {caller.tenant for caller in callers}
        self._names = {tenant: known for tenant, known in self._names.items() if tenant in tenants}
        self._next_s = loop.time() + limits.PAGE_EVERY_S

    def _remember(self, names: Iterable[Names], keys: Sequence[str]) -> None:
        """What the operator calls the adapters that are shown: a superseded revision has no name and still
        serves.
        """
        for listed in (known.of[key] for known in names for key in keys if key in known.of):
            self._called[listed[0][1].key] = listed[0][1].name
            self._called.move_to_end(listed[0][1].key)
        while len(self._called) > limits.PAGE_ADAPTERS_REMEMBERED:
            self._called.popitem(last=False)

    def _names_of(self, tenant: str) -> Names:
        """What a tenant may list, looked up again once the catalog changed."""
        generation = self._service.adapters.generation
        known = self._names.get(tenant)
        if known is None or known[0] != generation:
            known = self._names[tenant] = (generation, Names.seen_by(self._service.adapters, tenant))
        return known[1]

    def _frame(self, moment: Moment, caller: Caller, whole: bool) -> bytes:
        """The event of a moment as one sort of viewer may see it; made once for all of that sort."""
        if (caller, whole) not in self._frames:
            service = self._service
            picture = Picture(
                moment, self.journal, service.adapters, self._names_of(caller.tenant), caller, self._called
            )
            values = picture.values(None if whole else self._incidents[0])
            values["server"] = {
                "base": service.base_name,
                "version": __version__,
                "phase": service.phase.value,
                "ready": service.ready,
                "answers": moment.figures is not None,
                "dtype": service.engine_info.get("dtype"),
                "max_model_len": service.engine_info.get("max_model_len"),
            }
            self._frames[caller, whole] = event(values)
        return self._frames[caller, whole]
