"""From tokens to text, piece by piece, up to a stop string.

Owns what is held back: incomplete characters and the beginning of what may become a stop string. Never knows
of requests.

Specification: rulings "Text".
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from loraplex.text.codec import TextCodec
from loraplex.text.stop_strings import StopStrings

_REPLACEMENT: Final = "\ufffd"
MAX_HELD_TOKENS: Final = 32
"""Tokens that may wait for a character to complete. No character needs more; past it they are not text."""
_CONTEXT_TOKENS: Final = 6


class Detokenizer:
    """Turns a request's tokens into final text as they come.

    Special tokens and end tokens leave no text; a stop string that spells one is found all the same. Held
    back: characters whose bytes are incomplete, and the longest end that may become a stop string. What comes
    out depends on the tokens only, not on how they were split over calls.

    stopped_at: index of the token with which a stop string completed, None before. The text of the stop
    string and all that follows it is not part of the output.
    """

    def __init__(
        self,
        codec: TextCodec,
        stop_strings: Sequence[str] = (),
        skip_special: bool = True,
        context: Sequence[int] = (),
        marks: Collection[str] = (),
        *,
        ends: Collection[int] = (),
        with_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """context: tokens before the first one; some tokenizers write a word differently at the start of a
        text.

        marks: texts of special tokens that are part of the output. ends: what ends an answer, no part of it
        either way. with_stop: the stop string is part of it. min_tokens: no stop string completes before so
        many.
        """
        self._codec = codec
        self._skip = skip_special
        special = dict(codec.hidden) if skip_special else {}
        special |= {end: codec.hidden.get(end) or codec.token_text(end) for end in ends}
        self._hidden = {index: text for index, text in special.items() if text not in marks}
        self._marks = {index: text for index, text in special.items() if text in marks}
        self._stops = StopStrings(stop_strings, self._hidden.values(), kept=with_stop)
        self._window: list[int] = list(context[-_CONTEXT_TOKENS:])
        self._shown = len(self._decode().rstrip(_REPLACEMENT))
        self._read = len(self._window)
        self._count = 0
        self._min_tokens = min_tokens
        self.stopped_at: int | None = None

    @property
    def stop_string(self) -> str | None:
        """The stop string that completed, None before."""
        return self._stops.completed

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that is final after these tokens."""
        out = ""
        for token in token_ids:
            if self.stopped_at is not None:
                break
            if token in self._hidden:
                out += self._release(self._hidden[token], shown=False)
            elif token in self._marks:
                out += self._release(self._marks[token])
            else:
                out += self._release(self._text_of(token))
            self._count += 1
        return out

    def finish(self) -> str:
        """What was still held back; incomplete characters become U+FFFD."""
        if self.stopped_at is not None:
            return ""
        text = self._decode()[self._shown :]
        self._shown += len(text)
        return self._release(text, final=True)

    def _decode(self) -> str:
        return self._codec.decode(self._window, self._skip)

    def _text_of(self, token: int) -> str:
        """New complete characters. The window begins one step before what was shown last, so that its text is
        stable.
        """
        self._window.append(token)
        text = self._decode()
        complete = text.rstrip(_REPLACEMENT)
        if len(self._window) - self._read > MAX_HELD_TOKENS:
            complete = text
        new = complete[self._shown :]
        if not new:
            return ""
        self._shown = len(complete)
        if len(complete) == len(text):
            self._window = self._window[self._read :]
            self._read = len(self._window)
            self._shown = len(self._decode())
        return new

    def _release(self, text: str, *, shown: bool = True, final: bool = False) -> str:
        """Add `text`; give back what no stop string can reach any more."""
        out, stopped = self._stops.add(
            text, shown=shown, final=final, early=self._count < self._min_tokens + final
        )
        if stopped:
            self.stopped_at = max(self._count - (1 if final else 0), 0)
        return out
