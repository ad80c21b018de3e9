"""Base weights that PEFT saves beside an adapter of the embedding or the output layer.

PEFT writes the weights of both when either is a target or `save_embedding_layers` asks for it: as
`base_layer.weight` where there is an adapter, as plain `weight` where there is none. They have no effect
exactly when they equal the base's own, in the type that they were saved in or in the type that the base is
served in; that is proven against the base, or the adapter is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from loraplex.artifact.base_modules import BaseModule, BaseTensors
from loraplex.artifact.refuse import bad_shape, unmatched, unsupported
from loraplex.artifact.tensors import Dtype, F32Array, Tensor, TensorHeader, convert, to_float32
from loraplex.core.errors import CallerError
from loraplex.core.ids import Module

ROW_BLOCK: Final = 1024


@dataclass(frozen=True, slots=True)
class Carried:
    """A tensor that repeats base weights, by its header, and the module whose weights they are."""

    header: TensorHeader
    module: BaseModule


def check_places(carried: Iterable[Carried]) -> None:
    """Raise unless each is the whole weight of an embedding or an output layer."""
    for one in carried:
        tensor, module = one.header, one.module
        if module.module not in (Module.EMBED, Module.LM_HEAD):
            raise unmatched(
                tensor.name, f"tensor {tensor.name} holds base weights, which no adapter replaces"
            )
        expected = (
            (module.d_in, module.d_out) if module.module is Module.EMBED else (module.d_out, module.d_in)
        )
        if tensor.shape != expected:
            raise bad_shape(
                tensor.name, f"tensor {tensor.name} has shape {list(tensor.shape)}, expected {list(expected)}"
            )


def check_carried(
    carried: Sequence[Carried],
    tensors: Mapping[str, Tensor],
    base: BaseTensors | None,
    served: Dtype | None = None,
) -> tuple[str, ...]:
    """Names of carried tensors, all proven equal to the base; raises `adapter_unsupported` for any other.

    served: element type that the base is served in; None compares in the carried tensors' own types alone.
    """
    for one in carried:
        name, module = one.header.name, one.module
        if base is None:
            raise unsupported(
                name, f"tensor {name} repeats base weights, and there is no base here to compare them with"
            )
        if not _equal(tensors[name], base.weight(module.layer, module.module), served):
            raise unsupported(
                name,
                f"tensor {name} replaces base weights with others, which is not served; "
                "merge them into a base of their own",
            )
    return tuple(sorted(one.header.name for one in carried))


def _equal(tensor: Tensor, weight: F32Array, served: Dtype | None) -> bool:
    """Whether tensor and base are the same weights, rounded to the tensor's type or to the served one.

    The second holds for a copy that was widened after training, or that the base here was rounded from: a
    server that took it in the base's place would hold the same bits.
    """
    if _equal_in(tensor, weight, tensor.dtype):
        return True
    return served is not None and served is not tensor.dtype and _equal_in(tensor, weight, served)


def _equal_in(tensor: Tensor, weight: F32Array, dtype: Dtype) -> bool:
    for row in range(0, tensor.shape[0], ROW_BLOCK):
        own = tensor.data[row : row + ROW_BLOCK]
        base = np.ascontiguousarray(weight[row : row + ROW_BLOCK], dtype=np.float32)
        try:
            ours = to_float32(convert(base, Dtype.FLOAT32, dtype, tensor.name), dtype)
            theirs = to_float32(convert(own, tensor.dtype, dtype, tensor.name), dtype)
        except CallerError:  # what does not fit into the type is not equal in it
            return False
        if not np.array_equal(ours, theirs):
            return False
    return True
