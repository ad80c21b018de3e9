"""The prefix cache in the engine: what a request may look up, hits, publication, giving up, and waiting for a
block.

The order of 0x08I: a request says its history and its keys when it is submitted, and the namespace is checked
there; at admission it is looked up, and what was found is referenced before anything is reserved; a commit
publishes what was computed. Blocks are published once a finite sample proves their rows, with tokens that
were committed before. Where a running request is about to compute a block that another one needs next, the
other waits for that commit and looks up again.

What a client says its keys are decides only what that client finds: the engine makes each key again before it
caches a block under it, so that whoever lies spoils no answer but its own.

Owns references, keys and the pages of cached blocks. Never decides who gives pages up (`residency.victims`),
and never copies a byte: who hits reads the page that was written.

Specification: 0x08E, 0x08H, 0x08I; rulings "KV compatibility", "Tenants".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from loraplex.core.errors import CallerError, ErrorCode, InternalFault
from loraplex.core.events import PrefixGivenUp, PrefixMatched, PrefixPublished
from loraplex.core.messages import Submit
from loraplex.core.packed import I32
from loraplex.engine.request_state import RequestPrefix, RequestRecord
from loraplex.engine.state import EngineState
from loraplex.identity.cache import KEY_BYTES, KeyChain, cache_root, namespace_of
from loraplex.identity.closure import GRAPH_REVISION
from loraplex.identity.execution import base_execution, history_of
from loraplex.memory.pages import PageState
from loraplex.memory.prefix import EMPTY_RECEIPT, CachedBlock
from loraplex.memory.residency import AdapterEntry
from loraplex.schedule.running import NO_CACHE, Slots


@dataclass(frozen=True, slots=True)
class Hit:
    """What a look-up found. matched: cached blocks; reused: those that need not be computed; unread: of
    these, unreferenced.

    awaits: key of the last block in a row that a running request is about to compute; None where nobody is.
    """

    matched: int = 0
    reused: int = 0
    unread: int = 0
    awaits: bytes | None = None


NO_HIT: Final = Hit()


# ---------------------------------------------------------------- submission


def check_invocation(message: Submit, prompt: I32, entry: AdapterEntry | None) -> None:
    """Raise unless an activated adapter's invocation stands in the prompt where the request says, and no
    other has one.
    """
    wanted, at = entry.invocation if entry is not None else (), message.invoked_at
    if not wanted and at != -1:
        raise CallerError(
            ErrorCode.INVALID_REQUEST,
            f"an invocation at position {at} was given for an adapter that is always on, or for none; leave "
            "it out",
            param="invoked_at",
        )
    if wanted and (at < 0 or tuple(prompt[at : at + len(wanted)].tolist()) != wanted):
        raise CallerError(
            ErrorCode.INVALID_REQUEST,
            f"the adapter is invoked by {len(wanted)} tokens, which the prompt does not hold at position "
            f"{at}",
            param="invoked_at",
        )


def begin(
    state: EngineState, message: Submit, prompt: I32, entry: AdapterEntry | None
) -> RequestPrefix | None:
    """The keys of a request, after they were checked against its namespace and history; None where nothing is
    cached.
    """
    limits, size = state.limits, state.limits.kv.page_tokens
    expected = prompt.size // size
    count, rest = divmod(len(message.block_keys), KEY_BYTES)
    if rest or count not in (0, expected):
        raise _refused(f"{len(message.block_keys)} bytes of keys came for {expected} full blocks")
    if not limits.prefix_cache:
        if count:
            raise _refused(f"{count} keys came where nothing is cached; send none")
        return None
    if not count and expected:
        return None
    if message.namespace != namespace_of(message.tenant, limits.shared_tenants):
        raise _refused(f"tenant {message.tenant!r} has no part in namespace {message.namespace!r}")
    execution = entry.execution if entry is not None else None
    history = history_of(limits.base_abi, execution, message.invoked_at if message.invoked_at >= 0 else None)
    root = cache_root(limits.cache_abi, GRAPH_REVISION, message.namespace)
    keys = [message.block_keys[at : at + KEY_BYTES] for at in range(0, count * KEY_BYTES, KEY_BYTES)]
    if keys and KeyChain(root, history, size).extend(message.prompt[: 4 * size]) != keys[:1]:
        raise _refused("the first key is not that of the prompt's first block under the request's history")
    chain = KeyChain(keys[-1] if keys else root, history, size, count * size)
    return RequestPrefix(root, history, chain, keys, count, looks_up=message.sampling.prompt_logprobs < 0)


def _refused(why: str) -> CallerError:
    return CallerError(ErrorCode.INVALID_REQUEST, f"block keys were refused: {why}", param="block_keys")


# ---------------------------------------------------------------- admission


def look_up(state: EngineState, record: RequestRecord) -> Hit:
    """What of a waiting request is cached now; nothing changes. The block with its last known token is always
    computed.
    """
    prefix = record.prefix
    if prefix is None or not prefix.looks_up:
        return NO_HIT
    _extend(prefix, record.tokens)
    keys, usable = prefix.keys, (record.tokens.size - 1) // state.limits.kv.page_tokens
    matched = state.prefix.matched(keys)
    reused = min(matched, usable)
    unread = state.prefix.unread(keys[:reused])
    return Hit(matched, reused, unread, _computed_by_another(state, record, keys[reused:usable]))


def _computed_by_another(state: EngineState, record: RequestRecord, keys: Sequence[bytes]) -> bytes | None:
    """The last of `keys`, from the first on, that one running request computes; a request waits before its
    first row alone.
    """
    owner = state.computing.get(keys[0]) if keys and record.admissions == 0 else None
    if owner is None:
        return None
    last = keys[0]
    for key in keys:
        if state.computing.get(key) != owner:
            break
        last = key
    return last


def acquire(state: EngineState, record: RequestRecord, hit: Hit) -> None:
    """Reference what was found, before anything is reserved. Raises `prefix_receipt` for keys that are no
    chain.
    """
    prefix = record.prefix
    if prefix is None:
        return
    prefix.matched = hit.matched
    prefix.receipt = state.prefix.acquire(prefix.keys[: hit.reused], state.newest_launch)
    prefix.blocks = list(prefix.receipt.blocks)


def bind(state: EngineState, record: RequestRecord) -> None:
    """A request that was just given its slot reads its cached blocks, and says which ones it will compute."""
    prefix, slot = record.prefix, record.slot
    if prefix is None:
        return
    table, size = state.table, state.limits.kv.page_tokens
    reused = len(prefix.blocks)
    if reused:
        pages = np.array(prefix.receipt.pages, dtype=np.int32)
        state.deltas.page_table(table.add_pages(slot, pages))
        table.note_blocks(
            np.full(reused, slot), np.arange(reused), np.array([block.number for block in prefix.blocks])
        )
    table.published[slot] = reused
    _extend(prefix, record.tokens)
    for key in prefix.keys[reused:]:
        if key not in state.computing:
            state.computing[key] = record.request_id
            prefix.computing.append(key)
    if not prefix.looks_up:
        return
    queried, covered = int(record.tokens.size), prefix.receipt.covered
    if not record.admissions:
        state.reuse.queried += queried
        state.reuse.reused += covered
    matched = prefix.matched * size
    now = state.clock.now_ns()
    state.emit(PrefixMatched(now, record.request_id, queried, matched, covered, record.admissions))


def release(state: EngineState, record: RequestRecord) -> None:
    """Give a request's references back, and let those look up again that wait for blocks of it."""
    prefix = record.prefix
    if prefix is None:
        return
    blocks, prefix.blocks, prefix.receipt = prefix.blocks, [], EMPTY_RECEIPT
    if blocks:
        state.room_changed()
        _free(state, state.prefix.release(blocks, state.newest_launch), "dropped")
    _no_longer_computing(state, prefix, prefix.computing)


