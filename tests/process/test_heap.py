"""What a start has built costs no later collection."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIVE = """
import gc
from loraplex.process.heap import freeze_heap
kept = [[number] for number in range(50_000)]
before = len(gc.get_objects())
freeze_heap()
print(before, len(gc.get_objects()), gc.get_freeze_count())
"""


def test_a_frozen_heap_is_walked_by_no_collection() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", LIVE], env=environment, check=True, capture_output=True, text=True
    )
    before, walked, frozen = map(int, done.stdout.split())
    assert before > 50_000
    assert walked < 100
    assert frozen > 50_000
