"""Catalog databases for tests: a file, and a real PostgreSQL, both started here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.catalog import postgres

from loraplex.catalog.store import CatalogStore

_NUMBERS = itertools.count()
Opener = Callable[[], CatalogStore]


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """URL of a PostgreSQL server of this test process."""
    with postgres.running() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def catalog_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of an empty catalog, on both databases."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'catalog.db'}"
        return
    with postgres.database(request.getfixturevalue("postgres_server"), f"catalog{next(_NUMBERS)}") as url:
        yield url


@pytest.fixture
def opened(catalog_url: str) -> Iterator[Opener]:
    """Opens the same catalog as often as it is called, each time as another server would."""
    with ExitStack() as stack:

        def again() -> CatalogStore:
            store = CatalogStore.open(catalog_url)
            stack.callback(store.close)
            return store

        yield again
