"""Log probabilities in OpenAI's two shapes, and vLLM's of a prompt. The engine's entries have the actual
token first, then the top ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.core import limits
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.messages import TokenLogprobs
from loraplex.server.answers import (
    LOGPROB_FLOOR,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from loraplex.text.codec import TextCodec


def token_text(codec: TextCodec | None, token_id: int) -> str:
    """A token for display; `token_id:N` without a tokenizer."""
    return f"token_id:{token_id}" if codec is None else codec.token_text(token_id)


def _finite(value: float) -> float:
    return max(value, LOGPROB_FLOOR)


class CompletionScores:
    """Builds completions' log probabilities piece by piece; offsets go on from piece to piece."""

    def __init__(self, codec: TextCodec | None, top: int) -> None:
        """top: alternatives a position, beside the actual token."""
        self._codec = codec
        self._top = top
        self._offset = 0

    def first(self, token_id: int) -> CompletionLogprobs:
        """The first prompt token, which nothing predicts."""
        text = token_text(self._codec, token_id)
        at, self._offset = self._offset, self._offset + len(text)
        return CompletionLogprobs([text], [None], [None], [at])

    def add(self, entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """The next positions."""
        out = CompletionLogprobs([], [], [], [])
        for entry in entries:
            text = token_text(self._codec, entry.ids[0])
            out.tokens.append(text)
            out.token_logprobs.append(_finite(entry.values[0]))
            out.text_offset.append(self._offset)
            self._offset += len(text)
            out.top_logprobs.append(self._alternatives(entry))
        return out

    def _alternatives(self, entry: TokenLogprobs) -> dict[str, float]:
        found: dict[str, float] = {}
        pairs = list(zip(entry.ids, entry.values, strict=True))
        for token_id, value in [*pairs[1 : self._top + 1], pairs[0]]:
            found.setdefault(token_text(self._codec, token_id), _finite(value))
        return found


def joined(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    """Several pieces as one."""
    return CompletionLogprobs(
        [token for part in parts for token in part.tokens],
        [value for part in parts for value in part.token_logprobs],
        [entry for part in parts for entry in part.top_logprobs],
        [offset for part in parts for offset in part.text_offset],
    )


def chat_logprobs(codec: TextCodec, entries: Sequence[TokenLogprobs], top: int) -> ChatLogprobs:
    """Entries in chat's shape. top: alternatives a position."""
    return ChatLogprobs([_chat_entry(codec, entry, top) for entry in entries])


def _chat_entry(codec: TextCodec, entry: TokenLogprobs, top: int) -> TokenLogprob:
    listed = [
        TopLogprob(codec.token_text(token_id), _finite(value), list(codec.token_bytes(token_id)))
        for token_id, value in zip(entry.ids, entry.values, strict=True)
    ]
    actual = listed[0]
    return TokenLogprob(actual.token, actual.logprob, actual.bytes, listed[1 : top + 1])


def check_scores(prompt_tokens: int, samples: int, top: int | None, param: str) -> None:
    """Raise `invalid_request` where the prompts' log probabilities would be more than one answer holds. top:
    alternatives a position; None is none at all.
    """
    if top is None:
        return
    scores = prompt_tokens * samples * (top + 1)
    if scores > limits.MAX_PROMPT_LOGPROBS:
        raise CallerError(
            ErrorCode.INVALID_REQUEST,
            f"{prompt_tokens} prompt tokens with {top} alternatives in {samples} samples make {scores} log "
            f"probabilities, the limit is {limits.MAX_PROMPT_LOGPROBS}; send fewer prompts at a time or "
            f"lower {param}",
            param=param,
        )


def prompt_logprobs(codec: TextCodec | None, entries: Sequence[TokenLogprobs], top: int) -> PromptLogprobs:
    """Entries of a prompt's positions from the second on, in vLLM's shape. top: alternatives a position."""
    return [None, *(_prompt_entry(codec, entry, top) for entry in entries)]


def _prompt_entry(codec: TextCodec | None, entry: TokenLogprobs, top: int) -> dict[int, PromptLogprob]:
    ranks = (entry.rank, *range(1, top + 1))
    listed = zip(
        ranks, entry.ids, entry.values, strict=False
    )  # it may have more entries than were asked here
    return {
        token: PromptLogprob(_finite(value), rank, None if codec is None else codec.token_text(token))
        for rank, token, value in listed
    }