def _no_longer_computing(state: EngineState, prefix: RequestPrefix, keys: list[bytes]) -> None:
    for key in keys:
        del state.computing[key]
        state.queue.unpark(waiting_for(key))
    prefix.computing = prefix.computing[len(keys) :]


def waiting_for(key: bytes) -> str:
    """The parking place of those who wait for this block."""
    return f"block {key.hex()}"


def _extend(prefix: RequestPrefix, tokens: I32) -> None:
    """Keys of all full blocks of `tokens`, the request's known ones."""
    chain = prefix.chain
    if tokens.size >= chain.position + chain.page_tokens:
        prefix.keys += chain.extend(tokens[chain.position :].astype("<i4").tobytes())


# ---------------------------------------------------------------- commit


class _New:
    """Blocks that a commit makes cached: of which slot, at which entry of its page table, under
    which number.
    """

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.indices: list[int] = []
        self.numbers: list[int] = []

    def settle(self, state: EngineState) -> None:
        """Their pages change hands, all at once."""
        if not self.slots:
            return
        table = state.table
        slots, indices, numbers = np.array(self.slots), np.array(self.indices), np.array(self.numbers)
        state.pool.cache(table.page_table[slots, indices], slots, table.incarnation[slots], numbers)
        table.note_blocks(slots, indices, numbers)
        state.reuse.published += slots.size


