"""Damaged catalog rows, one at a time: refused by the store, named by the audit's command, the others still
served.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.catalog.make import draft
from tests.catalog.names import named

from loraplex import cli
from loraplex.adapters.adapter_catalog import AdapterCatalog
from loraplex.catalog.changes import Mode
from loraplex.catalog.records import ANY, Grant, Right, seal
from loraplex.catalog.store import CatalogStore
from loraplex.core.errors import ErrorCode, LoraplexError
from loraplex.identity.canonical import canonical

Mutation = Callable[[sqlite3.Connection], None]
INVALID = ErrorCode.CATALOG_RECORD_INVALID
FLIPPED = "f" * 64
HERE = "WHERE alias = 'a' AND revision = 2"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalog with a@2, a granted tenant, and b@1 that nothing is done to."""
    path = tmp_path_factory.mktemp("catalog") / "good.db"
    store = CatalogStore.open(f"sqlite:///{path}")
    store.publish(draft("a", 1), Mode.ADD)
    store.publish(draft("a", 2, content="c" * 64), Mode.SWAP)
    store.publish(draft("b", 3), Mode.ADD)
    store.grant(Grant("acme", ANY, "globex", (Right.USE,)))
    with store.database.writing() as connection:
        for (name,) in connection.exec_driver_sql(
            "SELECT name FROM sqlite_master WHERE type = 'trigger'"
        ).all():
            connection.exec_driver_sql(
                f"DROP TRIGGER {name}"
            )  # damage does not ask the database's own guards
    store.close()
    return path


def edit(table: str, where: str, change: Callable[[dict[str, Any]], Any], *, sealed: bool = True) -> Mutation:
    """Change a stored record; sealed: its seal is made again, so that only what it says is wrong."""

    def mutate(connection: sqlite3.Connection) -> None:
        text, old = connection.execute(f"SELECT record, seal FROM {table} {where}").fetchone()
        record = json.loads(text)
        changed = change(record)
        data = changed if isinstance(changed, bytes) else canonical(record)
        connection.execute(
            f"UPDATE {table} SET record = ?, seal = ? {where}",
            (data.decode("utf-8", "surrogateescape"), seal(data) if sealed else old),
        )

    return mutate


