"""Punica's placement over several workers: consolidate, and move the newest request where KV runs short.

A new request goes to the feasible worker with the largest working set, so that busy workers stay busy and
idle ones drain. A worker that is short of KV pages gives up its newest request, which keeps first come, first
served among those that stay; the request is computed again elsewhere, and no KV moves. Who has no feasible
worker waits. Reads snapshots and returns moves; carries nothing out.

Specification: 0x09E; 0x09M (consolidation: KV feasibility).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from loraplex.core.errors import ErrorCode, InternalFault


def _refuse(what: str) -> InternalFault:
    return InternalFault(ErrorCode.PLACEMENT_SNAPSHOT, what)


@dataclass(frozen=True, slots=True)
class Placed:
    """A request on a worker. arrival: order of arrival over all workers. pages: what serving it again from
    its known tokens needs; held: what it holds where it is.
    """

    request_id: str
    arrival: int
    pages: int
    held: int

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str) or not self.request_id:
            raise _refuse(f"request id {self.request_id!r} names nobody")
        for name in ("arrival", "pages", "held"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise _refuse(f"{name} of {self.request_id} is {value!r}, not a count")


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker. working_set: requests on it; most: that it may have. free: its KV pages that nothing is
    promised, below 0 for a worker that has promised more than it has.
    """

    worker: str
    working_set: int
    most: int
    free: int

    def __post_init__(self) -> None:
        if not isinstance(self.worker, str) or not self.worker:
            raise _refuse(f"worker {self.worker!r} names nobody")
        if type(self.working_set) is not int or type(self.most) is not int or type(self.free) is not int:
            raise _refuse(f"a figure of {self.worker} is no whole number")
        if not 0 <= self.working_set <= self.most:
            raise _refuse(f"{self.worker} has {self.working_set} requests of {self.most} at most")


def place(workers: Sequence[Worker], pages: int) -> str | None:
    """The feasible worker with the largest working set, then the largest id; None where none is feasible."""
    _check(workers)
    if type(pages) is not int or pages < 0:
        raise _refuse(f"{pages!r} pages are needed, not a count")
    feasible = [worker for worker in workers if worker.working_set < worker.most and worker.free >= pages]
    return max(feasible, key=lambda worker: (worker.working_set, worker.worker)).worker if feasible else None


@dataclass(frozen=True, slots=True)
class Move:
    """A request that leaves a worker, to be computed again on another one."""

    request_id: str
    source: str
    destination: str


def migrate(workers: Sequence[Worker], placed: Mapping[str, Sequence[Placed]]) -> list[Move]:
    """Moves that relieve the workers that are short of pages: the newest request first, while another worker
    can take it. placed: the requests of each worker. A worker keeps its last request.

    Raises `placement_snapshot` where these are not the workers' working sets.
    """
    _check(workers)
    known = {worker.worker: worker for worker in workers}
    if placed.keys() != known.keys():
        raise _refuse(f"requests are placed on {sorted(placed)}, workers are {sorted(known)}")
    everybody = [one.request_id for requests in placed.values() for one in requests]
    if len(set(everybody)) < len(everybody):
        raise _refuse("a request is placed twice")
    for name, requests in placed.items():
        if len(requests) != known[name].working_set:
            raise _refuse(f"{name} has {known[name].working_set} requests, {len(requests)} are placed on it")
    moves: list[Move] = []
    for name in sorted(known):
        newest_first = sorted(placed[name], key=lambda one: (-one.arrival, one.request_id))
        for one in newest_first[:-1]:
            if known[name].free >= 0:
                break
            others = [worker for other, worker in known.items() if other != name and worker.free >= 0]
            target = place(others, one.pages)
            if target is None:
                break  # nobody older goes before it
            moves.append(Move(one.request_id, name, target))
            known[name] = _with(known[name], -1, one.held)
            known[target] = _with(known[target], 1, -one.pages)
    return moves


def _check(workers: Sequence[Worker]) -> None:
    if len({worker.worker for worker in workers}) < len(workers):
        raise _refuse(f"a worker is there twice: {sorted(worker.worker for worker in workers)}")


def _with(worker: Worker, requests: int, free: int) -> Worker:
    return replace(worker, working_set=worker.working_set + requests, free=worker.free + free)
