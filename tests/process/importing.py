"""A child that never gets beyond its imports; it writes its process id into the file that its parent
names.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import msgspec

from loraplex.process.pipe import read_frame

if __name__ == "__main__":
    place = Path(msgspec.msgpack.decode(read_frame(sys.stdin.buffer), type=str))
    place.with_suffix(".new").write_text(str(os.getpid()))
    place.with_suffix(".new").rename(place)
    threading.Event().wait()