def put(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda record: record.update(values)


def inner(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda record: record["artifact"].update(values)


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda record: record.pop(name) and None


def sql(statement: str) -> Mutation:
    return lambda connection: connection.execute(statement) and None


def revision(change: Callable[[dict[str, Any]], Any], **how: Any) -> Mutation:
    return edit("revisions", HERE, change, **how)


def artifact(change: Callable[[dict[str, Any]], Any], **how: Any) -> Mutation:
    where = f"WHERE semantic = (SELECT semantic FROM revisions {HERE})"
    return edit("artifacts", where, change, **how)


def granted(change: Callable[[dict[str, Any]], Any], **how: Any) -> Mutation:
    return edit("grants", "WHERE tenant = 'globex'", change, **how)


REVISION: dict[str, Mutation] = {
    "unsealed source": revision(put(source="/evil"), sealed=False),
    "unsealed digest": revision(inner(semantic=FLIPPED), sealed=False),
    "seal gone": sql(f"UPDATE revisions SET seal = '' {HERE}"),
    "seal of another": sql(f"UPDATE revisions SET seal = '{FLIPPED}' {HERE}"),
    "text empty": revision(lambda _: b""),
    "text cut": revision(lambda r: canonical(r)[:-1]),
    "text a list": revision(lambda _: b"[]"),
    "text not canonical": revision(lambda r: json.dumps(r, indent=1).encode()),
    "text twice": revision(lambda r: canonical(r) * 2),
    "unknown field": revision(put(priority=1)),
    "unknown field of the artifact": revision(inner(device="cuda")),
    **{f"no {name}": revision(drop(name)) for name in ("namespace", "alias", "revision", "source", "artifact",
    "at_ms")},
    "namespace of another": revision(put(namespace="acme")),
    "namespace malformed": revision(put(namespace="a/b")),
    "alias of another": revision(put(alias="b")),
    "alias malformed": revision(put(alias="../a")),
    "alias too long": revision(put(alias="a" * 129)),
    "revision of another": revision(put(revision=1)),
    "revision 0": revision(put(revision=0)),
    "revision a string": revision(put(revision="2")),
    "revision a float": revision(lambda r: canonical(r).replace(b'"revision":2', b'"revision":2.0')),
    "generation of another": revision(put(generation=3)),
    "generation before its number": revision(put(generation=1)),
    "source missing": revision(put(source="")),
    "source too long": revision(put(source="/" * 5000)),
    "actor missing": revision(put(actor="")),
    "content no digest": revision(put(content="xyz")),
    "content upper case": revision(put(content="C" * 64)),
    "time negative": revision(put(at_ms=-1)),
    **{f"{name} flipped": revision(inner(**{name: FLIPPED})) for name in ("base", "artifact", "activation",
    "semantic")},
    **{f"{name} no digest": revision(inner(**{name: "00"})) for name in ("base", "artifact", "activation",
    "semantic")},
    "method missing": revision(inner(method="")),
    "method of another": revision(inner(method="dora")),
    "ranks unsorted": revision(inner(ranks=[8, 4])),
    "rank too high": revision(inner(ranks=[4, 4096])),
    "rank 0": revision(inner(ranks=[0])),
    "targets missing": revision(inner(targets=[])),
    "targets twice": revision(inner(targets=["q", "q"])),
    "not every tensor applied": revision(inner(tensors_applied=11)),
    "no tensors": revision(inner(tensors_applied=0, tensors_total=0)),
    "no modules": revision(inner(modules=0)),
    "no bytes": revision(inner(nbytes=0)),
    "column alias": sql(f"UPDATE revisions SET namespace = 'acme' {HERE}"),
    "column generation": sql(f"UPDATE revisions SET generation = 99 {HERE}"),
    "column artifact of another": sql(
        f"UPDATE revisions SET semantic = (SELECT semantic FROM revisions WHERE alias = 'b') {HERE}"
    ),
    "row gone": sql(f"DELETE FROM revisions {HERE}"),
}  # fmt: skip
ARTIFACT: dict[str, Mutation] = {
    "artifact unsealed": artifact(put(method="dora"), sealed=False),
    "artifact otherwise": artifact(put(method="dora")),
    "artifact of another base": artifact(put(base=FLIPPED)),
    "artifact flipped": artifact(put(artifact=FLIPPED)),
    "artifact ranks": artifact(put(ranks=[16])),
    "artifact text": artifact(lambda _: b"{}"),
    "artifact row gone": sql(
        f"DELETE FROM artifacts WHERE semantic = (SELECT semantic FROM revisions {HERE})"
    ),
    "artifact row renamed": sql(
        f"UPDATE artifacts SET semantic = '{FLIPPED}' WHERE semantic = (SELECT semantic FROM revisions "
        f"{HERE})"
    ),
}
ALIAS: dict[str, Mutation] = {
    "alias names no revision": sql("UPDATE aliases SET current = 7 WHERE alias = 'a'"),
    "alias behind its revision": sql("UPDATE aliases SET last = 1 WHERE alias = 'a'"),
    "alias older than its revision": sql("UPDATE aliases SET generation = 1 WHERE alias = 'a'"),
}
GRANT: dict[str, Mutation] = {
    "grant unsealed": granted(put(tenant=ANY), sealed=False),
    "grant to another": granted(put(tenant="initech")),
    "grant of another namespace": granted(put(namespace="default")),
    "grant of another alias": granted(put(alias="secret")),
    "grant of an unknown right": granted(put(rights=["own"])),
    "grant of no right": granted(put(rights=[])),
    "grant of a right twice": granted(put(rights=["use", "use"])),
    "grant with more": granted(put(until=7)),
    "grant tenant malformed": granted(put(tenant="a b")),
    "grant text": granted(lambda _: b"null"),
}
LOG: dict[str, Mutation] = {
    "log line gone": sql("DELETE FROM publications WHERE generation = 2"),
    "log line of another": sql("UPDATE publications SET alias = 'b' WHERE generation = 2"),
    "log line of another revision": sql("UPDATE publications SET revision = 1 WHERE generation = 2"),
    "log line added": sql("INSERT INTO publications VALUES (9, 'remove', 'default', 'a', 2, 'x', 1)"),
    "alias rolled back": sql("UPDATE aliases SET current = 1 WHERE alias = 'a'"),
    "alias forgotten": sql("DELETE FROM aliases WHERE alias = 'a'"),
    "tombstone undone": sql("UPDATE publications SET kind = 'remove' WHERE generation = 2"),
}
SERVED: dict[str, Mutation] = REVISION | ARTIFACT | ALIAS
CASES: dict[str, Mutation] = SERVED | GRANT | LOG


def damaged(good: Path, folder: Path, mutate: Mutation) -> str:
    path = folder / "catalog.db"
    shutil.copy(good, path)
    connection = sqlite3.connect(path)
    with connection:
        mutate(connection)
    connection.close()
    return f"sqlite:///{path}"


@pytest.mark.parametrize("name", CASES)
def test_the_audit_names_it(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    url = damaged(good, tmp_path, CASES[name])
    with pytest.raises(SystemExit) as ended:
        cli.main(["catalog", "check", "--catalog", url, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert ended.value.code == 1
    assert {problem["code"] for problem in found["problems"]} == {INVALID.value}
    assert not found["ok"]


@pytest.mark.parametrize("name", SERVED)
def test_its_alias_is_refused_and_no_other(good: Path, tmp_path: Path, name: str) -> None:
    catalog = AdapterCatalog(store=CatalogStore.open(damaged(good, tmp_path, SERVED[name])))
    for look in (
        lambda: catalog.resolve("a"),
        lambda: catalog.get(named("a")),
        lambda: catalog.publish(draft("a", 5), Mode.PUT),
    ):
        with pytest.raises(LoraplexError) as caught:
            look()
        assert caught.value.code is INVALID
    assert catalog.resolve("b").revision == 1
    catalog.publish(draft("c", 4), Mode.ADD)
    catalog.close()


@pytest.mark.parametrize("name", GRANT)
def test_a_damaged_grant_permits_nothing(good: Path, tmp_path: Path, name: str) -> None:
    store = CatalogStore.open(damaged(good, tmp_path, GRANT[name]))
    changes = store.changes()
    assert [error.code for error in changes.damaged_grants] == [INVALID]
    view = AdapterCatalog(store=store).view
    for tenant in ("globex", "initech"):
        assert not view.may(tenant, named("secret", "acme"), Right.USE)
    store.close()


def test_the_good_one_is_good(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["catalog", "check", "--catalog", f"sqlite:///{good}"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == (
        "generation 4: 2 aliases, 3 revisions, 3 artifacts, 2 grants, 0 problems\n"
    )


def test_the_corpus_is_large_enough() -> None:
    print(f"{len(CASES)} malformed catalog records")
    assert len(CASES) > 60
