"""FlashInfer over the page-major pool, in place: strided views of each layer, nothing copied.

Decode rows run on tensor cores with fa2, also in mixed steps, where they have a launch of their own. Prefill
chunks of captured steps run on fa2, others on fa3 where a step's chunks have 256 rows or more on average and
fa3 was built for the model's head dimension, else on fa2. Each wrapper exists twice, with staging of its own,
and the two take turns: planning step n + 1 on the host never writes what the copy of step n still reads. Both
of a pair share their device buffers, so a captured step follows either.

Measured: docs/notes/flashinfer.md. Specification: 0x03D; rulings "One page pool", "Dependencies".
"""

from __future__ import annotations

from typing import Any, Final

import flashinfer
import numpy as np
import torch

from loraplex.core.layout import KvShape
from loraplex.core.packed import I32, empty
from loraplex.core.plan import BatchPlan
from loraplex.model.cuda.inputs import KvLengths, StepInputs
from loraplex.model.cuda.rope_append import RopeAppend

FA3_ROWS: Final = 256
"""Rows of an average chunk from which fa3 is faster."""
FA3_HEAD_DIMS: Final = (128,)
FLOAT_WORKSPACE: Final = 384 << 20
INT_WORKSPACE: Final = 8 << 20
MIXED_INTS: Final = 1 << 20
LAYOUT: Final = "NHD"


