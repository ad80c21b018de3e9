"""What a caller may ask of one request: sampling parameters, checked on construction.

Specification: rulings "Sampling", interface "Python".
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from loraplex.core import limits
from loraplex.core.errors import CallerError, ErrorCode

ALORA_FALLBACK: Final = "base"
_LARGEST: Final = sys.float_info.max


class FinishReason(StrEnum):
    """Why a request ended with an answer."""

    STOP = "stop"
    LENGTH = "length"


def _refuse(param: str, value: object, expectation: str) -> CallerError:
    return CallerError(
        ErrorCode.INVALID_SAMPLING, f"{param} must be {expectation}, got {value!r}", param=param
    )


def _number(param: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _LARGEST:
        raise _refuse(param, value, "a finite number")
    return float(value)


def _integer(param: str, value: object, low: int, high: int | None = None) -> int:
    bound = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < low
        or (high is not None and value > high)
    ):
        raise _refuse(param, value, bound)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """What an answer is held to: one of these. choice: texts. regex: what the whole answer matches. json: a
    schema. grammar: Lark's or GBNF's words. param: what the caller called it.
    """

    choice: Sequence[str] | None = None
    regex: str | None = None
    json: Mapping[str, Any] | bool | None = None
    grammar: str | None = None
    param: str = "structured_outputs"

    def __post_init__(self) -> None:
        kinds = {"choice": (list, tuple), "regex": str, "json": (Mapping, bool), "grammar": str}
        given = {name: value for name in kinds if (value := getattr(self, name)) is not None}
        wrong = [
            name
            for name, value in given.items()
            if not isinstance(value, kinds[name])  # type: ignore[arg-type]
        ]
        texts = self.choice if isinstance(self.choice, (list, tuple)) else ()
        if len(given) != 1 or wrong or not all(isinstance(text, str) for text in texts):
            raise _refuse(
                self.param, wrong or sorted(given), "one of choice, regex, json and grammar, of its type"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a request ends. Out-of-range values raise `invalid_sampling`.

    max_tokens: output tokens at most, >= 1. temperature: [0, 100], 0 is greedy (ties to the lowest id).
    top_p: (0, 1]. top_k: 0 and -1 are off. min_p: [0, 1]. seed: 64 bits, None and -1 draw one.
    repetition_penalty: [0.01, 100], over prompt and output. presence_penalty, frequency_penalty: [-2, 2],
    over the output. logit_bias: token id -> [-100, 100]. stop: strings that end the text and are not part of
    it. stop_token_ids end the request like an end-of-sequence token. ignore_eos: end-of-sequence tokens do
    not end it. skip_special_tokens: special tokens leave no text. include_stop_str_in_output: a stop string
    stays part of the text. min_tokens: before so many, neither end-of-sequence tokens nor stop_token_ids are
    sampled, and no stop string ends the text. allowed_token_ids: nothing else is sampled, ends included; None
    is off. bad_words: texts that are not written, alone or behind a space. n: independent samples. logprobs,
    prompt_logprobs: top entries reported for each generated token, each prompt position; None is off.
    structured_outputs: what the answer is held to, of a Python caller. alora_fallback: "base" lets the base
    answer a prompt that lacks the invocation of an activated adapter; None refuses it. It has no effect on
    any other prompt.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: AnswerForm | None = None
    alora_fallback: str | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_collections()

    def _check_numbers(self) -> None:
        _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise _refuse("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")
        _integer("top_k", self.top_k, -1, limits.MAX_TOP_K)
        _integer("n", self.n, 1, limits.MAX_N)
        if self.seed is not None:
            _integer("seed", self.seed, -(1 << 63), (1 << 64) - 1)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _integer(name, value, 0, limits.MAX_LOGPROBS)
        if not 0.0 <= _number("temperature", self.temperature) <= limits.MAX_TEMPERATURE:
            raise _refuse("temperature", self.temperature, f"from 0 to {limits.MAX_TEMPERATURE:g}")
        if not 0.0 < _number("top_p", self.top_p) <= 1.0:
            raise _refuse("top_p", self.top_p, "above 0 and at most 1")
        if not 0.0 <= _number("min_p", self.min_p) <= 1.0:
            raise _refuse("min_p", self.min_p, "from 0 to 1")
        low, high = limits.MIN_REPETITION_PENALTY, limits.MAX_REPETITION_PENALTY
        if not low <= _number("repetition_penalty", self.repetition_penalty) <= high:
            raise _refuse("repetition_penalty", self.repetition_penalty, f"from {low:g} to {high:g}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= _number(name, getattr(self, name)) <= 2.0:
                raise _refuse(name, getattr(self, name), "from -2 to 2")
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise _refuse(name, getattr(self, name), "true or false")
        if self.alora_fallback not in (None, ALORA_FALLBACK):
            raise _refuse("alora_fallback", self.alora_fallback, f"{ALORA_FALLBACK!r} or left out")

    def _check_collections(self) -> None:
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, AnswerForm):
            raise _refuse("structured_outputs", self.structured_outputs, "an AnswerForm")
        if not isinstance(self.logit_bias, Mapping):
            raise _refuse("logit_bias", self.logit_bias, "a mapping of token ids to numbers")
        if not isinstance(self.stop, Collection):
            raise _refuse("stop", self.stop, "a string or a list of strings")
        if not isinstance(self.stop_token_ids, Collection):
            raise _refuse("stop_token_ids", self.stop_token_ids, "a list of token ids")
        if len(self.logit_bias) > limits.MAX_LOGIT_BIAS:
            raise _refuse("logit_bias", len(self.logit_bias), f"at most {limits.MAX_LOGIT_BIAS} entries")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, (1 << 31) - 1)
            if not -100.0 <= _number("logit_bias", bias) <= 100.0:
                raise _refuse("logit_bias", bias, "from -100 to 100")
        stops = self.stop_strings
        if len(stops) > limits.MAX_STOP_STRINGS:
            raise _refuse("stop", len(stops), f"at most {limits.MAX_STOP_STRINGS} strings")
        for text in stops:
            if not isinstance(text, str) or not 0 < len(text) <= limits.MAX_STOP_STRING_CHARS:
                raise _refuse("stop", text, f"strings of 1 to {limits.MAX_STOP_STRING_CHARS} characters")
        if len(self.stop_token_ids) > limits.MAX_STOP_TOKEN_IDS:
            raise _refuse(
                "stop_token_ids", len(self.stop_token_ids), f"at most {limits.MAX_STOP_TOKEN_IDS} ids"
            )
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, (1 << 31) - 1)
        self._check_allowed()
        self._check_words()

    def _check_allowed(self) -> None:
        allowed = self.allowed_token_ids
        if allowed is None:
            return
        if isinstance(allowed, str) or not isinstance(allowed, Collection):
            raise _refuse("allowed_token_ids", allowed, "a list of token ids")
        most = limits.MAX_ALLOWED_TOKEN_IDS
        if not 0 < len(allowed) <= most:
            raise _refuse("allowed_token_ids", len(allowed), f"1 to {most} ids, or left out")
        for token in allowed:
            _integer("allowed_token_ids", token, 0, (1 << 31) - 1)

    def _check_words(self) -> None:
        words = self.bad_words
        if isinstance(words, str) or not isinstance(words, Collection):
            raise _refuse("bad_words", words, "a list of strings")
        if len(words) > limits.MAX_BAD_WORDS:
            raise _refuse("bad_words", len(words), f"at most {limits.MAX_BAD_WORDS} strings")
        for text in words:
            if not isinstance(text, str) or not 0 < len(text) <= limits.MAX_BAD_WORD_CHARS:
                raise _refuse("bad_words", text, f"strings of 1 to {limits.MAX_BAD_WORD_CHARS} characters")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever form it was given in."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def greedy(self) -> bool:
        """Whether the highest logit is taken."""
        return self.temperature == 0.0
