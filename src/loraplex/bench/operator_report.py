"""The command `loraplex bench ops` behind its options: checks them, runs, writes JSON and charts."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from loraplex.bench.op_peers import PEERS, require_importable
from loraplex.bench.operators import (
    BATCHES,
    RANKS,
    OpOptions,
    OpRow,
    as_record,
    best_by_case,
    geometric_mean,
    run_ops,
)
from loraplex.bench.output import check_outputs, write_output
from loraplex.bench.plot import document
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.limits import MAX_RANK
from loraplex.ops.dispatch import FAMILIES, TRITON
from loraplex.process.activity import activity


def operator_bench(
    device: str,
    dtype: str,
    batches: Sequence[int],
    ranks: Sequence[str],
    families: Sequence[str],
    repeats: int,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """See `bench.commands.ops`. Raises `config_invalid`."""
    known = (*FAMILIES, TRITON, *PEERS)
    wrong = [name for name in families if name not in known]
    if wrong:
        raise _invalid("family", f"no family {wrong[0]!r}; there are {', '.join(known)}")
    require_importable(families)
    if repeats < 1 or any(rows < 1 for rows in batches):
        raise _invalid("batch", f"batches and repeats must be at least 1, got {list(batches)} and {repeats}")
    if device == "cuda" and not torch.cuda.is_available():
        raise _invalid("device", "there is no CUDA device; use --device cpu")
    check_outputs(json_file, plot_file)
    if device == "cpu":
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    options = OpOptions(
        device=device,
        dtype=dtype,
        batches=tuple(batches) or BATCHES,
        families=tuple(families),
        repeats=repeats,
        ranks=tuple(_ranks(text) for text in ranks) or RANKS,
    )
    with activity() as tell:
        rows, rate = run_ops(options, tell)
    for text in summary(rows):
        print(text)
    if json_file is not None:
        write_output(json_file, json.dumps(as_record(options, rows, rate), indent=1) + "\n")
    if plot_file is not None:
        write_output(plot_file, draw(rows))


def _ranks(text: str) -> tuple[int, ...]:
    parts = text.split("/")
    if not all(part.isdecimal() and 1 <= int(part) <= MAX_RANK for part in parts):
        raise _invalid(
            "rank", f"--rank takes numbers from 1 to {MAX_RANK}, as 16 or 8/16/32/64, got {text!r}"
        )
    return tuple(int(part) for part in parts)


def summary(rows: Sequence[OpRow]) -> list[str]:
    """One line a family: geometric mean of times the floor, and in how many cases it is ours fastest."""
    best = list(best_by_case(rows).values())
    out = []
    for family in dict.fromkeys(row.family for row in rows):
        own = [row.ratio for row in rows if row.family == family]
        wins = "" if family in PEERS else f", fastest of ours in {best.count(family)} of {len(best)} cases"
        out.append(
            f"{family:12s} {geometric_mean(own):8.2f} x floor (geometric mean of {len(own)} cases){wins}"
        )
    return out


def draw(rows: Sequence[OpRow]) -> str:
    """Microseconds over rows, one chart for each workload and ranks, with the floor."""
    charts = []
    for workload, ranks in dict.fromkeys((row.workload, row.ranks) for row in rows):
        own = [row for row in rows if (row.workload, row.ranks) == (workload, ranks)]
        series: dict[str, list[tuple[float, float]]] = {}
        for row in own:
            series.setdefault(row.family, []).append((row.batch, row.us))
        series["floor"] = [(row.batch, row.floor_us) for row in own]
        shape = f"{own[0].d_in} -> {own[0].d_out}"
        charts.append((f"{workload}, rank {ranks}, {shape}", "rows", "microseconds", series))
    return document(charts)


def _invalid(param: str, message: str) -> CallerError:
    return CallerError(ErrorCode.CONFIG_INVALID, message, param=param)
