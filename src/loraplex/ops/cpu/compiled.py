"""Builds the CPU kernels (projections, layers, adapters, sampling) once for this machine and loads them.

The shared object lies in the cache folder (`LORAPLEX_CACHE`, else the user's cache folder) under a name made
from the source's bytes, the compiler and its flags, the processor and the OpenMP library, so that another
machine or version never finds it. It is linked against the OpenMP library that torch has already loaded: one
thread pool in the process, and torch's thread count holds for both.

Without a usable compiler there are none: `library()` says why, once, in the log, and `status()` says it to
whoever asks; torch code serves instead. Never compiles while a step runs: call `library()` at start-up.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

_LOG = logging.getLogger("loraplex.ops")
_HERE: Final = Path(__file__).resolve().parent
UNITS: Final = {
    "lora_cpu.cpp": "-ffp-contract=fast",
    "dense_cpu.cpp": "-ffp-contract=fast",
    "step_cpu.cpp": "-ffp-contract=fast",
    "sample_cpu.cpp": "-ffp-contract=off",
}
"""Compiled files and how each may contract products: penalties round like torch's, projections fuse."""
HEADERS: Final = ("gemm.h", "lanes.h", "lora.h", "matrix_unit.h", "noise.h", "rows.h", "team.h", "tiles.h")
COMPILE_FLAGS: Final = (
    "-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fwrapv", "-fPIC", "-fopenmp", "-w",
)  # fmt: skip
_SIGNATURES: Final = {
    "lora_apply_float32": "ppipipi",
    "lora_apply_bfloat16": "ppipipi",
    "lora_apply_float16": "ppipipi",
    "dense_bfloat16": "ppiiipipi",
    "dense_float32": "ppiiipipi",
    "dense_pack_bfloat16": "piip",
    "dense_pack_float32": "piip",
    "dense_unpack_bfloat16": "piip",
    "dense_unpack_float32": "piip",
    "step_layers_bfloat16": "ppiii",
    "step_layers_float32": "ppiii",
    "sample_draw": "pipiipp",
    "sample_penalise": "pipiippipp",
    "sample_best": "piiiip",
}
"""Exported functions and their arguments: p a pointer, i an int64."""
_TIMEOUT_S: Final = 600
"""Seconds: a machine whose cores are all taken compiles for minutes, and does so once."""


