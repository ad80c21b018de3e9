"""Alpha as exact decimal text, and the effective scale that follows from alpha, rank and rule.

Identity holds alpha and the rule; the scale itself is derived where it is needed, as PEFT derives it: in
float64, then rounded to float32. Specification: 0x01G (s = alpha / r), 0x02F (scale placement).
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Final

import numpy as np

MAX_ALPHA: Final = 1e9


class ScaleRule(StrEnum):
    """How the scale follows from alpha and rank."""

    ALPHA_OVER_R = "alpha/r"
    ALPHA_OVER_SQRT_R = "alpha/sqrt(r)"


def alpha_text(value: int | str) -> str | None:
    """Shortest decimal text of a positive finite alpha, None for anything else.

    16, "16.0" and "1.6e1" are the same number and give the same text.
    """
    if isinstance(value, int) and abs(value) >= MAX_ALPHA:
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    if not 0.0 < number < MAX_ALPHA:
        return None
    return str(int(number)) if number.is_integer() else repr(number)


def scale_of(alpha: str, rank: int, rule: ScaleRule) -> float:
    """The effective scale in float64; alpha from `alpha_text`, rank >= 1."""
    match rule:
        case ScaleRule.ALPHA_OVER_R:
            return float(alpha) / rank
        case ScaleRule.ALPHA_OVER_SQRT_R:
            return float(alpha) / math.sqrt(rank)


def scale_bits(alpha: str, rank: int, rule: ScaleRule) -> int:
    """Bit pattern of the float32 scale, as a signed 32-bit integer."""
    return int(np.float32(scale_of(alpha, rank, rule)).view(np.int32))
