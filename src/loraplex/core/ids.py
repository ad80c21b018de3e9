"""Modules, the base's slot, and the kinds of generation that records tell apart.

Generations are not one counter (0x01G "Generations are a vector"): each namespace advances for a reason of
its own. In records each has a type, and comparing two is an error, at type-check time and at run time; plans
and the engine hold plain integers, in a column or attribute for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Self

from loraplex.core.errors import ErrorCode, InternalFault

BASE_SLOT: Final = 0
"""Of the slots of resident adapters: the base, no adapter."""


@dataclass(frozen=True, slots=True)
class GenerationNumber:
    """A counter in one namespace. Subclasses are the namespaces; they never compare with each other."""

    value: int

    def __post_init__(self) -> None:
        if self.value < 0:
            raise InternalFault(
                ErrorCode.GENERATION_NAMESPACE,
                f"{type(self).__name__} must not be negative, got {self.value}",
            )

    def next(self) -> Self:
        """The generation after this one."""
        return type(self)(self.value + 1)

    def _check(self, other: object) -> int:
        if type(other) is not type(self):
            raise InternalFault(
                ErrorCode.GENERATION_NAMESPACE,
                f"{type(self).__name__} cannot be compared with {type(other).__name__}",
            )
        return other.value

    def __eq__(self, other: object) -> bool:
        return self.value == self._check(other)

    def __lt__(self, other: Self) -> bool:
        return self.value < self._check(other)

    def __le__(self, other: Self) -> bool:
        return self.value <= self._check(other)

    def __gt__(self, other: Self) -> bool:
        return self.value > self._check(other)

    def __ge__(self, other: Self) -> bool:
        return self.value >= self._check(other)

    def __hash__(self) -> int:
        return hash((type(self).__name__, self.value))


class CatalogGeneration(GenerationNumber):
    """Advances when an alias or an authorization record is republished."""


class RequestAttempt(GenerationNumber):
    """Advances when a request is retried or replayed as a new attempt."""


class SlotGeneration(GenerationNumber):
    """Advances when a physical adapter slot is republished."""


class PointerTableGeneration(GenerationNumber):
    """Advances when kernel pointer metadata is rebuilt."""


class PlanGeneration(GenerationNumber):
    """Advances with each batch plan."""


class CacheGeneration(GenerationNumber):
    """Advances when committed KV state advances or rolls back."""


class RngGeneration(GenerationNumber):
    """Advances when sampling state advances."""


class Module(IntEnum):
    """The adaptable modules of a decoder layer, then those outside the layers. Values are part of the kernel
    ABI.
    """

    Q = 0
    K = 1
    V = 2
    O = 3  # noqa: E741 - the field's name for the attention output projection
    GATE = 4
    UP = 5
    DOWN = 6
    LM_HEAD = 7
    EMBED = 8


LAYER_MODULES = (Module.Q, Module.K, Module.V, Module.O, Module.GATE, Module.UP, Module.DOWN)
"""Modules that exist once in each layer; LM_HEAD and EMBED exist once, under layer 0."""
