"""What a record of a failure holds: the nine fields of 0x0DA, and its outcome.

Owns the words that records use. Names error codes, metrics and checks; detects and repairs nothing itself.
Specification: 0x0C (outcomes), 0x0DA, 0x0DB (categories).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from loraplex.core.errors import ErrorCode


class Category(StrEnum):
    """Families of 0x0DB, each with its own alarm surface and repair boundary."""

    IDENTITY = "identity and state"
    TENSOR = "tensor and kernel"
    RESIDENCY = "residency and publication"
    CACHE = "cache and life cycle"
    SCHEDULER = "scheduler and observability"
    EVIDENCE = "evidence and release"


class Outcome(StrEnum):
    """What follows once the detector has spoken. Nothing falls back to the base unless the caller asked."""

    REJECT = "reject"
    QUEUE = "queue"
    RECOMPUTE = "recompute"
    PREEMPT = "preempt"
    EVICT = "evict"
    FAIL_CLOSED = "fail closed"


class Gate(StrEnum):
    """What blocks a release while the record is open."""

    TEST = "make test"
    TEST_LONG = "make test-long"
    EVIDENCE = "make evidence"


class Capability(StrEnum):
    """What brings code that is not here yet."""

    TENSOR_PARALLELISM = "tensor parallelism"
    COLLECTIONS = "compressed collections"
    MERGE = "merge and export"
    METRIC_REGISTRY = "metric registry"
    CLAIMS = "evidence of claims"


CATEGORIES = {
    2: Category.IDENTITY,
    3: Category.TENSOR,
    4: Category.TENSOR,
    5: Category.RESIDENCY,
    6: Category.TENSOR,
    7: Category.RESIDENCY,
    8: Category.CACHE,
    9: Category.SCHEDULER,
    10: Category.EVIDENCE,
}


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure. loop: the mechanism, as 0x0DB numbers them.

    detectors: error codes, metrics by scraped name, and checks as `path::name`. owner: the module that
    restores the invariant. tests: each injects the failure and sees a detector speak. needs: what brings the
    code that could fail so; such a record may lack tests.
    """

    id: str
    loop: int
    invariant: str
    detectors: tuple[ErrorCode | str, ...]
    consequence: str
    outcome: Outcome
    owner: str
    tests: tuple[str, ...] = ()
    gate: Gate = Gate.TEST
    needs: Capability | None = None

    @property
    def category(self) -> Category:
        return CATEGORIES[self.loop]


PLAN_CASE = "tests/core/test_plan_malformed.py::test_one_changed_field_is_refused_with_its_code"
"""Refuses a plan with one wrong field."""
BROKEN_PLAN = "tests/engine/test_broken_plans.py::test_a_broken_plan_is_refused_before_it_runs"
"""Breaks one plan of the running engine; its launch must refuse it."""
MUTANT = "tests/sim/test_mutants.py::test_a_checker_sees_it"
"""Breaks the running engine in one place, its own checks off; a checker outside must see it."""
BOOKS = "tests/memory/test_malformed.py::test_the_running_engine_notices"
"""Breaks the running engine's books in one place; the engine's own detector must speak."""
