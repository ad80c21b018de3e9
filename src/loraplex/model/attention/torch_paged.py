"""Attention over the page pool in plain torch: the CPU's path, and the fallback where no fused kernel serves.

The pool is read as one matrix of rows, a row being the keys (or values) of one position in one layer.
Positions are gathered row by row with indices made once a step, so any page size costs the same and nothing
is ever read beyond a request's length: where requests of different length share a batch, the padding repeats
the request's own first visible row and is masked. Bytes of free pages and of a page's unused tail are not
touched by any read.

Prefill attends request by request; a chunk without history reads its own rows and gathers nothing. Decode
requests of similar length attend as one batch. Specification: 0x03D; rulings "One page pool".
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.layout import KvShape
from loraplex.model.attention.backend import Histories

I64 = npt.NDArray[np.int64]

PADDING_POSITIONS: Final = 512
"""Padded positions that cost about as much as one more attention call of a group of decode requests."""


class TorchPagedAttention:
    """Attention backend over `pool`, uint8 [pages, page_bytes], for one model.

    kv: shape of a KV page; a pool page is exactly one. dtype: of keys and values. windows [layers]: positions
    that a row sees, itself included; None is all. Raises `operator_layout`.
    """

    def __init__(
        self, pool: torch.Tensor, kv: KvShape, dtype: torch.dtype, heads: int, windows: tuple[int | None, ...]
    ) -> None:
        if pool.dtype is not torch.uint8 or not pool.is_contiguous() or pool.shape[1] != kv.page_bytes:
            raise InternalFault(
                ErrorCode.OPERATOR_LAYOUT,
                f"the pool must be contiguous uint8 pages of {kv.page_bytes} bytes, got {pool.dtype} "
                f"{tuple(pool.shape)}",
            )
        self.kv, self.heads, self.windows = kv, heads, windows
        self.rows = pool.view(-1).view(dtype).view(-1, kv.kv_heads * kv.head_dim)
        self._page_rows = kv.layers * 2 * kv.page_tokens

    def begin(self, histories: Histories) -> TorchPagedBatch:
        """See `AttentionBackend.begin`."""
        return TorchPagedBatch(self, histories)

    def row_index(self, pages: I64, positions: I64) -> I64:
        """Row of the pool that holds the keys of layer 0 at each position. pages: page of each position."""
        return pages * self._page_rows + positions % self.kv.page_tokens

    def key_row(self, layer: int) -> int:
        """Rows from a position's keys in layer 0 to its keys in `layer`; values lie `page_tokens` rows
        further.
        """
        return layer * 2 * self.kv.page_tokens


@dataclass(frozen=True, slots=True)
class _Gather:
    """Rows to read, for keys and then for values, and where to put them. buffer: [2, batch, n, kv_heads,
    head_dim].
    """

    index: torch.Tensor
    buffer: torch.Tensor

    def read(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [batch, kv_heads, n, head_dim] from the pool rows of one layer."""
        torch.index_select(rows, 0, self.index, out=self.buffer.view(-1, rows.shape[1]))
        return self.buffer[0].transpose(1, 2), self.buffer[1].transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One request's chunk: rows lo to hi. gather: its visible history, None where its own rows are
    all of it.
    """

    lo: int
    hi: int
    gather: _Gather | None
    mask: torch.Tensor | None

    @property
    def causal(self) -> bool:
        """Whether the plain causal triangle is the mask."""
        return self.mask is None and self.gather is None


@dataclass(frozen=True, slots=True)
class _Decode:
    """Decode requests of similar length. rows: int64 [B] packed rows, or None where they are `span`."""

    span: slice
    rows: torch.Tensor | None
    gather: _Gather
    mask: torch.Tensor | None


@dataclass
class _Work:
    """What the requests of a step read under one window, made when it is first wanted."""

    batch: TorchPagedBatch
    window: int | None

    @functools.cached_property
    def prefills(self) -> tuple[_Prefill, ...]:
        """Of the prefill requests."""
        return self.batch.prepare_prefills(self.window)

    @functools.cached_property
    def decodes(self) -> tuple[_Decode, ...]:
        """Of the decode requests."""
        return self.batch.prepare_decodes(self.window)


class TorchPagedBatch:
    """One step's attention; made by `TorchPagedAttention.begin`."""

    rotates: Final = False

    def __init__(self, owner: TorchPagedAttention, histories: Histories) -> None:
        self._owner, self._histories = owner, histories
        self._device, self._dtype = owner.rows.device, owner.rows.dtype
        self._indptr = histories.indptr.tolist()
        starts = np.repeat(histories.kv_start.astype(np.int64) - histories.indptr[:-1], histories.rows)
        positions = np.arange(self._indptr[-1], dtype=np.int64) + starts
        requests = np.repeat(np.arange(histories.rows.size), histories.rows)
        pages = histories.pages[requests, positions // owner.kv.page_tokens].astype(np.int64)
        self._append_index = owner.row_index(pages, positions)
        self._append: torch.Tensor | None = None
        self._work: dict[int | None, _Work] = {}

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `AttentionBatch.run`."""
        owner = self._owner
        first, width = owner.key_row(layer), owner.rows.shape[1]
        rows = owner.rows[first:]
        if self._append is None:
            self._append = self._tensor(self._append_index)
        rows.index_copy_(0, self._append, k.reshape(-1, width))
        rows[owner.kv.page_tokens :].index_copy_(0, self._append, v.reshape(-1, width))
        window = owner.windows[layer]
        work = self._prepared(window)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for prefill in work.prefills:
            self._run_prefill(prefill, rows, q, k, v, out)
        for decode in work.decodes:
            self._run_decode(decode, rows, q, out)
        return out

    def run_prefills(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None:
        """The prefill rows of `run` alone, into out [T, heads, head_dim]; keys and values have been
        appended.
        """
        owner = self._owner
        rows = owner.rows[owner.key_row(layer) :]
        for prefill in self._prepared(owner.windows[layer]).prefills:
            self._run_prefill(prefill, rows, q, k, v, out)

    @property
    def pool_at(self) -> int:
        """Address of the page pool."""
        return self._owner.rows.data_ptr()

    @property
    def histories(self) -> Histories:
        """Whose rows the step's rows are."""
        return self._histories

    def _run_prefill(
        self,
        work: _Prefill,
        rows: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        part = slice(work.lo, work.hi)
        if work.gather is None:
            keys, values = k[part].transpose(0, 1)[None], v[part].transpose(0, 1)[None]
        else:
            keys, values = work.gather.read(rows)
        queries = q[part].transpose(0, 1)[None]
        grouped = queries.shape[1] != keys.shape[1]
        result = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=work.mask, is_causal=work.causal, enable_gqa=grouped
        )
        out[part] = result[0].transpose(0, 1)

    def _run_decode(self, work: _Decode, rows: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
        # The query heads that share a key head take the place of query rows: one small product instead of
        # copies.
        keys, values = work.gather.read(rows)
        batch, kv_heads, _, head_dim = keys.shape
        queries = q[work.span] if work.rows is None else q[work.rows]
        queries = queries.reshape(batch, kv_heads, -1, head_dim)
        result = F.scaled_dot_product_attention(queries, keys, values, attn_mask=work.mask)
        result = result.reshape(batch, -1, head_dim)
        if work.rows is None:
            out[work.span] = result
        else:
            out.index_copy_(0, work.rows, result)

    def _prepared(self, window: int | None) -> _Work:
        work = self._work.get(window)
        if work is None:
            work = self._work[window] = _Work(self, window)
        return work

    def prepare_prefills(self, window: int | None) -> tuple[_Prefill, ...]:
        """What the prefill requests read under a window."""
        return tuple(self._prefill(request, window) for request in range(self._histories.prefills))

    def prepare_decodes(self, window: int | None) -> tuple[_Decode, ...]:
        """What the decode requests read under a window."""
        count = self._histories.rows.size
        return tuple(self._decode(group, window) for group in self._decode_groups(count, window))

    def _prefill(self, request: int, window: int | None) -> _Prefill:
        start, rows = int(self._histories.kv_start[request]), int(self._histories.rows[request])
        lo, end = self._indptr[request], start + rows
        first = 0 if window is None else max(0, start - window + 1)
        gather = None
        if start > 0:
            gather = self._gather(np.array([request]), np.arange(first, end, dtype=np.int64)[None])
        else:
            first = 0
        mask = None
        if (start > 0 and rows > 1) or (window is not None and window < end - first):
            mask = self._causal_mask(start, rows, first, end, window)
        return _Prefill(lo, lo + rows, gather, mask)

    def _causal_mask(self, start: int, rows: int, first: int, end: int, window: int | None) -> torch.Tensor:
        """[rows, end - first]: 0 where a row sees a position, -inf elsewhere."""
        query = torch.arange(start, start + rows, device=self._device)[:, None]
        key = torch.arange(first, end, device=self._device)[None, :]
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        return torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(
            hidden, float("-inf")
        )

    def _visible(self, requests: I64, window: int | None) -> tuple[I64, I64]:
        """First visible position and number of visible positions of decode requests."""
        end = self._histories.kv_start[requests].astype(np.int64) + 1
        first = np.zeros_like(end) if window is None else np.maximum(end - window, 0)
        return first, end - first

    def _decode_groups(self, count: int, window: int | None) -> list[I64]:
        """Decode requests in groups of similar length, longest first; one group in packed order where that is
        cheap.
        """
        requests = np.arange(self._histories.prefills, count, dtype=np.int64)
        if requests.size == 0:
            return []
        lengths = self._visible(requests, window)[1]
        order = np.argsort(-lengths, kind="stable")
        groups: list[I64] = []
        begin, padding = 0, 0
        for index, length in enumerate(lengths[order].tolist()):
            padding += int(lengths[order[begin]]) - length
            if padding > PADDING_POSITIONS:
                groups.append(np.sort(requests[order[begin:index]]))
                begin, padding = index, 0
        groups.append(np.sort(requests[order[begin:]]))
        return groups

    def _decode(self, requests: I64, window: int | None) -> _Decode:
        first, length = self._visible(requests, window)
        longest = int(length.max())
        column = np.arange(longest, dtype=np.int64)[None, :]
        padding = column >= length[:, None]
        gather = self._gather(requests, np.where(padding, first[:, None], first[:, None] + column))
        mask = None
        if padding.any():
            hidden = torch.from_numpy(padding).to(self._device)[:, None, None, :]
            mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
            mask.masked_fill_(hidden, float("-inf"))
        packed = self._histories.indptr[requests]
        span = slice(int(packed[0]), int(packed[0]) + requests.size)
        contiguous = int(packed[-1]) - int(packed[0]) + 1 == requests.size
        return _Decode(span, None if contiguous else self._tensor(packed.astype(np.int64)), gather, mask)

    def _gather(self, requests: I64, positions: I64) -> _Gather:
        """Reader of `positions` [B, n] of `requests` [B]."""
        owner = self._owner
        pages = self._histories.pages[requests[:, None], positions // owner.kv.page_tokens].astype(np.int64)
        keys = owner.row_index(pages, positions).reshape(-1)
        index = self._tensor(np.concatenate([keys, keys + owner.kv.page_tokens]))
        shape = (2, *positions.shape, owner.kv.kv_heads, owner.kv.head_dim)
        return _Gather(index, torch.empty(shape, dtype=self._dtype, device=self._device))

    def _tensor(self, values: I64) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)
