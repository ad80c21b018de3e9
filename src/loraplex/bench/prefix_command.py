"""The command `loraplex bench prefix`: reads its options, runs, writes JSON and charts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from loraplex.bench.output import check_outputs, write_output
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.process.activity import activity


def prefix_bench(
    model: Path | None,
    device: str,
    dtype: str,
    scenarios: Sequence[str],
    repeats: int,
    pool_gb: float | None,
    vllm: Path | None,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """See `bench_commands.prefix`. model: None for shapes alone. Raises `config_invalid`."""
    from loraplex.bench.prefix_bench import SCENARIOS, PrefixOptions, as_json, run_prefix
    from loraplex.bench.prefix_report import draw, table
    from loraplex.bench.prefix_scenarios import CPU_SIZES, CUDA_SIZES

    chosen = {name for text in scenarios for name in text.split(",")} or set(SCENARIOS)
    wrong = sorted(chosen - set(SCENARIOS))
    if wrong:
        raise _invalid("scenario", f"there is no scenario {wrong[0]!r:.40}; there are {', '.join(SCENARIOS)}")
    if repeats < 1:
        raise _invalid("repeats", f"repeats must be at least 1, got {repeats}")
    if vllm is not None and not os.access(vllm, os.X_OK):
        raise _invalid("vllm", f"--vllm {vllm} is no interpreter that can be run")
    if vllm is not None and (device != "cpu" or not chosen & {"a", "b"}):
        raise _invalid("vllm", "--vllm goes with --device cpu and scenario a or b; leave it out")
    check_outputs(json_file, plot_file)
    options = PrefixOptions(
        model,
        device,
        dtype,
        tuple(name for name in SCENARIOS if name in chosen),
        CUDA_SIZES if device == "cuda" else CPU_SIZES,
        repeats,
        pool_gb,
        vllm,
    )
    with activity() as tell:
        measured = run_prefix(options, tell)
    for line in table(measured):
        print(line)
    if json_file is not None:
        write_output(json_file, as_json(options, measured) + "\n")
    if plot_file is not None:
        write_output(plot_file, draw(measured))


def _invalid(param: str, message: str) -> CallerError:
    return CallerError(ErrorCode.CONFIG_INVALID, message, param=param)
