"""Every field of PEFT's adapter_config.json, classified: applied, inert, or refused unless it is off.

`APPLIED` fields are decoded by `peft_config`. `INERT` fields have no effect at inference; each has a type
check. `OFF_ONLY` fields change the function in a way that is not served, so only the values that switch them
off pass. A field in none of the tables passes only when its value is null, false, or an empty text or list:
an empty object is how PEFT writes a feature with its defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from loraplex.artifact.jsontext import Decimal64, show
from loraplex.artifact.patterns import MAX_PATTERN_CHARS, PatternError, compile_pattern, is_plain
from loraplex.artifact.refuse import bad_config, unsupported

FILE: Final = "adapter_config.json"

APPLIED: Final[dict[str, frozenset[str]]] = {
    "LORA": frozenset(
        {
            "peft_type",
            "r",
            "lora_alpha",
            "rank_pattern",
            "alpha_pattern",
            "use_rslora",
            "target_modules",
            "exclude_modules",
            "layers_to_transform",
            "layers_pattern",
            "bias",
            "lora_bias",
            "use_dora",
            "alora_invocation_tokens",
            "init_lora_weights",
            "modules_to_save",
            "ensure_weight_tying",
        }
    ),
    "IA3": frozenset(
        {
            "peft_type",
            "target_modules",
            "exclude_modules",
            "feedforward_modules",
            "modules_to_save",
        }
    ),
}

INITS_WITHOUT_EFFECT: Final = frozenset({"gaussian", "eva", "orthogonal", "mica"})
INITS_THAT_CHANGE_THE_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")

DEFAULT_TARGETS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "LORA": dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), ("q_proj", "v_proj")),
    "IA3": {
        **dict.fromkeys(("llama", "mistral"), ("k_proj", "v_proj", "down_proj")),
        **dict.fromkeys(("qwen2", "qwen3"), ("q_proj", "v_proj", "down_proj")),
    },
}
"""What PEFT adapts in a base's family where target_modules is null, by method."""
DEFAULT_FEEDFORWARD: Final = ("down_proj",)
"""PEFT's feedforward_modules of all these families where it is null."""


def _any(_: Any) -> bool:
    return True


def _bool(value: Any) -> bool:
    return isinstance(value, bool)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _object(value: Any) -> bool:
    return isinstance(value, dict)


def _probability(value: Any) -> bool:
    number = value.value if isinstance(value, Decimal64) else value
    return isinstance(number, int | float) and not isinstance(number, bool) and 0 <= number <= 1


INERT: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "auto_mapping": (_object, "an object"),
    "base_model_name_or_path": (_text, "a string"),
    "revision": (_text, "a string"),
    "peft_version": (_text, "a string"),
    "task_type": (_text, "a string"),
    "inference_mode": (_bool, "true or false"),
    "fan_in_fan_out": (_bool, "true or false"),  # PEFT switches it off for linear layers, the only ones here
    "init_ia3_weights": (_bool, "true or false"),
    "lora_dropout": (_probability, "a number from 0 to 1"),
    "megatron_core": (_text, "a string"),
    "qalora_group_size": (_any, ""),  # read only where use_qalora is on
    "loftq_config": (_object, "an object"),  # these configure initialisations, judged by init_lora_weights
    "eva_config": (_object, "an object"),
    "corda_config": (_object, "an object"),
    "lora_ga_config": (_object, "an object"),
    "runtime_config": (_object, "an object"),  # PEFT drops it from files
}

OFF_ONLY: Final[dict[str, str]] = {
    "megatron_config": "Megatron layers are not served",
    "trainable_token_indices": "retrained token embeddings are not served",
    "velora_config": "VeLoRA adapters are not served",
    "use_qalora": "QA-LoRA pools its inputs, which is not served",
    "monteclora_config": "Monte Carlo LoRA is not served",
    "layer_replication": "replicated layers change the base, which is not served",
    "target_parameters": "adapters of bare parameters are not served",
    "use_bdlora": "block-diagonal LoRA is not served",
    "arrow_config": "Arrow routing is not served",
    "kasa_config": "KaSA changes the base weights, which is not served",
    "modules_to_save": (
        "whole modules saved beside the adapter are not served; merge them into a base of their own"
    ),
}


ON_WHEN_EMPTY: Final = frozenset(
    {"velora_config", "monteclora_config", "use_bdlora", "arrow_config", "kasa_config"}
)
"""PEFT reads an empty object as this feature with its defaults: null alone leaves it out."""


def refuse_effects(kind: str, record: Mapping[str, Any]) -> None:
    """Refuse every field with an effect that is not applied; check the types of inert ones."""
    for name, value in record.items():
        if name in OFF_ONLY:
            if not is_off(value) or (value == {} and name in ON_WHEN_EMPTY):
                raise unsupported(name, f"{name} is {show(value)}: {OFF_ONLY[name]}")
        elif name in INERT:
            good, expected = INERT[name]
            if value is not None and not good(value):
                raise bad_config(name, f"{name} is {show(value)}, expected {expected}")
        elif name not in APPLIED[kind] and (not is_off(value) or value == {}):
            raise unsupported(
                name, f"the field {show(name)} is {show(value)}, and what it does is not known here"
            )
    if kind == "LORA":
        _check_init(record.get("init_lora_weights", True))


def _check_init(value: Any) -> None:
    if value is None or isinstance(value, bool):
        return
    if not isinstance(value, str):
        raise bad_config(
            "init_lora_weights", f"init_lora_weights is {show(value)}, expected a name, true or false"
        )
    if value in INITS_WITHOUT_EFFECT or value.lower() == "gaussian":  # the one that PEFT reads in any case
        return
    if value.lower().startswith(INITS_THAT_CHANGE_THE_BASE):
        raise unsupported(
            "init_lora_weights",
            f"init_lora_weights {show(value)} changes the base weights when it is loaded; save the adapter "
            "again with "
            "path_initial_model_for_weight_conversion",
        )
    raise unsupported("init_lora_weights", f"init_lora_weights {show(value)} is not known here")


def is_off(value: Any) -> bool:
    """Whether a value is PEFT's way to leave a feature out."""
    return value is None or value is False or value in ([], {}, "")


def check_regex(name: str, pattern: str) -> None:
    """A pattern from the file parses and is read here."""
    if is_plain(pattern) and len(pattern) <= MAX_PATTERN_CHARS:
        return
    try:
        compile_pattern(pattern)
    except PatternError as error:
        raise bad_config(
            name, f"{name} holds the pattern {show(pattern)}, which is refused: {error}"
        ) from None
