"""Changes of backend state collected between two plans.

Deltas are idempotent: a plan that was refused or failed gives them back, and the next one carries them again.
"""

from __future__ import annotations

from collections.abc import Container

import numpy as np

from loraplex.core.packed import I32, empty, float_bits
from loraplex.core.plan import (
    COPY_COLUMNS,
    COPY_DIGEST_WORDS,
    COPY_GENERATION,
    COPY_PAGES,
    COPY_SLOT,
    OPEN_COLUMNS,
)
from loraplex.engine.request_state import RequestRecord
from loraplex.memory.residency import SlotDirectory
from loraplex.memory.slabs import Block
from loraplex.schedule.packing import Deltas
from loraplex.schedule.running import RunningTable


def digest_words(kernel_digest: str) -> I32:
    """Eight int32 words of a 64-character hexadecimal digest."""
    return np.frombuffer(bytes.fromhex(kernel_digest), dtype="<i4").astype(np.int32)


def digest_from_words(words: I32) -> str:
    """The hexadecimal digest that `digest_words` packed."""
    return words.astype("<i4").tobytes().hex()


class PendingDeltas:
    """Deltas for the next plan, in order."""

    def __init__(self) -> None:
        self._parts: dict[str, list[I32]] = {name: [] for name in _WIDTHS}
        self._maybe_filled = empty()

    def __bool__(self) -> bool:
        return any(self._parts.values())

    def open_request(self, record: RequestRecord, slot: int, incarnation: int) -> None:
        """A request slot starts over with this record's sampling state."""
        sampling = record.sampling
        penalised = (
            sampling.repetition_penalty != 1.0
            or sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0
        )
        history = record.tokens if penalised else empty()
        seed = sampling.seed & 0xFFFF_FFFF_FFFF_FFFF
        low, high = np.array([seed & 0xFFFF_FFFF, seed >> 32], dtype=np.uint32).view(np.int32).tolist()
        floats = float_bits(
            [
                sampling.temperature,
                sampling.top_p,
                sampling.min_p,
                sampling.repetition_penalty,
                sampling.presence_penalty,
                sampling.frequency_penalty,
            ]
        ).tolist()
        row = [
            slot, incarnation, record.prompt_tokens, floats[0], floats[1], sampling.top_k, floats[2], floats[3],
            floats[4], floats[5], low, high, len(sampling.logit_bias), history.size,
        ]  # fmt: skip
        self._add("opens", np.array([row], dtype=np.int32))
        if sampling.logit_bias:
            bias = np.empty((len(sampling.logit_bias), 2), dtype=np.int32)
            bias[:, 0] = [token for token, _ in sampling.logit_bias]
            bias[:, 1] = float_bits([value for _, value in sampling.logit_bias])
            self._add("open_bias", bias)
        if history.size:
            self._add("open_history", history)

    def page_table(self, deltas: I32) -> None:
        """Page-table entries [n, 3]."""
        if len(deltas):
            self._add("page_deltas", deltas)

    def copy(self, kernel_digest: str, slot: int, generation: int, place: I32 | Block) -> None:
        """Copy an adapter image into its pages, or its block, for (slot, generation)."""
        row = np.zeros((1, COPY_COLUMNS), dtype=np.int32)
        row[0, :COPY_DIGEST_WORDS] = digest_words(kernel_digest)
        if isinstance(place, Block):
            row[0, COPY_DIGEST_WORDS:] = slot, generation, 1, place.size_class, place.index
            pages = np.array([place.page], dtype=np.int32)
        else:
            row[0, COPY_SLOT : COPY_PAGES + 1] = slot, generation, place.size
            pages = place
        self._add("copies", row)
        self._add("copy_pages", pages)

    def publish(self, slot: int, generation: int) -> None:
        """Make a validated copy visible to kernels."""
        self._add("publishes", np.array([[slot, generation]], dtype=np.int32))

    def retire(self, slot: int, generation: int) -> None:
        """Take a slot out of the table."""
        self._add("retires", np.array([[slot, generation]], dtype=np.int32))

    def scrub(self, pages: I32) -> None:
        """Fill freed pages with 0xFF."""
        if pages.size:
            self._add("scrub_pages", pages)

    def scrub_block(self, page: int, size_class: int, index: int) -> None:
        """Fill a freed block with 0xFF."""
        self._add("scrub_blocks", np.array([[page, size_class, index]], dtype=np.int32))

    def take(
        self, table: RunningTable, copying: Container[tuple[int, int]], directory: SlotDirectory
    ) -> Deltas:
        """Everything collected that still applies; it is forgotten here.

        An open applies while its slot runs the same incarnation, a page-table entry while the table still has it: a
        request may have been preempted or ended since. A copy applies while it is in `copying`: one that a failed plan
        had started may have ended before that plan gave its deltas back. A publication applies while the directory is
        still at its generation: behind its retirement it would be another's. A page, or a block of one, is not scrubbed again
        where a copy that was given back may have filled it: the copy is not made twice.
        """
        if not self:
            return Deltas()
        taken = {name: _join(name, parts) for name, parts in self._parts.items()}
        self._parts = {name: [] for name in _WIDTHS}
        opens = taken["opens"]
        current = table.active[opens[:, 0]] & (table.incarnation[opens[:, 0]] == opens[:, 1])
        if not current.all():
            taken["open_bias"] = taken["open_bias"][np.repeat(current, opens[:, 12])]
            taken["open_history"] = taken["open_history"][np.repeat(current, opens[:, 13])]
            taken["opens"] = opens[current]
        slots, indices, pages = taken["page_deltas"].T
        holds = (
            table.active[slots] & (indices < table.pages[slots]) & (table.page_table[slots, indices] == pages)
        )
        if not holds.all():
            taken["page_deltas"] = taken["page_deltas"][holds]
        if len(taken["publishes"]):
            held = [directory.generation(slot) == at for slot, at in taken["publishes"].tolist()]
            taken["publishes"] = taken["publishes"][np.array(held)]
        copies = taken["copies"]
        if len(copies):
            pairs = copies[:, COPY_SLOT : COPY_GENERATION + 1].tolist()
            open_still = np.array([(slot, generation) in copying for slot, generation in pairs])
            taken["copy_pages"] = taken["copy_pages"][np.repeat(open_still, copies[:, COPY_PAGES])]
            taken["copies"] = copies[open_still]
        scrubs, filled, self._maybe_filled = taken["scrub_pages"], self._maybe_filled, empty()
        taken["scrub_pages"] = scrubs[~np.isin(scrubs, filled)] if filled.size else scrubs
        if filled.size:
            blocks = taken["scrub_blocks"]
            taken["scrub_blocks"] = blocks[~np.isin(blocks[:, 0], filled)]
        return Deltas(**taken)

    def restore(self, deltas: Deltas) -> None:
        """Put back what `take` gave, before anything collected since."""
        self._maybe_filled = np.concatenate((self._maybe_filled, deltas.copy_pages))
        for name, parts in self._parts.items():
            array = getattr(deltas, name)
            if len(array):
                parts.insert(0, array)

    def _add(self, name: str, array: I32) -> None:
        self._parts[name].append(array)


_WIDTHS = {
    "opens": len(OPEN_COLUMNS), "open_bias": 2, "open_history": 1, "page_deltas": 3, "copies": COPY_COLUMNS,
    "copy_pages": 1, "publishes": 2, "retires": 2, "scrub_pages": 1, "scrub_blocks": 3,
}  # fmt: skip


def _join(name: str, parts: list[I32]) -> I32:
    if not parts:
        return empty(_WIDTHS[name])
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
