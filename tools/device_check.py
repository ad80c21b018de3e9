"""Everything that is to be settled on a CUDA device, in stages with a time limit and a file of results each.

`python tools/device_check.py --list` names the stages. `python tools/device_check.py --out DIR STAGE...` runs
some, `all` runs each that this machine can. A stage that fails or runs out of time does not stop the others;
a table of all ends the run, and `DIR/summary.json` has it too. Where there is no CUDA device, stages that
need one are skipped, and the kernels run in Triton's interpreter.

`--keep DIR` restores the compile caches of FlashInfer and Triton from DIR before the first stage and packs
them into DIR after the last, in pieces of at most 16 MiB. Needs nothing beyond what the project itself needs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PIECE_BYTES: Final = 16 << 20
CACHES: Final = (Path("~/.cache/flashinfer"), Path("~/.triton/cache"))
PIECES: Final = "caches.part"
BUILT: Final = (".o", ".so")
OLD_S: Final = 1_000_000_000
"""A time before any build."""
GRACE_S: Final = 10
LINES: Final = 15
"""Of a stage's end, in the summary."""
THREADS: Final = "2"
"""Of torch on the processor, in each process: tests run several, and one thread for each core in all of them
is slower.
"""
PYTEST: Final = (
    sys.executable,
    "-m",
    "pytest",
    "-q",
    "-p",
    "no:cacheprovider",
    "-W",
    "default",
    "--durations",
    "8",
)
"""Warnings are no errors: a device may come with other versions of the libraries than those that are pinned.
"""
CLI: Final = (sys.executable, "-m", "loraplex.cli")


@dataclass(frozen=True, slots=True)
class Stage:
    """One command. limit_s: after which it is killed. cuda: whether it needs a device. JSON in `command`
    stands for the file that it writes its figures to.
    """

    name: str
    what: str
    limit_s: int
    command: tuple[str, ...]
    cuda: bool = True
    environment: tuple[tuple[str, str], ...] = ()


JSON: Final = "{json}"


def sanitizer(tool: str) -> tuple[str, ...]:
    """The program that launches every kernel, under one tool of compute-sanitizer."""
    return (
        "compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "30",
        "--target-processes", "all", sys.executable, "-m", "tests.gpu.every_kernel",
    )  # fmt: skip


