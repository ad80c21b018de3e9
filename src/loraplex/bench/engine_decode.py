"""Decode throughput of the engine on a device, with synthetic adapters: the rows of docs/benchmarks.md,
roofline, latency.

Requests enter together and ask for the same number of greedy tokens, so each row is one batch from first
prompt to last token, prefill included. Every row runs once unmeasured, which also loads its adapters. Owns
the clock of the benchmark; what runs is the engine that a server would run, in this process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import numpy as np

from loraplex.bench.copy_rate import copy_rate
from loraplex.bench.load_engine import push_out
from loraplex.bench.model_shapes import ATTENTION, LLAMA_8B, SEVEN, AdapterMix, SyntheticImages, write_shape
from loraplex.build.engine_build import BuiltEngine, build_engine
from loraplex.config import EngineConfig
from loraplex.core.errors import ErrorCode, InternalFault, error_for
from loraplex.core.events import Event, IterationCompleted
from loraplex.core.messages import (
    Ended,
    EngineCall,
    EngineSampling,
    Inspect,
    Reply,
    SetLimits,
    Submit,
    Tokens,
)
from loraplex.images.disk_store import ImageStore
from loraplex.process.clock import MonotonicClock
from loraplex.process.local import LocalMailbox

NO_ADAPTERS: Final = AdapterMix(0)
SHAPE: Final = LLAMA_8B
PROMPT_TOKENS: Final = 128
NEW_TOKENS: Final = 128


@dataclass(frozen=True, slots=True)
class EngineCase:
    """One row: requests over adapters taken in turn, greedy unless there is a temperature.

    cold: no adapter is on the device or in host memory when the requests come; their image files are in the
    page cache.
    """

    requests: int
    mix: AdapterMix = NO_ADAPTERS
    temperature: float = 0.0
    top_p: float = 1.0
    cold: bool = False

    @property
    def name(self) -> str:
        """How tables name it."""
        if not self.mix.count:
            drawn = f", temperature {self.temperature:g}, top_p {self.top_p:g}" if self.temperature else ""
            return f"{self.requests} x base{drawn}"
        ranks = "/".join(str(rank) for rank in self.mix.ranks)
        where = "q,k,v,o" if self.mix.modules == ATTENTION else "all seven"
        return (
            f"{self.requests} over {self.mix.count}, rank {ranks}, {where}{', all cold' if self.cold else ''}"
        )


CASES: Final = (
    EngineCase(1), EngineCase(64), EngineCase(256),
    EngineCase(1, AdapterMix(1)), EngineCase(8, AdapterMix(8)), EngineCase(64, AdapterMix(1)),
    EngineCase(64, AdapterMix(64)), EngineCase(64, AdapterMix(64, modules=SEVEN)),
    EngineCase(64, AdapterMix(64, (8, 16, 32, 64))), EngineCase(256, AdapterMix(64)),
    EngineCase(256, AdapterMix(256)), EngineCase(1, temperature=0.8, top_p=0.95),
    EngineCase(64, temperature=0.8, top_p=0.95), EngineCase(256, temperature=0.8, top_p=0.95),
    EngineCase(64, AdapterMix(64), cold=True),
)  # fmt: skip
"""The rows of docs/benchmarks.md, what sampling adds, then cold adapters."""
PROFILED: Final = (0, 1, 2, 6, 7)
"""Rows of which a profile is worth its time."""


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One measured row. tokens_per_s: of the whole run. ttft, tbt: milliseconds to the first token, and
    between tokens of a request: median and 99th percentile. device_ms: per decode step, median. host_ms: per
    decode step outside of waiting for the device, median; plan_ms: of it, planning. roofline_ms: least time
    of a decode step's bytes.
    """

    case: str
    tokens_per_s: float
    ttft_ms: float
    tbt_ms: float
    tbt_p99_ms: float
    device_ms: float
    host_ms: float
    plan_ms: float
    roofline_ms: float

    @property
    def of_roofline(self) -> float:
        """Share of the roofline that a decode step's device time reaches."""
        return self.roofline_ms / self.device_ms if self.device_ms else 0.0


