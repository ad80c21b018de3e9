"""`loraplex bench decode`: output tokens per second of base and adapters, beside transformers + PEFT in the same run.

Times on a shared CPU are noise, so every row is repeated and reported with its ratio to our own base and to the peer's
same row. Prompts are random token ids, output is greedy and ignores end-of-sequence, so that all do the same work.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.request import SamplingParams


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """requests: prompts in one batch. adapters: distinct adapters over them, 0 is the base."""

    requests: int
    adapters: int

    @property
    def name(self) -> str:
        """How the table names it."""
        if self.adapters == 0:
            return f"{self.requests} x base"
        return f"{self.requests} over {self.adapters} adapter{'s' if self.adapters > 1 else ''}"


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """Tokens per second of one case: the median of the repeats, and their spread."""

    case: str
    engine: str
    tokens_per_s: float
    slowest: float
    fastest: float


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """What is measured."""

    model: Path
    adapters: tuple[tuple[str, Path], ...]
    device: str = "cpu"
    dtype: str = "auto"
    prompt_tokens: int = 64
    new_tokens: int = 32
    repeats: int = 3
    peer: bool = True


CASES = (DecodeCase(1, 0), DecodeCase(8, 0), DecodeCase(8, 1), DecodeCase(8, 8))


def run_decode(options: DecodeOptions, report: Callable[[str], None]) -> list[DecodeRow]:
    """Measure every case that the adapters allow. report: called with a line of progress."""
    if options.device == "cpu":
        _use_all_cores()
    rows = _ours(options, report)
    if options.peer:
        rows += _peer(options, report)
    return rows


def _cases(options: DecodeOptions) -> list[DecodeCase]:
    have = len(options.adapters)
    return [DecodeCase(c.requests, min(c.adapters, have)) for c in CASES if c.adapters == 0 or have]


def _prompts(options: DecodeOptions, count: int, vocab: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, vocab, options.prompt_tokens).tolist() for _ in range(count)]


def _measure(options: DecodeOptions, case: DecodeCase, engine: str, run: Callable[[], int]) -> DecodeRow:
    run()
    rates = []
    for _ in range(options.repeats):
        started = time.perf_counter()
        tokens = run()
        rates.append(tokens / (time.perf_counter() - started))
    return DecodeRow(case.name, engine, statistics.median(rates), min(rates), max(rates))


def _ours(options: DecodeOptions, report: Callable[[str], None]) -> list[DecodeRow]:
    from loraplex.api import LLM

    rows = []
    params = SamplingParams(max_tokens=options.new_tokens, temperature=0.0, ignore_eos=True)
    with LLM(options.model, dict(options.adapters), device=options.device, dtype=options.dtype) as llm:
        names = [name for name, _ in options.adapters]
        for case in _cases(options):
            prompts = _prompts(options, case.requests, llm.vocab_size)
            chosen = [names[i % case.adapters] if case.adapters else None for i in range(case.requests)]

            def run(prompts: Sequence[list[int]] = prompts, chosen: Sequence[str | None] = chosen) -> int:
                outputs = llm.generate(prompts, chosen, params)
                return sum(len(output.token_ids) for output in outputs)

            rows.append(_measure(options, case, "loraplex", run))
            report(f"loraplex {case.name}: {rows[-1].tokens_per_s:.1f} tokens/s")
    return rows


def _peer(options: DecodeOptions, report: Callable[[str], None]) -> list[DecodeRow]:
    import torch

    from loraplex.model.dtypes import resolve_dtype

    try:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise CallerError(
            ErrorCode.CONFIG_INVALID, f"the peer needs {error.name}; install the dev extra or pass --no-peer"
        ) from error
    dtype, _ = resolve_dtype(options.dtype, torch.device(options.device))
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    model = model.to(options.device).eval()
    vocab = int(model.config.vocab_size)
    names = [name for name, _ in options.adapters]
    rows = []
    cases = sorted(_cases(options), key=lambda case: case.adapters > 0)
    for case in cases:
        if case.adapters and not isinstance(model, PeftModel):
            model = PeftModel.from_pretrained(model, options.adapters[0][1], adapter_name=names[0])
            for name, path in options.adapters[1:]:
                model.load_adapter(path, adapter_name=name)
            model.eval()
        prompts = torch.tensor(_prompts(options, case.requests, vocab), device=options.device)
        extra = (
            {"adapter_names": [names[i % case.adapters] for i in range(case.requests)]}
            if case.adapters
            else {}
        )

        def run(model: Any = model, prompts: torch.Tensor = prompts, extra: dict[str, Any] = extra) -> int:
            with torch.inference_mode():
                out = model.generate(
                    input_ids=prompts, attention_mask=torch.ones_like(prompts), do_sample=False,
                    max_new_tokens=options.new_tokens, min_new_tokens=options.new_tokens, **extra,
                )  # fmt: skip
            return int(out.shape[0] * (out.shape[1] - prompts.shape[1]))

        rows.append(_measure(options, case, "transformers + PEFT", run))
        report(f"transformers + PEFT {case.name}: {rows[-1].tokens_per_s:.1f} tokens/s")
    return rows


def _use_all_cores() -> None:
    import os

    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))


def table(rows: Sequence[DecodeRow]) -> list[tuple[str, ...]]:
    """Lines of (case, ours, peer, ratio to the peer, ratio to our base with as many requests)."""
    ours = {row.case: row for row in rows if row.engine == "loraplex"}
    peers = {row.case: row for row in rows if row.engine != "loraplex"}
    lines: list[tuple[str, ...]] = []
    for name, row in ours.items():
        peer = peers.get(name)
        base = ours.get(f"{name.split()[0]} x base")
        lines.append(
            (
                name,
                f"{row.tokens_per_s:.1f}",
                f"{peer.tokens_per_s:.1f}" if peer else "",
                f"{row.tokens_per_s / peer.tokens_per_s:.2f}" if peer else "",
                f"{row.tokens_per_s / base.tokens_per_s:.2f}" if base else "",
            )
        )
    return lines


def as_json(options: DecodeOptions, rows: Sequence[DecodeRow]) -> str:
    """The whole run as JSON: rows, options, machine and date."""
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.processor() or platform.machine(),
        "device": options.device,
        "dtype": options.dtype,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "repeats": options.repeats,
        "adapters": [name for name, _ in options.adapters],
        "rows": [asdict(row) for row in rows],
    }
    return json.dumps(record, indent=2)
