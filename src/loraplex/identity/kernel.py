"""The local kernel ABI: which converted bytes a kernel may consume, on which shard.

Binds the semantic identity to one conversion: orientation, element type, packing, and the ranges of input and
output that this shard holds. Specification: 0x01G "Logical factors and kernel layouts", 0x06F.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from loraplex.identity.canonical import check_digest, digest
from loraplex.identity.digests import ModuleSpec, invalid
from loraplex.identity.scale import ScaleRule, scale_bits

RANK_ROWS: Final = "rank-rows"
"""Storage layout: A as [rank, input] rows, B transposed as [rank, output] rows, in pages."""

CONSTANT: Final = "relative-to-base-bias"
"""What the stored c means in y = g * (x W^T + b + s (x A^T) B^T) + c: b is the base's own bias, added by the
base GEMM for every row, and c is the method's constant minus g * b. So a bias that the method leaves alone,
or scales by g as IA3 does, needs no c at all and is exact; only DoRA over a bias, a bias of B and a trained
bias store one.
"""

A_AXES: Final = ("rank", "input")
B_AXES: Final = ("rank", "output")


class LocalLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one module's factors lie on one shard: physical axes and the half-open ranges held here.

    scale_bits: float32 pattern of the effective scale, as a signed integer; 0 without factors.
    """

    name: str
    rank: int
    scale_bits: int
    a_axes: tuple[str, str]
    b_axes: tuple[str, str]
    input_range: tuple[int, int]
    output_range: tuple[int, int]

    def scalars(self) -> int:
        """Factor elements held on this shard."""
        inputs = self.input_range[1] - self.input_range[0]
        outputs = self.output_range[1] - self.output_range[0]
        return self.rank * (inputs + outputs)


class Packing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where factors lie: size of the page or block, and the digest of the extent table as little-endian
    int32.
    """

    page_bytes: int
    extents_sha256: str


class KernelAbi(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One conversion on one shard. kernel_family names the storage layout, never a launch. shard: (rank,
    ranks).

    constant: what vector c is relative to, see `CONSTANT`.
    """

    semantic: str
    kernel_family: str
    conversion_revision: int
    dtype: str
    packing: Packing
    layouts: tuple[LocalLayout, ...]
    shard: tuple[int, int]
    constant: str = CONSTANT

    @property
    def digest(self) -> str:
        """H_kernel,local."""
        names = [layout.name for layout in self.layouts]
        if names != sorted(set(names)):
            raise invalid("local layouts must be sorted by name, each once")
        if not 0 <= self.shard[0] < self.shard[1]:
            raise invalid(f"shard {self.shard} is not (rank, ranks)")
        check_digest("extents_sha256", self.packing.extents_sha256)
        return digest(
            {
                "adapter_semantic_sha256": check_digest("semantic", self.semantic),
                "kernel_family": self.kernel_family,
                "conversion_revision": self.conversion_revision,
                "dtype": self.dtype,
                "packing": msgspec.to_builtins(self.packing),
                "local_module_layouts": [msgspec.to_builtins(layout) for layout in self.layouts],
                "parallel_shard": self.shard,
                "constant": self.constant,
            }
        )

    def scalars(self) -> int:
        """Factor elements held on this shard."""
        return sum(layout.scalars() for layout in self.layouts)


def check_layout(layout: LocalLayout, spec: ModuleSpec) -> None:
    """A local layout is one of this module: rank, scale, orientation, ranges inside the base shape."""
    d_out, d_in = spec.base_shape
    scale = scale_bits(spec.alpha, spec.rank, ScaleRule(spec.rule)) if spec.rank else 0
    expected = (spec.name, spec.rank, scale, A_AXES, B_AXES)
    got = (layout.name, layout.rank, layout.scale_bits, layout.a_axes, layout.b_axes)
    if got != expected:
        raise invalid(f"the local layout of {spec.name} is {got}, expected {expected}")
    for kind, (low, high), size in (
        ("input", layout.input_range, d_in),
        ("output", layout.output_range, d_out),
    ):
        if not 0 <= low < high <= size:
            raise invalid(
                f"the local {kind} range of {spec.name} is [{low}, {high}), expected within [0, {size})"
            )


def check_shards(kernels: Sequence[KernelAbi], modules: Sequence[ModuleSpec]) -> None:
    """The shards of one conversion together hold each module's update exactly: one axis tiled, the other
    whole.
    """
    ranks = len(kernels)
    if [kernel.shard for kernel in kernels] != [(rank, ranks) for rank in range(ranks)]:
        raise invalid(
            f"the shards are {[k.shard for k in kernels]}, expected ranks 0 to {ranks - 1} of {ranks}"
        )
    common = {(k.semantic, k.kernel_family, k.conversion_revision, k.dtype) for k in kernels}
    if len(common) != 1:
        raise invalid("the shards belong to different conversions")
    for kernel in kernels:
        if [layout.name for layout in kernel.layouts] != [spec.name for spec in modules]:
            raise invalid(f"shard {kernel.shard[0]} does not hold the artifact's modules")
    for index, spec in enumerate(modules):
        layouts = [kernel.layouts[index] for kernel in kernels]
        for layout in layouts:
            check_layout(layout, spec)
        d_out, d_in = spec.base_shape
        inputs = [layout.input_range for layout in layouts]
        outputs = [layout.output_range for layout in layouts]
        column = _whole(inputs, d_in) and _tiles(outputs, d_out)
        row = _whole(outputs, d_out) and _tiles(inputs, d_in)
        if not column and not row:
            raise invalid(
                f"the shards of {spec.name} hold inputs {inputs} and outputs {outputs} of [{d_out}, {d_in}]"
            )


def _whole(ranges: Sequence[tuple[int, int]], size: int) -> bool:
    return all(part == (0, size) for part in ranges)


def _tiles(ranges: Sequence[tuple[int, int]], size: int) -> bool:
    edges = [0, *(high for _, high in ranges)]
    return edges[-1] == size and all(low == edge for (low, _), edge in zip(ranges, edges, strict=False))
