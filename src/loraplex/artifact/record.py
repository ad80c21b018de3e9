"""What a load gives: an adapter as methods, module specifications and tensors, completely applied.

Nothing here is in kernel layout and no scale is folded. Specification: 0x01F (rank, scaling, dtype by
module), 0x01G (module specification).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from loraplex.artifact.companions import NO_COMPANIONS, Companions
from loraplex.artifact.notes import Note
from loraplex.artifact.peft_config import PeftConfig
from loraplex.artifact.tensors import Tensor
from loraplex.core.ids import Module
from loraplex.identity.scale import ScaleRule, scale_bits, scale_of


class Method(StrEnum):
    """Parts of a method that an operator has to know how to execute."""

    LORA = "lora"
    RSLORA = "rslora"
    DORA = "dora"
    LORA_BIAS = "lora_bias"
    BITFIT = "bitfit"
    IA3 = "ia3"
    ALORA = "alora"
    EMBEDDING = "embedding"


class TensorRole(StrEnum):
    """What a tensor is for its module."""

    A = "A"
    B = "B"
    LORA_BIAS = "lora_bias"
    MAGNITUDE = "magnitude"
    BIAS = "bias"
    IA3_IN = "ia3_in"
    IA3_OUT = "ia3_out"


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """One module that the adapter changes.

    name: canonical name in the base. has_bias: the base module has a bias. rank: 0 where there are no
    factors. alpha: decimal text. A is [rank, d_in], B is [d_out, rank], as in the file; vectors have one
    dimension of d_in (IA3 of a feed-forward) or d_out.
    """

    layer: int
    module: Module
    name: str
    d_in: int
    d_out: int
    has_bias: bool
    rank: int
    alpha: str
    rule: ScaleRule
    tensors: Mapping[TensorRole, Tensor]

    @property
    def scale(self) -> float:
        """Effective scale in float64; 0 where there are no factors."""
        return scale_of(self.alpha, self.rank, self.rule) if self.rank else 0.0

    @property
    def scale_bits(self) -> int:
        """Bit pattern of the float32 scale, as a signed integer."""
        return scale_bits(self.alpha, self.rank, self.rule) if self.rank else 0


@dataclass(frozen=True, slots=True)
class Artifact:
    """A verified adapter.

    config: the effective configuration. modules: by canonical name. tensors_total: tensors in the files, all
    of which were applied. carried: tensors that repeat the base's own weights and were proven equal to them.
    invocation_tokens: aLoRA's, or None for an adapter that is always on. notes: what it is served in spite
    of. companions: what its files say about text. Neither of the two is part of any digest.
    """

    config: PeftConfig
    methods: frozenset[Method]
    modules: tuple[AdaptedModule, ...]
    tensors_applied: int
    tensors_total: int
    carried: tuple[str, ...]
    invocation_tokens: tuple[int, ...] | None
    notes: tuple[Note, ...] = ()
    companions: Companions = NO_COMPANIONS

    @property
    def method(self) -> str:
        """The method's name: its parts, sorted, joined by '+'."""
        return "+".join(sorted(self.methods))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The distinct ranks, ascending."""
        return tuple(sorted({m.rank for m in self.modules if m.rank}))

    @property
    def nbytes(self) -> int:
        """Bytes of all applied tensors, as they were read."""
        return sum(t.data.nbytes for m in self.modules for t in m.tensors.values())

    @property
    def report(self) -> str:
        """The sentence of each load."""
        carried = f", {len(self.carried)} of them equal to the base" if self.carried else ""
        applied = f"{self.tensors_applied} of {self.tensors_total} tensors applied"
        return f"{applied}{carried}, {len(self.modules)} modules"
