"""What an adapter has to know about a base model: its adaptable modules, their names and dimensions.

Built by the model package from its own specification; holds plain numbers and names, never weights.
`BaseTensors` is how the few methods that need base weights (DoRA, bias training) get them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from loraplex.artifact.tensors import F32Array
from loraplex.core.ids import LAYER_MODULES, Module

LLAMA_NAMES: Mapping[Module, str] = {
    Module.Q: "model.layers.{layer}.self_attn.q_proj",
    Module.K: "model.layers.{layer}.self_attn.k_proj",
    Module.V: "model.layers.{layer}.self_attn.v_proj",
    Module.O: "model.layers.{layer}.self_attn.o_proj",
    Module.GATE: "model.layers.{layer}.mlp.gate_proj",
    Module.UP: "model.layers.{layer}.mlp.up_proj",
    Module.DOWN: "model.layers.{layer}.mlp.down_proj",
    Module.LM_HEAD: "lm_head",
    Module.EMBED: "model.embed_tokens",
}
"""Hugging Face names of the Llama, Mistral, Qwen2, Qwen3 and SmolLM families."""


class BaseTensors(Protocol):
    """Base weights by module, as float32 values."""

    def weight(self, layer: int, module: Module) -> F32Array:
        """[d_out, d_in] of a linear module; [vocabulary, hidden] of the embedding."""
        ...

    def bias(self, layer: int, module: Module) -> F32Array | None:
        """[d_out], or None where the module has none."""
        ...


@dataclass(frozen=True, slots=True)
class BaseModule:
    """One adaptable module. name: its Hugging Face name; layer is 0 outside the layers."""

    layer: int
    module: Module
    name: str
    d_in: int
    d_out: int
    has_bias: bool


@dataclass(frozen=True, slots=True)
class BaseModules:
    """All adaptable modules of a base.

    layers: decoder layers. dims: (d_in, d_out) of each module that the base has; EMBED is (vocabulary,
    hidden). biases: modules with a bias. names: name of each module, `{layer}` stands for the layer index.
    family: its `model_type`, None where nobody knows. tied: the output layer shares the embedding's weights,
    or may.
    """

    layers: int
    dims: Mapping[Module, tuple[int, int]]
    biases: frozenset[Module] = frozenset()
    names: Mapping[Module, str] = field(default_factory=lambda: LLAMA_NAMES)
    family: str | None = None
    tied: bool = True

    @staticmethod
    def llama(
        *,
        layers: int,
        hidden: int,
        intermediate: int,
        q_dim: int,
        kv_dim: int,
        vocab: int,
        biases: frozenset[Module] = frozenset(),
    ) -> BaseModules:
        """The modules of a Llama-like decoder. q_dim, kv_dim: heads times head dimension."""
        dims = {
            Module.Q: (hidden, q_dim),
            Module.K: (hidden, kv_dim),
            Module.V: (hidden, kv_dim),
            Module.O: (q_dim, hidden),
            Module.GATE: (hidden, intermediate),
            Module.UP: (hidden, intermediate),
            Module.DOWN: (intermediate, hidden),
            Module.LM_HEAD: (hidden, vocab),
            Module.EMBED: (vocab, hidden),
        }
        return BaseModules(layers=layers, dims=dims, biases=biases, family="llama")

    @property
    def vocab(self) -> int:
        """Rows of the embedding."""
        return self.dims[Module.EMBED][0]

    def modules(self) -> Iterator[BaseModule]:
        """Every adaptable module, by layer, then by module."""
        for layer in range(self.layers):
            for module in LAYER_MODULES:
                if module in self.dims:
                    yield self.at(layer, module)
        for module in (Module.LM_HEAD, Module.EMBED):
            if module in self.dims:
                yield self.at(0, module)

    def at(self, layer: int, module: Module) -> BaseModule:
        """One module."""
        d_in, d_out = self.dims[module]
        return BaseModule(
            layer, module, self.names[module].format(layer=layer), d_in, d_out, module in self.biases
        )
