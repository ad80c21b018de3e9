"""Physical states of a page, shared by the pool and its slabs.

Specification: 0x05A.
"""

from __future__ import annotations

from enum import IntEnum


class PageState(IntEnum):
    """Physical state of a page. SLAB: cut into blocks that small adapters own."""

    FREE = 0
    RESERVED = 1
    KV = 2
    ADAPTER = 3
    NULL = 4
    SLAB = 5
