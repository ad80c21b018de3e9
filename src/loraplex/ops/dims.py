"""Dimensions of the modules that adapters can change. Apart from the operators, so that it is known without
torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.core.ids import Module


@dataclass(frozen=True, slots=True)
class ModuleDims:
    """Dimensions of the modules that adapters can change, of this shard.

    layers: decoder layers. dims: module -> (d_in, d_out), the same in all layers. The head is (hidden,
    vocabulary), the embedding (vocabulary, hidden); both live under layer 0.
    """

    layers: int
    dims: dict[Module, tuple[int, int]]
