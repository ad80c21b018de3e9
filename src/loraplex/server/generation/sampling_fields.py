"""From a request's fields to sampling parameters, checked once.

Specification: rulings "Sampling", "Text".
"""

from __future__ import annotations

from typing import Any

from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.request import SamplingParams
from loraplex.server.wire import GenerationFields

_SAME_NAME = (
    "n", "stop", "seed", "temperature", "top_p", "presence_penalty", "frequency_penalty", "ignore_eos",
    "min_p",
    "top_k", "repetition_penalty", "alora_fallback", "stop_token_ids", "skip_special_tokens",
    "include_stop_str_in_output", "min_tokens", "allowed_token_ids", "bad_words",
)  # fmt: skip

_MAX_TOKEN_DIGITS = 20


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


def scored_prompt(request: GenerationFields, echoed: int | None = None) -> int | None:
    """Alternatives reported at each position of the prompt; None where nothing is. echoed: as the repeated
    prompt of a completion asks for them.

    Raises `invalid_request` for a stream, which has no place for them.
    """
    asked = request.prompt_logprobs
    if asked is None:
        return echoed
    if request.stream:
        raise CallerError(
            ErrorCode.INVALID_REQUEST,
            "prompt_logprobs are not available when stream is true; leave one of them out",
            param="prompt_logprobs",
        )
    return asked if echoed is None or asked < 0 else max(asked, echoed)


def _token(key: str) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > _MAX_TOKEN_DIGITS:
        raise CallerError(
            ErrorCode.INVALID_SAMPLING,
            f"logit_bias has the key {key[:40]!r}, expected a token id",
            param="logit_bias",
        )
    return int(key)
