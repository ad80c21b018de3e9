"""What could give way: adapters with pages of their own, slab pages whose every adapter may go, and small adapters singly.

A small adapter that leaves a slab with neighbours in it frees a block and no page. So pages are offered by adapters with
pages of their own and by whole slabs; a single small adapter offers its block to another of its class, and its entry in
the slot directory. Eligibility, ranking and floors are `memory.eviction`'s; here they are applied to the engine's adapters.

Specification: 0x05D (three steps); rulings "Residency".
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from loraplex.engine.state import EngineState
from loraplex.memory import eviction
from loraplex.memory.eviction import Candidate, PageClass
from loraplex.memory.residency import AdapterEntry


@dataclass(frozen=True, slots=True)
class Offer:
    """Adapters that go together, priced as one candidate. Two candidates may have one key: one adapter is leaving."""

    candidate: Candidate
    entries: tuple[AdapterEntry, ...]


def image_bytes(state: EngineState, entry: AdapterEntry) -> int:
    """Bytes of an adapter's image, on the host and on the device."""
    return entry.image_bytes(state.pool.page_bytes)


def _offer(state: EngineState, entries: Sequence[AdapterEntry], pages: int) -> Offer:
    restored = sum(image_bytes(state, entry) for entry in entries)
    restore_ns = restored * 1_000_000_000 // state.limits.copy_bytes_per_s
    touched = max(entry.last_touch for entry in entries)
    return Offer(Candidate(PageClass.ADAPTER, entries[0].key, pages, restore_ns, touched), tuple(entries))


def of_pages(state: EngineState, keep: AdapterEntry | None = None, spared: int = 0) -> list[Offer]:
    """Everything that could give pages. keep: an adapter that stays; spared: a slab page that stays."""
    out = [
        _offer(state, [entry], entry.page_count)
        for entry in state.occupied.values()
        if not entry.size_class and entry is not keep and eviction.eligible(entry, state.committed)
    ]
    for page in state.pool.slabs.slab_pages():
        owners = state.pool.slabs.owners(page)
        if page == spared or owners is None:
            continue
        entries = [state.occupied[slot] for slot, _ in owners]
        if all(entry is not keep and eviction.eligible(entry, state.committed) for entry in entries):
            out.append(_offer(state, entries, 1))
    return out


def of_blocks(state: EngineState, keep: AdapterEntry | None = None, size_class: int = 0) -> list[Offer]:
    """Small adapters that could go singly. size_class: of this class alone; 0 for all."""
    return [
        _offer(state, [entry], 0)
        for entry in state.occupied.values()
        if entry.size_class
        and size_class in (0, entry.size_class)
        and entry is not keep
        and eviction.eligible(entry, state.committed)
    ]


def ranked(state: EngineState, offers: Sequence[Offer]) -> list[Offer]:
    """Offers in the order in which they go."""
    by_candidate = {id(offer.candidate): offer for offer in offers}
    ranking = eviction.RANKINGS[state.limits.ranking]
    return [by_candidate[id(c)] for c in ranking([o.candidate for o in offers], state.launched)]


def choose(
    state: EngineState,
    pages_needed: int,
    *,
    keep: AdapterEntry | None = None,
    count: int = 0,
    floor: int = 0,
    spared: int = 0,
    gone: Collection[AdapterEntry] = (),
) -> list[AdapterEntry] | None:
    """Victims that cover `pages_needed` and free `count` slots, or None.

    floor: adapter pages that stay. spared: a slab page that stays. gone: adapters that go anyway, counted elsewhere.
    """
    by_pages = of_pages(state, keep, spared)
    offered = {id(offer.candidate): offer for offer in by_pages}
    chosen = eviction.choose(
        [offer.candidate for offer in by_pages],
        pages_needed,
        now=state.launched,
        ranking=eviction.RANKINGS[state.limits.ranking],
        held={PageClass.ADAPTER: state.adapter_pages},
        floors={PageClass.ADAPTER: floor},
    )
    if chosen is None:
        return None
    victims = [entry for candidate in chosen for entry in offered[id(candidate)].entries]
    left = state.adapter_pages - sum(candidate.pages for candidate in chosen)
    singly = [offer for offer in by_pages if not offer.entries[0].size_class] + of_blocks(state, keep)
    for offer in ranked(state, singly):
        if len(victims) >= count:
            break
        entry = offer.entries[0]
        if any(entry is other for other in (*victims, *gone)) or left - offer.candidate.pages < floor:
            continue
        left -= offer.candidate.pages
        victims.append(entry)
    return victims if len(victims) >= count else None
