"""Adapters on this device, as plans tell: start copies, publish, retire. Decides nothing.

Order inside a plan: publications, retirements, scrubs, copies. Each is idempotent by (slot, generation),
because a plan that failed gives its deltas back and a later one carries them again. Copies run beside the
steps (`copies`); their ends are reported once, in the next result that is not a failure. A copy that cannot
be made (image not there, tables that disagree with the model, bytes that differ) is reported as not intact
and leaves its slot empty; it never fails the step.

Specification: 0x04E (reserve, copy, validate, then publish), 0x05E; rulings "Residency".
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from loraplex.core.errors import ErrorCode, InternalFault, LoraplexError
from loraplex.core.packed import I32, each
from loraplex.core.plan import BatchPlan, CopiedColumns, adapter_pairs
from loraplex.core.ports import ImageSource
from loraplex.model.copies import Copies, Copy, SteppedCopies
from loraplex.model.stream_copies import StreamCopies
from loraplex.ops.table import AdapterTable

_log = logging.getLogger(__name__)


class Residents:
    """Adapter slots of one device over `table`; `images` is where host bytes come from."""

    def __init__(self, table: AdapterTable, images: ImageSource, copies: Copies | None = None) -> None:
        self._table, self._images = table, images
        self._copies = make_copies(table) if copies is None else copies
        self._held: dict[int, int] = {}
        self._retired: dict[int, int] = {}
        self._unreported: list[tuple[int, tuple[int, int, int]]] = []

    def check(self, plan: BatchPlan) -> None:
        """Refuse a plan whose adapter slots are not what it expects; raises `stale_slot_generation`. Changes
        nothing.
        """
        held, published = dict(self._held), self._table.published.copy()
        for slot, generation in adapter_pairs(plan.publishes):
            if published[slot] != generation and (held.get(slot) != generation or published[slot] != 0):
                raise _stale(slot, f"holds generation {held.get(slot, 0)}; the plan publishes {generation}")
            published[slot] = generation
        for slot, generation in adapter_pairs(plan.retires):
            if held.get(slot) == generation:
                del held[slot]
                published[slot] = 0
            elif self._retired.get(slot, 0) < generation:
                raise _stale(slot, f"holds generation {held.get(slot, 0)}; the plan retires {generation}")
        for slot, generation in adapter_pairs(plan.copies):
            if published[slot]:
                raise _stale(
                    slot, f"is published with generation {published[slot]}; the plan copies {generation}"
                )
        slots, generations = plan.requests.adapter_slot, plan.requests.adapter_generation
        wrong = np.flatnonzero((slots > 0) & ((published[slots] != generations) | (generations == 0)))
        if wrong.size:
            slot = int(slots[wrong[0]])
            raise _stale(
                slot, f"has published {published[slot]}; a request expects {int(generations[wrong[0]])}"
            )

    def apply(self, plan: BatchPlan) -> None:
        """Carry out what `check` accepted, start its copies, and move those under way on."""
        self._publish(plan)
        for slot, generation in adapter_pairs(plan.retires):
            if self._held.get(slot) == generation:
                self._table.retire(slot, generation)
                del self._held[slot]
                self._retired[slot] = generation
        if plan.scrub_pages.size:
            scrubbed = torch.from_numpy(plan.scrub_pages.astype(np.int64)).to(self._table.pool.device)
            self._table.pool.index_fill_(0, scrubbed, 0xFF)
        scrubs = plan.scrub_blocks
        for page, size_class, block in each(scrubs.page, scrubs.size_class, scrubs.block):
            start, width = self._table.block_span(size_class, block)
            self._table.pool[page, start : start + width].fill_(0xFF)
        copies, offset = plan.copies, 0
        places = each(
            copies.adapter_slot, copies.adapter_generation, copies.pages, copies.size_class, copies.block
        )
        for words, (slot, generation, count, size_class, block) in zip(copies.digest, places, strict=True):
            pages = plan.copy_pages[offset : offset + count].copy()
            offset += count
            digest = words.astype("<i4").tobytes().hex()
            if not self._start(digest, slot, generation, pages, size_class, block):
                self._unreported.append((plan.generation, (slot, generation, 0)))
        self._copies.advance(plan.rows == 0)
        self._note_ended(plan.generation)

    def _publish(self, plan: BatchPlan) -> None:
        """Make copies visible that have ended and are intact: all that the plan names, or none.

        Live they have ended long ago; a replay may be ahead of its copies, and waits for them here. A copy
        that does not arrive intact in a replay raises `copy_checksum`: what was served from it cannot be run
        again.
        """
        fresh = [(s, g) for s, g in adapter_pairs(plan.publishes) if self._table.published[s] != g]
        for slot, generation in fresh:
            self._copies.complete(slot, generation)
        if fresh:
            self._note_ended(plan.generation)
        for slot, generation in fresh:
            if self._held.get(slot) != generation:
                raise InternalFault(
                    ErrorCode.COPY_CHECKSUM,
                    f"adapter slot {slot} did not arrive intact at generation {generation} and is not "
                    "published",
                )
        for slot, generation in fresh:
            self._table.publish(slot, generation)

    def report(self, plan: int) -> CopiedColumns:
        """Copies that have ended by this plan and were not reported yet.

        What a later plan brought to its end is that one's to report, so that a worker answers as a runner
        here does.
        """
        self._note_ended(plan)
        rows = [row for ended_by, row in self._unreported if ended_by <= plan]
        self._unreported = [entry for entry in self._unreported if entry[0] > plan]
        return CopiedColumns.filled(
            len(rows),
            adapter_slot=[slot for slot, _, _ in rows],
            adapter_generation=[generation for _, generation, _ in rows],
            intact=[intact for _, _, intact in rows],
        )

    def _note_ended(self, plan: int) -> None:
        for copy in self._copies.ended():
            if not copy.intact:
                self._drop(copy.slot, copy.generation)
            self._unreported.append((plan, (copy.slot, copy.generation, int(copy.intact))))

    def close(self) -> None:
        """Let go of the pool."""
        self._copies.close()

    def _start(
        self, digest: str, slot: int, generation: int, pages: I32, size_class: int, block: int
    ) -> bool:
        """Begin one copy; False when it cannot be made."""
        if self._held.get(slot) == generation:
            return True  # started by a plan that failed afterwards
        try:
            image = self._images.open(digest)
            self._table.install(slot, image, pages, size_class, block)
        except LoraplexError as error:
            _log.warning("adapter image %s was not copied to slot %d: %s", digest[:12], slot, error)
            return False
        self._held[slot] = generation
        self._copies.start(Copy(slot, generation, image, pages, size_class, block))
        return True

    def _drop(self, slot: int, generation: int) -> None:
        """Forget a copy that arrived damaged, unless the slot has moved on."""
        if self._held.get(slot) == generation and not self._table.published[slot]:
            self._table.retire(slot, generation)
            del self._held[slot]


def make_copies(table: AdapterTable) -> Copies:
    """The copies that suit the pool's device."""
    return SteppedCopies(table) if table.pool.device.type == "cpu" else StreamCopies(table)


def _stale(slot: int, what: str) -> InternalFault:
    return InternalFault(ErrorCode.STALE_SLOT_GENERATION, f"adapter slot {slot} {what}")