def publish(state: EngineState, plan: int, slots: Slots) -> list[tuple[RequestRecord, InternalFault]]:
    """Cache the blocks that are complete by now. slots: those whose sample in `plan`, just committed, is
    finite.

    The answer: requests whose keys are no chain, with why; they must end. Most steps complete no block.
    """
    table, size = state.table, state.limits.kv.page_tokens
    due = slots[table.committed[slots] // size > table.published[slots]]
    wrong: list[tuple[RequestRecord, InternalFault]] = []
    if not due.size:
        return wrong
    new = _New()
    for slot in due.tolist():
        record = state.by_slot[slot]
        if record.prefix is None or record.request_id not in state.records:
            continue  # ended, so what this plan computed for it lies beyond its end
        try:
            _publish(state, plan, slot, record.prefix, new)
        except InternalFault as fault:
            table.published[slot] = NO_CACHE
            wrong.append((record, fault))
    new.settle(state)
    if new.slots:
        count = len(new.slots)
        state.emit(PrefixPublished(state.clock.now_ns(), plan, count, count * state.pool.page_bytes))
    return wrong


def _publish(state: EngineState, plan: int, slot: int, prefix: RequestPrefix, new: _New) -> None:
    """Cache the complete blocks of one request."""
    table, size = state.table, state.limits.kv.page_tokens
    first, last = int(table.published[slot]), int(table.committed[slot]) // size
    tokens = table.tokens[slot, : last * size]
    _extend(prefix, tokens)
    _require_true(prefix, tokens, first)
    table.published[slot] = last
    blocks, keys, index = prefix.blocks, prefix.keys, state.prefix
    for at, page in enumerate(table.page_table[slot, first:last].tolist(), first):
        execution, _ = prefix.chain.acting(at * size)
        block = index.publish(blocks[-1] if blocks else None, keys[at], page, execution, plan)
        if block is None:  # its execution was dropped: nobody finds anything behind it
            table.published[slot] = NO_CACHE
            break
        blocks.append(block)
        if block.page == page:
            new.slots.append(slot)
            new.indices.append(at)
            new.numbers.append(block.number)
    if prefix.computing:
        made = set(keys[first:last])
        done = 0
        while done < len(prefix.computing) and prefix.computing[done] in made:
            done += 1
        _no_longer_computing(state, prefix, prefix.computing[:done])


def _require_true(prefix: RequestPrefix, tokens: I32, first: int) -> None:
    """Raise unless the keys that a client made, from block `first` on, are those of these tokens: no client's
    word is cached.
    """
    size = prefix.chain.page_tokens
    last = min(prefix.given, tokens.size // size)
    if first >= last:
        return
    parent = prefix.keys[first - 1] if first else prefix.root
    chain = KeyChain(parent, prefix.history, size, first * size)
    if chain.extend(tokens[first * size : last * size].astype("<i4").tobytes()) != prefix.keys[first:last]:
        raise InternalFault(
            ErrorCode.PREFIX_RECEIPT,
            f"the keys of blocks {first} to {last - 1} are not those of the prompt under its history",
        )


# ---------------------------------------------------------------- giving up


def give_up(state: EngineState, count: int, reason: str) -> None:
    """Forget `count` unreferenced blocks, longest unused first; their pages are free. reason: see
    `PrefixGivenUp`.
    """
    if count:
        _free(state, state.prefix.give_up(count), reason)


def drop(state: EngineState, entry: AdapterEntry) -> None:
    """Nothing made under an adapter is found again: it was revoked, or it leaves. What the base made alone
    stays.
    """
    if state.limits.prefix_cache and entry.execution != base_execution(state.limits.base_abi):
        _free(state, state.prefix.drop(bytes.fromhex(entry.execution)), "dropped")


def _free(state: EngineState, blocks: Sequence[CachedBlock], reason: str) -> None:
    """The pages of blocks that nobody finds and nobody reads; the last launch that may name each is its last
    reader's.
    """
    if not blocks:
        return
    pages = np.array([block.page for block in blocks], dtype=np.int32)
    numbers = np.array([block.number for block in blocks])
    last = np.array([block.last_launch for block in blocks])
    if state.limits.scrub:
        last = np.maximum(last, state.fence)
        state.deltas.scrub(pages)
    state.pool.release(pages, PageState.PREFIX, numbers, 0, last)
    state.reuse.given_up[reason] = state.reuse.given_up.get(reason, 0) + len(blocks)
    nbytes = len(blocks) * state.pool.page_bytes
    state.emit(PrefixGivenUp(state.clock.now_ns(), len(blocks), nbytes, reason))
