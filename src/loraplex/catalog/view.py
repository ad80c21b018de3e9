"""What names mean now, in memory: the catalog's current revisions and grants, kept up to a generation.

A look-up is one dictionary access, also with ten thousand adapters. A tenant reaches its own namespace, then what it
may use in `default`, and anything else that it was granted as `NAMESPACE/ALIAS`; what it may not use does not exist for
it. Rights are checked before anything is said about an alias. Never touches a database.

Specification: 0x01G; rulings "Tenants", architecture "A request's way" (2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from loraplex.catalog.changes import Changes
from loraplex.catalog.records import ANY, DEFAULT_NAMESPACE, Grant, Revision, Right
from loraplex.catalog.sealed_rows import AliasState
from loraplex.core.errors import CallerError, ErrorCode, LoraplexError

Place = tuple[str, str]
MAX_REVISION_DIGITS: Final = 9


class CatalogView:
    """Current revisions by (namespace, alias), as of `generation`."""

    def __init__(self) -> None:
        self.generation = -1
        self.damaged: dict[Place, LoraplexError] = {}
        self._current: dict[Place, Revision] = {}
        self._names: Counter[str] = Counter()
        self._grants: dict[str, list[Grant]] = {}

    def __iter__(self) -> Iterator[Revision]:
        return iter(list(self._current.values()))

    def __len__(self) -> int:
        return len(self._current)

    def apply(self, changes: Changes) -> list[Revision]:
        """Move to the changes' generation; returns revisions that are no longer current. Older changes do nothing."""
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
        """See one change before those that came between; the generation stays, so that they, and it again, are still to
        come. Returns what is no longer current."""
        old = self._set(state)
        return [] if old is None else [old]

    def get(self, namespace: str, alias: str) -> Revision | None:
        """Current revision of an alias in a namespace; raises its error when its record is damaged."""
        place = (namespace, alias)
        if self.damaged and place in self.damaged:
            raise self.damaged[place]
        return self._current.get(place)

    def now(self, place: Place) -> Revision | None:
        """Current revision of an alias, or None; also None when its record is damaged."""
        return self._current.get(place)

    def shares(self, key: str) -> bool:
        """Whether any alias stands for the semantic digest `key`."""
        return self._names[key] > 0

    def may(self, tenant: str, namespace: str, alias: str, right: Right) -> bool:
        """Whether a tenant may do this with an alias; everything in its own namespace."""
        if tenant == namespace:
            return True
        return any(g.namespace == namespace and g.covers(tenant, alias, right) for g in self._granted(tenant))

    def require(self, tenant: str, namespace: str, alias: str, right: Right) -> None:
        """Raise unless a tenant may do this: `forbidden` when it may list the alias, else `adapter_not_found`."""
        if self.may(tenant, namespace, alias, right):
            return
        if self.may(tenant, namespace, alias, Right.LIST):
            raise self._not_its_own(tenant, alias, right)
        raise CallerError(ErrorCode.ADAPTER_NOT_FOUND, f"adapter {alias!r} is not registered", param="alias")

    def find(self, tenant: str, alias: str, right: Right) -> Revision | None:
        """What a name without revision means to a tenant that needs `right`; None when there is nothing for it."""
        for place in self._places(tenant, alias):
            if place in self._current or place in self.damaged:
                return self.get(*place) if self.may(tenant, *place, right) else None
        return None

    def target(self, tenant: str, name: str) -> Place:
        """Where a tenant publishes under a name: over what it may swap, else where it was granted to load, else at home.

        Raises `forbidden` for another namespace's alias by its whole name, which the tenant knows and may not swap: at
        home it would hide from the tenant what that name has meant so far.
        """
        own = (tenant, name)
        for place in self._places(tenant, name):
            if place in self._current and self.may(tenant, *place, Right.SWAP):
                return place
        namespace, slash, rest = name.partition("/")
        there = (namespace, rest)
        if not slash or namespace == tenant or own in self._current:
            return own
        if there not in self._current:
            return there if self.may(tenant, *there, Right.LOAD) else own
        if any(self.may(tenant, *there, right) for right in Right):
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
            raise CallerError(
                ErrorCode.ADAPTER_NOT_FOUND, f"adapter {name!r} is not registered", param="alias"
            )
        self.require(tenant, revision.namespace, revision.alias, Right.SWAP)
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

    def superseded(self, tenant: str, name: str) -> tuple[str, str, int] | None:
        """(namespace, alias, revision) where a tenant's `alias@revision` names an earlier revision than the current one.

        None for everything else, also for what the tenant may not use.
        """
        alias, _, number = name.partition("@")
        if not number.isascii() or not number.isdecimal() or len(number) > MAX_REVISION_DIGITS:
            return None
        current = self.find(tenant, alias, Right.USE)
        if current is None or number != str(int(number)) or not 0 < int(number) < current.revision:
            return None
        return current.namespace, current.alias, int(number)

    def visible(self, tenant: str) -> list[tuple[str, Revision]]:
        """(name for this tenant, revision) of everything that it may list, by name."""
        found = [
            (self.name_for(tenant, revision), revision)
            for revision in self._current.values()
            if self.may(tenant, revision.namespace, revision.alias, Right.LIST)
        ]
        return sorted(found, key=lambda item: item[0])

    def name_for(self, tenant: str, revision: Revision) -> str:
        """How a tenant names an alias: qualified where another namespace's would be meant without."""
        own = (tenant, revision.alias)
        if revision.namespace == tenant or (
            revision.namespace == DEFAULT_NAMESPACE and own not in self._current
        ):
            return revision.alias
        return f"{revision.namespace}/{revision.alias}"

    def _places(self, tenant: str, alias: str) -> Sequence[Place]:
        """Where a name may lie, in order."""
        places = [(tenant, alias)]
        if tenant != DEFAULT_NAMESPACE:
            places.append((DEFAULT_NAMESPACE, alias))
        namespace, slash, rest = alias.partition("/")
        if slash and namespace != tenant:
            places.append((namespace, rest))
        return places

    def _granted(self, tenant: str) -> Iterator[Grant]:
        yield from self._grants.get(tenant, ())
        yield from self._grants.get(ANY, ())

    def _set(self, state: AliasState) -> Revision | None:
        place = (state.namespace, state.alias)
        self.damaged.pop(place, None)
        old = self._current.pop(place, None)
        if old is not None:
            self._names[old.key] -= 1
            if not self._names[old.key]:
                del self._names[old.key]
        if isinstance(state.current, LoraplexError):
            self.damaged[place] = state.current
        elif state.current is not None:
            self._current[place] = state.current
            self._names[state.current.key] += 1
        return old if old != state.current else None
