"""Sampling with noise on the device: a few launches for any mixture of temperature, min_p, top_k and top_p.

Owns nothing; what is drawn is defined by `truncate` and `philox`. Specification: rulings "Sampling".
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from loraplex.model.cuda import draw_kernels, kernels
from loraplex.model.transfer import to_device

I64 = npt.NDArray[np.int64]

CUT_BLOCK: Final = 4096
CUT_WARPS: Final = 32
DRAW_BLOCK: Final = 1024
DRAW_WARPS: Final = 4
BEST_BLOCK: Final = 1024
SPLITS: Final = 32


class DeviceDraws:
    """Draws tokens of rows of logits that lie on a device. block, splits: tokens at once and slices of a row
    (tests).
    """

    def __init__(self, device: torch.device, block: int = CUT_BLOCK, splits: int = SPLITS) -> None:
        self._device, self._block, self._splits = device, block, splits

    def draw(
        self, logits: torch.Tensor, index: I64, vocab: int, options: npt.NDArray[np.void]
    ) -> torch.Tensor:
        """Tokens int64 [n] from rows `index` [n] of logits, over the first `vocab` columns.

        logits: [*, >= vocab] with unit column stride. options: `sampler_cpu.OPTIONS` [n].
        """
        rows = np.empty((index.size, 8), dtype=np.int32)
        with np.errstate(divide="ignore"):  # min_p 0 is off: no floor
            floor = np.log(options["min_p"])
        for column, values in enumerate((options["temperature"], floor, options["top_p"])):
            rows[:, column] = values.astype(np.float32).view(np.int32)
        for column, name in enumerate(("top_k", "seed_low", "seed_high", "position"), start=3):
            rows[:, column] = options[name]
        rows[:, 7] = np.arange(index.size)
        n = index.size
        tops, scores = (self._new(n, torch.float32) for _ in range(2))
        ids, broken = (self._new(n, torch.int32) for _ in range(2))
        cuts = torch.empty((n, 2), dtype=torch.int32, device=self._device)
        tokens = torch.empty(n, dtype=torch.int64, device=self._device)
        small = min(self._block, BEST_BLOCK)
        picked = (
            logits if _in_order(index, logits) else logits.index_select(0, to_device(index, self._device))
        )
        sent = to_device(rows, self._device)
        kernels.best_kernel[(n, self._splits)](
            picked,
            tops,
            ids,
            broken,
            picked.stride(0),
            VOCAB=vocab,
            SAMPLED=vocab,
            SPLITS=self._splits,
            BLOCK=small,
        )
        draw_kernels.cut_kernel[(n,)](
            picked,
            sent,
            tops,
            cuts,
            picked.stride(0),
            VOCAB=vocab,
            BLOCK=self._block,
            SPLITS=self._splits,
            num_warps=CUT_WARPS,
        )
        draw_kernels.draw_kernel[(n, self._splits)](
            picked,
            sent,
            tops,
            cuts,
            scores,
            ids,
            picked.stride(0),
            VOCAB=vocab,
            BLOCK=min(self._block, DRAW_BLOCK),
            SPLITS=self._splits,
            num_warps=DRAW_WARPS,
        )
        draw_kernels.pick_kernel[(n,)](scores, ids, tokens, VOCAB=vocab, SPLITS=self._splits)
        return tokens

    def _new(self, rows: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((rows, self._splits), dtype=dtype, device=self._device)


def _in_order(index: I64, logits: torch.Tensor) -> bool:
    return index.size == logits.shape[0] and bool((index == np.arange(index.size)).all())
