"""The device benchmark over a tiny shape on the CPU: it counts what it says it counts."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from loraplex.bench import model_shapes
from loraplex.bench.engine_decode import CASES, PROFILED, DeviceBench, EngineCase, device_table, kind_of
from loraplex.bench.model_shapes import SEVEN, AdapterMix
from loraplex.config import EngineConfig
from loraplex.core.errors import InternalFault
from loraplex.core.layout import page_checksum
from loraplex.core.messages import Inspect

TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def test_rows_of_base_and_adapters(tmp_path: Path) -> None:
    config = {**model_shapes.SHAPES["llama-3.1-8b"], **TINY}
    (tmp_path / "config.json").write_text(json.dumps(config))
    bench = DeviceBench(
        EngineConfig(
            model=str(tmp_path), images_dir=str(tmp_path), dtype="float32", load_format="dummy", pool_gb=0.05
        ),
        prompt=5,
        new=4,
    )
    cases = (
        EngineCase(2),
        EngineCase(3, AdapterMix(2, (1, 4), SEVEN)),
        EngineCase(2, temperature=0.8, top_p=0.9),
    )
    rows = [bench.measure(case, 1, 1e9) for case in cases]
    assert [row.case for row in rows] == [case.name for case in cases]
    assert all(row.tokens_per_s > 0 and row.roofline_ms > 0 for row in rows)
    linear = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96
    weights = (2 * linear + 512 * 64) * 4
    assert bench.step_bytes(cases[0]) == weights + 2 * (5 + 2) * 2 * 2 * 2 * 16 * 4
    factors = 2 * (4 * 64 + 2 * (64 + 32) + 3 * (64 + 96)) * 4
    assert bench.step_bytes(cases[1]) - bench.step_bytes(EngineCase(3)) == factors * (1 + 4)
    bench.close()
    assert len(device_table({"rows": [{**asdict(row), "of_roofline": row.of_roofline} for row in rows]})) == 4


def test_cold_adapters_come_from_their_files_in_every_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**model_shapes.SHAPES["llama-3.1-8b"], **TINY}))
    config = EngineConfig(
        model=str(tmp_path),
        images_dir=str(tmp_path / "images"),
        dtype="float32",
        load_format="dummy",
        pool_gb=0.05,
        loader="process",
        host_gb=0.05,
    )
    bench = DeviceBench(config, prompt=5, new=4, stored=True)
    row = bench.measure(EngineCase(3, AdapterMix(3), cold=True), 2, 1e9)
    assert row.case == "3 over 3, rank 16, q,k,v,o, all cold"
    figures = bench._call(Inspect(0))
    assert figures["host"]["fetches"] >= 3 * 3  # the run that warms up, and two that count
    bench.close()


def test_an_engine_with_its_images_in_memory_refuses_cold_rows(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**model_shapes.SHAPES["llama-3.1-8b"], **TINY}))
    config = EngineConfig(
        model=str(tmp_path), images_dir=str(tmp_path), dtype="float32", load_format="dummy", pool_gb=0.05
    )
    bench = DeviceBench(config, prompt=5, new=4)
    with pytest.raises(InternalFault, match="disk store"):
        bench.measure(EngineCase(1, AdapterMix(1), cold=True), 1, 1e9)
    bench.close()


def test_synthetic_images_are_small_numbers_with_right_checksums(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**model_shapes.SHAPES["llama-3.1-8b"], **TINY}))
    from loraplex.artifact.tensors import Dtype
    from loraplex.build.base_model import describe_base

    images = model_shapes.SyntheticImages(describe_base(tmp_path, Dtype.BFLOAT16, 16, dummy=True))
    first, second = (images.add(4, SEVEN, index) for index in range(2))
    assert first.key != second.key
    image = images.open(first.kernel_digest)
    values = (image.pages.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    assert float(np.abs(values).max()) < 0.01
    assert np.array_equal(page_checksum(image.pages), image.checksums)


def test_profiled_rows_exist_and_kernels_are_sorted_into_kinds() -> None:
    assert max(PROFILED) < len(CASES)
    assert kind_of("nvjet_sm90_tst_64x64") == "GEMM"
    assert kind_of("void flashinfer::norm::FusedAddRMSNormKernel") == "norms"
    assert kind_of("shrink_kernel") == "adapters"
    assert kind_of("something else") == "other"
