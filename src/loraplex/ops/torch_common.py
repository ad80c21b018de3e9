"""What the torch families share: layout checks, the outer loop over modules, vectors, and the embedding
gather.

A family supplies `_module`, the low-rank update of one module; everything around it is the same for all of
them. Specification: 0x02, 0x02F; rulings "Operators".
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.ids import Module
from loraplex.core.layout import Factor
from loraplex.core.plan import BatchPlan
from loraplex.ops.interface import RowSet
from loraplex.ops.rows import RowGroups, row_groups
from loraplex.ops.table import AdapterTable, ResidentAdapter, ResidentModule


def _check_matrix(name: str, t: torch.Tensor, rows: int, columns: int, dtype: torch.dtype) -> None:
    if t.shape != (rows, columns) or t.dtype is not dtype or (t.shape[1] > 1 and t.stride(1) != 1):
        raise InternalFault(
            ErrorCode.OPERATOR_LAYOUT,
            f"{name} must be {dtype} [{rows}, {columns}] with unit column stride, got {t.dtype} "
            f"{tuple(t.shape)} with "
            f"strides {t.stride()}",
        )


def check_operands(
    table: AdapterTable, y: torch.Tensor, x: torch.Tensor, modules: tuple[Module, ...], rows: int
) -> list[int]:
    """Column boundaries of the modules' outputs in y, [modules + 1]; raises `operator_layout`."""
    dims = table.modules.dims
    bounds = [0]
    for module in modules:
        if module not in dims or dims[module][0] != dims[modules[0]][0]:
            raise InternalFault(
                ErrorCode.OPERATOR_LAYOUT, f"modules {[m.name for m in modules]} do not share one known input"
            )
        bounds.append(bounds[-1] + dims[module][1])
    _check_matrix("x", x, rows, dims[modules[0]][0], table.dtype)
    _check_matrix("y", y, rows, bounds[-1], table.dtype)
    return bounds


def shrink(x: torch.Tensor, module: ResidentModule) -> torch.Tensor:
    """Z = x A^T, summed in float32 and rounded once. x: [n, d_in] -> [n, rank] of x's dtype."""
    pieces = module.pieces(Factor.A)
    if len(pieces) == 1:
        return (x.float() @ pieces[0].view.float().T).to(x.dtype)
    z = torch.zeros((x.shape[0], module.rank), dtype=torch.float32, device=x.device)
    for piece in pieces:
        columns = x[:, piece.col_lo : piece.col_lo + piece.col_n].float()
        z[:, piece.rank_lo : piece.rank_lo + piece.rank_n] += columns @ piece.view.float().T
    return z.to(x.dtype)


def expand(z: torch.Tensor, module: ResidentModule, d_out: int) -> torch.Tensor:
    """s Z B^T in float32. z: [n, rank] -> [n, d_out]."""
    pieces = module.pieces(Factor.B)
    wide = z.float()
    if len(pieces) == 1:
        return (wide @ pieces[0].view.float()).mul_(module.scale)
    out = torch.zeros((z.shape[0], d_out), dtype=torch.float32, device=z.device)
    for piece in pieces:
        ranks = wide[:, piece.rank_lo : piece.rank_lo + piece.rank_n]
        out[:, piece.col_lo : piece.col_lo + piece.col_n] += ranks @ piece.view.float()
    return out.mul_(module.scale)


def vector(module: ResidentModule, factor: Factor) -> torch.Tensor | None:
    """A float32 vector of the module as one row, or None."""
    pieces = module.pieces(factor)
    if not pieces:
        return None
    return pieces[0].view[0] if len(pieces) == 1 else torch.cat([p.view[0] for p in pieces])


def finish(y: torch.Tensor, delta: torch.Tensor | None, module: ResidentModule) -> torch.Tensor:
    """g * (y + delta) + c in float32, rounded once. y: [n, d_out]; delta: float32 [n, d_out] or None."""
    out = y.float()
    if delta is not None:
        out = out + delta
    g, c = vector(module, Factor.G), vector(module, Factor.C)
    if g is not None:
        out = out * g
    if c is not None:
        out = out + c
    return out.to(y.dtype)


