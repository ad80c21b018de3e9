"""The launch snapshot of one row, and its validation against the owners of what it names.

This is the full form of the comparison; the engine's packed plan carries compact integers that stand for the
same fields. Specification: 0x01G "Launch validation".
"""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.identity.binding import RequestBinding, SlotBinding
from loraplex.identity.execution import History, check_history
from loraplex.identity.generations import GenerationVector, check_current


@dataclass(frozen=True, slots=True)
class LaunchRow:
    """What a row saw when its plan was made: bindings, kernel ABI and the generation vector."""

    request_binding: str
    slot_binding: str
    kernel: str
    generations: GenerationVector


@dataclass(frozen=True, slots=True)
class LaunchOwners:
    """What the owners hold now: request, adapter (base and semantic ABI), slot, cache execution, generations.

    cache_history: under which executions the request's KV rows were made. request_history: those that its
    adapter and activation call for.
    """

    request: RequestBinding
    adapter_base: str
    adapter_semantic: str
    slot: SlotBinding
    cache_history: History
    request_history: History
    generations: GenerationVector


def validate_launch(row: LaunchRow, owners: LaunchOwners) -> None:
    """Raise on the first component that no longer agrees; returning means that the row may run."""
    request, slot = owners.request, owners.slot
    _same(ErrorCode.STALE_REQUEST_GENERATION, "request binding", row.request_binding, request.digest)
    _same(ErrorCode.LEASE_MISMATCH, "base ABI of the adapter", owners.adapter_base, request.base)
    _same(ErrorCode.LEASE_MISMATCH, "adapter of the request", owners.adapter_semantic, request.semantic)
    check_current(row.generations, owners.generations)
    _slot_agrees(slot, owners.generations)
    _same(ErrorCode.STALE_SLOT_GENERATION, "slot binding", row.slot_binding, slot.digest)
    _same(ErrorCode.LEASE_MISMATCH, "adapter in the slot", slot.semantic, owners.adapter_semantic)
    _same(ErrorCode.OPERATOR_LAYOUT, "kernel ABI of the slot", slot.kernel, row.kernel)
    check_history(owners.cache_history)
    if owners.cache_history != owners.request_history:
        raise InternalFault(
            ErrorCode.LEASE_MISMATCH,
            f"the KV rows were made under {_text(owners.cache_history)}, the request is bound to "
            f"{_text(owners.request_history)}",
        )


def _text(history: History) -> str:
    return ", ".join(f"{interval.execution:.12} from {interval.start}" for interval in history)


def _slot_agrees(slot: SlotBinding, current: GenerationVector) -> None:
    named = (slot.slot_generation, slot.pointer_table_generation)
    if named != (current.slot.value, current.pointer_table.value):
        raise InternalFault(
            ErrorCode.STALE_SLOT_GENERATION,
            f"the slot publishes generations {named}, its owner is at "
            f"{(current.slot.value, current.pointer_table.value)}",
        )


def _same(code: ErrorCode, what: str, got: str | None, expected: str | None) -> None:
    if got != expected:
        raise InternalFault(code, f"the {what} is {got!s:.16}, expected {expected!s:.16}")
