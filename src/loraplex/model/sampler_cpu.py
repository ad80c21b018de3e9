"""The compiled sampling functions as numpy and torch see them.

Owns nothing but the way into the library; what they compute is defined by `sampler`, `truncate`, `penalties`
and `philox`. Specification: rulings "Sampling".
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from loraplex.ops.cpu import compiled

I64 = npt.NDArray[np.int64]

OPTIONS: Final = np.dtype(
    [
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("top_p", np.float32),
        ("top_k", np.int32),
        ("seed_low", np.int32),
        ("seed_high", np.int32),
        ("position", np.int32),
    ]
)
"""One row's options, as the library's `Options`."""


class CompiledSampling:
    """Draw, penalise and rank rows of float32 logits in host memory, with unit column stride."""

    def __init__(self, library: compiled.Library) -> None:
        self._handle = library.handle

    @staticmethod
    def find(device: torch.device) -> CompiledSampling | None:
        """The compiled functions, where there are any for this device."""
        library = compiled.library() if device.type == "cpu" else None
        return None if library is None else CompiledSampling(library)

    def draw(
        self, logits: torch.Tensor, index: I64, vocab: int, options: npt.NDArray[np.void]
    ) -> torch.Tensor:
        """Tokens int64 [n] from rows `index` [n] of logits, over the first `vocab` columns. options:
        `OPTIONS` [n].
        """
        tokens = torch.empty(index.size, dtype=torch.int64)
        self._handle.sample_draw(
            logits.data_ptr(),
            logits.stride(0),
            index.ctypes.data,
            index.size,
            vocab,
            options.ctypes.data,
            tokens.data_ptr(),
        )
        return tokens

    def penalise(
        self,
        logits: torch.Tensor,
        index: I64,
        vocab: int,
        output: torch.Tensor,
        prompt: torch.Tensor,
        rows: I64,
        penalties: npt.NDArray[np.float32],
    ) -> None:
        """In place on rows `index` [n]. output int32 and prompt bool [*, V], of which `rows` [n]; penalties
        [n, 3].
        """
        self._handle.sample_penalise(
            logits.data_ptr(),
            logits.stride(0),
            index.ctypes.data,
            index.size,
            vocab,
            output.data_ptr(),
            prompt.data_ptr(),
            output.shape[1],
            rows.ctypes.data,
            penalties.ctypes.data,
        )

    def best(self, logits: torch.Tensor, vocab: int, count: int) -> torch.Tensor:
        """The `count` best of the first `vocab` columns of each row, int64 [n, count], ties to the
        lowest id.
        """
        ids = torch.empty((logits.shape[0], count), dtype=torch.int64)
        self._handle.sample_best(
            logits.data_ptr(), logits.stride(0), logits.shape[0], vocab, count, ids.data_ptr()
        )
        return ids
