"""Tables of the catalog, the same in SQLite and PostgreSQL, with the triggers that keep what is immutable so.

`catalog_meta` has one row: the schema's version and the catalog's generation, which each publication advances
by one. `publications` is the log: one row a generation. Artifacts, revisions, publications and revocations
are only ever added.

Specification: 0x07F; rulings "Identity".
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    DDL,
    BigInteger,
    Column,
    Connection,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    insert,
    select,
)

from loraplex.core.errors import CallerError, ErrorCode

SCHEMA_VERSION: Final = 1
_SEQUENCE: Final = BigInteger().with_variant(Integer, "sqlite")

metadata: Final = MetaData()


def _text(name: str) -> Column[str]:
    return Column(name, Text, nullable=False)


def _number(name: str, *, unique: bool = False, index: bool = False) -> Column[int]:
    return Column(name, BigInteger, nullable=False, unique=unique or None, index=index or None)


meta = Table(
    "catalog_meta",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("schema", Integer, nullable=False),
    _number("generation"),
)
artifacts = Table(
    "artifacts",
    metadata,
    Column("semantic", Text, primary_key=True),
    _text("record"),
    _text("seal"),
)
revisions = Table(
    "revisions",
    metadata,
    _text("namespace"),
    _text("alias"),
    _number("revision"),
    _number("generation", unique=True),
    Column("semantic", Text, ForeignKey("artifacts.semantic"), nullable=False),
    _text("record"),
    _text("seal"),
    PrimaryKeyConstraint("namespace", "alias", "revision"),
)
aliases = Table(
    "aliases",
    metadata,
    _text("namespace"),
    _text("alias"),
    Column("current", BigInteger),  # NULL: a tombstone
    _number("last"),
    _number("generation", index=True),
    PrimaryKeyConstraint("namespace", "alias"),
    ForeignKeyConstraint(
        ["namespace", "alias", "current"], ["revisions.namespace", "revisions.alias", "revisions.revision"]
    ),
)
publications = Table(
    "publications",
    metadata,
    Column("generation", BigInteger, primary_key=True, autoincrement=False),
    _text("kind"),
    _text("namespace"),
    _text("alias"),
    Column("revision", BigInteger),
    _text("actor"),
    _number("at_ms"),
)
revoked = Table(
    "revoked",
    metadata,
    Column("semantic", Text, ForeignKey("artifacts.semantic"), primary_key=True),
    _number("generation", unique=True),
    _text("actor"),
    _number("at_ms"),
)
grants = Table(
    "grants",
    metadata,
    _text("namespace"),
    _text("alias"),
    _text("tenant"),
    _number("generation"),
    _text("record"),
    _text("seal"),
    PrimaryKeyConstraint("namespace", "alias", "tenant"),
)
requests = Table(
    "requests",
    metadata,
    Column("seq", _SEQUENCE, primary_key=True, autoincrement=True),
    _text("request_id"),
    _text("tenant"),
    _number("at_ms"),
    _text("record"),
    _text("seal"),
    Index("requests_by_id", "request_id"),
)

IMMUTABLE: Final = ("artifacts", "revisions", "publications", "revoked")


def create(connection: Connection) -> None:
    """Make the tables in an empty database, or check those that are there; raises `config_invalid` for
    another schema.

    Runs inside the caller's write transaction, so two servers that start at once make them once.
    """
    if connection.dialect.has_table(connection, meta.name):
        found = connection.execute(select(meta.c.schema).where(meta.c.id == 1)).scalar_one_or_none()
        if found != SCHEMA_VERSION:
            raise CallerError(
                ErrorCode.CONFIG_INVALID,
                f"the catalog has schema {found}, this version reads {SCHEMA_VERSION}; name another database",
                param="catalog",
            )
        return
    metadata.create_all(connection)
    connection.execute(insert(meta).values(id=1, schema=SCHEMA_VERSION, generation=0))
    for statement in _guards(connection.dialect.name):
        connection.execute(DDL(statement))


def _guards(dialect: str) -> list[str]:
    """Statements that make a database refuse to change or delete what is immutable, whoever asks."""
    if dialect == "sqlite":
        return [
            f"CREATE TRIGGER {table}_no_{event.lower()} BEFORE {event} ON {table} "
            f"BEGIN SELECT RAISE(ABORT, '{table} are immutable'); END"
            for table in IMMUTABLE
            for event in ("UPDATE", "DELETE")
        ]
    function = (
        "CREATE FUNCTION loraplex_immutable() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'rows of this table are immutable'; END $$"
    )
    return [
        function,
        *(
            f"CREATE TRIGGER {table}_immutable BEFORE UPDATE OR DELETE ON {table} "
            "FOR EACH ROW EXECUTE FUNCTION loraplex_immutable()"
            for table in IMMUTABLE
        ),
    ]
