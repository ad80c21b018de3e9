"""Tensor names of PEFT files: which module and which role, with and without prefix and adapter name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

PREFIXES: Final = ("base_model.model.", "")


class TensorKind(StrEnum):
    """What the end of a tensor name says."""

    LORA_A = "lora_A"
    LORA_B = "lora_B"
    LORA_B_BIAS = "lora_B.bias"
    EMBEDDING_A = "lora_embedding_A"
    EMBEDDING_B = "lora_embedding_B"
    MAGNITUDE = "lora_magnitude_vector"
    IA3 = "ia3_l"
    BIAS = "bias"
    BASE_WEIGHT = "base_layer.weight"


@dataclass(frozen=True, slots=True)
class TensorName:
    """A parsed name. module: without prefix. adapter: the adapter name inside it, or None."""

    full: str
    module: str
    kind: TensorKind
    adapter: str | None


_ADAPTER: Final = r"(?:\.(?P<adapter>[^.]+))?"
_FORMS: Final = tuple(
    (kind, re.compile(form if form.startswith("(?P<module>") else rf"(?P<module>.+)\.{form}"))
    for kind, form in (
        (TensorKind.LORA_A, rf"lora_A{_ADAPTER}\.weight"),
        (TensorKind.LORA_B, rf"lora_B{_ADAPTER}\.weight"),
        (TensorKind.LORA_B_BIAS, rf"lora_B{_ADAPTER}\.bias"),
        (TensorKind.EMBEDDING_A, rf"lora_embedding_A{_ADAPTER}"),
        (TensorKind.EMBEDDING_B, rf"lora_embedding_B{_ADAPTER}"),
        (TensorKind.MAGNITUDE, rf"lora_magnitude_vector{_ADAPTER}\.weight"),
        (TensorKind.MAGNITUDE, rf"lora_magnitude_vector{_ADAPTER}"),
        (TensorKind.IA3, rf"ia3_l{_ADAPTER}"),
        (TensorKind.BASE_WEIGHT, r"base_layer\.weight"),
        (TensorKind.BASE_WEIGHT, r"(?P<module>(?:.+\.)?(?:embed_tokens|lm_head))\.weight"),
        (TensorKind.BIAS, r"base_layer\.bias"),
        (TensorKind.BIAS, r"bias"),
    )
)


def parse_name(name: str) -> TensorName | None:
    """The parts of a tensor name, or None when it has no form that PEFT writes."""
    body = name.removeprefix(PREFIXES[0])
    for kind, form in _FORMS:
        match = form.fullmatch(body)
        if match:
            return TensorName(name, match["module"], kind, match.groupdict().get("adapter"))
    return None
