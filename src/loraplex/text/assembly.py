"""From the engine's messages to an answer: text, stop strings, log probabilities, counts and the end of one
sample.

The one place where an answer is put together, for the server and for `LLM`. A front end hands over every
message of a sample and gets what it adds; where a stop string completes, it is told which token was the last,
and tells the engine.

Never sends anything and never knows how an answer is written. Specification: architecture "A request's way"
(11), rulings "Text".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from loraplex.core.errors import ErrorCode, error_for
from loraplex.core.messages import Ended, TokenBinding, TokenLogprobs, Tokens
from loraplex.core.request import FinishReason, SamplingParams
from loraplex.text.codec import TextCodec
from loraplex.text.detokenizer import Detokenizer
from loraplex.text.tools.tool_types import CallDelta
from loraplex.text.tools.tool_use import ToolUse

TOOL_CALLS: Final = "tool_calls"
"""Why an answer ended that came to its end and holds calls."""


@dataclass(slots=True)
class Piece:
    """A part of one sample's answer, or all of it. choice: which sample. finish_reason: None until it is
    over.

    stop_reason: the stop string or the token of `stop_token_ids` that ended it. calls: what calls of tools
    get; their text is no part of `text`.
    """

    choice: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    calls: list[CallDelta] = field(default_factory=list)

    def add_text(self, parts: Sequence[str | CallDelta]) -> None:
        """Add what a parser of calls made of a text; what one call gets is one delta."""
        for part in parts:
            if isinstance(part, str):
                self.text += part
            elif self.calls and self.calls[-1].index == part.index:
                self.calls[-1] = self.calls[-1].followed_by(part)
            else:
                self.calls.append(part)


def _ends(codec: TextCodec, params: SamplingParams) -> set[int]:
    """Tokens that end an answer and are no part of it."""
    ends = set() if params.ignore_eos else set(codec.eos_token_ids)
    return ends if params.include_stop_str_in_output else ends | set(params.stop_token_ids)


class SampleAssembly:
    """One sample on its way. tokens: generated up to now, none behind a stop string. over: nothing more is
    added.

    binding: what its latest tokens were computed with. cached_tokens: of the prompt, reused when it was first
    answered; None before that.
    """

    def __init__(
        self,
        choice: int,
        codec: TextCodec | None,
        params: SamplingParams,
        prompt: Sequence[int],
        tools: ToolUse | None = None,
    ) -> None:
        """codec: None gives token ids without text. prompt: its text continues there. tools: what the answer
        may call.
        """
        self.choice = choice
        self.tokens = 0
        self.over = False
        self.finish_reason: str | None = None
        self.binding: TokenBinding | None = None
        self.cached_tokens: int | None = None
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._parser = None if tools is None else tools.parser()
        marks = () if tools is None else tools.form.marks.texts
        self._detokenizer = (
            None
            if codec is None
            else Detokenizer(
                codec,
                params.stop_strings,
                params.skip_special_tokens,
                prompt,
                marks,
                ends=_ends(codec, params),
                with_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        )

    def take(self, message: Tokens | Ended, piece: Piece) -> int | None:
        """Add what a message brings to `piece`.

        The number of tokens that the engine is to finish with, where a stop string completed; None else.
        Raises the error with which the engine ended the request.
        """
        if self.over:
            return None
        if isinstance(message, Ended):
            self._end(message, piece)
            return None
        return self._add(message, piece)

    def _add(self, message: Tokens, piece: Piece) -> int | None:
        count, stopped = len(message.token_ids), False
        self.binding = message.binding or self.binding
        if self.cached_tokens is None and self.binding is not None:
            self.cached_tokens = self.binding.reused
        piece.prompt_logprobs += message.prompt_logprobs
        if self._detokenizer is not None:
            self._say(self._detokenizer.push(message.token_ids), piece)
            at = self._detokenizer.stopped_at
            if at is not None:
                count, stopped = at + 1 - self.tokens, True
        self.tokens += count
        piece.token_ids += message.token_ids[:count]
        piece.logprobs += message.logprobs[:count]
        if not stopped:
            return None
        self._finish(FinishReason.STOP.value, piece)
        return self.tokens

    def _end(self, message: Ended, piece: Piece) -> None:
        if message.code is not None:
            self.over = True
            raise error_for(ErrorCode(message.code), message.message, param=message.param)
        reason = message.finish_reason
        if message.stop_token in self._stop_token_ids:
            piece.stop_reason = message.stop_token
        if self._detokenizer is not None:
            self._say(self._detokenizer.finish(), piece)
            if self._detokenizer.stopped_at is not None:
                reason = FinishReason.STOP.value
        self._finish(reason, piece)

    def _say(self, text: str, piece: Piece) -> None:
        if self._parser is None:
            piece.text += text
        else:
            piece.add_text(self._parser.push(text))

    def _finish(self, reason: str | None, piece: Piece) -> None:
        self.over = True
        if self._parser is not None:
            piece.add_text(self._parser.finish())
            if self._parser.calls and reason == FinishReason.STOP.value:
                reason = TOOL_CALLS
        if self._detokenizer is not None and self._detokenizer.stop_string is not None:
            piece.stop_reason = self._detokenizer.stop_string
        self.finish_reason = piece.finish_reason = reason


def fewest_cached(samples: Iterable[SampleAssembly]) -> int:
    """Prompt tokens that were not computed for any sample of a prompt: what one of them computed is not
    cached.
    """
    return min((sample.cached_tokens or 0 for sample in samples), default=0)
