"""Malformed configurations: one mutation of a valid adapter_config.json at a time, with the code it must
give.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.artifact.tiny import edit_config

from loraplex.core.errors import ErrorCode

CONFIG, UNSUPPORTED = ErrorCode.ADAPTER_CONFIG_INVALID, ErrorCode.ADAPTER_UNSUPPORTED
MALFORMED, PICKLE = ErrorCode.ADAPTER_FILE_MALFORMED, ErrorCode.ADAPTER_FILE_PICKLE
UNMATCHED, MISSING = ErrorCode.ADAPTER_TENSOR_UNMATCHED, ErrorCode.ADAPTER_TENSOR_MISSING
SHAPE, RANK, LIMIT = (
    ErrorCode.ADAPTER_SHAPE_MISMATCH,
    ErrorCode.ADAPTER_RANK_MISMATCH,
    ErrorCode.ADAPTER_RANK_LIMIT,
)
FINITE, DTYPE, OTHER_BASE = (
    ErrorCode.ADAPTER_NOT_FINITE,
    ErrorCode.ADAPTER_DTYPE_UNSUPPORTED,
    ErrorCode.ADAPTER_BASE_MISMATCH,
)
SOURCE, LARGE = ErrorCode.ADAPTER_SOURCE_MISSING, ErrorCode.ADAPTER_TOO_LARGE

WEIGHTS, JSON = "adapter_model.safetensors", "adapter_config.json"
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
A0, B0 = f"{Q0}.lora_A.weight", f"{Q0}.lora_B.weight"
Mutation = Callable[[Path], None]
Case = tuple[str, Mutation, ErrorCode]
GONE = object()


# Configuration fields


LFS_POINTER: Final = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 27280152\n"
)


def field(name: str, value: Any) -> Mutation:
    def mutate(folder: Path) -> None:
        edit_config(folder, lambda c: {k: v for k, v in {**c, name: value}.items() if v is not GONE})

    return mutate


def config_cases() -> list[Case]:
    values: list[tuple[str, Any, ErrorCode]] = [
        ("peft_type", GONE, CONFIG), ("peft_type", 1, CONFIG), ("peft_type", None, CONFIG),
        *(("peft_type", kind, UNSUPPORTED) for kind in ("ADALORA", "LOHA", "PREFIX_TUNING", "lora", "",
        "VERA")),
        ("r", GONE, CONFIG), *(("r", v, CONFIG) for v in ("4", 4.0, None, True, [4], {})),
        *(("r", v, LIMIT) for v in (0, -1, 513, 10**30)),
        ("r", 5, RANK), ("r", 2, RANK),
        ("lora_alpha", GONE, CONFIG),
        *(("lora_alpha", v, CONFIG) for v in ("8", None, True, [8], 0, -1, 0.0, -0.5, 1e9, 10**40, 1e300)),
        *(("rank_pattern", v, CONFIG) for v in ([], {f"m{i}": 4 for i in range(4097)}, "q_proj", 4,
        {"q_proj": "4"}, {"q_proj": 4.0}, {"q_proj": None})),
        ("rank_pattern", {"q_proj": 0}, LIMIT), ("rank_pattern", {"q_proj": 1024}, LIMIT),
        ("rank_pattern", {"q_proj": 3}, RANK), ("rank_pattern", {"(": 4}, CONFIG),
        ("rank_pattern", {"(?i)q": 4}, CONFIG),
        *(("alpha_pattern", v, CONFIG) for v in ([1], "q", {"q_proj": "1"}, {"q_proj": 0}, {"q_proj": None},
        {"[": 1})),
        *(("use_rslora", v, CONFIG) for v in (1, "true", [])),
        *(("use_dora", v, CONFIG) for v in (1, "true")), ("use_dora", True, MISSING),
        *(("lora_bias", v, CONFIG) for v in (1, "none")), ("lora_bias", True, MISSING),
        *(("bias", v, CONFIG) for v in ("some", True, None, 1, "ALL")),
        *(("target_modules", v, CONFIG) for v in ([], 7, {}, [1], [""], ["q_proj", None])),
        *(("target_modules", v, CONFIG) for v in ("(", "[a-", "*", "(?P<x", r"(q)_proj\1", "(?i).*q_proj",
        "a{2,1}", "nothing", "x" * 20_000)),
        ("target_modules", ["c_attn"], CONFIG), ("target_modules", ["q_proj"], UNMATCHED),
        ("target_modules", ["q_proj", "v_proj", "k_proj"], MISSING),
        ("target_modules", "all-linear", MISSING),
        ("target_modules", [*(["q_proj", "v_proj"] * 40_000)], CONFIG),
        *(("exclude_modules", v, CONFIG) for v in (7, [1], [""], "(", {"a": 1})),
        ("exclude_modules", ["v_proj"], UNMATCHED), ("exclude_modules", r".*layers\.0.*", UNMATCHED),
        *(("layers_to_transform", v, CONFIG) for v in ("0", -1, [-1], [0, "1"], True, 1.0, {"a": 0})),
        ("layers_to_transform", [0], UNMATCHED), ("layers_to_transform", 99, CONFIG),
        ("layers_pattern", "layers", CONFIG), ("layers_pattern", 7, CONFIG), ("layers_pattern", [7], CONFIG),
        ("layers_pattern", "lay(er|ers)", UNSUPPORTED), ("layers_pattern", ["a"] * 65, CONFIG),
        *(("alora_invocation_tokens", v, CONFIG) for v in ([], "tok", 5, [1.0], [-1], [True], [64],
        [1, 2, 10**12], {})),
        *(("lora_dropout", v, CONFIG) for v in ("0.1", -0.1, 1.5, True, [])),
        *(("init_lora_weights", v, UNSUPPORTED) for v in ("pissa", "pissa_niter_16", "olora", "corda",
        "loftq", "lora_ga", "OLoRA", "new")),
        *(("init_lora_weights", v, CONFIG) for v in (1, [], {})),
        ("modules_to_save", ["lm_head"], UNSUPPORTED), ("modules_to_save", "lm_head", UNSUPPORTED),
        ("trainable_token_indices", [1], UNSUPPORTED), ("layer_replication", [[0, 2]], UNSUPPORTED),
        ("target_parameters", ["experts.w"], UNSUPPORTED), ("use_qalora", True, UNSUPPORTED),
        ("use_bdlora", {"a": 1}, UNSUPPORTED),
        ("arrow_config", {"a": 1}, UNSUPPORTED), ("kasa_config", {"beta": 1}, UNSUPPORTED),
        ("velora_config", {"a": 1}, UNSUPPORTED),
        ("monteclora_config", {"a": 1}, UNSUPPORTED), ("megatron_config", {"a": 1}, UNSUPPORTED),
        ("ensure_weight_tying", 1, CONFIG),
        *(
            (name, {}, UNSUPPORTED)
            for name in ("kasa_config", "velora_config", "arrow_config", "monteclora_config", "use_bdlora")
        ),
        ("rank_pattern", {f"{'.*' * 200}{index}": 4 for index in range(400)}, CONFIG),
        ("x" * 100_000, 1, UNSUPPORTED), ("tomorrows_config", {}, UNSUPPORTED),
        ("use_something_new", True, UNSUPPORTED), ("scale_multiplier", 2, UNSUPPORTED),
        ("lora_alpah", 16, UNSUPPORTED),
        ("task_type", 7, CONFIG), ("base_model_name_or_path", 7, CONFIG), ("inference_mode", "yes", CONFIG),
        ("fan_in_fan_out", 1, CONFIG), ("auto_mapping", [], CONFIG), ("revision", {}, CONFIG),
        ("peft_version", 0.21, CONFIG),
        ("loftq_config", "none", CONFIG), ("eva_config", [], CONFIG), ("megatron_core", 3, CONFIG),
    ]  # fmt: skip
    shown = {id(GONE): "gone"}
    return [
        (f"{name}={shown.get(id(value), repr(value)[:24])}", field(name, value), code)
        for name, value, code in values
    ]


def two_fields(**values: Any) -> Mutation:
    return lambda folder: edit_config(folder, lambda c: c | values)


COMBINATIONS: list[Case] = [
    ("pattern with layers", two_fields(target_modules=".*[qv]_proj", layers_to_transform=[0]), CONFIG),
    ("all-linear with layers", two_fields(target_modules="all-linear", layers_to_transform=[0]), CONFIG),
    ("dora and lora_bias", two_fields(use_dora=True, lora_bias=True), CONFIG),
    ("dora and alora", two_fields(use_dora=True, alora_invocation_tokens=[1]), CONFIG),
    ("ia3 of lora files", two_fields(peft_type="IA3", feedforward_modules=[], r=None, lora_alpha=None,
    bias=None), UNMATCHED),
    ("ia3 with a rank", two_fields(peft_type="IA3", feedforward_modules=[]), UNSUPPORTED),
    ("ia3 feedforward outside", two_fields(peft_type="IA3", feedforward_modules=["x"], r=None,
    lora_alpha=None, bias=None), CONFIG),
    ("ia3 without feedforward", two_fields(peft_type="IA3", r=None, lora_alpha=None, bias=None), UNMATCHED),
    ("embedding with alora", two_fields(target_modules=["embed_tokens"], alora_invocation_tokens=[1]),
    UNMATCHED),
]  # fmt: skip


# Configuration text


def config_text(change: Callable[[bytes], bytes]) -> Mutation:
    def mutate(folder: Path) -> None:
        path = folder / JSON
        path.write_bytes(change(path.read_bytes()))

    return mutate


TEXTS: list[Case] = [
    ("empty", config_text(lambda _: b""), CONFIG),
    ("not JSON", config_text(lambda t: t[:-1]), CONFIG),
    ("two values", config_text(lambda t: t + b"{}"), CONFIG),
    ("a list", config_text(lambda t: b"[" + t + b"]"), CONFIG),
    ("null", config_text(lambda _: b"null"), CONFIG),
    ("not UTF-8", config_text(lambda t: t.replace(b"q_proj", b"q\xffproj")), CONFIG),
    ("duplicate name", config_text(lambda t: t.replace(b'{"peft_type"', b'{"r": 4, "peft_type"')), CONFIG),
    ("NaN", config_text(lambda t: t.replace(b'"lora_alpha": 8', b'"lora_alpha": NaN')), CONFIG),
    ("Infinity", config_text(lambda t: t.replace(b'"lora_alpha": 8', b'"lora_alpha": Infinity')), CONFIG),
    (
        "NaN in an inert field",
        config_text(
            lambda t: t.replace(b'"base_model_name_or_path": null', b'"base_model_name_or_path": NaN')
        ),
        CONFIG,
    ),
    (
        "long number",
        config_text(lambda t: t.replace(b'"lora_alpha": 8', b'"lora_alpha": ' + b"8" * 5000)),
        CONFIG,
    ),
    (
        "long decimal",
        config_text(lambda t: t.replace(b'"lora_alpha": 8', b'"lora_alpha": 8.' + b"0" * 5000)),
        CONFIG,
    ),
    (
        "overflowing decimal",
        config_text(lambda t: t.replace(b'"lora_alpha": 8', b'"lora_alpha": 1e999')),
        CONFIG,
    ),
    (
        "underflowing decimal",
        config_text(lambda t: t.replace(b'"lora_alpha": 8', b'"lora_alpha": 1e-999')),
        CONFIG,
    ),
    (
        "deep nesting",
        config_text(lambda t: t[:-1] + b', "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        CONFIG,
    ),
    (
        "nesting that a parser bears",
        config_text(lambda t: t[:-1] + b', "x": ' + b"[" * 40 + b"]" * 40 + b"}"),
        CONFIG,
    ),
    ("a Git LFS pointer", config_text(lambda _: LFS_POINTER), CONFIG),
    ("half a surrogate", config_text(lambda t: t.replace(b'"q_proj"', b'"\\ud800"')), CONFIG),
    ("byte-order mark", config_text(lambda t: b"\xef\xbb\xbf" + t), CONFIG),
    ("too large", config_text(lambda t: t + b" " * (5 << 20)), CONFIG),
    ("control character", config_text(lambda t: t.replace(b"q_proj", b"q\x00proj")), CONFIG),
]
