"""`loraplex bench ops` as a command: its options and their help."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter


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

    Args:
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