class _Sink:
    """Keeps the iterations."""

    def __init__(self) -> None:
        self.iterations: list[IterationCompleted] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, IterationCompleted):
            self.iterations.append(event)

    def flush(self) -> None:
        """Nothing is kept back."""

    def close(self) -> None:
        """Nothing is held."""


class _TimedBackend:
    """The engine's backend with a stopwatch around what waits for the device."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.waited_ns = 0

    def launch(self, plan: bytes) -> None:
        self._inner.launch(plan)

    def collect(self) -> bytes:
        started = time.perf_counter_ns()
        result: bytes = self._inner.collect()
        self.waited_ns += time.perf_counter_ns() - started
        return result


@dataclass
class BatchRun:
    """Times of one batch, in seconds from its start."""

    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    host_ms: list[float] = field(default_factory=list)


class DeviceBench:
    """An engine over a device, and runs of cases on it. prompt, new: tokens of each request.

    stored: images lie in the disk store, and the loader's process brings them, as in a server; else they are
    in memory.
    """

    def __init__(self, config: EngineConfig, prompt: int, new: int, *, stored: bool = False) -> None:
        self.prompt, self.new = prompt, new
        self._mailbox, self._sink = LocalMailbox(), _Sink()
        self._images: SyntheticImages | None = None
        self._store = ImageStore(config.images_dir) if stored else None
        source = None if stored else self
        self.built: BuiltEngine = build_engine(config, self._mailbox, MonotonicClock(), self._sink, source)
        self._images = SyntheticImages(self.built.base)
        self._backend = _TimedBackend(self.built.engine._backend)
        self.built.engine._backend = self._backend
        self._known: set[str] = set()
        self._calls = 0
        self._rng = np.random.default_rng(1)
        self._serial = 0

    def open(self, kernel_digest: str) -> Any:
        """Adapter images for the engine."""
        assert self._images is not None
        return self._images.open(kernel_digest)

    def close(self) -> None:
        """Let go of the device."""
        self.built.close()

    def measure(self, case: EngineCase, repeats: int, copy_bytes_per_s: float) -> EngineRow:
        """Median of `repeats` runs after one that is not counted. copy_bytes_per_s: measured rate for the
        roofline.
        """
        if case.cold and self._store is None:
            raise InternalFault(
                ErrorCode.INTERNAL, "cold adapters need an engine that loads from the disk store"
            )
        keys = self.register(case.mix)
        self.batch(case, keys)
        runs: list[tuple[BatchRun, list[IterationCompleted]]] = []
        for _ in range(repeats):
            self._sink.iterations.clear()
            runs.append((self.batch(case, keys), list(self._sink.iterations)))
        runs.sort(key=lambda pair: pair[0].seconds)
        run, iterations = runs[len(runs) // 2]
        decode = [
            event for event in iterations if event.decode_rows == case.requests and not event.prefill_rows
        ]
        device = statistics.median([event.execute_ns for event in decode] or [0]) / 1e6
        return EngineRow(
            case.name,
            run.tokens / run.seconds,
            1e3 * statistics.median(run.first.values()),
            1e3 * float(np.median(run.gaps)) if run.gaps else 0.0,
            1e3 * float(np.percentile(run.gaps, 99)) if run.gaps else 0.0,
            device,
            statistics.median(run.host_ms),
            statistics.median([event.plan_ns for event in decode] or [0]) / 1e6,
            1e3 * self.step_bytes(case) / copy_bytes_per_s,
        )

    def step_bytes(self, case: EngineCase) -> int:
        """Bytes that a decode step in the middle of the run must read: weights, KV, factors."""
        base = self.built.base
        spec, itemsize = base.spec, base.dtype.itemsize
        dims = spec.module_dims().dims
        layer = sum(dims[module][0] * dims[module][1] for module in SEVEN)
        weights = (layer * spec.layers + spec.vocab_size * spec.hidden_size) * itemsize
        kv = base.kv.token_bytes * (self.prompt + self.new // 2) * case.requests
        return weights + kv + case.mix.bytes_of(base)

    def register(self, mix: AdapterMix) -> list[str]:
        """Make the adapters of a mix known; their keys."""
        assert self._images is not None
        keys = []
        for index in range(mix.count):
            message = self._images.add(mix.ranks[index % len(mix.ranks)], mix.modules, index)
            keys.append(message.key)
            if message.key in self._known:
                continue
            self._known.add(message.key)
            if self._store is not None:
                self._store.adopt(self._images.open(message.kernel_digest))
            self._mailbox.post(message)
        while self._mailbox.pending:
            self.built.engine.step()
        for reply in self._mailbox.take():
            if isinstance(reply, Reply) and reply.code is not None:
                raise error_for(ErrorCode(reply.code), reply.message)
        return keys

    def batch(self, case: EngineCase, keys: Sequence[str]) -> BatchRun:
        """One batch from the first prompt to the last token."""
        if case.cold:
            self._make_cold()
        engine, vocab = self.built.engine, self.built.base.spec.vocab_size
        sampling = EngineSampling(
            max_tokens=self.new,
            temperature=case.temperature,
            top_p=case.top_p,
            top_k=0,
            min_p=0.0,
            seed=0,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            logit_bias=(),
            stop_token_ids=(),
            logprobs=-1,
            prompt_logprobs=-1,
        )
        run, open_requests = BatchRun(), case.requests
        for index in range(case.requests):
            self._serial += 1
            prompt = self._rng.integers(0, vocab, self.prompt).astype("<i4").tobytes()
            key = keys[index % len(keys)] if keys else None
            self._mailbox.post(Submit(f"b{self._serial}", prompt, sampling, key))
        started = time.perf_counter()
        while open_requests:
            before, waited = time.perf_counter_ns(), self._backend.waited_ns
            engine.step()
            spent = time.perf_counter_ns() - before - (self._backend.waited_ns - waited)
            run.host_ms.append(spent / 1e6)
            now = time.perf_counter() - started
            for message in self._mailbox.take():
                if isinstance(message, Tokens):
                    self._note(run, message, now)
                elif isinstance(message, Ended):
                    open_requests -= 1
                    if message.code is not None:
                        raise error_for(ErrorCode(message.code), message.message)
        run.seconds = time.perf_counter() - started
        while not engine.idle:
            engine.step()
        if run.tokens != case.requests * self.new:
            raise InternalFault(ErrorCode.INTERNAL, f"{run.tokens} tokens came for {case.requests} requests")
        return run

    def _make_cold(self) -> None:
        """Push every adapter off the device and out of host memory; limits are as before afterwards."""
        before = self._call(SetLimits(0))
        self._call(SetLimits(0, adapter_pages=0, host_bytes=0))
        push_out(lambda: self._call(Inspect(0)))
        self._call(SetLimits(0, adapter_pages=before["adapter_pages"], host_bytes=before["host_bytes"]))

    def _call(self, message: EngineCall) -> dict[str, Any]:
        """Post a call while nothing else is under way, and step until it is answered."""
        self._calls += 1
        self._mailbox.post(msgspec.structs.replace(message, call_id=self._calls))
        while True:
            self.built.engine.step()
            for reply in self._mailbox.take():
                if isinstance(reply, Reply) and reply.call_id == self._calls:
                    if reply.code is not None:
                        raise error_for(ErrorCode(reply.code), reply.message)
                    return reply.body

    @staticmethod
    def _note(run: BatchRun, message: Tokens, now: float) -> None:
        run.tokens += len(message.token_ids)
        if message.request_id in run.last:
            run.gaps.append(now - run.last[message.request_id])
        else:
            run.first[message.request_id] = now
        run.last[message.request_id] = now


def profile_step(bench: DeviceBench, case: EngineCase) -> dict[str, float]:
    """Microseconds of device time by kind of kernel, per decode step of a case, its prefill spread
    over them.
    """
    from torch.profiler import ProfilerActivity, profile

    keys = bench.register(case.mix)
    bench.batch(case, keys)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        bench.batch(case, keys)
    kinds: dict[str, float] = {}
    for event in trace.key_averages():
        kind = kind_of(event.key)
        kinds[kind] = kinds.get(kind, 0.0) + event.device_time_total / (bench.new - 1)
    return {kind: round(us, 1) for kind, us in sorted(kinds.items(), key=lambda item: -item[1])}


KINDS: Final = (
    ("adapters", ("shrink_kernel", "expand_kernel", "records_kernel")),
    ("attention", ("BatchPrefill", "BatchDecode", "MergeStates", "PrefillWithKVCache")),
    ("norms", ("RMSNorm", "rms_norm", "Norm")),
    ("GEMM", ("gemm", "nvjet", "cutlass", "splitK", "cublas")),
    ("RoPE and append", ("rope_append",)),
    ("activation", ("act_and_mul", "silu")),
    ("sampling", ("best_kernel", "choose_kernel", "draw_kernel", "reduce", "sort")),
    ("copies", ("Memcpy", "Memset", "copy")),
)  # fmt: skip


def kind_of(kernel: str) -> str:
    """What a kernel does, from its name."""
    for kind, parts in KINDS:
        if any(part in kernel for part in parts):
            return kind
    return "other"


def run_device_decode(
    repeats: int, profile: bool, only: tuple[int, ...], report: Callable[[str], None]
) -> dict[str, Any]:
    """Measure the rows of docs/benchmarks.md on the CUDA device; the whole record. only: indices of `CASES`,
    none is all.
    """
    import platform
    import tempfile
    from pathlib import Path

    import torch

    started = time.perf_counter()
    report("starting the engine")
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as name:
        folder = write_shape(SHAPE, Path(name))
        config = EngineConfig(
            model=str(folder),
            images_dir=name,
            device="cuda",
            dtype="bfloat16",
            load_format="dummy",
            max_model_len=8192,
            loader="process",
        )
        chosen = sorted([CASES[index] for index in only] or CASES, key=lambda case: case.cold)
        bench = DeviceBench(config, PROMPT_TOKENS, NEW_TOKENS, stored=chosen[0].cold)
        startup = time.perf_counter() - started
        report(f"engine up in {startup:.1f} s")
        rate = copy_rate(torch.device("cuda"))
        rows = []
        profiles = {}
        for index, case in enumerate(chosen):
            if index and case.cold and not chosen[index - 1].cold:  # an engine that loads as a server does
                bench.close()
                bench = DeviceBench(config, PROMPT_TOKENS, NEW_TOKENS, stored=True)
            report(f"measuring {case.name}")
            profiled = profile and CASES.index(case) in PROFILED
            row = bench.measure(case, repeats, rate)
            rows.append(asdict(row) | {"of_roofline": row.of_roofline})
            report(f"{row.case}: {row.tokens_per_s:.0f} tokens/s")
            if profiled:
                profiles[row.case] = profile_step(bench, case)
                report(f"  {profiles[row.case]}")
        bench.close()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "shape": SHAPE, "dtype": "bfloat16",
        "device": torch.cuda.get_device_name(), "torch": str(torch.__version__),
        "triton": version_of("triton"),
        "flashinfer": version_of("flashinfer-python"), "python": platform.python_version(),
        "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "repeats": repeats,
        "copy_bytes_per_s": rate, "startup_s": startup, "rows": rows, "profiles": profiles,
    }  # fmt: skip


def version_of(package: str) -> str:
    """Version of an installed package, "none" without it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def device_table(record: dict[str, Any]) -> list[str]:
    """The rows as lines of text."""
    base = {row["case"].split()[0]: row for row in record["rows"] if row["case"].endswith("base")}
    head = ("tok/s", "of base", "ttft", "tbt", "p99", "device", "roofline", "share", "host", "plan")
    widths = (7, 7, 7, 6, 7, 7, 8, 5, 5, 5)
    titles = " ".join(name.rjust(width) for name, width in zip(head, widths, strict=True))
    lines = [f"{'case':38} {titles}"]
    for row in record["rows"]:
        own = base.get(row["case"].split()[0])
        ratio = f"{row['tokens_per_s'] / own['tokens_per_s']:.2f}" if own else ""
        lines.append(
            f"{row['case']:38} {row['tokens_per_s']:7.0f} {ratio:>7} {row['ttft_ms']:7.1f} "
            f"{row['tbt_ms']:6.2f} "
            f"{row['tbt_p99_ms']:7.2f} {row['device_ms']:7.2f} {row['roofline_ms']:8.2f} "
            f"{row['of_roofline']:5.2f} "
            f"{row['host_ms']:5.2f} {row['plan_ms']:5.2f}"
        )
    return lines
