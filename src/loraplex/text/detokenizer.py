"""From tokens to text, piece by piece, up to a stop string.

Owns what is held back: incomplete characters and the beginning of what may become a stop string. Never knows of requests.

Specification: DESIGN 4 "Text".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from loraplex.text.codec import TextCodec

_REPLACEMENT: Final = "\ufffd"
MAX_HELD_TOKENS: Final = 32
"""Tokens that may wait for a character to complete. No character needs more; past it they are not text."""
_CONTEXT_TOKENS: Final = 6


class Detokenizer:
    """Turns a request's tokens into final text as they come.

    Held back: characters whose bytes are incomplete, and the longest end that may become a stop string. What comes out
    depends on the tokens only, not on how they were split over calls.

    stopped_at: index of the token with which a stop string completed, None before. The text of the stop string and
    all that follows it is not part of the output.
    """

    def __init__(
        self,
        codec: TextCodec,
        stop_strings: Sequence[str] = (),
        skip_special: bool = True,
        context: Sequence[int] = (),
    ) -> None:
        """context: tokens before the first one; some tokenizers write a word differently at the start of a text."""
        self._codec = codec
        self._stops = tuple(stop_strings)
        self._skip = skip_special
        self._dropped = codec.eos_token_ids if skip_special else frozenset()
        self._window: list[int] = list(context[-_CONTEXT_TOKENS:])
        self._shown = len(self._decode().rstrip(_REPLACEMENT))
        self._read = len(self._window)
        self._held = ""
        self._count = 0
        self.stopped_at: int | None = None

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that is final after these tokens."""
        out = ""
        for token in token_ids:
            if self.stopped_at is not None:
                break
            if token not in self._dropped:
                out += self._release(self._text_of(token), final=False)
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
        """New complete characters. The window begins one step before what was shown last, so that its text is stable."""
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

    def _release(self, text: str, *, final: bool) -> str:
        """Add `text`; give back what no stop string can reach any more."""
        self._held += text
        hit = self._first_stop()
        if hit is not None:
            out, self._held = self._held[:hit], ""
            self.stopped_at = max(self._count - (1 if final else 0), 0)
            return out
        keep = 0 if final else self._stop_prefix()
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def _first_stop(self) -> int | None:
        """Where the stop string begins that completes first; of two that complete together, the longer one."""
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _stop_prefix(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest
