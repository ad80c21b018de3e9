"""A real server under real traffic: `bench http` with a device. Clients are processes of their own.

Adapters are folders that share one file of tensors and differ in their scale, so each is a revision with an
image of its own and the disk holds one. Owns the server and every client process that it starts, and ends
them.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec

from loraplex.bench.http_client import Orders
from loraplex.bench.http_target import write_tokenizer
from loraplex.bench.model_shapes import ATTENTION, LLAMA_8B, write_shape
from loraplex.bench.synthetic import write_adapter, write_config
from loraplex.bench.traffic import CASES, Row, Seen, Traffic, line, mixed, row
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.model.spec import spec_from_config

CLIENT: Final = "loraplex.bench.http_client"
ENGINE: Final = b"loraplex.process.engine_process"
RANK: Final = 16
PARTS: Final = 4
START_S: Final = 1.0
"""What client processes need to come up."""
LOOK_S: Final = 0.1
"""How often clients are looked at meanwhile."""
CPU_CASES: Final = (
    Traffic(clients=4, prompt=32, new=32),
    mixed(clients=4, adapters=4, prompt_most=300, new_most=100),
    mixed(rate=0.5, adapters=4, prompt_most=300, new_most=100),
)
Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """model: folder, None for Llama-3.1-8B's shapes with random weights. warm, seconds: before, and of each
    case's measured time.
    """

    model: Path | None
    device: str
    dtype: str = "auto"
    warm: float = 3.0
    seconds: float = 15.0
    rank: int = RANK
    seed: int = 0


def cases_of(device: str, only: Sequence[int], text: bool) -> list[Traffic]:
    """The cases to run. only: their numbers, none is all."""
    known = CASES if device == "cuda" else CPU_CASES
    if any(not 0 <= index < len(known) for index in only):
        raise CallerError(
            ErrorCode.CONFIG_INVALID, f"--only takes numbers from 0 to {len(known) - 1}", param="only"
        )
    chosen = [known[index] for index in only] or list(known)
    return [msgspec.structs.replace(case, text=text) for case in chosen]


def run_traffic(options: HttpOptions, cases: Sequence[Traffic], say: Say) -> list[Row]:
    """Every case against one server. say: told about progress. Raises `invalid_request` where a request
    fails.
    """
    with ExitStack() as stack:
        work = Path(stack.enter_context(TemporaryDirectory(prefix="loraplex-bench-")))
        model = options.model or made_model(work / "model")
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        count = max(case.adapters for case in cases)
        if count:
            write_adapters(work / "adapters", config, options.rank, count)
        started = time.perf_counter()
        port, pid = stack.enter_context(serving(options, model, work / "adapters" if count else None))
        say(f"server with {count} adapters ready after {time.perf_counter() - started:.1f} s")
        rows = []
        for case in cases:
            figures = _measure(options, case, port, pid, model.name, int(config["vocab_size"]))
            say(line(figures))
            rows.append(figures)
    return rows


END_S: Final = 30.0
"""What a server may take to end: nothing is asked of it any more."""


def write_adapters(root: Path, config: dict[str, object], rank: int, count: int) -> None:
    """`count` folders a0, a1, ... below root with LoRAs of `rank` on q, k, v and o."""
    root.mkdir()
    first = write_adapter(root / "a0", spec_from_config(config), rank, 0, ATTENTION)
    for index in range(1, count):
        folder = root / f"a{index}"
        write_config(folder, rank, 2 * rank + index / 64, ATTENTION)
        os.link(first / "adapter_model.safetensors", folder / "adapter_model.safetensors")


def made_model(folder: Path) -> Path:
    """Llama-3.1-8B's shapes in a new folder, for random weights."""
    folder.mkdir()
    return write_shape(LLAMA_8B, write_tokenizer(folder))


@contextmanager
def serving(
    options: HttpOptions, model: Path, adapters: Path | None, more: Sequence[str] = ()
) -> Iterator[tuple[int, int]]:
    """A real server's port and process id; it is ended whatever happens. more: options of `serve`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "loraplex.cli", "serve", str(model), "--port", str(port), "--device",
        options.device,
        "--dtype", options.dtype, "--log-level", "warning", "--drain-s", "0",
    ]  # fmt: skip
    command += ["--max-model-len", "8192", "--load-format", "dummy"] if options.model is None else []
    command += ["--adapter-dir", str(adapters)] if adapters is not None else []
    command += more
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            if not any("ready on" in text for text in process.stdout or ()):
                raise CallerError(ErrorCode.CONFIG_INVALID, "the server ended before it was ready")
            yield port, process.pid
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:  # its children end with it
                process.kill()


def _measure(options: HttpOptions, case: Traffic, port: int, pid: int, base: str, vocab: int) -> Row:
    start = time.monotonic() + START_S
    children = []
    try:
        for part in range(PARTS):
            orders = Orders(
                port,
                case,
                part,
                PARTS,
                options.seed,
                start,
                options.warm,
                options.seconds,
                base,
                "a{}",
                vocab,
            )
            child = subprocess.Popen(
                [sys.executable, "-m", CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            children.append(child)
            assert child.stdin is not None
            child.stdin.write(msgspec.json.encode(orders))
            child.stdin.close()
            child.stdin = None
        engine = _engine_of(pid)
        lasting = _wait_until(start + options.warm, children)
        before = used_s(pid), used_s(engine)
        lasting = lasting and _wait_until(start + options.warm + options.seconds, children)
        after = used_s(pid), used_s(engine)
        ended = children if lasting else [child for child in children if child.poll() is not None]
        seen = [msgspec.json.decode(child.communicate()[0], type=Seen) for child in ended]
    finally:
        for child in children:
            with child:  # closes its pipes and waits
                child.kill()
    failed = sum(part.failed for part in seen)
    if failed:
        message = next(part.message for part in seen if part.message)
        raise CallerError(ErrorCode.INVALID_REQUEST, f"{failed} requests of {case.name} failed: {message}")
    return row(case, seen, options.seconds, after[0] - before[0], after[1] - before[1])


def _wait_until(moment: float, children: Sequence[subprocess.Popen[bytes]]) -> bool:
    """Wait for a moment of the monotonic clock; whether no client ended before it, as one does that fails."""
    while (left := moment - time.monotonic()) > 0:
        if any(child.poll() is not None for child in children):
            return False
        time.sleep(min(left, LOOK_S))
    return True


def used_s(pid: int) -> float:
    """Processor seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _engine_of(server: int) -> int:
    """The engine's process among the children of a server."""
    for children in Path(f"/proc/{server}/task").glob("*/children"):
        for pid in children.read_text(encoding="utf-8").split():
            if ENGINE in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
    raise CallerError(ErrorCode.CONFIG_INVALID, f"the server {server} has no engine process")
