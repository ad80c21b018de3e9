"""What is said of adapters to whom: the engine's figures beside the catalog's, and of them what a tenant may
know.

An adapter may be shared, by its bytes, with tenants that know nothing of each other. What others do with it,
their pins and their requests, shows to the operator alone. Specification: rulings "Tenants", interface
"HTTP".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from loraplex.memory.residency import AdapterState

Entry = Mapping[str, Any]
_OF_EVERYBODY: Final = ("slot", "generation", "slot_leases", "pins", "failures")
"""Figures of an adapter that tell of all its users together."""


def live_entries(figures: Mapping[str, Any]) -> dict[str, Entry]:
    """The engine's entries by semantic digest, without those on their way out. figures: its answer to
    `Inspect`.
    """
    return {entry["key"]: entry for entry in figures["adapters"] if not entry["removing"]}


def for_tenant(entry: Entry, leases: int, pinned: bool) -> dict[str, Any]:
    """An engine's entry as one of its users may see it. leases, pinned: that user's own."""
    known = {name: value for name, value in entry.items() if name not in _OF_EVERYBODY}
    if known.get("state") == AdapterState.ACTIVE and not leases:
        known["state"] = AdapterState.IDLE.value
    return known | {"leases": leases, "pinned": pinned}
