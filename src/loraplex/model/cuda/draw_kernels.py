"""Drawing a token of each row on the device, without sorting: thresholds by bisection over the bits of the
values.

`cut_kernel` finds what rows with min_p, top_k or top_p keep, one program a row; `draw_kernel` adds noise and
takes the best of each slice of each row, `pick_kernel` the best of all. Scaled logits are at most 0, so the
bits of their magnitude order them: a smaller key is a better token. The cut of top_k, then of top_p, is the
smallest key up to which enough tokens, or enough mass, lie; two bits are found in a pass over the row. Of
tokens with the cut's own key the ones with the lowest ids stay. What a row keeps and draws is what `truncate`
and `philox` define; noise is never drawn in sequence.

Never here: penalties and bias (`penalties`, `sampler`). Specification: rulings "Sampling".
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

ROW_WORDS = tl.constexpr(8)
TEMPERATURE = tl.constexpr(0)
FLOOR = tl.constexpr(1)
TOP_P = tl.constexpr(2)
TOP_K = tl.constexpr(3)
SEED_LOW = tl.constexpr(4)
SEED_HIGH = tl.constexpr(5)
POSITION = tl.constexpr(6)
SOURCE = tl.constexpr(7)
WORST = tl.constexpr(0x7FFFFFFF)
COMPLETE = tl.constexpr(1e-6)


@triton.jit
def _philox(c0, c1, k0, k1):
    """Philox4x32-10 of counter (c0, c1, 0, 0); all uint32."""
    c2 = tl.zeros_like(c0)
    c3 = tl.zeros_like(c0)
    for _ in tl.static_range(10):
        a = c0.to(tl.uint64) * 0xD2511F53
        b = c2.to(tl.uint64) * 0xCD9E8D57
        n0 = (b >> 32).to(tl.uint32) ^ c1 ^ k0
        n2 = (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = b.to(tl.uint32)
        c3 = a.to(tl.uint32)
        c0 = n0
        c2 = n2
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _gumbel(bits):
    """Standard Gumbel noise of 32 uniform bits: -log(-log1p(-v)), a series where v is small and the logarithm
    is not.
    """
    v = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    series = v * (1.0 + v * (0.5 + v * (0.33333334 + v * (0.25 + v * (0.2 + v * 0.16666667)))))
    inner = tl.where(v < 0.03125, series, -tl.log(1.0 - v))
    return -tl.log(inner)


@triton.jit
def _values(source, base, lane, top, temperature, VOCAB: tl.constexpr):
    """(scaled logits, keys, which lanes are tokens) of ids base + lane."""
    live = base + lane < VOCAB
    x = tl.load(source + base + lane, mask=live, other=float("-inf")).to(tl.float32)
    scaled = tl.div_rn(x - top, temperature)
    return scaled, scaled.to(tl.int32, bitcast=True) & WORST, live


@triton.jit
def _cut(
    source,
    top,
    temperature,
    wanted,
    limit,
    limit_ties,
    BY_MASS: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The smallest key up to which at least `wanted` lies.

    Amounts are tokens, or their mass, as float64. Tokens count below the key `limit`, and `limit_ties` of
    those at it.
    """
    lane = tl.arange(0, BLOCK)
    prefix = tl.zeros([], tl.int32)
    for step in tl.range(0, 16):
        shift = 30 - 2 * step
        unit = tl.full([], 1, tl.int32) << shift
        t0 = prefix | (unit - 1)
        t1 = t0 + unit
        t2 = t1 + unit
        s0 = tl.zeros([BLOCK], tl.float64)
        s1 = tl.zeros([BLOCK], tl.float64)
        s2 = tl.zeros([BLOCK], tl.float64)
        for base in tl.range(0, VOCAB, BLOCK):
            scaled, key, live = _values(source, base, lane, top, temperature, VOCAB)
            if BY_MASS:
                amount = tl.where(live & (key < limit), tl.exp(scaled), 0.0).to(tl.float64)
            else:
                amount = tl.where(live & (key < limit), 1.0, 0.0).to(tl.float64)
            s0 += tl.where(key <= t0, amount, 0.0)
            s1 += tl.where(key <= t1, amount, 0.0)
            s2 += tl.where(key <= t2, amount, 0.0)
        at_limit = limit_ties
        if BY_MASS:
            at_limit = limit_ties * tl.exp(-(limit.to(tl.float32, bitcast=True))).to(tl.float64)
        at_limit = tl.where(limit_ties > 0, at_limit, 0.0)
        a0 = tl.sum(s0, axis=0) + tl.where(t0 >= limit, at_limit, 0.0)
        a1 = tl.sum(s1, axis=0) + tl.where(t1 >= limit, at_limit, 0.0)
        a2 = tl.sum(s2, axis=0) + tl.where(t2 >= limit, at_limit, 0.0)
        # The first key has one bit here, not two: thresholds beyond 2^31 - 1 wrap and must not be chosen.
        later = tl.where((step == 0) | (a1 >= wanted), 1, tl.where(a2 >= wanted, 2, 3))
        digit = tl.where(a0 >= wanted, 0, later).to(tl.int32)
        prefix = prefix | (digit << shift)
    return prefix


