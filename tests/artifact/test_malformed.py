"""One thing wrong at a time: each mutation of a valid adapter is refused with the code of the invariant it breaks."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.artifact.tiny import LAYERS, edit_config, edit_tensors, lora_tensors, tiny_base, write_lora

from loraplex.artifact.base import BaseModules
from loraplex.artifact.load import load_adapter
from loraplex.core.errors import CallerError, ErrorCode

CONFIG, UNSUPPORTED = ErrorCode.ADAPTER_CONFIG_INVALID, ErrorCode.ADAPTER_UNSUPPORTED
MALFORMED, PICKLE = ErrorCode.ADAPTER_FILE_MALFORMED, ErrorCode.ADAPTER_FILE_PICKLE
UNMATCHED, MISSING = ErrorCode.ADAPTER_TENSOR_UNMATCHED, ErrorCode.ADAPTER_TENSOR_MISSING
SHAPE, RANK, LIMIT = (
    ErrorCode.ADAPTER_SHAPE_MISMATCH, ErrorCode.ADAPTER_RANK_MISMATCH, ErrorCode.ADAPTER_RANK_LIMIT
)  # fmt: skip
FINITE, DTYPE, OTHER_BASE = (
    ErrorCode.ADAPTER_NOT_FINITE, ErrorCode.ADAPTER_DTYPE_UNSUPPORTED, ErrorCode.ADAPTER_BASE_MISMATCH
)  # fmt: skip
SOURCE, LARGE = ErrorCode.ADAPTER_SOURCE_MISSING, ErrorCode.ADAPTER_TOO_LARGE

WEIGHTS, JSON = "adapter_model.safetensors", "adapter_config.json"
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
A0, B0 = f"{Q0}.lora_A.weight", f"{Q0}.lora_B.weight"
Mutation = Callable[[Path], None]
Case = tuple[str, Mutation, ErrorCode]
GONE = object()


def refusal(folder: Path, base: BaseModules | None = None) -> CallerError:
    with pytest.raises(CallerError) as caught:
        load_adapter(folder, base or tiny_base())
    return caught.value


# Configuration fields


def field(name: str, value: Any) -> Mutation:
    def mutate(folder: Path) -> None:
        edit_config(folder, lambda c: {k: v for k, v in {**c, name: value}.items() if v is not GONE})

    return mutate


def config_cases() -> list[Case]:
    values: list[tuple[str, Any, ErrorCode]] = [
        ("peft_type", GONE, CONFIG), ("peft_type", 1, CONFIG), ("peft_type", None, CONFIG),
        *(("peft_type", kind, UNSUPPORTED) for kind in ("ADALORA", "LOHA", "PREFIX_TUNING", "lora", "", "VERA")),
        ("r", GONE, CONFIG), *(("r", v, CONFIG) for v in ("4", 4.0, None, True, [4], {})),
        *(("r", v, LIMIT) for v in (0, -1, 513, 10**30)),
        ("r", 5, RANK), ("r", 2, RANK),
        ("lora_alpha", GONE, CONFIG),
        *(("lora_alpha", v, CONFIG) for v in ("8", None, True, [8], 0, -1, 0.0, -0.5, 1e9, 10**40, 1e300)),
        *(("rank_pattern", v, CONFIG) for v in ([], "q_proj", 4, {"q_proj": "4"}, {"q_proj": 4.0}, {"q_proj": None})),
        ("rank_pattern", {"q_proj": 0}, LIMIT), ("rank_pattern", {"q_proj": 1024}, LIMIT),
        ("rank_pattern", {"q_proj": 3}, RANK), ("rank_pattern", {"(": 4}, CONFIG), ("rank_pattern", {"(?i)q": 4}, CONFIG),
        *(("alpha_pattern", v, CONFIG) for v in ([1], "q", {"q_proj": "1"}, {"q_proj": 0}, {"q_proj": None}, {"[": 1})),
        *(("use_rslora", v, CONFIG) for v in (1, "true", None, [])),
        *(("use_dora", v, CONFIG) for v in (1, "true", None)), ("use_dora", True, MISSING),
        *(("lora_bias", v, CONFIG) for v in (1, "none", None)), ("lora_bias", True, MISSING),
        *(("bias", v, CONFIG) for v in ("some", True, None, 1, "ALL")),
        ("target_modules", GONE, CONFIG), *(("target_modules", v, CONFIG) for v in (None, [], 7, {}, [1], [""], ["q_proj", None])),
        *(("target_modules", v, CONFIG) for v in ("(", "[a-", "*", "(?P<x", r"(q)_proj\1", "(?i).*q_proj", "a{2,1}", "nothing", "x" * 20_000)),
        ("target_modules", ["c_attn"], CONFIG), ("target_modules", ["q_proj"], UNMATCHED),
        ("target_modules", ["q_proj", "v_proj", "k_proj"], MISSING), ("target_modules", "all-linear", MISSING),
        ("target_modules", [*(["q_proj", "v_proj"] * 40_000)], CONFIG),
        *(("exclude_modules", v, CONFIG) for v in (7, [1], [""], "(", {"a": 1})),
        ("exclude_modules", ["v_proj"], UNMATCHED), ("exclude_modules", r".*layers\.0.*", UNMATCHED),
        *(("layers_to_transform", v, CONFIG) for v in ("0", -1, [-1], [0, "1"], True, 1.0, {"a": 0})),
        ("layers_to_transform", [0], UNMATCHED), ("layers_to_transform", 99, CONFIG),
        ("layers_pattern", "layers", CONFIG), ("layers_pattern", 7, CONFIG), ("layers_pattern", [7], CONFIG),
        ("layers_pattern", "lay(er|ers)", UNSUPPORTED),
        *(("alora_invocation_tokens", v, CONFIG) for v in ([], "tok", 5, [1.0], [-1], [True], [64], [1, 2, 10**12], {})),
        *(("lora_dropout", v, CONFIG) for v in ("0.1", -0.1, 1.5, True, [])),
        *(("init_lora_weights", v, UNSUPPORTED) for v in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "OLoRA", "new")),
        *(("init_lora_weights", v, CONFIG) for v in (1, [], {})),
        ("modules_to_save", ["lm_head"], UNSUPPORTED), ("modules_to_save", "lm_head", UNSUPPORTED),
        ("trainable_token_indices", [1], UNSUPPORTED), ("layer_replication", [[0, 2]], UNSUPPORTED),
        ("target_parameters", ["experts.w"], UNSUPPORTED), ("use_qalora", True, UNSUPPORTED), ("use_bdlora", {"a": 1}, UNSUPPORTED),
        ("arrow_config", {"a": 1}, UNSUPPORTED), ("kasa_config", {"beta": 1}, UNSUPPORTED), ("velora_config", {"a": 1}, UNSUPPORTED),
        ("monteclora_config", {"a": 1}, UNSUPPORTED), ("megatron_config", {"a": 1}, UNSUPPORTED), ("ensure_weight_tying", True, UNSUPPORTED),
        ("use_something_new", True, UNSUPPORTED), ("scale_multiplier", 2, UNSUPPORTED), ("lora_alpah", 16, UNSUPPORTED),
        ("task_type", 7, CONFIG), ("base_model_name_or_path", 7, CONFIG), ("inference_mode", "yes", CONFIG),
        ("fan_in_fan_out", 1, CONFIG), ("auto_mapping", [], CONFIG), ("revision", {}, CONFIG), ("peft_version", 0.21, CONFIG),
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
    ("ia3 of lora files", two_fields(peft_type="IA3", feedforward_modules=[], r=None, lora_alpha=None, bias=None), UNMATCHED),
    ("ia3 with a rank", two_fields(peft_type="IA3", feedforward_modules=[]), UNSUPPORTED),
    ("ia3 feedforward outside", two_fields(peft_type="IA3", feedforward_modules=["x"], r=None, lora_alpha=None, bias=None), CONFIG),
    ("ia3 without feedforward", two_fields(peft_type="IA3", r=None, lora_alpha=None, bias=None), CONFIG),
    ("embedding with alora", two_fields(target_modules=["embed_tokens"], alora_invocation_tokens=[1]), UNMATCHED),
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
    ("half a surrogate", config_text(lambda t: t.replace(b'"q_proj"', b'"\\ud800"')), CONFIG),
    ("byte-order mark", config_text(lambda t: b"\xef\xbb\xbf" + t), CONFIG),
    ("too large", config_text(lambda t: t + b" " * (5 << 20)), CONFIG),
    ("control character", config_text(lambda t: t.replace(b"q_proj", b"q\x00proj")), CONFIG),
]


# Weight file: header and coverage


def header(change: Callable[[dict[str, Any]], Any]) -> Mutation:
    """Change the decoded header; the data stays as it is."""

    def mutate(folder: Path) -> None:
        head, data = split(folder)
        record = json.loads(head)
        changed = change(record)
        join(folder, json.dumps(record if changed is None else changed).encode(), data)

    return mutate


def split(folder: Path) -> tuple[bytes, bytes]:
    raw = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return raw[8 : 8 + length], raw[8 + length :]


def join(folder: Path, head: bytes, data: bytes) -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(head)) + head + data)


def raw(change: Callable[[bytes], bytes]) -> Mutation:
    def mutate(folder: Path) -> None:
        path = folder / WEIGHTS
        path.write_bytes(change(path.read_bytes()))

    return mutate


def entry(name: str, value: Any) -> Mutation:
    """Set (or drop) one member of the first factor's header entry."""

    def change(record: dict[str, Any]) -> None:
        record[A0][name] = value
        if value is GONE:
            del record[A0][name]

    return header(change)


