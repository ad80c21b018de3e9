"""Chooses tokens on the device: penalties, temperature, truncation, and Gumbel noise keyed by (seed; position, token).

Owns sampling state per request slot (parameters, bias, token counts). Never decides who samples: the plan's sample
rows do. What a row draws depends on its own logits, parameters and position alone, in any batch and on any device.

Specification: 0x03E; DESIGN 4 "Sampling".
"""

from __future__ import annotations

import torch

from loraplex.core.packed import I32


class Sampler:
    """Sampling for request slots 0 to max_requests - 1. Ids from `sampled_vocab` on are never drawn."""

    def __init__(self, max_requests: int, vocab_size: int, sampled_vocab: int, device: torch.device) -> None:
        raise NotImplementedError

    def open(self, opens: I32, open_bias: I32, open_history: I32) -> None:
        """Start request slots over, from the plan's arrays of these names (columns `OPEN_COLUMNS`)."""
        raise NotImplementedError

    def sample(self, logits: torch.Tensor, logit_index: I32, slots: I32, positions: I32) -> torch.Tensor:
        """One token for each sample, int64 [S] on the device; counts move on.

        logits: float32 [L, V], never changed. logit_index, slots, positions: int32 [S] on the host: row of logits,
        request slot, position of the token that is drawn.
        """
        raise NotImplementedError

    def top_logprobs(
        self, logits: torch.Tensor, logit_index: I32, chosen: torch.Tensor, top: I32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log probabilities of raw logits: ids int64 and values float32, both [n, 1 + max(top)].

        chosen: int64 [n] on the device, first in each row; then the `top[i]` best ids below `sampled_vocab`, ties to
        the lowest id. Entries of row i after 1 + top[i] mean nothing. top: int32 [n] on the host, each >= 0.
        """
        raise NotImplementedError
