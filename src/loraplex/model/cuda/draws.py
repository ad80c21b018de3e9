"""Sampling with noise on the device: one launch for any mixture of temperature, min_p, top_k and top_p.

Owns nothing; what is drawn is defined by `truncate` and `philox`. Specification: DESIGN 4 "Sampling".
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from loraplex.model.cuda import draw_kernels

I64 = npt.NDArray[np.int64]

BLOCK: Final = 4096
WARPS: Final = 8


class DeviceDraws:
    """Draws tokens of rows of logits that lie on a device."""

    def __init__(self, device: torch.device, block: int = BLOCK) -> None:
        self._device, self._block = device, block

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
        rows[:, 7] = index
        sent = torch.from_numpy(rows)
        if self._device.type == "cuda":
            sent = sent.pin_memory().to(self._device, non_blocking=True)
        tokens = torch.empty(index.size, dtype=torch.int64, device=self._device)
        draw_kernels.draw_kernel[(index.size,)](
            logits, sent, tokens, logits.stride(0), VOCAB=vocab, BLOCK=self._block, num_warps=WARPS
        )
        return tokens
