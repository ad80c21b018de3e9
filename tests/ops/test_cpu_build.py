"""The kernel's build: found again, never half there, shares torch's threads, and says plainly when it cannot
be had.
"""

from __future__ import annotations

import ctypes
import logging
import os
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.ops.build import make_plan
from tests.ops.random_worlds import PLANS, check, random_world

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.model.sampler_cpu import OPTIONS, CompiledSampling
from loraplex.ops import dispatch
from loraplex.ops.cpu import compiled

needs_kernel = pytest.mark.skipif(compiled.library() is None, reason="no compiled kernel on this machine")


@pytest.fixture
def forgotten():  # type: ignore[no-untyped-def]
    """The process forgets its kernel before and after."""
    compiled._loaded.cache_clear()
    yield
    compiled._loaded.cache_clear()


def test_a_machine_with_gnu_compiler_has_a_kernel() -> None:
    try:
        compiled.find_compiler()
    except compiled.KernelUnavailable:
        pytest.skip("no GNU compiler on this machine")
    assert compiled.library() is not None, compiled.status()


@needs_kernel
def test_the_second_build_finds_the_first(tmp_path: Path) -> None:
    first = compiled.build(tmp_path)
    stamp = first.stat().st_mtime_ns
    assert compiled.build(tmp_path) == first
    assert first.stat().st_mtime_ns == stamp
    assert os.listdir(tmp_path) == [first.name]


@needs_kernel
def test_another_source_flag_or_processor_is_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    before = compiled.fingerprint("g++ 1")
    assert compiled.fingerprint("g++ 2") != before
    monkeypatch.setattr(compiled, "processor", lambda: "another")
    assert compiled.fingerprint("g++ 1") != before
    monkeypatch.undo()
    monkeypatch.setattr(compiled, "COMPILE_FLAGS", (*compiled.COMPILE_FLAGS, "-g"))
    assert compiled.fingerprint("g++ 1") != before
    monkeypatch.undo()
    monkeypatch.setattr(compiled, "HEADERS", compiled.HEADERS[:2])
    assert compiled.fingerprint("g++ 1") != before
    monkeypatch.undo()
    monkeypatch.setattr(compiled, "UNITS", {**compiled.UNITS, "lora_cpu.cpp": "-ffp-contract=off"})
    assert compiled.fingerprint("g++ 1") != before


@needs_kernel
def test_there_is_one_thread_pool() -> None:
    found = compiled.library()
    assert found is not None
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert found.handle.lora_max_threads() == 3
    finally:
        torch.set_num_threads(before)
    maps = Path("/proc/self/maps").read_text()
    assert len({line.split()[-1] for line in maps.splitlines() if "libgomp" in line}) <= 1


