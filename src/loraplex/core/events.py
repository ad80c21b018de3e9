"""The event spine: one record for each state change. Metrics, traces and checkers are computed from these
alone.

Times are monotonic nanoseconds of the engine's clock; `step` is the plan generation in whose commit it
happened. Specification: 0x09K.
"""

from __future__ import annotations

import msgspec


class Event(msgspec.Struct, frozen=True, tag=True, tag_field="event"):
    """Base of all events."""

    at_ns: int


class RequestQueued(Event, frozen=True):
    """A request was accepted and holds a revision lease."""

    request_id: str
    adapter: str | None
    tenant: str
    prompt_tokens: int


class RequestAdmitted(Event, frozen=True):
    """A request got a slot, its first pages and a slot lease. `again` counts earlier admissions."""

    request_id: str
    wait_ns: int
    pages: int
    again: int


class RequestPreempted(Event, frozen=True):
    """A running request gave its pages back and waits again, with its arrival time and revision lease."""

    request_id: str
    pages: int
    computed_tokens: int


class PrefixMatched(Event, frozen=True):
    """An admitted request's keys were looked up. Positions: queried, found, not computed again. `again`:
    earlier admissions.
    """

    request_id: str
    queried: int
    matched: int
    reused: int
    again: int


class PrefixPublished(Event, frozen=True):
    """A commit cached `blocks` new blocks of `nbytes` together."""

    step: int
    blocks: int
    nbytes: int


class PrefixGivenUp(Event, frozen=True):
    """Cached blocks are gone. reason: what took their pages, "kv" or "adapter", or why they may not be found
    again, "dropped".
    """

    blocks: int
    nbytes: int
    reason: str


class FirstToken(Event, frozen=True):
    """The first output token of a request was committed."""

    request_id: str
    since_arrival_ns: int


class RequestFinished(Event, frozen=True):
    """A request ended. reason: a finish reason, or an error code."""

    request_id: str
    adapter: str | None
    tenant: str
    reason: str
    prompt_tokens: int
    output_tokens: int
    since_arrival_ns: int


class IterationCompleted(Event, frozen=True):
    """One step was committed. runs_before/runs: adapter runs before and after within-phase reordering."""

    step: int
    prefill_rows: int
    decode_rows: int
    requests: int
    distinct_adapters: int
    runs_before: int
    runs: int
    rank_rows: int
    sampled: int
    free_pages: int
    plan_ns: int
    execute_ns: int
    waiting: int


class ServiceDebited(Event, frozen=True):
    """A commit completed work. tenants: (tenant, computed prompt tokens, cached ones, output tokens) of those
    who got some; buckets: the same work by rank bucket of the adapter that acted. Rows of a plan that are
    recomputed, failed, or of a request that had ended, are in neither.
    """

    step: int
    tenants: tuple[tuple[str, int, int, int], ...]
    buckets: tuple[tuple[str, int, int, int], ...]


class TenantStarved(Event, frozen=True):
    """A tenant could have run all the while and nothing of it was completed. requests: those that could."""

    tenant: str
    waited_ns: int
    requests: int


class LoadStarved(Event, frozen=True):
    """Requests wait for an adapter and it was not published all the while. requests: those that wait."""

    adapter: str
    waited_ns: int
    requests: int


class PlanDiscarded(Event, frozen=True):
    """Launch validation refused a plan; it was rolled back and will be rebuilt."""

    step: int
    code: str
    message: str


class StepFailed(Event, frozen=True):
    """A launched step failed; frontiers were rolled back and its requests ended with an error."""

    step: int
    code: str
    message: str
    requests: int


class CopyIgnored(Event, frozen=True):
    """A copy was reported that is not under way: twice, late, or never started. Nothing changed."""

    slot: int
    generation: int
    intact: bool


class LoadFailed(Event, frozen=True):
    """A load or fetch failed and was rolled back. attempt: failures in a row. final: nobody waits for another
    one.
    """

    adapter: str
    purpose: str
    code: str
    attempt: int
    final: bool


class RestorationFailed(Event, frozen=True):
    """A victim of a rolled back load could not be brought back: it is absent from the device, its pages are
    free. pages, nbytes: see `AdapterTransition`.
    """

    adapter: str
    code: str
    pages: int
    nbytes: int


class HostFetched(Event, frozen=True):
    """An image arrived verified in host memory."""

    adapter: str
    nbytes: int


class HostDropped(Event, frozen=True):
    """A host image was given up; the disk store keeps it."""

    adapter: str
    nbytes: int


class PrefetchReleased(Event, frozen=True):
    """A speculative load found its end: used by a request, or given up unused (wasted). pages, nbytes: see
    `AdapterTransition`.
    """

    adapter: str
    pages: int
    nbytes: int
    used: bool


class PrefetchWithdrawn(Event, frozen=True):
    """A load ahead was given up before its copy began, and its pages went back. reason: "unwanted" or
    "pages", which running requests had come to want.
    """

    adapter: str
    pages: int
    reason: str


class AdapterRevoked(Event, frozen=True):
    """A revision was found bad after publication; `requests` were ended for it."""

    adapter: str
    requests: int


class AdapterTransition(Event, frozen=True):
    """An adapter moved along the residency table.

    pages: that it has for itself, 0 for one that shares a page with others. nbytes: of its pages, or of its
    block of one.
    """

    adapter: str
    slot: int
    generation: int
    before: str
    after: str
    pages: int
    nbytes: int


AnyEvent = (
    RequestQueued
    | RequestAdmitted
    | RequestPreempted
    | PrefixMatched
    | PrefixPublished
    | PrefixGivenUp
    | FirstToken
    | RequestFinished
    | IterationCompleted
    | ServiceDebited
    | TenantStarved
    | LoadStarved
    | PlanDiscarded
    | StepFailed
    | AdapterTransition
    | CopyIgnored
    | LoadFailed
    | RestorationFailed
    | HostFetched
    | HostDropped
    | PrefetchReleased
    | PrefetchWithdrawn
    | AdapterRevoked
)
"""What can be read back: every event there is, told apart by its name in the field `event`."""
