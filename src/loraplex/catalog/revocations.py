"""What was revoked, and for whom.

The operator's revocations are rows of their own and bind everybody. A tenant's is a line of the log that
names its namespace, and binds that alone: what others publish is not a tenant's to refuse, and two tenants
may have the same bytes.

Specification: 0x07I; rulings "Tenants".
"""

from __future__ import annotations

from sqlalchemy import Connection, and_, func, select

from loraplex.catalog.records import AliasKey
from loraplex.catalog.schema import aliases, publications, revisions, revoked
from loraplex.catalog.sealed_rows import RowKind, of_alias
from loraplex.core.errors import CallerError, ErrorCode


def check_not_revoked(connection: Connection, semantic: str, namespace: str | None) -> None:
    """Raise `adapter_revoked` where `is_revoked`."""
    if is_revoked(connection, semantic, namespace):
        raise CallerError(
            ErrorCode.ADAPTER_REVOKED,
            f"adapter {semantic[:12]} was revoked; publish a corrected revision",
            param="source",
        )


def is_revoked(connection: Connection, semantic: str, namespace: str | None) -> bool:
    """Whether an artifact was revoked for everybody, or by the tenant of a namespace, if one is named, for
    its own.
    """
    everywhere = select(revoked.c.semantic).where(revoked.c.semantic == semantic)
    if connection.execute(everywhere).first() is not None:
        return True
    here = select(publications.c.generation).where(
        publications.c.kind == RowKind.REVOKE.value,
        publications.c.namespace == namespace,
        publications.c.alias == semantic,
    )
    return namespace is not None and connection.execute(here).first() is not None


def revoked_by_tenants(connection: Connection, after: int) -> tuple[str, ...]:
    """Artifacts that tenants revoked for themselves after a generation."""
    query = select(publications.c.alias).where(
        publications.c.generation > after,
        publications.c.kind == RowKind.REVOKE.value,
        publications.c.namespace != "",
    )
    return tuple(connection.execute(query).scalars())


def served_elsewhere(connection: Connection, semantic: str, tenant: str) -> bool:
    """Whether an earlier revision of a living alias in another namespace is the artifact, and served by its
    number.
    """
    joined = revisions.join(
        aliases, and_(aliases.c.namespace == revisions.c.namespace, aliases.c.alias == revisions.c.alias)
    )
    query = (
        select(revisions.c.namespace, revisions.c.alias, revisions.c.generation)
        .select_from(joined)
        .where(
            revisions.c.semantic == semantic, revisions.c.namespace != tenant, aliases.c.current.is_not(None)
        )
    )
    return any(
        generation > last_removal(connection, AliasKey(namespace, alias))
        for namespace, alias, generation in connection.execute(query).all()
    )


def last_removal(connection: Connection, alias_key: AliasKey) -> int:
    """The generation at which an alias was last removed, 0 where it never was."""
    removed = select(func.max(publications.c.generation)).where(
        *of_alias(publications, alias_key), publications.c.kind == RowKind.REMOVE.value
    )
    return connection.execute(removed).scalar_one() or 0