def shift(begin: int, end: int) -> Mutation:
    def change(record: dict[str, Any]) -> None:
        offsets = record[A0]["data_offsets"]
        record[A0]["data_offsets"] = [offsets[0] + begin, offsets[1] + end]

    return header(change)


def swap_offsets(record: dict[str, Any]) -> None:
    record[A0]["data_offsets"] = record[A0]["data_offsets"][::-1]


def same_place(record: dict[str, Any]) -> None:
    record[f"{Q0.replace('.0.', '.1.')}.lora_A.weight"]["data_offsets"] = record[A0]["data_offsets"]


def cut_header(text: bytes) -> bytes:
    return struct.pack("<Q", 1 << 40) + text[8:]


HEADERS: list[Case] = [
    *((f"dtype {v!r}", entry("dtype", v), MALFORMED) for v in ("F31", "", 32, None, ["F32"])),
    *((f"dtype {v}", entry("dtype", v), DTYPE) for v in ("I32", "U32")),
    ("dtype F64", entry("dtype", "F64"), MALFORMED),
    ("dtype F16", entry("dtype", "F16"), MALFORMED),
    *((f"shape {v!r}", entry("shape", v), MALFORMED) for v in (
        "4x32", None, [4], [4, 32, 1, 2], [-4, -32], [4.0, 32], [True, 128], [4, "32"], [10**9, 10**9], [2**63, 2], [0, 32], [],
    )),
    *((f"offsets {v!r}", entry("data_offsets", v), MALFORMED) for v in (
        None, [], [0], [0, 512, 1024], ["0", "512"], [-512, 0], [0.0, 512.0], [2**64, 2**64 + 512], {"begin": 0},
    )),
    *((f"no {name}", entry(name, GONE), MALFORMED) for name in ("dtype", "shape", "data_offsets")),
    ("extra member", entry("stride", [1]), MALFORMED),
    ("offsets swapped", header(swap_offsets), MALFORMED),
    ("offsets shifted up", shift(4, 4), MALFORMED),
    ("offsets too long", shift(0, 4), MALFORMED),
    ("offsets too short", shift(0, -4), MALFORMED),
    ("overlap", header(same_place), MALFORMED),
    ("gap", header(lambda record: record.pop(A0) and None), MALFORMED),
    ("long tensor name", header(lambda record: record.update({"x" * 2000: record.pop(A0)})), MALFORMED),
    ("absurd number of dimensions", entry("shape", [1] * 100_000), MALFORMED),
    ("no tensor", header(lambda _: {}), MALFORMED),
    ("metadata only", header(lambda _: {"__metadata__": {"format": "pt"}}), MALFORMED),
    ("metadata a list", header(lambda record: record.update(__metadata__=[])), MALFORMED),
    ("metadata of numbers", header(lambda record: record.update(__metadata__={"a": 1})), MALFORMED),
    ("entry a list", header(lambda record: record.update({A0: [1, 2]})), MALFORMED),
    ("entry null", header(lambda record: record.update({A0: None})), MALFORMED),
    ("header a list", header(lambda record: [record]), MALFORMED),
    ("header null", header(lambda _: "null"), MALFORMED),
    ("trailing byte", raw(lambda t: t + b"\0"), MALFORMED),
    ("last byte missing", raw(lambda t: t[:-1]), MALFORMED),
    ("data missing", raw(lambda t: t[: 8 + struct.unpack("<Q", t[:8])[0]]), MALFORMED),
    ("header cut", raw(lambda t: t[:40]), MALFORMED),
    ("length only", raw(lambda t: t[:8]), MALFORMED),
    ("length cut", raw(lambda t: t[:5]), MALFORMED),
    ("empty file", raw(lambda _: b""), MALFORMED),
    ("length 0", raw(lambda t: bytes(8) + t[8:]), MALFORMED),
    ("length huge", raw(cut_header), MALFORMED),
    ("length 2^64 - 1", raw(lambda t: b"\xff" * 8 + t[8:]), MALFORMED),
    ("header not JSON", raw(lambda t: t[:8] + b"{" * 20 + t[28:]), MALFORMED),
    ("header starts with space", raw(lambda t: t[:8] + b" " + t[9:]), MALFORMED),
    ("header not UTF-8", raw(lambda t: t.replace(b"q_proj", b"q\xffproj", 1)), MALFORMED),
    ("duplicate tensor", raw(lambda t: t.replace(b"layers.1.self_attn.q_proj.lora_A", b"layers.0.self_attn.q_proj.lora_A")), MALFORMED),
    ("GGUF", raw(lambda _: b"GGUF" + bytes(100)), MALFORMED),
    ("zip archive", raw(lambda _: b"PK\x03\x04" + bytes(100)), PICKLE),
    *((f"pickle protocol {p}", raw(lambda _, p=p: pickle.dumps({"a": [1] * 40}, protocol=p)), PICKLE) for p in (2, 3, 4, 5)),
]  # fmt: skip


