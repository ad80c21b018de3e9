"""From logical factors to the kernel layout: rank rows in pages, scales apart, checksums over the converted bytes.

A is stored as [rank, d_in] rows, B transposed as [rank, d_out] rows, each factor in the extents that `core.layout`
places; the scale is never folded into a factor. Vectors of general methods are float32 extents, made by `vectors`.
Specification: 0x02F (physical layout), 0x04D (pages from tensors), 0x06A (true rank).
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
import numpy.typing as npt

from loraplex.artifact.base import BaseTensors
from loraplex.artifact.identify import identify
from loraplex.artifact.record import AdaptedModule, Artifact, Role
from loraplex.artifact.tensors import Array, Dtype, convert
from loraplex.artifact.vectors import vector_kinds, vectors_of
from loraplex.core.layout import AdapterImage, Extent, Factor, ModuleShape, PageGeometry, page_checksum, place
from loraplex.identity.digests import KernelAbi, LocalLayout

KERNEL_FAMILY: Final = "rank-rows"
CONVERSION_REVISION: Final = 1


def module_shapes(artifact: Artifact) -> tuple[ModuleShape, ...]:
    """What the artifact asks pages for, in the order of its modules."""
    return tuple(
        ModuleShape(m.layer, m.module, m.rank, m.d_in, m.d_out, vector_kinds(m)) for m in artifact.modules
    )


def to_image(
    artifact: Artifact,
    geometry: PageGeometry,
    dtype: Dtype,
    base_abi: str,
    base_tensors: BaseTensors | None = None,
) -> AdapterImage:
    """The artifact in kernel layout, unsharded.

    geometry: rank rows; its itemsize must be that of `dtype`. base_abi: H_base. base_tensors: needed by methods with
    vectors (DoRA, trained biases, IA3 over a bias). Raises `adapter_not_finite` where a value does not fit `dtype`.
    """
    extents, pages = place(geometry, module_shapes(artifact))
    buffer = np.zeros((pages, geometry.page_bytes), dtype=np.uint8)
    by_module: dict[tuple[int, int], list[Extent]] = {}
    for extent in extents:
        by_module.setdefault((extent.layer, int(extent.module)), []).append(extent)
    for module in artifact.modules:
        stored = _stored(module, dtype, base_tensors)
        for extent in by_module[module.layer, int(module.module)]:
            _write(buffer, extent, stored[extent.factor])
    table = np.array([_row(e) for e in extents], dtype=np.int32)
    identity = identify(artifact, base_abi)
    return AdapterImage(
        key=identity.semantic,
        kernel_digest=kernel_abi(artifact, geometry, dtype, identity.semantic, table).digest,
        itemsize=dtype.itemsize,
        modules=np.array(
            [(m.layer, int(m.module), m.rank, m.scale_bits) for m in artifact.modules], dtype=np.int32
        ),
        extents=table,
        pages=buffer,
        checksums=page_checksum(buffer),
    )


def kernel_abi(
    artifact: Artifact, geometry: PageGeometry, dtype: Dtype, semantic: str, table: npt.NDArray[np.int32]
) -> KernelAbi:
    """The local kernel ABI of the unsharded conversion; table: the extent table."""
    return KernelAbi(
        semantic=semantic,
        kernel_family=KERNEL_FAMILY,
        conversion_revision=CONVERSION_REVISION,
        dtype=dtype.value,
        packing={
            "page_bytes": geometry.page_bytes,
            "extents_sha256": hashlib.sha256(table.astype("<i4").tobytes()).hexdigest(),
        },
        layouts=tuple(
            LocalLayout(
                name=m.name,
                rank=m.rank,
                scale_bits=m.scale_bits,
                a_axes=("rank", "input"),
                b_axes=("rank", "output"),
                input_range=(0, m.d_in),
                output_range=(0, m.d_out),
            )
            for m in artifact.modules
        ),
        shard=(0, 1),
    )


def _row(extent: Extent) -> tuple[int, ...]:
    return (
        extent.layer, int(extent.module), int(extent.factor), extent.rank_lo, extent.rank_n, extent.col_lo,
        extent.col_n, extent.page, extent.offset,
    )  # fmt: skip


def _stored(module: AdaptedModule, dtype: Dtype, base_tensors: BaseTensors | None) -> dict[Factor, Array]:
    """Stored factors of one module, each [rows, columns]: A, B transposed, vectors as one row of float32."""
    out: dict[Factor, Array] = {}
    if module.rank:
        a, b = module.tensors[Role.A], module.tensors[Role.B]
        out[Factor.A] = convert(a.data, a.dtype, dtype, a.name)
        out[Factor.B] = convert(b.data, b.dtype, dtype, b.name).T
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