class KernelUnavailable(Exception):
    """There is no compiled kernel on this machine; the text says why. Not an error of a request."""


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded kernels: their file, and the vector path compiled in (2 bf16 products, 1 AVX-512, 0
    neither).

    matrix_unit: bf16 projections run in the processor's tile unit.
    """

    handle: ctypes.CDLL
    path: Path
    vector_level: int
    matrix_unit: bool


def cache_folder() -> Path:
    """Where compiled kernels lie: under LORAPLEX_CACHE, else XDG_CACHE_HOME/loraplex, else
    ~/.cache/loraplex.
    """
    own = os.environ.get("LORAPLEX_CACHE")
    if own:
        return Path(own).expanduser().absolute() / "kernels"
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "loraplex" / "kernels"


@functools.cache
def _loaded() -> Library | KernelUnavailable:
    try:
        found = load(build(cache_folder()))
    except KernelUnavailable as reason:
        _LOG.warning(
            "the compiled CPU kernels are not used, slower torch code serves adapters and sampling: %s",
            reason,
        )
        return reason
    _LOG.info("CPU kernels: %s (vector level %d)", found.path, found.vector_level)
    return found


def library() -> Library | None:
    """The kernels, built on the first call of the process; None where they cannot be had."""
    found = _loaded()
    return found if isinstance(found, Library) else None


def status() -> str:
    """One line for people and metrics: whether compiled kernels serve on CPU, or why not."""
    found = _loaded()
    if isinstance(found, Library):
        return f"compiled, vector level {found.vector_level}{', matrix unit' if found.matrix_unit else ''}"
    return f"torch: {found}"


def build(folder: Path) -> Path:
    """The shared object for this machine in `folder`, compiled if it is not there; raises
    `KernelUnavailable`.
    """
    compiler, version = find_compiler()
    target = folder / f"kernels-{fingerprint(version)}.so"
    if target.is_file():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = _compile(compiler, Path(scratch))
            made.replace(target)  # whole or not at all, whoever else builds at the same time
    except OSError as error:
        raise KernelUnavailable(f"the cache folder {folder} cannot be written: {error}") from error
    return target


def load(path: Path) -> Library:
    """Load a compiled kernel; raises `KernelUnavailable`."""
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelUnavailable(f"{path} cannot be loaded: {error}") from error
    handle.lora_vector_level.restype = ctypes.c_int32
    handle.lora_max_threads.restype = ctypes.c_int32
    handle.dense_matrix_unit.restype = ctypes.c_int32
    handle.dense_packed_bytes.restype = ctypes.c_int64
    handle.dense_packed_bytes.argtypes = [ctypes.c_int64] * 3
    for name, arguments in _SIGNATURES.items():
        function = getattr(handle, name)
        function.restype = None
        function.argtypes = [ctypes.c_void_p if kind == "p" else ctypes.c_int64 for kind in arguments]
    return Library(handle, path, int(handle.lora_vector_level()), bool(handle.dense_matrix_unit()))


def has_matrix_unit() -> bool:
    """Whether this processor multiplies bf16 matrices in a unit of its own (AMX)."""
    return "amx_bf16" in processor().split()


def find_compiler() -> tuple[str, str]:
    """Path and version text of a GNU C++ compiler: `CXX`, else g++; raises `KernelUnavailable`."""
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if path is None:
        raise KernelUnavailable(f"no C++ compiler {name!r} on the path; install g++ or set CXX")
    version = _run([path, "--version"])
    if "Free Software Foundation" not in version:
        raise KernelUnavailable(f"{path} is not a GNU compiler, which the kernel's vector types need")
    return path, version


def fingerprint(compiler_version: str) -> str:
    """Twenty hexadecimal digits over everything that the compiled bytes depend on."""
    digest = hashlib.sha256()
    flags = " ".join((*COMPILE_FLAGS, *UNITS.values()))
    parts = [compiler_version, flags, processor(), openmp_library() or "", torch.__version__]
    for part in parts:
        digest.update(part.encode() + b"\0")
    for name in (*UNITS, *HEADERS):
        digest.update((_HERE / name).read_bytes() + b"\0")
    return digest.hexdigest()[:20]


@functools.cache
def processor() -> str:
    """Model and instruction sets of this processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    seen = {line.split(":", 1)[0].strip(): line for line in lines if line.startswith(wanted)}
    return platform.machine() + "\n" + "\n".join(seen[key] for key in sorted(seen))


def openmp_library() -> str | None:
    """Path of the OpenMP library that this process has loaded (torch's), or None."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in maps:
        path = line.split(maxsplit=5)[-1]
        if "libgomp" in Path(path).name:
            return path
    return None


def _compile(compiler: str, scratch: Path) -> Path:
    objects = [str(scratch / f"{name}.o") for name in UNITS]
    commands = [
        [compiler, *COMPILE_FLAGS, contraction, "-c", str(_HERE / name), "-o", made]
        for (name, contraction), made in zip(UNITS.items(), objects, strict=True)
    ]
    with ThreadPoolExecutor(max_workers=len(commands)) as pool:
        list(pool.map(_run, commands))
    out = scratch / "kernels.so"
    openmp = openmp_library()
    _run([compiler, "-shared", *objects, "-o", str(out), *([openmp] if openmp else ["-fopenmp"])])
    return out


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelUnavailable(f"{command[0]} did not run: {error}") from error
    if done.returncode != 0:
        message = (done.stderr or done.stdout).strip().splitlines()
        raise KernelUnavailable(f"{command[0]} failed: {message[0] if message else done.returncode}")
    return done.stdout
