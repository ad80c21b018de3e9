"""Which codec reads and writes the text of an adapter: the base's, or the base's with what the adapter's
files say.

Owns the choice and what it costs: codecs are made once for each set of companions and the least recently used
are dropped. A template of an adapter is a stranger's and runs within bounds. Never splits a token that an
adapter's tokenizer knows: it is a token here too, or the adapter is refused. Specification: rulings "Text".
"""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum
from typing import Final

from loraplex.artifact.companions import NO_COMPANIONS, Companions
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.text.chat_template import ChatTemplate
from loraplex.text.codec import TextCodec

MAX_CODECS: Final = 256


class TextChoice(StrEnum):
    """Whose template, end tokens and further tokens an adapter's requests use."""

    ADAPTER = "adapter"
    BASE = "base"


class Codecs:
    """The codecs of one base. Not shared between threads.

    rows: embedding rows of the base; a token beyond them has no embedding.
    """

    def __init__(self, base: TextCodec | None, rows: int) -> None:
        self.base = base
        self._rows = rows
        self._made: OrderedDict[Companions, TextCodec] = OrderedDict()

    def of(
        self, companions: Companions = NO_COMPANIONS, choice: TextChoice = TextChoice.ADAPTER
    ) -> TextCodec | None:
        """The codec for requests of an adapter; None where the base has no tokenizer.

        Raises `adapter_unsupported` where a template, a token or an end cannot be what the adapter's files
        say.
        """
        if self.base is None or choice is TextChoice.BASE or companions == NO_COMPANIONS:
            return self.base
        found = self._made.get(companions)
        if found is None:
            found = self._make(self.base, companions)
            self._made[companions] = found
            while len(self._made) > MAX_CODECS:
                self._made.popitem(last=False)
        self._made.move_to_end(companions)
        return found

    def _make(self, base: TextCodec, own: Companions) -> TextCodec:
        theirs = base.companions
        if own.others:
            index, text = own.others[0]
            raise CallerError(
                ErrorCode.ADAPTER_UNSUPPORTED,
                f"the vocabulary of the adapter's tokenizer is not the base's, token {text!r:.80} with the "
                f"id {index} for one; serve the adapter with the base's text, or without its tokenizer.json",
                param="text",
            )
        special = {**dict(theirs.special), **dict(own.special)}
        template = None
        if own.chat_template is not None and (own.chat_template, special) != (
            theirs.chat_template,
            dict(theirs.special),
        ):
            template = ChatTemplate(own.chat_template, special, stranger=True)
        further = [
            token
            for token in own.added
            if token.index < self._rows and base.token_id(token.text) != token.index
        ]
        ends: list[str | int] = [*own.eos_token_ids]
        if own.eos_token is not None:
            ends.append(own.eos_token)
        return base.adapted(template, further, ends)
