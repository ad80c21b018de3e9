"""From a request's fields to what the engine executes: parameters checked once, seeds fixed, end tokens merged.

Specification: DESIGN 4 "Sampling", "Text".
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.messages import EngineSampling
from loraplex.core.request import SamplingParams
from loraplex.server.wire import GenerationFields

_SAME_NAME = (
    "n", "stop", "seed", "temperature", "top_p", "presence_penalty", "frequency_penalty", "ignore_eos", "min_p",
    "top_k", "repetition_penalty",
)  # fmt: skip


def sampling_params(
    request: GenerationFields, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None = None
) -> SamplingParams:
    """The request's parameters; a field that is absent or null has its default. Raises `invalid_sampling`."""
    given: dict[str, Any] = {
        name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None
    }
    if request.logit_bias:
        given["logit_bias"] = {_token(key): bias for key, bias in request.logit_bias.items()}
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **given)


def _token(key: str) -> int:
    if not key.isascii() or not key.isdigit():
        raise CallerError(
            ErrorCode.INVALID_SAMPLING,
            f"logit_bias has the key {key[:40]!r}, expected a token id",
            param="logit_bias",
        )
    return int(key)


def sample_seed(seed: int | None, sample: int) -> int:
    """Seed of the `sample`-th of n samples, as a signed 64-bit value. The first has the caller's own; None draws one."""
    if seed is None:
        value = secrets.randbits(64)
    elif sample == 0:
        value = seed % (1 << 64)
    else:
        text = f"{seed % (1 << 64)}/{sample}".encode()
        value = int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
    return value - (1 << 64) if value >= 1 << 63 else value


def engine_sampling(params: SamplingParams, sample: int, end_tokens: frozenset[int]) -> EngineSampling:
    """What the engine executes for one sample. end_tokens: the model's end-of-sequence set."""
    stop = set(params.stop_token_ids) | (frozenset() if params.ignore_eos else end_tokens)
    return EngineSampling(
        max_tokens=params.max_tokens,
        temperature=float(params.temperature),
        top_p=float(params.top_p),
        top_k=params.top_k,
        min_p=float(params.min_p),
        seed=sample_seed(params.seed, sample),
        repetition_penalty=float(params.repetition_penalty),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        logit_bias=tuple(sorted((token, float(bias)) for token, bias in params.logit_bias.items())),
        stop_token_ids=tuple(sorted(stop)),
        logprobs=-1 if params.logprobs is None else params.logprobs,
        prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
    )
