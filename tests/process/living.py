"""Children of the tests, and parents that start one: run as `python -m tests.process.living HOW FOLDER` by a
test.

A child says where it is by a file in FOLDER, then stays: one while its module is imported, one when it was
greeted, one that has started a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from loraplex.process.child import BlockingChild

IMPORTING = "tests.process.importing"


def stay() -> None:
    """Never return."""
    threading.Event().wait()


SCRIPT = """
import os, pathlib, subprocess, sys, threading
stay = [sys.executable, "-c", "import threading; threading.Event().wait()"]
place = pathlib.Path(PLACE)
place.with_suffix(".new").write_text(f"{os.getpid()} {subprocess.Popen(stay).pid}")
place.with_suffix(".new").rename(place)
threading.Event().wait()
"""


def begin(how: str, folder: Path) -> BlockingChild:
    """Start a child as told, in this process."""
    if how == "group":
        script = folder / "script.py"
        script.write_text(SCRIPT.replace("PLACE", repr(str(folder / "pids"))))
        return BlockingChild.start_script(Path(sys.executable), script, "the script")
    child = BlockingChild.start(IMPORTING, "the child")
    child.send(str(folder / "pids"))
    return child


def main() -> None:
    """Start a child and stay."""
    how, folder = sys.argv[1:]
    if how == "thread":
        starter = threading.Thread(target=begin, args=(how, Path(folder)))
        starter.start()
        starter.join()
    else:
        begin(how, Path(folder))
    stay()


def parent(how: str, folder: Path, root: Path) -> subprocess.Popen[bytes]:
    """A process that runs `main`."""
    paths = os.pathsep.join((str(root / "src"), str(root)))
    command = [sys.executable, "-m", "tests.process.living", how, str(folder)]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths})


if __name__ == "__main__":
    main()
