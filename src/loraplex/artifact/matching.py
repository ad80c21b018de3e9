"""Which modules of a base a configuration selects, and with which rank and alpha: PEFT's own rules.

A list entry matches a module of exactly that name or one whose name ends in "." + entry; a string is a regular
expression over the whole name; exclusion wins. Layer limits apply to list entries that match by their end. Patterns
for rank and alpha match a whole name or the part of it after any dot, first entry first.
Read from PEFT 0.21's documented behaviour; the words are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from loraplex.artifact.base import BaseModule
from loraplex.artifact.patterns import Pattern, compile_pattern
from loraplex.artifact.peft_config import Names, PeftConfig
from loraplex.core.ids import LAYER_MODULES


@dataclass(frozen=True, slots=True)
class Selector:
    """The matching half of a configuration, with its patterns compiled once."""

    config: PeftConfig
    _rank: list[tuple[Pattern, int]] = field(init=False, default_factory=list)
    _alpha: list[tuple[Pattern, str]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._rank.extend((_compiled(key), value) for key, value in self.config.rank_pattern)
        self._alpha.extend((_compiled(key), value) for key, value in self.config.alpha_pattern)

    def selects(self, module: BaseModule) -> bool:
        """Whether the configuration adapts this module."""
        config = self.config
        if _listed(config.exclude, module.name):
            return False
        if config.targets is None:
            return module.module in LAYER_MODULES
        if config.targets.pattern is not None:
            return _compiled(config.targets.pattern).fullmatch(module.name)
        if module.name in config.targets.names:
            return True
        if not _listed(config.targets, module.name):
            return False
        return config.layers is None or layer_index(module.name, config.layers_pattern) in config.layers

    def rank(self, module: BaseModule) -> int:
        """The rank that the configuration gives this module."""
        return next((rank for key, rank in self._rank if _ends_in(key, module.name)), self.config.rank)

    def alpha(self, module: BaseModule) -> str:
        """The alpha that the configuration gives this module."""
        return next((alpha for key, alpha in self._alpha if _ends_in(key, module.name)), self.config.alpha)

    def feedforward(self, module: BaseModule) -> bool:
        """Whether an IA3 vector scales this module's input; entries match by plain end of name."""
        names = self.config.feedforward
        if names.pattern is not None:
            return _compiled(names.pattern).fullmatch(module.name)
        return any(module.name.endswith(name) for name in names.names)


def layer_index(name: str, patterns: Sequence[str]) -> int | None:
    """The layer index in a module name: after one of `patterns`, or the first numbered part from the third on."""
    parts = name.split(".")
    if not patterns:
        return next((int(p) for p in parts[2:-1] if p.isdecimal()), None)
    for pattern in patterns:
        want = pattern.split(".")
        for at in range(len(parts) - len(want) - 1):
            after = parts[at + len(want)]
            if parts[at : at + len(want)] == want and after.isdecimal():
                return int(after)
    return None


def _listed(names: Names, name: str) -> bool:
    if names.pattern is not None:
        return _compiled(names.pattern).fullmatch(name)
    return bool(names.names) and any(name[start:] in names.names for start in _starts(name))


def _ends_in(pattern: Pattern, name: str) -> bool:
    """Whether the pattern matches all of `name`, or all of what follows one of its dots."""
    return any(len(name) in pattern.ends(name, start) for start in _starts(name))


def _starts(name: str) -> list[int]:
    """Where the whole name and each part after a dot begin."""
    return [0, *(at + 1 for at, char in enumerate(name) if char == ".")]


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> Pattern:
    return compile_pattern(pattern)
