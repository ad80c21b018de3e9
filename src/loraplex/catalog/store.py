"""Publication: every change of the catalog is one transaction that advances its generation by one.

A change names what it expects to replace; the loser of a race gets a conflict and nothing of its change.
Revisions are numbered per alias from 1 and never reused, also across a removal, which leaves a tombstone.
Synchronous and durable: when a method returns, its change survives the process; when it raises, there is no
trace of it.

Specification: 0x07F (publication by compare-and-set), 0x01G (catalog revision); rulings "Leases", "Tenants".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import Connection, and_, delete, func, insert, select, update

from loraplex.catalog.changes import (
    ANYTHING,
    DEFAULT_GRANT,
    OPERATOR,
    Changes,
    Draft,
    Expectation,
    Mode,
    Publication,
    already_registered,
    not_registered,
    other_revision,
)
from loraplex.catalog.database import IN_MEMORY, Database
from loraplex.catalog.records import (
    ANY,
    AliasKey,
    Grant,
    Revision,
    Right,
    check_alias,
    check_namespace,
    damaged,
)
from loraplex.catalog.revocations import (
    check_not_revoked,
    is_revoked,
    last_removal,
    revoked_by_tenants,
    served_elsewhere,
)
from loraplex.catalog.row_writes import insert_artifact, insert_grant, insert_revision, point
from loraplex.catalog.schema import aliases, artifacts, grants, meta, publications, revisions, revoked
from loraplex.catalog.sealed_rows import (
    AliasState,
    RowKind,
    alias_state,
    all_grants,
    content_of,
    current_rows,
    of_alias,
    read_revision,
    revision_rows,
    state_of,
)
from loraplex.core.errors import CallerError, ErrorCode, LoraplexError

_NS_PER_MS: Final = 1_000_000


@dataclass
class CatalogStore:
    """The catalog in its database. Safe for several threads and for several processes on one database."""

    database: Database = field(default_factory=Database)
    now_ms: Callable[[], int] = lambda: time.time_ns() // _NS_PER_MS

    def __post_init__(self) -> None:
        with self.database.writing() as connection:
            fresh = connection.execute(select(meta.c.generation)).scalar_one() == 0
            if fresh and connection.execute(select(func.count()).select_from(grants)).scalar_one() == 0:
                insert_grant(connection, DEFAULT_GRANT, 0)

    @staticmethod
    def open(url: str = IN_MEMORY, *, create: bool = True) -> CatalogStore:
        """Open the catalog at a URL, or make it there; raises `config_invalid`, also for none without
        `create`.
        """
        return CatalogStore(Database(url, create=create))

    def close(self) -> None:
        """Let go of the database."""
        self.database.close()

    # Changes

    def publish(
        self, draft: Draft, mode: Mode, expected: Expectation = ANYTHING
    ) -> tuple[Revision | None, Revision]:
        """Publish a revision; returns (the one that it replaced, the new one).

        Raises `adapter_exists` (ADD over a current one), `adapter_not_found` (SWAP of none),
        `adapter_revision_conflict` (another revision than expected), `catalog_conflict` (another generation).
        """
        alias_key = draft.alias_key
        check_namespace(alias_key.namespace)
        check_alias(alias_key.alias)
        with self.database.writing() as connection:
            generation = _advance(connection, expected.generation)
            state = state_of(connection, alias_key)
            old = _expect(state, alias_key.alias, mode, expected.revision)
            check_not_revoked(connection, draft.artifact.semantic, alias_key.namespace)
            new = Revision(
                namespace=alias_key.namespace,
                alias=alias_key.alias,
                revision=(state.last if state else 0) + 1,
                generation=generation,
                source=draft.source,
                content=draft.content,
                actor=draft.actor,
                at_ms=self.now_ms(),
                artifact=draft.artifact,
                card=draft.card,
                text=draft.text,
            )
            insert_artifact(connection, draft.artifact)
            insert_revision(connection, new)
            point(connection, alias_key, generation, new.revision, first=state is None)
            kind = RowKind.SWAP if old is not None else RowKind.ADD
            self._log(connection, generation, kind, alias_key, new.revision, draft.actor)
        return old, new

    def remove(
        self, alias_key: AliasKey, actor: str = OPERATOR, expected: Expectation = ANYTHING
    ) -> tuple[Revision, int]:
        """Leave a tombstone under an alias; returns what it stood for, and the new generation.

        Raises as `publish` with SWAP does.
        """
        with self.database.writing() as connection:
            generation = _advance(connection, expected.generation)
            state = state_of(connection, alias_key)
            old = _expect(state, alias_key.alias, Mode.SWAP, expected.revision)
            if old is None:
                raise not_registered(alias_key.alias)
            point(connection, alias_key, generation, None, first=False)
            self._log(connection, generation, RowKind.REMOVE, alias_key, old.revision, actor)
        return old, generation

    def revoke(self, semantic: str, actor: str = OPERATOR, tenant: str | None = None) -> list[Revision]:
        """Leave a tombstone under every alias of an artifact, and let nothing publish it again; what the
        aliases were.

        One generation for each alias and one for the revocation, all of them or none. tenant: on whose
        behalf, None for the operator's. A tenant's binds its own namespace, where alone it may have been
        published: what others publish later is not its to refuse. Raises `adapter_revoked` when it was
        revoked before, `adapter_not_found` when it was never published, `forbidden` when the tenant is not
        the operator and other namespaces name it, also by number.
        """
        with self.database.writing() as connection:
            generation = _advance(connection, None)
            check_not_revoked(connection, semantic, tenant)
            if (
                connection.execute(
                    select(artifacts.c.semantic).where(artifacts.c.semantic == semantic)
                ).first()
                is None
            ):
                raise not_registered(semantic[:16])
            rows = connection.execute(current_rows().where(revisions.c.semantic == semantic)).mappings().all()
            if tenant is None:
                connection.execute(
                    insert(revoked).values(
                        semantic=semantic, generation=generation, actor=actor, at_ms=self.now_ms()
                    )
                )
            elif any(row["namespace"] != tenant for row in rows) or served_elsewhere(
                connection, semantic, tenant
            ):
                raise CallerError(
                    ErrorCode.FORBIDDEN,
                    "other namespaces name this adapter; the operator may revoke it, remove your own alias "
                    "instead",
                    param="alias",
                )
            where = AliasKey(tenant or "", semantic)
            self._log(connection, generation, RowKind.REVOKE, where, None, actor)
            gone = [read_revision(row, row["current"]) for row in rows]
            for revision in gone:
                generation = _advance(connection, None)
                point(connection, revision.alias_key, generation, None, first=False)
                self._log(
                    connection, generation, RowKind.REMOVE, revision.alias_key, revision.revision, actor
                )
        return gone

    def grant(self, record: Grant, actor: str = OPERATOR) -> int:
        """Record what a tenant may do, instead of an earlier record for the same three names; the new
        generation.
        """
        _check_grant(record)
        with self.database.writing() as connection:
            generation = _advance(connection, None)
            connection.execute(delete(grants).where(_names(record)))
            insert_grant(connection, record, generation)
            where = AliasKey(record.namespace, record.alias)
            self._log(connection, generation, RowKind.GRANT, where, None, actor)
        return generation

    def withdraw(self, namespace: str, alias: str, tenant: str, actor: str = OPERATOR) -> int:
        """Take an authorisation record away; the new generation. Raises `adapter_not_found` when there is
        none.
        """
        record = Grant(namespace, alias, tenant, (Right.USE,))
        with self.database.writing() as connection:
            generation = _advance(connection, None)
            if not connection.execute(delete(grants).where(_names(record))).rowcount:
                raise CallerError(
                    ErrorCode.ADAPTER_NOT_FOUND,
                    f"there is no record of tenant {tenant!r} for {alias!r} in {namespace!r}",
                    param="tenant",
                )
            self._log(connection, generation, RowKind.WITHDRAW, AliasKey(namespace, alias), None, actor)
        return generation

    # Questions

    def generation(self) -> int:
        """The catalog's generation."""
        with self.database.reading() as connection:
            return int(connection.execute(select(meta.c.generation)).scalar_one())

    def changes(self, after: int = -1) -> Changes:
        """Every alias and grant that changed after a generation, in one snapshot; -1: everything."""
        with self.database.reading() as connection:
            generation = int(connection.execute(select(meta.c.generation)).scalar_one())
            if generation == after:
                return Changes(generation)
            rows = connection.execute(current_rows().where(aliases.c.generation > after)).mappings()
            states = tuple(alias_state(row) for row in rows)
            granted, wrong = all_grants(connection, after)
            ended = connection.execute(
                select(revoked.c.semantic).where(revoked.c.generation > after)
            ).scalars()
            by_tenants = () if after < 0 else revoked_by_tenants(connection, after)
            return Changes(generation, states, granted, tuple(wrong), tuple(ended), by_tenants)

    def revision(self, alias_key: AliasKey, number: int) -> Revision | None:
        """Any revision that was ever published under an alias; raises `catalog_record_invalid` when
        damaged.
        """
        where = (*of_alias(revisions, alias_key), revisions.c.revision == number)
        with self.database.reading() as connection:
            row = connection.execute(revision_rows().where(*where)).mappings().one_or_none()
            return None if row is None else read_revision(row)

    def superseded(self, alias_key: AliasKey, number: int) -> Revision | None:
        """An earlier revision of an alias that stands for something, to be served by its number.

        None where there is none, or where the alias was removed after it: a removal takes what was there
        away, also when the alias is published again. Raises `adapter_revoked`, and `catalog_record_invalid`
        when damaged.
        """
        where = (*of_alias(revisions, alias_key), revisions.c.revision == number)
        with self.database.reading() as connection:
            row = connection.execute(revision_rows().where(*where)).mappings().one_or_none()
            found = None if row is None else read_revision(row)
            if found is None or found.generation < last_removal(connection, alias_key):
                return None
            if is_revoked(connection, found.key, alias_key.namespace):
                raise CallerError(
                    ErrorCode.ADAPTER_REVOKED,
                    f"{found.name} was revoked; name another revision",
                    param="model",
                )
        return found

    def history(self, alias_key: AliasKey) -> list[Revision]:
        """All revisions of an alias, the newest first."""
        with self.database.reading() as connection:
            rows = connection.execute(
                revision_rows().where(*of_alias(revisions, alias_key)).order_by(revisions.c.revision.desc())
            ).mappings()
            return [read_revision(row) for row in rows]

    def contents(self) -> tuple[set[str], set[str]]:
        """Keys in the artifact store that revisions name: (current ones, superseded ones of living
        aliases).
        """
        living = aliases.c.current.is_not(None)
        joined = revisions.join(
            aliases, and_(aliases.c.namespace == revisions.c.namespace, aliases.c.alias == revisions.c.alias)
        )
        with self.database.reading() as connection:
            rows = connection.execute(
                select(*revisions.c, aliases.c.current).select_from(joined).where(living)
            ).mappings()
            current: set[str] = set()
            superseded: set[str] = set()
            for row in rows:
                content = content_of(row["record"])
                if content is not None:
                    (current if row["revision"] == row["current"] else superseded).add(content)
        return current, superseded - current

    def publications(self, after: int = 0, limit: int = 1000) -> list[Publication]:
        """Lines of the log after a generation, in order."""
        query = (
            select(publications)
            .where(publications.c.generation > after)
            .order_by(publications.c.generation)
            .limit(limit)
        )
        with self.database.reading() as connection:
            return [Publication(**row) for row in connection.execute(query).mappings()]

    def _log(
        self,
        connection: Connection,
        generation: int,
        kind: RowKind,
        alias_key: AliasKey,
        revision: int | None,
        actor: str,
    ) -> None:
        connection.execute(
            insert(publications).values(
                generation=generation,
                kind=kind.value,
                namespace=alias_key.namespace,
                alias=alias_key.alias,
                revision=revision,
                actor=actor,
                at_ms=self.now_ms(),
            )
        )


