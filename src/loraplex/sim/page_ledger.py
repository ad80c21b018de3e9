"""Where each page is, added up from its owners: requests, cached blocks, adapters, open transactions, slabs
and the free list; and each block.

The pool's own states are not consulted: a page or block that two owners name, or that nobody names, shows.
Specification: 0x05A.
"""

from __future__ import annotations

import numpy as np

from loraplex.core.packed import I32
from loraplex.engine.state import EngineState


def page_ledger(state: EngineState) -> I32:
    """Every page named by any owner, with repeats; all pages but the null page, once each, when all
    is well.
    """
    table = state.table
    parts: list[I32] = [np.fromiter(state.pool.free_pages(), dtype=np.int32)]
    parts += [table.own_pages(slot) for slot in state.by_slot]
    parts.append(np.array([block.page for block in state.prefix], dtype=np.int32))
    parts += [entry.pages for entry in state.adapters.values()]
    parts += [entry.pages for entry, _ in state.departing]
    for job in state.loads.values():
        parts += [job.transaction.adapter_pages, job.transaction.kv_pages, job.transaction.spare]
    parts.append(np.fromiter(state.pool.slabs.slab_pages(), dtype=np.int32))
    return np.concatenate(parts)


def block_ledger(state: EngineState) -> list[tuple[int, int, int]]:
    """(page, size class, index) of every block named by any owner, with repeats; every block of every slab
    page, once each, when all is well.
    """
    blocks = [entry.block for entry in state.adapters.values()] + [
        entry.block for entry, _ in state.departing
    ]
    for job in state.loads.values():
        blocks += [job.transaction.block, *job.transaction.spare_blocks]
    named = [(block.page, block.size_class, block.index) for block in blocks if block is not None]
    return named + state.pool.slabs.free_blocks()
