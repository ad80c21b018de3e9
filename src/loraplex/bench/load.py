"""`loraplex bench load`: what a cold adapter costs, by tier, rank and stage, and what its load costs those
who run.

Adapters are random factors in PEFT's format over the model's own shapes. The engine is the one that serves,
with its loader process, stepped by this program, so that nothing but engine and loader is measured. A time is
also given as ratio to moving the image once, read and written, at the copy rate of one thread
(`bench.copy_rate`) in the same run.
"""

from __future__ import annotations

import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import numpy as np
import torch

from loraplex.bench.copy_rate import copy_rate
from loraplex.bench.load_engine import Bench, LoadOptions, greedy
from loraplex.bench.load_many import (
    BurstRow,
    SwapRow,
    measure_burst,
    measure_swap,
    register_cold,
    twin,
)
from loraplex.build.base_model import BaseModel
from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.ids import LAYER_MODULES, Module
from loraplex.core.messages import (
    Abort,
    LoadAdapter,
    RegisterAdapter,
    RemoveAdapter,
    Submit,
)

TARGETS: Final[dict[str, tuple[Module, ...]]] = {
    "q,k,v,o": (Module.Q, Module.K, Module.V, Module.O),
    "all linears": LAYER_MODULES,
}
_PROJECTION: Final = {
    Module.Q: "self_attn.q_proj",
    Module.K: "self_attn.k_proj",
    Module.V: "self_attn.v_proj",
    Module.O: "self_attn.o_proj",
    Module.GATE: "mlp.gate_proj",
    Module.UP: "mlp.up_proj",
    Module.DOWN: "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class LoadRow:
    """One stage of one adapter: median milliseconds, the bytes behind it, and the ratio to moving them once.

    steps, step_cpu_ms: of the engine, and processor time of the thread that steps; 0 where no engine takes
    part.
    """

    rank: int
    targets: str
    stage: str
    ms: float
    image_bytes: int
    ratio: float
    steps: float = 0.0
    step_cpu_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """Time between tokens of running requests, in milliseconds. seconds: how long was measured.

    step_cpu_*: processor time of the thread that steps, which other work on the machine does not lengthen.
    """

    case: str
    p50_ms: float
    p99_ms: float
    step_cpu_p50_ms: float
    step_cpu_p99_ms: float
    tokens: int
    seconds: float


TURNS: Final = 3
"""Undisturbed and loading take turns, so that other work on the machine meets both."""
STAGES: Final = ("read, verify, hash", "convert", "store", "disk to published", "host to published")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Everything that was measured. copy_bytes_per_s: the copy rate of one thread."""

    stages: list[LoadRow]
    burst: BurstRow
    swap: SwapRow
    latencies: list[LatencyRow]
    copy_bytes_per_s: float


def run_load(options: LoadOptions, report: Callable[[str], None]) -> LoadReport:
    """Measure one adapter by stage, many at once, a swap under load, and what loads cost those who run."""
    with ExitStack() as held:
        report("starting the engine")
        bench = Bench(options, held)
        rows: list[LoadRow] = []
        rate = copy_rate(torch.device("cpu"), threads=1)
        report(f"copy rate: {rate / 1e9:.1f} GB/s, one thread")
        for targets in options.targets:
            for rank in options.ranks:
                report(f"measuring rank {rank} on {targets}")
                rows += _stages(bench, options, rank, targets, rate)
                report(
                    f"rank {rank} on {targets}: "
                    + ", ".join(f"{row.stage} {row.ms:.1f} ms" for row in rows[-len(STAGES) :])
                )
        burst, swap = _many(bench, options, report)
        latencies = _latencies(bench, options, report)
    return LoadReport(rows, burst, swap, latencies, rate)


def _many(bench: Bench, options: LoadOptions, report: Callable[[str], None]) -> tuple[BurstRow, SwapRow]:
    """Adapters of rank 16 on q, k, v, o: 27 MB each at 8B shapes."""
    with tempfile.TemporaryDirectory(prefix="loraplex-adapter-") as name:
        register = _prepare(bench, write_adapter(Path(name), bench.base, 16, TARGETS["q,k,v,o"]))
    report(f"measuring {options.burst} cold adapters at once")
    burst = measure_burst(bench, register, options.burst)
    report(
        f"{burst.adapters} cold adapters of {burst.image_bytes / 1e6:.1f} MB at once: "
        f"{1e3 * burst.seconds:.0f} ms, "
        f"{burst.gb_per_s:.2f} GB/s, {burst.steps} steps"
    )
    swap = measure_swap(bench, register, options.running)
    report(
        f"swap beside {swap.running} running requests: published after {swap.ms:.1f} ms, {swap.finished} "
        "requests "
        "finished, none failed"
    )
    return burst, swap


def _stages(bench: Bench, options: LoadOptions, rank: int, targets: str, rate: float) -> list[LoadRow]:
    from loraplex.adapters.prepare import prepare_adapter
    from loraplex.artifact.convert import to_image
    from loraplex.artifact.read_artifact import load_adapter

    base = bench.base
    times, cpu, steps = ({stage: list[float]() for stage in STAGES} for _ in range(3))

    def timed(stage: str, started: float) -> float:
        now = time.perf_counter()
        times[stage].append((now - started) * 1e3)
        return now

    with tempfile.TemporaryDirectory(prefix="loraplex-adapter-") as name:
        folder = write_adapter(Path(name), base, rank, TARGETS[targets])
        for _ in range(options.repeats):
            at = time.perf_counter()
            artifact = load_adapter(folder, base.modules, base.tensors, served=base.dtype)
            at = timed(STAGES[0], at)
            image = to_image(artifact, base.geometry, base.dtype, base.abi, base.tensors)
            at = timed(STAGES[1], at)
            bench.store.put(image)
            timed(STAGES[2], at)
            bench.store.delete(image.kernel_digest)
        prepared = prepare_adapter(folder, base, bench.store)
    bench.call(prepared.register)
    key = prepared.register.key
    for stage, host in ((STAGES[3], True), (STAGES[4], False)):
        for _ in range(options.repeats):
            bench.make_cold(host=host)
            bench.step_cpu_ms.clear()
            at = time.perf_counter()
            bench.call(LoadAdapter(0, key))
            timed(stage, at)
            steps[stage].append(len(bench.step_cpu_ms))
            cpu[stage].append(sum(bench.step_cpu_ms))
    bench.call(RemoveAdapter(0, key))
    nbytes = prepared.device_bytes
    return [
        LoadRow(
            rank,
            targets,
            stage,
            (ms := statistics.median(times[stage])),
            nbytes,
            ms / (2 * nbytes / rate * 1e3),
            statistics.median(steps[stage] or [0]),
            statistics.median(cpu[stage] or [0.0]),
        )
        for stage in STAGES
    ]


def write_adapter(folder: Path, base: BaseModel, rank: int, targets: Sequence[Module], seed: int = 0) -> Path:
    """A LoRA adapter of random factors in PEFT's format, float32 as PEFT writes it."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    dims = base.spec.module_dims().dims
    tensors = {}
    for layer in range(base.spec.layers):
        for module in targets:
            d_in, d_out = dims[module]
            stem = f"base_model.model.model.layers.{layer}.{_PROJECTION[module]}"
            tensors[f"{stem}.lora_A.weight"] = rng.standard_normal((rank, d_in), dtype=np.float32) / rank
            tensors[f"{stem}.lora_B.weight"] = rng.standard_normal((d_out, rank), dtype=np.float32) / 64
    save_file(tensors, folder / "adapter_model.safetensors")
    names = [_PROJECTION[module].rpartition(".")[2] for module in targets]
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": names, "bias": "none",
        "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "inference_mode": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _latencies(bench: Bench, options: LoadOptions, report: Callable[[str], None]) -> list[LatencyRow]:
    """Time between tokens of running requests: undisturbed, then while cold adapters load, in turns of one
    run.
    """
    with tempfile.TemporaryDirectory(prefix="loraplex-adapter-") as name:
        prepared = _prepare(bench, write_adapter(Path(name), bench.base, 8, TARGETS["all linears"]))
    bench.store.verify(prepared.kernel_digest)
    cold = [twin(bench.store, prepared) for _ in range(options.cold)]
    register_cold(bench, cold)
    keys = [message.key for message in cold]
    quiet, loading = _Gaps(), _Gaps()
    for turn in range(TURNS):
        _run_turn(bench, options, f"quiet-{turn}", [], quiet)
        _run_turn(bench, options, f"loading-{turn}", keys[turn::TURNS], loading)
    rows = [quiet.row("undisturbed"), loading.row(f"while {options.cold} cold adapters load")]
    for row in rows:
        report(
            f"{row.case}: p50 {row.p50_ms:.1f} ms, p99 {row.p99_ms:.1f} ms over {row.tokens} tokens; "
            f"a step's thread p50 {row.step_cpu_p50_ms:.1f} ms, p99 {row.step_cpu_p99_ms:.1f} ms of processor"
        )
    return rows


@dataclass(slots=True)
class _Gaps:
    """Times between tokens of one case, over its turns."""

    ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def row(self, case: str) -> LatencyRow:
        gaps, cpu = np.array(self.ms), np.array(self.cpu_ms)
        return LatencyRow(
            case,
            float(np.median(gaps)),
            float(np.quantile(gaps, 0.99)),
            float(np.median(cpu)),
            float(np.quantile(cpu, 0.99)),
            int(gaps.size),
            self.seconds,
        )


def _prepare(bench: Bench, folder: Path) -> RegisterAdapter:
    from loraplex.adapters.prepare import prepare_adapter

    return prepare_adapter(folder, bench.base, bench.store).register


def _run_turn(bench: Bench, options: LoadOptions, turn: str, keys: Sequence[str], gaps: _Gaps) -> None:
    """Let requests run, load `keys` meanwhile, and note the times between tokens until the last is
    published.
    """
    ids = [f"{turn}-{index}" for index in range(options.running)]
    rng = np.random.default_rng(1)
    for request_id in ids:
        prompt = rng.integers(0, bench.base.spec.vocab_size, 64).astype("<i4").tobytes()
        bench.mailbox.post(Submit(request_id, prompt, greedy(options.max_model_len - 64)))
    bench.arrived.clear()
    while len({request_id for request_id, _ in bench.arrived}) < len(ids):
        bench.step()
    bench.arrived.clear()
    bench.step_cpu_ms.clear()
    started = time.perf_counter()
    calls = {bench.post(LoadAdapter(0, key)) for key in keys}
    while not calls <= bench.replies.keys() or len(bench.arrived) < options.steps * len(ids):
        bench.step()
    gaps.seconds += time.perf_counter() - started
    gaps.cpu_ms += bench.step_cpu_ms
    refused = [bench.replies[number].message for number in calls if bench.replies[number].code is not None]
    if refused:
        raise InternalFault(ErrorCode.INTERNAL, f"{len(refused)} loads were refused: {refused[0]}")
    for request_id in ids:
        bench.mailbox.post(Abort(request_id))
    at: dict[str, list[int]] = {}
    for request_id, now in bench.arrived:
        at.setdefault(request_id, []).append(now)
    for times in at.values():
        gaps.ms += (np.diff(times) / 1e6).tolist()
    bench.idle()


def table(rows: Sequence[LoadRow]) -> list[tuple[str, ...]]:
    """Lines of (adapter, MiB, then ms and ratio of each stage)."""
    lines: list[tuple[str, ...]] = [("adapter", "MiB", *STAGES)]
    for rank, targets in dict.fromkeys((row.rank, row.targets) for row in rows):
        mine = [row for row in rows if (row.rank, row.targets) == (rank, targets)]
        cells = [f"{row.ms:.1f} ({row.ratio:.1f}x)" + _engine_part(row) for row in mine]
        lines.append((f"rank {rank}, {targets}", f"{mine[0].image_bytes / (1 << 20):.1f}", *cells))
    return lines


def _engine_part(row: LoadRow) -> str:
    return f" in {row.steps:.0f} steps, {row.step_cpu_ms:.1f} ms of their thread" if row.steps else ""


def as_json(options: LoadOptions, measured: LoadReport) -> str:
    """The whole run as JSON."""
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.processor() or platform.machine(),
        "model": str(options.model),
        "device": options.device,
        "dtype": options.dtype,
        "repeats": options.repeats,
        "copy_bytes_per_s": measured.copy_bytes_per_s,
        "stages": [asdict(row) for row in measured.stages],
        "burst": asdict(measured.burst) | {"gb_per_s": measured.burst.gb_per_s},
        "swap": asdict(measured.swap),
        "time_between_tokens": [asdict(row) for row in measured.latencies],
    }
    return json.dumps(record, indent=2)
