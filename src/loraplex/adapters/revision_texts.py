"""Whose text each revision's requests use: what its own files say, or the base's.

Companions belong to a revision and not to an adapter: two folders of one function may have other templates.
Owns what the files of revisions said and the choice of each; the codecs themselves are `text.codecs`'s. May
be called from any thread. Specification: rulings "Text".
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from loraplex.artifact.companions import NO_COMPANIONS, Companions
from loraplex.catalog.records import AliasKey, Revision, TextWord
from loraplex.text.codec import TextCodec
from loraplex.text.codecs import Codecs, TextChoice

_KEPT_EARLIER: Final = 256
"""Superseded revisions whose companions are kept for when they are named again."""


class RevisionText:
    """What one revision's files said. A request that is bound to it keeps it, whatever becomes of
    its name.
    """

    def __init__(self, companions: Companions, make: Callable[[Companions], TextCodec | None]) -> None:
        self._companions = companions
        self._make = make
        self._made: weakref.ref[TextCodec] | None = None

    @property
    def at_hand(self) -> bool:
        """Whether `codec` has nothing to make, which takes a large tokenizer a while."""
        return self._companions == NO_COMPANIONS or (self._made is not None and self._made() is not None)

    def codec(self) -> TextCodec | None:
        """What reads and writes the text of its requests; None where the base has no tokenizer."""
        made = None if self._made is None else self._made()
        if made is None:
            made = self._make(self._companions)
            self._made = None if made is None else weakref.ref(made)
        return made


class RevisionTexts:
    """The texts of one base's adapters. Nothing to tell apart where the base has no tokenizer."""

    def __init__(self, base: TextCodec | None = None, default: str = TextChoice.ADAPTER) -> None:
        """default: whose text a revision uses that was published without a choice."""
        self.base = base
        self._default = TextChoice(default)
        self._codecs = Codecs(base, 0)
        self._making = threading.Lock()
        self._as_base = RevisionText(NO_COMPANIONS, lambda _: base)
        self._newest: dict[AliasKey, tuple[int, RevisionText]] = {}
        self._earlier: OrderedDict[tuple[AliasKey, int], RevisionText] = OrderedDict()

    def begin(self, rows: int) -> None:
        """rows: embedding rows of the base, of which a server hears from its engine."""
        self._codecs = Codecs(self.base, rows)

    def choice(self, text: TextWord | None) -> TextChoice:
        """Whose text is used, as a publication says it; None is the default."""
        return self._default if text is None else TextChoice(text)

    def check(self, companions: Companions, text: TextWord | None) -> None:
        """Raise `adapter_unsupported` where requests could not use what an adapter's files say."""
        if self.choice(text) is TextChoice.ADAPTER:
            self._make(companions)

    def keep(self, revision: Revision, companions: Companions) -> None:
        """Keep what a revision's files say."""
        number, read = revision.revision, RevisionText(companions, self._make)
        if self._newest.get(revision.alias_key, (0, read))[0] <= number:
            self._newest[revision.alias_key] = number, read
            return
        self._earlier[revision.alias_key, number] = read
        if len(self._earlier) > _KEPT_EARLIER:
            self._earlier.popitem(last=False)

    def forget(self, alias_key: AliasKey) -> None:
        """An alias is gone."""
        self._newest.pop(alias_key, None)

    def find(self, revision: Revision) -> RevisionText | None:
        """Whose text a revision's requests use; None before its files were read here."""
        if self.base is None or self.choice(revision.text) is TextChoice.BASE:
            return self._as_base
        number, read = self._newest.get(revision.alias_key, (0, None))
        return (
            read
            if number == revision.revision
            else self._earlier.get((revision.alias_key, revision.revision))
        )

    def _make(self, companions: Companions) -> TextCodec | None:
        with self._making:
            return self._codecs.of(companions)
