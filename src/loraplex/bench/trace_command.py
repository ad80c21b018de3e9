"""`loraplex bench trace` as a command: its options and their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter


def trace(
    model: Path | None = None,
    /,
    *,
    device: Literal["cpu", "cuda"] = "cpu",
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    only: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    policy: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    early_abort_s: float | None = None,
    adapters: int | None = None,
    rate: float | None = None,
    seconds: float | None = None,
    longest: int | None = None,
    json: Path | None = None,
    plot: Path | None = None,
) -> None:
    """A real server under traces of many adapters: S-LoRA's, true Zipf, churn, a flood by one tenant.

    Throughput counts the drain; attainment is the share of all requests with a first token within 6 s,
    satisfaction the mean of 1 - (ttft / 6 s)^2; refused requests count 0 in both. On cuda without a model:
    Llama-3.1-8B's shapes with random weights.

    Args:
        model: folder; on cpu the demo model when left out.
        device: cpu or cuda.
        dtype: element type of weights, KV and factors.
        only: names of the traces to run, may be repeated: slora, slora-cv4, slora-code, zipf, churn, flood.
        policy: of the server, may be repeated, a server for each; its default when left out.
        early_abort_s: run the server with --early-abort-s.
        adapters: how many; 50 on cpu, 200 on cuda.
        rate: requests a second; 1 on cpu, 10 on cuda.
        seconds: of each trace; 60 on cpu, 300 on cuda.
        longest: tokens of a prompt and of an answer at most; 64 on cpu, 512 on cuda.
        json: also write the rows to this file.
        plot: also draw waiting times as SVG.
    """
    from loraplex.bench.trace_report import trace_bench

    sizes = (adapters, rate, seconds, longest)
    trace_bench(model, device, dtype, only, policy, early_abort_s, sizes, json, plot)
