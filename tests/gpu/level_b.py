"""Equality level b for half precision: what a type does to a model is measured on the CPU, and bounds what a
device may do.

The reference is float32. The yardstick is the same model in the same half type in plain torch on the CPU, fed
with the same tokens. See docs/decisions/tests.md, "Half precision is held to its own error".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from loraplex.core.plan import StepResult

RMS_RATIO = 2.0
"""A device sums in another order and rounds probabilities elsewhere; a wrong kernel is off by orders of
magnitude.
"""
FLOOR = 1e-3
"""Deviations as small as this say nothing about a half type."""


@dataclass
class Deviations:
    """Of one side from the reference. values: of log probabilities of the reference's best tokens. gaps: how
    far below the reference's best its own choice lies there, 0 where they agree.
    """

    values: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def note(self, reference: Mapping[int, float], own: Mapping[int, float], token: int) -> None:
        """One position. reference, own: log probabilities of each side's best tokens; token: own choice."""
        best = max(reference.values())
        # A choice that is not even among the reference's best is as far away as the last of them, at least.
        self.gaps.append(best - reference.get(token, min(reference.values()) - 1.0))
        self.values += [own[t] - value for t, value in reference.items() if t in own]

    @property
    def rms(self) -> float:
        """Root mean square of the deviations."""
        return float(np.sqrt(np.mean(np.square(self.values))))

    @property
    def worst(self) -> float:
        """Largest deviation."""
        return float(np.abs(self.values).max())


def assert_level_b(own: Deviations, yardstick: Deviations) -> None:
    """The device deviates no more than its type does, and differs only where such deviations can turn a
    choice over.

    Two log probabilities that are each off by e at most change places only within 2 e of each other.
    """
    assert len(own.values) >= len(own.gaps), "no log probabilities were compared"
    assert own.rms <= RMS_RATIO * yardstick.rms + FLOOR, (own.rms, yardstick.rms)
    assert max(own.gaps) <= 2 * RMS_RATIO * yardstick.worst + FLOOR, (max(own.gaps), yardstick.worst)


def step_best(result: StepResult) -> list[dict[int, float]]:
    """Log probabilities of each sample's best tokens, the sampled one among them."""
    out = []
    values = result.logprob_values.view(np.float32)
    for lo, hi in zip(result.logprob_indptr[:-1].tolist(), result.logprob_indptr[1:].tolist(), strict=True):
        out.append(dict(zip(result.logprob_ids[lo:hi].tolist(), values[lo:hi].tolist(), strict=True)))
    return out


def note_step(sides: Sequence[Deviations], reference: StepResult, results: Sequence[StepResult]) -> None:
    """One step of each side against the reference's."""
    best = step_best(reference)
    for side, result in zip(sides, results, strict=True):
        for expected, own, token in zip(best, step_best(result), result.tokens.tolist(), strict=True):
            side.note(expected, own, token)
