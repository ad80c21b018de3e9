"""The compiled CPU kernel behind the operator interface: one call for a whole module group, factors read in
place.

Everything that a step needs is laid out once, when its operator is made: pointers to the row tables of the
adapters in group order, and the rows of each. A call then passes a handful of integers. A row's result is the
same bits whatever else is in the batch and however many threads run. Input vectors and embeddings take the
shared torch code.

Specification: 0x02D "Indexed rows", 0x06D "one heterogeneous kernel"; rulings "Operators", "Equality".
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt
import torch

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.ids import Module
from loraplex.core.plan import BatchPlan
from loraplex.ops.cpu import compiled
from loraplex.ops.interface import RowSet
from loraplex.ops.table import AdapterTable
from loraplex.ops.torch_common import TorchOps, check_operands

_FUNCTIONS: Final = {
    torch.float32: "lora_apply_float32",
    torch.bfloat16: "lora_apply_bfloat16",
    torch.float16: "lora_apply_float16",
}


@dataclass(frozen=True, slots=True)
class _Words:
    """A record of the kernel's ABI, and the arrays that its pointers lead to."""

    address: int
    keep: tuple[npt.NDArray[np.int64], *tuple[object, ...]]


@dataclass(frozen=True, slots=True)
class _Step:
    """The kernel's `Step` of one row set."""

    rows: int
    words: _Words


@dataclass(frozen=True, slots=True)
class _Call:
    """The kernel's `Call` of one module group."""

    d_in: int
    width: int
    words: _Words


@dataclass(frozen=True, slots=True)
class Records:
    """What `step_cpu.cpp` reads of a step's adapters: addresses of `Step`, of one `Call` for each group, and
    of Z.
    """

    step: int
    calls: int
    z: int
    keep: tuple[object, ...]


def _words(*values: int, keep: tuple[object, ...]) -> _Words:
    record = np.array(values, dtype=np.int64)
    return _Words(record.ctypes.data, (record, *keep))


@functools.lru_cache(maxsize=256)
def _call(modules: tuple[Module, ...], d_in: int, d_outs: tuple[int, ...]) -> _Call:
    ids = np.array(modules, dtype=np.int32)
    bounds = np.concatenate([[0], np.cumsum(d_outs)]).astype(np.int64)
    words = _words(ids.size, d_in, ids.ctypes.data, bounds.ctypes.data, keep=(ids, bounds))
    return _Call(d_in, int(bounds[-1]), words)


class CpuKernelOps(TorchOps):
    """Shrink and expand of all adapters and modules of a call in one compiled function.

    Raises `operator_plan_unsupported` where there is no compiled kernel or the pool is not in host memory.
    """

    family: ClassVar[str] = "cpu_kernel"

    def __init__(self, plan: BatchPlan, table: AdapterTable) -> None:
        super().__init__(plan, table)
        library = compiled.library()
        if library is None or table.pool.device.type != "cpu" or table.dtype not in _FUNCTIONS:
            raise InternalFault(
                ErrorCode.OPERATOR_PLAN_UNSUPPORTED,
                f"the CPU kernel cannot serve {table.dtype} factors on {table.pool.device} "
                f"({compiled.status()})",
            )
        self._function = getattr(library.handle, _FUNCTIONS[table.dtype])
        self._steps: dict[RowSet, _Step] = {}
        self._calls: dict[tuple[Module, ...], _Call] = {}
        present = [adapter.index >= 0 for adapter in self._adapters.values()]
        self._present: list[list[bool]] = np.logical_or.reduce(present).tolist() if present else []

    def apply(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        layer: int,
        modules: tuple[Module, ...],
        rows: RowSet = RowSet.ALL,
    ) -> None:
        """See `AdapterOps.apply`."""
        step = self._steps.get(rows) or self._make_step(rows)
        call = self._calls.get(modules) or self._make_call(modules, y, x, step.rows)
        dtype = self._table.dtype
        y_strides, x_strides = y.stride(), x.stride()
        if (
            y.shape != (step.rows, call.width)
            or x.shape != (step.rows, call.d_in)
            or y.dtype is not dtype
            or x.dtype is not dtype
            or y_strides[1] != 1
            or x_strides[1] != 1
        ):
            check_operands(self._table, y, x, modules, step.rows)
        present = self._present[layer]
        if any(present[module] for module in modules):
            self._function(
                step.words.address,
                call.words.address,
                layer,
                y.data_ptr(),
                y_strides[0],
                x.data_ptr(),
                x_strides[0],
            )

    def records(self, groups: tuple[tuple[Module, ...], ...]) -> Records:
        """Records over all packed rows, for calls that cover whole layers. groups: modules of each call, in
        order.
        """
        step = self._steps.get(RowSet.ALL) or self._make_step(RowSet.ALL)
        dims = self._table.modules.dims
        words = [_call(g, dims[g[0]][0], tuple(dims[m][1] for m in g)).words for g in groups]
        calls = np.concatenate([w.keep[0] for w in words])
        ranks = sum(
            int(size) * int(self._adapters[slot].ranks.max(initial=0))
            for slot, size in zip(
                self._plan.group_adapters.tolist(), np.diff(self._plan.group_offsets), strict=True
            )
        )
        z = np.empty(max(1, ranks * max(len(g) for g in groups)), dtype=np.float32)
        return Records(step.words.address, calls.ctypes.data, z.ctypes.data, (step, calls, z, words))

    def _make_step(self, rows: RowSet) -> _Step:
        groups = self.groups(rows)
        index = np.ascontiguousarray(groups.group_rows, dtype=np.int32)
        offsets = np.ascontiguousarray(groups.group_offsets, dtype=np.int32)
        adapters = np.array(
            [self._adapters[slot].words for slot in groups.group_adapters.tolist()], dtype=np.int64
        )
        words = _words(
            self._table.pool.data_ptr(),
            len(adapters),
            index.ctypes.data,
            offsets.ctypes.data,
            adapters.ctypes.data,
            keep=(index, offsets, adapters, self._table.pool),
        )
        step = self._steps[rows] = _Step(groups.rows, words)
        return step

    def _make_call(self, modules: tuple[Module, ...], y: torch.Tensor, x: torch.Tensor, rows: int) -> _Call:
        check_operands(self._table, y, x, modules, rows)
        dims = self._table.modules.dims
        call = self._calls[modules] = _call(modules, dims[modules[0]][0], tuple(dims[m][1] for m in modules))
        return call
