"""Rotary position embeddings: frequencies of each kind, the table of cosines and sines, the rotation in
place.

Rotation pairs element i of a head with element i + head_dim / 2, as Hugging Face checkpoints expect. Angles
are float32; the rotation runs in the table's dtype. Specification: rulings "Start-up" (default, linear,
llama3, yarn).
"""

from __future__ import annotations

import math

import torch

from loraplex.model.spec import RopeKind, RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> tuple[torch.Tensor, float]:
    """float32 [head_dim / 2] angular frequencies, and the factor that scales cosines and sines."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    match rope.kind:
        case RopeKind.DEFAULT:
            return plain, 1.0
        case RopeKind.LINEAR:
            return plain / rope.factor, 1.0
        case RopeKind.LLAMA3:
            return _llama3(plain, rope), 1.0
        case RopeKind.YARN:
            return _yarn(plain, rope, head_dim), _yarn_attention_factor(rope)


def _llama3(plain: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between interpolated."""
    turns = rope.original_positions * plain / (2.0 * math.pi)  # rotations inside the original context
    weight = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    weight = weight.clamp(0.0, 1.0)
    return (1.0 - weight) * plain / rope.factor + weight * plain


def _yarn(plain: torch.Tensor, rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Dimensions that turn often keep their frequency, rare ones are interpolated, with a linear ramp
    between.
    """

    def dimension(rotations: float) -> float:
        return (
            head_dim
            * math.log(rope.original_positions / (rotations * 2.0 * math.pi))
            / (2.0 * math.log(rope.theta))
        )

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return plain / rope.factor * ramp + plain * (1.0 - ramp)


def _yarn_attention_factor(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(mscale: float) -> float:
        return 1.0 if rope.factor <= 1.0 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


class RopeTable:
    """Cosines and signed sines of every position up to a limit.

    cos, sin: [positions, head_dim]; sin carries the sign of the rotation: -sin in the first half, +sin in the
    second.
    """

    def __init__(
        self, rope: RopeSpec, head_dim: int, positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        frequencies, scale = inverse_frequencies(rope, head_dim)
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies[None, :]
        cos, sin = angles.cos() * scale, angles.sin() * scale
        self.cos = torch.cat([cos, cos], dim=1).to(device=device, dtype=dtype)
        self.sin = torch.cat([-sin, sin], dim=1).to(device=device, dtype=dtype)

    def gather(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), each [T, 1, head_dim], of `positions` [T]."""
        return self.cos[positions][:, None, :], self.sin[positions][:, None, :]


def rotate_(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate q and k in place. heads: [T, heads, head_dim]; cos, sin from `RopeTable.gather`."""
    swapped = torch.roll(heads, heads.shape[-1] // 2, dims=-1)
    heads.mul_(cos).addcmul_(swapped, sin)
