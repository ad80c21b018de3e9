"""From a caller's sampling parameters to what the engine executes: seeds fixed, end tokens merged.

The server and `LLM` share it: one seed means the same samples in both.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Final

from loraplex.core.messages import EngineSampling
from loraplex.core.request import SamplingParams

_SEED_STEP: Final = 0x9E37_79B9_7F4A_7C15


def first_seed(params: SamplingParams) -> int:
    """The caller's seed, or a fresh one; drawn once for the samples of one prompt."""
    return params.seed if params.seed is not None else secrets.randbits(63)


def sample_seed(seed: int, index: int) -> int:
    """Seed of the `index`-th of `n` samples, as two's-complement 64 bits; sample 0 keeps the caller's."""
    value = (seed + index * _SEED_STEP) & 0xFFFF_FFFF_FFFF_FFFF
    return value - (1 << 64) if value >> 63 else value


def engine_sampling(
    params: SamplingParams, seed: int, index: int, eos_token_ids: Iterable[int]
) -> EngineSampling:
    """The engine's part of `params` for sample `index`. eos_token_ids: end a request unless `ignore_eos`."""
    stops = set(params.stop_token_ids)
    if not params.ignore_eos:
        stops.update(eos_token_ids)
    return EngineSampling(
        max_tokens=params.max_tokens,
        temperature=float(params.temperature),
        top_p=float(params.top_p),
        top_k=params.top_k,
        min_p=float(params.min_p),
        seed=sample_seed(seed, index),
        repetition_penalty=float(params.repetition_penalty),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        logit_bias=tuple(sorted((token, float(bias)) for token, bias in params.logit_bias.items())),
        stop_token_ids=tuple(sorted(stops)),
        logprobs=-1 if params.logprobs is None else params.logprobs,
        prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
    )
