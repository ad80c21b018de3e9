"""How the life of an adapter waits in `LLM`: not at all. One thread, no event loop, a catalog that is nobody
else's.

Specification: interface "Python".
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeVar

from loraplex.adapters.adapter_catalog import AdapterCatalog
from loraplex.adapters.lifecycle import Commit, Lifecycle, Prepare
from loraplex.adapters.residency_controls import EngineCalls
from loraplex.adapters.revision_texts import RevisionTexts
from loraplex.catalog.records import Revision

T = TypeVar("T")


def _committed() -> None:
    """Nobody cancels plain calls."""


class PlainShell:
    """A life of adapters for plain calls: each of its coroutines is over when it is first asked for
    a result.
    """

    def __init__(
        self,
        engine: EngineCalls,
        catalog: AdapterCatalog,
        prepare: Prepare,
        reclaim: Callable[[str], object],
        texts: RevisionTexts,
    ) -> None:
        """Arguments as those of `Lifecycle`; none of them waits for an event loop."""
        self._catalog = catalog
        self.life = Lifecycle(engine, catalog, prepare, reclaim, self, texts)

    def alone(self) -> AbstractAsyncContextManager[None]:
        """One thread calls."""
        return nullcontext()

    async def whole(self, work: Callable[[Commit], Coroutine[Any, Any, T]]) -> T:
        """Do the work."""
        return await work(_committed)

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Do the work."""
        return work()

    async def look(self) -> None:
        """See what the catalog's store has."""
        self._catalog.refresh()

    async def ready(self, revision: Revision) -> None:
        """What this catalog names was registered when it was published."""

    async def retire(self, key: str) -> None:
        """Let an adapter go now, unless another name stands for it; raises what the engine refuses."""
        held = self.life.held
        if not self._catalog.shares(key) and key in held:
            await self.life.leave(key)
            if key in held.failures:
                raise held.failures.pop(key)
