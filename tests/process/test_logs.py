"""A line for each event, whatever the values hold; nothing of a value becomes a line of its own."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from loraplex.process.logs import configure_logging, fields


@pytest.fixture
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


VALUES = {"path": "/v1/x", "model": 'a "b"\nINFO forged', "tokens": 3, "absent": None, "empty": ""}


@pytest.mark.usefixtures("restored")
def test_json_lines_hold_the_values() -> None:
    stream = io.StringIO()
    configure_logging("info", as_json=True, stream=stream)
    logging.getLogger("t").info("request\nx", extra=fields(**VALUES))
    logging.getLogger("t").debug("not this")
    (line,) = stream.getvalue().splitlines()
    value = json.loads(line)
    assert value.pop("time").endswith("Z")
    assert value == {
        "level": "info",
        "logger": "t",
        "message": "request\nx",
        "path": "/v1/x",
        "model": 'a "b"\nINFO forged',
        "tokens": 3,
        "empty": "",
    }


@pytest.mark.usefixtures("restored")
def test_plain_lines_cannot_be_forged() -> None:
    stream = io.StringIO()
    configure_logging("info", as_json=False, stream=stream)
    logging.getLogger("t").info("request\nx", extra=fields(**VALUES))
    (line,) = stream.getvalue().splitlines()
    assert (
        line.partition(" ")[2] == r'info request\nx path=/v1/x model="a \"b\"\nINFO forged" tokens=3 empty=""'
    )


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("as_json", [True, False])
def test_what_is_not_utf8_is_written_all_the_same(as_json: bool) -> None:
    stream = io.StringIO()
    configure_logging("info", as_json=as_json, stream=stream)
    logging.getLogger("t").info("adapter %s", "\udcff", extra=fields(source="\udcfe"))
    line = stream.getvalue()
    assert line.encode().count(b"udcff") == line.encode().count(b"udcfe") == 1


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("as_json", [True, False])
def test_an_exception_keeps_its_traceback(as_json: bool) -> None:
    stream = io.StringIO()
    configure_logging("error", as_json=as_json, stream=stream)
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("t").exception("failed")
    assert "ValueError: broken" in stream.getvalue()
    assert len(stream.getvalue().splitlines()) == 1 or not as_json
