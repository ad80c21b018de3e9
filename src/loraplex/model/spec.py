"""What a decoder is: a frozen `DecoderSpec` derived from a Hugging Face config.json.

Owns the reading of configurations and the table of module dimensions and checkpoint names. Never touches a
tensor. Whatever the decoder does not implement is refused by name with `model_unsupported`; nothing is
guessed or ignored that would change a logit.

Families: Llama (SmolLM too), Mistral, Qwen2, Qwen3. Specification: rulings "Models".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.ids import LAYER_MODULES, Module
from loraplex.core.layout import KvShape
from loraplex.ops.dims import ModuleDims


class Family(StrEnum):
    """Decoder families by their `model_type`."""

    LLAMA = "llama"
    MISTRAL = "mistral"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"


class RopeKind(StrEnum):
    """Rotary position embeddings by their `rope_type`."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base, kind and that kind's parameters (unused ones keep their neutral value).

    original_positions: context length of pretraining (llama3, yarn). attention_factor: scale of cos and sin,
    None derives it (yarn). mscale, mscale_all_dim: yarn's alternative to derive it, 0 when absent.
    """

    theta: float
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_positions: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Shape and options of one decoder.

    qkv_bias, o_bias, mlp_bias: which projections carry a bias. qk_norm: RMS norm over each head of q and k.
    windows [layers]: positions a row sees, itself included; None is all. max_positions: context of the
    configuration. dtype: as the checkpoint names it ("float32", "bfloat16", "float16"), or None.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    rope: RopeSpec
    max_positions: int
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    dtype: str | None = None

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.kv_heads * self.head_dim

    def kv_shape(self, itemsize: int, page_tokens: int) -> KvShape:
        """Shape of a KV page with elements of `itemsize` bytes."""
        return KvShape(self.layers, self.kv_heads, self.head_dim, itemsize, page_tokens)

    def module_dims(self) -> ModuleDims:
        """(d_in, d_out) of every adaptable module."""
        hidden, inner = self.hidden_size, self.intermediate_size
        dims = {
            Module.Q: (hidden, self.q_size),
            Module.K: (hidden, self.kv_size),
            Module.V: (hidden, self.kv_size),
            Module.O: (self.q_size, hidden),
            Module.GATE: (hidden, inner),
            Module.UP: (hidden, inner),
            Module.DOWN: (inner, hidden),
            Module.LM_HEAD: (hidden, self.vocab_size),
            Module.EMBED: (self.vocab_size, hidden),
        }
        return ModuleDims(self.layers, dims)


_LAYER_NAMES: Final[dict[Module, str]] = {
    Module.Q: "self_attn.q_proj",
    Module.K: "self_attn.k_proj",
    Module.V: "self_attn.v_proj",
    Module.O: "self_attn.o_proj",
    Module.GATE: "mlp.gate_proj",
    Module.UP: "mlp.up_proj",
    Module.DOWN: "mlp.down_proj",
}


def module_name(layer: int, module: Module) -> str:
    """Name of a module in checkpoints and adapters, without `.weight`; `layer` counts only inside
    the layers.
    """
    if module in LAYER_MODULES:
        return f"model.layers.{layer}.{_LAYER_NAMES[module]}"
    return "lm_head" if module is Module.LM_HEAD else "model.embed_tokens"


# Options that change logits and that no supported family uses: (key, values under which it changes nothing).
_INERT: Final[dict[str, tuple[object, ...]]] = {
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "rope_interleaved": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logits_scaling": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_chunk_size": (None,),
    "no_rope_layers": (None, [], ()),
    "no_rope_layer_interval": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "clip_qkv": (None,),
    "use_cla": (None, False),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
}


def _unsupported(param: str, value: object, expectation: str) -> CallerError:
    return CallerError(
        ErrorCode.MODEL_UNSUPPORTED,
        f"config.json: {param} is {value!r}; this server implements {expectation}",
        param=param,
    )


def _integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _unsupported(key, value, "a positive integer there")
    return value


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < float("inf"):
        raise _unsupported(key, value, "a positive number there")
    return float(value)


def _flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise _unsupported(key, value, "true or false there")
    return value


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """The decoder that a config.json describes; raises `model_unsupported` with the key at fault."""
    family = _family(config)
    for key, inert in _INERT.items():
        if key in config and not any(config[key] == value for value in inert):
            raise _unsupported(key, config[key], "models without it")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise _unsupported("hidden_act", activation, "'silu'")
    hidden, heads, layers = (
        _integer(config, k) for k in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    kv_heads = _kv_heads(config, family, heads)
    attention_bias = _flag(config, "attention_bias") if family in (Family.LLAMA, Family.QWEN3) else False
    _no_other_bias(config, family)
    max_positions = _integer(config, "max_position_embeddings", 2048 if family is Family.LLAMA else None)
    return DecoderSpec(
        family=family,
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(config, "intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(config, family, hidden, heads),
        rms_eps=_number(config, "rms_norm_eps", 1e-6),
        rope=_rope(config, max_positions),
        max_positions=max_positions,
        windows=_windows(config, family, layers),
        qkv_bias=family is Family.QWEN2 or attention_bias,
        o_bias=attention_bias,
        mlp_bias=_flag(config, "mlp_bias") if family is Family.LLAMA else False,
        qk_norm=family is Family.QWEN3,
        tied_embeddings=_flag(config, "tie_word_embeddings"),
        dtype=_dtype(config),
    )


def _family(config: Mapping[str, Any]) -> Family:
    name = config.get("model_type")
    try:
        family = Family(str(name))
    except ValueError:
        raise _unsupported("model_type", name, ", ".join(f.value for f in Family)) from None
    expected = {
        Family.LLAMA: "LlamaForCausalLM",
        Family.MISTRAL: "MistralForCausalLM",
        Family.QWEN2: "Qwen2ForCausalLM",
        Family.QWEN3: "Qwen3ForCausalLM",
    }[family]
    architectures = config.get("architectures")
    if architectures and list(architectures) != [expected]:
        raise _unsupported("architectures", architectures, f"[{expected!r}] for {family.value}")
    return family


def _kv_heads(config: Mapping[str, Any], family: Family, heads: int) -> int:
    # Families differ in what a missing key means; only Llama's default does not depend on a library's
    # version.
    if family is not Family.LLAMA and "num_key_value_heads" not in config:
        raise _unsupported("num_key_value_heads", None, "configurations that state it")
    kv_heads = _integer(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise _unsupported("num_key_value_heads", kv_heads, f"divisors of num_attention_heads = {heads}")
    return kv_heads


def _head_dim(config: Mapping[str, Any], family: Family, hidden: int, heads: int) -> int:
    if config.get("head_dim") is None:
        if family is Family.QWEN3:
            return 128
        if hidden % heads:
            raise _unsupported(
                "hidden_size", hidden, f"multiples of num_attention_heads = {heads} without head_dim"
            )
    head_dim = _integer(config, "head_dim", hidden // heads)
    if head_dim % 2:
        raise _unsupported("head_dim", head_dim, "even head dimensions")
    return head_dim


def _no_other_bias(config: Mapping[str, Any], family: Family) -> None:
    """Refuse a bias switch that the family's own reference would not read."""
    known = {
        Family.LLAMA: ("attention_bias", "mlp_bias"),
        Family.QWEN3: ("attention_bias",),
        Family.QWEN2: (),
        Family.MISTRAL: (),
    }[family]
    for key in ("attention_bias", "mlp_bias", "qkv_bias"):
        if key not in known and config.get(key) not in (None, False):
            raise _unsupported(key, config[key], f"no such option for {family.value}")


