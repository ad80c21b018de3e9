"""What the application serves from: the parts of one server, and whether they take requests now.

Specification: rulings "Processes".
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from loraplex.adapters.manager import AdapterService
from loraplex.config import ServeConfig
from loraplex.core.errors import CapacityError, ErrorCode
from loraplex.core.ports import Clock
from loraplex.process.client import EngineClient
from loraplex.process.clock import MonotonicClock
from loraplex.process.supervisor import EngineSupervisor
from loraplex.server.exchange import Exchange
from loraplex.server.live import LiveRequests
from loraplex.server.provenance import Provenance
from loraplex.server.workers import Workers
from loraplex.text.codec import TextCodec


class ServicePhase(StrEnum):
    """Where a server is in its life."""

    STARTING = "starting"
    OPEN = "open"
    DRAINING = "draining"


@dataclass(slots=True)
class Service:
    """One server. base_name: what callers call the base model. codec: None where the model has no tokenizer.

    exchanges: HTTP exchanges that are under way. live: requests that the engine was asked.
    provenance: where records of served requests go. workers: do what a caller's size drives.
    """

    config: ServeConfig
    base_name: str
    codec: TextCodec | None
    client: EngineClient
    supervisor: EngineSupervisor
    adapters: AdapterService
    provenance: Provenance | None = None
    workers: Workers = field(default_factory=Workers)
    clock: Clock = field(default_factory=MonotonicClock)
    phase: ServicePhase = ServicePhase.STARTING
    exchanges: set[Exchange] = field(default_factory=set)
    live: LiveRequests = field(default_factory=LiveRequests)
    _quiet: asyncio.Event = field(default_factory=asyncio.Event)

    @contextmanager
    def exchanging(self, exchange: Exchange) -> Iterator[None]:
        """Count an exchange from its first byte to its last."""
        self.exchanges.add(exchange)
        if self.phase is ServicePhase.DRAINING:
            exchange.hurry()
        try:
            yield
        finally:
            exchange.close()
            self.exchanges.discard(exchange)
            if not self.exchanges:
                self._quiet.set()

    async def quiet(self) -> None:
        """Wait until no exchange is under way."""
        while self.exchanges:
            self._quiet.clear()
            await self._quiet.wait()

    def drain(self) -> None:
        """Take no more requests, and wait no longer for bodies that are still coming."""
        self.phase = ServicePhase.DRAINING
        for exchange in list(self.exchanges):
            exchange.hurry()

    @property
    def ready(self) -> bool:
        """Whether requests are taken now."""
        return self.phase is ServicePhase.OPEN and self.supervisor.ready

    @property
    def engine_info(self) -> dict[str, Any]:
        """What the engine said of itself when it became ready: base_abi, dtype, max_model_len, eos_token_ids,
        ...
        """
        return self.supervisor.info

    def require_ready(self) -> None:
        """Raise `shutting_down` or `engine_unavailable` unless requests are taken now."""
        match self.phase:
            case ServicePhase.DRAINING:
                raise CapacityError(ErrorCode.SHUTTING_DOWN, "the server is shutting down; try another one")
            case ServicePhase.STARTING | ServicePhase.OPEN:
                self.require_engine()

    def require_engine(self) -> None:
        """Raise `engine_unavailable` unless there is an engine that lives. One that drains does."""
        if self.phase is ServicePhase.STARTING:
            raise CapacityError(ErrorCode.ENGINE_UNAVAILABLE, "the server is starting; try again in a moment")
        self.supervisor.require_ready()
