"""Who gives pages up: every choice among adapters, slabs and blocks, for loads, growing requests, limits and
host memory.

What could go is offered as candidates of a page class; safety, ranking and floors are `memory.eviction`'s,
here they are applied to the engine's adapters. A small adapter that leaves a slab with neighbours in it frees
a block and no page. So pages are offered by adapters with pages of their own and by whole slabs; a single
small adapter offers its block to another of its class, and its entry in the slot directory. Cached blocks
that nobody reads are offered in the index's order; what computing one again costs stands beside what copying
an adapter costs.

Never changes a state and frees nothing: `transitions` does, at the word of whoever asked. What no victim
could make possible is `feasibility`'s.

Specification: 0x04F, 0x05D (three steps); rulings "Residency".
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from loraplex.engine.state import EngineState
from loraplex.memory import eviction
from loraplex.memory.eviction import Candidate, PageClass
from loraplex.memory.residency import AdapterEntry
from loraplex.memory.transaction import Demand

NO_FLOORS: Final[Mapping[PageClass, int]] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Offer(Candidate):
    """Adapters that go together, priced as one, or a cached block: no adapter. Two offers may have one key:
    one adapter is leaving.
    """

    adapters: tuple[AdapterEntry, ...]


@dataclass(frozen=True, slots=True)
class VictimChoice:
    """Which adapters go, in order, and how many cached blocks. enough: whether that is all that was
    needed.
    """

    victims: list[AdapterEntry]
    enough: bool
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class Going:
    """What makes room for a load: the demand that is left, the adapters and the number of cached blocks that
    go.
    """

    demand: Demand
    victims: list[AdapterEntry]
    blocks: int


def evictable(state: EngineState, keep: AdapterEntry | None = None) -> list[AdapterEntry]:
    """Adapters that may go now, in the order in which they came. keep: one that stays."""
    return [
        entry
        for entry in state.occupied.values()
        if entry is not keep and eviction.evictable(entry, state.committed_launch)
    ]


def reclaimable_pages(state: EngineState, keep: AdapterEntry | None = None) -> int:
    """Pages of what satisfies the full eviction predicate (0x05C)."""
    return sum(offer.pages for offer in _of_pages(state, keep))


def reclaimable_at_most(state: EngineState) -> int:
    """At least `reclaimable_pages` for anybody, counted once for each change of room."""
    epoch, committed, pages = state.reclaimable
    if (epoch, committed) != (state.room_epoch, state.committed_launch):
        pages = reclaimable_pages(state)
        state.reclaimable = (state.room_epoch, state.committed_launch, pages)
    return pages


def choose(
    state: EngineState,
    pages: int,
    *,
    count: int = 0,
    keep: AdapterEntry | None = None,
    floors: Mapping[PageClass, int] = NO_FLOORS,
    spared: int = 0,
    gone: Collection[AdapterEntry] = (),
    over: int = 0,
    cached: bool = False,
) -> VictimChoice:
    """Victims that make up `pages` and free `count` slots of the directory; where nothing does, all that may
    go towards it.

    over: pages that adapters alone must give up. cached: whether unreferenced blocks beyond their floor may
    go too. keep: an adapter that stays. floors: pages of a class that stay. spared: a slab page that stays.
    gone: adapters that go anyway, counted elsewhere.
    """
    offers = _of_pages(state, keep, spared)
    order = _ranked(state, offers)
    held = {PageClass.ADAPTER: state.adapter_pages, PageClass.PREFIX: state.spare_blocks}
    beyond = eviction.cover(order, over, held=held, floors=floors)
    taken = {id(offer) for offer in beyond.taken}
    pages -= sum(offer.pages for offer in beyond.taken)
    rest = [offer for offer in order if id(offer) not in taken]
    by_pages = eviction.cover(
        _with_cached(state, rest, pages) if cached else rest, pages, held=beyond.left, floors=floors
    )
    going = [*beyond.taken, *by_pages.taken]
    victims = [entry for offer in going for entry in offer.adapters]
    blocks = sum(offer.kind is PageClass.PREFIX for offer in going)
    enough = beyond.enough and by_pages.enough
    if len(victims) >= count:
        return VictimChoice(victims, enough, blocks)
    away = {id(entry) for entry in (*victims, *gone)}
    singly = [offer for offer in offers if not offer.adapters[0].size_class] + _of_blocks(state, keep)
    singly = [offer for offer in singly if id(offer.adapters[0]) not in away]
    by_count = eviction.cover(
        _ranked(state, singly), 0, held=by_pages.left, floors=floors, count_needed=count - len(victims)
    )
    victims += [offer.adapters[0] for offer in by_count.taken]
    return VictimChoice(victims, enough and by_count.enough, blocks)


def choose_for_load(state: EngineState, demand: Demand, entry: AdapterEntry, evicting: bool) -> Going | None:
    """What makes room for a load, and the demand that is left; None when nothing does.

    A small adapter for which a page would have to be cut may take the block of one of its class instead:
    whichever of the two ranking gives up first, and the other where that does not suffice. evicting: whether
    anybody may go.
    """
    if demand.size_class and not demand.adapter:
        spared = state.pool.slabs.next_page(demand.size_class)
        return _beside(state, demand, entry, evicting, spared=spared)
    as_pages = _beside(state, demand, entry, evicting)
    if not demand.size_class or not evicting or (as_pages is not None and not as_pages.victims):
        return as_pages
    order = _ranked(state, _of_pages(state, entry) + _of_blocks(state, entry, demand.size_class))
    donor = next((offer for offer in order if not offer.pages), None)
    if donor is None or donor.adapters[0].block is None:
        return as_pages
    if as_pages is not None and order[0] is not donor:
        return as_pages
    first, spared = donor.adapters[0], donor.adapters[0].block.page
    return _beside(state, replace(demand, adapter=0), entry, evicting, spared=spared, first=[first])


def _beside(
    state: EngineState,
    demand: Demand,
    entry: AdapterEntry,
    evicting: bool,
    *,
    spared: int = 0,
    first: Sequence[AdapterEntry] = (),
) -> Going | None:
    """What goes beside `first` for this demand. spared: the slab page that the demand's block lies in."""
    over = max(state.adapter_pages + demand.adapter - state.caps.adapter_pages, 0)
    missing = state.missing_pages(demand.required)
    slots = len(state.occupied) + 1 - min(state.caps.resident_adapters, state.limits.max_adapter_slots - 1)
    slots = max(slots - len(first), 0)
    if not over and not slots and (not missing or not evicting):
        return Going(demand, list(first), missing) if missing <= state.spare_blocks else None
    if not evicting:
        return None
    choice = choose(
        state, missing, count=slots, keep=entry, spared=spared, gone=first, over=over, cached=True
    )
    return Going(demand, [*first, *choice.victims], choice.blocks) if choice.enough else None


