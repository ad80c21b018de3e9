"""What two functions over one base have in common: KV rows, final hidden states, logits, and what is sampled.

Four questions with four answers: an adapter of the output head leaves KV rows and hidden states alone and
changes every logit, so equal KV rows prove nothing about logits. A function is what acts at a position, as
far as each of the objects can tell; what the graph proves to be out of reach counts as the base. Its KV part
is the execution that block keys are made of. Never looks at bytes, positions or requests.

Specification: 0x08B, 0x08D; rulings "KV compatibility".
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

import msgspec

from loraplex.identity.closure import changes_hidden, changes_kv, changes_logits, nodes_of
from loraplex.identity.digests import ModuleSpec
from loraplex.identity.execution import adapter_execution, base_execution


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What acts at a position, by object that it can change. Digests of executions."""

    kv: str
    hidden: str
    logits: str


def base_function(base: str) -> Function:
    """The base alone. base: H_base."""
    plain = base_execution(base)
    return Function(plain, plain, plain)


def adapter_function(base: str, semantic: str, modules: Iterable[ModuleSpec], layers: int) -> Function:
    """The base with the adapter `semantic`, where it acts.

    modules: what the adapter changes. layers: decoder layers of the base.
    """
    nodes = tuple(nodes_of(modules))
    plain, own = base_execution(base), adapter_execution(semantic)
    return Function(
        own if changes_kv(nodes, layers) else plain,
        own if changes_hidden(nodes, layers) else plain,
        own if changes_logits(nodes, layers) else plain,
    )


def kv_compatible(one: Function, other: Function) -> bool:
    """Whether both make equal KV rows of equal tokens after equal rows."""
    return one.kv == other.kv


def hidden_compatible(one: Function, other: Function) -> bool:
    """Whether both make equal final hidden states, which takes equal KV rows too."""
    return kv_compatible(one, other) and one.hidden == other.hidden


def logits_compatible(one: Function, other: Function) -> bool:
    """Whether both make equal logits, which takes equal hidden states too."""
    return hidden_compatible(one, other) and one.logits == other.logits


def sampling_compatible(one: Function, other: Function) -> bool:
    """Whether both draw the same continuation with equal parameters and seeds, which takes equal logits at
    every position that is sampled.
    """
    return logits_compatible(one, other)


class Shared(StrEnum):
    """Where an adapter and the base have an object in common."""

    ALWAYS = "always"
    BEFORE_INVOCATION = "before_invocation"
    NEVER = "never"


class Shares(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an adapter and the base have in common, object by object. sampling: a continuation of one prompt,
    drawn with the same parameters and seed.
    """

    kv: Shared
    hidden: Shared
    logits: Shared
    sampling: Shared


NOTHING_SHARED: Final = Shares(Shared.NEVER, Shared.NEVER, Shared.NEVER, Shared.NEVER)
"""The conservative answer: always right, as far as what is refused can be."""


def shares_with_base(function: Function, base: str, *, activated: bool) -> Shares:
    """What the adapter of `function` shares. activated: whether it acts from its invocation on alone; a
    continuation lies behind that.
    """
    plain = base_function(base)
    apart = Shared.BEFORE_INVOCATION if activated else Shared.NEVER
    return Shares(
        Shared.ALWAYS if kv_compatible(function, plain) else apart,
        Shared.ALWAYS if hidden_compatible(function, plain) else apart,
        Shared.ALWAYS if logits_compatible(function, plain) else apart,
        Shared.ALWAYS if sampling_compatible(function, plain) else Shared.NEVER,
    )
