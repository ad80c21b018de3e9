"""Which parts of an adapter can change a KV row, a hidden state or a logit: the dependency graph of a serial
decoder.

A KV row of layer l at position t depends on the embedding, on K and V of its own layer, and on every operator
of the layers below, at positions up to t. Q, O and the MLP of a layer reach KV rows of later layers only, so
in the last layer they reach none. The output head reaches logits and nothing else. Equal shapes or equal
bytes prove nothing; what the graph does not know is taken for an ancestor of everything.

The graph has a revision, and the revision is part of the first parent of every block key: a graph that
changes shares no row with what was made under another. Specification: 0x08A, 0x08B, 0x08C, 0x08D.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import IntEnum, StrEnum
from typing import Final, NamedTuple

from loraplex.core.ids import LAYER_MODULES, Module
from loraplex.identity.digests import ModuleSpec

GRAPH_REVISION: Final = 1
"""Changes with `DIRECT` or `reach`: keys of different revisions never meet."""


class Part(StrEnum):
    """What of a module an adapter changes: y = g * ((x * h) W^T + s (x A^T) B^T) + c, or a bias that was
    trained.
    """

    FACTORS = "factors"
    INPUT_SCALE = "h"
    OUTPUT_SCALE = "g"
    OFFSET = "c"
    BIAS = "bias"


class Reach(IntEnum):
    """The first object that a change can reach; each reaches all that stand below it too."""

    EVERYTHING = 0
    """KV rows of its own layer."""
    LATER_LAYERS = 1
    """KV rows of the layers after its own, and so hidden states and logits."""
    HIDDEN = 2
    """The final hidden state, and so logits."""
    LOGITS = 3
    """Logits alone."""


class Node(NamedTuple):
    """One operator that an adapter changes. module: a `Module`, or the name of one that the graph does not
    know.
    """

    layer: int
    module: Module | str
    part: Part


DIRECT: Final[dict[Module, Reach]] = {
    Module.EMBED: Reach.EVERYTHING,
    Module.K: Reach.EVERYTHING,
    Module.V: Reach.EVERYTHING,
    Module.Q: Reach.LATER_LAYERS,
    Module.O: Reach.LATER_LAYERS,
    Module.GATE: Reach.LATER_LAYERS,
    Module.UP: Reach.LATER_LAYERS,
    Module.DOWN: Reach.LATER_LAYERS,
    Module.LM_HEAD: Reach.LOGITS,
}
"""What a change of a module reaches first. Every part of a module acts on the module's output, so parts do
not differ.
"""


PART_OF_ROLE: Final = {
    "A": Part.FACTORS,
    "B": Part.FACTORS,
    "lora_bias": Part.OFFSET,
    "magnitude": Part.OUTPUT_SCALE,
    "bias": Part.BIAS,
    "ia3_in": Part.INPUT_SCALE,
    "ia3_out": Part.OUTPUT_SCALE,
}
"""What a tensor of this role changes of its module."""

_LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d{1,6})\.")
_UNPLACED: Final = -1
"""Layer of a layer's module whose name does not say which: no layer, so an ancestor of everything."""


def nodes_of(modules: Iterable[ModuleSpec]) -> Iterator[Node]:
    """The operators that an artifact's modules change. A target or role that the graph does not know keeps
    its name.
    """
    known = {module.name.lower(): module for module in Module}
    for spec in modules:
        module = known.get(spec.target, spec.target)
        placed = _LAYER.search(spec.name)
        layer = int(placed[1]) if placed else (_UNPLACED if module in LAYER_MODULES else 0)
        for tensor in spec.tensors:
            part = PART_OF_ROLE.get(tensor.role)
            yield Node(
                layer, module if part is not None else f"{spec.target}.{tensor.role}", part or Part.FACTORS
            )


def reach(node: Node, layers: int) -> Reach:
    """The first object that `node` can change in a decoder of `layers` layers. An unknown module or part:
    everything.
    """
    if not isinstance(node.module, Module):
        return Reach.EVERYTHING
    if node.module in LAYER_MODULES and not 0 <= node.layer < layers:
        return Reach.EVERYTHING
    direct = DIRECT[node.module]
    if direct is Reach.LATER_LAYERS and node.layer == layers - 1:
        return Reach.HIDDEN
    return direct


def first_reach(nodes: Iterable[Node], layers: int) -> Reach | None:
    """The first object that any of `nodes` can change; None where there are none."""
    return min((reach(node, layers) for node in nodes), default=None)


def changes_kv(nodes: Iterable[Node], layers: int) -> bool:
    """Whether a change of `nodes` can change any KV row."""
    return _reaches(nodes, layers, Reach.LATER_LAYERS)


def changes_hidden(nodes: Iterable[Node], layers: int) -> bool:
    """Whether a change of `nodes` can change a final hidden state."""
    return _reaches(nodes, layers, Reach.HIDDEN)


def changes_logits(nodes: Iterable[Node], layers: int) -> bool:
    """Whether a change of `nodes` can change a logit."""
    return _reaches(nodes, layers, Reach.LOGITS)


def _reaches(nodes: Iterable[Node], layers: int, last: Reach) -> bool:
    first = first_reach(nodes, layers)
    return first is not None and first <= last