class FlashInferAttention:
    """`StepAttention` of one model. window: positions that a row sees, -1 for all; one for all layers."""

    def __init__(
        self, kv: KvShape, dtype: torch.dtype, heads: int, window: int, rope: RopeAppend, inputs: StepInputs
    ) -> None:
        self.kv, self.dtype, self.heads, self.rope, self.inputs = kv, dtype, heads, rope, inputs
        device = inputs.device
        self.window = window
        self._workspace = torch.zeros(FLOAT_WORKSPACE, dtype=torch.uint8, device=device)
        self._bucket_ints = torch.empty(INT_WORKSPACE, dtype=torch.uint8, device=device)
        bounds = inputs.bounds
        self._indptr = torch.zeros(bounds.max_requests + 1, dtype=torch.int32, device=device)
        self._last = torch.zeros(bounds.max_requests, dtype=torch.int32, device=device)
        self._decode = [self._decoder() for _ in range(2)]
        self._prefill = {
            backend: [
                flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, LAYOUT, backend=backend)
                for _ in range(2)
            ]
            for backend in self.backends
        }
        self._turn = 0
        self._mixed_lengths = [
            [
                torch.zeros(most, dtype=torch.int32, device=device)
                for most in (requests + 1, requests + 1, requests)
            ]
            for requests in (bounds.max_requests, bounds.max_requests + 1)
        ]
        self._mixed_ints = [torch.empty(MIXED_INTS, dtype=torch.uint8, device=device) for _ in range(2)]
        self._mixed_decodes: dict[int, list[Any]] = {}
        self.mixed_turn = 0

    @property
    def backends(self) -> tuple[str, ...]:
        """Prefill backends that may be chosen."""
        return ("fa2", "fa3") if self.kv.head_dim in FA3_HEAD_DIMS and self.window < 0 else ("fa2",)

    def bucket(self, size: int) -> FlashInferBucket:
        """See `StepAttention.bucket`."""
        pair = []
        for _ in range(2):
            wrapper = self._decoder(
                use_cuda_graph=True,
                paged_kv_indptr_buffer=self._indptr[: size + 1],
                paged_kv_indices_buffer=self.inputs.indices,
                paged_kv_last_page_len_buffer=self._last[:size],
            )
            wrapper.reset_workspace_buffer(self._workspace, self._bucket_ints)
            pair.append(wrapper)
        return FlashInferBucket(self, pair)

    def mixed_bucket(self, rows: int, prefills: int) -> FlashInferMixedBucket:
        """See `StepAttention.mixed_bucket`."""
        return FlashInferMixedBucket(self, rows, prefills)

    def mixed(self, plan: BatchPlan, lengths: KvLengths) -> FlashInferMixed:
        """See `StepAttention.mixed`."""
        average = plan.doff / max(plan.prefills, 1)
        chosen = "fa3" if average >= FA3_ROWS and "fa3" in self._prefill else "fa2"
        return self.mixed_on(chosen, plan, lengths)

    def mixed_on(self, backend: str, plan: BatchPlan, lengths: KvLengths) -> FlashInferMixed:
        """`mixed` with the prefill backend named."""
        self._turn ^= 1
        prefills, doff = plan.prefills, plan.doff
        prefill = decode = None
        if prefills:
            prefill = self._prefill[backend][self._turn]
            prefill.plan(
                host(plan.prefill_indptr),
                host(lengths.indptr[: prefills + 1]),
                self.inputs.indices,
                host(lengths.last[:prefills]),
                self.heads,
                self.kv.kv_heads,
                self.kv.head_dim,
                self.kv.page_tokens,
                causal=True,
                window_left=self.window,
                q_data_type=self.dtype,
                kv_data_type=self.dtype,
            )
        if plan.decodes:
            decode = self._decode[self._turn]
            first = int(lengths.indptr[prefills])
            self.plan_decode(
                decode,
                lengths.indptr[prefills:] - first,
                self.inputs.indices[first:],
                lengths.last[prefills:],
            )
        return FlashInferMixed(self, prefill, decode, doff)

    def plan_decode(self, wrapper: Any, indptr: I32, indices: torch.Tensor, last: I32) -> None:
        """Plan a decode wrapper with host lengths."""
        wrapper.plan(
            host(indptr),
            indices,
            host(last),
            self.heads,
            self.kv.kv_heads,
            self.kv.head_dim,
            self.kv.page_tokens,
            window_left=self.window,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
        )

    def graph_prefills(self, requests: int, *, decode: bool) -> list[Any]:
        """A pair of wrappers for captured launches over so many requests; those of decode rows serve every
        bucket.
        """
        if decode and requests in self._mixed_decodes:
            return self._mixed_decodes[requests]
        begins, pages, last = self._mixed_lengths[0 if decode else 1]
        pair = []
        for _ in range(2):
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace,
                LAYOUT,
                backend="fa2",
                use_cuda_graph=True,
                qo_indptr_buf=begins[: requests + 1],
                paged_kv_indptr_buf=pages[: requests + 1],
                paged_kv_indices_buf=self.inputs.indices,
                paged_kv_last_page_len_buf=last[:requests],
            )
            wrapper.reset_workspace_buffer(self._workspace, self._mixed_ints[0 if decode else 1])
            pair.append(wrapper)
        if decode:
            self._mixed_decodes[requests] = pair
        return pair

    def plan_graph(self, wrapper: Any, requests: int, begins: I32, pages: I32, last: I32) -> None:
        """Plan a wrapper of `graph_prefills` with host lengths of fewer requests; the others get no row and
        no page.
        """
        more = requests + 1 - begins.size
        begins, pages = (np.concatenate([side, np.repeat(side[-1:], more)]) for side in (begins, pages))
        last = np.concatenate([last, np.zeros(more, np.int32)])
        wrapper.plan(
            host(begins),
            host(pages),
            self.inputs.indices[:0],
            host(last),
            self.heads,
            self.kv.kv_heads,
            self.kv.head_dim,
            self.kv.page_tokens,
            causal=True,
            window_left=self.window,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
            max_token_per_sequence=int(np.diff(begins).max()),
        )

    def _decoder(self, **options: Any) -> Any:
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, LAYOUT, use_tensor_cores=True, backend="fa2", **options
        )


def host(values: I32) -> torch.Tensor:
    """int32 values as a host tensor."""
    return torch.from_numpy(np.array(values, dtype=np.int32))