UNCACHED: Final = (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),)
"""Each tensor is an allocation of its own, so that an access beyond it is seen."""
STAGES: Final = (
    Stage("kernels", "every kernel once, against its definition", 240, (sys.executable, "-m", "tests.gpu.every_kernel"), cuda=False),
    Stage("layout", "FlashInfer over the page-major pool; graphs over thousands of mixes", 300,
          (*PYTEST, "-n", "0", "tests/gpu/test_flashinfer_layout.py", "tests/gpu/test_triton_graph.py", "tests/gpu/test_stream_copies.py")),
    Stage("plans", "random plans against float64, kernels and sampling", 300,
          (*PYTEST, "-n", "4", "tests/gpu/test_cuda_plans.py", "tests/gpu/test_cuda_sampling.py", "tests/ops/test_triton_lora.py")),
    Stage("methods", "every adapter method against PEFT; bases against transformers", 420,
          (*PYTEST, "-n", "4", "tests/gpu/test_cuda_methods.py", "tests/gpu/test_cuda_prefixes.py")),
    Stage("runner", "runner and adapters at level b, bitwise claims", 420,
          (*PYTEST, "-n", "4", "tests/gpu/test_cuda_runner.py", "tests/gpu/test_cuda_adapters.py")),
    Stage("residency", "pages, open and damaged copies, eviction, preemption", 420,
          (*PYTEST, "-n", "4", "tests/gpu/test_cuda_residency.py")),
    Stage("e2e", "end-to-end tests in float32 on the device", 480,
          (*PYTEST, "-n", "6", "-m", "gpu", "tests/e2e")),
    Stage("engine", "whole engines: depths, preemption, plan logs, other processes, 10,000 requests", 480,
          (*PYTEST, "-n", "3", "tests/gpu/test_cuda_engine.py")),
    Stage("demo", "the demo model in float32 and half precision", 300,
          (*PYTEST, "-n", "0", "tests/gpu/test_cuda_smollm2.py")),
    Stage("memcheck", "accesses out of bounds in any kernel", 420, sanitizer("memcheck"), environment=UNCACHED),
    Stage("racecheck", "races in shared memory", 420, sanitizer("racecheck"), environment=UNCACHED),
    Stage("initcheck", "reads of memory that nothing wrote", 420, sanitizer("initcheck"), environment=UNCACHED),
    Stage("ops", "operators: rows 1 to 512, distinct and skewed, rank 16 and mixed", 420,
          (*CLI, "bench", "ops", "--device", "cuda", "--batch", "1", "--batch", "8", "--batch", "64", "--batch", "256", "--batch", "512",
           "--rank", "16", "--rank", "64", "--rank", "8/16/32/64", "--json", JSON)),
    Stage("ops-full", "operators: every row of the table", 590, (*CLI, "bench", "ops", "--device", "cuda", "--json", JSON)),
    Stage("decode", "decode rows of the targets, cold adapters too", 590,
          (*CLI, "bench", "decode", "--device", "cuda", "--repeats", "2", "--json", JSON)),
    Stage("decode-cold", "64 requests over 64 cold adapters", 240,
          (*CLI, "bench", "decode", "--device", "cuda", "--repeats", "3", "--only", "1", "--only", "6", "--only", "14", "--json", JSON)),
    Stage("load", "cold adapters by stage, many at once, a swap under load", 420,
          (*CLI, "bench", "load", "--device", "cuda", "--ranks", "16", "--cold", "64", "--json", JSON)),
    Stage("prefix", "cached prefixes: conversations, a system prompt, the aLoRA pipeline, what they cost", 590,
          (*CLI, "bench", "prefix", "--device", "cuda", "--json", JSON)),
    Stage("step", "host time of a step", 240, (*CLI, "bench", "step", "--json", JSON), cuda=False),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a stage ended: passed, failed, timed out or skipped; its last lines."""

    stage: str
    result: str
    seconds: float
    tail: tuple[str, ...] = ()


def run_stage(stage: Stage, out: Path, environment: dict[str, str]) -> Outcome:
    """Run one stage; what it prints goes to `out/NAME.log` and to the terminal."""
    command = [str(out / f"{stage.name}.json") if word == JSON else word for word in stage.command]
    log = out / f"{stage.name}.log"
    print(f"== {stage.name}: {stage.what}", flush=True)
    started = time.monotonic()
    if shutil.which(command[0]) is None:
        return Outcome(stage.name, "skipped", 0.0, (f"{command[0]} is not installed",))
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment | dict(stage.environment),
            start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(stage.limit_s)
            result = "passed" if status == 0 else f"failed ({status})"
        except subprocess.TimeoutExpired:
            result = "timed out"
        finally:
            end_group(process)
    seconds = time.monotonic() - started
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    print("\n".join(lines[-LINES:]), flush=True)
    return Outcome(stage.name, result, round(seconds, 1), tuple(lines[-LINES:]))


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End the command and what it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(GRACE_S)
            return
        except subprocess.TimeoutExpired:
            continue


def has_cuda() -> bool:
    """Whether torch sees a device; asked in a process of its own, so that this one holds none."""
    if importlib.util.find_spec("torch") is None:
        return False
    probe = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", probe], check=False, capture_output=True).returncode == 0


def pack(caches: Sequence[Path], into: Path) -> int:
    """Write the caches as one archive in pieces; how many."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz", compresslevel=4) as archive:
        for index, cache in enumerate(caches):
            if cache.is_dir():
                archive.add(cache, arcname=str(index))
    into.mkdir(parents=True, exist_ok=True)
    for old in into.glob(f"{PIECES}*"):
        old.unlink()
    whole = data.getvalue()
    pieces = range(0, len(whole), PIECE_BYTES)
    for number, start in enumerate(pieces):
        (into / f"{PIECES}{number:02d}").write_bytes(whole[start : start + PIECE_BYTES])
    return len(pieces)