def _offer(state: EngineState, adapters: Sequence[AdapterEntry], pages: int) -> Offer:
    restored = sum(state.image_bytes(entry) for entry in adapters)
    restore_ns = restored * 1_000_000_000 // state.limits.copy_bytes_per_s
    touched = max(entry.last_use for entry in adapters)
    return Offer(PageClass.ADAPTER, adapters[0].key, pages, restore_ns, touched, tuple(adapters))


def _with_cached(state: EngineState, order: list[Offer], pages: int) -> Iterable[Offer]:
    """Ranked adapters and the cached blocks of which at most `pages` could go, in one order."""
    going = state.prefix.next_to_go(min(max(pages, 0), state.spare_blocks))
    restore_ns = state.limits.kv.page_tokens * 1_000_000_000 // state.limits.prefill_tokens_per_s
    blocks = (Offer(PageClass.PREFIX, "", 1, restore_ns, block.last_launch, ()) for block in going)
    ranking = eviction.RANKINGS[state.limits.ranking]
    return heapq.merge(order, blocks, key=lambda offer: ranking(offer, state.newest_launch))


def _of_pages(state: EngineState, keep: AdapterEntry | None = None, spared: int = 0) -> list[Offer]:
    """Everything that could give pages. keep: an adapter that stays; spared: a slab page that stays."""
    may_go = evictable(state, keep)
    out = [_offer(state, [entry], entry.page_count) for entry in may_go if not entry.size_class]
    going = {entry.slot for entry in may_go}
    for page in state.pool.slabs.slab_pages():
        owners = state.pool.slabs.owners(page)
        if page != spared and owners is not None and all(slot in going for slot, _ in owners):
            out.append(_offer(state, [state.occupied[slot] for slot, _ in owners], 1))
    return out


def _of_blocks(state: EngineState, keep: AdapterEntry | None = None, size_class: int = 0) -> list[Offer]:
    """Small adapters that could go singly. size_class: of this class alone; 0 for all."""
    return [
        _offer(state, [entry], 0)
        for entry in evictable(state, keep)
        if entry.size_class and size_class in (0, entry.size_class)
    ]


def _ranked(state: EngineState, offers: Iterable[Offer]) -> list[Offer]:
    return eviction.ranked(offers, eviction.RANKINGS[state.limits.ranking], state.newest_launch)
