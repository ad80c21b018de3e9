"""The step's kernels compile for Hopper, without a GPU, and stay off local memory."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

# A process of its own: other tests put Triton into interpreter mode when it is imported.
PROGRAM = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from loraplex.model.cuda import draw_kernels as draws, draws as sizes, heads, inputs, kernels

out = []

def build(kernel, pointers, constants, **options):
    signature = {
        name: "constexpr" if name in constants
        else pointers.get(name, "*i32") if name.endswith("_ptr") else "i32" for name in kernel.arg_names
    }
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    attrs = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
    source = ASTSource(kernel, signature, values, attrs)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    text = built.asm["ptx"]
    out.append([kernel.__name__, "ld.local" in text or "st.local" in text, "cubin" in built.asm])

pool = {"qkv_ptr": "*bf16", "keys_ptr": "*bf16", "values_ptr": "*bf16", "table_ptr": "*fp32"}
scores = {"logits_ptr": "*fp32", "values_ptr": "*fp32", "tops_ptr": "*fp32", "top_ptr": "*fp32",
          "scores_ptr": "*fp32", "tokens_ptr": "*i64"}
splits = sizes.SPLITS
build(kernels.deltas_kernel, {}, {"BLOCK": inputs.DELTA_BLOCK})
for decode_first in (False, True):
    build(kernels.unpack_kernel, {},
          {"PAGE_TOKENS": 16, "BLOCK": inputs.ROW_BLOCK, "DECODE_FIRST": decode_first})
build(kernels.pad_kernel, {}, {"UPTO": 2048, "BLOCK": inputs.ROW_BLOCK})
for heads_count, kv_heads, half, block in ((32, 8, 64, 8), (9, 3, 32, 4)):
    build(kernels.rope_append_kernel, pool,
          {"PAGE_STRIDE": 1 << 20, "PAGE_TOKENS": 16, "HEADS": heads_count, "KV_HEADS": kv_heads,
           "HALF": half, "HALF_BLOCK": half, "HEAD_BLOCK": block, "PDL": True}, launch_pdl=True)
build(kernels.best_kernel, scores | {"logits_ptr": "*bf16"},
      {"VOCAB": 128256, "SAMPLED": 128256, "SPLITS": heads.SPLITS, "BLOCK": heads.BLOCK})
build(kernels.choose_kernel, scores, {"SPLITS": heads.SPLITS})
build(draws.cut_kernel, scores, {"VOCAB": 128256, "BLOCK": sizes.CUT_BLOCK, "SPLITS": splits},
      num_warps=sizes.CUT_WARPS)
build(draws.draw_kernel, scores, {"VOCAB": 128256, "BLOCK": sizes.DRAW_BLOCK, "SPLITS": splits},
      num_warps=sizes.DRAW_WARPS)
build(draws.pick_kernel, scores, {"VOCAB": 128256, "SPLITS": splits})
print(json.dumps(out))
"""


def test_every_kernel_of_a_step_compiles_for_hopper(tmp_path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    built = json.loads(run.stdout.splitlines()[-1])
    assert {row[0] for row in built} == {
        "deltas_kernel",
        "unpack_kernel",
        "pad_kernel",
        "rope_append_kernel",
        "best_kernel",
        "choose_kernel",
        "cut_kernel",
        "draw_kernel",
        "pick_kernel",
    }
    assert [row for row in built if row[1] or not row[2]] == []
