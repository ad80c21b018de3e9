"""What a publication writes: the rows of an artifact, a revision, an alias, a grant, each sealed. Inside its
transaction.

Never decides what is published. Specification: 0x07F; rulings "Identity".
"""

from __future__ import annotations

from sqlalchemy import Connection, insert, select, update

from loraplex.catalog.records import AliasKey, ArtifactRecord, Grant, Revision, damaged, decode, encode, seal
from loraplex.catalog.schema import aliases, artifacts, grants, revisions
from loraplex.catalog.sealed_rows import of_alias


def insert_grant(connection: Connection, record: Grant, generation: int) -> None:
    """A grant's row; raises `catalog_record_invalid` for a record that is none."""
    text = encode(record)
    connection.execute(
        insert(grants).values(
            namespace=record.namespace,
            alias=record.alias,
            tenant=record.tenant,
            generation=generation,
            record=text.decode(),
            seal=seal(text),
        )
    )


def insert_artifact(connection: Connection, record: ArtifactRecord) -> None:
    """The artifact's row, or the one that is there, of the same function; of other files, it may tell other
    figures.
    """
    text = encode(record)
    found = connection.execute(
        select(artifacts.c.record, artifacts.c.seal).where(artifacts.c.semantic == record.semantic)
    ).one_or_none()
    if found is None:
        connection.execute(
            insert(artifacts).values(semantic=record.semantic, record=text.decode(), seal=seal(text))
        )
    elif not decode(ArtifactRecord, found.record, found.seal).same_function(record):
        raise damaged(f"artifact {record.semantic:.16} is recorded otherwise than it was read")


def insert_revision(connection: Connection, revision: Revision) -> None:
    """A revision's row; raises `catalog_record_invalid` for a record that is none."""
    text = encode(revision)
    connection.execute(
        insert(revisions).values(
            namespace=revision.namespace,
            alias=revision.alias,
            revision=revision.revision,
            generation=revision.generation,
            semantic=revision.key,
            record=text.decode(),
            seal=seal(text),
        )
    )


def point(
    connection: Connection, alias_key: AliasKey, generation: int, current: int | None, *, first: bool
) -> None:
    """Let an alias mean a revision, or nothing."""
    if first:
        values = {**alias_key._asdict(), "current": current, "last": current}
        connection.execute(insert(aliases).values(**values, generation=generation))
        return
    values = {"current": current, "generation": generation}
    if current is not None:
        values["last"] = current
    connection.execute(update(aliases).where(*of_alias(aliases, alias_key)).values(**values))
