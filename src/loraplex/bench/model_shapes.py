"""Model shapes and synthetic adapters for measurements: what they weigh and where their bytes lie, without
any training.

Numbers of the shapes are those of the models' published configurations.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from loraplex.build.base_model import BaseModel
from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.ids import Module
from loraplex.core.layout import (
    EXTENT_COLUMNS,
    AdapterImage,
    ModuleShape,
    object_demand,
    page_checksum,
    place,
)
from loraplex.core.messages import RegisterAdapter

LLAMA_8B: Final = "llama-3.1-8b"
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "llama-3.1-8b": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_theta": 500000.0, "torch_dtype": "bfloat16",
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}  # fmt: skip
ATTENTION: Final = (Module.Q, Module.K, Module.V, Module.O)
SEVEN: Final = (*ATTENTION, Module.GATE, Module.UP, Module.DOWN)


def write_shape(name: str, folder: Path) -> Path:
    """A model folder with nothing but the config.json of a known shape."""
    (folder / "config.json").write_text(json.dumps(SHAPES[name]), encoding="utf-8")
    return folder


class SyntheticImages:
    """An image source of random adapters: one set of bytes for each layout, any number of digests over it."""

    def __init__(self, base: BaseModel, seed: int = 0) -> None:
        self._base, self._rng = base, np.random.default_rng(seed)
        self._layouts: dict[tuple[int, tuple[Module, ...]], AdapterImage] = {}
        self._images: dict[str, AdapterImage] = {}

    def open(self, kernel_digest: str) -> AdapterImage:
        """See `core.ports.ImageSource`."""
        found = self._images.get(kernel_digest)
        if found is None:
            raise InternalFault(
                ErrorCode.ADAPTER_LOAD_FAILED, f"no synthetic image has the digest {kernel_digest[:12]}"
            )
        return found

    def add(self, rank: int, modules: Sequence[Module], index: int) -> RegisterAdapter:
        """The engine's message for the `index`-th adapter of a rank on these modules of all layers."""
        layout = self._layout(rank, tuple(modules))
        digest = f"{rank:08x}{len(modules):08x}{index:048x}"
        self._images[digest] = replace(layout, key=digest, kernel_digest=digest)
        demand = object_demand(self._base.geometry, layout.extents)
        return RegisterAdapter(
            call_id=0,
            key=digest,
            kernel_digest=digest,
            pages=demand.pages,
            size_class=demand.size_class,
            ranks=((rank, len(layout.modules)),),
            modules=tuple(int(module) for module in modules),
            host_bytes=layout.pages.nbytes,
        )

    def _layout(self, rank: int, modules: tuple[Module, ...]) -> AdapterImage:
        known = self._layouts.get((rank, modules))
        if known is None:
            known = self._layouts[rank, modules] = self._make(rank, modules)
        return known

    def _make(self, rank: int, modules: tuple[Module, ...]) -> AdapterImage:
        base, dims = self._base, self._base.spec.module_dims().dims
        shapes = [
            ModuleShape(layer, module, rank, *dims[module])
            for layer in range(base.spec.layers)
            for module in modules
        ]
        extents, count = place(base.geometry, shapes)
        table = np.array(
            [
                (e.layer, e.module, e.factor, e.rank_lo, e.rank_n, e.col_lo, e.col_n, e.page, e.offset)
                for e in extents
            ],
            dtype=np.int32,
        ).reshape(-1, EXTENT_COLUMNS)
        nbytes = object_demand(base.geometry, table).nbytes
        pages = np.zeros((count, nbytes // count), dtype=np.uint8)
        # Small normal numbers of a two-byte type: sign, an exponent near 2^-7, random fraction.
        words = pages.view(np.uint16)
        words[:] = self._rng.integers(0, 1 << 16, words.shape, dtype=np.uint16) & 0x80FF | 0x3B80
        scale = int(np.float32(1.0).view(np.int32))
        return AdapterImage(
            key="",
            kernel_digest="",
            itemsize=base.dtype.itemsize,
            modules=np.array([(s.layer, s.module, s.rank, scale, 0) for s in shapes], dtype=np.int32),
            extents=table,
            pages=pages,
            checksums=page_checksum(pages),
        )


@dataclass(frozen=True, slots=True)
class AdapterMix:
    """Distinct adapters of one row of a table: their count, the ranks that they take in turn, the modules."""

    count: int
    ranks: tuple[int, ...] = (16,)
    modules: tuple[Module, ...] = ATTENTION

    def bytes_of(self, base: BaseModel) -> int:
        """Bytes of all factors."""
        dims = base.spec.module_dims().dims
        widths = sum(sum(dims[module]) for module in self.modules) * base.spec.layers * base.dtype.itemsize
        return sum(widths * self.ranks[index % len(self.ranks)] for index in range(self.count))
