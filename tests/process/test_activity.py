"""What a long command says of itself: every activity once, again while it lasts, and never on a terminal as
plain lines.
"""

from __future__ import annotations

import io

from tests.waiting import until

from loraplex.process.activity import activity


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_away_from_a_terminal_each_activity_is_a_line() -> None:
    out = io.StringIO()
    with activity(out, repeat_s=3600) as tell:
        tell("loading")
        tell("measuring")
    assert [line.partition("] ")[2] for line in out.getvalue().splitlines()] == ["loading", "measuring"]


def test_an_activity_that_lasts_is_said_again() -> None:
    out = io.StringIO()
    with activity(out, repeat_s=0.001) as tell:
        tell("loading")
        until(lambda: out.getvalue().count("still: loading") > 2)
    assert "loading" in out.getvalue().splitlines()[0]


def test_a_terminal_keeps_each_activity_with_its_time() -> None:
    out = Terminal()
    with activity(out) as tell:
        tell("loading")
        tell("measuring")
    for text in ("loading (", "measuring ("):
        assert out.getvalue().count(text) == 1


def test_where_others_write_too_a_terminal_gets_lines() -> None:
    out = Terminal()
    with activity(out, live=False, repeat_s=3600) as tell:
        tell("loading")
    assert out.getvalue().endswith("] loading\n")
    assert "\x1b" not in out.getvalue()
