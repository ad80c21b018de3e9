"""Whatever the bytes, a load succeeds or raises one typed refusal of the caller's."""

from __future__ import annotations

import json
import random
import struct
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.artifact.tiny import lora_tensors, tiny_base, write_lora

from loraplex.artifact.fields import APPLIED, INERT, OFF_ONLY
from loraplex.artifact.read_artifact import load_adapter
from loraplex.core.errors import CallerError

BASE = tiny_base()
LEAF = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-2, 70),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(
        [
            "q_proj",
            "v_proj",
            "all-linear",
            ".*",
            "LORA",
            "IA3",
            "none",
            "all",
            "F32",
            "BF16",
            "(",
            "[",
            "layers",
        ]
    ),
)
VALUE = st.recursive(
    LEAF,
    lambda v: st.one_of(st.lists(v, max_size=4), st.dictionaries(st.text(max_size=8), v, max_size=3)),
    max_leaves=8,
)
FIELDS = sorted({*APPLIED["LORA"], *APPLIED["IA3"], *INERT, *OFF_ONLY})
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.one_of(st.sampled_from(["F32", "F16", "BF16", "F64", "U8"]), VALUE),
        "shape": st.one_of(st.lists(st.integers(-1, 64), max_size=3), VALUE),
        "data_offsets": st.one_of(st.lists(st.integers(-1, 20_000), max_size=3), VALUE),
        "extra": VALUE,
    },
)
NAMES = sorted(lora_tensors())
BOUNDED = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def outcome(folder: Path) -> None:
    try:
        artifact = load_adapter(folder, BASE)
    except CallerError as error:
        str(error).encode("utf-8")
        code = error.code.value
    else:
        code = "adapter_loaded"
        assert artifact.tensors_applied == artifact.tensors_total > 0
    assert code.startswith("adapter_")


def folder_with(directory: str) -> Path:
    return write_lora(Path(directory))


@BOUNDED
@given(st.dictionaries(st.sampled_from(FIELDS), VALUE, min_size=1, max_size=4))
def test_any_configuration_fields(changes: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        folder = folder_with(directory)
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        outcome(folder)


@BOUNDED
@given(
    st.dictionaries(
        st.sampled_from([*NAMES, "__metadata__", "x.lora_A.weight"]), ENTRY, min_size=1, max_size=3
    )
)
def test_any_header_entries(changes: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        folder = folder_with(directory)
        path = folder / "adapter_model.safetensors"
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        record = json.loads(raw[8 : 8 + length])
        for name, entry in changes.items():
            record[name] = {**record.get(name, {}), **entry}
        head = json.dumps(record).encode()
        path.write_bytes(struct.pack("<Q", len(head)) + head + raw[8 + length :])
        outcome(folder)


@BOUNDED
@given(st.integers(0, 2**32), st.sampled_from(["adapter_config.json", "adapter_model.safetensors"]))
def test_any_damaged_bytes(seed: int, name: str) -> None:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        folder = folder_with(directory)
        path = folder / name
        data = bytearray(path.read_bytes())
        head = min(len(data), 2200)
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(head)
            kind = rng.randrange(4)
            if kind == 0:
                data[at] = rng.randrange(256)
            elif kind == 1:
                del data[at : at + rng.randint(1, 40)]
            elif kind == 2:
                data[at:at] = rng.choice(
                    [b'"', b"{", b"}", b"[", b",", b"-", b"9", b"\\u0000", b"\x00", b"null"]
                )
            else:
                data[at:at] = data[at : at + rng.randint(1, 60)]
            head = min(len(data), head)
        path.write_bytes(data)
        outcome(folder)


@BOUNDED
@given(st.binary(max_size=400))
def test_any_bytes_at_all(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        folder = folder_with(directory)
        (folder / "adapter_model.safetensors").write_bytes(data)
        outcome(folder)
        (folder / "adapter_config.json").write_bytes(data)
        outcome(folder)
