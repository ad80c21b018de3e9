"""Truncated sampling: which tokens of a distribution may be drawn under min_p, top_k and top_p, in this
order.

Owns no state. What a row keeps does not depend on the rows beside it: padding carries no weight, and
cumulative sums run in float64 from the best token down. Ties go to the lowest id. Specification: rulings
"Sampling".
"""

from __future__ import annotations

from typing import Final

import torch

_COMPLETE: Final = 1e-6
"""A nucleus this close to top_p is complete: float32 logits do not carry probabilities any closer."""


def candidates(
    scaled: torch.Tensor, min_p: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that may be drawn, best first.

    scaled: float32 [n, V], logits over temperature with the row's maximum at 0. min_p float32 [n, 1], 0 is
    off; top_k int64 [n, 1], 0 is off; top_p float32 [n, 1], 1 is off. Returns values float32 [n, C], -inf
    where nothing is kept, and ids int64 [n, C].
    """
    vocab = scaled.shape[1]
    limit = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab)
    floor = torch.log(min_p)
    floor = torch.maximum(floor, _kth_value(scaled, limit))
    mass = torch.exp(scaled).mul_(scaled >= floor).sum(dim=1, keepdim=True, dtype=torch.float64)
    if scaled.device.type == "cpu":
        # Tokens below (1 - p) / V of the mass weigh less than 1 - p together, so none is in the nucleus; the
        # factor of two covers rounding.
        tail = torch.log(mass * (1.0 - top_p.double()) / (2 * vocab)).float()
        values, ids = _compact(scaled, torch.where(limit < vocab, floor, torch.maximum(floor, tail)))
    else:
        # No compaction: its width would have to come to the host.
        values = scaled.masked_fill(scaled < floor, -torch.inf)
        ids = torch.arange(vocab, device=scaled.device).expand_as(scaled)
    values, order = torch.sort(values, dim=1, descending=True, stable=True)
    ids = ids.gather(1, order)
    rank = torch.arange(values.shape[1], device=scaled.device).unsqueeze(0)
    weight = torch.exp(values.double()).mul_(rank < limit)
    upto = torch.cumsum(weight, dim=1)
    # With top_k the mass is that of the k best alone, ties at the k-th value left out.
    total = torch.where(limit < vocab, upto[:, -1:], mass)
    open_nucleus = upto - weight < (top_p.double() - _COMPLETE) * total
    kept = (rank < limit) & (open_nucleus | (top_p >= 1.0) | (rank == 0))
    return values.masked_fill(~kept, -torch.inf), ids


def _kth_value(scaled: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """The k-th best value of each row, [n, 1]; -inf where k spans the vocabulary."""
    vocab = scaled.shape[1]
    out = torch.full_like(limit, -torch.inf, dtype=scaled.dtype)
    if scaled.device.type != "cpu":
        # The sort that follows cuts at k by rank; a floor would only need the largest k on the host.
        return out
    bounded = limit[:, 0] < vocab
    if bounded.any():
        ks = limit[bounded, 0]
        best = torch.topk(scaled[bounded], int(ks.max()), dim=1).values
        out[bounded] = best.gather(1, (ks - 1).unsqueeze(1))
    return out


def _compact(scaled: torch.Tensor, floor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values at or above each row's floor, left-aligned in id order: values [n, C] padded with -inf, ids [n,
    C].
    """
    mask = scaled >= floor
    counts = mask.sum(dim=1)
    width = max(1, int(counts.max()))
    row, column = mask.nonzero(as_tuple=True)
    starts = torch.cumsum(counts, 0) - counts
    place = torch.arange(row.numel(), device=scaled.device) - starts[row]
    values = scaled.new_full((scaled.shape[0], width), -torch.inf)
    ids = torch.zeros((scaled.shape[0], width), dtype=torch.int64, device=scaled.device)
    values[row, place] = scaled[row, column]
    ids[row, place] = column
    return values, ids
