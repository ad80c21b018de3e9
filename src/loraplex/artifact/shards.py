"""Which part of each module's factors a tensor-parallel shard holds.

Follows the base projection (0x06F): column-parallel modules keep all of A and a slice of B's outputs,
row-parallel ones a slice of A's inputs and all of B. Owns ranges only; communication belongs to the
operators.
"""

from __future__ import annotations

from typing import Final

from loraplex.artifact.record import AdaptedModule, Artifact
from loraplex.artifact.refuse import unsupported
from loraplex.artifact.vectors import vector_kinds
from loraplex.core.ids import Module
from loraplex.core.layout import ModuleShape
from loraplex.identity.kernel import A_AXES, B_AXES, LocalLayout

WHOLE: Final = (0, 1)
ROW_PARALLEL: Final = frozenset({Module.O, Module.DOWN})


def local_layout(module: AdaptedModule, shard: tuple[int, int]) -> LocalLayout:
    """Ranges of input and output that shard (rank, ranks) holds; raises `adapter_unsupported` when they do
    not divide.
    """
    rank, ranks = shard
    row = module.module in ROW_PARALLEL
    size = module.d_in if row else module.d_out
    if size % ranks:
        raise unsupported(
            module.name, f"{module.name} has {size} to share among {ranks} shards, which do not divide it"
        )
    if ranks > 1 and (module.module is Module.EMBED or vector_kinds(module)):
        raise unsupported(module.name, f"the adapter of {module.name} cannot be sharded")
    part = (rank * size // ranks, (rank + 1) * size // ranks)
    return LocalLayout(
        name=module.name,
        rank=module.rank,
        scale_bits=module.scale_bits,
        a_axes=A_AXES,
        b_axes=B_AXES,
        input_range=part if row else (0, module.d_in),
        output_range=(0, module.d_out) if row else part,
    )


def module_shapes(artifact: Artifact, shard: tuple[int, int] = WHOLE) -> tuple[ModuleShape, ...]:
    """What a shard of the artifact asks pages for, in the order of its modules."""
    shapes = []
    for module in artifact.modules:
        layout = local_layout(module, shard)
        d_in = layout.input_range[1] - layout.input_range[0]
        d_out = layout.output_range[1] - layout.output_range[0]
        shapes.append(
            ModuleShape(module.layer, module.module, module.rank, d_in, d_out, vector_kinds(module))
        )
    return tuple(shapes)
