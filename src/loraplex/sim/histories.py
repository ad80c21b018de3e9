"""Books about what each KV position was made of, kept beside one engine: no row is read under another
history.

Every row gets a lineage: a number that depends on namespace, on every token before it and on what acted at
each. A request reads a position only where the lineage is the one that it would have made itself. A page is
cached only once a commit made all of its rows for a request that went on, and what is cached never changes.

Nothing here is used by the code under test; it reads keys nowhere. Specification: 0x08B, 0x08I.
"""

from __future__ import annotations

import numpy as np

from loraplex.core.packed import each
from loraplex.core.plan import BatchPlan, StepResult
from loraplex.engine.state import EngineState
from loraplex.memory.prefix import Receipt
from loraplex.memory.states import Ints
from loraplex.sim.clients import Ask, Clients
from loraplex.sim.faults import Setup
from loraplex.sim.tokens import mix_one, split
from loraplex.sim.wrong import Wrong

_TOKEN, _ACTS = 0x9E37_79B9_7F4A_7C15, 0x1_0000_01B3


class Histories:
    """Lineage of each cell of the pool, and which cells a commit made. table: page tables, by slot
    and index.
    """

    def __init__(
        self, setup: Setup, clients: Clients, state: EngineState, table: dict[int, dict[int, int]]
    ) -> None:
        self._clients, self._state, self._table = clients, state, table
        self._size = setup.limits.kv.page_tokens
        shape = (setup.limits.num_pages, self._size)
        self._lineage = np.zeros(shape, dtype=np.uint64)
        self._sound = np.zeros(shape, dtype=np.bool_)
        self._by = np.zeros(shape, dtype=np.int64)
        self._of: dict[str, list[int]] = {}
        self._flying: dict[int, list[tuple[str, Ints, Ints]]] = {}
        self._cached: dict[int, tuple[bytes, int, bytes]] = {}
        self._receipts: dict[str, tuple[Receipt, object]] = {}

    def on_plan(self, plan: BatchPlan) -> None:
        """Rows are about to be read and written."""
        written = self._flying.setdefault(plan.generation, [])
        requests = plan.requests
        for slot, start, end in each(requests.slot, requests.kv_start, requests.kv_end):
            ask = self._clients.live[self._state.by_slot[slot].request_id]
            lineage = np.array(self._lineages(ask, end), dtype=np.uint64)
            positions = np.arange(end)
            table = self._table[slot]
            pages = np.array([table[index] for index in range(-(-end // self._size))])[
                positions // self._size
            ]
            offsets = positions % self._size
            wrong = self._lineage[pages[:start], offsets[:start]] != lineage[:start]
            if wrong.any():
                at = int(np.flatnonzero(wrong)[0])
                raise Wrong("history", f"{ask.request_id} reads position {at}, which has another history")
            foreign = self._by[pages[:start], offsets[:start]] != ask.order
            if (foreign & ~self._sound[pages[:start], offsets[:start]]).any():
                raise Wrong("history", f"{ask.request_id} reads rows of another that no commit made")
            rows = pages[start:], offsets[start:]
            self._lineage[rows], self._sound[rows], self._by[rows] = lineage[start:], False, ask.order
            written.append((ask.request_id, *rows))

    def _lineages(self, ask: Ask, end: int) -> list[int]:
        """Lineages of the request's first `end` positions. Beyond its last token nothing is like anything
        else.
        """
        known = self._of.setdefault(ask.request_id, [])
        acts = split(ask.image.number)[0] if ask.image is not None else 0
        for position in range(len(known), end):
            before = known[-1] if known else self._root(ask)
            output = position - ask.prompt.size
            if output < 0:
                token = int(ask.prompt[position])
            else:
                token = ask.expected[output] if output < len(ask.expected) else -ask.order
            acting = acts if position >= ask.invoked_at else 0
            known.append(mix_one((before + token * _TOKEN + acting * _ACTS + 1) & 0xFFFF_FFFF_FFFF_FFFF))
        return known[:end]

    def _root(self, ask: Ask) -> int:
        return int.from_bytes(self._clients.namespace(ask).encode()[:7].ljust(7, b"."), "little")

    def on_result(self, result: StepResult) -> None:
        """A plan ended; what it made for requests that went on, and whose logits are finite, is made."""
        faulty = set(result.faults.request.tolist())
        for index, (request_id, pages, offsets) in enumerate(self._flying.pop(result.generation, ())):
            if not result.error.size and index not in faulty and request_id in self._clients.live:
                self._sound[pages, offsets] = True

    def after_step(self) -> None:
        """Whatever is cached was made by commits, and is what it was when it was cached."""
        seen: dict[int, tuple[bytes, int, bytes]] = {}
        for block in self._state.prefix:
            now = (block.key, block.page, self._lineage[block.page].tobytes())
            before = self._cached.get(block.number)
            if before is None and not self._sound[block.page].all():
                raise Wrong("publication", f"block {block.number} is cached, and no commit made all of it")
            if before is not None and before != now:
                raise Wrong("receipts", f"block {block.number} is not what it was when it was cached")
            seen[block.number] = now
        self._cached = seen
        receipts: dict[str, tuple[Receipt, object]] = {}
        for request_id, record in self._state.records.items():
            if record.prefix is None:
                continue
            receipt = record.prefix.receipt
            held = (
                tuple(block.number for block in receipt.blocks),
                receipt.pages,
                receipt.keys,
                receipt.covered,
            )
            known = self._receipts.get(request_id)
            if known is not None and known[0] is receipt and known[1] != held:
                raise Wrong("receipts", f"the receipt of {request_id} has changed")
            if any(block.number not in seen for block in receipt.blocks):
                raise Wrong("receipts", f"{request_id} holds a block that is not cached any more")
            receipts[request_id] = receipt, held
        self._receipts = receipts
