"""Base weights by module, read from a Hugging Face folder when a method asks for them.

Only what is asked for is read, as float32; nothing is kept. The server's own copy of the weights lives
elsewhere and may be fused or rounded; this is the checkpoint itself, which adapters were trained against.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import numpy as np

from loraplex.artifact.base_modules import BaseModules
from loraplex.artifact.safetensors_file import SafetensorsFile
from loraplex.artifact.tensors import F32Array, to_float32
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.ids import Module

MAX_FILE_BYTES: Final = 1 << 40


class CheckpointTensors:
    """`BaseTensors` over the safetensors files in `folder`, by the names of `base`.

    A folder without output layer has it tied to the embedding. Files are opened for each question, so that a
    base that nobody asks about costs nothing.
    """

    def __init__(self, folder: str | os.PathLike[str], base: BaseModules) -> None:
        self._folder = Path(folder)
        self._base = base
        self._files: dict[str, Path] | None = None

    def weight(self, layer: int, module: Module) -> F32Array:
        """[d_out, d_in] of a linear module, [vocabulary, hidden] of the embedding; raises
        `model_weights_invalid`.
        """
        where = self._base.at(layer, module)
        embed = module is Module.EMBED
        found = self._read(f"{where.name}.weight")
        if found is None and module is Module.LM_HEAD:
            found = self._read(f"{self._base.names[Module.EMBED]}.weight")
        expected = (where.d_in, where.d_out) if embed else (where.d_out, where.d_in)
        if found is None or found.shape != expected:
            got = "no such tensor" if found is None else f"shape {found.shape}"
            raise CallerError(
                ErrorCode.MODEL_WEIGHTS_INVALID,
                f"{where.name}.weight: {got} in the base, expected {expected}",
            )
        return found

    def bias(self, layer: int, module: Module) -> F32Array | None:
        """[d_out], or None where the module has none."""
        where = self._base.at(layer, module)
        return self._read(f"{where.name}.bias") if where.has_bias else None

    def _read(self, name: str) -> F32Array | None:
        path = self._index().get(name)
        if path is None:
            return None
        with SafetensorsFile(path, MAX_FILE_BYTES) as file:
            entry = file.entries[name]
            raw = file.read(entry).view(entry.dtype.storage).reshape(entry.shape)
            return np.ascontiguousarray(to_float32(raw, entry.dtype))

    def _index(self) -> dict[str, Path]:
        """File of each tensor, from the headers."""
        if self._files is None:
            files: dict[str, Path] = {}
            for path in sorted(self._folder.glob("*.safetensors")):
                with SafetensorsFile(path, MAX_FILE_BYTES) as file:
                    files |= dict.fromkeys(file.entries, path)
            self._files = files
        return self._files
