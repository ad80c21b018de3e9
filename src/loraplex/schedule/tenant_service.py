"""Completed service of each tenant.

Specification: 0x09H.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

BUCKET_RANKS: Final = (0, 8, 16, 32, 64, 128)
"""Largest rank of each bucket but the last; the first is the base's."""


def rank_bucket(rank: int) -> int:
    """Which bucket an adapter's largest rank lies in; 0 is the base."""
    return sum(rank > most for most in BUCKET_RANKS)


class TenantService:
    """Weighted tokens that each tenant completed."""

    def __init__(self) -> None:
        self._completed: Counter[str] = Counter()

    def virtual_service(self, tenant: str) -> int:
        """Completed service of a tenant, by weight."""
        return self._completed[tenant]

    def may_run(self, tenant: str) -> bool:
        """Whether one more request of the tenant may run."""
        return True

    def may_wait(self, tenant: str) -> bool:
        """Whether one more request of the tenant may wait."""
        return True

    def debit(self, tenant: str, tokens: int) -> None:
        """Count what was completed."""
        self._completed[tenant] += tokens
