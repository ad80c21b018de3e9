"""Changes of backend state collected between two plans.

Deltas are idempotent: a plan that was refused or failed gives them back, and the next one carries them again.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import fields, replace
from typing import Any

import numpy as np

from loraplex.core.packed import I32, Columns, empty, float_bits
from loraplex.core.plan import (
    AdapterColumns,
    BiasColumns,
    BlockColumns,
    CopyColumns,
    Deltas,
    OpenColumns,
    PageDeltaColumns,
    adapter_pairs,
)
from loraplex.engine.request_state import RequestRecord
from loraplex.memory.residency import SlotDirectory
from loraplex.memory.slabs import Block
from loraplex.schedule.running import RunningTable


def digest_words(kernel_digest: str) -> I32:
    """Eight int32 words of a 64-character hexadecimal digest."""
    return np.frombuffer(bytes.fromhex(kernel_digest), dtype="<i4").astype(np.int32)


class PendingDeltas:
    """Deltas for the next plan, in order."""

    def __init__(self) -> None:
        self._parts = _no_parts()
        self._maybe_filled = empty()

    def __bool__(self) -> bool:
        return any(self._parts.values())

    def open_request(self, record: RequestRecord, slot: int, incarnation: int, kv_start: int) -> None:
        """A request slot starts over with this record's sampling state, behind `kv_start` cached
        positions.
        """
        sampling = record.sampling
        penalised = (
            sampling.repetition_penalty != 1.0
            or sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0
        )
        history = record.tokens if penalised else empty()
        seed = sampling.seed & 0xFFFF_FFFF_FFFF_FFFF
        low, high = np.array([seed & 0xFFFF_FFFF, seed >> 32], dtype=np.uint32).view(np.int32).tolist()
        opened = OpenColumns.filled(
            1,
            slot=slot,
            incarnation=incarnation,
            kv_start=kv_start,
            prompt_tokens=record.prompt_tokens,
            temperature=float_bits([sampling.temperature]),
            top_p=float_bits([sampling.top_p]),
            top_k=sampling.top_k,
            min_p=float_bits([sampling.min_p]),
            repetition=float_bits([sampling.repetition_penalty]),
            presence=float_bits([sampling.presence_penalty]),
            frequency=float_bits([sampling.frequency_penalty]),
            seed_low=low,
            seed_high=high,
            bias=len(sampling.logit_bias),
            history=history.size,
            sampled_ids=sampling.sampled_ids,
        )
        self._add("opens", opened)
        if sampling.logit_bias:
            tokens, values = zip(*sampling.logit_bias, strict=True)
            self._add("open_bias", BiasColumns.filled(len(tokens), token=tokens, bias=float_bits(values)))
        if history.size:
            self._add("open_history", history)

    def page_table(self, deltas: PageDeltaColumns) -> None:
        """Page-table entries."""
        if len(deltas):
            self._add("page_deltas", deltas)

    def copy(self, kernel_digest: str, slot: int, generation: int, place: I32 | Block) -> None:
        """Copy an adapter image into its pages, or its block, for (slot, generation)."""
        block = place if isinstance(place, Block) else None
        pages = place if isinstance(place, np.ndarray) else np.array([place.page], dtype=np.int32)
        copy = CopyColumns.filled(
            1,
            digest=digest_words(kernel_digest),
            adapter_slot=slot,
            adapter_generation=generation,
            pages=pages.size,
            size_class=0 if block is None else block.size_class,
            block=0 if block is None else block.index,
        )
        self._add("copies", copy)
        self._add("copy_pages", pages)

    def publish(self, slot: int, generation: int) -> None:
        """Make a validated copy visible to kernels."""
        self._add("publishes", AdapterColumns.filled(1, adapter_slot=slot, adapter_generation=generation))

    def retire(self, slot: int, generation: int) -> None:
        """Take a slot out of the table."""
        self._add("retires", AdapterColumns.filled(1, adapter_slot=slot, adapter_generation=generation))

    def scrub(self, pages: I32) -> None:
        """Fill freed pages with 0xFF."""
        if pages.size:
            self._add("scrub_pages", pages)

    def scrub_block(self, page: int, size_class: int, index: int) -> None:
        """Fill a freed block with 0xFF."""
        self._add("scrub_blocks", BlockColumns.filled(1, page=page, size_class=size_class, block=index))

    def take(
        self, table: RunningTable, copying: Container[tuple[int, int]], directory: SlotDirectory
    ) -> Deltas:
        """Everything collected that still applies; it is forgotten here.

        An open applies while its slot runs the same incarnation, a page-table entry while the table still has
        it: a request may have been preempted or ended since. A copy applies while it is in `copying`: one
        that a failed plan had started may have ended before that plan gave its deltas back. A publication
        applies while the directory is still at its generation: behind its retirement it would be another's. A
        page, or a block of one, is not scrubbed again where a copy that was given back may have filled it:
        the copy is not made twice.
        """
        if not self:
            return Deltas()
        taken = Deltas(**{name: _joined(parts) for name, parts in self._parts.items() if parts})
        self._parts = _no_parts()
        opens, entries, copies = taken.opens, taken.page_deltas, taken.copies
        if len(opens):
            current = table.active[opens.slot] & (table.incarnation[opens.slot] == opens.incarnation)
            taken = replace(
                taken,
                opens=opens[current],
                open_bias=taken.open_bias[np.repeat(current, opens.bias)],
                open_history=taken.open_history[np.repeat(current, opens.history)],
            )
        holds = (
            table.active[entries.slot]
            & (entries.index < table.pages[entries.slot])
            & (table.page_table[entries.slot, entries.index] == entries.page)
        )
        if not holds.all():
            taken = replace(taken, page_deltas=entries[holds])
        if len(taken.publishes):
            held = [directory.generation(slot) == at for slot, at in adapter_pairs(taken.publishes)]
            taken = replace(taken, publishes=taken.publishes[np.array(held)])
        if len(copies):
            under_way = np.array([pair in copying for pair in adapter_pairs(copies)])
            pages = taken.copy_pages[np.repeat(under_way, copies.pages)]
            taken = replace(taken, copies=copies[under_way], copy_pages=pages)
        filled = self._maybe_filled
        if filled.size:
            self._maybe_filled = empty()
            taken = replace(
                taken,
                scrub_pages=taken.scrub_pages[~np.isin(taken.scrub_pages, filled)],
                scrub_blocks=taken.scrub_blocks[~np.isin(taken.scrub_blocks.page, filled)],
            )
        return taken

    def restore(self, deltas: Deltas) -> None:
        """Put back what `take` gave, before anything collected since."""
        self._maybe_filled = np.concatenate((self._maybe_filled, deltas.copy_pages))
        for name, parts in self._parts.items():
            part = getattr(deltas, name)
            if len(part):
                parts.insert(0, part)

    def _add(self, section: str, part: I32 | Columns) -> None:
        self._parts[section].append(part)


def _no_parts() -> dict[str, list[Any]]:
    """For each section of `Deltas`, its parts."""
    return {section.name: [] for section in fields(Deltas)}


def _joined(parts: list[Any]) -> Any:
    """Parts of one section as one."""
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else type(parts[0]).joined(parts)
