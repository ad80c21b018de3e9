"""`loraplex bench`: one command for each thing that is measured."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from loraplex.core.errors import CallerError, ErrorCode

bench_app = App(name="bench", help="Measurements beside the peers that are installed.")


@bench_app.command
def decode(
    model: Path | None = None,
    /,
    *,
    adapter: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    device: Literal["cpu", "cuda"] = "cpu",
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    peer: bool = True,
    repeats: int = 3,
    profile: bool = False,
    only: Annotated[tuple[int, ...], Parameter(negative="")] = (),
    json: Path | None = None,
) -> None:
    """Tokens per second of base and adapters.

    On cpu: beside transformers + PEFT in the same run. On cuda without a model: Llama-3.1-8B's shapes with random
    weights and synthetic adapters, every row with its roofline, latencies and host time.

    Parameters
    ----------
    model: folder; on cpu the demo model when left out.
    adapter: NAME=FOLDER, may be repeated.
    device: cpu or cuda.
    profile: on cuda, also where a step's device time goes.
    only: on cuda, numbers of the rows to run, from 0.
    dtype: element type of weights, KV and factors.
    peer: also measure transformers + PEFT.
    repeats: timed runs of each row, after one warm-up.
    json: also write the rows to this file.
    """
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "passive"
    )  # read when torch loads: spinning threads starve each other
    from loraplex.bench.decode import DecodeOptions, as_json, run_decode, table

    if repeats < 1:
        raise CallerError(
            ErrorCode.CONFIG_INVALID, f"repeats must be at least 1, got {repeats}", param="repeats"
        )
    if device == "cuda" and model is None:
        _device_decode(repeats, profile, only, json)
        return
    if profile or only:
        raise CallerError(
            ErrorCode.CONFIG_INVALID,
            "--profile and --only go with --device cuda and no model",
            param="profile",
        )
    if model is None:
        from loraplex.model.gguf import ensure_demo_model

        model = ensure_demo_model()
    options = DecodeOptions(
        model, tuple(_pair(text) for text in adapter), device=device, dtype=dtype, repeats=repeats, peer=peer
    )
    rows = run_decode(options, print)
    head = ("case", "loraplex tok/s", "transformers+PEFT", "ratio", "of our base")
    lines = [head, *table(rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
    if json is not None:
        json.write_text(as_json(options, rows) + "\n", encoding="utf-8")


def _device_decode(repeats: int, profile: bool, only: tuple[int, ...], json: Path | None) -> None:
    from loraplex.bench.engine_decode import device_table, run_device_decode

    record = run_device_decode(repeats, profile, only, print)
    for line in device_table(record):
        print(line)
    if json is not None:
        json.write_text(encode_json(record) + "\n", encoding="utf-8")


@bench_app.command
def step(*, steps: int = 200, json: Path | None = None) -> None:
    """Processor time of one iteration of the control plane, with nothing behind it.

    Parameters
    ----------
    steps: timed decode steps of each row.
    json: also write the rows to this file.
    """
    from loraplex.bench.step import as_json, run_steps

    if steps < 1:
        raise CallerError(ErrorCode.CONFIG_INVALID, f"steps must be at least 1, got {steps}", param="steps")
    rows = run_steps(steps)
    print(f"{'running':>8} {'waiting':>8} {'adapters':>9} {'step ms':>9} {'p99 ms':>8} {'plan ms':>8}")
    for row in rows:
        print(
            f"{row.running:8} {row.waiting:8} {row.adapters:9} {row.step_ms:9.2f} {row.step_p99_ms:8.2f} {row.plan_ms:8.2f}"
        )
    if json is not None:
        json.write_text(as_json(rows, steps) + "\n", encoding="utf-8")


def encode_json(record: object) -> str:
    """A record as indented JSON."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(record), indent=2).decode()


def _pair(text: str) -> tuple[str, Path]:
    name, equals, folder = text.partition("=")
    if not name or not equals or not Path(folder).is_dir():
        raise CallerError(
            ErrorCode.CONFIG_INVALID,
            f"--adapter takes NAME=FOLDER with an existing folder, got {text!r}",
            param="adapter",
        )
    return name, Path(folder)
