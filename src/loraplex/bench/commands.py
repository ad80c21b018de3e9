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
    json: Path | None = None,
) -> None:
    """Tokens per second of base and adapters, beside transformers + PEFT in the same run.

    Parameters
    ----------
    model: folder; the demo model when left out.
    adapter: NAME=FOLDER, may be repeated.
    device: cpu or cuda.
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


@bench_app.command
def load(
    model: Path | None = None,
    /,
    *,
    device: Literal["cpu", "cuda"] = "cpu",
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    ranks: tuple[int, ...] = (8, 16, 64),
    repeats: int = 5,
    cold: int = 100,
    running: int = 8,
    pool_gb: float = 2.0,
    load_format: Literal["auto", "dummy"] = "auto",
    json: Path | None = None,
) -> None:
    """Cost of a cold adapter by tier, rank and stage, and time between tokens while many load.

    Parameters
    ----------
    model: folder; the demo model when left out.
    device: cpu or cuda.
    dtype: element type of weights, KV and factors.
    ranks: ranks of the adapters.
    repeats: timed loads of each row.
    cold: adapters that load while requests run.
    running: requests that run meanwhile.
    pool_gb: page pool, in GiB; it must hold all cold adapters at once.
    load_format: dummy for random weights from config.json alone.
    json: also write the rows to this file.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from loraplex.bench.load import LoadOptions, as_json, run_load, table

    if repeats < 1 or cold < 1 or running < 1 or not ranks:
        raise CallerError(
            ErrorCode.CONFIG_INVALID,
            "repeats, cold and running must be at least 1, and one rank must be given",
        )
    if model is None:
        from loraplex.model.gguf import ensure_demo_model

        model = ensure_demo_model()
    options = LoadOptions(
        model, device=device, dtype=dtype, ranks=ranks, repeats=repeats, cold=cold, running=running,
        pool_gb=pool_gb, load_format=load_format,
    )  # fmt: skip
    rows, latencies, rate = run_load(options, print)
    for line in table(rows):
        print(" | ".join(line))
    first, last = latencies
    print(f"p99 time between tokens: {last.p99_ms / first.p99_ms:.2f} x undisturbed")
    if json is not None:
        json.write_text(as_json(options, rows, latencies, rate) + "\n", encoding="utf-8")


def _pair(text: str) -> tuple[str, Path]:
    name, equals, folder = text.partition("=")
    if not name or not equals or not Path(folder).is_dir():
        raise CallerError(
            ErrorCode.CONFIG_INVALID,
            f"--adapter takes NAME=FOLDER with an existing folder, got {text!r}",
            param="adapter",
        )
    return name, Path(folder)


@bench_app.command
def step(
    *,
    running: int = 256,
    waiting: int = 2_000,
    adapters: int = 64,
    steps: int = 200,
    depth: Literal[0, 1] = 1,
    json: Path | None = None,
) -> None:
    """Host time of a decode step, by part, over a backend that takes no time.

    Parameters
    ----------
    running: requests that decode.
    waiting: requests that wait.
    adapters: distinct adapters among them.
    steps: timed steps.
    depth: pipeline depth.
    json: also write the report to this file.
    """
    import json as codec

    from loraplex.bench.step import StepOptions, run_step, step_lines

    for name, value, least in (("running", running, 1), ("waiting", waiting, 0), ("adapters", adapters, 0), ("steps", steps, 1)):  # fmt: skip
        if value < least:
            raise CallerError(
                ErrorCode.CONFIG_INVALID, f"{name} must be at least {least}, got {value}", param=name
            )
    report = run_step(
        StepOptions(running=running, waiting=waiting, adapters=adapters, steps=steps, depth=depth)
    )
    print("\n".join(step_lines(report)))
    if json is not None:
        json.write_text(codec.dumps(report, indent=2) + "\n", encoding="utf-8")
