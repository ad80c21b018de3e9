"""A process that changes a catalog and kills itself, with SIGKILL, at the n-th thing it says to the
database.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from sqlalchemy import event
from tests.catalog.make import artifact, draft
from tests.catalog.names import named

from loraplex.catalog.changes import Mode
from loraplex.catalog.records import Grant, Right
from loraplex.catalog.store import CatalogStore

OPERATIONS: dict[str, Callable[[CatalogStore], object]] = {
    "add": lambda store: store.publish(draft("new", 7), Mode.ADD),
    "swap": lambda store: store.publish(draft("a", 7), Mode.SWAP),
    "swap to a known artifact": lambda store: store.publish(draft("a", 1), Mode.SWAP),
    "remove": lambda store: store.remove(named("a")),
    "revoke": lambda store: store.revoke(artifact(1).semantic),
    "grant": lambda store: store.grant(Grant("default", "a", "acme", (Right.USE,))),
    "withdraw": lambda store: store.withdraw("default", "a", "globex"),
}


def run(url: str, operation: str, at: int) -> None:
    """Carry out an operation; SIGKILL before the `at`-th statement or commit, counted from 1, or not
    at all.
    """
    store = CatalogStore.open(url)
    said = 0

    def count(*_: object) -> None:
        nonlocal said
        said += 1
        if said == at:
            os.kill(os.getpid(), signal.SIGKILL)

    engine = store.database._engine
    for name in ("before_cursor_execute", "after_cursor_execute", "commit"):
        event.listen(engine, name, count)
    OPERATIONS[operation](store)
    count()  # committed: as good as another statement
    os._exit(0)
