"""What the CUDA executor asks of attention: a bucket of decode requests that can be captured, and any mixed
step.

Both read lengths that the host knows and page lists that lie on the device (`StepInputs.indices`).
Specification: 0x03D; rulings "One page pool".
"""

from __future__ import annotations

from typing import Protocol

from loraplex.core.packed import I32
from loraplex.core.plan import BatchPlan
from loraplex.model.attention.backend import AttentionBatch
from loraplex.model.cuda.inputs import KvLengths


class BucketAttention(AttentionBatch, Protocol):
    """Attention of a fixed number of decode requests, one row each; captured once, prepared for each
    replay.
    """

    def prepare(self, lengths: KvLengths) -> None:
        """Tell the device about lengths, padding included, before a replay; enqueued on the current
        stream.
        """
        ...


class MixedAttention(AttentionBatch, Protocol):
    """Attention of a fixed number of rows: decode rows, then prefill rows, then padding; captured once."""

    def pad(self) -> None:
        """Tell the device about a step of padding alone, to capture over."""
        ...

    def prepare(self, rows: I32, lengths: KvLengths) -> None:
        """Tell the device about a step before a replay; enqueued on the current stream.

        rows: of each prefill request. lengths: of all requests in the plan's order, prefill first.
        """
        ...


class StepAttention(Protocol):
    """One way to attend on a device. `prepare`, `mixed` and `run` never wait for the device."""

    @property
    def backends(self) -> tuple[str, ...]:
        """Ways to run prefill rows, of which `mixed` chooses one for a step."""
        ...

    def mixed_on(self, backend: str, plan: BatchPlan, lengths: KvLengths) -> AttentionBatch:
        """`mixed` with the way named."""
        ...

    def bucket(self, size: int) -> BucketAttention:
        """Attention of `size` decode requests; made at start-up."""
        ...

    def mixed_bucket(self, rows: int, prefills: int) -> MixedAttention:
        """Attention of a captured step of `rows` rows with at most so many prefill requests; made at
        start-up.
        """
        ...

    def mixed(self, plan: BatchPlan, lengths: KvLengths) -> AttentionBatch:
        """Attention of a step that is not captured; to be called after the plan was sent and unpacked."""
        ...
