"""From logical factors to the kernel layout: rank rows in pages, scales apart, checksums over the converted
bytes.

A is stored as [rank, d_in] rows, B transposed as [rank, d_out] rows, each factor in the extents that
`core.layout` places; the scale is never folded into a factor. Vectors of general methods are float32 extents,
made by `vectors`; the constant c is relative to the base's own bias, which the base GEMM adds
(`identity.kernel.CONSTANT`). Specification: 0x02F (physical layout), 0x04D (pages from tensors), 0x06A (true
rank).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from loraplex.artifact.base_modules import BaseTensors
from loraplex.artifact.identify import identify
from loraplex.artifact.record import AdaptedModule, Artifact, TensorRole
from loraplex.artifact.shards import WHOLE, local_layout, module_shapes
from loraplex.artifact.tensors import Array, Dtype, convert
from loraplex.artifact.threads import map_threads
from loraplex.artifact.vectors import ServedTensors, vector_kinds, vectors_of
from loraplex.core.layout import (
    EXTENT_COLUMNS,
    AdapterImage,
    Extent,
    Factor,
    PageGeometry,
    block_bytes,
    object_demand,
    page_checksum,
    place,
    vector_mask,
)
from loraplex.identity.kernel import CONSTANT, RANK_ROWS, KernelAbi, LocalLayout, Packing

CONVERSION_REVISION: Final = 2


def to_image(
    artifact: Artifact,
    geometry: PageGeometry,
    dtype: Dtype,
    base_abi: str,
    base_tensors: BaseTensors | None = None,
    shard: tuple[int, int] = WHOLE,
) -> AdapterImage:
    """The artifact in kernel layout.

    geometry: rank rows; its itemsize must be that of `dtype`. base_abi: H_base. base_tensors: needed by DoRA
    and trained biases, rounded to `dtype` as a server holds them. shard: (rank, ranks) of tensor parallelism.
    Raises `adapter_not_finite` where a value does not fit `dtype`.
    """
    extents, pages = place(geometry, module_shapes(artifact, shard))
    served = None if base_tensors is None else ServedTensors(base_tensors, dtype)
    table = extent_table(extents)
    demand = object_demand(geometry, table)
    buffer = np.zeros((pages, demand.nbytes // max(pages, 1)), dtype=np.uint8)
    by_module: dict[tuple[int, int], list[Extent]] = {}
    for extent in extents:
        by_module.setdefault((extent.layer, int(extent.module)), []).append(extent)

    def fill(module: AdaptedModule) -> None:
        stored = _stored(module, dtype, served, local_layout(module, shard))
        for extent in by_module[module.layer, int(module.module)]:
            _write(buffer, extent, stored[extent.factor])

    map_threads(fill, artifact.modules, buffer.nbytes)
    identity = identify(artifact, base_abi)
    return AdapterImage(
        key=identity.semantic,
        kernel_digest=kernel_abi(artifact, geometry, dtype, identity.semantic, table, shard).digest,
        itemsize=dtype.itemsize,
        modules=np.array(
            [
                (m.layer, int(m.module), m.rank, m.scale_bits, vector_mask(vector_kinds(m)))
                for m in artifact.modules
            ],
            dtype=np.int32,
        ),
        extents=table,
        pages=buffer,
        checksums=checksums_of(buffer),
    )


def checksums_of(pages: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """`page_checksum` of each page, on several threads."""
    sums = map_threads(lambda page: page_checksum(pages[page : page + 1]), range(len(pages)), pages.nbytes)
    return np.concatenate([np.zeros(0, dtype=np.int64), *sums])


def kernel_abi(
    artifact: Artifact,
    geometry: PageGeometry,
    dtype: Dtype,
    semantic: str,
    table: npt.NDArray[np.int32],
    shard: tuple[int, int] = WHOLE,
) -> KernelAbi:
    """The local kernel ABI of one shard's conversion; table: its extent table."""
    return KernelAbi(
        semantic=semantic,
        kernel_family=RANK_ROWS,
        conversion_revision=CONVERSION_REVISION,
        dtype=dtype.value,
        packing=Packing(
            page_bytes=block_bytes(geometry.page_bytes, object_demand(geometry, table).size_class),
            extents_sha256=hashlib.sha256(table.astype("<i4").tobytes()).hexdigest(),
        ),
        layouts=tuple(local_layout(m, shard) for m in artifact.modules),
        shard=shard,
        constant=CONSTANT,
    )


def extent_table(extents: Sequence[Extent]) -> npt.NDArray[np.int32]:
    """Extents as int32 [n, 9], in the field order of `Extent`."""
    return np.array([_row(e) for e in extents], dtype=np.int32).reshape(-1, EXTENT_COLUMNS)


def _row(extent: Extent) -> tuple[int, ...]:
    return (
        extent.layer,
        int(extent.module),
        int(extent.factor),
        extent.rank_lo,
        extent.rank_n,
        extent.col_lo,
        extent.col_n,
        extent.page,
        extent.offset,
    )


def _stored(
    module: AdaptedModule, dtype: Dtype, base_tensors: BaseTensors | None, layout: LocalLayout
) -> dict[Factor, Array]:
    """Stored factors of one module, each [rows, columns]: A, B transposed, vectors as one row of float32."""
    out: dict[Factor, Array] = {}
    if module.rank:
        a, b = module.tensors[TensorRole.A], module.tensors[TensorRole.B]
        out[Factor.A] = convert(a.data, a.dtype, dtype, a.name)[:, slice(*layout.input_range)]
        out[Factor.B] = convert(b.data, b.dtype, dtype, b.name)[slice(*layout.output_range)].T
    for factor, vector in vectors_of(module, base_tensors).items():
        out[factor] = vector.reshape(1, -1)
    return out


def _write(buffer: npt.NDArray[np.uint8], extent: Extent, factor: Array) -> None:
    """Copy an extent's rectangle of a factor to its place."""
    block = factor[
        extent.rank_lo : extent.rank_lo + extent.rank_n, extent.col_lo : extent.col_lo + extent.col_n
    ]
    size = block.size * block.dtype.itemsize
    target = buffer[extent.page, extent.offset : extent.offset + size].view(block.dtype)
    np.copyto(target.reshape(block.shape), block)
