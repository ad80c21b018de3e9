"""A preparation's process whose sources misbehave: run in place of `loraplex.adapters.prepare_process`."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from loraplex.adapters import prepare_process
from loraplex.adapters.prepare_process import PrepareOrder, run
from loraplex.process.parent import run_child

MODULE = "tests.adapters.deadly"
DIE = "die"
NEVER = "never"
GREEDY = "greedy"
HONEST = prepare_process.prepare_source


def prepare(source: str, *rest: Any) -> Any:
    """Die, wait for ever, or want more memory than there is."""
    match source:
        case "die":
            os._exit(9)
        case "never":
            threading.Event().wait()
        case "greedy":
            return bytearray(1 << 50)
    return HONEST(source, *rest)


if __name__ == "__main__":
    prepare_process.prepare_source = prepare
    sys.exit(run_child(PrepareOrder, run))
