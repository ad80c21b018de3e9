"""What a request would cost beside what runs: a vector, because its units cannot be added up.

Bytes that must be loaded, runs of one adapter, rank rows and pages are no common currency: a policy compares
them one after the other, each in quanta of its own, and never sums them. Pure arithmetic over figures that
the engine counts.

Specification: 0x09C; 0x06A (true against physical rank).
"""

from __future__ import annotations

from typing import NamedTuple


class Cost(NamedTuple):
    """0x09C's vector, in the order in which its parts are compared.

    load_bytes: that must reach the device first. basis_bytes: of a shared basis that must. runs: of one
    adapter that the plan gets more. true_rank_rows: ranks over the rows; padded_rank_rows: what a backend of
    fixed slots would compute. adapter_pages, kv_pages: that it takes. collective_bytes: that shards exchange.
    """

    load_bytes: int = 0
    basis_bytes: int = 0
    runs: int = 0
    true_rank_rows: int = 0
    padded_rank_rows: int = 0
    adapter_pages: int = 0
    kv_pages: int = 0
    collective_bytes: int = 0


FREE = Cost()


def in_quanta(cost: Cost, quanta: Cost) -> tuple[int, ...]:
    """Each part in whole quanta of its own, rounded up; 0 for a part that is not compared (quantum 0)."""
    return tuple([-(-part // quantum) if quantum else 0 for part, quantum in zip(cost, quanta, strict=True)])
