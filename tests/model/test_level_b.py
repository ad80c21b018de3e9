"""The bound that devices are held to in half precision sees a device that deviates more than its
type does.
"""

from __future__ import annotations

import numpy as np
import pytest
from tests.gpu.level_b import Deviations, assert_level_b


def deviations(spread: float, seed: int, turned: float = 0.0) -> Deviations:
    """Forty positions of five tokens, deviating by `spread`; turned: how far below the best one own choice
    lies.
    """
    rng = np.random.default_rng(seed)
    side = Deviations()
    for position in range(40):
        reference = dict(enumerate(np.sort(rng.uniform(-5.0, 0.0, 5))[::-1].tolist()))
        if position == 7 and turned:
            reference[1] = reference[0] - turned
        own = {token: value + rng.normal(0.0, spread) for token, value in reference.items()}
        side.note(reference, own, 1 if position == 7 and turned else 0)
    return side


def test_deviations_of_a_type_pass() -> None:
    assert_level_b(deviations(0.03, 1, turned=0.05), deviations(0.03, 2))


@pytest.mark.parametrize(
    "own", [deviations(0.1, 1), deviations(0.03, 1, turned=0.6)], ids=["values", "choice"]
)
def test_more_than_that_does_not(own: Deviations) -> None:
    with pytest.raises(AssertionError):
        assert_level_b(own, deviations(0.03, 2))


def test_a_choice_that_the_reference_does_not_know_does_not_pass() -> None:
    own = deviations(0.03, 1)
    own.note({0: -0.1, 1: -2.5}, {0: -0.1, 9: -0.2}, 9)
    with pytest.raises(AssertionError):
        assert_level_b(own, deviations(0.03, 2))


def test_nothing_compared_is_no_agreement() -> None:
    own = Deviations()
    own.note({0: -0.1}, {5: -0.1}, 0)
    with pytest.raises(AssertionError, match="no log probabilities"):
        assert_level_b(own, deviations(0.03, 2))
