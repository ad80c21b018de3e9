"""Stop strings: what of a growing text no stop string can reach any more, and where one completes.

A text has shown characters and, where a stop string spells a special token, the hidden ones of special tokens
between them: `<|im_end|>` ends an answer though it is never part of one. Knows nothing of tokens and
requests.

Specification: rulings "Text".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class StopStrings:
    """Holds back the longest end of a text that may become a stop string.

    completed: the one that ended the text, None before. A stop string without a special token is looked for
    in what is shown, one with a special token in the whole text.
    """

    def __init__(self, stops: Sequence[str], special: Iterable[str], *, kept: bool = False) -> None:
        """special: texts of tokens that are not shown. kept: a stop string that completes is part of the
        text, whole, whatever of it would not be shown otherwise.
        """
        self._kept = kept
        self.completed: str | None = None
        texts = tuple(filter(None, special))
        self._spelled = tuple(stop for stop in stops if any(text in stop for text in texts))
        self._plain = tuple(stop for stop in stops if stop not in self._spelled)
        self._held: list[tuple[str, bool]] = []
        """Characters, and whether they are shown."""
        self._early = 0
        """Of these, the first ones that no stop string may end with."""

    def add(
        self, text: str, *, shown: bool = True, final: bool = False, early: bool = False
    ) -> tuple[str, bool]:
        """What is final now, and whether a stop string is complete: then nothing of it is given. final:
        nothing follows. early: a stop string that completes in this text is none.
        """
        if not self._plain and not self._spelled:
            return (text if shown else ""), False
        if shown or self._spelled:
            self._held += [(character, shown) for character in text]
        if early:
            self._early = len(self._held)
        whole = "".join(character for character, _ in self._held)
        places = [index for index, (_, is_shown) in enumerate(self._held) if is_shown]
        seen = whole if len(places) == len(whole) else "".join(whole[index] for index in places)
        late = sum(at < self._early for at in places)
        hits = [
            (at + len(stop), at, stop)
            for stop in self._spelled
            if (at := _ending_after(whole, stop, self._early)) >= 0
        ]
        hits += [
            (places[at + len(stop) - 1] + 1, places[at], stop)
            for stop in self._plain
            if (at := _ending_after(seen, stop, late)) >= 0
        ]
        if hits:  # the one that completes first; of two that complete together, the longer one
            _, begin, self.completed = min(hits)
            before = self._release(begin)
            return before + (self.completed if self._kept else ""), True
        if final:
            return self._release(len(whole)), False
        cut = len(whole) - _begun(whole, self._spelled)
        kept = _begun(seen, self._plain)
        return self._release(min(cut, places[-kept]) if kept else cut), False

    def _release(self, cut: int) -> str:
        out = "".join(character for character, shown in self._held[:cut] if shown)
        self._held = self._held[cut:]
        self._early = max(self._early - cut, 0)
        return out


def _ending_after(text: str, stop: str, early: int) -> int:
    """Where the first occurrence begins that ends behind the first `early` characters; -1 for none."""
    return text.find(stop, max(early - len(stop) + 1, 0))


def _begun(text: str, stops: Iterable[str]) -> int:
    """Length of the longest end of a text that begins a stop string."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest
