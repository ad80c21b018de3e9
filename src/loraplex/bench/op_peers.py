"""Other projects' adapter branches over the same problem, where they can be imported: PEFT's mixed batch,
vLLM's kernels.

A peer is a function of a `Problem`; it returns what runs the first n layers in place, or None where it is not
installed or does not take the case. Owns the calls, nothing of what they do.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy.typing as npt
import torch

from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.plan import BatchPlan

MAX_PEFT_ADAPTERS: Final = 64
"""PEFT keeps a module for each adapter and layer."""
PEFT_LAYERS: Final = 8
"""Layers that get PEFT modules; longer walks go round."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A batch over many layers. x, y [layers] of [rows, d]; weights [layers]; owners [rows]: adapter of each
    row; a, b [adapters][layers] of [rank, d]; scales [adapters].
    """

    plan: BatchPlan
    x: list[torch.Tensor]
    y: list[torch.Tensor]
    weights: list[torch.Tensor]
    owners: npt.NDArray[Any]
    a: list[list[torch.Tensor]]
    b: list[list[torch.Tensor]]
    scales: list[float]


Walk = Callable[[int], None]


class _Given(torch.nn.Linear):
    """A base layer whose output is there already, so that what is timed is PEFT's branch alone."""

    given: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.given


def peft(problem: Problem) -> Walk | None:
    """PEFT's LoRA layers called with `adapter_names`, over a base whose output is given."""
    try:
        library: Any = importlib.import_module("peft")
    except ImportError:
        return None
    if len(problem.a) > MAX_PEFT_ADAPTERS:
        return None
    d_in, d_out = problem.x[0].shape[1], problem.y[0].shape[1]
    count = min(len(problem.x), PEFT_LAYERS)
    device, dtype = problem.x[0].device, problem.x[0].dtype
    base = torch.nn.Sequential(
        *(_Given(d_in, d_out, bias=False, dtype=dtype, device=device) for _ in range(count))
    )
    model: Any = None
    for adapter, factors in enumerate(problem.a):
        config = library.LoraConfig(
            r=factors[0].shape[0],
            lora_alpha=factors[0].shape[0],
            target_modules=[str(i) for i in range(count)],
        )
        if model is None:
            model = library.get_peft_model(base, config, adapter_name="0", autocast_adapter_dtype=False)
        else:
            model.add_adapter(str(adapter), config, autocast_adapter_dtype=False)
    layers = [model.base_model.model[i] for i in range(count)]
    for index, layer in enumerate(layers):
        for adapter in range(len(problem.a)):
            layer.lora_A[str(adapter)].weight.data = problem.a[adapter][index].clone()
            layer.lora_B[str(adapter)].weight.data = problem.b[adapter][index].T.contiguous()
            layer.scaling[str(adapter)] = problem.scales[adapter]
    names = [str(owner) for owner in problem.owners.tolist()]
    model.eval()

    def walk(steps: int) -> None:
        for step in range(steps):
            layer = layers[step % count]
            layer.get_base_layer().given = problem.y[step]
            layer(problem.x[step], adapter_names=names)

    return walk


def _stacked(problem: Problem, transpose: bool) -> list[torch.Tensor]:
    """[layers] of [adapters, largest rank, d_in], or [adapters, d_out, largest rank]: slots padded to one
    rank.
    """
    rank = max(a[0].shape[0] for a in problem.a)
    out = []
    for layer in range(len(problem.x)):
        parts = [(b if transpose else a)[layer] for a, b in zip(problem.a, problem.b, strict=True)]
        stacked = parts[0].new_zeros((len(parts), rank, parts[0].shape[1]))
        for index, part in enumerate(parts):
            stacked[index, : part.shape[0]] = part
        out.append(stacked.transpose(1, 2).contiguous() if transpose else stacked)
    return out


def vllm(problem: Problem) -> Walk | None:
    """vLLM's kernels: Triton's shrink and expand on CUDA, the torch ones of its CPU backend elsewhere."""
    if len(set(problem.scales)) > 1:
        scales = torch.tensor(problem.scales, device=problem.x[0].device)
    else:
        scales = None
    device = problem.x[0].device
    name = "vllm.lora.ops.triton_ops" if device.type == "cuda" else "vllm.lora.ops.torch_ops"
    try:
        ops: Any = importlib.import_module(name)
    except ImportError:
        return None
    a, b = _stacked(problem, False), _stacked(problem, True)
    if scales is not None:  # its kernels take one scale for all: fold, as its loader does
        b = [(part.float() * scales[:, None, None]).to(part.dtype) for part in b]
    rank, count = a[0].shape[1], len(problem.a)
    owners = torch.from_numpy(problem.owners.astype("int64")).to(device)
    rows = owners.numel()
    if device.type == "cuda":
        meta = ops.LoRAKernelMeta.make(count, rows, device=device)
        meta.prepare_tensors(owners.to(torch.int32))
        wanted = inspect.signature(meta.meta_args).parameters
        arguments = meta.meta_args(rows, True) if len(wanted) > 1 else meta.meta_args(rows)

        def on_cuda(layers: int) -> None:
            for layer in range(layers):
                z = torch.zeros((1, rows, rank), dtype=torch.float32, device=device)
                ops.lora_shrink(problem.x[layer], [a[layer]], z, *arguments, 1.0)
                ops.lora_expand(z, [b[layer]], problem.y[layer], *arguments, offset_start=0, add_inputs=True)

        return on_cuda

    def on_cpu(layers: int) -> None:
        for layer in range(layers):
            z = torch.zeros((rows, rank), dtype=torch.float32)
            ops.bgmv_shrink(problem.x[layer], a[layer], z, owners, 1.0)
            ops.bgmv_expand(z, b[layer], problem.y[layer], owners, True)

    return on_cpu


PEERS: Final[dict[str, Callable[[Problem], Walk | None]]] = {"peft": peft, "vllm": vllm}
"""Peers by name."""


def require_importable(names: Sequence[str]) -> None:
    """Raises `config_invalid` for a peer that was asked for by name and is not installed."""
    for name in names:
        if name in PEERS and importlib.util.find_spec(name) is None:
            raise CallerError(
                ErrorCode.CONFIG_INVALID,
                f"the peer {name} is not installed here; leave it out",
                param="family",
            )
