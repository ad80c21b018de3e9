"""The words of a change to the catalog: what is to be published, what it expects to replace, what others did
since.

Specification: 0x07F (publication by compare-and-set).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from loraplex.artifact.card import Card
from loraplex.catalog.records import (
    ANY,
    DEFAULT_NAMESPACE,
    AliasKey,
    ArtifactRecord,
    Grant,
    Revision,
    Right,
    TextWord,
)
from loraplex.catalog.sealed_rows import AliasState
from loraplex.core.errors import CallerError, ErrorCode, LoraplexError

OPERATOR: Final = "operator"
DEFAULT_GRANT: Final = Grant(DEFAULT_NAMESPACE, ANY, ANY, (Right.LIST, Right.USE))
"""What holds in a new catalog: what the operator publishes in `default`, every tenant may list and use."""


class Mode(StrEnum):
    """What a publication may find: nothing under the alias, a current revision, or either."""

    ADD = "add"
    SWAP = "swap"
    PUT = "put"


@dataclass(frozen=True, slots=True)
class Draft:
    """What is to be published, before the catalog has numbered it. Fields as in `Revision`."""

    alias_key: AliasKey
    source: str
    artifact: ArtifactRecord
    content: str | None = None
    actor: str = OPERATOR
    card: Card | None = None
    text: TextWord | None = None


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a change expects to replace. None: whatever is there."""

    revision: int | None = None
    generation: int | None = None


ANYTHING: Final = Expectation()


@dataclass(frozen=True, slots=True)
class Changes:
    """Aliases that changed up to `generation`; grants: all of them when any changed, else None; and damaged
    ones.

    revoked: semantic digests that were revoked since, for everybody; revoked_at_home: those that a tenant
    revoked for its own namespace, where alone they were published.
    """

    generation: int
    aliases: tuple[AliasState, ...] = ()
    grants: tuple[Grant, ...] | None = None
    damaged_grants: tuple[LoraplexError, ...] = ()
    revoked: tuple[str, ...] = ()
    revoked_at_home: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Publication:
    """One line of the catalog's log."""

    generation: int
    kind: str
    namespace: str
    alias: str
    revision: int | None
    actor: str
    at_ms: int


def not_registered(alias: str) -> CallerError:
    """`adapter_not_found`."""
    return CallerError(ErrorCode.ADAPTER_NOT_FOUND, f"adapter {alias!r} is not registered", param="alias")


def already_registered(revision: Revision) -> CallerError:
    """`adapter_exists`."""
    return CallerError(
        ErrorCode.ADAPTER_EXISTS,
        f"adapter {revision.alias!r} has already been loaded, as revision {revision.revision}; swap it "
        "instead",
        param="alias",
    )


def other_revision(revision: Revision, expected: int) -> CallerError:
    """`adapter_revision_conflict`."""
    return CallerError(
        ErrorCode.ADAPTER_REVISION_CONFLICT,
        f"adapter {revision.alias!r} is at revision {revision.revision}, the swap expected {expected}",
        param="expected_revision",
    )
