"""Whether the engine's books agree: run when idle in production, after every step in tests and simulation.

Every page has one owner that knows of it; what transactions have reserved is what loads under way hold; host
images are held exactly by what is on the device or on its way there. Nothing is left behind when nothing is
under way. Every offered request is in the ledger of early abort once.

Specification: 0x05A, 0x09M; rulings "One page pool".
"""

from __future__ import annotations

import numpy as np

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.engine import accounts
from loraplex.engine.state import EngineState
from loraplex.memory.pages import PageState
from loraplex.memory.residency import AdapterState


def check(state: EngineState) -> None:
    """Raise the code of the first book that does not agree."""
    state.pool.check()
    state.host.check()
    _check_adapters(state)
    _check_requests(state)
    _check_prefixes(state)
    accounts.check(state)
    if state.early_abort is not None and state.early_abort.ledger.open > len(state.records):
        raise InternalFault(
            ErrorCode.ABORT_LEDGER,
            f"{len(state.records)} requests are live, the ledger {state.early_abort.figures} has more open",
        )
    if not state.busy:
        counts = state.pool.counts()
        read = len(state.prefix) - state.prefix.unreferenced
        if counts.kv or counts.reserved or state.by_slot or state.loads or read or state.computing:
            raise InternalFault(
                ErrorCode.PAGE_CONSERVATION, f"pages or slots leaked while idle: {counts}, {read} read blocks"
            )


def _check_adapters(state: EngineState) -> None:
    owned = blocks = 0
    holds: dict[str, int] = {}
    for slot, entry in state.occupied.items():
        holds[entry.kernel_digest] = holds.get(entry.kernel_digest, 0) + 1
        if entry.slot != slot or state.directory.generation(slot) != entry.generation:
            raise InternalFault(
                ErrorCode.STALE_SLOT_GENERATION,
                f"slot {slot} is not where adapter {entry.key[:12]} thinks it is",
            )
        owned += int(entry.pages.size)
        if entry.pages.size and not state.pool.owners(
            entry.pages, PageState.ADAPTER, entry.slot, entry.generation
        ):
            raise InternalFault(
                ErrorCode.PAGE_OWNER, f"adapter {entry.key[:12]} does not own the pages that it names"
            )
        if entry.block is not None:
            blocks += 1
            if not state.pool.slabs.owned_by(entry.block, entry.slot, entry.generation):
                raise InternalFault(
                    ErrorCode.PAGE_OWNER, f"adapter {entry.key[:12]} does not own the block that it names"
                )
    own = sum(entry.own_pages for entry in state.occupied.values())
    if state.occupied_pages != own:
        raise InternalFault(
            ErrorCode.PAGE_CONSERVATION,
            f"adapters are counted with {state.occupied_pages} pages, they have others",
        )
    counts = state.pool.counts()
    if counts.adapter - counts.slab != owned:
        raise InternalFault(
            ErrorCode.PAGE_CONSERVATION,
            f"{counts.adapter - counts.slab} adapter pages, adapters name {owned}",
        )
    slabs = state.pool.slabs.counts()
    if slabs.owned_blocks != blocks:
        raise InternalFault(
            ErrorCode.PAGE_CONSERVATION, f"{slabs.owned_blocks} blocks are owned, adapters name {blocks}"
        )
    reserved = reserved_blocks = 0
    for job in state.loads.values():
        transaction = job.transaction
        reserved += transaction.adapter_pages.size + transaction.kv_pages.size + transaction.spare.size
        reserved_blocks += (transaction.block is not None) + len(transaction.spare_blocks)
        for owed in transaction.victims:
            digest = owed.entry.kernel_digest
            holds[digest] = holds.get(digest, 0) + 1
            if owed.entry.state is not AdapterState.RETIRING or owed.entry.evicting != transaction.txn:
                raise InternalFault(
                    ErrorCode.TRANSACTION_STATE,
                    f"adapter {owed.entry.key[:12]} is {owed.entry.state} while a transaction owes it its "
                    "pages",
                )
    if slabs.reserved_blocks != reserved_blocks:
        raise InternalFault(
            ErrorCode.PAGE_CONSERVATION,
            f"{slabs.reserved_blocks} reserved blocks, loads under way hold {reserved_blocks}",
        )
    if counts.reserved != reserved:
        raise InternalFault(
            ErrorCode.PAGE_CONSERVATION, f"{counts.reserved} reserved pages, loads under way hold {reserved}"
        )
    for digest, count in holds.items():
        image = state.host.get(digest)
        if image is None or image.holds != count:
            raise InternalFault(
                ErrorCode.HOST_TIER_STATE, f"image {digest:.12} is needed {count} times and not held so"
            )


def _check_requests(state: EngineState) -> None:
    leases: dict[int, int] = {}
    pages = 0
    for slot, record in state.by_slot.items():
        pages += int(state.table.own_pages(slot).size)
        if record.lease is not None:
            leases[id(record.lease.entry)] = leases.get(id(record.lease.entry), 0) + 1
            if not record.lease.valid or record.revision is None or record.lease.entry is not record.entry:
                raise InternalFault(
                    ErrorCode.LEASE_MISMATCH, f"request {record.request_id} runs beside its leased revision"
                )
    if state.pool.counts().kv != pages:
        raise InternalFault(
            ErrorCode.PAGE_CONSERVATION, f"{state.pool.counts().kv} KV pages, requests own {pages}"
        )
    for entry in state.occupied.values():
        if entry.refcount != leases.get(id(entry), 0):
            raise InternalFault(
                ErrorCode.LEASE_MISMATCH,
                f"adapter {entry.key[:12]} counts {entry.refcount} leases, {leases.get(id(entry), 0)} are "
                "held",
            )


def _check_prefixes(state: EngineState) -> None:
    """Every page of the class is one cached block's; every reference is a request's, and what a request reads
    lies in its blocks.
    """
    index, table = state.prefix, state.table
    index.check()
    blocks = list(index)
    pages = np.array([block.page for block in blocks], dtype=np.int32)
    numbers = np.array([block.number for block in blocks], dtype=np.int64)
    if state.pool.counts().prefix != pages.size or not state.pool.owners(pages, PageState.PREFIX, numbers, 0):
        raise InternalFault(
            ErrorCode.PAGE_CONSERVATION,
            f"{state.pool.counts().prefix} pages of cached blocks, the index names {pages.size}",
        )
    readers: dict[int, int] = {}
    for record in state.records.values():
        for block in record.prefix.blocks if record.prefix is not None else ():
            readers[block.number] = readers.get(block.number, 0) + 1
    for slot, record in state.by_slot.items():
        held = record.prefix.blocks if record.prefix is not None else []
        if record.request_id not in state.records:  # ended, with rows in flight
            for block in held:
                readers[block.number] = readers.get(block.number, 0) + 1
        named = table.block_table[slot, : table.pages[slot]]
        at = np.flatnonzero(named)
        if at.size and [held[index].number for index in at.tolist()] != named[at].tolist():
            raise InternalFault(
                ErrorCode.PREFIX_RECEIPT, f"request {record.request_id} reads blocks that it does not hold"
            )
    if any(block.readers != readers.get(block.number, 0) for block in blocks):
        raise InternalFault(ErrorCode.PREFIX_RECEIPT, "a block is referenced other than requests hold it")
