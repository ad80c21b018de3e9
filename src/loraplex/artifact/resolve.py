"""Every tensor finds its module, every selected module finds its tensors, or the adapter is refused.

Owns the completeness of a load: N of N tensors applied. Never skips a tensor, never fills one in, never falls
back to the base. Names and shapes are judged from the headers (`fit`), so that no data is read of an adapter
that does not fit; `fill` adds the data. Specification: 0x01F (rank and scaling by module), 0x0C (silent use
of the base is not a fallback).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from loraplex.artifact.base_modules import BaseModule, BaseModules, BaseTensors
from loraplex.artifact.carried import Carried, check_carried, check_places
from loraplex.artifact.matching import Selector
from loraplex.artifact.peft_config import BiasMode, PeftConfig, PeftType
from loraplex.artifact.record import AdaptedModule, Artifact, Method, TensorRole
from loraplex.artifact.refuse import bad_config, missing_tensor, unmatched, unsupported, wrong_base
from loraplex.artifact.shapes import Placed, check_shapes
from loraplex.artifact.tensor_names import TensorKind, TensorName, parse_name
from loraplex.artifact.tensors import Dtype, Tensor, TensorHeader
from loraplex.core.ids import Module
from loraplex.identity.scale import ScaleRule

_LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_ROLES: Final[dict[TensorKind, TensorRole]] = {
    TensorKind.LORA_A: TensorRole.A,
    TensorKind.LORA_B: TensorRole.B,
    TensorKind.LORA_B_BIAS: TensorRole.LORA_BIAS,
    TensorKind.EMBEDDING_A: TensorRole.A,
    TensorKind.EMBEDDING_B: TensorRole.B,
    TensorKind.MAGNITUDE: TensorRole.MAGNITUDE,
    TensorKind.BIAS: TensorRole.BIAS,
}
_Found = dict[str, dict[TensorKind, TensorHeader]]


@dataclass(frozen=True, slots=True)
class Fit:
    """An adapter whose headers fit a base completely. tensors_total: in its files."""

    config: PeftConfig
    placed: tuple[Placed, ...]
    carried: tuple[Carried, ...]
    tensors_total: int


def fit(config: PeftConfig, headers: Mapping[str, TensorHeader], base: BaseModules) -> Fit:
    """Where the tensors of `headers` belong under `config` over `base`.

    Raises `adapter_tensor_*`, `adapter_shape_mismatch`, `adapter_rank_mismatch`, `adapter_base_mismatch`,
    `adapter_unsupported`.
    """
    _check_invocation(config, base)
    modules = {module.name: module for module in base.modules()}
    selector = Selector(config)
    selected = {name: module for name, module in modules.items() if selector.selects(module)}
    if not selected:
        raise bad_config("target_modules", "target_modules selects no module of the base")
    _check_tying(config, base, selected)
    found, carried = _assign(config, headers, modules, selected, base)
    check_places(carried)
    placed = tuple(
        _place(selector, modules[name], found.get(name, {}), name in selected)
        for name in sorted(set(selected) | set(found))
    )
    check_shapes(placed)
    return Fit(config, placed, tuple(carried), len(headers))


def fill(
    fitted: Fit,
    tensors: Mapping[str, Tensor],
    base_tensors: BaseTensors | None = None,
    served: Dtype | None = None,
) -> Artifact:
    """The artifact that `tensors` make, those whose headers were fitted.

    base_tensors: the base's weights, needed only where the files repeat some of them. served: see
    `check_carried`. Raises `adapter_unsupported` for weights that are not the base's.
    """
    checked = check_carried(fitted.carried, tensors, base_tensors, served)
    modules = tuple(
        replace(one.module, tensors={role: tensors[header.name] for role, header in one.headers.items()})
        for one in fitted.placed
    )
    applied = sum(len(m.tensors) for m in modules) + len(checked)
    if applied != len(tensors):
        raise unmatched("", f"{applied} of {len(tensors)} tensors were applied, expected all")
    config = fitted.config
    return Artifact(
        config,
        _methods(config, modules),
        modules,
        applied,
        len(tensors),
        checked,
        config.invocation_tokens,
    )


def _check_tying(config: PeftConfig, base: BaseModules, selected: Mapping[str, BaseModule]) -> None:
    """`ensure_weight_tying` asks for something only of an embedding or output layer that share their
    weights.
    """
    ends = [name for name, module in selected.items() if module.module in (Module.EMBED, Module.LM_HEAD)]
    if config.ties_weights and base.tied and ends:
        raise unsupported(
            "ensure_weight_tying",
            f"ensure_weight_tying is true and {ends[0]} is adapted: tied adapters are not served",
        )


def _check_invocation(config: PeftConfig, base: BaseModules) -> None:
    for token in config.invocation_tokens or ():
        if token >= base.vocab:
            raise bad_config(
                "alora_invocation_tokens",
                f"alora_invocation_tokens holds {token}, the base's vocabulary ends at {base.vocab}",
            )


def _assign(
    config: PeftConfig,
    headers: Mapping[str, TensorHeader],
    modules: Mapping[str, BaseModule],
    selected: Mapping[str, BaseModule],
    base: BaseModules,
) -> tuple[_Found, list[Carried]]:
    """Tensors by module and kind, and those that repeat base weights."""
    found: _Found = {}
    carried: list[Carried] = []
    adapters: set[str] = set()
    for tensor in headers.values():
        name = parse_name(tensor.name)
        if name is None:
            raise unmatched(
                tensor.name, f"tensor {tensor.name} has no name that PEFT gives an adapter's tensors"
            )
        if name.module not in modules:
            _refuse_unknown(name, base)
        if name.adapter is not None:
            adapters.add(name.adapter)
        if len(adapters) > 1:
            raise unmatched(
                tensor.name,
                f"tensor {tensor.name} belongs to another adapter than those before it: the file holds "
                f"{', '.join(sorted(adapters))}; save each into a folder of its own",
            )
        if name.kind is TensorKind.BASE_WEIGHT:
            carried.append(Carried(tensor, modules[name.module]))
            continue
        _check_kind(config, name, modules[name.module], name.module in selected)
        kinds = found.setdefault(name.module, {})
        if name.kind in kinds:
            raise unmatched(
                tensor.name, f"tensors {kinds[name.kind].name} and {tensor.name} are both {name.kind}"
            )
        kinds[name.kind] = tensor
    return found, carried


def _refuse_unknown(name: TensorName, base: BaseModules) -> None:
    layer = _LAYER.search(f".{name.module}.")
    if layer and int(layer[1][:9]) >= base.layers:
        raise wrong_base(
            name.full, f"tensor {name.full} is for layer {layer[1]}, the base has {base.layers} layers"
        )
    raise unmatched(name.full, f"tensor {name.full} names {name.module}, which the base does not have")


def _check_kind(config: PeftConfig, name: TensorName, module: BaseModule, selected: bool) -> None:
    """The configuration explains a tensor of this kind on this module."""
    if name.kind is TensorKind.BIAS:
        if config.bias is BiasMode.NONE or (config.bias is BiasMode.LORA_ONLY and not selected):
            raise unmatched(
                name.full, f"tensor {name.full} is a bias, but the configuration's bias is {config.bias}"
            )
        if not module.has_bias:
            raise unmatched(
                name.full, f"tensor {name.full} is a bias of {module.name}, which has none in the base"
            )
        return
    if not selected:
        raise unmatched(
            name.full, f"tensor {name.full} is for {module.name}, which target_modules does not select"
        )
    expected = _expected(config, module)
    if name.kind not in expected:
        raise unmatched(
            name.full, f"tensor {name.full} is {name.kind}, {module.name} takes {', '.join(sorted(expected))}"
        )


def _expected(config: PeftConfig, module: BaseModule) -> set[TensorKind]:
    """Kinds that a selected module must have, without biases."""
    if config.kind is PeftType.IA3:
        return {TensorKind.IA3}
    if module.module is Module.EMBED:
        kinds = {TensorKind.EMBEDDING_A, TensorKind.EMBEDDING_B}
    else:
        kinds = {TensorKind.LORA_A, TensorKind.LORA_B}
        if config.lora_bias:
            kinds.add(TensorKind.LORA_B_BIAS)
    if config.use_dora:
        kinds.add(TensorKind.MAGNITUDE)
    return kinds


def _place(
    selector: Selector, module: BaseModule, kinds: Mapping[TensorKind, TensorHeader], selected: bool
) -> Placed:
    config = selector.config
    if selected:
        _check_module(config, module)
        for kind in sorted(_expected(config, module)):
            if kind not in kinds:
                raise missing_tensor(
                    f"{module.name}.{kind}", f"module {module.name} is a target, but has no tensor {kind}"
                )
    factors = selected and config.kind is PeftType.LORA
    adapted = AdaptedModule(
        layer=module.layer,
        module=module.module,
        name=module.name,
        d_in=module.d_in,
        d_out=module.d_out,
        has_bias=module.has_bias,
        rank=selector.rank(module) if factors else 0,
        alpha=selector.alpha(module) if factors else "0",
        rule=ScaleRule.ALPHA_OVER_SQRT_R if config.use_rslora else ScaleRule.ALPHA_OVER_R,
        tensors={},
    )
    return Placed(adapted, dict(_roles(selector, module, kinds)))


def _check_module(config: PeftConfig, module: BaseModule) -> None:
    """Combinations of method and module that PEFT itself does not have, or that are not served."""
    if module.module is not Module.EMBED:
        return
    if config.use_dora:
        raise unsupported("use_dora", f"DoRA on {module.name} is not served")
    if config.lora_bias or config.invocation_tokens is not None or config.kind is PeftType.IA3:
        raise unsupported("target_modules", f"{module.name} takes plain LoRA factors only")


def _roles(
    selector: Selector, module: BaseModule, kinds: Mapping[TensorKind, TensorHeader]
) -> Iterable[tuple[TensorRole, TensorHeader]]:
    for kind, tensor in sorted(kinds.items()):
        if kind is TensorKind.IA3:
            yield (TensorRole.IA3_IN if selector.feedforward(module) else TensorRole.IA3_OUT), tensor
        else:
            yield _ROLES[kind], tensor


def _methods(config: PeftConfig, modules: Iterable[AdaptedModule]) -> frozenset[Method]:
    """The parts of the method that this artifact really uses."""
    roles = {role for m in modules for role in m.tensors}
    embedding = any(m.module is Module.EMBED for m in modules)
    uses = {
        Method.IA3: bool(roles & {TensorRole.IA3_IN, TensorRole.IA3_OUT}),
        Method.RSLORA: config.use_rslora and TensorRole.A in roles,
        Method.LORA: not config.use_rslora and TensorRole.A in roles,
        Method.DORA: TensorRole.MAGNITUDE in roles,
        Method.LORA_BIAS: TensorRole.LORA_BIAS in roles,
        Method.BITFIT: TensorRole.BIAS in roles,
        Method.ALORA: config.invocation_tokens is not None,
        Method.EMBEDDING: embedding,
    }
    return frozenset(method for method, used in uses.items() if used)
