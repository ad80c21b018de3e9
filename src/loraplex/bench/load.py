"""`loraplex bench load`: what a cold adapter costs, by tier, rank and stage, and what its load costs those who run.

Adapters are random factors in PEFT's format over the model's own shapes. The engine is the one that serves, with its
loader process, stepped by this program, so that nothing but engine and loader is measured. A time is also given as
ratio to the bytes that must move over the copy rate of this machine in the same run.
"""

from __future__ import annotations

import json
import platform
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from loraplex.config import EngineConfig
from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.ids import LAYER_MODULES, Module
from loraplex.core.layout import AdapterImage, page_checksum
from loraplex.core.messages import (
    Abort,
    Ended,
    EngineCall,
    EngineSampling,
    LoadAdapter,
    RegisterAdapter,
    RemoveAdapter,
    Reply,
    SetLimits,
    Submit,
    Tokens,
)
from loraplex.runtime.base import BaseModel
from loraplex.runtime.build import BuiltEngine, build_engine
from loraplex.runtime.clock import MonotonicClock
from loraplex.runtime.images import ImageStore
from loraplex.runtime.local import LocalMailbox, NullSink

TARGETS: Final[dict[str, tuple[Module, ...]]] = {
    "q,k,v,o": (Module.Q, Module.K, Module.V, Module.O),
    "all linears": LAYER_MODULES,
}
_PROJECTION: Final = {
    Module.Q: "self_attn.q_proj", Module.K: "self_attn.k_proj", Module.V: "self_attn.v_proj",
    Module.O: "self_attn.o_proj", Module.GATE: "mlp.gate_proj", Module.UP: "mlp.up_proj", Module.DOWN: "mlp.down_proj",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What is measured. cold: adapters that load while others run. running: requests that run meanwhile."""

    model: Path
    device: str = "cpu"
    dtype: str = "auto"
    ranks: tuple[int, ...] = (8, 16, 64)
    targets: tuple[str, ...] = ("q,k,v,o", "all linears")
    repeats: int = 5
    cold: int = 100
    running: int = 8
    pool_gb: float = 2.0
    max_model_len: int = 2048
    steps: int = 120
    load_format: str = "auto"


@dataclass(frozen=True, slots=True)
class LoadRow:
    """One stage of one adapter: median milliseconds, the bytes behind it, and the ratio to moving them once."""

    rank: int
    targets: str
    stage: str
    ms: float
    image_bytes: int
    ratio: float


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


COPY_BYTES: Final = 256 << 20
"""Larger than any cache, so that the copy rate is memory's."""
TURNS: Final = 3
"""Undisturbed and loading take turns, so that other work on the machine meets both."""
STAGES: Final = ("read, verify, hash", "convert", "store", "disk to published", "host to published")


class Bench:
    """A serving engine that this program steps."""

    def __init__(self, options: LoadOptions, held: ExitStack) -> None:
        self.images = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="loraplex-bench-")))
        self.store = ImageStore(self.images)
        self.mailbox = LocalMailbox()
        config = EngineConfig(
            model=str(options.model), images_dir=str(self.images), device=options.device, dtype=options.dtype,
            pool_gb=options.pool_gb, loader="process", load_format=options.load_format, max_model_len=options.max_model_len,
        )  # fmt: skip
        self.built: BuiltEngine = build_engine(config, self.mailbox, MonotonicClock(), NullSink())
        held.callback(self.built.close)
        self.calls = 0
        self.replies: dict[int, Reply] = {}
        self.arrived: list[tuple[str, int]] = []
        self.step_cpu_ms: list[float] = []

    @property
    def base(self) -> BaseModel:
        """What the engine serves."""
        return self.built.base

    def post(self, message: EngineCall) -> int:
        """Send a call; its number."""
        self.calls += 1
        self.mailbox.post(msgspec.structs.replace(message, call_id=self.calls))
        return self.calls

    def step(self) -> None:
        """One step; what came back is sorted."""
        began = time.thread_time_ns()
        self.built.engine.step()
        self.step_cpu_ms.append((time.thread_time_ns() - began) / 1e6)
        now = time.perf_counter_ns()
        for message in self.mailbox.take():
            match message:
                case Reply():
                    self.replies[message.call_id] = message
                case Tokens():
                    self.arrived += [(message.request_id, now)] * len(message.token_ids)
                case Ended():
                    if message.code is not None and message.code != ErrorCode.ABORTED:
                        raise InternalFault(ErrorCode.INTERNAL, f"a request ended: {message.message}")

    def call(self, message: EngineCall) -> dict[str, Any]:
        """Send a call and step until it is answered."""
        number = self.post(message)
        while number not in self.replies:
            self.step()
        reply = self.replies.pop(number)
        if reply.code is not None:
            raise InternalFault(ErrorCode.INTERNAL, f"{type(message).__name__} was refused: {reply.message}")
        return reply.body

    def idle(self) -> None:
        """Step until nothing is under way."""
        while not self.built.engine.idle or self.mailbox.pending:
            self.step()

    def make_cold(self, *, host: bool) -> None:
        """Push every adapter off the device, and with `host` out of host memory too."""
        figures = self.call(SetLimits(0))
        self.call(SetLimits(0, adapter_pages=0, host_bytes=0 if host else None))
        self.idle()
        self.call(SetLimits(0, adapter_pages=figures["adapter_pages"], host_bytes=figures["host_bytes"]))


