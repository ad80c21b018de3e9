"""The float32 vectors of the general operator y = g * ((x * h) W^T + s (x A^T) B^T) + c, made from an
artifact.

h scales inputs (IA3 of a feed-forward), g scales outputs (DoRA, IA3), c is added last. The base GEMM adds the
base's own bias b inside the parentheses for every row, so the stored c is the method's constant minus g b:
(b' - b) for a trained bias b', (1 - g) b for DoRA, s times the bias of B, nothing for IA3, whose constant is
g b itself. `identity.kernel.CONSTANT` binds this convention. Plain LoRA has no vector. Specification: rulings
"Operators".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from loraplex.artifact.base_modules import BaseTensors
from loraplex.artifact.record import AdaptedModule, TensorRole
from loraplex.artifact.refuse import not_finite, unsupported
from loraplex.artifact.tensors import Dtype, F32Array, convert, to_float32
from loraplex.core.ids import Module
from loraplex.core.layout import Factor

ROW_BLOCK: Final = 1024


def vector_kinds(module: AdaptedModule) -> tuple[Factor, ...]:
    """Which vectors a module carries; c is there where the method's constant is not g times the
    base's bias.
    """
    roles = set(module.tensors)
    kinds = []
    if TensorRole.IA3_IN in roles:
        kinds.append(Factor.H)
    if roles & {TensorRole.MAGNITUDE, TensorRole.IA3_OUT}:
        kinds.append(Factor.G)
    if roles & {TensorRole.LORA_BIAS, TensorRole.BIAS} or (TensorRole.MAGNITUDE in roles and module.has_bias):
        kinds.append(Factor.C)
    return tuple(kinds)


@dataclass(frozen=True, slots=True)
class ServedTensors:
    """`BaseTensors` as a server of element type `dtype` holds them: what norms and constants must be made
    from.

    A base that is served in bfloat16 adds the rounded bias, and its rows have the norms of the rounded
    weights.
    """

    base: BaseTensors
    dtype: Dtype

    def weight(self, layer: int, module: Module) -> F32Array:
        """See `BaseTensors.weight`."""
        return self._rounded(self.base.weight(layer, module), f"weight of {module.name}")

    def bias(self, layer: int, module: Module) -> F32Array | None:
        """See `BaseTensors.bias`."""
        bias = self.base.bias(layer, module)
        return None if bias is None else self._rounded(bias, f"bias of {module.name}")

    def _rounded(self, values: F32Array, name: str) -> F32Array:
        return to_float32(convert(values, Dtype.FLOAT32, self.dtype, name), self.dtype)


def vectors_of(module: AdaptedModule, base: BaseTensors | None) -> dict[Factor, F32Array]:
    """The vectors of one module, float32: H [d_in], G and C [d_out].

    base: the base's weights as they are served; without them, `adapter_unsupported` is raised where a vector
    depends on them.
    """
    kinds = vector_kinds(module)
    if not kinds:
        return {}
    out: dict[Factor, F32Array] = {}
    if Factor.H in kinds:
        out[Factor.H] = module.tensors[TensorRole.IA3_IN].float32().reshape(-1)
    if TensorRole.MAGNITUDE in module.tensors:
        out[Factor.G] = _dora_gain(module, _needed(module, base))
    elif TensorRole.IA3_OUT in module.tensors:
        out[Factor.G] = module.tensors[TensorRole.IA3_OUT].float32().reshape(-1)
    if Factor.C in kinds:
        out[Factor.C] = _constant(module, base, out.get(Factor.G))
    for factor, vector in out.items():
        if not np.isfinite(vector).all():
            raise not_finite(module.name, f"vector {factor.name} of {module.name} does not fit float32")
    return out


def _dora_gain(module: AdaptedModule, base: BaseTensors) -> F32Array:
    """DoRA's g = magnitude / norm."""
    norm = row_norms(module, base)
    magnitude = module.tensors[TensorRole.MAGNITUDE]
    if not norm.all():
        raise not_finite(
            magnitude.name, f"row {int(norm.argmin())} of {module.name} has norm 0, DoRA divides by it"
        )
    with np.errstate(over="ignore"):  # what becomes infinite is refused by name
        return (magnitude.float32().astype(np.float64) / norm).astype(np.float32)


def row_norms(module: AdaptedModule, base: BaseTensors) -> np.ndarray:
    """Norm of each row of W + s B A in float64 [d_out], as |W|^2 + 2 s W.BA + s^2 |BA|^2."""
    weight = base.weight(module.layer, module.module)
    a = module.tensors[TensorRole.A].float32().astype(np.float64)
    b = module.tensors[TensorRole.B].float32().astype(np.float64)
    gram = a @ a.T
    squares = np.empty(module.d_out)
    for lo in range(0, module.d_out, ROW_BLOCK):
        w = weight[lo : lo + ROW_BLOCK].astype(np.float64)
        rows = b[lo : lo + ROW_BLOCK]
        cross = ((w @ a.T) * rows).sum(axis=1)
        delta = ((rows @ gram) * rows).sum(axis=1)
        squares[lo : lo + ROW_BLOCK] = (
            (w * w).sum(axis=1) + 2 * module.scale * cross + module.scale**2 * delta
        )
    return np.sqrt(np.maximum(squares, 0.0))  # rounding can leave a square of zero just below it


def _needed(module: AdaptedModule, base: BaseTensors | None) -> BaseTensors:
    if base is None:
        raise unsupported(
            "", f"the vectors of {module.name} depend on base weights, which are not given here"
        )
    return base


def _constant(module: AdaptedModule, base: BaseTensors | None, gain: F32Array | None) -> F32Array:
    """c: (the new bias or the base's) minus g times the base's, plus s times the bias of B; in float64,
    rounded once.
    """
    c = np.zeros(module.d_out)
    if module.has_bias and (TensorRole.BIAS in module.tensors or TensorRole.MAGNITUDE in module.tensors):
        own = _needed(module, base).bias(module.layer, module.module)
        before = np.zeros(module.d_out) if own is None else own.astype(np.float64)
        after = before
        if TensorRole.BIAS in module.tensors:
            after = module.tensors[TensorRole.BIAS].float32().astype(np.float64)
        c = after - before * (1.0 if gain is None else gain.astype(np.float64))
    if TensorRole.LORA_BIAS in module.tensors:
        c = c + module.scale * module.tensors[TensorRole.LORA_BIAS].float32()
    with np.errstate(over="ignore"):  # what becomes infinite is refused by name
        return c.astype(np.float32)
