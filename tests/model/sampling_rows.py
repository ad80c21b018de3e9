"""Rows that a sampler opens: from keywords, and random ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from loraplex.core.packed import float_bits
from loraplex.core.plan import BiasColumns, OpenColumns

CPU = torch.device("cpu")
DEFAULTS: dict[str, Any] = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition": 1.0, "presence": 0.0,
    "frequency": 0.0,
    "seed_low": 0, "seed_high": 0, "incarnation": 1, "sampled_ids": 0,
}  # fmt: skip
FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")


def open_rows(*rows: dict[str, Any]) -> tuple[OpenColumns, BiasColumns, np.ndarray]:
    """The plan's three open sections from keyword rows; `prompt`, `output` and `bias` are lists."""
    out, biases, history = [], [], []
    for slot, row in enumerate(rows):
        full = {**DEFAULTS, "slot": slot, **row}
        prompt, output, bias = full.get("prompt", []), full.get("output", []), full.get("bias", [])
        full |= {
            "kv_start": 0,
            "prompt_tokens": len(prompt),
            "bias": len(bias),
            "history": len(prompt) + len(output),
        }
        for name in FLOATS:
            full[name] = int(float_bits([full[name]])[0])
        out.append(
            OpenColumns.filled(
                1, **{name: value for name, value in full.items() if name not in ("prompt", "output")}
            )
        )
        biases += bias
        history += prompt + output
    return (
        OpenColumns.joined(out) if out else OpenColumns.none(),
        BiasColumns.filled(
            len(biases), token=[token for token, _ in biases], bias=float_bits([value for _, value in biases])
        ),
        np.array(history, dtype=np.int32),
    )


def arange(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.int32)


def random_row(rng: np.random.Generator, vocab: int) -> dict[str, Any]:
    def maybe(value: Any, off: Any) -> Any:
        return value if rng.random() < 0.5 else off

    return {
        "temperature": float(rng.choice([0.1, 0.7, 1.0, 1.0, 1.7, 30.0])),
        "top_p": maybe(float(rng.choice([1e-6, 0.1, 0.5, 0.9, 0.95, 0.999, 0.999999])), 1.0),
        "top_k": maybe(int(rng.choice([1, 2, 5, 50, vocab - 1, vocab, 10 * vocab])), 0),
        "min_p": maybe(float(rng.choice([1e-4, 0.05, 0.5, 1.0])), 0.0),
        "repetition": maybe(1.2, 1.0),
        "presence": maybe(-0.7, 0.0),
        "frequency": maybe(0.3, 0.0),
        "seed_low": int(rng.integers(-(2**31), 2**31)),
        "seed_high": int(rng.integers(-(2**31), 2**31)),
        "prompt": rng.integers(0, vocab, 5).tolist(),
        "output": rng.integers(0, vocab, 9).tolist(),
        "bias": [(int(rng.integers(vocab)), 2.0)],
    }
