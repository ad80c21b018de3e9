"""Triton kernels of a step outside the adapter branch: plan to device arrays, RoPE with append, argmax.

The packed plan lies on the device as the control plane made it; `deltas_kernel` and `unpack_kernel` find
their sections through its own section table, so a captured launch follows every later plan. Grids and
constexprs depend on the model and on the bucket only. Addresses into the pool are 64-bit. There are no
atomics; a row's result does not depend on the rows beside it.

Never here: which rows run (the plan), which launch is made when (`inputs`, `executor`). Specification: 0x03A,
0x03E; rulings "The plan", "One page pool", "Sampling".
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from loraplex.core.plan import PLAN_FORMAT, PageDeltaColumns, RequestColumns, SampleColumns

PREFILLS = tl.constexpr(PLAN_FORMAT.word_of("prefills"))
DOFF = tl.constexpr(PLAN_FORMAT.word_of("doff"))
TOKENS = tl.constexpr(PLAN_FORMAT.word_of("tokens"))
REQUESTS = tl.constexpr(PLAN_FORMAT.word_of("requests"))
PREFILL_INDPTR = tl.constexpr(PLAN_FORMAT.word_of("prefill_indptr"))
SAMPLES = tl.constexpr(PLAN_FORMAT.word_of("samples"))
PAGE_DELTAS = tl.constexpr(PLAN_FORMAT.word_of("page_deltas"))
REQUEST_WIDTH = tl.constexpr(RequestColumns.width)
REQUEST_SLOT = tl.constexpr(RequestColumns.slot)
REQUEST_KV_START = tl.constexpr(RequestColumns.kv_start)
REQUEST_ROWS = tl.constexpr(RequestColumns.rows)
SAMPLE_WIDTH = tl.constexpr(SampleColumns.width)
SAMPLE_LOGIT = tl.constexpr(SampleColumns.logit)
DELTA_WIDTH = tl.constexpr(PageDeltaColumns.width)
DELTA_SLOT = tl.constexpr(PageDeltaColumns.slot)
DELTA_INDEX = tl.constexpr(PageDeltaColumns.index)
DELTA_PAGE = tl.constexpr(PageDeltaColumns.page)


@triton.jit(do_not_specialize=["entries"])
def deltas_kernel(words_ptr, tables_ptr, entries, BLOCK: tl.constexpr):
    """Write the plan's page deltas into tables int32 [slots, entries]. Fixed grid, any number of deltas."""
    count = tl.load(words_ptr + PAGE_DELTAS + 1)
    first = words_ptr + tl.load(words_ptr + PAGE_DELTAS)
    at = tl.program_id(0) * BLOCK
    while at < count:
        i = at + tl.arange(0, BLOCK)
        live = i < count
        delta = first + DELTA_WIDTH * i
        slot = tl.load(delta + DELTA_SLOT, mask=live, other=0)
        index = tl.load(delta + DELTA_INDEX, mask=live, other=0)
        page = tl.load(delta + DELTA_PAGE, mask=live, other=0)
        tl.store(tables_ptr + slot.to(tl.int64) * entries + index, page, mask=live)
        at += tl.num_programs(0) * BLOCK


