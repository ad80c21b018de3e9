"""Measures every demo adapter against the base on its held-out cases, and fails if one is not clearly better.

Two ways to get the answers: from a running server, all adapters and the base mixed in one concurrent run
(`python demo/evaluate.py --url http://127.0.0.1:8000`), or from transformers and PEFT themselves
(`--reference`). The first needs httpx and rich only, none of the packages of training.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

import httpx
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from demo.cases import Case, adapter_folders, read_heldout
from demo.checkers import is_inside, is_right

CLEAR_GAIN: Final = 0.25
"""An adapter must be right in this share of the cases more often than the base read leniently."""
CLEAR_SHARE: Final = 0.8
"""And it must be right in this share of the cases."""
REQUEST_TIMEOUT_S: Final = 600.0


@dataclass(slots=True)
class Score:
    """Right answers of one adapter's held-out cases."""

    cases: int
    base: int = 0
    base_inside: int = 0
    adapter: int = 0

    @property
    def clear(self) -> bool:
        """Whether the adapter is worth showing."""
        gain = self.adapter - max(self.base, self.base_inside)
        return gain >= CLEAR_GAIN * self.cases and self.adapter >= CLEAR_SHARE * self.cases

    def add(self, case: Case, answer: str, from_base: bool) -> None:
        """Count one answer."""
        right = is_right(case.checker, answer, case.expected)
        if from_base:
            self.base += right
            self.base_inside += is_inside(case.checker, answer, case.expected)
        else:
            self.adapter += right


@dataclass(slots=True)
class Run:
    """What one evaluation saw. skipped: adapters that the server does not serve."""

    source: str
    scores: dict[str, Score]
    requests: int = 0
    completion_tokens: int = 0
    wall_s: float = 0.0
    failures: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Every request answered and every adapter that was asked clearly better than the base."""
        clear = bool(self.scores) and all(score.clear for score in self.scores.values())
        return clear and not self.failures


@dataclass(frozen=True, slots=True)
class Job:
    """One case for one model."""

    adapter: str
    model: str
    case: Case


def models_of(listing: dict[str, Any]) -> tuple[str, set[str]]:
    """(base, adapters) of a /v1/models answer: adapters have a parent. Raises ValueError without one base."""
    bases = [m["id"] for m in listing["data"] if not m.get("parent")]
    if len(bases) != 1:
        raise ValueError(
            f"/v1/models lists {len(bases)} models without a parent ({', '.join(bases)}), expected one base"
        )
    return bases[0], {m["id"] for m in listing["data"] if m.get("parent")}


async def ask(client: httpx.AsyncClient, job: Job) -> tuple[str, int]:
    """(answer, completion tokens) from /v1/chat/completions, greedy."""
    body: dict[str, Any] = {"model": job.model, "temperature": 0, "max_tokens": job.case.max_tokens}
    if job.case.tools:
        body |= {"messages": list(job.case.bare().messages), "tools": list(job.case.tools)}
    else:
        body["messages"] = list(job.case.messages)
    response = await client.post("/v1/chat/completions", json=body)
    if response.is_error:
        raise RuntimeError(f"{job.model}: HTTP {response.status_code} {response.text[:200]}")
    answer = response.json()
    return text_of(answer["choices"][0]["message"]), answer["usage"]["completion_tokens"]


def text_of(message: dict[str, Any]) -> str:
    """An answer as its model wrote it: calls between their tags."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    tagged = [
        f'<tool_call>{{"name": {json.dumps(call["name"])}, "arguments": {call["arguments"]}}}</tool_call>'
        for call in calls
    ]
    return "\n".join([*filter(None, [message["content"]]), *tagged])


async def through_server(
    url: str,
    cases: dict[str, list[Case]],
    concurrency: int,
    transport: httpx.AsyncBaseTransport | None = None,
) -> Run:
    """All cases for base and adapters, shuffled, `concurrency` at a time. What is not served is skipped by name."""
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    client = httpx.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT_S, limits=limits, transport=transport)
    async with client:
        listing = await client.get("/v1/models")
        base, adapters = models_of(listing.raise_for_status().json())
        served = {name: rows for name, rows in cases.items() if name in adapters}
        if not served:
            raise ValueError(
                f"the server serves none of {', '.join(cases)}; it serves {', '.join(sorted(adapters))}"
            )
        scores = {name: Score(len(rows)) for name, rows in served.items()}
        run = Run(url, scores, skipped=sorted(cases.keys() - adapters))
        jobs = [
            Job(name, model, case) for name, rows in served.items() for case in rows for model in (name, base)
        ]
        Random(0).shuffle(jobs)
        waiting = iter(jobs)

        async def work() -> None:
            for job in waiting:
                try:
                    answer, tokens = await ask(client, job)
                except (httpx.HTTPError, RuntimeError) as error:
                    run.failures.append(str(error) or repr(error))
                    continue
                run.completion_tokens += tokens
                run.scores[job.adapter].add(job.case, answer, from_base=job.model == base)

        started = time.monotonic()
        await asyncio.gather(*(work() for _ in range(concurrency)))
        run.wall_s, run.requests = time.monotonic() - started, len(jobs)
    return run


