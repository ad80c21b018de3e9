"""Work over many tensors or pages on a few threads; numpy and hashlib let go of the interpreter while they
work.

Used in the loader process only, never on the step loop. Order of results is the order of items.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

MAX_THREADS: Final = 8
FROM_BYTES: Final = 1 << 20
"""Less work than this is not worth a thread."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_threads(work: Callable[[Item], Result], items: Sequence[Item], nbytes: int) -> list[Result]:
    """`work` of each item; nbytes: bytes that the work touches. The first error in the order of items is
    raised.
    """
    threads = min(MAX_THREADS, os.cpu_count() or 1, len(items))
    if nbytes < FROM_BYTES or threads < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads, thread_name_prefix="adapter") as pool:
        return list(pool.map(work, items))