def run_load(
    options: LoadOptions, report: Callable[[str], None]
) -> tuple[list[LoadRow], list[LatencyRow], float]:
    """Measure; returns the stages, the latencies and the copy rate in bytes a second."""
    with ExitStack() as held:
        bench = Bench(options, held)
        rows: list[LoadRow] = []
        rate = copy_rate(COPY_BYTES)
        report(f"copy rate: {rate / 1e9:.1f} GB/s, one thread")
        for targets in options.targets:
            for rank in options.ranks:
                rows += _stages(bench, options, rank, targets, rate)
                report(
                    f"rank {rank} on {targets}: "
                    + ", ".join(f"{row.stage} {row.ms:.1f} ms" for row in rows[-len(STAGES) :])
                )
        latencies = _latencies(bench, options, report)
    return rows, latencies, rate


def copy_rate(nbytes: int) -> float:
    """Bytes a second that one thread copies from one place of host memory to another."""
    source, target = np.ones(nbytes, dtype=np.uint8), np.empty(nbytes, dtype=np.uint8)
    times = []
    for _ in range(9):
        started = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - started)
    return nbytes / min(times[1:])


def _stages(bench: Bench, options: LoadOptions, rank: int, targets: str, rate: float) -> list[LoadRow]:
    from loraplex.artifact.convert import to_image
    from loraplex.artifact.load import load_adapter
    from loraplex.runtime.prepare import prepare_adapter

    base = bench.base
    times: dict[str, list[float]] = {stage: [] for stage in STAGES}

    def timed(stage: str, started: float) -> float:
        now = time.perf_counter()
        times[stage].append((now - started) * 1e3)
        return now

    with tempfile.TemporaryDirectory(prefix="loraplex-adapter-") as name:
        folder = write_adapter(Path(name), base, rank, TARGETS[targets])
        for _ in range(options.repeats):
            at = time.perf_counter()
            artifact = load_adapter(folder, base.modules, base.tensors)
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
            at = time.perf_counter()
            bench.call(LoadAdapter(0, key))
            timed(stage, at)
    bench.call(RemoveAdapter(0, key))
    nbytes = prepared.device_bytes
    return [
        LoadRow(
            rank, targets, stage, (ms := statistics.median(times[stage])), nbytes, ms / (nbytes / rate * 1e3)
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
    """Time between tokens of running requests: undisturbed, then while cold adapters load, in turns of one run."""
    with tempfile.TemporaryDirectory(prefix="loraplex-adapter-") as name:
        prepared = _prepare(bench, write_adapter(Path(name), bench.base, 8, TARGETS["all linears"]))
    bench.store.verify(prepared.kernel_digest)
    cold = [_twin(bench.store, prepared) for _ in range(options.cold)]
    limits = bench.call(SetLimits(0))
    bench.call(SetLimits(0, adapter_pages=0, host_bytes=0))  # so that registering loads nothing
    for message in cold:
        bench.call(message)
    bench.call(SetLimits(0, adapter_pages=limits["adapter_pages"], host_bytes=limits["host_bytes"]))
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
    from loraplex.runtime.prepare import prepare_adapter

    return prepare_adapter(folder, bench.base, bench.store).register


def _twin(store: ImageStore, register: RegisterAdapter) -> RegisterAdapter:
    """Another adapter of the same shape in the disk store, with bytes of its own."""
    image = store.open(register.kernel_digest)
    pages = np.random.default_rng(secrets.randbits(63)).integers(0, 256, image.pages.shape, dtype=np.uint8)
    key, kernel = secrets.token_hex(32), secrets.token_hex(32)
    twin: AdapterImage = replace(
        image, key=key, kernel_digest=kernel, pages=pages, checksums=page_checksum(pages)
    )
    store.put(twin)
    return msgspec.structs.replace(register, key=key, kernel_digest=kernel)


def _run_turn(bench: Bench, options: LoadOptions, turn: str, keys: Sequence[str], gaps: _Gaps) -> None:
    """Let requests run, load `keys` meanwhile, and note the times between tokens until the last is published."""
    ids = [f"{turn}-{index}" for index in range(options.running)]
    rng = np.random.default_rng(1)
    for request_id in ids:
        prompt = rng.integers(0, bench.base.spec.vocab_size, 64).astype("<i4").tobytes()
        bench.mailbox.post(Submit(request_id, prompt, _greedy(options.max_model_len - 64)))
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


def _greedy(max_tokens: int) -> EngineSampling:
    return EngineSampling(
        max_tokens=max_tokens, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, repetition_penalty=1.0,
        presence_penalty=0.0, frequency_penalty=0.0, logit_bias=(), stop_token_ids=(), logprobs=-1, prompt_logprobs=-1,
    )  # fmt: skip


def table(rows: Sequence[LoadRow]) -> list[tuple[str, ...]]:
    """Lines of (adapter, MiB, then ms and ratio of each stage)."""
    lines: list[tuple[str, ...]] = [("adapter", "MiB", *STAGES)]
    for rank, targets in dict.fromkeys((row.rank, row.targets) for row in rows):
        mine = [row for row in rows if (row.rank, row.targets) == (rank, targets)]
        cells = [f"{row.ms:.1f} ({row.ratio:.1f}x)" for row in mine]
        lines.append((f"rank {rank}, {targets}", f"{mine[0].image_bytes / (1 << 20):.1f}", *cells))
    return lines


def as_json(
    options: LoadOptions, rows: Sequence[LoadRow], latencies: Sequence[LatencyRow], rate: float
) -> str:
    """The whole run as JSON."""
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.processor() or platform.machine(),
        "device": options.device,
        "dtype": options.dtype,
        "repeats": options.repeats,
        "copy_bytes_per_s": rate,
        "stages": [asdict(row) for row in rows],
        "time_between_tokens": [asdict(row) for row in latencies],
    }
    return json.dumps(record, indent=2)
