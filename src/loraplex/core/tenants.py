"""What an operator gives a tenant: a share of service, and how many requests it may have.

A bound says what a tenant holds at a time, never how much it may use over time: service that nobody else
wants is everybody's.

Specification: rulings "Scheduling", "Tenants".
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loraplex.core import limits
from loraplex.core.errors import CallerError, ErrorCode


class TenantLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tenant's. weight: its share of service among those who want some. max_running, max_waiting:
    requests at a time, None for no bound of its own.
    """

    tenant: str
    weight: int = 1
    max_running: int | None = None
    max_waiting: int | None = None


def check_tenants(tenants: Sequence[TenantLimits]) -> None:
    """Raise `config_invalid`, with the field at fault, unless each tenant is named once and each bound is in
    its range.
    """
    if len(tenants) > limits.MAX_TENANTS:
        raise _invalid("tenant", f"limits of {len(tenants)} tenants were given, at most {limits.MAX_TENANTS}")
    seen: set[str] = set()
    for given in tenants:
        if not given.tenant or given.tenant in seen:
            raise _invalid("tenant", f"tenant {given.tenant[:80]!r} must be named, and once only")
        seen.add(given.tenant)
        bounds = (
            ("weight", given.weight, limits.MAX_TENANT_WEIGHT),
            ("max_running", given.max_running, limits.MAX_WAITING_REQUESTS),
            ("max_waiting", given.max_waiting, limits.MAX_WAITING_REQUESTS),
        )
        for name, value, most in bounds:
            if value is not None and not 1 <= value <= most:
                raise _invalid(
                    name,
                    f"{name} of tenant {given.tenant[:80]!r} must lie in 1 to {most}, got {value}",
                )


def _invalid(param: str, message: str) -> CallerError:
    return CallerError(ErrorCode.CONFIG_INVALID, message, param=param)
