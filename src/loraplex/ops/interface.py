"""What every adapter operator offers to the model: one interface, whichever family runs behind it.

Per row, with the adapter bound to it by the plan,

    y = g * ((x * h) W^T + b + s (x A^T) B^T) + c

The model computes `(x * h) W^T + b` with its dense projection, b being the base's own bias where it has one;
an operator supplies the rest in place, and c is relative to that (`identity.kernel.CONSTANT`). Rows of the
base (adapter slot 0) are never written. Factors are read where they lie, in the page pool.

Numbers: sums run in float32, `Z = x A^T` is rounded once to the model's dtype, the scale stays float32, and y
is read, updated in float32 and rounded once.

This module never chooses a family (`dispatch`) and never owns memory (`table`). Specification: 0x02, 0x02F,
0x06C; rulings "Operators".
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

import torch

from loraplex.core.ids import Module
from loraplex.ops.dims import ModuleDims

__all__ = ["AdapterOps", "ModuleDims", "NoAdapters", "RowSet"]


class RowSet(IntEnum):
    """Which rows of the plan the first dimension of x and y counts."""

    ALL = 0
    """All packed rows, in packed order."""
    LOGIT = 1
    """The plan's `logit_rows`, in that order (for the head)."""


class AdapterOps(Protocol):
    """The adapter branch of one plan. Made once for each step by `dispatch.make_operator`.

    Every method raises `InternalFault`: `operator_layout` where shapes, strides or dtypes disagree with the
    table, `operator_plan_unsupported` or `operator_rank_unsupported` where the family cannot serve the plan.
    """

    @property
    def active(self) -> bool:
        """Whether any row of the plan has an adapter. When false, no other method needs to be called."""
        ...

    @property
    def scales_input(self) -> bool:
        """Whether any adapter of the plan has an `h` vector. When false, `scale_input` need not be called."""
        ...

    def scale_input(
        self, x: torch.Tensor, layer: int, module: Module, rows: RowSet = RowSet.ALL
    ) -> torch.Tensor:
        """`x * h` for the dense projection of one module.

        x: [rows, d_in] of the model's dtype. Returns x itself when no row has an `h` here, so that a fused
        projection is split only where `scale_input(x, ...) is not x`; else a new tensor, rounded once.
        """
        ...

    def ahead(
        self, x: torch.Tensor, layer: int, modules: tuple[Module, ...], rows: RowSet = RowSet.ALL
    ) -> None:
        """Called with `apply`'s arguments before the dense projection, so that work may run beside it; x is
        final.
        """
        ...

    def apply(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        layer: int,
        modules: tuple[Module, ...],
        rows: RowSet = RowSet.ALL,
    ) -> None:
        """Add the low-rank update, then apply g and c, in place into y.

        y: [rows, sum of d_out of `modules`], their outputs side by side in the order given; x: [rows, d_in],
        the input before `h`. Both of the model's dtype with unit column stride. One call serves q, k and v,
        or gate and up. Layer is 0 for the head.
        """
        ...

    def embed(self, hidden: torch.Tensor, tokens: torch.Tensor) -> None:
        """Embedding adapters, in place: hidden = g * (hidden + s A[:, token]^T B^T) + c.

        hidden: [T, hidden size] of the model's dtype; tokens: [T] int64, every id inside the vocabulary.
        """
        ...


class NoAdapters:
    """The operator of a plan without adapter rows: does nothing."""

    active = False
    scales_input = False

    def scale_input(
        self, x: torch.Tensor, layer: int, module: Module, rows: RowSet = RowSet.ALL
    ) -> torch.Tensor:
        """x itself."""
        return x

    def ahead(
        self, x: torch.Tensor, layer: int, modules: tuple[Module, ...], rows: RowSet = RowSet.ALL
    ) -> None:
        """Nothing to start."""

    def apply(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        layer: int,
        modules: tuple[Module, ...],
        rows: RowSet = RowSet.ALL,
    ) -> None:
        """Leaves y as it is."""

    def embed(self, hidden: torch.Tensor, tokens: torch.Tensor) -> None:
        """Leaves hidden as it is."""