def _advance(connection: Connection, expected: int | None) -> int:
    """Take the catalog's write lock and its next generation; `catalog_conflict` when another one was
    expected.
    """
    now = int(connection.execute(select(meta.c.generation).with_for_update()).scalar_one())
    if expected is not None and expected != now:
        raise CallerError(
            ErrorCode.CATALOG_CONFLICT,
            f"the catalog is at generation {now}, the change expected {expected}; read it again",
            param="expected_generation",
        )
    moved = connection.execute(update(meta).where(meta.c.generation == now).values(generation=now + 1))
    if moved.rowcount != 1:
        raise damaged(f"{moved.rowcount} rows hold the catalog's generation, expected 1")
    return now + 1


def _expect(state: AliasState | None, alias: str, mode: Mode, revision: int | None) -> Revision | None:
    """The current revision, if what is there is what the change expects."""
    current = None if state is None else state.current
    if isinstance(current, LoraplexError):
        raise current
    if current is None:
        if mode is Mode.SWAP or revision is not None:
            raise not_registered(alias)
        return None
    if mode is Mode.ADD:
        raise already_registered(current)
    if revision is not None and current.revision != revision:
        raise other_revision(current, revision)
    return current


def _check_grant(record: Grant) -> None:
    check_namespace(record.namespace)
    if record.alias != ANY:
        check_alias(record.alias)
    if record.tenant != ANY:
        check_namespace(record.tenant)
    if not record.rights:
        raise CallerError(ErrorCode.INVALID_REQUEST, "a grant names at least one right", param="rights")


def _names(record: Grant) -> Any:
    return and_(
        grants.c.namespace == record.namespace,
        grants.c.alias == record.alias,
        grants.c.tenant == record.tenant,
    )
