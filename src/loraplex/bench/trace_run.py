"""`bench trace`: a real server under S-LoRA's traces, true Zipf, churn and a flood, by policy.

One server a policy answers all traces in turn. Every request names an adapter and carries its tenant's key;
clients are processes of their own. In a churn this process publishes new revisions meanwhile, as an operator
would. Owns the servers and every client process that it starts, and ends them.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec
import numpy as np

from loraplex.bench.http_traffic import (
    PARTS,
    START_S,
    HttpOptions,
    made_model,
    serving,
    write_adapters,
)
from loraplex.bench.model_shapes import ATTENTION
from loraplex.bench.plot import Series, document
from loraplex.bench.synthetic import write_config
from loraplex.bench.trace_client import Orders
from loraplex.bench.traces import FLOOD, LIGHT, Outcome, Row, Seen, Trace, arrivals, line, row, waits
from loraplex.core.errors import CallerError, ErrorCode

CLIENT: Final = "loraplex.bench.trace_client"
TENANTS: Final = ("default", *LIGHT, FLOOD)
DEFAULT_POLICY: Final = "default"
PATIENCE_S: Final = 120.0
"""What requests may take beyond the trace's time."""
Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """http: of the server and the adapters. policies: by name, none for the server's own. early_abort_s: see
    `serve`.
    """

    http: HttpOptions
    policies: tuple[str, ...] = ()
    early_abort_s: float | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """One trace under one policy, with what became of every request."""

    row: Row
    outcomes: list[Outcome]


def run_traces(options: TraceOptions, traces: Sequence[Trace], say: Say) -> list[Run]:
    """Every trace under every policy. Raises `invalid_request` where a request fails that no overload
    explains.
    """
    runs = []
    for policy in options.policies or (DEFAULT_POLICY,):
        with ExitStack() as stack:
            work = Path(stack.enter_context(TemporaryDirectory(prefix="loraplex-bench-")))
            model = options.http.model or made_model(work / "model")
            config = json.loads((model / "config.json").read_text(encoding="utf-8"))
            adapters = work / "adapters"
            write_adapters(adapters, config, options.http.rank, max(trace.adapters for trace in traces))
            keys = {tenant: secrets.token_hex(16) for tenant in TENANTS}
            more = ["--api-key-file", str(_write_keys(work / "keys", keys))]
            more += [] if policy == DEFAULT_POLICY else ["--policy", policy]
            more += [] if options.early_abort_s is None else ["--early-abort-s", str(options.early_abort_s)]
            port, _ = stack.enter_context(serving(options.http, model, adapters, more))
            for trace in traces:
                say(f"{policy}: {trace.name}, {trace.seconds:g} s and what is open then")
                runs.append(
                    _one(options.http, policy, trace, port, keys, adapters, int(config["vocab_size"]))
                )
                say(line(runs[-1].row))
    return runs


def _write_keys(path: Path, keys: dict[str, str]) -> Path:
    entries = [
        {
            "sha256": hashlib.sha256(key.encode()).hexdigest(),
            "tenant": tenant,
            "role": "admin" if tenant == "default" else "user",
        }
        for tenant, key in keys.items()
    ]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


def _one(
    options: HttpOptions,
    policy: str,
    trace: Trace,
    port: int,
    keys: dict[str, str],
    adapters: Path,
    vocab: int,
) -> Run:
    come = arrivals(trace, options.seed)
    start = time.monotonic() + START_S
    patience = trace.seconds + PATIENCE_S
    children: list[subprocess.Popen[bytes]] = []
    try:
        for part in range(PARTS):
            mine = come[part::PARTS]
            orders = Orders(port, mine, start, patience, keys, "a{}", vocab, options.seed + part)
            child = subprocess.Popen(
                [sys.executable, "-m", CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            children.append(child)
            assert child.stdin is not None
            child.stdin.write(msgspec.json.encode(orders))
            child.stdin.close()
            child.stdin = None
        swaps = _churn(trace, options, port, keys["default"], adapters, start)
        seen = [msgspec.json.decode(child.communicate()[0], type=Seen) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    wrong = sum(part.wrong for part in seen)
    if wrong:
        message = next(part.message for part in seen if part.message)
        raise CallerError(ErrorCode.INVALID_REQUEST, f"{wrong} requests of {trace.name} failed: {message}")
    outcomes = [one for part in seen for one in part.outcomes]
    return Run(row(trace, policy, outcomes, max(part.ended for part in seen), swaps), outcomes)


def _churn(trace: Trace, options: HttpOptions, port: int, key: str, adapters: Path, start: float) -> int:
    """Publish a new revision of a random adapter at the trace's rate until its time is over; how many."""
    swaps, rng = 0, np.random.default_rng((options.seed, 1))
    while trace.swaps:
        due = start + (swaps + 1) / trace.swaps
        if due >= start + trace.seconds:
            break
        time.sleep(max(0.0, due - time.monotonic()))
        folder = adapters / f"swapped{swaps}"
        write_config(folder, options.rank, 2 * options.rank + (swaps + 1) / 1024, ATTENTION)
        (folder / "adapter_model.safetensors").hardlink_to(adapters / "a0" / "adapter_model.safetensors")
        _publish(port, key, f"a{int(rng.integers(trace.adapters))}", folder)
        swaps += 1
    return swaps


def _publish(port: int, key: str, alias: str, folder: Path) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        connection.request("PUT", f"/v1/adapters/{alias}", json.dumps({"source": str(folder)}), headers)
        answer = connection.getresponse()
        text = answer.read().decode("utf-8", "replace")
    finally:
        connection.close()
    if answer.status >= 300:
        raise CallerError(ErrorCode.INVALID_REQUEST, f"a swap of {alias} was refused: {text[:300]}")


def plots(runs: Sequence[Run]) -> str:
    """For each trace how many requests waited at least so long for their first token and between tokens, a
    line a policy, and for a flood a line a kind of tenant.
    """
    charts: list[tuple[str, str, str, Series]] = []
    for name in dict.fromkeys(run.row.trace for run in runs):
        first: dict[str, list[tuple[float, float]]] = {}
        between: dict[str, list[tuple[float, float]]] = {}
        for run in runs:
            if run.row.trace != name:
                continue
            done = [one for one in run.outcomes if not one.code]
            for kind in dict.fromkeys("flood" if one.tenant == FLOOD else "light" for one in done):
                label = run.row.policy if run.row.light is None else f"{run.row.policy}, {kind}"
                mine = [one for one in done if (one.tenant == FLOOD) == (kind == "flood")]
                first[label] = waits([one.ttft for one in mine])
                between[label] = waits([gap for one in mine for gap in one.gaps])
        charts.append((f"{name}: time to first token", "seconds", "requests at least", first))
        charts.append((f"{name}: time between tokens", "seconds", "gaps at least", between))
    return document(charts)