class TorchOps:
    """Base of the torch families; satisfies `AdapterOps`."""

    family: ClassVar[str]

    def __init__(self, plan: BatchPlan, table: AdapterTable) -> None:
        self._plan = plan
        self._table = table
        self._groups: dict[RowSet, RowGroups] = {RowSet.ALL: row_groups(plan, RowSet.ALL)}
        self._adapters: dict[int, ResidentAdapter] = {
            slot: table.adapter(slot) for slot in np.unique(plan.group_adapters).tolist()
        }
        self.active = bool(self._adapters)
        self.scales_input = any(adapter.has(Factor.H) for adapter in self._adapters.values())

    def groups(self, rows: RowSet) -> RowGroups:
        """Row ownership of a row set, derived once."""
        found = self._groups.get(rows)
        if found is None:
            found = self._groups[rows] = row_groups(self._plan, rows)
        return found

    def resident(self, slot: int, layer: int, module: Module) -> ResidentModule | None:
        """Views of one module of a slot of this plan."""
        return self._adapters[slot].module(layer, module)

    def scale_input(
        self, x: torch.Tensor, layer: int, module: Module, rows: RowSet = RowSet.ALL
    ) -> torch.Tensor:
        """See `AdapterOps.scale_input`."""
        groups = self.groups(rows)
        out = x
        for index, slot in enumerate(groups.group_adapters.tolist()):
            resident = self.resident(slot, layer, module)
            h = None if resident is None else vector(resident, Factor.H)
            if h is None:
                continue
            if out is x:
                out = x.clone()
            own = self._rows(groups, index)
            out[own] = (x[own].float() * h).to(x.dtype)
        return out

    def ahead(
        self, x: torch.Tensor, layer: int, modules: tuple[Module, ...], rows: RowSet = RowSet.ALL
    ) -> None:
        """Nothing runs beside the dense projection here."""

    def apply(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        layer: int,
        modules: tuple[Module, ...],
        rows: RowSet = RowSet.ALL,
    ) -> None:
        """See `AdapterOps.apply`."""
        groups = self.groups(rows)
        bounds = check_operands(self._table, y, x, modules, groups.rows)
        for index, module in enumerate(modules):
            self._module(y[:, bounds[index] : bounds[index + 1]], x, layer, module, groups)

    def embed(self, hidden: torch.Tensor, tokens: torch.Tensor) -> None:
        """See `AdapterOps.embed`."""
        groups = self.groups(RowSet.ALL)
        for index, slot in enumerate(groups.group_adapters.tolist()):
            module = self.resident(slot, 0, Module.EMBED)
            if module is None:
                continue
            rows = self._rows(groups, index)
            ids = tokens[rows]
            z = torch.zeros((ids.numel(), module.rank), dtype=hidden.dtype, device=hidden.device)
            for piece in module.pieces(Factor.A):
                mine = (ids >= piece.col_lo) & (ids < piece.col_lo + piece.col_n)
                columns = piece.view[:, ids[mine] - piece.col_lo].T
                z[mine, piece.rank_lo : piece.rank_lo + piece.rank_n] = columns
            delta = expand(z, module, hidden.shape[1]) if module.rank else None
            hidden[rows] = finish(hidden[rows], delta, module)

    def _module(
        self, y: torch.Tensor, x: torch.Tensor, layer: int, module: Module, groups: RowGroups
    ) -> None:
        """Add the branch of one module to y [rows, d_out] for x [rows, d_in]; families that fuse modules have
        none.
        """
        raise InternalFault(
            ErrorCode.OPERATOR_PLAN_UNSUPPORTED, f"{type(self).__name__} does not run modules one at a time"
        )

    def _rows(self, groups: RowGroups, index: int) -> torch.Tensor:
        lo, hi = int(groups.group_offsets[index]), int(groups.group_offsets[index + 1])
        return torch.from_numpy(groups.group_rows[lo:hi].astype(np.int64)).to(self._table.pool.device)
