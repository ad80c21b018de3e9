"""The typed failures: the 36 of 0x0DB, in its order, then ours.

Owns their order alone; `docs/failures.md` is made of them. Specification: 0x0DA, 0x0DB.
"""

from __future__ import annotations

from typing import Final

from loraplex.telemetry.failure_record import Failure
from loraplex.telemetry.lifecycle_failures import LIFECYCLE
from loraplex.telemetry.operator_failures import OPERATORS
from loraplex.telemetry.serving_failures import SERVING

SPECIFIED: Final[tuple[Failure, ...]] = tuple(sorted((*OPERATORS, *LIFECYCLE), key=lambda f: f.loop))
FAILURES: Final[tuple[Failure, ...]] = (*SPECIFIED, *SERVING)
