"""What the decoder and the runner ask of an attention backend: begin a step, then run each layer.

Specification: 0x03D (one dense projection, two attention paths); rulings "One page pool".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from loraplex.core.packed import I32


@dataclass(frozen=True, slots=True)
class Histories:
    """Whose rows a step's rows are and where their KV history lies; host numbers only.

    prefills: requests before `doff`, the first of them; the rest decode one row each. kv_start, rows [R]:
    positions before this step, rows of this step. pages [R, P]: page-table rows, valid for kv_start + rows
    positions.
    """

    prefills: int
    kv_start: I32
    rows: I32
    pages: I32

    @property
    def indptr(self) -> I32:
        """[R + 1] row boundaries."""
        out = np.zeros(self.rows.size + 1, dtype=np.int32)
        np.cumsum(self.rows, out=out[1:])
        return out


class AttentionBatch(Protocol):
    """Attention of one step."""

    @property
    def rotates(self) -> bool:
        """Whether `run` rotates q and k itself; else it gets them rotated."""
        ...

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Append k and v at the rows' positions, then attend causally inside each request.

        q: [T, heads, head_dim]; k, v: [T, kv_heads, head_dim]; rows may be strided, heads are contiguous, and
        all three are slices of one [T, heads + 2 * kv_heads, head_dim]. q and k may be rotated in place.
        Returns [T, heads, head_dim].
        """
        ...


class AttentionBackend(Protocol):
    """One way to attend over the page pool of a model."""

    def begin(self, histories: Histories) -> AttentionBatch:
        """Prepare what all layers of a step share. Called once a step, before any row is written."""
        ...
