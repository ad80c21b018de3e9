"""docs/interface.md names what there is: commands and their options, endpoints and the fields of bodies, and
no others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest
from cyclopts import App

from loraplex import cli
from loraplex.core.neutral import Unsupported
from loraplex.server.administration.endpoints import ACTIONS
from loraplex.server.app import ROUTES
from loraplex.server.openapi import BODIES

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "interface.md").read_text(encoding="utf-8")
QUOTED = re.compile(r"`([^`]+)`")


def table(text: str, heads: str) -> list[list[str]]:
    """Cells of each row of the table whose heading begins so; an escaped bar is a bar."""
    found = re.search(rf"^\| {re.escape(heads)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert found is not None, f"there is no table of {heads}"
    rows = (re.split(r"(?<!\\)\|", line)[1:-1] for line in found[1].splitlines())
    return [[cell.strip().replace("\\|", "|") for cell in row] for row in rows]


def section(title: str) -> str:
    """What stands below a heading of the page."""
    return re.split(r"^## ", PAGE.partition(f"\n## {title}\n")[2], flags=re.MULTILINE)[0]


def commands_in(cell: str) -> list[str]:
    """`loraplex a b|c` names two commands; what follows in capitals, in parentheses or as an option is what
    they take.
    """
    found = []
    for words in QUOTED.findall(cell):
        path = re.match(r"(?:loraplex )?([a-z| ]+[a-z])(?= |$)", words)
        assert path is not None, words
        *group, last = path[1].split(" ")
        found += [" ".join([*group, name]) for name in last.split("|")]
    return found


def real_commands(app: App, path: str = "") -> Iterator[tuple[str, dict[str, set[str]]]]:
    """Each command below `app`, with its options and the values of those that take one of a few."""
    for name in app:
        if not name.startswith("-"):
            yield from real_commands(app[name], f"{path} {name}".lstrip())
    if app.default_command is not None:
        options: dict[str, set[str]] = {}
        for argument in app.assemble_argument_collection():
            options |= {name: values(argument.hint) for name in argument.names if name.startswith("--")}
        yield path, options


def values(hint: Any) -> set[str]:
    if get_origin(hint) is Literal:
        return {str(value) for value in get_args(hint)}
    return set().union(*(values(part) for part in get_args(hint) if get_origin(part) is Literal))


def written_options(cell: str) -> dict[str, set[str]]:
    """`--a x|y` is an option of two values; `--a|--no-a` are two options; `--a URL` takes anything."""
    found: dict[str, set[str]] = {}
    for words in QUOTED.findall(cell):
        names, _, value = words.partition(" ")
        few = set(value.split("|")) if re.fullmatch(r"[a-z0-9|]+", value) else set()
        found |= dict.fromkeys(names.split("|"), few)
    return found


def test_the_page_lists_every_command_and_no_other() -> None:
    rows = table(section("Command line"), "command | does")
    built = [name for cell, does in rows if does != "reserved" for name in commands_in(cell)]
    assert sorted(built) == sorted(name for name, _ in real_commands(cli.app))


def test_the_page_lists_every_option_of_each_command_and_no_other() -> None:
    rows = table(section("Command line"), "command | takes")
    written = {name: written_options(options) for cell, options in rows for name in commands_in(cell)}
    assert written == dict(real_commands(cli.app))


def test_the_page_lists_every_endpoint_and_no_other() -> None:
    written = [
        f"{method} {path}"
        for cell, does in table(section("HTTP"), "endpoint")
        if does != "reserved"
        for entry in QUOTED.findall(cell)
        for methods, _, paths in [entry.partition(" ")]
        for method in methods.split("|")
        for path in spelt_out(paths)
    ]
    real = [
        f"{route.method} {route.path.replace('{action}', action)}"
        for route in ROUTES
        for action in (ACTIONS if "{action}" in route.path else ("",))
    ]
    assert sorted(written) == sorted(real)


def spelt_out(path: str) -> list[str]:
    """`/a/b|c` is two paths."""
    above, _, names = path.rpartition("/")
    return [f"{above}/{name}" for name in names.split("|")]


@pytest.mark.parametrize("endpoint", sorted(BODIES))
def test_the_page_lists_every_field_of_a_body_and_no_other(endpoint: tuple[str, str]) -> None:
    rows = [row for row in table(section("HTTP"), "body of") if f"`{' '.join(endpoint)}`" in row[0]]
    fields = msgspec.structs.fields(BODIES[endpoint])
    for column, unsupported in ((1, False), (2, True)):
        written = [name for row in rows for name in QUOTED.findall(row[column])]
        real = [field.name for field in fields if (field.type is Unsupported) is unsupported]
        assert sorted(written) == sorted(real)


def test_the_page_lists_no_body_that_is_not_there() -> None:
    written = {entry for row in table(section("HTTP"), "body of") for entry in QUOTED.findall(row[0])}
    assert written == {" ".join(endpoint) for endpoint in BODIES}


def test_options_and_commands_are_read_as_they_are_written() -> None:
    sample = (
        "| command | takes |\n|---|---|\n| `loraplex a b\\|c X` | `--d x\\|y`, `--e\\|--no-e`, `--f F` |\n"
    )
    [(commands, options)] = table(sample, "command")
    assert commands_in(commands) == ["a b", "a c"]
    assert written_options(options) == {"--d": {"x", "y"}, "--e": set(), "--no-e": set(), "--f": set()}