def through_reference(folders: dict[str, Path], cases: dict[str, list[Case]], dtype: str) -> Run:
    """The same with transformers and PEFT, one adapter after the other."""
    from demo import reference
    from loraplex.model.gguf import demo_model
    from loraplex.model.progress import terminal_progress

    with terminal_progress() as progress:
        model_folder = demo_model(progress)
    tokenizer, base = reference.load_tokenizer(model_folder), reference.load_base(model_folder, dtype)
    run = Run(f"transformers and PEFT, {dtype}", {name: Score(len(rows)) for name, rows in cases.items()})
    started = time.monotonic()
    for name in track(cases, "Adapters", console=Console(stderr=True)):
        for folder in (None, folders[name]):
            with reference.with_adapter(base, folder) as model:
                answers = reference.answer(model, tokenizer, cases[name])
            for case, answer in zip(cases[name], answers, strict=True):
                run.scores[name].add(case, answer, from_base=folder is None)
            run.requests += len(answers)
    run.wall_s = time.monotonic() - started
    return run


def show(run: Run, console: Console) -> None:
    """Base against adapter as a table, then what failed."""
    table = Table(title=f"Held-out accuracy, {run.source}")
    table.add_column("adapter")
    for title in ("cases", "base", "base, anywhere in its text", "adapter", "verdict"):
        table.add_column(title, justify="right")
    for name, score in run.scores.items():
        shares = (
            f"{100 * right / score.cases:.0f} %" for right in (score.base, score.base_inside, score.adapter)
        )
        table.add_row(
            name, str(score.cases), *shares, "better" if score.clear else "[red]not clearly better[/red]"
        )
    console.print(table)
    if run.skipped:
        console.print(
            f"skipped, because the server does not serve them (its log says why): {', '.join(run.skipped)}",
            style="yellow",
        )
    rate = f", {run.completion_tokens / run.wall_s:.0f} tokens/s" if run.completion_tokens else ""
    console.print(f"{run.requests} requests in {run.wall_s:.0f} s{rate}, {len(run.failures)} failed")
    for failure in run.failures[:5]:
        console.print(f"failed: {failure}", style="red", markup=False)


def as_json(run: Run) -> dict[str, Any]:
    """The run as plain data."""
    scores = {name: asdict(score) | {"clear": score.clear} for name, score in run.scores.items()}
    return asdict(run) | {"scores": scores, "passed": run.passed}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 only if every request was answered and every adapter is clearly better than the base."""
    parser = argparse.ArgumentParser(description="Held-out accuracy of base and demo adapters.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="server to ask (%(default)s)")
    parser.add_argument("--concurrency", type=int, default=16, help="requests in flight (%(default)s)")
    parser.add_argument("--adapter", action="append", help="only this adapter; may be repeated")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument(
        "--reference", action="store_true", help="ask transformers and PEFT instead of a server"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="for --reference (%(default)s)"
    )
    arguments = parser.parse_args(argv)
    folders = adapter_folders()
    unknown = sorted(set(arguments.adapter or ()) - folders.keys())
    if unknown or arguments.concurrency < 1:
        parser.error(
            f"no demo adapter {unknown[0]}, there are {', '.join(folders)}"
            if unknown
            else "--concurrency must be 1 or more"
        )
    chosen = {
        name: path for name, path in folders.items() if not arguments.adapter or name in arguments.adapter
    }
    cases = {name: read_heldout(path) for name, path in chosen.items()}
    console = Console()
    try:
        if arguments.reference:
            run = through_reference(chosen, cases, arguments.dtype)
        else:
            run = asyncio.run(through_server(arguments.url, cases, arguments.concurrency))
    except (httpx.HTTPError, ValueError) as error:
        console.print(f"cannot evaluate through {arguments.url}: {error}", style="red", markup=False)
        return 2
    show(run, console)
    if arguments.json:
        arguments.json.write_text(json.dumps(as_json(run), indent=2) + "\n", encoding="utf-8")
    return 0 if run.passed else 1


if __name__ == "__main__":
    sys.exit(main())
