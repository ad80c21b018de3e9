"""What refusing a hostile folder costs: processor seconds and memory of each kind, in a process of its own.

Run as `python -m tests.artifact.hostile_costs`. Prints a line for each: name, seconds, MiB, code or `read`.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.artifact.corpus_config import WEIGHTS
from tests.artifact.tiny import TinyTensors, edit_config, tiny_base, write_lora

from loraplex.artifact.read_artifact import load_adapter
from loraplex.core.errors import LoraplexError
from loraplex.core.limits import MAX_SAFETENSORS_HEADER_BYTES, MAX_TOKENIZER_BYTES

Damage = Callable[[Path], object]
ONE: dict[str, Any] = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
EMPTY: dict[str, Any] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
MANY = MAX_SAFETENSORS_HEADER_BYTES // 4 - 16


def weights(header: bytes | dict[str, Any], data: int = 16, hole: int = 0) -> Damage:
    """A weight file of a header, bytes of data, and a hole behind them."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()

    def write(folder: Path) -> None:
        path = folder / WEIGHTS
        path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))
        os.truncate(path, path.stat().st_size + hole)

    return write


def config(**changes: Any) -> Damage:
    return lambda folder: edit_config(folder, lambda record: record | changes)


def file(name: str, data: bytes, size: int | None = None) -> Damage:
    def write(folder: Path) -> None:
        (folder / name).write_bytes(data)
        os.truncate(folder / name, len(data) if size is None else size)

    return write


def damages() -> Iterator[tuple[str, Damage]]:
    yield "a shape of a million dimensions", weights({"a": {**ONE, "shape": [1] * 1_000_000}})
    yield "negative offsets", weights({"a": {**ONE, "data_offsets": [-16, 0]}})
    yield "two tensors in one place", weights({"a": ONE, "b": ONE})
    yield "a header of lists", weights(b'{"a":[' + b"[]," * MANY + b"[]]}")
    yield "a header of numbers", weights(b'{"a":[' + b"0.5," * MANY + b"1]}")
    yield "a header of depth", weights(b'{"a":' + b"[" * MANY)
    yield "a name of 8 MB", weights({"a" * (MAX_SAFETENSORS_HEADER_BYTES - 100): ONE})
    yield "100,000 tensors", weights({f"t{index}": EMPTY for index in range(100_000)}, 0)
    long = {**ONE, "shape": [1 << 29], "data_offsets": [0, 1 << 31]}
    yield "a sparse file of 2 GiB", weights({"a": long}, 0, 1 << 31)
    yield "a sparse configuration of 8 GiB", file("adapter_config.json", b"{}", 1 << 33)
    yield "a configuration of depth", file("adapter_config.json", b'{"x":' + b"[" * 2_000_000)
    yield "60,000 ranks", config(rank_pattern={f"q{index}": 4 for index in range(60_000)})
    patterns = {".*" * 400 + str(index): 4 for index in range(4_096)}
    yield "4,096 patterns of 800 characters", config(alpha_pattern=patterns)
    yield "a pattern that backtracks", config(target_modules="(a+)+$")
    yield "a pattern of 16,000 characters", config(target_modules=".*" * 8_000)
    yield (
        "a tokenizer of lists",
        file("tokenizer.json", b'{"a":[' + b"[]," * (MAX_TOKENIZER_BYTES // 4) + b"[]]}"),
    )
    yield (
        "a tokenizer of 400,000 added tokens",
        file(
            "tokenizer.json",
            json.dumps({"added_tokens": [{"id": i, "content": f"t{i}"} for i in range(400_000)]}).encode(),
        ),
    )
    yield "a configuration of lists", file("tokenizer_config.json", b'{"a":[' + b"[]," * 1_000_000 + b"[]]}")


def measure(name: str, folder: Path) -> None:
    """Read the folder and print what that took."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        load_adapter(folder, tiny_base(), TinyTensors())
        outcome = "read"
    except LoraplexError as error:
        outcome = error.code.value
    took = time.process_time() - began
    mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{name:40} {took:6.2f} s {mib:6.0f} MiB  {outcome}", flush=True)


def main() -> int:
    with tempfile.TemporaryDirectory() as root:
        for index, (name, damage) in enumerate(damages()):
            folder = write_lora(Path(root) / str(index))
            damage(folder)
            child = os.fork()
            if not child:
                measure(name, folder)
                os._exit(0)
            os.waitpid(child, 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
