"""Malformed weight files: one mutation of header, tensors or folder at a time, with the code it must give."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.artifact.corpus_config import (
    A0,
    B0,
    DTYPE,
    FINITE,
    GONE,
    JSON,
    LARGE,
    LFS_POINTER,
    MALFORMED,
    MISSING,
    OTHER_BASE,
    PICKLE,
    Q0,
    RANK,
    SHAPE,
    SOURCE,
    UNMATCHED,
    UNSUPPORTED,
    WEIGHTS,
    Case,
    Mutation,
)
from tests.artifact.tiny import LAYERS, edit_tensors, lora_tensors

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
        "4x32", None, [4], [4, 32, 1, 2], [-4, -32], [4.0, 32], [True, 128], [4, "32"], [10**9, 10**9],
        [2**63, 2], [0, 32], [],
    )),
    *((f"offsets {v!r}", entry("data_offsets", v), MALFORMED) for v in (
        None, [], [0], [0, 512, 1024], ["0", "512"], [-512, 0], [0.0, 512.0], [2**64, 2**64 + 512],
        {"begin": 0},
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
    ("more dimensions than numpy has", entry("shape", [4, 32] + [1] * 63), MALFORMED),
    ("a dimension beyond any file", entry("shape", [0, 10**60]), MALFORMED),
    ("a name of control characters", header(lambda record: record.update({"\n\x1b[2J": record.pop(A0)})),
    MALFORMED),
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
    ("duplicate tensor", raw(lambda t: t.replace(b"layers.1.self_attn.q_proj.lora_A",
    b"layers.0.self_attn.q_proj.lora_A")), MALFORMED),
    ("a Git LFS pointer", raw(lambda _: LFS_POINTER), MALFORMED),
    ("an HTML page", raw(lambda _: b"\n<!DOCTYPE html><html>Sign in</html>"), MALFORMED),
    ("GGUF", raw(lambda _: b"GGUF" + bytes(100)), MALFORMED),
    ("zip archive", raw(lambda _: b"PK\x03\x04" + bytes(100)), PICKLE),
    *((f"pickle protocol {p}", raw(lambda _, p=p: pickle.dumps({"a": [1] * 40}, protocol=p)),
    PICKLE) for p in (2, 3, 4, 5)),
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
    ("left over, of a known form", put("base_model.model.model.norm.lora_A.weight", torch.zeros(4, 32)),
    UNMATCHED),
    ("A and B of a module not targeted", put(f"{Q0.replace('q_proj', 'k_proj')}.lora_A.weight", torch.zeros(4,
    32)), UNMATCHED),
    ("unknown module", rename(A0, A0.replace("q_proj", "w_proj")), UNMATCHED),
    ("layer beyond the base", rename(A0, A0.replace("layers.0", f"layers.{LAYERS}")), OTHER_BASE),
    ("layer far beyond the base", rename(A0, A0.replace("layers.0", "layers." + "9" * 40)), OTHER_BASE),
    ("prefix of another wrapper", rename(A0, A0.replace("base_model.model.", "module.")), UNMATCHED),
    ("two adapters in one file", tensors(lambda t: t.update({A0.replace("lora_A", "lora_A.x"): t.pop(A0),
    B0.replace("lora_B", "lora_B.y"): t.pop(B0)})), UNMATCHED),
    ("the same factor twice", put(A0.removeprefix("base_model.model."), torch.zeros(4, 32)), UNMATCHED),
    ("a magnitude without DoRA", put(f"{Q0}.lora_magnitude_vector", torch.ones(32)), UNMATCHED),
    ("a bias of B without lora_bias", put(f"{Q0}.lora_B.bias", torch.ones(32)), UNMATCHED),
    ("a base bias without bias mode", put(f"{Q0}.base_layer.bias", torch.ones(32)), UNMATCHED),
    ("an IA3 vector", put(f"{Q0}.ia3_l", torch.ones(32, 1)), UNMATCHED),
    ("embedding factors on a linear", put(f"{Q0}.lora_embedding_A", torch.ones(4, 32)), UNMATCHED),
    ("base weights of a linear", put(f"{Q0}.base_layer.weight", torch.ones(32, 32)), UNMATCHED),
    ("carried weights without a base", put("base_model.model.lm_head.base_layer.weight", torch.ones(64, 32)),
    UNSUPPORTED),
    ("carried weights of a wrong shape", put("base_model.model.lm_head.base_layer.weight", torch.ones(65,
    32)), SHAPE),
    ("a whole head without a base", put("base_model.model.lm_head.weight", torch.ones(64, 32)), UNSUPPORTED),
    ("a whole embedding of a larger vocabulary", put("base_model.model.model.embed_tokens.weight",
    torch.ones(66, 32)), SHAPE),
    ("a whole linear", put(f"{Q0}.weight", torch.ones(32, 32)), UNMATCHED),
    ("a whole norm", put("base_model.model.model.norm.weight", torch.ones(32)), UNMATCHED),
    ("saved by modules_to_save", put("base_model.model.lm_head.modules_to_save.weight", torch.ones(64, 32)),
    UNMATCHED),
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
    ("all for a wider base", every(lambda t: t.repeat(1, 2) if t.shape[0] == 4 else t.repeat(2, 1)),
    OTHER_BASE),
    *((f"{value} in {dtype}", poison(value, dtype), FINITE)
      for value in (float("nan"), float("inf"), -float("inf")) for dtype in (torch.float32, torch.float16,
      torch.bfloat16)),
    *((f"{dtype}", tensors(lambda t, d=dtype: t.update({A0: t[A0].to(d)})), DTYPE)
      for dtype in (torch.float64, torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool,
      torch.float8_e4m3fn)),
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
    ("index map a list", shards(lambda _: None, lambda f: (f / INDEX).write_text('{"weight_map": [1]}')),
    MALFORMED),
    ("index map empty", shards(lambda m: m.clear()), MALFORMED),
    ("index lacks a tensor", shards(lambda m: m.pop(A0)), MALFORMED),
    ("index has one more", shards(lambda m: m.update(extra=SECOND)), MALFORMED),
    ("index names another shard", shards(lambda m: m.update({A0: SECOND})), MALFORMED),
    ("index leaves the folder", shards(lambda m: m.update({A0: "../x.safetensors"})), MALFORMED),
    ("index names an absolute file", shards(lambda m: m.update({A0: "/x.safetensors"})), MALFORMED),
    ("index names many files", shards(lambda m: m.update({f"t{i}": f"{i}.safetensors" for i in range(129)})),
    LARGE),
    ("index a Git LFS pointer", shards(lambda _: None, lambda f: (f / INDEX).write_bytes(LFS_POINTER)),
    MALFORMED),
    ("index names a pickle", shards(lambda m: m.update({A0: "x.bin"})), MALFORMED),
    ("index holds a number", shards(lambda m: m.update({A0: 7})), MALFORMED),
    ("index names a shard that is not there", shards(lambda m: m.update({A0: "x.safetensors"})), SOURCE),
    ("shard missing", shards(lambda _: None, remove(SECOND)), SOURCE),
    ("tensor in two shards", shards(lambda _: None,
    lambda f: save_file(load_file(f / SECOND) | {A0: torch.zeros(4, 32)}, f / SECOND)), MALFORMED),
]  # fmt: skip