def _dtype(config: Mapping[str, Any]) -> str | None:
    value = config.get("dtype", config.get("torch_dtype"))
    if value is not None and value not in ("float32", "bfloat16", "float16"):
        raise _unsupported("dtype", value, "float32, bfloat16 or float16")
    return value


def _windows(config: Mapping[str, Any], family: Family, layers: int) -> tuple[int | None, ...]:
    types = config.get("layer_types")
    if family is Family.LLAMA:
        if config.get("sliding_window") is not None or (types and set(types) != {"full_attention"}):
            raise _unsupported("sliding_window", config.get("sliding_window"), "full attention for llama")
        return (None,) * layers
    if family is Family.MISTRAL:
        if types:
            raise _unsupported("layer_types", types, "one window for all layers of mistral")
        # An absent key means 4096 to the reference implementation; null means no window.
        window = (
            _integer(config, "sliding_window", 4096)
            if config.get("sliding_window", 4096) is not None
            else None
        )
        return (window,) * layers
    window = None
    if _flag(config, "use_sliding_window") and config.get("sliding_window", 4096) is not None:
        window = _integer(config, "sliding_window", 4096)
    if types is None:
        first = config.get("max_window_layers", 28)
        types = [
            "full_attention" if window is None or i < first else "sliding_attention" for i in range(layers)
        ]
    if len(types) != layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise _unsupported("layer_types", types, f"{layers} entries of full_attention or sliding_attention")
    if window is None and "sliding_attention" in types:
        raise _unsupported(
            "layer_types", types, "sliding_attention only with use_sliding_window and sliding_window"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


_ROPE_KEYS: Final[dict[RopeKind, frozenset[str]]] = {
    RopeKind.DEFAULT: frozenset(),
    RopeKind.LINEAR: frozenset({"factor"}),
    RopeKind.LLAMA3: frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    RopeKind.YARN: frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}


def _rope(config: Mapping[str, Any], max_positions: int) -> RopeSpec:
    """RoPE from `rope_parameters` (newer files) or `rope_scaling` and `rope_theta` (older ones)."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    table = config.get(key) or {}
    if not isinstance(table, Mapping):
        raise _unsupported(key, table, "an object there")
    name = table.get("rope_type", table.get("type", "default"))
    try:
        kind = RopeKind(str(name))
    except ValueError:
        raise _unsupported(f"{key}.rope_type", name, ", ".join(k.value for k in RopeKind)) from None
    if table.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise _unsupported(
            f"{key}.partial_rotary_factor", table["partial_rotary_factor"], "rotation of the whole head"
        )
    common = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if kind is RopeKind.DEFAULT:
        common |= set().union(*_ROPE_KEYS.values())  # parameters of kinds that are not used change nothing
    unknown = sorted(set(table) - _ROPE_KEYS[kind] - common)
    if unknown:
        raise _unsupported(f"{key}.{unknown[0]}", table[unknown[0]], f"no such parameter for {kind.value}")
    theta = _number(table if "rope_theta" in table else config, "rope_theta", 10_000.0)
    if kind is RopeKind.DEFAULT:
        return RopeSpec(theta)
    factor = _number(table, "factor")
    if factor < 1.0:
        raise _unsupported(f"{key}.factor", factor, "factors of at least 1")
    if kind is RopeKind.LINEAR:
        return RopeSpec(theta, kind, factor)
    stated = config.get("original_max_position_embeddings")
    original = stated if stated is not None else table.get("original_max_position_embeddings")
    original = _integer(
        {"original_max_position_embeddings": original}, "original_max_position_embeddings", max_positions
    )
    if kind is RopeKind.LLAMA3:
        low, high = _number(table, "low_freq_factor"), _number(table, "high_freq_factor")
        if high <= low:
            raise _unsupported(f"{key}.high_freq_factor", high, f"values above low_freq_factor = {low}")
        return RopeSpec(theta, kind, factor, low, high, original)
    attention = table.get("attention_factor")
    return RopeSpec(
        theta,
        kind,
        factor,
        original_positions=original,
        attention_factor=None if attention is None else _number(table, "attention_factor"),
        beta_fast=_number(table, "beta_fast", 32.0),
        beta_slow=_number(table, "beta_slow", 1.0),
        mscale=float(table.get("mscale") or 0.0),
        mscale_all_dim=float(table.get("mscale_all_dim") or 0.0),
        truncate=_flag(table, "truncate", True),
    )
