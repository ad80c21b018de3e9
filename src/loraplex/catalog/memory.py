"""Alias -> revision -> artifact, in memory: what a name means now.

Revisions are immutable and numbered per alias from 1; the catalog's generation grows with each publication, and a swap
names the revision that it expects to replace. Which bytes a revision stands for is its digests; an alias is only a
name. Not durable: a restart begins with what the command line names.

Each tenant has a namespace of aliases. It reaches its own first and then `default`, where the operator's lie; what it
does not reach does not exist for it, and is answered exactly like a name that nobody has.

Specification: 0x01G (catalog identity apart from content), 0x07F (publication by compare-and-set); DESIGN 4 "Tenants".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from loraplex.core import limits
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.runtime.prepare import PreparedAdapter

DEFAULT_NAMESPACE: Final = "default"
_ALIAS: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]*")


@dataclass(frozen=True, slots=True)
class Revision:
    """One published revision of an alias. generation: the catalog's when it was published."""

    alias: str
    revision: int
    generation: int
    source: str
    prepared: PreparedAdapter
    namespace: str = "default"

    @property
    def name(self) -> str:
        """`alias@revision`."""
        return f"{self.alias}@{self.revision}"

    @property
    def key(self) -> str:
        """Semantic digest: what the engine calls it."""
        return self.prepared.identity.semantic

    def describe(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        """The adapter's public JSON (DESIGN 5). figures: the engine's answer to `Inspect`."""
        entries = [entry for entry in figures["adapters"] if entry["key"] == self.key]
        live: Mapping[str, Any] = next((entry for entry in entries if not entry["removing"]), {})
        prepared = self.prepared
        return {
            "alias": self.alias,
            "revision": self.revision,
            "artifact_digest": prepared.identity.artifact,
            "semantic_digest": prepared.identity.semantic,
            "method": prepared.method,
            "ranks": list(prepared.ranks),
            "targets": list(prepared.targets),
            "tensors_applied": prepared.tensors_applied,
            "tensors_total": prepared.tensors_total,
            "state": live.get("state", "absent"),
            "tier_bytes": {
                "device": live.get("device_pages", 0) * figures["pages"]["page_bytes"],
                "host": prepared.host_bytes,
            },
            "leases": live.get("leases", 0),
            "pinned": live.get("pinned", False),
            "generation": self.generation,
            "source": self.source,
        }


def check_alias(alias: str) -> str:
    """The alias, or `invalid_request` with what an alias looks like."""
    if len(alias) > limits.MAX_ALIAS_CHARS or not _ALIAS.fullmatch(alias):
        raise CallerError(
            ErrorCode.INVALID_REQUEST,
            f"alias {alias[:40]!r} must be 1 to {limits.MAX_ALIAS_CHARS} letters, digits or . _ : / -, "
            "beginning with a letter or digit",
            param="alias",
        )
    return alias


class AdapterCatalog:
    """Current revision of each alias of each namespace."""

    def __init__(self, reserved: frozenset[str] = frozenset()) -> None:
        """reserved: names that no adapter may take (the base model's)."""
        self.generation = 0
        self._reserved = reserved
        self._current: dict[tuple[str, str], Revision] = {}
        self._last: dict[tuple[str, str], int] = {}

    def __iter__(self) -> Iterator[Revision]:
        return iter(list(self._current.values()))

    def __len__(self) -> int:
        return len(self._current)

    def get(self, alias: str, namespace: str = DEFAULT_NAMESPACE) -> Revision | None:
        """Current revision of `alias` in a namespace, or None."""
        return self._current.get((namespace, alias))

    def find(self, alias: str, tenant: str = DEFAULT_NAMESPACE) -> Revision | None:
        """Current revision of what a tenant means by `alias`, or None."""
        return self.get(alias, tenant) or self.get(alias)

    def visible(self, tenant: str = DEFAULT_NAMESPACE) -> list[Revision]:
        """What a tenant reaches, by alias."""
        reached = (self._current[place] for place in self._current if place[0] in (tenant, DEFAULT_NAMESPACE))
        return sorted((r for r in reached if self.find(r.alias, tenant) is r), key=lambda r: r.alias)

    def check_new(self, alias: str, namespace: str = DEFAULT_NAMESPACE) -> None:
        """Raise unless `alias` could be added."""
        check_alias(alias)
        if alias in self._reserved:
            raise CallerError(
                ErrorCode.ADAPTER_EXISTS,
                f"{alias!r} is the base model's name; choose another alias",
                param="alias",
            )
        known = self.get(alias, namespace)
        if known is not None:
            raise CallerError(
                ErrorCode.ADAPTER_EXISTS,
                f"adapter {alias!r} is already registered as revision {known.revision}; swap it instead",
                param="alias",
            )

    def add(
        self, alias: str, source: str, prepared: PreparedAdapter, namespace: str = DEFAULT_NAMESPACE
    ) -> Revision:
        """Publish the first revision of an alias; `adapter_exists` when it has one."""
        self.check_new(alias, namespace)
        return self._publish(alias, source, prepared, namespace)

    def swap(
        self,
        alias: str,
        source: str,
        prepared: PreparedAdapter,
        expected: int | None = None,
        namespace: str = DEFAULT_NAMESPACE,
    ) -> tuple[Revision, Revision]:
        """Publish a new revision over the current one; returns (old, new).

        expected: the revision that the caller saw; `adapter_revision_conflict` when another one is current.
        """
        old = self.check_swap(alias, expected, namespace)
        return old, self._publish(alias, source, prepared, namespace)

    def check_swap(self, alias: str, expected: int | None, namespace: str = DEFAULT_NAMESPACE) -> Revision:
        """The revision that a swap would replace; raises what `swap` would."""
        old = self.current(alias, namespace)
        if expected is not None and old.revision != expected:
            raise CallerError(
                ErrorCode.ADAPTER_REVISION_CONFLICT,
                f"adapter {alias!r} is at revision {old.revision}, the swap expected {expected}",
                param="expected_revision",
            )
        return old

    def remove(self, alias: str, namespace: str = DEFAULT_NAMESPACE) -> Revision:
        """Take an alias away; it is unknown at once."""
        revision = self.current(alias, namespace)
        del self._current[namespace, alias]
        self.generation += 1
        return revision

    def current(self, alias: str, namespace: str = DEFAULT_NAMESPACE) -> Revision:
        """Current revision of `alias` in a namespace; `adapter_not_found` otherwise."""
        revision = self.get(alias, namespace)
        if revision is None:
            raise CallerError(
                ErrorCode.ADAPTER_NOT_FOUND, f"adapter {alias!r} is not registered", param="alias"
            )
        return revision

    def resolve(self, name: str, tenant: str = DEFAULT_NAMESPACE) -> Revision:
        """What `alias` or `alias@revision` means to a tenant now; `model_not_found` otherwise."""
        alias, at, number = name.partition("@")
        revision = self.find(alias, tenant)
        if revision is None or (at and number != str(revision.revision)):
            known = f"; its current revision is {revision.revision}" if revision is not None else ""
            raise CallerError(
                ErrorCode.MODEL_NOT_FOUND, f"model {name!r} does not exist{known}", param="model"
            )
        return revision

    def shares(self, key: str) -> bool:
        """Whether any alias still stands for the semantic digest `key`."""
        return any(revision.key == key for revision in self._current.values())

    def _publish(self, alias: str, source: str, prepared: PreparedAdapter, namespace: str) -> Revision:
        self.generation += 1
        place = (namespace, alias)
        number = self._last.get(place, 0) + 1
        self._last[place] = number
        revision = Revision(alias, number, self.generation, source, prepared, namespace)
        self._current[place] = revision
        return revision
