"""adapter_config.json, decoded strictly into the part that decides what is computed.

Every field that PEFT 0.21 writes is classified in `fields`: applied, inert, or refused unless it is off. A
field that nobody knows is refused by name unless its value is off too. Specification: 0x01G (effective
configuration), 0x0C (malformed scaling metadata); rulings "Identity".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from loraplex.artifact import fields
from loraplex.artifact.jsontext import Decimal64, show
from loraplex.artifact.patterns import is_plain
from loraplex.artifact.refuse import bad_config, rank_limit, unsupported
from loraplex.core.limits import MAX_LAYERS_PATTERNS, MAX_PATTERN_ENTRIES, MAX_PATTERNS_CHARS, MAX_RANK
from loraplex.identity.scale import alpha_text

ALL_LINEAR: Final = "all-linear"
MAX_NAMES: Final = 65_536
MAX_NAME_CHARS: Final = 16_384
MAX_INVOCATION_TOKENS: Final = 4_096


class PeftType(StrEnum):
    """PEFT methods that are read."""

    LORA = "LORA"
    IA3 = "IA3"


class BiasMode(StrEnum):
    """Which base biases the adapter replaces."""

    NONE = "none"
    ALL = "all"
    LORA_ONLY = "lora_only"


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """A set of module names, or one regular expression over a whole name."""

    names: frozenset[str] = frozenset()
    pattern: str | None = None


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The effective configuration: everything that changes the function, nothing that does not.

    targets: modules that are adapted; None means all linear layers but the output. layers: indices that list
    targets are limited to, or None. alpha and alpha_pattern: shortest decimal texts. invocation_tokens:
    aLoRA's, or None.
    """

    kind: PeftType
    targets: ModuleNames | None
    exclude: ModuleNames
    rank: int = 0
    alpha: str = "0"
    rank_pattern: tuple[tuple[str, int], ...] = ()
    alpha_pattern: tuple[tuple[str, str], ...] = ()
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    bias: BiasMode = BiasMode.NONE
    layers: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()
    feedforward: ModuleNames = ModuleNames()
    invocation_tokens: tuple[int, ...] | None = None
    ties_weights: bool = False


def decode_config(record: Mapping[str, Any], family: str | None = None) -> PeftConfig:
    """The configuration in a decoded JSON object; raises typed refusals that name field, value and
    expectation.

    family: `model_type` of the base, which says what PEFT takes for a target_modules that is null.
    """
    kind = _peft_type(record)
    fields.refuse_effects(kind.value, record)
    targets = _targets(record, kind, family)
    exclude = _names(record, "exclude_modules") or ModuleNames()
    if kind is PeftType.IA3:
        return PeftConfig(kind, targets, exclude, feedforward=_feedforward(record, targets, family))
    config = PeftConfig(
        kind=kind,
        targets=targets,
        exclude=exclude,
        rank=_rank("r", _required(record, "r")),
        alpha=_alpha("lora_alpha", _required(record, "lora_alpha")),
        rank_pattern=tuple(
            (k, _rank(f"rank_pattern[{show(k)}]", v)) for k, v in _pattern(record, "rank_pattern")
        ),
        alpha_pattern=tuple(
            (k, _alpha(f"alpha_pattern[{show(k)}]", v)) for k, v in _pattern(record, "alpha_pattern")
        ),
        use_rslora=_flag(record, "use_rslora"),
        use_dora=_flag(record, "use_dora"),
        lora_bias=_flag(record, "lora_bias"),
        bias=_bias(record),
        layers=_layers(record),
        layers_pattern=_layers_pattern(record),
        invocation_tokens=_invocation(record),
        ties_weights=_flag(record, "ensure_weight_tying"),
    )
    _check_combination(config)
    return config


def _peft_type(record: Mapping[str, Any]) -> PeftType:
    value = _required(record, "peft_type")
    if not isinstance(value, str):
        raise bad_config("peft_type", f"peft_type is {show(value)}, expected a string")
    try:
        return PeftType(value)
    except ValueError:
        raise unsupported(
            "peft_type", f"peft_type {show(value)} is not served, expected LORA or IA3"
        ) from None


def _required(record: Mapping[str, Any], name: str) -> Any:
    if name not in record:
        raise bad_config(name, f"{fields.FILE} has no field {name}")
    return record[name]


def _flag(record: Mapping[str, Any], name: str) -> bool:
    value = record.get(name)
    if value is None:  # PEFT asks for its truth, and null has none
        return False
    if not isinstance(value, bool):
        raise bad_config(name, f"{name} is {show(value)}, expected true or false")
    return value


def _rank(name: str, value: Any) -> int:
    if type(value) is not int:
        raise bad_config(name, f"{name} is {show(value)}, expected an integer")
    if not 1 <= value <= MAX_RANK:
        raise rank_limit(name, f"{name} is {value}, expected 1 to {MAX_RANK}")
    return value


def _alpha(name: str, value: Any) -> str:
    if type(value) is not int and not isinstance(value, Decimal64):
        raise bad_config(name, f"{name} is {show(value)}, expected a number")
    text = alpha_text(value if isinstance(value, int) else value.text)
    if text is None:
        raise bad_config(name, f"{name} is {show(value)}, expected a positive number below 1e9")
    return text


