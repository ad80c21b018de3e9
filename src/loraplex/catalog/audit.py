"""An audit of a whole catalog: every record against its seal, every relation between records, the log against
both.

What a server checks when it reads an alias is checked here for everything that was ever published. Changes
nothing. Specification: 0x01G, 0x0D; rulings "Identity".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from loraplex.catalog.records import AliasKey, ArtifactRecord, Revision, damaged, decode
from loraplex.catalog.schema import aliases, artifacts, meta, publications
from loraplex.catalog.sealed_rows import (
    RowKind,
    alias_state,
    all_grants,
    current_rows,
    read_revision,
    revision_rows,
)
from loraplex.catalog.store import CatalogStore
from loraplex.core.errors import LoraplexError

Published = dict[tuple[AliasKey, int], Revision | None]
"""Every revision by alias and number, None where its record is damaged."""


@dataclass(frozen=True, slots=True)
class Audit:
    """What was found. problems: (what is wrong with, its error)."""

    generation: int
    aliases: int
    revisions: int
    artifacts: int
    grants: int
    problems: tuple[tuple[str, LoraplexError], ...]

    def lines(self) -> list[str]:
        """For a terminal."""
        head = (
            f"generation {self.generation}: {self.aliases} aliases, {self.revisions} revisions, "
            f"{self.artifacts} artifacts, {self.grants} grants, {len(self.problems)} problems"
        )
        return [head, *(f"{what}: {error}" for what, error in self.problems)]

    def record(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "ok": not self.problems,
            "generation": self.generation,
            "aliases": self.aliases,
            "revisions": self.revisions,
            "artifacts": self.artifacts,
            "grants": self.grants,
            "problems": [
                {"what": what, "code": error.code.value, "message": error.message}
                for what, error in self.problems
            ],
        }


def audit(store: CatalogStore) -> Audit:
    """Check everything, in one snapshot. Raises only when the database does not answer."""
    problems: list[tuple[str, LoraplexError]] = []
    with store.database.reading() as connection:
        generation = int(connection.execute(select(meta.c.generation)).scalar_one())
        known = _artifacts(connection, problems)
        published = _revisions(connection, problems)
        names = _aliases(connection, problems, published)
        granted, wrong = all_grants(connection, -1)
        problems += [("grant", error) for error in wrong]
        _log(connection, generation, published, problems)
    return Audit(generation, names, len(published), known, len(granted or ()) + len(wrong), tuple(problems))


def _artifacts(connection: Connection, problems: list[tuple[str, LoraplexError]]) -> int:
    count = 0
    for row in connection.execute(select(artifacts)).mappings():
        count += 1
        try:
            if decode(ArtifactRecord, row["record"], row["seal"]).semantic != row["semantic"]:
                raise damaged(f"the row of artifact {row['semantic']:.16} holds another one")
        except LoraplexError as error:
            problems.append((f"artifact {row['semantic']:.16}", error))
    return count


def _revisions(connection: Connection, problems: list[tuple[str, LoraplexError]]) -> Published:
    found: Published = {}
    for row in connection.execute(revision_rows()).mappings():
        alias_key, number = AliasKey(row["namespace"], row["alias"]), row["revision"]
        try:
            found[alias_key, number] = read_revision(row)
        except LoraplexError as error:
            found[alias_key, number] = None
            problems.append((f"{alias_key.alias}@{number} of {alias_key.namespace}", error))
    return found


def _aliases(
    connection: Connection,
    problems: list[tuple[str, LoraplexError]],
    published: Published,
) -> int:
    count = 0
    newest: dict[AliasKey, int] = {}
    for alias_key, number in published:
        newest[alias_key] = max(number, newest.get(alias_key, 0))
    for row in connection.execute(current_rows()).mappings():
        count += 1
        state = alias_state(row)
        alias_key = state.alias_key
        error = state.current if isinstance(state.current, LoraplexError) else None
        if error is None and newest.pop(alias_key, 0) != state.last:
            error = damaged(f"alias {alias_key.alias!r} says that revision {state.last} is its last one")
        if error is not None:
            newest.pop(alias_key, None)
            problems.append((f"alias {alias_key.alias} of {alias_key.namespace}", error))
    problems += [
        (f"alias {alias_key.alias} of {alias_key.namespace}", damaged("its revisions have no alias"))
        for alias_key in newest
    ]
    return count


def _log(
    connection: Connection,
    generation: int,
    published: Published,
    problems: list[tuple[str, LoraplexError]],
) -> None:
    """One line a generation, and each publication's line names its revision."""
    rows = list(connection.execute(select(publications).order_by(publications.c.generation)).mappings())
    if [row["generation"] for row in rows] != list(range(1, generation + 1)):
        problems.append(("log", damaged(f"{len(rows)} lines do not count generations 1 to {generation}")))
    by_generation = {row["generation"]: row for row in rows}
    for (alias_key, number), revision in published.items():
        row = None if revision is None else by_generation.get(revision.generation)
        named = None if row is None else (row["namespace"], row["alias"], row["revision"])
        if revision is not None and named != (*alias_key, number):
            problems.append(
                (f"log of {alias_key.alias}@{number}", damaged("its generation's line is another one's"))
            )
    last = {
        AliasKey(row["namespace"], row["alias"]): row
        for row in rows
        if row["kind"] in (RowKind.ADD, RowKind.SWAP, RowKind.REMOVE)
    }
    for row in connection.execute(select(aliases)).mappings():
        line = last.get(AliasKey(row["namespace"], row["alias"]))
        said = (
            None
            if line is None
            else (line["generation"], None if line["kind"] == RowKind.REMOVE else line["revision"])
        )
        if said != (row["generation"], row["current"]):
            problems.append(
                (f"log of {row['alias']}", damaged("the alias means something else than its last line says"))
            )
