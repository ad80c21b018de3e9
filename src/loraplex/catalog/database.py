"""A connection to the catalog's database: SQLite (a file, or in memory) or PostgreSQL, by URL.

Owns transactions and what a failure of the database becomes. Synchronous: whoever has an event loop calls it
from another thread. Writers take the database's write lock first, so that a compare-and-set reads what it
will replace.

Specification: rulings "Dependencies" (SQLAlchemy Core, synchronous); 0x07F.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    MultipleResultsFound,
    NoResultFound,
    SQLAlchemyError,
)
from sqlalchemy.pool import StaticPool

from loraplex.catalog import schema
from loraplex.catalog.records import damaged
from loraplex.core.errors import CallerError, CapacityError, ErrorCode

IN_MEMORY: Final = "sqlite://"
_WRITE: Final = "loraplex_write"
_BUSY_S: Final = 10
"""How long a writer waits for another one before the catalog counts as unavailable."""
_ADVISORY_LOCK: Final = 0x6C6F7261
"""PostgreSQL: held while tables are made, so that servers that start at once do not both make them."""


class Database:
    """One open catalog database. Methods may be called from several threads; writers take turns."""

    def __init__(self, url: str = IN_MEMORY, *, create: bool = True) -> None:
        """Opens and creates what is missing. Raises `config_invalid` for a URL that cannot be a catalog.

        create: make an SQLite file that is not there; without it that is `config_invalid` too.
        """
        parsed = _parse(url)
        self.in_memory = parsed.get_backend_name() == "sqlite" and parsed.database in (None, "", ":memory:")
        self.where = parsed.render_as_string(hide_password=True)
        if not create and parsed.get_backend_name() == "sqlite":
            _require_file(parsed, self.in_memory, self.where)
        self._turn = threading.RLock()
        self._engine = _engine(parsed, self.in_memory)
        try:
            with self._transaction(write=True) as connection:
                if connection.dialect.name == "postgresql":
                    connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
                schema.create(connection)
        except SQLAlchemyError as error:
            self._engine.dispose()
            raise CallerError(
                ErrorCode.CONFIG_INVALID,
                f"the catalog {self.where} cannot be opened: {_reason(error)}; check --catalog",
                param="catalog",
            ) from error
        except BaseException:
            self._engine.dispose()
            raise

    def close(self) -> None:
        """Let go of every connection; an in-memory catalog is forgotten."""
        self._engine.dispose()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction over one snapshot. Raises `catalog_unavailable` when the database does not answer."""
        with self._typed(), self._transaction(write=False) as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that no other writer overlaps: committed when the block ends, gone when it raises."""
        with self._typed(), self._transaction(write=True) as connection:
            yield connection

    @contextmanager
    def _transaction(self, *, write: bool) -> Iterator[Connection]:
        # SQLite writers take turns in the process, without waiting for the file; PostgreSQL has its own row
        # lock.
        sqlite = self._engine.dialect.name == "sqlite"
        turn: AbstractContextManager[object] = self._turn if sqlite else nullcontext()
        with turn, self._engine.connect() as plain:
            connection = plain.execution_options(**{_WRITE: write})
            if connection.dialect.name == "postgresql" and not write:
                connection = connection.execution_options(isolation_level="REPEATABLE READ")
            with connection.begin():
                yield connection

    @contextmanager
    def _typed(self) -> Iterator[None]:
        try:
            yield
        except (NoResultFound, MultipleResultsFound) as error:
            raise damaged(f"the catalog's generation is not one row ({error})") from error
        except DBAPIError as error:
            raise CapacityError(
                ErrorCode.CATALOG_UNAVAILABLE,
                f"the catalog {self.where} did not carry out the call: {_reason(error)}; try again",
            ) from error


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise _bad_url(url) from None
    if parsed.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername != "sqlite":
        raise _bad_url(url)
    return parsed


def _require_file(url: URL, in_memory: bool, where: str) -> None:
    if in_memory or not os.path.isfile(str(url.database)):
        raise CallerError(
            ErrorCode.CONFIG_INVALID,
            f"there is no catalog at {where}; check --catalog, a server makes it when it first starts",
            param="catalog",
        )


def _bad_url(url: str) -> CallerError:
    scheme = url.partition("://")[0][:40]
    return CallerError(
        ErrorCode.CONFIG_INVALID,
        f"the catalog URL begins with {scheme!r}; give sqlite:////ABSOLUTE/PATH or "
        "postgresql://USER@HOST/DATABASE",
        param="catalog",
    )


def _engine(url: URL, in_memory: bool) -> Engine:
    if url.get_backend_name() == "postgresql":
        return create_engine(url, pool_pre_ping=True, pool_size=4, connect_args={"connect_timeout": _BUSY_S})
    if not in_memory:
        folder = Path(os.path.abspath(str(url.database))).parent
        if not os.path.isdir(folder):
            raise CallerError(
                ErrorCode.CONFIG_INVALID,
                f"the catalog's folder {folder} does not exist or cannot be read; make it or name another "
                "file",
                param="catalog",
            )
    arguments: dict[str, Any] = {"connect_args": {"check_same_thread": False, "timeout": _BUSY_S}}
    if in_memory:
        arguments["poolclass"] = StaticPool
    engine = create_engine(url, **arguments)
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _: object) -> None:
    connection.isolation_level = None  # transactions begin where we say, not where the driver guesses
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")  # a commit survives a loss of power, not only of the process
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    write = connection.get_execution_options().get(_WRITE, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def _reason(error: SQLAlchemyError) -> str:
    cause = getattr(error, "orig", None) or error
    return str(cause).strip().partition("\n")[0][:200] or type(cause).__name__
