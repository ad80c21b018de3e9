"""FlashInfer reads and writes the page-major pool in place.

Owns the proof behind rulings "One page pool": one flat buffer of equal pages, a page being
``[layers, 2, page_tokens, kv_heads, head_dim]``, is usable through strided per-layer views by decode,
fa2, fa3 and append, also where element offsets do not fit into 32 bits. Everything a request does not own
is NaN, so one read of a wrong page, or of the unwritten tail of a right one, shows in the output.
It never times anything; `docs/notes/flashinfer.md` has the figures.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
flashinfer = pytest.importorskip("flashinfer")

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
DEVICE = torch.device("cuda")
LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM = 32, 32, 8, 128
BEYOND_32_BITS = 1 << 32


@dataclass(frozen=True)
class Pool:
    """A flat poisoned buffer and its geometry. ``flat`` is uint8 [pages * page_bytes]."""

    flat: Tensor
    page_tokens: int
    layers: int = LAYERS

    @property
    def paged(self) -> Tensor:
        """bf16 [pages, layers, 2, page_tokens, kv_heads, head_dim], a view."""
        shape = (-1, self.layers, 2, self.page_tokens, KV_HEADS, HEAD_DIM)
        return self.flat.view(torch.bfloat16).view(*shape)

    @property
    def page_elements(self) -> int:
        return self.layers * 2 * self.page_tokens * KV_HEADS * HEAD_DIM

    @property
    def pages(self) -> int:
        return self.flat.numel() // (2 * self.page_elements)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Strided (k, v), each bf16 [pages, page_tokens, kv_heads, head_dim]; nothing is copied."""
        return self.paged[:, index, 0], self.paged[:, index, 1]

    def poison(self) -> None:
        self.flat.fill_(0xFF)


