"""The life that all children share: no child outlives its parent, however both stand, and an end takes no
longer than its grace.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import psutil
import pytest
from tests.process.living import SCRIPT, begin, parent
from tests.waiting import until, until_gone

from loraplex.process.child import END_SIGNAL, BlockingChild
from loraplex.process.pipe import Frames, frame

ROOT = Path(__file__).resolve().parents[2]


def told(folder: Path) -> list[psutil.Process]:
    until((folder / "pids").exists)
    return [psutil.Process(int(pid)) for pid in (folder / "pids").read_text().split()]


@pytest.mark.parametrize("how", ["process", "thread", "stopped", "group"])
def test_a_child_ends_with_a_parent_that_is_killed(tmp_path: Path, how: str) -> None:
    """Before it has imported what it needs; started by a thread that is gone; stopped; with what it started
    itself.
    """
    with parent(how, tmp_path, ROOT) as process:
        children = told(tmp_path)
        assert len(children) == (2 if how == "group" else 1)
        if how == "stopped":
            children[0].suspend()
        process.kill()
        until_gone(*children)


def test_a_child_that_does_not_end_is_killed_after_its_grace(tmp_path: Path) -> None:
    child = begin("process", tmp_path)
    (process,) = told(tmp_path)
    process.suspend()  # it hears no request to end
    assert child.stop(0.05) < 0
    assert not process.is_running()


def test_a_child_that_is_asked_to_end_ends_of_that(tmp_path: Path) -> None:
    child = begin("process", tmp_path)
    told(tmp_path)
    assert child.stop(60) == -END_SIGNAL


def test_a_script_ends_with_what_it_started(tmp_path: Path) -> None:
    child = begin("group", tmp_path)
    leader, other = told(tmp_path)
    assert leader.pid == child.pid
    child.stop(60)
    until_gone(leader, other)


def test_a_script_that_ends_by_itself_leaves_nothing(tmp_path: Path) -> None:
    """Its orders end when its parent dies, and it may be gone before it could be told of that."""
    script = tmp_path / "script.py"
    script.write_text(
        SCRIPT.replace("PLACE", repr(str(tmp_path / "pids"))).replace(
            "threading.Event().wait()\n", "sys.stdin.read()\n"
        )
    )
    child = BlockingChild.start_script(Path(sys.executable), script, "the script")
    processes = told(tmp_path)
    child._to.close()
    until_gone(*processes)
    assert child.stop(60) == -signal.SIGKILL


def test_a_child_ignores_what_a_terminal_sends_to_all(tmp_path: Path) -> None:
    child = begin("process", tmp_path)
    (process,) = told(tmp_path)
    for number in (signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
    assert child.stop(60) == -END_SIGNAL


def test_frames_are_whole_however_they_arrive() -> None:
    payloads = [b"", b"a", b"b" * 300]
    stream, frames = b"".join(map(frame, payloads)), Frames()
    assert [p for at in range(len(stream)) for p in frames.add(stream[at : at + 1])] == payloads
    assert Frames().add(stream) == payloads