def unpack(source: Path, caches: Sequence[Path]) -> bool:
    """Put the caches of an archive in pieces back, below what is there already; False where there is no
    archive.
    """
    pieces = sorted(source.glob(f"{PIECES}*"))
    if not pieces:
        return False
    data = io.BytesIO(b"".join(piece.read_bytes() for piece in pieces))
    with tarfile.open(fileobj=data, mode="r:gz") as archive:
        for index, cache in enumerate(caches):
            inside = list(members_below(archive, str(index)))
            if inside:
                cache.mkdir(parents=True, exist_ok=True)
                archive.extractall(cache, members=inside, filter="data")
    return True


def members_below(archive: tarfile.TarFile, folder: str) -> Iterator[tarfile.TarInfo]:
    """Members of one folder of an archive, named from there on.

    What was built gets the whole second of its time, everything else a time before that: builders compare
    times to the nanosecond, which an archive does not keep, and would build anew what seems the least bit
    older than its source.
    """
    for member in archive.getmembers():
        first, _, rest = member.name.partition("/")
        if first == folder and rest:
            built = rest.endswith(BUILT)
            yield member.replace(name=rest, mtime=math.floor(member.mtime) if built else OLD_S)


def chosen(names: Sequence[str]) -> list[Stage]:
    """Stages by name, in the order asked for; exits with what there is for an unknown one."""
    known = {stage.name: stage for stage in STAGES}
    if list(names) == ["all"]:
        return list(STAGES)
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"no stage {unknown[0]!r}; there are {', '.join(known)}")
    return [known[name] for name in names]


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """The table of a run."""
    width = max(len(outcome.stage) for outcome in outcomes)
    return [f"{o.stage:{width}}  {o.result:12} {o.seconds:7.1f} s" for o in outcomes]


def main(words: Sequence[str] | None = None) -> int:
    """Run what the words ask for; 0 where no stage failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="*", help="names, or all")
    parser.add_argument("--list", action="store_true", help="name the stages and stop")
    parser.add_argument("--out", type=Path, default=Path("device-check"), help="folder of results")
    parser.add_argument("--keep", type=Path, help="folder that compile caches come from and go to")
    parser.add_argument(
        "--limit", type=int, help="seconds of a stage at most, where that is less than its own"
    )
    options = parser.parse_args(words)
    if options.list:
        for stage in STAGES:
            print(f"{stage.name:12} {'cuda' if stage.cuda else 'any':5} {stage.limit_s:4} s  {stage.what}")
        return 0
    stages = chosen(options.stages)
    if not stages:
        parser.error("name at least one stage, or all")
    options.out.mkdir(parents=True, exist_ok=True)
    caches = [path.expanduser() for path in CACHES]
    if options.keep is not None and unpack(options.keep, caches):
        print(f"compile caches restored from {options.keep}", flush=True)
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {"OMP_NUM_THREADS": THREADS, **os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    cuda = has_cuda()
    outcomes = []
    for stage in stages:
        if stage.cuda and not cuda:
            outcomes.append(Outcome(stage.name, "skipped", 0.0, ("there is no CUDA device",)))
        else:
            limit = min(stage.limit_s, options.limit or stage.limit_s)
            outcomes.append(
                run_stage(dataclasses.replace(stage, limit_s=limit), options.out.resolve(), environment)
            )
        written = [dataclasses.asdict(outcome) for outcome in outcomes]
        (options.out / "summary.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    if options.keep is not None:
        print(f"compile caches packed into {pack(caches, options.keep)} pieces in {options.keep}")
    print("\n".join(summary(outcomes)))
    return int(any(outcome.result not in ("passed", "skipped") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
