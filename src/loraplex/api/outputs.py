"""What `LLM.generate` answers with. Specification: interface "Python"."""

from __future__ import annotations

from dataclasses import dataclass, field

from loraplex.core.messages import TokenLogprobs
from loraplex.core.request import SamplingParams
from loraplex.text.assembly import Piece
from loraplex.text.tools.tool_types import ToolCall, joined


@dataclass(slots=True)
class Sample:
    """One completion. logprobs[i]: token id -> log probability for the i-th token, the sampled one always in
    it. tool_calls: what the answer calls, which is no part of its text.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[dict[int, float]] | None = None
    finish_reason: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)


@dataclass(slots=True)
class RequestOutput:
    """Answer to one prompt. samples: all `n` completions; the short names speak of the first.

    prompt_logprobs[i]: token id -> log probability at prompt position i (top entries and the actual token),
    None at position 0. adapter: `alias@revision`, or None for the base. cached_tokens: of the prompt, whose
    KV rows were reused; with several samples, the fewest.
    """

    prompt_token_ids: list[int]
    adapter: str | None
    samples: list[Sample]
    prompt_logprobs: list[dict[int, float] | None] | None = None
    cached_tokens: int = 0

    @property
    def token_ids(self) -> list[int]:
        """Generated tokens of the first sample."""
        return self.samples[0].token_ids

    @property
    def text(self) -> str:
        """Text of the first sample; empty without a tokenizer."""
        return self.samples[0].text

    @property
    def logprobs(self) -> list[dict[int, float]] | None:
        """Log probabilities of the first sample."""
        return self.samples[0].logprobs

    @property
    def finish_reason(self) -> str | None:
        """Why the first sample ended."""
        return self.samples[0].finish_reason

    @property
    def tool_calls(self) -> list[ToolCall]:
        """What the first sample calls, in order."""
        return self.samples[0].tool_calls


def output_of(
    prompt: list[int],
    adapter: str | None,
    params: SamplingParams,
    answers: list[Piece],
    cached_tokens: int,
) -> RequestOutput:
    """The answer to one prompt. answers: whole answers of its samples, in order."""
    samples = [
        Sample(
            list(piece.token_ids),
            piece.text,
            None if params.logprobs is None else list(map(_by_token, piece.logprobs)),
            piece.finish_reason,
            joined(piece.calls),
        )
        for piece in answers
    ]
    scores = None if params.prompt_logprobs is None else [None, *map(_by_token, answers[0].prompt_logprobs)]
    return RequestOutput(prompt, adapter, samples, scores, cached_tokens)


def _by_token(entry: TokenLogprobs) -> dict[int, float]:
    return dict(zip(reversed(entry.ids), reversed(entry.values), strict=True))
