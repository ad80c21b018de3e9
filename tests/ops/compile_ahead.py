"""What the adapter kernels are compiled with for a model's shapes, without a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from loraplex.core.limits import MAX_RANK
from loraplex.ops import triton_kernels as kernels
from loraplex.ops.triton_lora import (
    DECODE,
    PREFILL,
    Tuning,
    capacity,
    chunks,
    expand_constants,
    module_bases,
    shrink_constants,
)
from loraplex.ops.work_layout import GROUPS, HEAD_RECORDS_AT, HEAD_WIDE_AT
from loraplex.ops.worklist import Phase

_POINTERS: Final = {
    "x_ptr": "t", "y_ptr": "t", "pool_ptr": "t", "pool32_ptr": "fp32", "z_ptr": "fp32", "address_ptr": "i64",
    "record64_ptr": "i64", "shrink64_ptr": "i64", "expand64_ptr": "i64", "list_ptr": "i64",
    "vector_ptr": "i64",
    "meta16_ptr": "i16", "blocks16_ptr": "i16",
}  # fmt: skip
_ELEMENTS: Final = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def compile_plan(
    d_in: Sequence[int], d_out: Sequence[int], phase: Phase, dtype: torch.dtype, tuning: Tuning | None = None
) -> list[tuple[Any, dict[str, str], dict[Any, Any], dict[str, Any]]]:
    """(kernel, signature, constexprs, options) of every kernel that a model's shapes need, for compiling
    ahead.
    """
    tuning = tuning or (DECODE if phase is Phase.DECODE else PREFILL)
    chosen: dict[str, tuple[Any, dict[str, str], dict[Any, Any], dict[str, Any]]] = {}

    def add(kernel: Any, values: dict[str, Any]) -> None:
        options: dict[str, Any] = {
            name: values.pop(name) for name in ("num_warps", "launch_pdl") if name in values
        }
        signature: dict[str, str] = {
            name: "constexpr"
            if name in values
            else (
                "*" + _POINTERS.get(name, "i32").replace("t", _ELEMENTS[dtype])
                if name.endswith("_ptr")
                else "i32"
            )
            for name in kernel.arg_names
        }
        constants: dict[Any, Any] = {(kernel.arg_names.index(name),): value for name, value in values.items()}
        chosen[f"{kernel.__name__}{sorted(values.items())}"] = (kernel, signature, constants, options)

    bases = module_bases(capacity(phase, 64, 8, MAX_RANK, tuning).records)
    add(
        kernels.records_kernel,
        {
            "D_IN": tuple(d_in),
            "BASES": bases,
            "TILE": tuning.rank_tile,
            "MAX_TILES": MAX_RANK // tuning.rank_tile,
            "num_warps": 1,
        },
    )
    for group, (first, _) in enumerate(GROUPS):
        cut = chunks(d_in[first], tuning)
        add(
            kernels.shrink_kernel,
            {
                "COUNT_AT": HEAD_RECORDS_AT + group,
                **shrink_constants(d_in, group, cut, phase, tuning, interpreted=False),
            },
        )
        add(
            kernels.expand_kernel,
            {
                "FIRST_MODULE": first,
                "WIDE_AT": HEAD_WIDE_AT + group,
                **expand_constants(d_out, group, cut, phase, tuning, interpreted=False),
            },
        )
    return list(chosen.values())
