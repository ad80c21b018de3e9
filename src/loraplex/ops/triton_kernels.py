"""Triton kernels of the adapter branch: records, shrink, expand.

A *record* says what one program needs: where a factor's bytes are, how many rows and ranks, where Z goes.
Records of all layers are made once a step by `records_kernel`, so that in each layer one load stands between
a program and its factor bytes. A fixed grid walks a work list; no grid, constexpr or buffer shape depends on
the adapters of the batch.

`shrink_kernel` writes float32 partial sums of Z = X A^T, one per chunk of d_in. `expand_kernel` adds the
partials in one order, rounds Z once, and adds s * Z B^T to Y in float32, rounded once. There are no atomics:
one program owns each element of each buffer, and a row's result does not depend on the other rows.

Both kernels ask for factor bytes before they wait for the kernel in front of them (programmatic dependent
launch): factors of a published adapter do not change while a step runs. X, Z and Y are read after the wait
only.

Never here: choosing configurations (`triton_lora`), building work lists (`worklist`), where their words lie
(`work_layout`). Specification: 0x02E, 0x06C; rulings "Operators".
"""
# mypy: ignore-errors
# Triton wants compile-time conditions apart from run-time ones.
# ruff: noqa: SIM102

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from loraplex.ops import work_layout as layout

# A kernel reads a global only where it is a constexpr.
BLOCK_COUNT_AT = tl.constexpr(layout.BLOCK_COUNT_AT)
BLOCK_LISTED_AT = tl.constexpr(layout.BLOCK_LISTED_AT)
BLOCK_RECORD_AT = tl.constexpr(layout.BLOCK_RECORD_AT)
BLOCK_ROW0_AT = tl.constexpr(layout.BLOCK_ROW0_AT)
BLOCK_SLOT_AT = tl.constexpr(layout.BLOCK_SLOT_AT)
BLOCK_WORDS = tl.constexpr(layout.BLOCK_WORDS)
BLOCK_Z_AT = tl.constexpr(layout.BLOCK_Z_AT)
EXPAND_FLAGS_AT = tl.constexpr(layout.EXPAND_FLAGS_AT)
EXPAND_INDEX_AT64 = tl.constexpr(layout.EXPAND_INDEX_AT64)
EXPAND_LIST_AT = tl.constexpr(layout.EXPAND_LIST_AT)
EXPAND_RANK_AT = tl.constexpr(layout.EXPAND_RANK_AT)
EXPAND_SCALE_AT = tl.constexpr(layout.EXPAND_SCALE_AT)
EXPAND_WORDS = tl.constexpr(layout.EXPAND_WORDS)
HAS_C = tl.constexpr(layout.HAS_C)
HAS_G = tl.constexpr(layout.HAS_G)
HEAD_BLOCKS_AT = tl.constexpr(layout.HEAD_BLOCKS_AT)
LISTED_WORDS = tl.constexpr(layout.LISTED_WORDS)
META_COUNT_AT = tl.constexpr(layout.META_COUNT_AT)
META_LISTED_AT = tl.constexpr(layout.META_LISTED_AT)
META_ROW0_AT = tl.constexpr(layout.META_ROW0_AT)
META_WORDS = tl.constexpr(layout.META_WORDS)
META_Z_AT = tl.constexpr(layout.META_Z_AT)
MODULES = tl.constexpr(layout.MODULES)
SHRINK_LIST_AT = tl.constexpr(layout.SHRINK_LIST_AT)
SHRINK_VALID_AT = tl.constexpr(layout.SHRINK_VALID_AT)
SHRINK_WORDS = tl.constexpr(layout.SHRINK_WORDS)


