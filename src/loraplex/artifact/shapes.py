"""Shapes and ranks of an adapter's tensors against its base, from their headers alone.

One wrong tensor is a shape or rank mismatch; factors that agree among themselves but with no module of the
base are an adapter for another base.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from loraplex.artifact.record import AdaptedModule, TensorRole
from loraplex.artifact.refuse import bad_rank, bad_shape, wrong_base
from loraplex.artifact.tensors import TensorHeader


@dataclass(frozen=True, slots=True)
class Placed:
    """A module that has no tensors yet, and the headers of those that it will have."""

    module: AdaptedModule
    headers: Mapping[TensorRole, TensorHeader]


def check_shapes(placed: Sequence[Placed]) -> None:
    """Raise on the first tensor whose shape is not the expected one."""
    _check_base(placed)
    for one in placed:
        module = one.module
        for role, tensor in one.headers.items():
            if role is TensorRole.A:
                _check_factor(module, tensor, rank_axis=0, width=module.d_in)
            elif role is TensorRole.B:
                _check_factor(module, tensor, rank_axis=1, width=module.d_out)
            else:
                _check_vector(module, role, tensor)


def _check_base(placed: Iterable[Placed]) -> None:
    """Refuse as made for another base when several modules have consistent factors and none fits."""
    pairs = [
        (p.module, p.headers[TensorRole.A], p.headers[TensorRole.B])
        for p in placed
        if {TensorRole.A, TensorRole.B} <= set(p.headers)
    ]
    if len(pairs) < 2:
        return
    for module, a, b in pairs:
        consistent = (
            len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1] and 0 not in a.shape + b.shape
        )
        if not consistent or (a.shape[1], b.shape[0]) == (module.d_in, module.d_out):
            return
    module, a, b = pairs[0]
    raise wrong_base(
        a.name,
        f"no module fits: {module.name} has factors for {a.shape[1]} -> {b.shape[0]}, "
        f"the base has {module.d_in} -> {module.d_out}",
    )


def _check_factor(module: AdaptedModule, tensor: TensorHeader, rank_axis: int, width: int) -> None:
    expected = (module.rank, width) if rank_axis == 0 else (width, module.rank)
    if tensor.shape == expected:
        return
    if len(tensor.shape) == 2 and tensor.shape[1 - rank_axis] == width and tensor.shape[rank_axis] > 0:
        raise bad_rank(
            tensor.name,
            f"tensor {tensor.name} has rank {tensor.shape[rank_axis]}, the configuration says {module.rank}",
        )
    raise bad_shape(
        tensor.name, f"tensor {tensor.name} has shape {list(tensor.shape)}, expected {list(expected)}"
    )


def _check_vector(module: AdaptedModule, role: TensorRole, tensor: TensorHeader) -> None:
    width = module.d_in if role is TensorRole.IA3_IN else module.d_out
    shapes: tuple[tuple[int, ...], ...] = ((width,),)
    if role is TensorRole.IA3_IN:
        shapes = ((1, width),)
    elif role is TensorRole.IA3_OUT:
        shapes = ((width, 1),)
    if tensor.shape not in shapes:
        raise bad_shape(
            tensor.name, f"tensor {tensor.name} has shape {list(tensor.shape)}, expected {list(shapes[0])}"
        )
