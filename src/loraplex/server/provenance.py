"""What answered a request, remembered: records made when a request ends, written in batches, found by request
id.

Nothing waits for a record: a request's end puts it into a queue, a task writes the queue in one transaction.
While the database does not answer, records wait up to a limit and are then counted as lost. A request of a
second attempt with the id of an earlier one is told from it by its attempt.

Specification: 0x01G "Bindings of request, cache and slot"; rulings "Identity".
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec

from loraplex.catalog.requests import ChoiceRecord, ProvenanceRecord, RequestLog
from loraplex.core import limits
from loraplex.core.errors import CallerError, ErrorCode, LoraplexError
from loraplex.core.ids import (
    CacheGeneration,
    CatalogGeneration,
    PlanGeneration,
    PointerTableGeneration,
    RequestAttempt,
    RngGeneration,
    SlotGeneration,
)
from loraplex.core.messages import EngineSampling, TokenBinding
from loraplex.identity.binding import RequestBinding, SlotBinding
from loraplex.identity.canonical import digest
from loraplex.identity.execution import History
from loraplex.identity.generations import GenerationVector, encode
from loraplex.process.tasks import reported

_log: Final = logging.getLogger(__name__)
BATCH: Final = 512
WRITE_EVERY_S: Final = 0.2
PRUNE_EVERY: Final = 4096
"""Records between two looks at what is too old."""
T = TypeVar("T")
OffLoop = Callable[[Callable[[], Any]], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Served:
    """What a request was bound to when its name was resolved. kernel: None until the engine has the
    adapter.
    """

    model: str
    base: str
    namespace: str | None = None
    artifact: str | None = None
    semantic: str | None = None
    kernel: str | None = None
    catalog_generation: int = 0


@dataclass(slots=True)
class ChoiceSeen:
    """What became of one sample. history: under which executions its KV rows were made."""

    sampling: EngineSampling
    output_tokens: int = 0
    finish_reason: str | None = None
    binding: TokenBinding | None = None
    history: History = ()


@dataclass(frozen=True, slots=True)
class RanOn:
    """Which engine computed a request, and under what its KV rows could be found again.

    epoch: which engine of this server, counted from 0. cache_abi: digest. namespace: of the prefix cache.
    """

    epoch: int
    device: str
    cache_abi: str
    graph_revision: int
    namespace: str


class Attempts:
    """Counts how often a (tenant, request id) was seen lately by this server."""

    def __init__(self, size: int = limits.MAX_UNWRITTEN_RECORDS) -> None:
        self._size = size
        self._seen: OrderedDict[tuple[str, str], int] = OrderedDict()

    def next(self, tenant: str, request_id: str) -> int:
        """The attempt that begins now: 0 for an id that was not seen."""
        key = (tenant, request_id)
        attempt = self._seen.pop(key, -1) + 1
        self._seen[key] = attempt
        if len(self._seen) > self._size:
            self._seen.popitem(last=False)
        return attempt


def request_record(
    request_id: str,
    tenant: str,
    attempt: int,
    served: Served,
    choices: list[ChoiceSeen],
    outcome: str,
    prompt_tokens: int,
    ran: RanOn,
) -> ProvenanceRecord:
    """The record of a request that ended now."""
    policy = digest({"choices": [_plain(choice.sampling) for choice in choices]})
    binding = RequestBinding(
        namespace=tenant,
        request_id=request_id,
        attempt=attempt,
        lineage=request_id,
        base=served.base,
        semantic=served.semantic,
        policy=policy,
    )
    return ProvenanceRecord(
        request_id=request_id,
        tenant=tenant,
        attempt=attempt,
        at_ms=time.time_ns() // 1_000_000,
        model=served.model,
        namespace=served.namespace,
        base=served.base,
        artifact=served.artifact,
        semantic=served.semantic,
        kernel=served.kernel,
        policy=policy,
        binding=binding.digest,
        catalog_generation=served.catalog_generation,
        outcome=outcome,
        prompt_tokens=prompt_tokens,
        output_tokens=sum(choice.output_tokens for choice in choices),
        choices=tuple(_choice(choice, attempt, served, ran) for choice in choices),
        cache_abi=ran.cache_abi,
        graph_revision=ran.graph_revision,
        cache_namespace=ran.namespace,
    )


def _choice(seen: ChoiceSeen, attempt: int, served: Served, ran: RanOn) -> ChoiceRecord:
    bound = seen.binding
    slot = None
    if bound is not None and served.semantic is not None and served.kernel is not None:
        slot = SlotBinding(
            ran.epoch,
            ran.device,
            bound.adapter_slot,
            bound.adapter_generation,
            bound.adapter_generation,
            served.semantic,
            served.kernel,
        ).digest
    return ChoiceRecord(
        seed=seen.sampling.seed,
        finish_reason=seen.finish_reason,
        output_tokens=seen.output_tokens,
        slot=slot,
        generations=None if bound is None else _generations(bound, attempt, served),
        admissions=0 if bound is None else bound.admission,
        history=seen.history,
        reused_tokens=0 if bound is None else bound.reused,
    )


def _generations(bound: TokenBinding, attempt: int, served: Served) -> dict[str, str]:
    return encode(
        GenerationVector(
            catalog=CatalogGeneration(served.catalog_generation),
            request=RequestAttempt(attempt),
            slot=SlotGeneration(bound.adapter_generation),
            pointer_table=PointerTableGeneration(bound.adapter_generation),
            plan=PlanGeneration(bound.plan),
            cache=CacheGeneration(bound.cache),
            rng=RngGeneration(bound.sampled),
        )
    )


def _plain(sampling: EngineSampling) -> Any:
    """Sampling as canonical values: floats as their shortest decimal text."""
    return _texts(msgspec.to_builtins(sampling))


def _texts(value: Any) -> Any:
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        return {name: _texts(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_texts(item) for item in value]
    return value


@dataclass(slots=True)
class Provenance:
    """The queue of records and the log behind it. off_loop: runs what waits for the database."""

    log: RequestLog
    off_loop: OffLoop
    attempts: Attempts = field(default_factory=Attempts)
    lost: int = 0
    _queue: deque[ProvenanceRecord] = field(default_factory=deque)
    _since_prune: int = PRUNE_EVERY
    _task: asyncio.Task[None] | None = None
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def add(self, record: ProvenanceRecord) -> None:
        """Remember a record; it is written soon. Never waits."""
        if len(self._queue) >= limits.MAX_UNWRITTEN_RECORDS:
            self.lost += 1
            if self.lost == 1:
                _log.error("request records are lost: %d wait for the catalog", len(self._queue))
            return
        self._queue.append(record)
        self._wake.set()
        if self._task is None:
            self._task = reported(
                asyncio.create_task(self._write_always()), _log, "request records are no longer written"
            )

    async def find(self, request_id: str, tenant: str | None) -> list[ProvenanceRecord]:
        """Records of a request id, the newest first; raises `request_not_found` when there are none."""
        waiting = [
            record
            for record in self._queue
            if record.request_id == request_id and tenant in (None, record.tenant)
        ]
        stored: list[ProvenanceRecord] = await self.off_loop(lambda: self.log.find(request_id, tenant))
        records = [*reversed(waiting), *(record for record in stored if record not in waiting)]
        if not records:
            raise CallerError(
                ErrorCode.REQUEST_NOT_FOUND,
                f"there is no record of request {request_id[:80]!r}: it is unknown, under way, or forgotten "
                "by now",
                param="request_id",
            )
        return records

    async def flush(self) -> None:
        """Write everything that waits; raises `catalog_unavailable` and keeps it when that fails."""
        async with self._writing:
            while self._queue:
                batch = [self._queue[index] for index in range(min(BATCH, len(self._queue)))]
                await self.off_loop(functools.partial(self.log.write, batch))
                for _ in batch:
                    self._queue.popleft()
                self._since_prune += len(batch)
            if self._since_prune >= PRUNE_EVERY:
                self._since_prune = 0
                await self.off_loop(lambda: self.log.prune(time.time_ns() // 1_000_000))

    async def close(self) -> None:
        """Write what waits, once, and stop."""
        if self._task is not None:
            async with (
                self._writing
            ):  # a batch under way is written whatever is cancelled here: twice, if not waited for
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        try:
            await self.flush()
        except LoraplexError as error:
            _log.error("%d request records are lost: %s", len(self._queue), error)

    async def _write_always(self) -> None:
        silent = False
        while True:
            await self._wake.wait()
            self._wake.clear()
            await asyncio.sleep(WRITE_EVERY_S)  # what else ends meanwhile goes into the same transaction
            try:
                await self.flush()
                silent = False
            except LoraplexError as error:
                if not silent:
                    _log.warning("request records wait: %s", error)
                silent = True
                self._wake.set()
