"""Rows of the catalog become records again: checked against their seals, their own columns, and each other.

A damaged row never stops the rows beside it: it becomes the error of its alias. Never writes.

Specification: 0x0D (the symptom of each mistaken identity); rulings "Identity".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import msgspec
from sqlalchemy import ColumnElement, Connection, RowMapping, Table, and_, func, select

from loraplex.catalog.records import AliasKey, ArtifactRecord, Grant, Revision, damaged, decode
from loraplex.catalog.schema import aliases, artifacts, grants, publications, revisions
from loraplex.core.errors import LoraplexError

_JOINED: Final = (
    aliases.c.namespace, aliases.c.alias, aliases.c.current, aliases.c.last,
    aliases.c.generation.label("changed"),
    revisions.c.generation, revisions.c.semantic, revisions.c.record, revisions.c.seal,
    artifacts.c.record.label("artifact_record"), artifacts.c.seal.label("artifact_seal"),
)  # fmt: skip


class RowKind(StrEnum):
    """Why a generation advanced."""

    ADD = "add"
    SWAP = "swap"
    REMOVE = "remove"
    GRANT = "grant"
    WITHDRAW = "withdraw"
    REVOKE = "revoke"


@dataclass(frozen=True, slots=True)
class AliasState:
    """What an alias means at a generation. current: None is a tombstone, an error a record that is
    damaged.
    """

    alias_key: AliasKey
    last: int
    current: Revision | LoraplexError | None


class _Content(msgspec.Struct):
    content: str | None = None


def of_alias(table: Table, alias_key: AliasKey) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    """The condition that a row of a table is an alias's."""
    return table.c.namespace == alias_key.namespace, table.c.alias == alias_key.alias


def current_rows() -> Any:
    """A query of aliases with their current revisions and its artifacts."""
    revision = and_(
        revisions.c.namespace == aliases.c.namespace,
        revisions.c.alias == aliases.c.alias,
        revisions.c.revision == aliases.c.current,
    )
    joined = aliases.outerjoin(revisions, revision).outerjoin(
        artifacts, artifacts.c.semantic == revisions.c.semantic
    )
    return select(*_JOINED).select_from(joined)


def revision_rows() -> Any:
    """A query of revisions with their artifacts."""
    joined = revisions.outerjoin(artifacts, artifacts.c.semantic == revisions.c.semantic)
    return select(
        *revisions.c, artifacts.c.record.label("artifact_record"), artifacts.c.seal.label("artifact_seal")
    ).select_from(joined)


def state_of(connection: Connection, alias_key: AliasKey) -> AliasState | None:
    """What an alias means, None when it never meant anything."""
    row = connection.execute(current_rows().where(*of_alias(aliases, alias_key))).mappings().one_or_none()
    return None if row is None else alias_state(row)


def alias_state(row: RowMapping) -> AliasState:
    """The state in a row of `current_rows`."""
    current: Revision | LoraplexError | None = None
    if row["current"] is not None:
        try:
            current = read_revision(row, row["current"])
            if row["last"] < current.revision or row["changed"] < current.generation:
                raise damaged(f"alias {row['alias']!r} is behind its own revision {current.revision}")
        except LoraplexError as error:
            current = error
    return AliasState(AliasKey(row["namespace"], row["alias"]), row["last"], current)


def read_revision(row: RowMapping, number: int | None = None) -> Revision:
    """The revision in a row, checked against the row's own columns and against its artifact's record."""
    if row["record"] is None:
        raise damaged(f"alias {row['alias']!r} names revision {row['current']}, which is not there")
    revision = decode(Revision, row["record"], row["seal"])
    named = (row["namespace"], row["alias"], row["revision"] if number is None else number)
    if (revision.namespace, revision.alias, revision.revision) != named:
        raise damaged(f"the record of {named[1]}@{named[2]} is that of {revision.name}")
    if (revision.generation, revision.key) != (row["generation"], row["semantic"]):
        raise damaged(f"the row of {revision.name} names another generation or artifact than its record")
    if row["artifact_record"] is None:
        raise damaged(f"{revision.name} names artifact {revision.key:.16}, which is not there")
    artifact = decode(ArtifactRecord, row["artifact_record"], row["artifact_seal"])
    if not artifact.same_function(revision.artifact):
        raise damaged(f"{revision.name} and artifact {revision.key:.16} do not say the same")
    return revision


def all_grants(connection: Connection, after: int) -> tuple[tuple[Grant, ...] | None, list[LoraplexError]]:
    """Every grant, or None when none changed; and what is wrong with damaged ones, which permit nothing."""
    kinds = (RowKind.GRANT.value, RowKind.WITHDRAW.value)
    changed = connection.execute(
        select(func.count()).where(publications.c.generation > after, publications.c.kind.in_(kinds))
    ).scalar_one()
    if not changed and after >= 0:
        return None, []
    found, wrong = [], []
    for row in connection.execute(select(grants)).mappings():
        try:
            record = decode(Grant, row["record"], row["seal"])
            if (record.namespace, record.alias, record.tenant) != (
                row["namespace"],
                row["alias"],
                row["tenant"],
            ):
                raise damaged(f"the record of tenant {row['tenant']!r} is that of {record.tenant!r}")
            found.append(record)
        except LoraplexError as error:
            wrong.append(error)
    return tuple(found), wrong


def content_of(record: str) -> str | None:
    """The artifact-store key in a revision's text, without trusting the rest of it."""
    try:
        return msgspec.json.decode(record, type=_Content).content
    except msgspec.DecodeError:
        return None
