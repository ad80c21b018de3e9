"""Which modules of a base a configuration selects, and with which rank and alpha: PEFT's own rules.

A list entry matches a module of exactly that name or one whose name ends in "." + entry; a string is a
regular expression over the whole name; exclusion wins. Layer limits apply to list entries that match by their
end. Patterns for rank and alpha match a whole name or the part of it after any dot, first entry first. Read
from PEFT 0.21's documented behaviour; the words are ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from loraplex.artifact.base_modules import BaseModule
from loraplex.artifact.patterns import Pattern, StepBudget, compile_pattern, is_plain
from loraplex.artifact.peft_config import ModuleNames, PeftConfig
from loraplex.core.ids import LAYER_MODULES

Value = TypeVar("Value")


class Selector:
    """The matching half of a configuration: its patterns compiled once, and one budget for running them.

    Every method raises `adapter_config_invalid` when the budget is used up.
    """

    def __init__(self, config: PeftConfig) -> None:
        self.config = config
        self._work = StepBudget()
        self._targets = _Listed(config.targets or ModuleNames(), self._work)
        self._exclude = _Listed(config.exclude, self._work)
        self._feedforward = _Listed(config.feedforward, self._work)
        self._layers = None if config.layers is None else frozenset(config.layers)
        self._rank = _Ordered(config.rank_pattern, self._work)
        self._alpha = _Ordered(config.alpha_pattern, self._work)

    def selects(self, module: BaseModule) -> bool:
        """Whether the configuration adapts this module."""
        config = self.config
        if self._exclude.has(module.name):
            return False
        if config.targets is None:
            return module.module in LAYER_MODULES
        if not self._targets.has(module.name):
            return False
        if self._layers is None or module.name in config.targets.names:
            return True
        return layer_index(module.name, config.layers_pattern) in self._layers

    def rank(self, module: BaseModule) -> int:
        """The rank that the configuration gives this module."""
        return self._rank.first(module.name, self.config.rank)

    def alpha(self, module: BaseModule) -> str:
        """The alpha that the configuration gives this module."""
        return self._alpha.first(module.name, self.config.alpha)

    def feedforward(self, module: BaseModule) -> bool:
        """Whether an IA3 vector scales this module's input; entries match by plain end of name."""
        if self.config.feedforward.pattern is not None:
            return self._feedforward.has(module.name)
        names, name = self.config.feedforward.names, module.name
        return any(name[at:] in names for at in range(len(name)))


class _Ordered(Generic[Value]):
    """Patterns with values, of which the first that matches counts.

    Plain ones are found by their text: a dot of theirs stands for any character, so a name is asked for with
    dots where they have some. Only the others are run one by one.
    """

    def __init__(self, entries: Sequence[tuple[str, Value]], work: StepBudget) -> None:
        self._values = [value for _, value in entries]
        self._work = work
        self._patterns: list[tuple[int, Pattern]] = []
        self._plain: dict[int, dict[tuple[int, ...], dict[str, int]]] = {}
        for index, (text, _) in enumerate(entries):
            if is_plain(text):
                dots = tuple(at for at, char in enumerate(text) if char == ".")
                self._plain.setdefault(len(text), {}).setdefault(dots, {}).setdefault(text, index)
            else:
                self._patterns.append((index, compile_pattern(text)))

    def first(self, name: str, default: Value) -> Value:
        """Value of the first pattern that matches all of `name`, or all of what follows one of its dots."""
        starts = _starts(name)
        best = min((index for at in starts for index in self._named(name[at:])), default=len(self._values))
        for index, pattern in self._patterns:
            if index > best:
                break
            if pattern.reaches_end(name, starts, self._work):
                return self._values[index]
        return self._values[best] if best < len(self._values) else default

    def _named(self, text: str) -> Iterator[int]:
        """Places of the plain patterns that match all of `text`."""
        for dots, places in self._plain.get(len(text), {}).items():
            self._work.spend(len(dots) + 1)
            asked = list(text)
            for at in dots:
                asked[at] = "."
            found = places.get("".join(asked))
            if found is not None:
                yield found


class _Listed:
    """Names or a pattern, ready to ask."""

    def __init__(self, names: ModuleNames, work: StepBudget) -> None:
        self._names = names.names
        self._pattern = None if names.pattern is None else compile_pattern(names.pattern)
        self._work = work

    def has(self, name: str) -> bool:
        """Whether a pattern matches all of `name`, or an entry is it or follows one of its dots."""
        if self._pattern is not None:
            return self._pattern.fullmatch(name, self._work)
        return bool(self._names) and any(name[start:] in self._names for start in _starts(name))


def layer_index(name: str, patterns: Sequence[str]) -> int | None:
    """The layer index in a module name: after one of `patterns`, or the first numbered part from the third
    on.
    """
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


def _starts(name: str) -> list[int]:
    """Where the whole name and each part after a dot begin."""
    return [0, *(at + 1 for at, char in enumerate(name) if char == ".")]
