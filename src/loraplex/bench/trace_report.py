"""`bench trace` from its arguments to its table, its JSON and its plots."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import msgspec

from loraplex.bench.http_traffic import HttpOptions
from loraplex.bench.output import check_outputs, write_output
from loraplex.bench.trace_run import TraceOptions, plots, run_traces
from loraplex.bench.traces import HEAD, Trace, line, traces
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.model.gguf import demo_model
from loraplex.model.progress import terminal_progress
from loraplex.process.activity import activity

Sizes = tuple[int | None, float | None, float | None, int | None]
"""Adapters, requests a second, seconds, tokens; None for what the device takes."""
SIZES: Final = {"cpu": (50, 1.0, 60.0, 64), "cuda": (200, 10.0, 300.0, 512)}


def sized(device: str, sizes: Sizes, only: tuple[str, ...]) -> list[Trace]:
    """The traces to run. Raises `config_invalid` for a size or a name that there is not."""
    known = SIZES[device]
    adapters = known[0] if sizes[0] is None else sizes[0]
    rate = known[1] if sizes[1] is None else sizes[1]
    seconds = known[2] if sizes[2] is None else sizes[2]
    longest = known[3] if sizes[3] is None else sizes[3]
    if adapters < 1 or longest < 1 or not 0 < rate < 1e6 or not 0 < seconds < 86400:
        raise CallerError(
            ErrorCode.CONFIG_INVALID,
            f"adapters {adapters}, rate {rate}, seconds {seconds} and longest {longest} must all be above 0",
        )
    found = traces(adapters, rate, seconds, longest)
    names = [trace.name for trace in found]
    for name in only:
        if name not in names:
            raise CallerError(
                ErrorCode.CONFIG_INVALID, f"--only takes {', '.join(names)}, got {name!r}", param="only"
            )
    return [trace for trace in found if not only or trace.name in only]


def trace_bench(
    model: Path | None,
    device: Literal["cpu", "cuda"],
    dtype: str,
    only: tuple[str, ...],
    policies: tuple[str, ...],
    early_abort_s: float | None,
    sizes: Sizes,
    json: Path | None,
    plot: Path | None,
) -> None:
    """Run, print, write."""
    check_outputs(json, plot)
    chosen = sized(device, sizes, only)
    if model is None and device == "cpu":
        with terminal_progress() as progress:
            model = demo_model(progress)
    options = TraceOptions(HttpOptions(model, device, dtype), policies, early_abort_s)
    with activity() as tell:
        runs = run_traces(options, chosen, tell)
    for text in (HEAD, *(line(run.row) for run in runs)):
        print(text)
    if json is not None:
        rows = {"traces": chosen, "rows": [run.row for run in runs]}
        write_output(json, msgspec.json.format(msgspec.json.encode(rows), indent=2).decode() + "\n")
    if plot is not None:
        write_output(plot, plots(runs))
