"""Token counts on the device, for the requests that use penalties and for no others.

Owns one row of counts for each such request slot; rows are made on demand and reused. Never decides which token is
drawn. Specification: DESIGN 4 "Sampling".
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from loraplex.core.errors import ErrorCode, InternalFault

I32 = npt.NDArray[np.int32]


class TokenCounts:
    """Counts of output tokens and presence of prompt tokens, each [rows, vocab], rows grown by doubling."""

    def __init__(self, max_requests: int, vocab_size: int, device: torch.device) -> None:
        self._vocab = vocab_size
        self._device = device
        self._row_of = np.full(max_requests, -1, dtype=np.int64)
        self._free: list[int] = []
        self._output = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)

    @property
    def rows(self) -> int:
        """Rows that exist on the device."""
        return int(self._output.shape[0])

    def open(self, slot: int, history: I32, prompt_tokens: int) -> None:
        """Start counting for a slot. history: its tokens so far, the first `prompt_tokens` of them the prompt."""
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
        self._output[row].copy_(torch.from_numpy(counts))

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
        slots: npt.NDArray[np.int64],
        repetition: torch.Tensor,
        presence: torch.Tensor,
        frequency: torch.Tensor,
    ) -> torch.Tensor:
        """Penalised logits [n, v], v at most the vocabulary. The three penalties are float32 [n, 1].

        Repetition divides positive and multiplies other logits of tokens seen in prompt or output; then frequency is
        taken off for each output occurrence and presence once.
        """
        rows = self._ids(self._row_of[slots])
        width = logits.shape[1]
        output = self._output[rows, :width]
        drawn = output > 0
        seen = drawn | self._prompt[rows, :width]
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        out = torch.where(seen, repeated, logits)
        return out - frequency * output - presence * drawn

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
        return torch.from_numpy(values.astype(np.int64)).to(self._device)