@triton.jit(do_not_specialize=["layers", "block_cap", "record_cap"])
def records_kernel(
    head_ptr, blocks_ptr, address_ptr, rank_ptr, scale_ptr, flags_ptr, max_rank_ptr,
    meta_ptr, shrink_ptr, shrink64_ptr, expand_ptr, expand64_ptr,
    layers, block_cap, record_cap,
    D_IN: tl.constexpr, BASES: tl.constexpr,
    TILE: tl.constexpr, MAX_TILES: tl.constexpr,
):  # fmt: skip
    """One program a (block, layer): writes the block's shrink and expand records of that layer.

    D_IN: d_in of the seven modules. BASES: where the record list of each module's group begins.
    """
    block = tl.program_id(0)
    layer = tl.program_id(1)
    if block < tl.load(head_ptr + HEAD_BLOCKS_AT):
        head = blocks_ptr + block * BLOCK_WORDS
        slot = tl.load(head + BLOCK_SLOT_AT)
        count = tl.load(head + BLOCK_COUNT_AT)
        row0 = tl.load(head + BLOCK_ROW0_AT)
        word = tl.arange(0, LISTED_WORDS)
        rows = tl.load(head + BLOCK_LISTED_AT + word)
        at = tl.arange(0, MAX_TILES)
        for module in tl.static_range(MODULES):
            index = (slot.to(tl.int64) * layers + layer) * MODULES + module
            rank = tl.load(rank_ptr + index)
            a = tl.load(address_ptr + index * 2)
            b = tl.load(address_ptr + index * 2 + 1)
            tiles = tl.cdiv(tl.load(max_rank_ptr + slot * MODULES + module), TILE)
            z0 = tl.load(head + BLOCK_Z_AT + module)
            out = (layer.to(tl.int64) * block_cap + block) * MODULES + module
            split = b < 0
            tl.store(expand64_ptr + out * (EXPAND_WORDS // 2), tl.where(split, 0, b))
            tl.store(expand_ptr + out * EXPAND_WORDS + EXPAND_RANK_AT, rank)
            tl.store(expand_ptr + out * EXPAND_WORDS + EXPAND_SCALE_AT, tl.load(scale_ptr + index))
            tl.store(
                expand_ptr + out * EXPAND_WORDS + EXPAND_LIST_AT, tl.where(split, -1 - b, -1).to(tl.int32)
            )
            tl.store(expand_ptr + out * EXPAND_WORDS + EXPAND_FLAGS_AT, tl.load(flags_ptr + index))
            tl.store(expand64_ptr + out * (EXPAND_WORDS // 2) + EXPAND_INDEX_AT64, index)
            record = BASES[module] + tl.load(head + BLOCK_RECORD_AT + module) + at
            live = at < tiles
            to = layer.to(tl.int64) * record_cap + record
            split = a < 0
            address = tl.where(split, 0, a + at.to(tl.int64) * (TILE * D_IN[module]))
            tl.store(shrink64_ptr + to * (SHRINK_WORDS // 2), address, mask=live)
            valid = tl.minimum(tl.maximum(rank - at * TILE, 0), TILE)
            tl.store(shrink_ptr + to * SHRINK_WORDS + SHRINK_VALID_AT, valid, mask=live)
            list_at = tl.where(split, -1 - a + at * TILE, -1).to(tl.int32)
            tl.store(shrink_ptr + to * SHRINK_WORDS + SHRINK_LIST_AT, list_at, mask=live)
            if layer == 0:
                meta = meta_ptr + record.to(tl.int64) * META_WORDS
                tl.store(meta + META_COUNT_AT, tl.zeros_like(at) + count, mask=live)
                tl.store(meta + META_Z_AT, z0 + at * count, mask=live)
                tl.store(meta + META_ROW0_AT, tl.zeros_like(at) + row0, mask=live)
                two = record.to(tl.int64)[:, None] * META_WORDS + META_LISTED_AT + word[None, :]
                tl.store(meta_ptr + two, tl.zeros_like(two).to(tl.int32) + rows[None, :], mask=live[:, None])


@triton.jit
def _row_ids(rows16_ptr, row0, i, live, GATHER: tl.constexpr):
    """Row numbers [BM] of a block, 64-bit: listed one by one (decode) or consecutive (prefill)."""
    if GATHER:
        ids = tl.load(rows16_ptr + i, mask=live, other=0).to(tl.int64) & 0xFFFF
    else:
        ids = row0.to(tl.int64) + i
    return ids


@triton.jit
def _rank_rows(list_ptr, base, list_at, rank, stride, live, ALIGNED: tl.constexpr):
    """Element offsets [TILE] of the rank rows of a tile: one extent, or row by row where a factor is split
    over pages.
    """
    listed = tl.load(list_ptr + list_at + rank, mask=live & (list_at >= 0), other=0)
    offsets = tl.where(list_at >= 0, listed, base + rank * stride)
    if ALIGNED:
        offsets = tl.multiple_of(offsets, 8)
    return offsets


@triton.jit(do_not_specialize=["record_cap"])
def shrink_kernel(
    x_ptr, pool_ptr, z_ptr, head_ptr, meta_ptr, meta16_ptr, record_ptr, record64_ptr, list_ptr,
    x_stride, record_cap,
    COUNT_AT: tl.constexpr, D_IN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr,
    SPLITS: tl.constexpr, Z_SPLITS: tl.constexpr, GATHER: tl.constexpr, F32_DOT: tl.constexpr,
    PDL: tl.constexpr, STAGES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Z partials: z[row of Z, split, TILE] = sum over one chunk of d_in of x[row] * a[rank].

    x [rows, D_IN]; pool: the page pool as elements; z float32 [*, Z_SPLITS, TILE]. Work item = record x
    split.
    """
    item = tl.program_id(0)
    stride = tl.num_programs(0)
    i = tl.arange(0, BM)
    rank = tl.arange(0, TILE)
    total = tl.load(head_ptr + COUNT_AT) * SPLITS
    record = tl.minimum(item // SPLITS, record_cap - 1)
    count = tl.load(meta_ptr + record * META_WORDS + META_COUNT_AT)
    z_row = tl.load(meta_ptr + record * META_WORDS + META_Z_AT)
    row0 = tl.load(meta_ptr + record * META_WORDS + META_ROW0_AT)
    base = tl.load(record64_ptr + record * (SHRINK_WORDS // 2))
    valid = tl.load(record_ptr + record * SHRINK_WORDS + SHRINK_VALID_AT)
    list_at = tl.load(record_ptr + record * SHRINK_WORDS + SHRINK_LIST_AT)
    rows = _row_ids(meta16_ptr + record * (META_WORDS * 2) + META_LISTED_AT * 2, row0, i, i < BM, GATHER)
    while item < total:
        split = item % SPLITS
        if valid > 0:
            live = rank < valid
            mine = i < count
            a_rows = _rank_rows(list_ptr, base, list_at, rank, D_IN, live, D_IN % 8 == 0)
            k = split * (BK * STEPS) + tl.arange(0, BK)
            a_at = pool_ptr + a_rows[:, None] + k[None, :]
            x_at = x_ptr + (rows * x_stride)[:, None] + k[None, :]
            if STEPS == 1:
                inside = k < D_IN
                a = tl.load(a_at, mask=live[:, None] & inside[None, :], other=0.0)
                if PDL:
                    gdc_wait()
                    gdc_launch_dependents()
                x = tl.load(x_at, mask=mine[:, None] & inside[None, :], other=0.0)
                if F32_DOT:
                    acc = tl.dot(a.to(tl.float32), tl.trans(x.to(tl.float32)), input_precision="ieee")
                else:
                    acc = tl.dot(a, tl.trans(x), input_precision="ieee")
            else:
                if PDL:
                    gdc_wait()
                    gdc_launch_dependents()
                acc = tl.zeros([TILE, BM], dtype=tl.float32)
                for step in tl.range(0, STEPS, num_stages=STAGES):
                    inside = k + step * BK < D_IN
                    a = tl.load(a_at + step * BK, mask=live[:, None] & inside[None, :], other=0.0)
                    x = tl.load(x_at + step * BK, mask=mine[:, None] & inside[None, :], other=0.0)
                    if F32_DOT:
                        acc += tl.dot(a.to(tl.float32), tl.trans(x.to(tl.float32)), input_precision="ieee")
                    else:
                        acc = tl.dot(a, tl.trans(x), acc, input_precision="ieee")
            z_at = (z_row + i).to(tl.int64)[None, :] * (Z_SPLITS * TILE) + split * TILE + rank[:, None]
            tl.store(z_ptr + z_at, acc, mask=mine[None, :])
        item += stride
        record = tl.minimum(item // SPLITS, record_cap - 1)
        count = tl.load(meta_ptr + record * META_WORDS + META_COUNT_AT)
        z_row = tl.load(meta_ptr + record * META_WORDS + META_Z_AT)
        row0 = tl.load(meta_ptr + record * META_WORDS + META_ROW0_AT)
        base = tl.load(record64_ptr + record * (SHRINK_WORDS // 2))
        valid = tl.load(record_ptr + record * SHRINK_WORDS + SHRINK_VALID_AT)
        list_at = tl.load(record_ptr + record * SHRINK_WORDS + SHRINK_LIST_AT)
        rows = _row_ids(meta16_ptr + record * (META_WORDS * 2) + META_LISTED_AT * 2, row0, i, i < BM, GATHER)
    if PDL:
        # One program that waits is enough to keep this kernel from ending before the one in front of it.
        if tl.program_id(0) == 0:
            gdc_wait()


@triton.jit
def _add_product(acc, z, b, BM: tl.constexpr, F32_DOT: tl.constexpr):
    """acc + Z [BM, TILE] x B^T-tile [TILE, BN], both of the factors' type.

    Small blocks are multiplied transposed, acc [BN, BM]: columns on the long side of the matrix instruction,
    so that 8 rows waste nothing.
    """
    if F32_DOT:
        z = z.to(tl.float32)
        b = b.to(tl.float32)
    if BM < 16:
        acc = tl.dot(tl.trans(b), tl.trans(z), acc, input_precision="ieee")
    else:
        acc = tl.dot(z, b, acc, input_precision="ieee")
    return acc


@triton.jit
def _z_tile(
    z_ptr, z_row, i, mine, Z_SPLITS: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """Z of one rank tile, [BM, TILE] float32: the partial sums added in one order.

    Ranks beyond the true one hold what a shrink left there, so B's zeros must meet finite numbers: the shrink
    writes whole tiles.
    """
    rank = tl.arange(0, TILE)
    at = z_ptr + (z_row + i).to(tl.int64)[:, None] * (Z_SPLITS * TILE) + rank[None, :]
    if BM < 16:
        s = tl.arange(0, Z_SPLITS)
        keep = mine[:, None, None] & (s < SPLITS)[None, :, None]
        z = tl.sum(tl.load(at[:, None, :] + (s * TILE)[None, :, None], mask=keep, other=0.0), axis=1)
    else:
        z = tl.load(at, mask=mine[:, None], other=0.0)
        for split in tl.static_range(1, SPLITS):
            z += tl.load(at + split * TILE, mask=mine[:, None], other=0.0)
    return z


@triton.jit
def _inside(rows, n, d_out, EVEN: tl.constexpr):
    """Mask [rows, columns]; one column wide where no tile sticks out, which keeps loads vectorised."""
    if EVEN:
        return rows[:, None]
    else:
        return rows[:, None] & (n < d_out)[None, :]


@triton.jit
def _b_tile(
    pool_ptr, list_ptr, base, list_at, done, ranks, d_out, n, wanted, TILE: tl.constexpr, EVEN: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """[TILE, BN] of B-transposed from rank row `done` on; zeros where there is none or it is not wanted."""
    rank = tl.arange(0, TILE)
    live = (rank < ranks - done) & wanted
    at_list = tl.where(list_at >= 0, list_at + done, -1)
    rows = _rank_rows(list_ptr, base + done * d_out, at_list, rank, d_out, live, ALIGNED)
    return tl.load(pool_ptr + rows[:, None] + n[None, :], mask=_inside(live, n, d_out, EVEN), other=0.0)


@triton.jit
def _place(item, wide, run, T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr):
    """(block, module of the group, first tile, last tile) of an expand item; the first `wide` blocks go tile
    by tile.
    """
    is_wide = item < wide * (T0 + T1 + T2)
    length = tl.where(is_wide, 1, run)
    runs0 = tl.cdiv(T0, length)
    runs1 = tl.cdiv(T1, length)
    runs = runs0 + runs1 + tl.cdiv(T2, length)
    local = tl.where(is_wide, item, item - wide * (T0 + T1 + T2))
    block = local // runs + tl.where(is_wide, 0, wide)
    part = local % runs
    second = (part >= runs0).to(tl.int32)
    third = (part >= runs0 + runs1).to(tl.int32)
    first = (part - second * runs0 - third * runs1) * length
    tiles = tl.where(third == 1, T2, tl.where(second == 1, T1, T0))
    return block, second + third, first, tl.minimum(first + length, tiles)


@triton.jit
def _expand_record(record_ptr, record64_ptr, at):
    """(address of B, true rank, scale, address list or -1, flags) of an expand record."""
    word = record_ptr + at * EXPAND_WORDS
    scale = tl.load(word + EXPAND_SCALE_AT).to(tl.float32, bitcast=True)
    return (
        tl.load(record64_ptr + at * (EXPAND_WORDS // 2)),
        tl.load(word + EXPAND_RANK_AT),
        scale,
        tl.load(word + EXPAND_LIST_AT),
        tl.load(word + EXPAND_FLAGS_AT),
    )


@triton.jit
def _scale_and_shift(out, pool32_ptr, vector_ptr, record64_ptr, at, flags, n, d_out):
    """g * out + c for the columns n, where the record's flags say that there is a g or a c."""
    index = tl.load(record64_ptr + at * (EXPAND_WORDS // 2) + EXPAND_INDEX_AT64)
    g_at = tl.load(vector_ptr + index * 2)
    c_at = tl.load(vector_ptr + index * 2 + 1)
    g = tl.load(pool32_ptr + g_at + n, mask=(n < d_out) & ((flags & HAS_G) != 0), other=1.0)
    c = tl.load(pool32_ptr + c_at + n, mask=(n < d_out) & ((flags & HAS_C) != 0), other=0.0)
    return out * g[None, :] + c[None, :]


@triton.jit
def _expand_block(blocks_ptr, blocks16_ptr, block, module, i, BM: tl.constexpr, GATHER: tl.constexpr):
    """(rows in it, first row of Z of the module, row numbers [BM]) of a block."""
    head = blocks_ptr + block * BLOCK_WORDS
    listed = blocks16_ptr + block * (BLOCK_WORDS * 2) + BLOCK_LISTED_AT * 2
    rows = _row_ids(listed, tl.load(head + BLOCK_ROW0_AT), i, i < BM, GATHER)
    return tl.load(head + BLOCK_COUNT_AT), tl.load(head + BLOCK_Z_AT + module), rows


@triton.jit
def expand_kernel(
    y_ptr, pool_ptr, pool32_ptr, z_ptr, head_ptr, blocks_ptr, blocks16_ptr, record_ptr, record64_ptr,
    list_ptr, vector_ptr, y_stride,
    M0: tl.constexpr, M1: tl.constexpr, M2: tl.constexpr, FIRST_MODULE: tl.constexpr, WIDE_AT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, Z_SPLITS: tl.constexpr, GATHER: tl.constexpr,
    F32_DOT: tl.constexpr, PDL: tl.constexpr, VECTORS: tl.constexpr, TILE: tl.constexpr,
    MAX_RUN: tl.constexpr,
):  # fmt: skip
    """y[row, slice] = g * (y + s * Z B^T) + c.

    y [rows, M0 + M1 + M2]: outputs of up to three modules side by side. Work item = block x run of column
    tiles of one module. Runs are as long as the grid stays full (at most MAX_RUN tiles): Z is added up once
    for many columns where there is much to do, and work spreads where there is little. Blocks with several
    rank tiles, the first ones, go tile by tile. Columns are independent: the length of a run changes no
    result.
    """
    T0: tl.constexpr = (M0 + BN - 1) // BN
    T1: tl.constexpr = (M1 + BN - 1) // BN
    T2: tl.constexpr = (M2 + BN - 1) // BN
    TILES: tl.constexpr = T0 + T1 + T2
    ALIGNED: tl.constexpr = (M0 % 16 == 0) and (M1 % 16 == 0) and (M2 % 16 == 0)
    EVEN: tl.constexpr = (M0 % BN == 0) and (M1 % BN == 0) and (M2 % BN == 0)
    item = tl.program_id(0)
    stride = tl.num_programs(0)
    i = tl.arange(0, BM)
    blocks = tl.load(head_ptr + HEAD_BLOCKS_AT)
    wide = tl.minimum(tl.load(head_ptr + WIDE_AT), blocks)
    run = tl.minimum(tl.maximum(((blocks - wide) * TILES + stride - 1) // stride, 1), MAX_RUN)
    total = wide * TILES + (blocks - wide) * (tl.cdiv(T0, run) + tl.cdiv(T1, run) + tl.cdiv(T2, run))
    if PDL:  # one program that waits keeps this kernel from ending before the one in front of it
        if (item == 0) & (total == 0):
            gdc_wait()
    while item < total:
        block, module, first, last = _place(item, wide, run, T0, T1, T2)
        d_out = tl.where(module == 2, M2, tl.where(module == 1, M1, M0))
        column0 = tl.where(module == 2, M0 + M1, tl.where(module == 1, M0, 0))
        if ALIGNED:
            d_out = tl.multiple_of(d_out, 16)
            column0 = tl.multiple_of(column0, 16)
        at = block * MODULES + FIRST_MODULE + module
        base, ranks, scale, list_at, flags = _expand_record(record_ptr, record64_ptr, at)
        count, z_row, rows = _expand_block(
            blocks_ptr, blocks16_ptr, block, FIRST_MODULE + module, i, BM, GATHER
        )
        mine = (i < count) & ((ranks > 0) | (flags > 0))
        n = first * BN + tl.arange(0, BN)
        b = _b_tile(pool_ptr, list_ptr, base, list_at, 0, ranks, d_out, n, True, TILE, EVEN, ALIGNED)
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        y_rows = y_ptr + (rows * y_stride + column0)[:, None]
        y = tl.load(y_rows + n[None, :], mask=_inside(mine, n, d_out, EVEN), other=0.0)
        z0 = _z_tile(z_ptr, z_row, i, mine & (ranks > 0), Z_SPLITS, SPLITS, TILE, BM).to(b.dtype)
        for tile in tl.range(first, last, num_stages=1):
            next_n = n + BN
            if MAX_RUN > 1:
                go = tile + 1 < last
                next_b = _b_tile(
                    pool_ptr, list_ptr, base, list_at, 0, ranks, d_out, next_n, go, TILE, EVEN, ALIGNED
                )
                y_keep = _inside(mine & go, next_n, d_out, EVEN)
                next_y = tl.load(y_rows + next_n[None, :], mask=y_keep, other=0.0)
            acc = tl.zeros([BN, BM] if BM < 16 else [BM, BN], dtype=tl.float32)
            acc = _add_product(acc, z0, b, BM, F32_DOT)
            for done in tl.range(TILE, ranks, TILE, num_stages=1):
                b = _b_tile(
                    pool_ptr, list_ptr, base, list_at, done, ranks, d_out, n, True, TILE, EVEN, ALIGNED
                )
                z = _z_tile(z_ptr, z_row + done // TILE * count, i, mine, Z_SPLITS, SPLITS, TILE, BM)
                acc = _add_product(acc, z.to(b.dtype), b, BM, F32_DOT)
            if BM < 16:
                acc = tl.trans(acc)
            out = y.to(tl.float32) + acc * scale
            if VECTORS:
                if flags > 0:
                    out = _scale_and_shift(out, pool32_ptr, vector_ptr, record64_ptr, at, flags, n, d_out)
            tl.store(y_rows + n[None, :], out.to(y.dtype), mask=_inside(mine, n, d_out, EVEN))
            n = next_n
            if MAX_RUN > 1:
                b, y = next_b, next_y
        item += stride
