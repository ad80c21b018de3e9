"""Base weights that PEFT saves beside an adapter of the embedding or the output layer.

PEFT writes the weights of both when either is a target or `save_embedding_layers` asks for it: as `base_layer.weight`
where there is an adapter, as plain `weight` where there is none. They have no effect exactly when they equal the base's own; that is proven against the base, or the adapter is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from loraplex.artifact.base import BaseModule, BaseTensors
from loraplex.artifact.names import TensorName
from loraplex.artifact.refuse import bad_shape, unmatched, unsupported
from loraplex.artifact.tensors import Dtype, Tensor, convert, to_float32
from loraplex.core.ids import Module


def check_carried(
    carried: Sequence[tuple[TensorName, Tensor]], modules: Mapping[str, BaseModule], base: BaseTensors | None
) -> tuple[str, ...]:
    """Names of carried tensors, all proven equal to the base; raises `adapter_unsupported` for any other."""
    for name, tensor in carried:
        module = modules[name.module]
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
        if base is None:
            raise unsupported(
                tensor.name,
                f"tensor {tensor.name} repeats base weights, and there is no base here to compare them with",
            )
        if not _equal(tensor, base.weight(module.layer, module.module)):
            raise unsupported(
                tensor.name,
                f"tensor {tensor.name} replaces base weights with others, which is not served; "
                "merge them into a base of their own",
            )
    return tuple(sorted(tensor.name for _, tensor in carried))


def _equal(tensor: Tensor, weight: np.ndarray) -> bool:
    """Whether the base, rounded to the tensor's type, is the tensor."""
    for row in range(0, tensor.shape[0], 1024):
        block = np.ascontiguousarray(weight[row : row + 1024], dtype=np.float32)
        rounded = to_float32(convert(block, Dtype.FLOAT32, tensor.dtype, tensor.name), tensor.dtype)
        if not np.array_equal(rounded, to_float32(tensor.data[row : row + 1024], tensor.dtype)):
            return False
    return True
