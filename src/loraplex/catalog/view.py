"""What names mean now, in memory: the catalog's current revisions and grants, kept up to a generation.

A look-up is one dictionary access, also with ten thousand adapters. A tenant reaches its own namespace, then
what it may use in `default`, and anything else that it was granted as `NAMESPACE/ALIAS`; what it may not use
does not exist for it. Rights are checked before anything is said about an alias. Never touches a database.

Specification: 0x01G; rulings "Tenants", architecture "A request's way" (2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from loraplex.catalog.changes import Changes, not_registered
from loraplex.catalog.records import ANY, DEFAULT_NAMESPACE, AliasKey, Grant, Revision, Right
from loraplex.catalog.sealed_rows import AliasState
from loraplex.core.errors import CallerError, ErrorCode, LoraplexError

MAX_REVISION_DIGITS: Final = 9


class CatalogView:
    """Current revisions by (namespace, alias), as of `generation`."""

    def __init__(self) -> None:
        self.generation = -1
        self.damaged: dict[AliasKey, LoraplexError] = {}
        self._current: dict[AliasKey, Revision] = {}
        self._names: Counter[str] = Counter()
        self._grants: dict[str, list[Grant]] = {}

    def __iter__(self) -> Iterator[Revision]:
        return iter(list(self._current.values()))

    def __len__(self) -> int:
        return len(self._current)

    def apply(self, changes: Changes) -> list[Revision]:
        """Move to the changes' generation; returns revisions that are no longer current. Older changes do
        nothing.
        """
        if changes.generation <= self.generation:
            return []
        superseded = [old for state in changes.aliases if (old := self._set(state)) is not None]
        if changes.grants is not None:
            self._grants = {}
            for grant in changes.grants:
                self._grants.setdefault(grant.tenant, []).append(grant)
        self.generation = changes.generation
        return superseded

    def ahead(self, state: AliasState) -> list[Revision]:
        """See one change before those that came between; the generation stays, so that they, and it again,
        are still to come. Returns what is no longer current.
        """
        old = self._set(state)
        return [] if old is None else [old]

    def get(self, alias_key: AliasKey) -> Revision | None:
        """Current revision of an alias; raises its error when its record is damaged."""
        if self.damaged and alias_key in self.damaged:
            raise self.damaged[alias_key]
        return self._current.get(alias_key)

    def now(self, alias_key: AliasKey) -> Revision | None:
        """Current revision of an alias, or None; also None when its record is damaged."""
        return self._current.get(alias_key)

    def shares(self, key: str) -> bool:
        """Whether any alias stands for the semantic digest `key`."""
        return self._names[key] > 0

    def may(self, tenant: str, alias_key: AliasKey, right: Right) -> bool:
        """Whether a tenant may do this with an alias; everything in its own namespace."""
        namespace, alias = alias_key
        if tenant == namespace:
            return True
        return any(g.namespace == namespace and g.covers(tenant, alias, right) for g in self._granted(tenant))

    def require(self, tenant: str, alias_key: AliasKey, right: Right) -> None:
        """Raise unless a tenant may do this: `forbidden` when it may list the alias, else
        `adapter_not_found`.
        """
        if self.may(tenant, alias_key, right):
            return
        if self.may(tenant, alias_key, Right.LIST):
            raise self._not_its_own(tenant, alias_key.alias, right)
        raise not_registered(alias_key.alias)

    def find(self, tenant: str, alias: str, right: Right) -> Revision | None:
        """What a name without revision means to a tenant that needs `right`; None when there is nothing for
        it.
        """
        for alias_key in self._meant(tenant, alias):
            if alias_key in self._current or alias_key in self.damaged:
                return self.get(alias_key) if self.may(tenant, alias_key, right) else None
        return None

    def target(self, tenant: str, name: str) -> AliasKey:
        """Where a tenant publishes under a name: over what it may swap, else where it was granted to load,
        else at home.

        Raises `forbidden` for another namespace's alias by its whole name, which the tenant knows and may not
        swap: at home it would hide from the tenant what that name has meant so far.
        """
        own = AliasKey(tenant, name)
        for alias_key in self._meant(tenant, name):
            if alias_key in self._current and self.may(tenant, alias_key, Right.SWAP):
                return alias_key
        namespace, slash, rest = name.partition("/")
        there = AliasKey(namespace, rest)
        if not slash or namespace == tenant or own in self._current:
            return own
        if there not in self._current:
            return there if self.may(tenant, there, Right.LOAD) else own
        if any(self.may(tenant, there, right) for right in Right):
            raise self._not_its_own(tenant, rest, Right.SWAP)
        return own

    @staticmethod
    def _not_its_own(tenant: str, alias: str, right: Right) -> CallerError:
        return CallerError(
            ErrorCode.FORBIDDEN,
            f"adapter {alias!r} is not tenant {tenant!r}'s own, which may not {right} it",
            param="alias",
        )

    def owned(self, tenant: str, name: str) -> Revision:
        """What a tenant means by a name, if it may change it; raises as `require` does."""
        revision = self.find(tenant, name, Right.LIST)
        if revision is None:
            raise not_registered(name)
        self.require(tenant, revision.alias_key, Right.SWAP)
        return revision

    def resolve(self, tenant: str, name: str) -> Revision:
        """What `alias` or `alias@revision` means to a tenant; `model_not_found` otherwise."""
        alias, at, number = name.partition("@")
        revision = self.find(tenant, alias, Right.USE)
        if revision is None or (at and number != str(revision.revision)):
            known = f"; its current revision is {revision.revision}" if revision is not None else ""
            what = "does not exist"
            if self.superseded(tenant, name) is not None:
                what = "was superseded or removed and is not held"
            raise CallerError(ErrorCode.MODEL_NOT_FOUND, f"model {name!r} {what}{known}", param="model")
        return revision

    def superseded(self, tenant: str, name: str) -> tuple[AliasKey, int] | None:
        """(alias, revision) where a tenant's `alias@revision` names an earlier revision than the current one.

        None for everything else, also for what the tenant may not use.
        """
        alias, _, number = name.partition("@")
        if not number.isascii() or not number.isdecimal() or len(number) > MAX_REVISION_DIGITS:
            return None
        current = self.find(tenant, alias, Right.USE)
        if current is None or number != str(int(number)) or not 0 < int(number) < current.revision:
            return None
        return current.alias_key, int(number)

    def visible(self, tenant: str) -> list[tuple[str, Revision]]:
        """(name for this tenant, revision) of everything that it may list, by name."""
        found = [
            (self.name_for(tenant, revision), revision)
            for revision in self._current.values()
            if self.may(tenant, revision.alias_key, Right.LIST)
        ]
        return sorted(found, key=lambda item: item[0])

    def name_for(self, tenant: str, revision: Revision) -> str:
        """How a tenant names an alias: qualified where another namespace's would be meant without."""
        own = AliasKey(tenant, revision.alias)
        if revision.namespace == tenant or (
            revision.namespace == DEFAULT_NAMESPACE and own not in self._current
        ):
            return revision.alias
        return f"{revision.namespace}/{revision.alias}"

    def _meant(self, tenant: str, alias: str) -> Sequence[AliasKey]:
        """Where a name may lie, in order."""
        alias_keys = [AliasKey(tenant, alias)]
        if tenant != DEFAULT_NAMESPACE:
            alias_keys.append(AliasKey(DEFAULT_NAMESPACE, alias))
        namespace, slash, rest = alias.partition("/")
        if slash and namespace != tenant:
            alias_keys.append(AliasKey(namespace, rest))
        return alias_keys

    def _granted(self, tenant: str) -> Iterator[Grant]:
        yield from self._grants.get(tenant, ())
        yield from self._grants.get(ANY, ())

    def _set(self, state: AliasState) -> Revision | None:
        alias_key = state.alias_key
        self.damaged.pop(alias_key, None)
        old = self._current.pop(alias_key, None)
        if old is not None:
            self._names[old.key] -= 1
            if not self._names[old.key]:
                del self._names[old.key]
        if isinstance(state.current, LoraplexError):
            self.damaged[alias_key] = state.current
        elif state.current is not None:
            self._current[alias_key] = state.current
            self._names[state.current.key] += 1
        return old if old != state.current else None