@triton.jit
def _below(source, top, temperature, key_at, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """(tokens below a key, their mass, tokens at it), float64."""
    lane = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.float64)
    mass = tl.zeros([BLOCK], tl.float64)
    at = tl.zeros([BLOCK], tl.float64)
    for base in tl.range(0, VOCAB, BLOCK):
        scaled, key, live = _values(source, base, lane, top, temperature, VOCAB)
        below = live & (key < key_at)
        count += tl.where(below, 1.0, 0.0)
        mass += tl.where(below, tl.exp(scaled), 0.0).to(tl.float64)
        at += tl.where(live & (key == key_at), 1.0, 0.0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0), tl.sum(at, axis=0)


@triton.jit
def _top(tops_ptr, p, SPLITS: tl.constexpr):
    """A row's best logit, from the best of its slices."""
    return tl.max(tl.load(tops_ptr + p * SPLITS + tl.arange(0, SPLITS)), axis=0)


@triton.jit
def cut_kernel(
    logits_ptr,
    rows_ptr,
    tops_ptr,
    cuts_ptr,
    row_stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Program p: the key that cuts row p off and how many tokens with that key stay, int32 [n, 2].

    logits [*, >= VOCAB] of any floating type; rows int32 [n, 8], floats as bits, in the order of the
    constants above; tops float32 [n, SPLITS]. Floor: log of min_p. top_k 0 and top_p 1 are off.
    """
    p = tl.program_id(0)
    row = rows_ptr + p * ROW_WORDS
    temperature = tl.load(row + TEMPERATURE).to(tl.float32, bitcast=True)
    floor = tl.load(row + FLOOR).to(tl.float32, bitcast=True)
    top_p = tl.load(row + TOP_P).to(tl.float32, bitcast=True)
    top_k = tl.load(row + TOP_K)
    source = logits_ptr + tl.load(row + SOURCE).to(tl.int64) * row_stride
    top = _top(tops_ptr, p, SPLITS)

    cut = tl.full([], WORST, tl.int32)
    ties = tl.full([], 0.0, tl.float64)
    if floor > float("-inf"):
        # Tokens at the floor itself stay, so the cut is one key further and nothing lies at it.
        cut = (floor.to(tl.int32, bitcast=True) & WORST) + 1
    none = tl.full([], 0.0, tl.float64)
    if (top_k > 0) & (top_k < VOCAB):
        key = _cut(source, top, temperature, top_k.to(tl.float64), cut, none, False, VOCAB, BLOCK)
        if key < cut:
            count, mass, at = _below(source, top, temperature, key, VOCAB, BLOCK)
            cut = key
            ties = tl.minimum(top_k.to(tl.float64) - count, at)
    if top_p < 1.0:
        count, mass, at = _below(source, top, temperature, cut, VOCAB, BLOCK)
        weight = tl.exp(-(cut.to(tl.float32, bitcast=True))).to(tl.float64)
        target = (top_p.to(tl.float64) - COMPLETE) * (mass + tl.where(ties > 0, ties * weight, 0.0))
        key = _cut(source, top, temperature, target, cut, ties, True, VOCAB, BLOCK)
        if key <= cut:
            count, mass, at = _below(source, top, temperature, key, VOCAB, BLOCK)
            weight = tl.exp(-(key.to(tl.float32, bitcast=True))).to(tl.float64)
            wanted = tl.ceil((target - mass) / weight)
            allowed = tl.where(key == cut, ties, at)
            ties = tl.minimum(wanted, allowed)
            cut = key
    # The best token always stays.
    ties = tl.where(cut == 0, tl.maximum(ties, 1.0), ties)
    tl.store(cuts_ptr + 2 * p, cut)
    tl.store(cuts_ptr + 2 * p + 1, tl.maximum(ties, 0.0).to(tl.int32))


@triton.jit
def draw_kernel(
    logits_ptr,
    rows_ptr,
    tops_ptr,
    cuts_ptr,
    scores_ptr,
    ids_ptr,
    row_stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Program (p, s): the best score, with noise, of the kept tokens in slice s of row p, and the token that
    has it.

    scores float32, ids int32 [n, SPLITS]. Slices are whole blocks of four tokens, which share one counter.
    """
    p = tl.program_id(0)
    split = tl.program_id(1)
    PART: tl.constexpr = (VOCAB + SPLITS * 4 - 1) // (SPLITS * 4) * 4
    row = rows_ptr + p * ROW_WORDS
    temperature = tl.load(row + TEMPERATURE).to(tl.float32, bitcast=True)
    source = logits_ptr + tl.load(row + SOURCE).to(tl.int64) * row_stride
    k0 = tl.load(row + SEED_LOW).to(tl.uint32, bitcast=True)
    k1 = tl.load(row + SEED_HIGH).to(tl.uint32, bitcast=True)
    position = tl.load(row + POSITION).to(tl.uint32, bitcast=True)
    cut = tl.load(cuts_ptr + 2 * p)
    ties = tl.load(cuts_ptr + 2 * p + 1)
    top = _top(tops_ptr, p, SPLITS)
    lane = tl.arange(0, BLOCK)
    seen = tl.zeros([], tl.int32)
    if ties > 0:  # which of the tokens at the cut come before this slice
        for base in tl.range(0, split * PART, BLOCK):
            scaled, key, live = _values(source, base, lane, top, temperature, VOCAB)
            seen += tl.sum((live & (base + lane < split * PART) & (key == cut)).to(tl.int32), axis=0)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    chosen = tl.zeros([BLOCK], tl.int32) + VOCAB
    quad = tl.arange(0, BLOCK // 4)
    for base in tl.range(split * PART, split * PART + PART, BLOCK):
        scaled, key, live = _values(source, base, lane, top, temperature, VOCAB)
        live = live & (base + lane < split * PART + PART)
        equal = (live & (key == cut)).to(tl.int32)
        rank = seen + tl.cumsum(equal, axis=0) - equal
        seen += tl.sum(equal, axis=0)
        kept = live & ((key < cut) | ((equal > 0) & (rank < ties)))
        block = (base // 4 + quad).to(tl.uint32)
        w0, w1, w2, w3 = _philox(block, tl.zeros_like(block) + position, k0, k1)
        bits = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
        score = tl.where(kept, scaled + _gumbel(bits), float("-inf"))
        wins = score > best
        best = tl.where(wins, score, best)
        chosen = tl.where(wins, base + lane, chosen)
    final = tl.max(best, axis=0)
    tl.store(scores_ptr + p * SPLITS + split, final)
    tl.store(ids_ptr + p * SPLITS + split, tl.min(tl.where(best == final, chosen, VOCAB), axis=0))


@triton.jit
def pick_kernel(scores_ptr, ids_ptr, tokens_ptr, VOCAB: tl.constexpr, SPLITS: tl.constexpr):
    """Program p: the token of row p, int64 [n]; one that exists even where no logit is finite."""
    p = tl.program_id(0)
    lane = tl.arange(0, SPLITS)
    scores = tl.load(scores_ptr + p * SPLITS + lane)
    ids = tl.load(ids_ptr + p * SPLITS + lane)
    token = tl.min(tl.where(scores == tl.max(scores, axis=0), ids, VOCAB), axis=0)
    tl.store(tokens_ptr + p, tl.minimum(token, VOCAB - 1).to(tl.int64))
