"""Every configuration of the adapter kernels compiles for Hopper, without a GPU, and stays off local
memory.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

# A process of its own: the other operator tests put Triton into interpreter mode when it is imported.
PROGRAM = """
import json, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from loraplex.ops import triton_kernels as kernels
from tests.ops.compile_ahead import compile_plan
from loraplex.ops.worklist import Phase

target = GPUTarget("cuda", 90, 32)
out = []
for name, d_in, d_out in json.loads(sys.argv[1]):
    for phase in Phase:
        for dtype in (torch.bfloat16, torch.float16):
            for kernel, signature, constants, options in compile_plan(d_in, d_out, phase, dtype):
                pointers = [i for i, kind in enumerate(signature.values()) if kind[0] == "*"]
                attrs = {(i,): [["tt.divisibility", 16]] for i in pointers}
                source = ASTSource(kernel, signature, constants, attrs)
                built = triton.compile(source, target=target, options=options)
                entry = built.asm["ptx"]
                out.append([name, phase.name, str(dtype), kernel.__name__, built.metadata.shared,
                            "ld.local" in entry or "st.local" in entry, "cubin" in built.asm,
                            "griddepcontrol.wait" in entry])
print(json.dumps(out))
"""

SHAPES = [
    ("llama-8b", (4096, 4096, 4096, 4096, 4096, 4096, 14336), (4096, 1024, 1024, 4096, 14336, 14336, 4096)),
    ("smollm2-135m", (576, 576, 576, 576, 576, 576, 1536), (576, 192, 192, 576, 1536, 1536, 576)),
]


def test_every_configuration_compiles_for_hopper(tmp_path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(SHAPES)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    built = json.loads(run.stdout.splitlines()[-1])
    kinds = {row[3] for row in built}
    assert kinds == {"shrink_kernel", "expand_kernel", "records_kernel"}
    for name, phase, dtype, kernel, shared, local, has_cubin, waits in built:
        where = f"{kernel} for {name}, {phase}, {dtype}"
        assert has_cubin, where
        assert not local, where
        assert shared <= 227 * 1024, where
        assert waits == (kernel != "records_kernel"), where
