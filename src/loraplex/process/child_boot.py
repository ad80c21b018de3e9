"""The first lines of every child process: they tie it to its parent, then run its module.

Run as `python child_boot.py PARENT WATCH TARGET [arguments]`. TARGET is a module, or the path of a script;
WATCH says what ties the child: `process`, `thread` where the thread that starts it also lasts as long as its
process, `group` where the child leads a process group that ends with it. Imports nothing but what Python
brings, so that the tie holds before anything heavy is read, and so that another interpreter can run it.

A tied child ends when its parent ends, however that ended: a thread waits for the parent, and on Linux the
kernel kills a child that cannot run. Interrupts and ends that a terminal or a service manager sends to a
whole group are the parent's to act on. Specification: rulings "Processes".
"""

from __future__ import annotations

import ctypes
import os
import runpy
import select
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.2


def _tie(parent: int, watch: str) -> None:
    linux = sys.platform == "linux"
    if (
        linux
        and watch == "thread"
        and ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0
    ):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    try:
        handle = os.pidfd_open(parent) if linux else -1
    except OSError:  # it is gone, or the kernel has no such handles
        handle = -1
    if os.getppid() != parent:  # it ended before anything watched
        os._exit(1)
    threading.Thread(target=_outlast, args=(parent, handle, watch == "group"), daemon=True).start()


def _outlast(parent: int, handle: int, group: bool) -> None:
    """Wait for the parent's end, then end this process, with its group where it leads one."""
    if handle >= 0:
        end = select.poll()
        end.register(handle, select.POLLIN)
        end.poll()
    else:
        pause = threading.Event()
        while os.getppid() == parent:
            pause.wait(_LOOK_S)
    if group:
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main() -> None:
    """The child's entry."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _, parent, watch, target, *arguments = sys.argv
    _tie(int(parent), watch)
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    sys.argv[:] = [target, *arguments]
    if target.endswith(".py"):
        runpy.run_path(target, run_name="__main__")
    else:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    if watch == "group":
        # Its orders ended. Where that is because the parent died, the leader may end before its watch acts,
        # and nobody else would end the others.
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