@triton.jit(do_not_specialize=["entries"])
def unpack_kernel(
    words_ptr,
    tables_ptr,
    sampled_ptr,
    kv_indptr_ptr,
    tokens_ptr,
    positions_ptr,
    pages_ptr,
    indices_ptr,
    entries,
    PAGE_TOKENS: tl.constexpr,
    DECODE_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a request: tokens (references resolved), positions and page of each of its rows, and its
    page list.

    sampled [*]: tokens of the plan that references point into. kv_indptr [R + 1]: where each request's pages
    go in indices. Outputs int32: tokens, positions, pages [T], indices [sum of pages]. A program beyond the
    plan's requests makes one padding row of a decode bucket: token 0 at position 0 of the null page.
    DECODE_FIRST: decode rows lie before prefill rows, and padding is `pad_kernel`'s.
    """
    r = tl.program_id(0)
    count = tl.load(words_ptr + REQUESTS + 1)
    prefills = tl.load(words_ptr + PREFILLS)
    doff = tl.load(words_ptr + DOFF)
    to = tl.load(kv_indptr_ptr + r)
    lane = tl.arange(0, BLOCK)
    if r < count:
        request = words_ptr + tl.load(words_ptr + REQUESTS) + r * REQUEST_WIDTH
        table = tables_ptr + tl.load(request + REQUEST_SLOT).to(tl.int64) * entries
        start = tl.load(request + REQUEST_KV_START)
        rows = tl.load(request + REQUEST_ROWS)
        begins = words_ptr + tl.load(words_ptr + PREFILL_INDPTR)
        row0 = tl.load(begins + r, mask=r < prefills, other=0)
        row0 = tl.where(r < prefills, row0, doff + r - prefills)
        to0 = row0
        if DECODE_FIRST:
            to0 = tl.where(r < prefills, row0 + count - prefills, r - prefills)
        tokens = words_ptr + tl.load(words_ptr + TOKENS)
        for base in tl.range(0, rows, BLOCK):
            i = base + lane
            live = i < rows
            token = tl.load(tokens + row0 + i, mask=live, other=0)
            referred = tl.load(sampled_ptr + (-1 - token), mask=live & (token < 0), other=0)
            position = start + i
            page = tl.load(table + position // PAGE_TOKENS, mask=live, other=0)
            tl.store(tokens_ptr + to0 + i, tl.where(token < 0, referred, token), mask=live)
            tl.store(positions_ptr + to0 + i, position, mask=live)
            tl.store(pages_ptr + to0 + i, page, mask=live)
        used = (start + rows + PAGE_TOKENS - 1) // PAGE_TOKENS
        for base in tl.range(0, used, BLOCK):
            i = base + lane
            page = tl.load(table + i, mask=i < used, other=0)
            tl.store(indices_ptr + to + i, page, mask=i < used)
    elif not DECODE_FIRST:
        tl.store(tokens_ptr + r, 0)
        tl.store(positions_ptr + r, 0)
        tl.store(pages_ptr + r, 0)
        tl.store(indices_ptr + to, 0)


@triton.jit
def pad_kernel(words_ptr, tokens_ptr, positions_ptr, pages_ptr, UPTO: tl.constexpr, BLOCK: tl.constexpr):
    """Rows from the plan's last to UPTO become padding: token 0 at position 0 of the null page."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    padding = (i >= tl.load(words_ptr + TOKENS + 1)) & (i < UPTO)
    zero = tl.zeros([BLOCK], tl.int32)
    tl.store(tokens_ptr + i, zero, mask=padding)
    tl.store(positions_ptr + i, zero, mask=padding)
    tl.store(pages_ptr + i, zero, mask=padding)


@triton.jit
def rope_append_kernel(
    qkv_ptr,
    keys_ptr,
    values_ptr,
    positions_ptr,
    pages_ptr,
    table_ptr,
    row_stride,
    PAGE_STRIDE: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rotate q in place, rotate k and copy v into the pool. One program a (row, block of heads of one kind).

    qkv [T, HEADS + 2 * KV_HEADS, 2 * HALF], rows `row_stride` elements apart. keys, values: layer views of
    the pool as elements, page p at p * PAGE_STRIDE, [PAGE_TOKENS, KV_HEADS, 2 * HALF]. table: float32
    [positions, 2 * HALF], cosines then sines. Rotation in float32, rounded once.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    Q_BLOCKS: tl.constexpr = (HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    KV_BLOCKS: tl.constexpr = (KV_HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    lane = tl.arange(0, HALF_BLOCK)
    head = tl.arange(0, HEAD_BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    position = tl.load(positions_ptr + row)
    page = tl.load(pages_ptr + row).to(tl.int64)
    into = page * PAGE_STRIDE + (position % PAGE_TOKENS) * (KV_HEADS * 2 * HALF)
    angle = table_ptr + position.to(tl.int64) * (2 * HALF) + lane
    cos = tl.load(angle, mask=lane < HALF, other=0.0)[None, :]
    sin = tl.load(angle + HALF, mask=lane < HALF, other=0.0)[None, :]
    if block < Q_BLOCKS:
        h = block * HEAD_BLOCK + head
        live = (h < HEADS)[:, None] & (lane < HALF)[None, :]
        at = qkv_ptr + row * row_stride + h[:, None] * (2 * HALF) + lane[None, :]
        low = tl.load(at, mask=live, other=0.0).to(tl.float32)
        high = tl.load(at + HALF, mask=live, other=0.0).to(tl.float32)
        tl.store(at, (low * cos - high * sin).to(qkv_ptr.dtype.element_ty), mask=live)
        tl.store(at + HALF, (high * cos + low * sin).to(qkv_ptr.dtype.element_ty), mask=live)
    else:
        is_value = block >= Q_BLOCKS + KV_BLOCKS
        h = (block - Q_BLOCKS - tl.where(is_value, KV_BLOCKS, 0)) * HEAD_BLOCK + head
        live = (h < KV_HEADS)[:, None] & (lane < HALF)[None, :]
        first = HEADS + tl.where(is_value, KV_HEADS, 0)
        at = qkv_ptr + row * row_stride + (first + h)[:, None] * (2 * HALF) + lane[None, :]
        low = tl.load(at, mask=live, other=0.0).to(tl.float32)
        high = tl.load(at + HALF, mask=live, other=0.0).to(tl.float32)
        to = into + h[:, None] * (2 * HALF) + lane[None, :]
        if is_value:
            tl.store(values_ptr + to, low.to(values_ptr.dtype.element_ty), mask=live)
            tl.store(values_ptr + to + HALF, high.to(values_ptr.dtype.element_ty), mask=live)
        else:
            tl.store(keys_ptr + to, (low * cos - high * sin).to(keys_ptr.dtype.element_ty), mask=live)
            tl.store(keys_ptr + to + HALF, (high * cos + low * sin).to(keys_ptr.dtype.element_ty), mask=live)


@triton.jit
def best_kernel(
    logits_ptr,
    values_ptr,
    ids_ptr,
    broken_ptr,
    row_stride,
    VOCAB: tl.constexpr,
    SAMPLED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Best of one slice of one row of logits: value, lowest id that has it, and whether any logit is not
    finite.

    logits [rows, VOCAB]; values float32, ids int32, broken int32, each [rows, SPLITS]. Ids from SAMPLED on
    never win.
    """
    row = tl.program_id(0)
    split = tl.program_id(1)
    PART: tl.constexpr = (VOCAB + SPLITS - 1) // SPLITS
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    at = tl.zeros([BLOCK], tl.int32) + SAMPLED
    broken = tl.zeros([BLOCK], tl.int32)
    source = logits_ptr + row.to(tl.int64) * row_stride
    for base in tl.range(0, PART, BLOCK):
        i = split * PART + base + lane
        live = (base + lane < PART) & (i < VOCAB)
        x = tl.load(source + i, mask=live, other=0.0).to(tl.float32)
        finite = tl.abs(x) < float("inf")
        broken = tl.where(live & (finite == 0), 1, broken)
        wins = live & finite & (i < SAMPLED) & (x > best)
        best = tl.where(wins, x, best)
        at = tl.where(wins, i, at)
    top = tl.max(best, axis=0)
    out = row * SPLITS + split
    tl.store(values_ptr + out, top)
    # A row without any finite logit still names a token that exists: it may be fed before its fault is known.
    tl.store(ids_ptr + out, tl.minimum(tl.min(tl.where(best == top, at, SAMPLED), axis=0), SAMPLED - 1))
    tl.store(broken_ptr + out, tl.max(broken, axis=0))


@triton.jit
def choose_kernel(
    words_ptr, values_ptr, ids_ptr, broken_ptr, sampled_ptr, finite_ptr, top_ptr, SPLITS: tl.constexpr
):
    """Program p: whether logit row p is finite, its best value, and the best token of the plan's sample p.

    finite int32 and top float32 [rows]; sampled int32 [samples], in the plan's sample order.
    """
    p = tl.program_id(0)
    lane = tl.arange(0, SPLITS)
    tl.store(finite_ptr + p, 1 - tl.max(tl.load(broken_ptr + p * SPLITS + lane), axis=0))
    tl.store(top_ptr + p, tl.max(tl.load(values_ptr + p * SPLITS + lane), axis=0))
    if p < tl.load(words_ptr + SAMPLES + 1):
        sample = words_ptr + tl.load(words_ptr + SAMPLES) + p * SAMPLE_WIDTH
        row = tl.load(sample + SAMPLE_LOGIT)
        values = tl.load(values_ptr + row * SPLITS + lane)
        ids = tl.load(ids_ptr + row * SPLITS + lane)
        best = tl.max(values, axis=0)
        tl.store(sampled_ptr + p, tl.min(tl.where(values == best, ids, 2147483647), axis=0))