def _pattern(record: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    value = record.get(name)
    if value is None:
        return []
    if not isinstance(value, dict):
        raise bad_config(name, f"{name} is {show(value)}, expected an object")
    if len(value) > MAX_PATTERN_ENTRIES:
        raise bad_config(
            name,
            f"{name} has {len(value)} entries, at most {MAX_PATTERN_ENTRIES} are read; one pattern may stand "
            "for many "
            "modules",
        )
    chars = sum(len(key) for key in value if not is_plain(key))
    if chars > MAX_PATTERNS_CHARS:
        raise bad_config(
            name,
            f"{name} has regular expressions of {chars} characters together, at most {MAX_PATTERNS_CHARS} "
            "are read; name the modules instead",
        )
    for key in value:
        fields.check_regex(name, key)
    return list(value.items())


def _bias(record: Mapping[str, Any]) -> BiasMode:
    value = record.get("bias", "none")
    if not isinstance(value, str) or value not in set(BiasMode):
        raise bad_config("bias", f"bias is {show(value)}, expected none, all or lora_only")
    return BiasMode(value)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, list) and len(value) > MAX_NAMES:
        raise bad_config(name, f"{name} has {len(value)} entries, at most {MAX_NAMES} are read")
    if not isinstance(value, list) or not all(
        isinstance(item, str) and 0 < len(item) <= MAX_NAME_CHARS for item in value
    ):
        raise bad_config(name, f"{name} is {show(value)}, expected a list of non-empty strings")
    return tuple(value)


def _names(record: Mapping[str, Any], name: str) -> ModuleNames | None:
    value = record.get(name)
    if value is None or value == []:
        return None
    if isinstance(value, str):
        fields.check_regex(name, value)
        return ModuleNames(pattern=value)
    return ModuleNames(names=frozenset(_strings(name, value)))


def _targets(record: Mapping[str, Any], kind: PeftType, family: str | None) -> ModuleNames | None:
    names = _names(record, "target_modules")
    if record.get("target_modules") is None and family in fields.DEFAULT_TARGETS[kind]:
        return ModuleNames(names=frozenset(fields.DEFAULT_TARGETS[kind][family]))
    if names is None:
        raise bad_config(
            "target_modules", "target_modules is missing or empty, expected names, a pattern or all-linear"
        )
    if names.pattern is not None and names.pattern.lower() == ALL_LINEAR:
        return None
    return names


def _feedforward(record: Mapping[str, Any], targets: ModuleNames | None, family: str | None) -> ModuleNames:
    names = _names(record, "feedforward_modules") or ModuleNames()
    if record.get("feedforward_modules") is None:
        if family not in fields.DEFAULT_TARGETS[PeftType.IA3]:
            raise bad_config(
                "feedforward_modules", "feedforward_modules is missing, expected a list or a pattern"
            )
        return ModuleNames(names=frozenset(fields.DEFAULT_FEEDFORWARD))
    if targets is not None and targets.pattern is None and not names.names <= targets.names:
        extra = min(names.names - targets.names)
        raise bad_config(
            "feedforward_modules", f"feedforward_modules names {show(extra)}, which target_modules does not"
        )
    return names


def _layers(record: Mapping[str, Any]) -> tuple[int, ...] | None:
    value = record.get("layers_to_transform")
    if value is None or value == []:
        return None
    items = value if isinstance(value, list) else [value]
    if not all(type(item) is int and item >= 0 for item in items) or len(items) > MAX_NAMES:
        raise bad_config(
            "layers_to_transform",
            f"layers_to_transform is {show(value)}, expected layer indices from 0",
        )
    return tuple(sorted(set(items)))


def _layers_pattern(record: Mapping[str, Any]) -> tuple[str, ...]:
    value = record.get("layers_pattern")
    if value is None or value in ("", []):
        return ()
    patterns = (value,) if isinstance(value, str) else _strings("layers_pattern", value)
    if len(patterns) > MAX_LAYERS_PATTERNS:
        raise bad_config(
            "layers_pattern",
            f"layers_pattern has {len(patterns)} entries, at most {MAX_LAYERS_PATTERNS} are read",
        )
    for pattern in patterns:
        if not re.fullmatch(r"\w+(\.\w+)*", pattern):
            raise unsupported("layers_pattern", f"layers_pattern {show(pattern)} is not a plain module name")
    return patterns


def _invocation(record: Mapping[str, Any]) -> tuple[int, ...] | None:
    value = record.get("alora_invocation_tokens")
    if value is None:
        return None
    good = isinstance(value, list) and 0 < len(value) <= MAX_INVOCATION_TOKENS
    if not good or not all(type(item) is int and item >= 0 for item in value):
        raise bad_config(
            "alora_invocation_tokens",
            f"alora_invocation_tokens is {show(value)}, expected 1 to {MAX_INVOCATION_TOKENS} token ids",
        )
    return tuple(value)


def _check_combination(config: PeftConfig) -> None:
    """Combinations that PEFT itself refuses."""
    pattern = config.targets is None or config.targets.pattern is not None
    if pattern and config.layers is not None:
        raise bad_config(
            "layers_to_transform", "layers_to_transform needs target_modules as a list, not a pattern"
        )
    if config.layers_pattern and config.layers is None:
        raise bad_config("layers_pattern", "layers_pattern needs layers_to_transform")
    if config.use_dora and config.lora_bias:
        raise bad_config("lora_bias", "lora_bias and use_dora exclude each other")
    if config.use_dora and config.invocation_tokens is not None:
        raise bad_config("alora_invocation_tokens", "alora_invocation_tokens and use_dora exclude each other")