# Tensors


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Mutation:
    def mutate(folder: Path) -> None:
        def edit(record: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            change(record)
            return record

        edit_tensors(folder, edit)

    return mutate


def put(name: str, value: torch.Tensor) -> Mutation:
    return tensors(lambda t: t.update({name: value}))


def drop(name: str) -> Mutation:
    return tensors(lambda t: t.pop(name))


def rename(name: str, other: str) -> Mutation:
    return tensors(lambda t: t.update({other: t.pop(name)}))


def poison(value: float, dtype: torch.dtype = torch.float32) -> Mutation:
    def change(record: dict[str, torch.Tensor]) -> None:
        record[A0] = record[A0].to(dtype)
        record[A0][-1, -1] = value

    return tensors(change)


def every(change: Callable[[torch.Tensor], torch.Tensor]) -> Mutation:
    return tensors(lambda t: t.update({name: change(value) for name, value in t.items()}))


TENSORS: list[Case] = [
    ("A missing", drop(A0), MISSING),
    ("B missing", drop(B0), MISSING),
    ("left over", put("extra", torch.zeros(2)), UNMATCHED),
    ("left over, of a known form", put("base_model.model.model.norm.lora_A.weight", torch.zeros(4, 32)), UNMATCHED),
    ("A and B of a module not targeted", put(f"{Q0.replace('q_proj', 'k_proj')}.lora_A.weight", torch.zeros(4, 32)), UNMATCHED),
    ("unknown module", rename(A0, A0.replace("q_proj", "w_proj")), UNMATCHED),
    ("layer beyond the base", rename(A0, A0.replace("layers.0", f"layers.{LAYERS}")), OTHER_BASE),
    ("layer far beyond the base", rename(A0, A0.replace("layers.0", "layers." + "9" * 40)), OTHER_BASE),
    ("prefix of another wrapper", rename(A0, A0.replace("base_model.model.", "module.")), UNMATCHED),
    ("two adapters in one file", tensors(lambda t: t.update({A0.replace("lora_A", "lora_A.x"): t.pop(A0), B0.replace("lora_B", "lora_B.y"): t.pop(B0)})), UNMATCHED),
    ("the same factor twice", put(A0.removeprefix("base_model.model."), torch.zeros(4, 32)), UNMATCHED),
    ("a magnitude without DoRA", put(f"{Q0}.lora_magnitude_vector", torch.ones(32)), UNMATCHED),
    ("a bias of B without lora_bias", put(f"{Q0}.lora_B.bias", torch.ones(32)), UNMATCHED),
    ("a base bias without bias mode", put(f"{Q0}.base_layer.bias", torch.ones(32)), UNMATCHED),
    ("an IA3 vector", put(f"{Q0}.ia3_l", torch.ones(32, 1)), UNMATCHED),
    ("embedding factors on a linear", put(f"{Q0}.lora_embedding_A", torch.ones(4, 32)), UNMATCHED),
    ("base weights of a linear", put(f"{Q0}.base_layer.weight", torch.ones(32, 32)), UNMATCHED),
    ("carried weights without a base", put("base_model.model.lm_head.base_layer.weight", torch.ones(64, 32)), UNSUPPORTED),
    ("carried weights of a wrong shape", put("base_model.model.lm_head.base_layer.weight", torch.ones(65, 32)), SHAPE),
    ("whole module saved", put("base_model.model.lm_head.weight", torch.ones(64, 32)), UNMATCHED),
    ("saved by modules_to_save", put("base_model.model.lm_head.modules_to_save.weight", torch.ones(64, 32)), UNMATCHED),
    ("A too wide", put(A0, torch.zeros(4, 33)), SHAPE),
    ("A transposed", put(A0, torch.zeros(32, 4)), SHAPE),
    ("B too long", put(B0, torch.zeros(33, 4)), SHAPE),
    ("B transposed", put(B0, torch.zeros(4, 32)), SHAPE),
    ("A of one dimension", put(A0, torch.zeros(128)), SHAPE),
    ("B of one dimension", put(B0, torch.zeros(128)), SHAPE),
    ("A of three dimensions", put(A0, torch.zeros(4, 32, 1)), SHAPE),
    ("A a scalar", put(A0, torch.tensor(1.0)), SHAPE),
    ("A empty", put(A0, torch.zeros(0, 32)), SHAPE),
    ("A of no columns", put(A0, torch.zeros(4, 0)), SHAPE),
    ("B empty", put(B0, torch.zeros(0)), SHAPE),
    ("A of another rank", put(A0, torch.zeros(5, 32)), RANK),
    ("B of another rank", put(B0, torch.zeros(32, 3)), RANK),
    ("all of another rank", tensors(lambda t: t.update(lora_tensors(rank=8))), RANK),
    ("all for a wider base", every(lambda t: t.repeat(1, 2) if t.shape[0] == 4 else t.repeat(2, 1)), OTHER_BASE),
    *((f"{value} in {dtype}", poison(value, dtype), FINITE)
      for value in (float("nan"), float("inf"), -float("inf")) for dtype in (torch.float32, torch.float16, torch.bfloat16)),
    *((f"{dtype}", tensors(lambda t, d=dtype: t.update({A0: t[A0].to(d)})), DTYPE)
      for dtype in (torch.float64, torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn)),
]  # fmt: skip


# Files


def replace_with(name: str, make: Callable[[Path], Any]) -> Mutation:
    def mutate(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return mutate


def remove(name: str) -> Mutation:
    return lambda folder: (folder / name).unlink()


def only(name: str) -> Mutation:
    """The weights exist only under another name."""
    return lambda folder: (folder / WEIGHTS).rename(folder / name)


def shards(
    change: Callable[[dict[str, str]], Any], damage: Callable[[Path], Any] = lambda _: None
) -> Mutation:
    """Split the weights in two shards with an index, then change the index's map or the folder."""

    def mutate(folder: Path) -> None:
        write_shards(folder, change)
        damage(folder)

    return mutate


def write_shards(folder: Path, change: Callable[[dict[str, str]], Any] = lambda _: None) -> None:
    record = load_file(folder / WEIGHTS)
    names = sorted(record)
    weight_map: dict[str, Any] = {}
    for index, part in enumerate((names[:5], names[5:]), 1):
        file = f"adapter_model-{index:05}-of-00002.safetensors"
        save_file({name: record[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    change(weight_map)
    (folder / WEIGHTS).unlink()
    index_record = {"metadata": {}, "weight_map": weight_map}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index_record))


SECOND = "adapter_model-00002-of-00002.safetensors"
INDEX = f"{WEIGHTS}.index.json"
FILES: list[Case] = [
    ("no configuration", remove(JSON), SOURCE),
    ("no weights", remove(WEIGHTS), SOURCE),
    ("bin instead", only("adapter_model.bin"), PICKLE),
    ("pt instead", only("adapter_model.pt"), PICKLE),
    ("weights a folder", replace_with(WEIGHTS, lambda p: p.mkdir()), MALFORMED),
    ("weights a pipe", replace_with(WEIGHTS, os.mkfifo), MALFORMED),
    ("weights a device", replace_with(WEIGHTS, lambda p: p.symlink_to("/dev/zero")), MALFORMED),
    ("configuration a pipe", replace_with(JSON, os.mkfifo), MALFORMED),
    ("weights a dead link", replace_with(WEIGHTS, lambda p: p.symlink_to("nowhere")), SOURCE),
    ("single and sharded", lambda f: (f / INDEX).write_text("{}") and None, MALFORMED),
    ("index not JSON", shards(lambda _: None, lambda f: (f / INDEX).write_text("{")), MALFORMED),
    ("index without map", shards(lambda _: None, lambda f: (f / INDEX).write_text("{}")), MALFORMED),
    ("index map a list", shards(lambda _: None, lambda f: (f / INDEX).write_text('{"weight_map": [1]}')), MALFORMED),
    ("index map empty", shards(lambda m: m.clear()), MALFORMED),
    ("index lacks a tensor", shards(lambda m: m.pop(A0)), MALFORMED),
    ("index has one more", shards(lambda m: m.update(extra=SECOND)), MALFORMED),
    ("index names another shard", shards(lambda m: m.update({A0: SECOND})), MALFORMED),
    ("index leaves the folder", shards(lambda m: m.update({A0: "../x.safetensors"})), MALFORMED),
    ("index names an absolute file", shards(lambda m: m.update({A0: "/x.safetensors"})), MALFORMED),
    ("index names a pickle", shards(lambda m: m.update({A0: "x.bin"})), MALFORMED),
    ("index holds a number", shards(lambda m: m.update({A0: 7})), MALFORMED),
    ("index names a shard that is not there", shards(lambda m: m.update({A0: "x.safetensors"})), SOURCE),
    ("shard missing", shards(lambda _: None, remove(SECOND)), SOURCE),
    ("tensor in two shards", shards(lambda _: None, lambda f: save_file(load_file(f / SECOND) | {A0: torch.zeros(4, 32)}, f / SECOND)), MALFORMED),
]  # fmt: skip

CASES = [
    (group, *case)
    for group, cases in (
        ("config", config_cases()), ("pair", COMBINATIONS), ("text", TEXTS), ("header", HEADERS), ("tensor", TENSORS),
        ("file", FILES),
    )
    for case in cases
]  # fmt: skip


@pytest.mark.parametrize(("group", "name", "mutate", "code"), CASES, ids=[f"{c[0]}: {c[1]}" for c in CASES])
def test_refused_with_its_code(
    tmp_path: Path, group: str, name: str, mutate: Mutation, code: ErrorCode
) -> None:
    folder = write_lora(tmp_path / "adapter")
    assert load_adapter(folder, tiny_base()).tensors_applied == 4 * LAYERS
    mutate(folder)
    error = refusal(folder)
    assert error.code is code, str(error)
    assert error.message
    assert len(error.message) < 600
    assert str(tmp_path) not in error.message


def test_the_corpus_is_large_enough() -> None:
    assert len(CASES) >= 150
    assert len({(c[0], c[1]) for c in CASES}) == len(CASES)


def test_a_path_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    (tmp_path / "weights.txt").write_bytes(b"x")
    assert refusal(tmp_path / "weights.bin").code is PICKLE
    assert refusal(tmp_path / "weights.txt").code is SOURCE
    assert refusal(tmp_path / "nowhere").code is SOURCE
    assert refusal(tmp_path / "nul\0byte").code is SOURCE


def test_size_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_lora(tmp_path)
    monkeypatch.setattr("loraplex.artifact.safetensors_file.MAX_ADAPTER_TENSORS", 11)
    assert refusal(folder).code is LARGE
    monkeypatch.undo()
    monkeypatch.setattr("loraplex.artifact.safetensors_file.MAX_ADAPTER_BYTES", 100)
    assert refusal(folder).code is LARGE
    monkeypatch.undo()
    monkeypatch.setattr("loraplex.artifact.source.MAX_ADAPTER_BYTES", 100)
    assert refusal(folder).code is LARGE
    monkeypatch.undo()
    monkeypatch.setattr("loraplex.artifact.source.MAX_ADAPTER_TENSORS", 11)
    assert refusal(folder).code is LARGE


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_lora(tmp_path)
    real = os.preadv

    def short(fd: int, buffers: Any, offset: int) -> int:
        return real(fd, buffers, offset) if offset < 4096 else 0

    monkeypatch.setattr(os, "preadv", short)
    assert refusal(folder).code is MALFORMED


def test_shards_load_as_one(tmp_path: Path) -> None:
    folder = write_lora(tmp_path)
    whole = load_adapter(folder, tiny_base())
    write_shards(folder)
    parts = load_adapter(folder, tiny_base())
    digests = [[t.sha256 for m in a.modules for t in m.tensors.values()] for a in (whole, parts)]
    assert digests[0] == digests[1]
    assert parts.tensors_applied == 4 * LAYERS
