"""From a caller's sampling parameters to what the engine executes: seeds fixed, end tokens merged.

One way for the server and for `LLM`, so that a seed gives the same samples through both.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable

from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.messages import EngineSampling
from loraplex.core.request import SamplingParams
from loraplex.text.codec import TextCodec


def prompt_seed(params: SamplingParams) -> int:
    """The seed of one prompt: the caller's own, else one that is drawn here. -1 is none, as clients
    mean it.
    """
    return secrets.randbits(64) if params.seed in (None, -1) else params.seed


def sample_seed(seed: int, index: int) -> int:
    """Seed of the `index`-th of `n` samples, as two's-complement 64 bits; sample 0 keeps the prompt's."""
    value = seed % (1 << 64)
    if index:
        value = int.from_bytes(hashlib.sha256(f"{value}/{index}".encode()).digest()[:8], "little")
    return value - (1 << 64) if value >> 63 else value


def check_sampling(params: SamplingParams, codec: TextCodec | None) -> None:
    """Raise for what a model with this tokenizer could not carry out: `tokenizer_missing`,
    `token_out_of_range`.

    Ids from the tokenizer's size on are never sampled: what is said of them would say nothing.
    """
    if codec is None:
        for name, texts in (("stop", params.stop_strings), ("bad_words", params.bad_words)):
            if texts:
                raise CallerError(
                    ErrorCode.TOKENIZER_MISSING,
                    f"{name} is text and the model folder has no tokenizer.json; leave it out",
                    param=name,
                )
        return
    for name, tokens in (
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or ()),
    ):
        for token in tokens:
            if token >= codec.vocab_size:
                raise CallerError(
                    ErrorCode.TOKEN_OUT_OF_RANGE,
                    f"{name} holds token id {token}, and ids from {codec.vocab_size} on, which the tokenizer "
                    "does not "
                    "know, are never sampled; leave it out",
                    param=name,
                )


def word_tokens(params: SamplingParams, codec: TextCodec | None) -> tuple[tuple[int, ...], ...]:
    """Token ids of `bad_words`, each as it begins a text and as it stands behind a space."""
    if codec is None:
        return ()
    found: set[tuple[int, ...]] = set()
    for word in params.bad_words:
        bare = word.lstrip()
        for text in (bare, " " + bare) if bare else (word,):
            found.add(tuple(codec.encode(text, False)))
    return tuple(sorted(found - {()}))


def engine_sampling(
    params: SamplingParams,
    seed: int,
    index: int,
    eos_token_ids: Iterable[int],
    bad_words: tuple[tuple[int, ...], ...] = (),
    sampled_ids: int = 0,
) -> EngineSampling:
    """The engine's part of `params` for sample `index`. seed: its prompt's.

    eos_token_ids: end a request unless `ignore_eos`, and come after `min_tokens` either way. bad_words: as
    `word_tokens` gives them. sampled_ids: as in `EngineSampling`.
    """
    ends, stops = set(eos_token_ids), set(params.stop_token_ids)
    late = ends | stops if params.min_tokens else set()
    if not params.ignore_eos:
        stops |= ends
    return EngineSampling(
        max_tokens=params.max_tokens,
        temperature=float(params.temperature),
        top_p=float(params.top_p),
        top_k=max(params.top_k, 0),  # the engine has one way to say off
        min_p=float(params.min_p),
        seed=sample_seed(seed, index),
        repetition_penalty=float(params.repetition_penalty),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        logit_bias=tuple(sorted((token, float(bias)) for token, bias in params.logit_bias.items())),
        stop_token_ids=tuple(sorted(stops)),
        logprobs=-1 if params.logprobs is None else params.logprobs,
        prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
        min_tokens=params.min_tokens,
        late_token_ids=tuple(sorted(late)),
        allowed_token_ids=tuple(sorted(set(params.allowed_token_ids or ()))),
        bad_words=bad_words,
        sampled_ids=sampled_ids,
    )
