"""The generation vector: one typed counter for each reason to advance, and the text form that keeps its
namespace.

There is no order between components. A snapshot is compared with its owners component by component, each with
a code of its own. Specification: 0x01G "Generations are a vector".
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.ids import (
    CacheGeneration,
    CatalogGeneration,
    GenerationNumber,
    PlanGeneration,
    PointerTableGeneration,
    RequestAttempt,
    RngGeneration,
    SlotGeneration,
)


@dataclass(frozen=True, slots=True)
class GenerationVector:
    """What was observed together."""

    catalog: CatalogGeneration
    request: RequestAttempt
    slot: SlotGeneration
    pointer_table: PointerTableGeneration
    plan: PlanGeneration
    cache: CacheGeneration
    rng: RngGeneration


_KINDS: Final[dict[str, type[GenerationNumber]]] = {
    "catalog": CatalogGeneration,
    "request": RequestAttempt,
    "slot": SlotGeneration,
    "pointer_table": PointerTableGeneration,
    "plan": PlanGeneration,
    "cache": CacheGeneration,
    "rng": RngGeneration,
}
_STALE: Final[dict[str, ErrorCode]] = {
    "catalog": ErrorCode.LEASE_MISMATCH,
    "request": ErrorCode.STALE_REQUEST_GENERATION,
    "slot": ErrorCode.STALE_SLOT_GENERATION,
    "pointer_table": ErrorCode.STALE_SLOT_GENERATION,
    "plan": ErrorCode.STALE_PLAN_GENERATION,
    "cache": ErrorCode.STALE_KV_FRONTIER,
    "rng": ErrorCode.STALE_REQUEST_GENERATION,
}


def check_current(observed: GenerationVector, current: GenerationVector) -> None:
    """Each observed component equals its owner's; raises the component's stale code."""
    for name, code in _STALE.items():
        seen, now = getattr(observed, name), getattr(current, name)
        if seen != now:
            raise InternalFault(
                code, f"the snapshot saw {name} generation {seen.value}, its owner is at {now.value}"
            )


def encode(vector: GenerationVector) -> dict[str, str]:
    """Text form: component -> "namespace:value"."""
    return {f.name: f"{f.name}:{getattr(vector, f.name).value}" for f in fields(vector)}


def decode(record: dict[str, str]) -> GenerationVector:
    """The vector of a text form; raises `generation_namespace` where a value is of another namespace."""
    if set(record) != set(_KINDS):
        raise InternalFault(
            ErrorCode.IDENTITY_INVALID, f"a generation vector has {sorted(record)}, expected {sorted(_KINDS)}"
        )
    numbers = {name: _parse(name, text) for name, text in record.items()}
    return GenerationVector(**numbers)  # type: ignore[arg-type]


def _parse(name: str, text: str) -> GenerationNumber:
    namespace, _, value = text.partition(":")
    if namespace != name:
        raise InternalFault(
            ErrorCode.GENERATION_NAMESPACE,
            f"component {name} holds {text!r}, a generation of another namespace",
        )
    if not (value.isascii() and value.isdecimal() and len(value) <= 19) or str(int(value)) != value:
        raise InternalFault(
            ErrorCode.IDENTITY_INVALID, f"component {name} holds {text!r}, expected {name}:NUMBER"
        )
    return _KINDS[name](int(value))