@dataclass(frozen=True)
class Batch:
    """A paged batch: host metadata, and the K/V it holds, float32 per request [tokens, heads, dim]."""

    q_lens: list[int]
    kv_lens: list[int]
    indptr: Tensor
    indices: Tensor
    last: Tensor
    keys: list[Tensor]
    values: list[Tensor]

    @property
    def qo_indptr(self) -> Tensor:
        return torch.tensor([0, *self.q_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def metadata(pool: Pool, kv_lens: list[int], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """indptr, indices, last_page_len on the host; pages scattered, the pool's last page first."""
    gen = torch.Generator().manual_seed(seed)
    counts = [-(-n // pool.page_tokens) for n in kv_lens]
    total = sum(counts)
    first = min(BEYOND_32_BITS // pool.page_elements + 1, pool.pages - total - 1)
    high = torch.randperm(pool.pages - 1 - first, generator=gen) + first
    indices = torch.cat([torch.tensor([pool.pages - 1]), high])[:total].to(torch.int32)
    indptr = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    last = [(n - 1) % pool.page_tokens + 1 if n else 0 for n in kv_lens]
    return indptr, indices, torch.tensor(last, dtype=torch.int32)


def fill(pool: Pool, layer: int, q_lens: list[int], kv_lens: list[int], seed: int) -> Batch:
    """Write random K/V for each request through plain torch indexing; tails stay poisoned."""
    indptr, indices, last = metadata(pool, kv_lens, seed)
    gen = torch.Generator(device=DEVICE).manual_seed(seed)
    k_pool, v_pool = pool.layer(layer)
    keys, values = [], []
    for i, tokens in enumerate(kv_lens):
        page_ids = indices[indptr[i] : indptr[i + 1]].to(DEVICE).long()
        made = []
        for side in (k_pool, v_pool):
            new = torch.randn(tokens, KV_HEADS, HEAD_DIM, device=DEVICE, generator=gen)
            new = new.to(torch.bfloat16)
            at = torch.arange(tokens, device=DEVICE)
            side[page_ids[at // pool.page_tokens], at % pool.page_tokens] = new
            made.append(new.float())
        keys.append(made[0])
        values.append(made[1])
    return Batch(q_lens, kv_lens, indptr, indices, last, keys, values)


def reference(q: Tensor, batch: Batch) -> Tensor:
    """Causal attention in float64, request by request; q [rows, q_heads, head_dim]."""
    outs, row = [], 0
    for q_len, k, v in zip(batch.q_lens, batch.keys, batch.values, strict=True):
        rows = q[row : row + q_len].double()
        row += q_len
        if k.shape[0] == 0:
            outs.append(torch.zeros_like(rows))
            continue
        group = Q_HEADS // KV_HEADS
        k64 = k.double().repeat_interleave(group, 1)
        v64 = v.double().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", rows, k64) / HEAD_DIM**0.5
        at = torch.arange(k.shape[0], device=DEVICE)
        limit = torch.arange(q_len, device=DEVICE) + k.shape[0] - q_len
        scores = scores.masked_fill(at[None, :] > limit[:, None], float("-inf"))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v64))
    return torch.cat(outs)


def relative_error(out: Tensor, ref: Tensor) -> float:
    return float((out.double() - ref).norm() / ref.norm())


def queries(rows: int, seed: int) -> Tensor:
    gen = torch.Generator(device=DEVICE).manual_seed(1000 + seed)
    return torch.randn(rows, Q_HEADS, HEAD_DIM, device=DEVICE, generator=gen).to(torch.bfloat16)


@pytest.fixture(scope="module")
def workspace() -> Tensor:
    return torch.zeros(128 << 20, dtype=torch.uint8, device=DEVICE)


@pytest.fixture(scope="module")
def flat() -> Tensor:
    """20 GiB: 2.5 times as many bf16 elements as 32 bits can address."""
    need = 20 << 30
    if torch.cuda.mem_get_info()[0] < need + (4 << 30):
        pytest.skip("needs 24 GiB of free device memory to pass offsets beyond 32 bits")
    return torch.empty(need, dtype=torch.uint8, device=DEVICE)


def pool_of(flat: Tensor, page_tokens: int) -> Pool:
    pool = Pool(flat, page_tokens)
    pool = Pool(flat[: pool.pages * pool.page_elements * 2], page_tokens)
    pool.poison()
    assert (pool.pages - 1) * pool.page_elements > BEYOND_32_BITS
    return pool


RAGGED_KV = [512, 1, 16, 17, 333, 1000, 15, 64]


def decode_wrapper(workspace: Tensor, batch: Batch, page_tokens: int, kind: str, graph: bool):
    """A planned decode wrapper; in graph mode the page list is already on the device."""
    n = len(batch.kv_lens)
    kwargs = {}
    indices: Tensor = batch.indices
    if graph:
        buffer = torch.zeros(4096, dtype=torch.int32, device=DEVICE)
        buffer[: len(batch.indices)] = batch.indices.to(DEVICE)
        indices = buffer[:0]
        kwargs = {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": torch.zeros(n + 1, dtype=torch.int32, device=DEVICE),
            "paged_kv_indices_buffer": buffer,
            "paged_kv_last_page_len_buffer": torch.zeros(n, dtype=torch.int32, device=DEVICE),
        }
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=kind != "cuda_cores", backend="fa2", **kwargs
    )
    wrapper.plan(
        batch.indptr,
        indices,
        batch.last,
        Q_HEADS,
        KV_HEADS,
        HEAD_DIM,
        page_tokens,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    return wrapper


@pytest.mark.parametrize("kind", ["cuda_cores", "tensor_cores"])
@pytest.mark.parametrize("page_tokens", [16, 1, 7, 64])
@pytest.mark.parametrize("graph", [False, True])
def test_decode_reads_pages_beyond_32_bits(flat, workspace, kind, page_tokens, graph) -> None:
    pool = pool_of(flat, page_tokens)
    batch = fill(pool, 31, [1] * len(RAGGED_KV), RAGGED_KV, seed=page_tokens)
    q = queries(len(RAGGED_KV), page_tokens)
    out = decode_wrapper(workspace, batch, page_tokens, kind, graph).run(q, pool.layer(31))
    assert relative_error(out, reference(q, batch)) < 8e-3


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
@pytest.mark.parametrize("page_tokens", [16, 1, 7, 64])
def test_prefill_reads_pages_beyond_32_bits(flat, workspace, backend, page_tokens) -> None:
    """Whole prompts, chunks behind a history, and decode rows in one causal batch."""
    pool = pool_of(flat, page_tokens)
    q_lens = [512, 1, 16, 5, 100, 1000, 15, 1]
    batch = fill(pool, 17, q_lens, RAGGED_KV, seed=page_tokens)
    q = queries(sum(q_lens), page_tokens)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
    wrapper.plan(
        batch.qo_indptr,
        batch.indptr,
        batch.indices,
        batch.last,
        Q_HEADS,
        KV_HEADS,
        HEAD_DIM,
        page_tokens,
        causal=True,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    out = wrapper.run(q, pool.layer(17))
    assert relative_error(out, reference(q, batch)) < 8e-3


@pytest.mark.parametrize("page_tokens", [16, 1, 7, 64])
def test_append_writes_its_rows_and_nothing_else(flat, page_tokens) -> None:
    """K and V come as column slices of a fused qkv projection; every other byte keeps its poison."""
    pool = pool_of(flat, page_tokens)
    new_lens = [512, 1, 16, 5, 100, 1000, 15, 1]
    indptr, indices, last = metadata(pool, RAGGED_KV, seed=3)
    rows = sum(new_lens)
    qkv = torch.randn(rows, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM, device=DEVICE).to(torch.bfloat16)
    k_at = Q_HEADS * HEAD_DIM
    v_at = k_at + KV_HEADS * HEAD_DIM
    key = qkv[:, k_at:v_at].view(rows, KV_HEADS, HEAD_DIM)
    value = qkv[:, v_at:].view(rows, KV_HEADS, HEAD_DIM)
    owner = torch.repeat_interleave(torch.arange(len(new_lens)), torch.tensor(new_lens)).int()
    pairs = zip(new_lens, RAGGED_KV, strict=True)
    position = torch.cat([torch.arange(kv - n, kv) for n, kv in pairs]).int()
    before = pool.flat[:: 4096 + 1].clone()
    flashinfer.append_paged_kv_cache(
        key,
        value,
        owner.to(DEVICE),
        position.to(DEVICE),
        pool.layer(5),
        indices.to(DEVICE),
        indptr.to(DEVICE),
        last.to(DEVICE),
        "NHD",
    )
    page = indices[indptr[owner.long()].long() + position.long() // page_tokens].long().to(DEVICE)
    entry = (position.long() % page_tokens).to(DEVICE)
    for side, new in zip(pool.layer(5), (key, value), strict=True):
        assert torch.equal(side[page, entry], new)
        side[page, entry] = (
            torch.full_like(new, float("nan")).view(torch.int16).fill_(-1).view(torch.bfloat16)
        )
    assert torch.equal(before, pool.flat[:: 4096 + 1])
    assert int((pool.flat.view(torch.int64) != -1).sum()) == 0


@pytest.mark.parametrize("kind", ["cuda_cores", "tensor_cores"])
def test_a_captured_graph_follows_a_new_plan(flat, workspace, kind) -> None:
    """One capture, replayed after `plan` with other lengths and pages, equals eager bit for bit."""
    pool = pool_of(flat, 16)
    first = fill(pool, 2, [1] * 8, RAGGED_KV, seed=11)
    wrapper = decode_wrapper(workspace, first, 16, kind, graph=True)
    q = queries(8, 11)
    out = torch.empty_like(q)
    wrapper.run(q, pool.layer(2), out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(q, pool.layer(2), out=out)
    for seed, lens in enumerate([[1] * 8, RAGGED_KV[::-1], [700, 3, 1, 1, 1, 1, 1, 900]]):
        pool.poison()
        batch = fill(pool, 2, [1] * 8, lens, seed=seed)
        indices = batch.indices.to(DEVICE)
        wrapper._paged_kv_indices_buf[: len(indices)].copy_(indices)
        wrapper.plan(
            batch.indptr,
            wrapper._paged_kv_indices_buf[:0],
            batch.last,
            Q_HEADS,
            KV_HEADS,
            HEAD_DIM,
            16,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        out.fill_(float("nan"))
        graph.replay()
        assert relative_error(out, reference(q, batch)) < 8e-3


def test_null_page_rows_give_numbers(flat, workspace) -> None:
    """Padding rows of a decode bucket point at page 0, one position long; real rows do not notice."""
    pool = pool_of(flat, 16)
    batch = fill(pool, 0, [1] * 8, RAGGED_KV, seed=5)
    for side in pool.layer(0):
        side[0].zero_()
    pad = 8
    indptr = torch.cat([batch.indptr, batch.indptr[-1] + torch.arange(1, pad + 1, dtype=torch.int32)])
    indices = torch.cat([batch.indices, torch.zeros(pad, dtype=torch.int32)])
    last = torch.cat([batch.last, torch.ones(pad, dtype=torch.int32)])
    padded = Batch([1] * 16, RAGGED_KV + [1] * pad, indptr, indices, last, [], [])
    q = queries(16, 5)
    for kind in ("cuda_cores", "tensor_cores"):
        out = decode_wrapper(workspace, padded, 16, kind, graph=True).run(q, pool.layer(0))
        assert relative_error(out[:8], reference(q[:8], batch)) < 8e-3
        assert int(out[8:].count_nonzero()) == 0


@pytest.mark.parametrize("rows", [1, 64, 3000])
def test_norm_rope_and_activation(rows) -> None:
    """Fused add + RMSNorm, RoPE from our own cos/sin table on fused qkv slices, SiLU and multiply."""
    gen = torch.Generator(device=DEVICE).manual_seed(rows)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE, generator=gen).to(torch.bfloat16)

    hidden = Q_HEADS * HEAD_DIM
    x, residual, weight = rand(rows, hidden), rand(rows, hidden), rand(hidden)
    total = x.double() + residual.double()
    rounded = total.to(torch.bfloat16)
    normed = total / (total.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    flashinfer.fused_add_rmsnorm(x, residual, weight, 1e-5)
    assert torch.equal(residual, rounded)
    assert relative_error(x, normed) < 5e-3
    plain = rounded.double()
    plain = plain / (plain.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert relative_error(flashinfer.rmsnorm(rounded, weight, 1e-5), plain) < 5e-3

    angles = torch.rand(4096, HEAD_DIM // 2, device=DEVICE, generator=gen).double() * 6.28
    table = torch.cat([angles.cos(), angles.sin()], 1).float()
    position = torch.randint(0, 4096, (rows,), device=DEVICE, generator=gen, dtype=torch.int32)
    qkv = rand(rows, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM)
    before = qkv.clone()
    flashinfer.apply_rope_with_cos_sin_cache_inplace(
        position, qkv[:, :hidden], qkv[:, hidden : hidden + KV_HEADS * HEAD_DIM], HEAD_DIM, table, True
    )
    rotated = before[:, : hidden + KV_HEADS * HEAD_DIM].double().view(rows, -1, HEAD_DIM)
    cos, sin = angles[position.long()].cos()[:, None], angles[position.long()].sin()[:, None]
    low, high = rotated.chunk(2, -1)
    want = torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
    assert relative_error(qkv[:, : hidden + KV_HEADS * HEAD_DIM].reshape(rows, -1, HEAD_DIM), want) < 5e-3
    assert torch.equal(qkv[:, hidden + KV_HEADS * HEAD_DIM :], before[:, hidden + KV_HEADS * HEAD_DIM :])

    gate_up = rand(rows, 2 * 14336)
    gate, up = gate_up.double().chunk(2, -1)
    assert relative_error(flashinfer.silu_and_mul(gate_up), gate / (1 + (-gate).exp()) * up) < 5e-3
