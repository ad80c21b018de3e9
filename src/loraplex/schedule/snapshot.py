"""What the scheduler knows of a request and of a worker at one moment, frozen: predicates read nothing else.

A request brings its adapter's execution record and the generation that it leased; a worker its capabilities,
what its adapter slots hold, and the room that nobody can be made to give up. A record that contradicts itself
is refused where it is made. Nothing here is a clock: times come in.

Specification: 0x09A; 0x09B (what each predicate compares).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Final

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.memory.residency import Residency

SERVING: Final = (Residency.RESIDENT, Residency.RETIRING)
PAGES: Final = "pages"
BLOCK: Final = "block"
"""Layouts of an adapter on the device: pages of its own, or a block of a page."""


def _require(holds: bool, code: ErrorCode, record: object, name: str, expectation: str) -> None:
    if not holds:
        raise InternalFault(
            code,
            f"{name} of a {type(record).__name__} is {getattr(record, name)!r}; it is {expectation}",
            param=name,
        )


def _count(value: object) -> bool:
    return type(value) is int and value >= 0


def _require_counts(record: object, *names: str) -> None:
    for name in names:
        _require(_count(getattr(record, name)), ErrorCode.SNAPSHOT_COUNT, record, name, "a count")


def _require_names(record: object, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        _require(
            isinstance(value, str) and bool(value),
            ErrorCode.SNAPSHOT_IDENTITY,
            record,
            name,
            "a digest or id",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSnapshot:
    """0x09A's record of an adapter, apart from where it is. ranks: one for each of `targets`. generation: of
    the revision that the request asks for, from 1 on. basis: shared with others, None for none.
    """

    digest: str
    generation: int
    targets: tuple[int, ...]
    ranks: tuple[int, ...]
    layout: str
    basis: str | None = None

    def __post_init__(self) -> None:
        _require_names(self, "digest")
        _require(
            _count(self.generation) and self.generation > 0,
            ErrorCode.SNAPSHOT_GENERATION,
            self,
            "generation",
            "1 or more",
        )
        _require(
            isinstance(self.targets, tuple) and all(map(_count, self.targets)),
            ErrorCode.SNAPSHOT_COUNT,
            self,
            "targets",
            "a tuple of modules",
        )
        _require(
            len(set(self.targets)) == len(self.targets),
            ErrorCode.SNAPSHOT_SHAPE,
            self,
            "targets",
            "each module once",
        )
        _require(
            isinstance(self.ranks, tuple) and all(map(_count, self.ranks)),
            ErrorCode.SNAPSHOT_COUNT,
            self,
            "ranks",
            "a tuple of ranks",
        )
        _require(
            len(self.ranks) == len(self.targets),
            ErrorCode.SNAPSHOT_SHAPE,
            self,
            "ranks",
            "one for each target",
        )
        _require_names(self, "layout")
        if self.basis is not None:
            _require_names(self, "basis")


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What serving a request takes at least. least_pages: of its adapter beside the pinned ones;
    adapter_pages: of its adapter alone. slot: whether its adapter needs a slot that it has not.
    """

    kv_pages: int
    adapter_pages: int = 0
    least_pages: int = 0
    image_bytes: int = 0
    slot: bool = False

    def __post_init__(self) -> None:
        _require_counts(self, "kv_pages", "adapter_pages", "least_pages", "image_bytes")
        _require(type(self.slot) is bool, ErrorCode.SNAPSHOT_SHAPE, self, "slot", "true or false")
        _require(
            self.least_pages <= self.adapter_pages,
            ErrorCode.SNAPSHOT_SHAPE,
            self,
            "least_pages",
            f"at most the adapter's {self.adapter_pages} pages",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a worker could give were nobody running: its limits, and what pins of other adapters hold
    of them.
    """

    pages: int
    adapter_pages: int
    adapter_slots: int
    host_bytes: int
    pinned_pages: int = 0
    pinned_adapters: int = 0
    pinned_bytes: int = 0

    def __post_init__(self) -> None:
        _require_counts(self, *(item.name for item in fields(self)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSnapshot:
    """Where one adapter is on a worker. published: the generation that rows may bind, 0 for none. copied:
    its copy is complete. hosted: its image lies verified in host memory. leases: requests that hold one.
    """

    state: Residency
    published: int = 0
    copied: bool = False
    hosted: bool = False
    leases: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        _require(
            isinstance(self.state, Residency), ErrorCode.SNAPSHOT_RESIDENCY, self, "state", "a residency"
        )
        _require(_count(self.published), ErrorCode.SNAPSHOT_COUNT, self, "published", "a generation or 0")
        for name in ("copied", "hosted"):
            _require(type(getattr(self, name)) is bool, ErrorCode.SNAPSHOT_SHAPE, self, name, "true or false")
        _require(
            isinstance(self.leases, frozenset) and all(isinstance(r, str) and r for r in self.leases),
            ErrorCode.SNAPSHOT_IDENTITY,
            self,
            "leases",
            "a set of request ids",
        )
        _require(
            (self.published > 0) == (self.state in SERVING),
            ErrorCode.SNAPSHOT_RESIDENCY,
            self,
            "published",
            f"a generation where something is published, 0 elsewhere; the adapter is {self.state}",
        )
        _require(
            not self.copied or self.state in SERVING,
            ErrorCode.SNAPSHOT_RESIDENCY,
            self,
            "copied",
            f"false for an adapter that is {self.state}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a worker can execute: its base, modules, the largest rank, layouts."""

    base: str
    targets: frozenset[int]
    rank_limit: int
    layouts: frozenset[str] = frozenset({PAGES, BLOCK})

    def __post_init__(self) -> None:
        _require_names(self, "base")
        _require(
            isinstance(self.targets, frozenset) and all(map(_count, self.targets)),
            ErrorCode.SNAPSHOT_COUNT,
            self,
            "targets",
            "a set of modules",
        )
        _require_counts(self, "rank_limit")
        _require(
            isinstance(self.layouts, frozenset) and all(isinstance(name, str) for name in self.layouts),
            ErrorCode.SNAPSHOT_IDENTITY,
            self,
            "layouts",
            "a set of names",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSnapshot:
    """A request. lease: the generation that it bound when it was accepted, 0 for none; see 0x07H."""

    request_id: str
    base: str
    need: Need
    adapter: AdapterSnapshot | None = None
    lease: int = 0

    def __post_init__(self) -> None:
        _require_names(self, "request_id", "base")
        _require(isinstance(self.need, Need), ErrorCode.SNAPSHOT_SHAPE, self, "need", "a Need")
        _require(
            self.adapter is None or isinstance(self.adapter, AdapterSnapshot),
            ErrorCode.SNAPSHOT_SHAPE,
            self,
            "adapter",
            "an AdapterSnapshot or None",
        )
        _require(_count(self.lease), ErrorCode.SNAPSHOT_COUNT, self, "lease", "a generation or 0")
        _require(
            self.adapter is not None or not self.lease,
            ErrorCode.SNAPSHOT_GENERATION,
            self,
            "lease",
            "0 without an adapter",
        )
        _require(
            self.adapter is not None or not self.need.adapter_pages,
            ErrorCode.SNAPSHOT_SHAPE,
            self,
            "need",
            "without adapter pages for the base",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """A worker. slots: by artifact digest; what is not named is cold."""

    capabilities: Capabilities
    room: Room
    slots: Mapping[str, SlotSnapshot] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, kind in (("capabilities", Capabilities), ("room", Room)):
            _require(
                isinstance(getattr(self, name), kind),
                ErrorCode.SNAPSHOT_SHAPE,
                self,
                name,
                f"a {kind.__name__}",
            )
        _require(
            isinstance(self.slots, Mapping)
            and all(isinstance(key, str) and key for key in self.slots)
            and all(isinstance(slot, SlotSnapshot) for slot in self.slots.values()),
            ErrorCode.SNAPSHOT_IDENTITY,
            self,
            "slots",
            "adapter slots by digest",
        )
