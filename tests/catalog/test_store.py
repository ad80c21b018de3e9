"""Publication over real databases: compare-and-set, generations, tombstones, immutability, two servers,
grants.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from tests.catalog.conftest import Opener
from tests.catalog.make import artifact, draft
from tests.catalog.names import named

from loraplex.adapters.adapter_catalog import AdapterCatalog
from loraplex.catalog.audit import audit
from loraplex.catalog.changes import DEFAULT_GRANT, Expectation, Mode
from loraplex.catalog.records import ANY, Grant, Right
from loraplex.catalog.requests import RequestLog
from loraplex.catalog.sealed_rows import RowKind
from loraplex.catalog.store import CatalogStore
from loraplex.core.errors import CallerError, CapacityError, ErrorCode, LoraplexError


def refused(code: ErrorCode, call: Callable[[], object]) -> LoraplexError:
    with pytest.raises(LoraplexError) as caught:
        call()
    assert caught.value.code is code, str(caught.value)
    return caught.value


def names(store: CatalogStore) -> dict[str, int]:
    return {r.alias: r.revision for r in AdapterCatalog(store=store)}


def test_a_revision_is_what_was_published(opened: Opener) -> None:
    store = opened()
    old, new = store.publish(draft("a", 1, content="c" * 64, actor="key of ops"), Mode.ADD)
    assert old is None
    assert (new.revision, new.generation, new.actor, new.content) == (1, 1, "key of ops", "c" * 64)
    assert new.artifact == artifact(1)
    again = opened()
    assert again.revision(named("a"), 1) == new
    assert again.generation() == 1
    assert AdapterCatalog(store=again).current(named("a")) == new
    assert again.revision(named("a"), 2) is None


def test_numbers_go_on_over_a_tombstone(opened: Opener) -> None:
    store = opened()
    for number in range(3):
        store.publish(draft("a", number), Mode.PUT)
    removed, generation = store.remove(named("a"))
    assert (removed.revision, generation) == (3, 4)
    assert names(store) == {}
    refused(ErrorCode.ADAPTER_NOT_FOUND, lambda: store.remove(named("a")))
    refused(ErrorCode.ADAPTER_NOT_FOUND, lambda: store.publish(draft("a"), Mode.SWAP))
    _, new = store.publish(draft("a", 0), Mode.ADD)
    assert (new.revision, new.generation) == (4, 5)
    assert [r.revision for r in store.history(named("a"))] == [4, 3, 2, 1]
    assert [(p.generation, p.kind, p.revision) for p in store.publications()] == [
        (1, RowKind.ADD, 1),
        (2, RowKind.SWAP, 2),
        (3, RowKind.SWAP, 3),
        (4, RowKind.REMOVE, 3),
        (5, RowKind.ADD, 4),
    ]


def test_a_refused_change_leaves_no_trace(opened: Opener) -> None:
    store = opened()
    store.publish(draft("a", 1), Mode.ADD)
    calls: list[tuple[ErrorCode, Callable[[], object]]] = [
        (ErrorCode.ADAPTER_EXISTS, lambda: store.publish(draft("a", 2), Mode.ADD)),
        (ErrorCode.ADAPTER_NOT_FOUND, lambda: store.publish(draft("b", 2), Mode.SWAP)),
        (ErrorCode.ADAPTER_NOT_FOUND, lambda: store.publish(draft("b", 2), Mode.PUT, Expectation(1))),
        (ErrorCode.ADAPTER_REVISION_CONFLICT, lambda: store.publish(draft("a", 2), Mode.PUT, Expectation(2))),
        (ErrorCode.CATALOG_CONFLICT, lambda: store.publish(draft("a", 2), Mode.PUT, Expectation(None, 0))),
        (ErrorCode.CATALOG_CONFLICT, lambda: store.remove(named("a"), expected=Expectation(1, 7))),
        (ErrorCode.ADAPTER_REVISION_CONFLICT, lambda: store.remove(named("a"), expected=Expectation(7))),
        (ErrorCode.ADAPTER_NOT_FOUND, lambda: store.remove(named("b"))),
        (ErrorCode.ADAPTER_NOT_FOUND, lambda: store.remove(named("a", "other"))),
        (ErrorCode.INVALID_REQUEST, lambda: store.publish(draft("a b"), Mode.PUT)),
        (ErrorCode.INVALID_REQUEST, lambda: store.publish(draft("a", namespace="x/y"), Mode.PUT)),
        (ErrorCode.INVALID_REQUEST, lambda: store.grant(Grant("default", ANY, "t", ()))),
        (ErrorCode.ADAPTER_NOT_FOUND, lambda: store.withdraw("default", "a", "nobody")),
        (
            ErrorCode.CATALOG_RECORD_INVALID,
            lambda: store.publish(draft("a", artifact=artifact(3, tensors_applied=11)), Mode.PUT),
        ),
    ]
    before = store.changes()
    for code, call in calls:
        refused(code, call)
        assert store.changes() == before


def test_the_same_artifact_is_recorded_once_and_never_otherwise(opened: Opener) -> None:
    store = opened()
    store.publish(draft("a", 1), Mode.ADD)
    store.publish(draft("b", 1, source="/elsewhere"), Mode.ADD)
    with store.database.reading() as connection:
        assert connection.execute(text("SELECT count(*) FROM artifacts")).scalar_one() == 1
    other = draft("c", artifact=artifact(1, method="rslora"))
    refused(ErrorCode.CATALOG_RECORD_INVALID, lambda: store.publish(other, Mode.ADD))


@pytest.mark.parametrize("table", ["revisions", "artifacts", "publications"])
@pytest.mark.parametrize("statement", ["UPDATE {} SET {} = {}", "DELETE FROM {}"])
def test_the_database_itself_keeps_what_is_immutable(opened: Opener, table: str, statement: str) -> None:
    store = opened()
    store.publish(draft("a", 1), Mode.ADD)
    store.remove(named("a"))
    column = {"revisions": "record", "artifacts": "record", "publications": "actor"}[table]
    with pytest.raises(CapacityError, match="immutable"), store.database.writing() as connection:
        connection.execute(text(statement.format(table, column, "'x'")))
    assert store.revision(named("a"), 1) is not None


def test_two_servers_see_each_other(opened: Opener) -> None:
    here, there = AdapterCatalog(store=opened()), AdapterCatalog(store=opened())
    here.publish(draft("a", 1), Mode.ADD)
    assert there.get(named("a")) is None
    assert there.refresh() == []
    assert there.current(named("a")) == here.current(named("a"))
    there.publish(draft("a", 2), Mode.SWAP, Expectation(1))
    refused(
        ErrorCode.ADAPTER_REVISION_CONFLICT, lambda: here.publish(draft("a", 3), Mode.SWAP, Expectation(1))
    )
    there.publish(draft("b", 2), Mode.ADD)
    # A change of our own also brings what others did in between.
    here.publish(draft("c", 3), Mode.ADD)
    assert {r.name for r in here} == {"a@2", "b@1", "c@1"}
    assert here.generation == 4
    there.store.remove(named("a"))
    there.refresh()
    assert [r.name for r in here.refresh()] == ["a@2"]
    refused(ErrorCode.MODEL_NOT_FOUND, lambda: here.resolve("a"))
    assert here.refresh() == []


def test_one_of_many_racing_swaps_wins_each_round(opened: Opener) -> None:
    stores = [opened() for _ in range(3)]
    stores[0].publish(draft("a", 0), Mode.ADD)
    won: list[int] = []
    lost: list[ErrorCode] = []

    def race(store: CatalogStore, number: int, expected: int) -> None:
        try:
            won.append(store.publish(draft("a", number), Mode.SWAP, Expectation(expected))[1].revision)
        except CallerError as error:
            lost.append(error.code)

    for round_ in range(1, 6):
        threads = [threading.Thread(target=race, args=(s, n, round_)) for n, s in enumerate(stores, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert won == list(range(2, round_ + 2))
    assert lost == [ErrorCode.ADAPTER_REVISION_CONFLICT] * 10
    assert stores[0].generation() == 6


def test_grants_are_recorded_replaced_and_withdrawn(opened: Opener) -> None:
    catalog = AdapterCatalog(store=opened())
    other = AdapterCatalog(store=opened())
    assert catalog.store.changes().grants == (DEFAULT_GRANT,)
    catalog.publish(draft("secret", 1, namespace="acme"), Mode.ADD)
    other.refresh()
    view = other.view
    refused(ErrorCode.MODEL_NOT_FOUND, lambda: view.resolve("globex", "acme/secret"))
    refused(ErrorCode.ADAPTER_NOT_FOUND, lambda: view.require("globex", named("secret", "acme"), Right.SWAP))
    catalog.store.grant(Grant("acme", "secret", "globex", (Right.LIST, Right.USE)))
    catalog.refresh()
    other.refresh()
    assert view.resolve("globex", "acme/secret").name == "secret@1"
    refused(ErrorCode.FORBIDDEN, lambda: view.require("globex", named("secret", "acme"), Right.SWAP))
    refused(ErrorCode.MODEL_NOT_FOUND, lambda: view.resolve("initech", "acme/secret"))
    catalog.store.grant(Grant("acme", "secret", "globex", (Right.LIST,)))
    catalog.refresh()
    other.refresh()
    refused(ErrorCode.MODEL_NOT_FOUND, lambda: view.resolve("globex", "acme/secret"))
    assert [name for name, _ in view.visible("globex")] == ["acme/secret"]
    catalog.store.withdraw("acme", "secret", "globex")
    other.refresh()
    assert view.visible("globex") == []
    catalog.store.withdraw(*(DEFAULT_GRANT.namespace, DEFAULT_GRANT.alias, DEFAULT_GRANT.tenant))
    assert AdapterCatalog(store=opened()).store.changes().grants == ()


def test_names_of_tenants() -> None:
    catalog = AdapterCatalog()
    catalog.publish(draft("shared", 1), Mode.ADD)
    catalog.publish(draft("own", 2, namespace="acme"), Mode.ADD)
    catalog.publish(draft("own", 3, namespace="globex"), Mode.ADD)
    view = catalog.view
    assert view.resolve("acme", "own").key == artifact(2).semantic
    assert view.resolve("globex", "own").key == artifact(3).semantic
    assert view.resolve("acme", "shared@1").key == artifact(1).semantic
    for tenant, name in (
        ("default", "own"),
        ("acme", "globex/own"),
        ("globex", "acme/own"),
        ("acme", "own@2"),
    ):
        refused(ErrorCode.MODEL_NOT_FOUND, lambda t=tenant, n=name: view.resolve(t, n))
    assert [name for name, _ in view.visible("acme")] == ["own", "shared"]
    # A tenant's own alias hides the operator's of the same name; that one keeps a name of its own.
    catalog.publish(draft("shared", 4, namespace="acme"), Mode.ADD)
    assert view.resolve("acme", "shared").key == artifact(4).semantic
    assert view.resolve("acme", "default/shared").key == artifact(1).semantic
    assert view.resolve("globex", "shared").key == artifact(1).semantic
    assert [name for name, _ in view.visible("acme")] == ["default/shared", "own", "shared"]


def test_an_earlier_revision_is_named_by_who_may_use_its_alias_and_ends_with_a_removal(
    opened: Opener,
) -> None:
    catalog = AdapterCatalog(store=opened())
    for number, mode in ((1, Mode.ADD), (2, Mode.SWAP), (3, Mode.SWAP)):
        catalog.publish(draft("a", number, namespace="acme"), mode)
    view, store = catalog.view, catalog.store
    assert view.superseded("acme", "a@2") == (named("a", "acme"), 2)
    for tenant, name in (
        ("acme", "a"),
        ("acme", "a@3"),
        ("acme", "a@4"),
        ("acme", "a@0"),
        ("acme", "a@02"),
        ("acme", "a@x"),
        ("acme", "a@" + "1" * 30),
        ("acme", "b@1"),
        ("globex", "a@2"),
        ("globex", "acme/a@2"),
    ):
        assert view.superseded(tenant, name) is None, (tenant, name)
    catalog.store.grant(Grant("acme", "a", "globex", (Right.LIST, Right.USE)))
    catalog.refresh()
    assert view.superseded("globex", "acme/a@2") == (named("a", "acme"), 2)
    found = store.superseded(named("a", "acme"), 2)
    assert found is not None
    assert (found.name, found.key) == ("a@2", artifact(2).semantic)
    assert store.superseded(named("a", "acme"), 9) is None
    store.revoke(artifact(2).semantic)
    refused(ErrorCode.ADAPTER_REVOKED, lambda: store.superseded(named("a", "acme"), 2))
    catalog.refresh()
    catalog.store.remove(named("a", "acme"))
    catalog.refresh()
    catalog.publish(draft("a", 4, namespace="acme"), Mode.ADD)
    assert view.superseded("acme", "a@1") == (named("a", "acme"), 1)
    assert store.superseded(named("a", "acme"), 1) is None
    with pytest.raises(
        LoraplexError, match="was superseded or removed and is not held; its current revision is 4"
    ):
        view.resolve("acme", "a@1")


def test_figures_are_a_files_own_and_refuse_nobody(opened: Opener) -> None:
    """One function in two files, with and without copies of what the base has: each name tells its own file's
    figures.
    """
    store = opened()
    more = artifact(1, tensors_applied=14, tensors_total=14, nbytes=5000)
    published = [
        store.publish(draft("a", 1), Mode.ADD)[1],
        store.publish(draft("b", artifact=more, namespace="globex"), Mode.ADD)[1],
        store.publish(draft("a", artifact=more), Mode.SWAP)[1],
    ]
    store.remove(named("a"))
    published.append(store.publish(draft("a", 1), Mode.ADD)[1])
    read = [store.revision(revision.alias_key, revision.revision) for revision in published]
    assert read == published
    assert [revision.artifact.tensors_total for revision in published] == [12, 14, 14, 12]
    assert not audit(store).problems


def test_a_revoked_artifact_loses_every_name_for_good(opened: Opener) -> None:
    here, there = AdapterCatalog(store=opened()), AdapterCatalog(store=opened())
    for alias, number, namespace in (("a", 1, "default"), ("b", 1, "acme"), ("c", 2, "default")):
        here.publish(draft(alias, number, namespace=namespace), Mode.ADD)
    here.publish(draft("c", 1), Mode.SWAP)
    here.publish(draft("c", 2), Mode.SWAP)
    there.refresh()
    gone = here.store.revoke(artifact(1).semantic)
    here.refresh()
    assert sorted((r.namespace, r.name) for r in gone) == [("acme", "b@1"), ("default", "a@1")]
    assert [r.name for r in here] == ["c@3"]
    assert there.store.changes(there.generation).revoked == (artifact(1).semantic,)
    assert len(there.refresh()) == 2
    refused(ErrorCode.ADAPTER_REVOKED, lambda: there.publish(draft("d", 1), Mode.PUT))
    refused(ErrorCode.ADAPTER_REVOKED, lambda: there.store.revoke(artifact(1).semantic))
    refused(ErrorCode.ADAPTER_NOT_FOUND, lambda: there.store.revoke(artifact(9).semantic))
    assert [p.kind for p in here.store.publications()][-3:] == [
        RowKind.REVOKE,
        RowKind.REMOVE,
        RowKind.REMOVE,
    ]
    assert AdapterCatalog(store=opened()).generation == 8


def test_a_tenant_revokes_only_what_no_other_namespace_names(opened: Opener) -> None:
    store = opened()
    for alias, number, namespace in (("a", 1, "acme"), ("b", 1, "globex"), ("c", 2, "acme")):
        store.publish(draft(alias, number, namespace=namespace), Mode.ADD)
    refused(ErrorCode.FORBIDDEN, lambda: store.revoke(artifact(1).semantic, "acme admin", "acme"))
    assert (store.generation(), store.changes().revoked) == (3, ())
    assert names(store) == {"a": 1, "b": 1, "c": 1}
    assert [r.alias for r in store.revoke(artifact(2).semantic, "acme admin", "acme")] == ["c"]
    store.remove(named("b", "globex"))
    assert [r.alias for r in store.revoke(artifact(1).semantic, "acme admin", "acme")] == ["a"]


def test_what_a_tenant_revokes_is_refused_to_it_alone(opened: Opener) -> None:
    here, there = AdapterCatalog(store=opened()), AdapterCatalog(store=opened())
    store, bad = here.store, artifact(1).semantic
    here.publish(draft("a", 1, namespace="acme"), Mode.ADD)
    here.publish(draft("b", 1, namespace="globex"), Mode.ADD)
    here.publish(draft("b", 2, namespace="globex"), Mode.SWAP)
    there.refresh()
    refused(
        ErrorCode.FORBIDDEN, lambda: store.revoke(bad, "acme admin", "acme")
    )  # b@1 is served by its number
    store.remove(named("b", "globex"))
    store.publish(draft("b", 2, namespace="globex"), Mode.ADD)
    assert [r.name for r in store.revoke(bad, "acme admin", "acme")] == ["a@1"]
    refused(ErrorCode.ADAPTER_REVOKED, lambda: store.revoke(bad, "acme admin", "acme"))
    changes = store.changes(there.generation)
    assert (changes.revoked, changes.revoked_at_home) == ((), (bad,))
    assert store.changes().revoked_at_home == ()  # who begins now has nothing of it to end
    refused(ErrorCode.ADAPTER_REVOKED, lambda: store.publish(draft("c", 1, namespace="acme"), Mode.PUT))
    for namespace in ("globex", "default"):  # and nobody else is refused anything
        assert store.publish(draft("c", 1, namespace=namespace), Mode.PUT)[1].revision == 1
    refused(ErrorCode.FORBIDDEN, lambda: store.revoke(bad, "globex admin", "globex"))
    store.publish(draft("c", 2, namespace="globex"), Mode.SWAP)
    assert store.superseded(named("c", "globex"), 1) is not None
    assert sorted(r.name for r in store.revoke(bad)) == ["c@1"]  # the operator's binds everybody
    refused(ErrorCode.ADAPTER_REVOKED, lambda: store.publish(draft("d", 1, namespace="globex"), Mode.PUT))
    refused(ErrorCode.ADAPTER_REVOKED, lambda: store.superseded(named("c", "globex"), 1))
    assert audit(store).problems == ()


def test_contents_that_revisions_name(opened: Opener) -> None:
    store = opened()
    keys = [f"{n}" * 64 for n in range(1, 5)]
    for key in keys[:2]:
        store.publish(draft("a", int(key[0]), content=key), Mode.PUT)
    store.publish(draft("b", 3, content=keys[2]), Mode.PUT)
    store.publish(draft("c", 4), Mode.PUT)
    assert store.contents() == ({keys[1], keys[2]}, {keys[0]})
    store.remove(named("b"))
    store.publish(draft("d", 1, content=keys[0]), Mode.PUT)
    assert store.contents() == ({keys[1], keys[0]}, set())


URLS: list[tuple[str, str]] = [
    ("mysql://x", "begins with 'mysql'"),
    ("catalog.db", "begins with"),
    ("sqlite+aiosqlite:///x", "begins with 'sqlite+aiosqlite'"),
    ("sqlite:////nowhere/at/all/catalog.db", "does not exist"),
    ("postgresql://nobody@/nothing?host=/nowhere", "cannot be opened"),
]


@pytest.mark.parametrize(("url", "words"), URLS)
def test_what_cannot_be_a_catalog(url: str, words: str) -> None:
    error = refused(ErrorCode.CONFIG_INVALID, lambda: CatalogStore.open(url))
    assert words in error.message


def test_a_file_that_is_no_database_or_of_another_schema(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database" * 100)
    error = refused(ErrorCode.CONFIG_INVALID, lambda: CatalogStore.open(f"sqlite:///{tmp_path / 'text'}"))
    assert "cannot be opened" in error.message
    url = f"sqlite:///{tmp_path / 'other'}"
    store = CatalogStore.open(url)
    with store.database.writing() as connection:
        connection.execute(text("UPDATE catalog_meta SET schema = 99"))
    store.close()
    assert "schema 99" in refused(ErrorCode.CONFIG_INVALID, lambda: CatalogStore.open(url)).message


def test_a_lost_or_doubled_generation_is_noticed() -> None:
    for change in ("INSERT INTO catalog_meta VALUES (2, 1, 0)", "DELETE FROM catalog_meta"):
        store = CatalogStore.open()
        with store.database.writing() as connection:
            connection.execute(text(change))
        refused(ErrorCode.CATALOG_RECORD_INVALID, lambda s=store: s.publish(draft(), Mode.ADD))
        refused(ErrorCode.CATALOG_RECORD_INVALID, store.changes)


def test_a_database_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path / 'catalog.db'}"
    store, other = CatalogStore.open(url), CatalogStore.open(url)
    with other.database.writing(), store.database.reading() as connection:
        connection.execute(text("PRAGMA busy_timeout = 1"))
    with other.database.writing():
        error: Any = refused(ErrorCode.CATALOG_UNAVAILABLE, lambda: store.publish(draft(), Mode.ADD))
    assert error.status == 503
    store.publish(draft(), Mode.ADD)


def test_where_a_tenant_publishes_under_anothers_name(opened: Opener) -> None:
    catalog = AdapterCatalog(store=opened())
    view, there = catalog.view, ("acme", "a")
    catalog.publish(draft("a", 1, namespace="acme"), Mode.ADD)
    catalog.publish(draft("shared", 2, namespace="default"), Mode.ADD)
    assert view.target("globex", "acme/a") == ("globex", "acme/a")  # as with a name that nobody has
    assert view.target("globex", "acme/b") == ("globex", "acme/b")
    assert view.target("globex", "shared") == ("globex", "shared")  # one's own beside everybody's
    refused(ErrorCode.FORBIDDEN, lambda: view.target("globex", "default/shared"))
    for rights in ((Right.USE,), (Right.LIST,), (Right.LOAD,), (Right.LIST, Right.LOAD, Right.USE)):
        catalog.store.grant(Grant("acme", "a", "globex", rights))
        catalog.refresh()  # what may be loaded anew is not what may be swapped
        refused(ErrorCode.FORBIDDEN, lambda: view.target("globex", "acme/a"))
    catalog.store.grant(Grant("acme", "a", "globex", (Right.SWAP,)))
    catalog.refresh()
    assert view.target("globex", "acme/a") == there
    catalog.store.grant(Grant("acme", "*", "globex", (Right.LOAD,)))
    catalog.refresh()
    assert view.target("globex", "acme/b") == ("acme", "b")
    catalog.store.remove(named("a", "acme"))
    catalog.refresh()
    assert view.target("globex", "acme/a") == there
    catalog.publish(draft("acme/a", 1, namespace="globex"), Mode.ADD)
    assert view.target("globex", "acme/a") == ("globex", "acme/a")


def test_a_request_id_that_no_record_has_is_not_found_whatever_it_holds(opened: Opener) -> None:
    log = RequestLog(opened().database)
    for request_id in ("unknown", "a\0b", "\0", "é\ufffd", "'; drop table requests", "a" * 100_000):
        assert log.find(request_id) == []
        assert log.find(request_id, "acme") == []