@needs_kernel
@pytest.mark.parametrize(
    "level", [("-mno-avx512bf16", 1), ("-mno-avx512f", 0), ("-march=x86-64", 0)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_plainer_processors_compute_the_same_function(
    level: tuple[str, int], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("the flags are those of x86-64")
    flag, expected = level
    native = compiled.library()
    assert native is not None
    monkeypatch.setattr(compiled, "COMPILE_FLAGS", (*compiled.COMPILE_FLAGS, flag))
    # Every dtype uses the same file, so it is built once for each flag and not once for each test.
    folder = tmp_path.parent / flag.strip("-").replace("=", "_")
    plain = compiled.load(compiled.build(folder))
    assert plain.vector_level <= expected
    monkeypatch.setattr(compiled, "_loaded", lambda: plain)
    world = random_world(31, dtype, 5, [1, 4, 9, 16])
    for prefills, decodes in PLANS.values():
        check(world, make_plan(prefills, decodes), "cpu_kernel")
    assert_draws_alike(plain, native)


def assert_draws_alike(first: compiled.Library, second: compiled.Library) -> None:
    """Two builds of the sampling functions draw the same tokens."""
    rng = np.random.default_rng(2)
    logits = torch.from_numpy(rng.standard_normal((60, 700)).astype(np.float32) * 3)
    options = np.zeros(60, dtype=OPTIONS)
    options["temperature"], options["seed_low"] = 0.8, np.arange(60)
    options["top_p"] = np.where(np.arange(60) % 2, 1.0, 0.9)
    options["top_k"] = np.arange(60) % 3 * 5
    index = np.arange(60)
    tokens = [
        CompiledSampling(build_).draw(logits, index, 700, options).tolist() for build_ in (first, second)
    ]
    assert tokens[0] == tokens[1]


def fake_compiler(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


GNU = 'if [ "$1" = --version ]; then echo "Free Software Foundation"; exit 0; fi\n'
BROKEN = {
    "absent": (None, "no C++ compiler"),
    "not GNU": ("echo clang version 99", "is not a GNU compiler"),
    "fails": (GNU + "echo internal compiler error >&2; exit 4", "internal compiler error"),
}


@pytest.mark.parametrize("kind", list(BROKEN))
@pytest.mark.usefixtures("forgotten")
def test_without_a_compiler_torch_serves_and_says_why(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script, reason = BROKEN[kind]
    monkeypatch.setenv("LORAPLEX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler" if script is None else fake_compiler(tmp_path, script))
    with caplog.at_level(logging.WARNING, logger="loraplex.ops"):
        line = dispatch.warm_up(torch.device("cpu"))
        assert dispatch.warm_up(torch.device("cpu")) == line
    assert reason in line
    assert [reason in record.getMessage() for record in caplog.records] == [True]
    assert not list(tmp_path.rglob("*.so"))
    world = random_world(32, torch.float32, 3, [2])
    plan = make_plan([(1, 2)], [2])
    assert dispatch.choose(plan, world.table).family == "segmented"
    check(world, plan, None)
    with pytest.raises(InternalFault) as caught:
        dispatch.make_operator(plan, world.table, "cpu_kernel")
    assert caught.value.code is ErrorCode.OPERATOR_PLAN_UNSUPPORTED


def test_a_cache_folder_that_cannot_be_written_is_a_reason(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(compiled.KernelUnavailable):
        compiled.build(blocked / "kernels")


def test_a_broken_library_is_a_reason(tmp_path: Path) -> None:
    broken = tmp_path / "x.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(compiled.KernelUnavailable, match="cannot be loaded"):
        compiled.load(broken)


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_CACHE", "/one")
    assert compiled.cache_folder() == Path("/one/kernels")
    monkeypatch.delenv("LORAPLEX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert compiled.cache_folder() == Path("/two/loraplex/kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert compiled.cache_folder() == Path.home() / ".cache/loraplex/kernels"


@needs_kernel
def test_the_kernel_is_chosen_where_it_is() -> None:
    world = random_world(33, torch.bfloat16, 2, [2])
    choice = dispatch.choose(make_plan([], [1]), world.table)
    assert choice.family == "cpu_kernel"
    assert dispatch.warm_up(torch.device("cpu")).startswith("adapter operators: compiled")


@needs_kernel
def test_operands_of_another_form_are_refused_before_the_kernel_sees_them() -> None:
    world = random_world(34, torch.float32, 2, [2])
    plan = make_plan([], [1, 2])
    dims = world.dims.dims
    d_in, d_out = next(iter(dims.values()))
    module = next(iter(dims))
    good_x, good_y = torch.zeros(2, d_in), torch.zeros(2, d_out)
    bad = [
        (good_y[:1], good_x),
        (good_y, good_x[:1]),
        (good_y.double(), good_x),
        (good_y, good_x.bfloat16()),
        (torch.zeros(2, d_out + 1), good_x),
        (good_y, torch.zeros(2, d_in + 1)),
        (torch.zeros(d_out, 2).T, good_x),
        (good_y, torch.zeros(d_in, 2).T),
    ]
    for family in sorted(dispatch.FAMILIES):
        ops = dispatch.make_operator(plan, world.table, family)
        ops.apply(good_y, good_x, 0, (module,))
        for y, x in bad:
            with pytest.raises(InternalFault) as caught:
                ops.apply(y, x, 0, (module,))
            assert caught.value.code is ErrorCode.OPERATOR_LAYOUT


@needs_kernel
def test_the_abi_has_exactly_the_functions_that_are_called() -> None:
    found = compiled.library()
    assert found is not None
    for name in ("float32", "bfloat16", "float16"):
        function = getattr(found.handle, f"lora_apply_{name}")
        assert function.restype is None
        assert len(function.argtypes) == 7
        assert function.argtypes[2] is ctypes.c_int64
    assert np.iinfo(np.int64).bits == 8 * ctypes.sizeof(ctypes.c_void_p)
