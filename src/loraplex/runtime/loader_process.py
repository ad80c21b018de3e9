"""The loader's process: `python -m loraplex.runtime.loader_process`, one image after the other, until its parent ends.

Imports nothing heavy, so that it is there in a moment. Specification: DESIGN 4 "Loading".
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Final

import msgspec

from loraplex.core.errors import ErrorCode, LoraplexError
from loraplex.runtime.child import ChildGone, Parent
from loraplex.runtime.images import ImageStore
from loraplex.runtime.loader import LoaderAnswer, LoaderAsk, LoaderStart

_start: Final = msgspec.msgpack.Decoder(LoaderStart)
_asks: Final = msgspec.msgpack.Decoder(LoaderAsk)


def bring(kernel_digest: str, disk: ImageStore, host: ImageStore, threads: int = 1) -> LoaderAnswer:
    """Take an image of the disk store into the host store, every page verified as it lies there."""
    try:
        host.adopt(disk.open(kernel_digest), threads)
    except LoraplexError as error:
        return LoaderAnswer(kernel_digest, error.code.value, error.message)
    except Exception as error:  # noqa: BLE001 - the process's boundary: a fetch ends typed, whatever happens
        return LoaderAnswer(
            kernel_digest, ErrorCode.ADAPTER_LOAD_FAILED.value, f"{type(error).__name__}: {error}"
        )
    return LoaderAnswer(kernel_digest)


def main() -> int:
    """The child's entry."""
    parent = Parent()  # tied: one that hangs goes with its engine too
    try:
        start = parent.receive(_start)
        with suppress(OSError):
            os.nice(start.nice)
        disk, host = ImageStore(start.disk), ImageStore(start.host)
        while True:
            ask = parent.receive(_asks)
            if ask.drop:
                host.delete(ask.kernel_digest)
            else:
                parent.send(bring(ask.kernel_digest, disk, host, start.threads))
    except (ChildGone, BrokenPipeError):
        return 0


if __name__ == "__main__":
    sys.exit(main())
