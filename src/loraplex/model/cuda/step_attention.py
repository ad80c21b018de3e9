"""What the CUDA executor asks of attention: a bucket of decode requests that can be captured, and any mixed step.

Both read lengths that the host knows and page lists that lie on the device (`StepInputs.indices`).
Specification: 0x03D; rulings "One page pool".
"""

from __future__ import annotations

from typing import Protocol

import torch

from loraplex.core.plan import BatchPlan
from loraplex.model.attention.backend import AttentionBatch
from loraplex.model.cuda.inputs import KvLengths


class BucketAttention(AttentionBatch, Protocol):
    """Attention of a fixed number of decode requests, one row each; captured once, prepared for each replay."""

    def prepare(self, lengths: KvLengths) -> None:
        """Tell the device about lengths, padding included, before a replay; enqueued on the current stream."""
        ...


class MixedAttention(AttentionBatch, Protocol):
    """Attention of one step that is not captured as a whole."""

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """Attend from rotated q to what was appended; q, out: [T, heads, head_dim]."""
        ...


class StepAttention(Protocol):
    """One way to attend on a device. `prepare`, `mixed` and `run` never wait for the device."""

    @property
    def backends(self) -> tuple[str, ...]:
        """Ways to run prefill rows, of which `mixed` chooses one for a step."""
        ...

    def mixed_on(self, backend: str, plan: BatchPlan, lengths: KvLengths) -> MixedAttention:
        """`mixed` with the way named."""
        ...

    def append(self, layer: int, q: torch.Tensor) -> None:
        """Rotate q, rotate k and append k and v; can be captured. q: first part of a fused qkv, as in `RopeAppend.run`."""
        ...

    def bucket(self, size: int) -> BucketAttention:
        """Attention of `size` decode requests; made at start-up."""
        ...

    def mixed(self, plan: BatchPlan, lengths: KvLengths) -> MixedAttention:
        """Attention of a step that is not captured; to be called after the plan was sent and unpacked."""
        ...
