"""The adapters of one server or one `LLM`: the durable catalog, and the view of it that look-ups use.

`AdapterCatalog` keeps the two in step: what it publishes it sees at once, what other servers published after
`refresh`. Without a URL the catalog is an SQLite database in memory, forgotten with its process; the code is
the same. Its changes are synchronous and may wait for a disk: an event loop calls them from another thread.

Specification: 0x07F; rulings "Leases".
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from loraplex.catalog.changes import (
    ANYTHING,
    OPERATOR,
    Changes,
    Draft,
    Expectation,
    Mode,
    already_registered,
    not_registered,
    other_revision,
)
from loraplex.catalog.records import (
    DEFAULT_NAMESPACE,
    AliasKey,
    ArtifactRecord,
    Revision,
    TextWord,
    check_alias,
)
from loraplex.catalog.sealed_rows import AliasState
from loraplex.catalog.store import CatalogStore
from loraplex.catalog.view import CatalogView
from loraplex.core.errors import CallerError, ErrorCode, LoraplexError

if TYPE_CHECKING:
    from loraplex.adapters.prepare import PreparedAdapter

_log: Final = logging.getLogger(__name__)
__all__ = ["DEFAULT_NAMESPACE", "AdapterCatalog", "Revision", "draft_of"]


def draft_of(
    prepared: PreparedAdapter,
    alias_key: AliasKey,
    source: str,
    actor: str = OPERATOR,
    text: TextWord | None = None,
) -> Draft:
    """What a prepared adapter asks the catalog to publish."""
    identity = prepared.identity
    record = ArtifactRecord(
        base=identity.base,
        artifact=identity.artifact,
        activation=identity.activation,
        semantic=identity.semantic,
        method=prepared.method,
        ranks=prepared.ranks,
        targets=prepared.targets,
        tensors_applied=prepared.tensors_applied,
        tensors_total=prepared.tensors_total,
        modules=prepared.modules,
        nbytes=prepared.host_bytes,
        invocation_tokens=prepared.register.invocation,
    )
    return Draft(alias_key, source, record, prepared.content, actor, prepared.card, text)


class AdapterCatalog:
    """Current revision of each alias. `view` answers look-ups; `store` is the durable side."""

    def __init__(self, reserved: frozenset[str] = frozenset(), store: CatalogStore | None = None) -> None:
        """reserved: names that no adapter may take (the base model's). store: in memory when None."""
        self.store = CatalogStore.open() if store is None else store
        self.view = CatalogView()
        self._reserved = reserved
        self.refresh()

    def __iter__(self) -> Iterator[Revision]:
        return iter(self.view)

    def __len__(self) -> int:
        return len(self.view)

    @property
    def generation(self) -> int:
        """The generation that look-ups see."""
        return self.view.generation

    @property
    def shared(self) -> bool:
        """Whether others may publish into it."""
        return not self.store.database.in_memory

    def close(self) -> None:
        """Let go of the database."""
        self.store.close()

    def refresh(self) -> list[Revision]:
        """See what others published; returns revisions that are no longer current."""
        return self.view.apply(self.store.changes(self.view.generation))

    # Look-ups

    def get(self, alias_key: AliasKey) -> Revision | None:
        """Current revision of an alias, or None."""
        return self.view.get(alias_key)

    def current(self, alias_key: AliasKey) -> Revision:
        """Current revision of an alias; `adapter_not_found` otherwise."""
        revision = self.view.get(alias_key)
        if revision is None:
            raise not_registered(alias_key.alias)
        return revision

    def resolve(self, name: str, tenant: str = DEFAULT_NAMESPACE) -> Revision:
        """What `alias` or `alias@revision` means to a tenant; `model_not_found` otherwise."""
        return self.view.resolve(tenant, name)

    def shares(self, key: str) -> bool:
        """Whether any alias still stands for the semantic digest `key`."""
        return self.view.shares(key)

    # Changes

    def check_new(self, alias_key: AliasKey) -> None:
        """Raise unless an alias could be added."""
        alias = check_alias(alias_key.alias)
        if alias in self._reserved:
            raise CallerError(
                ErrorCode.ADAPTER_EXISTS,
                f"{alias!r} is the base model's name; choose another alias",
                param="alias",
            )
        current = self.view.get(alias_key)
        if current is not None:
            raise already_registered(current)

    def check_swap(self, alias_key: AliasKey, expected: int | None) -> Revision:
        """The revision that a swap would replace; raises what `swap` would."""
        old = self.current(alias_key)
        if expected is not None and old.revision != expected:
            raise other_revision(old, expected)
        return old

    def publish(
        self, draft: Draft, mode: Mode, expected: Expectation = ANYTHING
    ) -> tuple[Revision | None, Revision]:
        """Publish into the store, then let look-ups see it. See `CatalogStore.publish`."""
        old, new = self.store.publish(draft, mode, expected)
        self.published(new)
        self._catch_up(new.generation)
        return old, new

    def published(self, new: Revision) -> list[Revision]:
        """Let look-ups see a revision that the store has published; returns what is no longer current."""
        return self._see(new.generation, AliasState(new.alias_key, new.revision, new))

    def removed(self, revision: Revision, generation: int) -> list[Revision]:
        """Let look-ups see a removal that the store has recorded; returns what is no longer current."""
        return self._see(generation, AliasState(revision.alias_key, revision.revision, None))

    def gone(self, revision: Revision) -> list[Revision]:
        """Let look-ups see a removal before everything that the store has recorded; returns what is no longer
        current.
        """
        return self.view.ahead(AliasState(revision.alias_key, revision.revision, None))

    def _catch_up(self, generation: int) -> None:
        """See what others published before a change of ours; the change stands, whether or not that can be
        read.
        """
        if self.view.generation < generation:
            try:
                self.refresh()
            except LoraplexError as error:
                _log.error("what others published is not seen yet: %s", error)

    def _see(self, generation: int, state: AliasState) -> list[Revision]:
        """Apply one change of our own. What others published in between is for the next `refresh`."""
        if generation <= self.view.generation:
            return []  # a refresh has seen it
        if generation == self.view.generation + 1:
            return self.view.apply(Changes(generation, (state,)))
        return self.view.ahead(state)
