"""A decoder's weights: exactly the tensors that its specification implies, fused where one GEMM serves
several.

Tensors are allocated once on the device and filled shard by shard, so that the peak is the model plus one
tensor. A missing, left-over, misshapen or non-floating tensor is `model_weights_invalid`; nothing is skipped
in silence.

Specification: rulings "Models", "Start-up".
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open

from loraplex.artifact.source import ByteProgress
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.ids import Module
from loraplex.model.linear import Arena, Linear
from loraplex.model.rope import inverse_frequencies
from loraplex.model.spec import DecoderSpec, RopeSpec, module_name

_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_DUMMY_STD: Final = 0.02
_FREQUENCIES: Final = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer; projections as [d_out, d_in].

    qkv: [q + k + v, hidden]. qk_norm: [heads + kv_heads, head_dim], the q norm for each query head, then the
    k norm. gate_up: [2 * intermediate, hidden].
    """

    input_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear

    @property
    def projections(self) -> tuple[Linear, ...]:
        """The four matrices."""
        return self.qkv, self.o, self.gate_up, self.down


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """All weights of a decoder. embed: [vocabulary, hidden]; tied: the head's values are the embedding's."""

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    lm_head: Linear
    tied: bool

    @property
    def dtype(self) -> torch.dtype:
        """Type of every tensor."""
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        """Device of every tensor."""
        return self.embed.device

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters, shared ones once."""
        total = self.embed.nbytes + self.final_norm.nbytes + (0 if self.tied else self.lm_head.nbytes)
        for layer in self.layers:
            norms = (layer.input_norm, layer.post_norm, layer.qk_norm)
            total += sum(t.nbytes for t in norms if t is not None) + sum(p.nbytes for p in layer.projections)
        return total

    def pack(self) -> DecoderWeights:
        """These weights, each projection in its device's layout; one matrix at a time, so that the peak stays
        low.
        """
        every = [projection for layer in self.layers for projection in layer.projections] + [self.lm_head]
        arena = Arena(sum(Arena.room(projection.packed_bytes()) for projection in every))
        for projection in every:
            projection.pack(arena)
        return self


@dataclass(frozen=True, slots=True)
class Target:
    """Where one checkpoint tensor goes. shape: of the checkpoint; view: memory of that shape, or
    broadcastable to.
    """

    shape: tuple[int, ...]
    view: torch.Tensor


def allocate(
    spec: DecoderSpec, dtype: torch.dtype, device: torch.device
) -> tuple[DecoderWeights, dict[str, Target]]:
    """Uninitialised weights, and for each checkpoint name the part of them that it fills."""

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    targets: dict[str, Target] = {}
    embed = new(spec.vocab_size, spec.hidden_size)
    targets["model.embed_tokens.weight"] = Target(tuple(embed.shape), embed)
    layers: list[LayerWeights] = []
    for index in range(spec.layers):
        layer = _allocate_layer(spec, new)
        targets |= _layer_targets(spec, index, layer)
        layers.append(layer)
    final_norm = new(spec.hidden_size)
    targets["model.norm.weight"] = Target(tuple(final_norm.shape), final_norm)
    lm_head = embed
    if not spec.tied_embeddings:
        lm_head = new(spec.vocab_size, spec.hidden_size)
        targets["lm_head.weight"] = Target(tuple(lm_head.shape), lm_head)
    weights = DecoderWeights(embed, tuple(layers), final_norm, Linear(lm_head), spec.tied_embeddings)
    return weights, targets


def _allocate_layer(spec: DecoderSpec, new: Callable[..., torch.Tensor]) -> LayerWeights:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    qkv = spec.q_size + 2 * spec.kv_size

    def linear(d_out: int, d_in: int, bias: bool) -> Linear:
        return Linear(new(d_out, d_in), new(d_out) if bias else None)

    return LayerWeights(
        input_norm=new(hidden),
        qkv=linear(qkv, hidden, spec.qkv_bias),
        qk_norm=new(spec.heads + spec.kv_heads, spec.head_dim) if spec.qk_norm else None,
        o=linear(hidden, spec.q_size, spec.o_bias),
        post_norm=new(hidden),
        gate_up=linear(2 * inner, hidden, spec.mlp_bias),
        down=linear(hidden, inner, spec.mlp_bias),
    )


def _layer_targets(spec: DecoderSpec, index: int, layer: LayerWeights) -> dict[str, Target]:
    q, kv, inner = spec.q_size, spec.kv_size, spec.intermediate_size
    pieces = (
        (Module.Q, layer.qkv, 0, q),
        (Module.K, layer.qkv, q, kv),
        (Module.V, layer.qkv, q + kv, kv),
        (Module.O, layer.o, 0, spec.hidden_size),
        (Module.GATE, layer.gate_up, 0, inner),
        (Module.UP, layer.gate_up, inner, inner),
        (Module.DOWN, layer.down, 0, spec.hidden_size),
    )
    out: dict[str, Target] = {}
    for module, projection, start, size in pieces:
        name = module_name(index, module)
        view = projection.weight[start : start + size]
        out[f"{name}.weight"] = Target(tuple(view.shape), view)
        if projection.bias is not None:
            out[f"{name}.bias"] = Target((size,), projection.bias[start : start + size])
    prefix = f"model.layers.{index}"
    for name, tensor in (
        ("input_layernorm", layer.input_norm),
        ("post_attention_layernorm", layer.post_norm),
    ):
        out[f"{prefix}.{name}.weight"] = Target(tuple(tensor.shape), tensor)
    if layer.qk_norm is not None:
        heads = (("q_norm", layer.qk_norm[: spec.heads]), ("k_norm", layer.qk_norm[spec.heads :]))
        for name, view in heads:
            out[f"{prefix}.self_attn.{name}.weight"] = Target((spec.head_dim,), view)
    return out


def dummy_weights(
    spec: DecoderSpec, dtype: torch.dtype, device: torch.device, *, seed: int = 0
) -> DecoderWeights:
    """Random weights from the specification alone, the same for the same seed, type and kind of device.

    Matrices and biases are normal with deviation 0.02; norms are 1.
    """
    weights, targets = allocate(spec, dtype, device)
    generator = torch.Generator(device=device)
    for name, target in targets.items():
        if name.endswith("norm.weight"):
            target.view.fill_(1.0)
        else:
            # A stream of its own for each tensor: the value does not depend on the tensors before it.
            generator.manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
            target.view.normal_(0.0, _DUMMY_STD, generator=generator)
    return weights.pack()


def load_weights(
    folder: Path,
    spec: DecoderSpec,
    dtype: torch.dtype,
    device: torch.device,
    progress: ByteProgress | None = None,
) -> DecoderWeights:
    """Weights from a folder's safetensors, one file or shards with an index.

    Raises `model_source_missing` where files are missing and `model_weights_invalid` where they do not hold
    exactly the tensors of `spec`.
    """
    shards = _shards(folder)
    total = sum(path.stat().st_size for path in shards)
    weights, targets = allocate(spec, dtype, device)
    seen: set[str] = set()
    done = 0
    for name, tensor in _tensors(shards):
        if name in seen:
            raise _invalid(f"{name} appears in two shards")
        seen.add(name)
        if name == "lm_head.weight" and spec.tied_embeddings:
            _check_tied(
                tensor, targets["model.embed_tokens.weight"], "model.embed_tokens.weight" in seen, folder
            )
        elif _FREQUENCIES.fullmatch(name):
            _check_frequencies(name, tensor, spec)
        else:
            _fill(name, tensor, targets)
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)
    missing = sorted(set(targets) - seen)
    if missing:
        raise _invalid(f"{len(missing)} tensors are missing, the first is {missing[0]}")
    return weights.pack()


def _invalid(what: str) -> CallerError:
    return CallerError(ErrorCode.MODEL_WEIGHTS_INVALID, f"model weights refused: {what}")


def _source_missing(path: Path, what: str) -> CallerError:
    return CallerError(ErrorCode.MODEL_SOURCE_MISSING, f"{path} {what}")


def _shards(folder: Path) -> list[Path]:
    index, single = folder / _INDEX, folder / _SINGLE
    if not os.path.isfile(index):
        if not os.path.isfile(single):
            raise _source_missing(
                folder, f"has neither {_SINGLE} nor {_INDEX}; convert the weights to safetensors"
            )
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise _invalid(f"{_INDEX} is not an index of shards ({error})") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise _invalid(f"{_INDEX} names the shard {name!r}, which is not a file name inside the folder")
        if not os.path.isfile(folder / name):
            raise _source_missing(folder / name, f"is named by {_INDEX} and is not there")
    return [folder / name for name in names]


def _tensors(shards: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for path in shards:
        try:
            with safe_open(path, framework="pt", device="cpu") as shard:
                for name in shard.keys():  # noqa: SIM118 - the handle is not a mapping
                    yield name, shard.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise _invalid(f"{path.name} is not a valid safetensors file ({error})") from error


def _fill(name: str, tensor: torch.Tensor, targets: dict[str, Target]) -> None:
    target = targets.get(name)
    if target is None:
        raise _invalid(f"{name} belongs to nothing that the configuration implies")
    if tuple(tensor.shape) != target.shape:
        raise _invalid(f"{name} has shape {tuple(tensor.shape)}, expected {target.shape}")
    if tensor.dtype not in _FLOATS:
        raise _invalid(f"{name} has type {tensor.dtype}, expected float32, bfloat16 or float16")
    target.view.copy_(tensor)


def _check_frequencies(name: str, tensor: torch.Tensor, spec: DecoderSpec) -> None:
    """Old files repeat RoPE's unscaled frequencies in each layer; they must be those that the configuration
    gives.
    """
    expected, _ = inverse_frequencies(RopeSpec(spec.rope.theta), spec.head_dim)
    if tensor.shape != expected.shape or not torch.allclose(tensor.float(), expected, rtol=1e-2, atol=0.0):
        raise _invalid(f"{name} differs from the frequencies of rope_theta {spec.rope.theta:g}")


def _check_tied(tensor: torch.Tensor, embed: Target, loaded: bool, folder: Path) -> None:
    """A tied checkpoint may repeat the embedding as its head; a different head would be ignored in
    silence.
    """
    if tuple(tensor.shape) != embed.shape:
        raise _invalid(f"lm_head.weight has shape {tuple(tensor.shape)}, expected {embed.shape}")
    other = embed.view
    if not loaded:
        found = [t for name, t in _tensors(_shards(folder)) if name == "model.embed_tokens.weight"]
        if not found:
            raise _invalid("model.embed_tokens.weight is missing")
        other = found[0]
    if not torch.equal(other.to("cpu", tensor.dtype), tensor.to(other.dtype).to(tensor.dtype)):
        raise _invalid("lm_head.weight differs from the embedding although tie_word_embeddings is true")
