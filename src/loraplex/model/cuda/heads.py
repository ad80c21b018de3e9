"""From logits to greedy tokens on the device: which rows are finite, the best token of each of the plan's
samples.

Owns the partial results of the two launches.
Specification: 0x03E; rulings "Sampling" (ties to the lowest id).
"""

from __future__ import annotations

from typing import Final

import torch

from loraplex.model.cuda import kernels
from loraplex.model.cuda.inputs import StepInputs

SPLITS: Final = 32
BLOCK: Final = 1024


class GreedyHead:
    """Best tokens of logits with `vocab` columns, of which the first `sampled` may win; results go to
    `inputs`.

    rows: most rows of one call. top: float32 [rows], the best value of each row of the last call.
    """

    def __init__(self, inputs: StepInputs, rows: int, vocab: int, sampled: int) -> None:
        self._inputs, self._vocab, self._sampled = inputs, vocab, sampled
        device = inputs.device
        self._values = torch.zeros((rows, SPLITS), dtype=torch.float32, device=device)
        self._ids = torch.zeros((rows, SPLITS), dtype=torch.int32, device=device)
        self._broken = torch.zeros((rows, SPLITS), dtype=torch.int32, device=device)
        self.top = torch.zeros(rows, dtype=torch.float32, device=device)

    def run(self, logits: torch.Tensor, programs: int) -> None:
        """logits: [rows, vocab] with unit column stride; programs: the larger of its rows and the plan's
        samples.
        """
        kernels.best_kernel[(logits.shape[0], SPLITS)](
            logits,
            self._values,
            self._ids,
            self._broken,
            logits.stride(0),
            VOCAB=self._vocab,
            SAMPLED=self._sampled,
            SPLITS=SPLITS,
            BLOCK=BLOCK,
        )
        kernels.choose_kernel[(programs,)](
            self._inputs.words,
            self._values,
            self._ids,
            self._broken,
            self._inputs.sampled,
            self._inputs.finite,
            self.top,
            SPLITS=SPLITS,
        )
