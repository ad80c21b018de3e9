"""`loraplex bench ops`: one projection's adapter branch, family by family, beside its floor and the peers at
hand.

A case is a batch, how popular its adapters are (Punica's four workloads) and their ranks. Factors, inputs and
outputs exist once for each of many layers and a run walks through all of them, so that operands come from
memory where their bytes allow; `rotated_bytes` says what a run moves through. On CUDA the walks of `CAPTURED`
families are one graph each. The floor is the bytes that must move (`ops.ledger.branch_bytes`) at the copy
rate (`bench.copy_rate`) of the same run. Errors are against float64. Owns no operator.

Specification: 0x02H, 0x06B, 0x06D; benchmarks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from loraplex.bench.copy_rate import copy_rate, median_seconds
from loraplex.bench.op_peers import PEERS, Problem
from loraplex.bench.op_world import Slots, plan_of, resident
from loraplex.core.errors import CallerError, ErrorCode, InternalFault
from loraplex.core.ids import Module
from loraplex.ops.dispatch import FAMILIES, make_operator, warm_up
from loraplex.ops.interface import AdapterOps
from loraplex.ops.ledger import branch_bytes

BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
RANKS: Final[tuple[tuple[int, ...], ...]] = ((8,), (16,), (32,), (64,), (128,), (8, 16, 32, 64))
SHAPES: Final = {
    "cpu": ((576, 576), (576, 1536), (1536, 576)),
    "cuda": ((4096, 4096), (4096, 14336), (14336, 4096)),
}
"""d_in, d_out of the projections: SmolLM2-135M's on a CPU, Llama-3.1-8B's on CUDA."""
CACHE_BYTES: Final = {"cpu": 64 << 20, "cuda": 200 << 20}
MAX_BYTES: Final = {"cpu": 1 << 30, "cuda": 8 << 30}
MAX_LAYERS: Final = {"cpu": 64, "cuda": 1024}
"""Small batches take many layers to move through more than a cache holds."""
CAPTURED: Final = ("triton", "vllm")
"""Families whose walk on CUDA is one captured graph; the others prepare indices on the host in every call."""
SLOW_US: Final = {"cpu": 30_000.0, "cuda": 20_000.0}
"""A family that takes longer for one call is left out of larger batches of the same workload."""


def popularity(workload: str, batch: int) -> list[int]:
    """Rows of each adapter, most popular first: Punica's distinct, uniform, skewed and identical."""
    match workload:
        case "distinct":
            return [1] * batch
        case "uniform":
            count = math.ceil(math.sqrt(batch))
            return [batch // count + (i < batch % count) for i in range(count)]
        case "skewed":
            rows, left = [], batch
            while left:
                rows.append(-(-left // 3))
                left -= rows[-1]
            return rows
        case "identical":
            return [batch]
        case _:
            raise CallerError(
                ErrorCode.CONFIG_INVALID, f"no workload {workload!r}; there are {', '.join(WORKLOADS)}"
            )


WORKLOADS: Final = ("distinct", "uniform", "skewed", "identical")


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement's batch."""

    workload: str
    batch: int
    ranks: tuple[int, ...]
    d_in: int
    d_out: int

    @property
    def rank_name(self) -> str:
        """ "16", or "8/16/32/64" where ranks are dealt in turn."""
        return "/".join(map(str, self.ranks))


@dataclass(frozen=True, slots=True)
class OpRow:
    """One family in one case. us: median microseconds of a call. floor_us: of the bytes that must move.
    error: largest deviation from float64 over the largest value; None where it was not computed.
    """

    workload: str
    batch: int
    adapters: int
    ranks: str
    d_in: int
    d_out: int
    family: str
    us: float
    floor_us: float
    base_us: float
    error: float | None
    rotated_bytes: int

    @property
    def ratio(self) -> float:
        """Times the floor."""
        return self.us / self.floor_us


@dataclass(frozen=True, slots=True)
class OpOptions:
    """What is measured. families: names, or empty for all of the device and the peers that can be
    imported.
    """

    device: str = "cpu"
    dtype: str = "bfloat16"
    batches: tuple[int, ...] = BATCHES
    ranks: tuple[tuple[int, ...], ...] = RANKS
    workloads: tuple[str, ...] = WORKLOADS
    shapes: tuple[tuple[int, int], ...] = ()
    families: tuple[str, ...] = ()
    repeats: int = 7


def run_ops(options: OpOptions, report: Callable[[str], None]) -> tuple[list[OpRow], float]:
    """Every row, and the copy rate in bytes a second. report: called with each row's line."""
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    report("building the kernels")
    report(warm_up(device))
    rate = copy_rate(device)
    report(f"copy rate {rate / 1e9:.1f} GB/s")
    rows: list[OpRow] = []
    slow: set[tuple[str, str, str, int]] = set()
    with torch.inference_mode():
        for case in cases(options):
            report(f"{case.workload}, {case.batch} rows, rank {'/'.join(map(str, case.ranks))}")
            for row in _measure(case, options, device, dtype, rate, slow):
                rows.append(row)
                report(line(row))
    return rows, rate


def cases(options: OpOptions) -> Iterator[Case]:
    """All cases, larger batches later."""
    for d_in, d_out in options.shapes or SHAPES[options.device][:1]:
        for workload in options.workloads:
            for ranks in options.ranks:
                for batch in options.batches:
                    yield Case(workload, batch, ranks, d_in, d_out)


def line(row: OpRow) -> str:
    """One row for people."""
    error = "" if row.error is None else f"  error {row.error:.1e}"
    return (
        f"{row.workload:9s} {row.batch:4d} rows {row.adapters:4d} adapters rank {row.ranks:11s} {row.d_in} "
        f"-> {row.d_out} "
        f"{row.family:12s} {row.us:10.1f} us  {row.ratio:7.2f} x floor{error}"
    )


def _measure(
    case: Case,
    options: OpOptions,
    device: torch.device,
    dtype: torch.dtype,
    rate: float,
    slow: set[tuple[str, str, str, int]],
) -> Iterator[OpRow]:
    counts = popularity(case.workload, case.batch)
    ranks = [case.ranks[i % len(case.ranks)] for i in range(len(counts))]
    must = branch_bytes(dict(enumerate(ranks)), case.batch, case.d_in, case.d_out, dtype.itemsize)
    layers = min(MAX_LAYERS[device.type], max(1, 2 * CACHE_BYTES[device.type] // must))
    if must > MAX_BYTES[device.type]:
        return
    slots = resident(ranks, (case.d_in, case.d_out), layers, dtype, device)
    problem = _problem(case, counts, slots, layers, dtype, device)
    base_us = 1e6 * _time(_dense(problem), layers, options.repeats, device, captured=True) / layers
    for family in options.families or (*_families(device), *PEERS):
        key = (case.workload, case.rank_name, family, case.d_in)
        if key in slow:
            continue
        walk = _walk(family, problem, slots)
        if walk is None:
            continue
        expected = _expected(problem, slots)
        y = problem.y[0].clone()
        walk(1)
        error = float((problem.y[0].double() - expected).abs().max() / expected.abs().max())
        problem.y[0].copy_(y)
        seconds = _time(walk, layers, options.repeats, device, captured=family in CAPTURED)
        us = 1e6 * seconds / layers
        yield OpRow(
            case.workload,
            case.batch,
            len(counts),
            case.rank_name,
            case.d_in,
            case.d_out,
            family,
            us,
            1e6 * must / rate,
            base_us,
            error,
            must * layers,
        )
        if us > SLOW_US[device.type]:
            slow.add(key)


def _families(device: torch.device) -> list[str]:
    return sorted(FAMILIES) if device.type == "cpu" else ["triton", "gather_bmm", "segmented"]


def _problem(
    case: Case, counts: Sequence[int], slots: Slots, layers: int, dtype: torch.dtype, device: torch.device
) -> Problem:
    plan = plan_of([slot for slot, n in enumerate(counts, start=1) for _ in range(n)])
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    turns = -(-2 * CACHE_BYTES[device.type] // (case.d_in * case.d_out * dtype.itemsize))
    weights = [random(case.d_out, case.d_in) * case.d_in**-0.5 for _ in range(min(layers, turns))]
    return Problem(
        plan,
        [random(case.batch, case.d_in) for _ in range(layers)],
        [random(case.batch, case.d_out) for _ in range(layers)],
        [weights[layer % len(weights)] for layer in range(layers)],
        plan.row_adapters - 1,
        slots.a,
        slots.b,
        slots.scales,
    )


def _walk(family: str, problem: Problem, slots: Slots) -> Callable[[int], None] | None:
    """Runs the first n layers of a family, or None where it cannot serve the case."""
    if family in PEERS:
        return PEERS[family](problem)
    try:
        operator: AdapterOps = make_operator(problem.plan, slots.table, family)
    except InternalFault:
        return None

    def walk(layers: int) -> None:
        for layer in range(layers):
            operator.apply(problem.y[layer], problem.x[layer], layer, (Module.O,))

    return walk


def _expected(problem: Problem, slots: Slots) -> torch.Tensor:
    """Layer 0 in float64."""
    out = problem.y[0].double().clone()
    for row, adapter in enumerate(problem.owners.tolist()):
        a, b = slots.a[adapter][0].double(), slots.b[adapter][0].double()
        out[row] += slots.scales[adapter] * ((problem.x[0][row].double() @ a.T) @ b)
    return out


def _dense(problem: Problem) -> Callable[[int], None]:
    """The projections themselves."""

    def walk(layers: int) -> None:
        for layer in range(layers):
            torch.mm(problem.x[layer], problem.weights[layer].T)

    return walk


def _time(
    walk: Callable[[int], None], layers: int, repeats: int, device: torch.device, *, captured: bool
) -> float:
    if device.type != "cuda" or not captured:
        return median_seconds(lambda: walk(layers), repeats, device)
    walk(layers)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        walk(layers)
    return median_seconds(graph.replay, repeats, device)


def best_by_case(rows: Sequence[OpRow]) -> dict[tuple[str, int, str], str]:
    """The fastest family of ours in each (workload, batch, ranks): what `ops.dispatch` is held against."""
    best: dict[tuple[str, int, str], OpRow] = {}
    for row in rows:
        key = (row.workload, row.batch, row.ranks)
        if row.family not in PEERS and (key not in best or row.us < best[key].us):
            best[key] = row
    return {key: row.family for key, row in best.items()}


def as_record(options: OpOptions, rows: Sequence[OpRow], rate: float) -> dict[str, object]:
    """The whole run as plain values."""
    return {
        "device": options.device,
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "copy_bytes_per_s": rate,
        "rows": [
            {name: getattr(row, name) for name in OpRow.__slots__} | {"ratio": row.ratio} for row in rows
        ],
    }


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers."""
    return float(np.exp(np.mean(np.log(values))))
