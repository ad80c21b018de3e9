"""Limits of tenants reach the engine: before the first request of an engine, and after each change of
the key file.

Specification: rulings "Scheduling", "Tenants".
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from loraplex.core.errors import LoraplexError
from loraplex.core.messages import SetTenants
from loraplex.core.tenants import TenantLimits
from loraplex.process.client import EngineClient

_log: Final = logging.getLogger(__name__)


class TenantLimitsTold:
    """Remembers what the engine of the moment was told; an engine that starts anew knows of nothing."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._told: tuple[int, tuple[TenantLimits, ...]] = (0, ())

    async def follow(self, tenants: Sequence[TenantLimits], engine: int) -> None:
        """Tell the engine unless it knows. engine: its number, counted from 0.

        Messages reach the engine in order, so that whoever comes meanwhile need not wait for the answer.
        """
        before = self._told if self._told[0] == engine else (engine, ())
        self._told = (engine, tuple(tenants))
        if self._told == before:
            return
        try:
            await self._client.call(SetTenants(0, self._told[1]))
        except LoraplexError as error:
            self._told = before
            _log.error("the engine was not told the limits of tenants: %s", error.message)
