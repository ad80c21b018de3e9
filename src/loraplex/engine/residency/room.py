"""Whether there is room now, and taking it: pages for loads and for requests that grow.

Room is what `EngineState.available_pages` says and what `victims` would give up. Eviction for requests frees
pages at once, because their work is ordered after every launch that used them; a load takes its victims'
pages inside its transaction, and pages of cached blocks before it: they are no victims that a rollback owes.
Every page that a request or a load gets is taken here. Never chooses who goes, and never says that waiting is
in vain (`feasibility` does).

Specification: 0x05C (joint admission), 0x09J (speculative loads); rulings "Residency".
"""

from __future__ import annotations

import numpy as np

from loraplex.core import limits
from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.packed import I32
from loraplex.engine import prefixes
from loraplex.engine.residency import transitions, victims
from loraplex.engine.state import EngineState
from loraplex.memory.eviction import PageClass
from loraplex.memory.residency import AdapterEntry
from loraplex.memory.transaction import Demand, Transaction, block_pages, prefetch_safe


def demand(
    state: EngineState, entry: AdapterEntry | None, kv_initial: int = 0, kv_growth: int = 0, guard: int = 0
) -> Demand:
    """The joint demand of a cold adapter, or of none, with KV pages (0x05C): a small one costs a page only
    where no block is free.
    """
    if entry is None:
        return Demand(0, kv_initial, kv_growth, guard)
    pages = block_pages(state.pool, entry.size_class) if entry.size_class else entry.page_count
    return Demand(pages, kv_initial, kv_growth, guard, entry.size_class)


def evict_for(state: EngineState, pages: int, keep: AdapterEntry | None = None) -> bool:
    """Evict idle adapters for a request until `pages` pages were freed; False, with nothing changed, when
    they do not suffice.
    """
    choice = victims.choose(state, pages, keep=keep, floors=_floors(state))
    if not choice.enough:
        return False
    for victim in choice.victims:
        transitions.evict(state, victim)
    return True


def _floors(state: EngineState) -> dict[PageClass, int]:
    """What pressure of requests leaves alone, the last one's excepted; `EngineState.spare_blocks` knows the
    floor of cached blocks.
    """
    return {PageClass.ADAPTER: state.limits.adapter_floor if len(state.by_slot) > 1 else 0}


def _free_available(state: EngineState, count: int, keep: AdapterEntry | None = None) -> None:
    """Make `count` of the available pages free ones: what goes is whichever of cached blocks and idle
    adapters ranks first.

    Where blocks go, a few more go with them: a full pool is asked again in the next step.
    """
    missing = state.missing_pages(count)
    if not missing:
        return
    choice = victims.choose(state, missing, keep=keep, floors=_floors(state), cached=True)
    for victim in choice.victims:
        transitions.evict(state, victim)
    ahead = min(state.pool.usable // 32, limits.MAX_BLOCKS_GIVEN_UP_AHEAD, state.spare_blocks)
    prefixes.give_up(state, max(choice.blocks, ahead) if choice.blocks else 0, "kv")


def take_for_rows(state: EngineState, count: int) -> tuple[I32, int]:
    """`count` of the available pages for requests that run, and the transaction that has them; the caller
    owns them next.
    """
    _free_available(state, count)
    txn = state.next_transaction()
    return state.pool.reserve(count, txn), txn


def take_for_request(state: EngineState, demand: Demand, entry: AdapterEntry | None) -> Transaction | None:
    """The pages of a request that needs no load, idle adapters evicted for it; None, with nothing changed,
    without room.

    entry: its adapter, which stays.
    """
    missing = demand.required - state.available_pages
    if missing > 0 and not evict_for(state, missing, entry):
        return None
    _free_available(state, demand.required, entry)
    return Transaction.reserve(state.next_transaction(), state.pool, demand)


def take_for_load(
    state: EngineState, demand: Demand, entry: AdapterEntry, *, evicting: bool = True
) -> Transaction | None:
    """The joint transaction for a load of `entry`, victims retired inside it; None, with nothing changed,
    without room.

    evicting: whether other adapters may be evicted for it.
    """
    chosen = victims.choose_for_load(state, demand, entry, evicting)
    if chosen is None:
        return None
    going = chosen.victims
    prefixes.give_up(state, chosen.blocks, "adapter")
    for victim in going:
        transitions.retire(state, victim)
    transaction = Transaction.reserve(
        state.next_transaction(), state.pool, chosen.demand, victims=going, last_launch=state.newest_launch
    )
    if transaction is None:
        raise InternalFault(
            ErrorCode.TRANSACTION_STATE,
            f"{len(going)} victims were chosen for {chosen.demand} and do not cover it",
        )
    for victim in going:
        transitions.unpublish(state, victim)
    return transaction


def take_spare(state: EngineState, demand: Demand, entry: AdapterEntry) -> Transaction | None:
    """`take_for_load` for a load that nobody waits for: only what is left beyond what admitted requests will
    want (0x09J).
    """
    if not prefetch_safe(demand.adapter, state.available_pages, committed_growth(state), demand.guard):
        return None
    return take_for_load(state, demand, entry, evicting=False)


def committed_growth(state: EngineState) -> int:
    """Pages that running requests will still take within the growth horizon."""
    table, kv = state.table, state.limits.kv
    slots = np.flatnonzero(table.active & ~table.stopping)
    if not slots.size:
        return 0
    left = table.max_outputs[slots] - table.outputs_planned[slots]
    ends = np.maximum(table.known[slots], table.planned[slots]) + np.minimum(
        left, state.limits.growth_horizon
    )
    pages = -(-ends // kv.page_tokens) - table.pages[slots]
    return int(np.maximum(pages, 0).sum())


def shortfall(state: EngineState, demand: Demand, entry: AdapterEntry) -> str:
    """Why `take_for_load` found nothing, in numbers."""
    reclaimable = victims.reclaimable_pages(state, entry)
    missing = max(
        demand.required - state.available_pages - reclaimable,
        state.adapter_pages + demand.adapter - reclaimable - state.caps.adapter_pages,
    )
    if missing > 0:
        return (
            f"{demand.required} pages are needed, {state.available_pages} are free and {reclaimable} can be "
            "reclaimed, "
            f"adapters may take {state.caps.adapter_pages}: {missing} are missing"
        )
    return f"all {state.caps.resident_adapters} adapters that may be resident are in use"
