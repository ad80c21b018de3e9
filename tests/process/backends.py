"""Backends that the tests build in a real worker process by name."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from pathlib import Path

from tests.engine.rig import Rig

from loraplex.config import EngineConfig
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.ports import Backend

VIRTUAL = "tests.process.backends:build_virtual"
OBEDIENT = "tests.process.backends:build_obedient"
REFUSING = "tests.process.backends:build_refusing"
BREAKING = "tests.process.backends:build_breaking"
DYING = "tests.process.backends:build_dying"

RAISE, DIE, HANG = b"raise", b"die", b"hang"
RESULT_BYTES = 1 << 20


def build_virtual(config: EngineConfig) -> Backend:
    """The device of a `Rig`; prints, as libraries do."""
    print("loading")
    print("loading", file=sys.stderr)
    return Rig(depth=config.pipeline_depth).device


class ObedientBackend:
    """Answers every plan with a mebibyte of its first byte, or does as the plan says."""

    def __init__(self, hanging: Path) -> None:
        self._hanging = hanging
        self._results: deque[bytes] = deque()

    def launch(self, plan: bytes) -> None:
        """Obey."""
        match plan:
            case b"raise":
                raise RuntimeError("told to")
            case b"die":
                os._exit(9)
            case b"hang":
                self._hanging.touch()
                threading.Event().wait()
        self._results.append(plan[:1] * RESULT_BYTES)

    def collect(self) -> bytes:
        """The oldest answer."""
        return self._results.popleft()


def build_obedient(config: EngineConfig) -> Backend:
    """An `ObedientBackend` that touches the file named as its model when it hangs."""
    return ObedientBackend(Path(config.model))


def build_refusing(config: EngineConfig) -> Backend:
    """Refuses its model."""
    raise CallerError(ErrorCode.MODEL_UNSUPPORTED, "the model is refused", param="model")


def build_breaking(config: EngineConfig) -> Backend:
    """Has a fault."""
    raise KeyError("lost")


def build_dying(config: EngineConfig) -> Backend:
    """Takes the process with it."""
    os._exit(7)
