"""Token counts on the device, for the requests that use penalties and for no others.

Owns one row of counts for each such request slot; rows are made on demand and reused. Never decides which
token is drawn. Specification: rulings "Sampling".
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.model.sampler_cpu import CompiledSampling
from loraplex.model.transfer import to_device

I32 = npt.NDArray[np.int32]


class TokenCounts:
    """Counts of output tokens and presence of prompt tokens, each [rows, vocab], rows grown by doubling."""

    def __init__(
        self,
        max_requests: int,
        vocab_size: int,
        device: torch.device,
        compiled: CompiledSampling | None = None,
    ) -> None:
        self._vocab = vocab_size
        self._device = device
        self._compiled = compiled
        self._row_of = np.full(max_requests, -1, dtype=np.int64)
        self._free: list[int] = []
        self._output = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)

    @property
    def rows(self) -> int:
        """Rows that exist on the device."""
        return int(self._output.shape[0])

    def open(self, slot: int, history: I32, prompt_tokens: int) -> None:
        """Start counting for a slot. history: its tokens so far, the first `prompt_tokens` of them the
        prompt.
        """
        if history.size and (history.min() < 0 or history.max() >= self._vocab):
            raise InternalFault(
                ErrorCode.PLAN_MALFORMED,
                f"history of request slot {slot} leaves the vocabulary of {self._vocab} tokens",
            )
        self.close(slot)
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._row_of[slot] = row
        prompt, output = history[:prompt_tokens], history[prompt_tokens:]
        self._prompt[row].zero_()
        self._prompt[row, self._ids(prompt)] = True
        counts = np.bincount(output, minlength=self._vocab).astype(np.int32)
        self._output[row].copy_(to_device(counts, self._device))

    def close(self, slot: int) -> None:
        """Give the slot's row back, if it has one."""
        row = int(self._row_of[slot])
        if row >= 0:
            self._row_of[slot] = -1
            self._free.append(row)

    def add(self, slots: npt.NDArray[np.int64], tokens: torch.Tensor) -> None:
        """Count one drawn token for each slot. tokens int64 [n] on the device; slots distinct and open."""
        rows = self._ids(self._row_of[slots])
        self._output[rows, tokens] += 1

    def penalise(
        self,
        logits: torch.Tensor,
        index: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
        penalties: npt.NDArray[np.float32],
    ) -> None:
        """Penalise rows `index` [n] of logits [*, v] in place, v at most the vocabulary, for open slots [n].

        penalties: [n, 3], repetition, presence, frequency. Repetition divides positive and multiplies other
        logits of tokens seen in prompt or output; then frequency is taken off for each output occurrence and
        presence once.
        """
        row_of, width = self._row_of[slots], logits.shape[1]
        if self._compiled is not None:
            self._compiled.penalise(logits, index, width, self._output, self._prompt, row_of, penalties)
            return
        rows, target = self._ids(row_of), self._ids(index)
        repetition, presence, frequency = to_device(penalties, self._device).T.unsqueeze(2)
        before = logits[target]
        output = self._output[rows, :width]
        drawn = output > 0
        seen = drawn | self._prompt[rows, :width]
        repeated = torch.where(before > 0, before / repetition, before * repetition)
        logits[target] = torch.where(seen, repeated, before) - frequency * output - presence * drawn

    def _grow(self) -> None:
        old = self.rows
        new = max(4, 2 * old)
        for name in ("_output", "_prompt"):
            before = getattr(self, name)
            after = before.new_zeros((new, self._vocab))
            after[:old] = before
            setattr(self, name, after)
        self._free.extend(range(new - 1, old - 1, -1))

    def _ids(self, values: npt.NDArray[np.signedinteger]) -> torch.Tensor:
        return to_device(values.astype(np.int64), self._device)