class FlashInferBucket:
    """`BucketAttention` of one bucket."""

    rotates: Final = True

    def __init__(self, owner: FlashInferAttention, wrappers: list[Any]) -> None:
        self._owner, self._wrappers = owner, wrappers
        self._turn = 0

    def prepare(self, lengths: KvLengths) -> None:
        """See `BucketAttention.prepare`. The page list is on the device already, so `plan` gets none."""
        self._turn ^= 1
        owner = self._owner
        owner.plan_decode(self._wrappers[self._turn], lengths.indptr, owner.inputs.indices[:0], lengths.last)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `AttentionBatch.run`."""
        self._owner.rope.run(layer, q)
        out: torch.Tensor = self._wrappers[self._turn].run(q, self._owner.rope.layer(layer))
        return out


class FlashInferMixed:
    """Attention of one step that is not captured."""

    rotates: Final = True

    def __init__(self, owner: FlashInferAttention, prefill: Any, decode: Any, doff: int) -> None:
        self._owner, self._prefill, self._decode, self._doff = owner, prefill, decode, doff

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `AttentionBatch.run`."""
        self._owner.rope.run(layer, q)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        paged = self._owner.rope.layer(layer)
        if self._prefill is not None:
            self._prefill.run(q[: self._doff], paged, out=out[: self._doff])
        if self._decode is not None:
            self._decode.run(q[self._doff :], paged, out=out[self._doff :])
        return out


class FlashInferMixedBucket:
    """`MixedAttention` of a captured step: one launch for all prefill rows, one for all decode rows.

    A request without keys stands before the prefill requests and covers the decode rows: what it writes
    there, decode attention, which follows, writes over.
    """

    rotates: Final = True

    def __init__(self, owner: FlashInferAttention, size: int, prefills: int) -> None:
        self._owner, self._size, self._prefills = owner, size, prefills
        bounds = owner.inputs.bounds
        self._decodes = min(size, bounds.max_requests)
        self._prefill = owner.graph_prefills(prefills + 1, decode=False)
        self._decode = owner.graph_prefills(self._decodes, decode=True)
        self._rows = (0, 0)
        self.pad()

    def pad(self) -> None:
        """See `MixedAttention.pad`. A wrapper's first plan sets the bounds of its launches, so it must be the
        largest.
        """
        for _ in range(2):
            self._plan(np.array([0, self._size], np.int32), empty(), KvLengths.padding(self._decodes))

    def prepare(self, rows: I32, lengths: KvLengths) -> None:
        """See `MixedAttention.prepare`."""
        decodes = lengths.totals.size - rows.size
        begins = np.zeros(rows.size + 2, np.int32)
        np.cumsum(rows, out=begins[2:])
        begins[1:] += decodes
        self._plan(begins, rows, lengths)

    def _plan(self, begins: I32, rows: I32, lengths: KvLengths) -> None:
        """begins: where the rows of the request without keys and of each prefill request begin, and where
        they end.
        """
        owner, prefills = self._owner, rows.size
        owner.mixed_turn ^= 1
        turn = owner.mixed_turn
        first = lengths.indptr[: prefills + 1]
        pages, last = np.concatenate([first[:1], first]), np.concatenate([[0], lengths.last[:prefills]])
        owner.plan_graph(self._prefill[turn], self._prefills + 1, begins, pages, last)
        decodes = lengths.totals.size - prefills
        one_each = np.arange(decodes + 1, dtype=np.int32)
        owner.plan_graph(
            self._decode[turn],
            self._decodes,
            one_each,
            lengths.indptr[prefills:],
            lengths.last[prefills:],
        )
        self._rows = (int(begins[-1]), decodes)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `AttentionBatch.run`."""
        owner, (rows, decodes) = self._owner, self._rows
        owner.rope.run(layer, q)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        paged = owner.rope.layer(layer)
        self._prefill[owner.mixed_turn].run(q[:rows], paged, out=out[:rows])
        if decodes:
            self._decode[owner.mixed_turn].run(q[:decodes], paged, out=out[:decodes])
        return out
