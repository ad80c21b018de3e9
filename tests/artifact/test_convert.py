"""The kernel layout holds exactly the artifact: every factor can be read back from the pages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.artifact.tiny import lora_tensors, tiny_base, write_lora

from loraplex.artifact.convert import to_image
from loraplex.artifact.read_artifact import load_adapter
from loraplex.artifact.record import Artifact, TensorRole
from loraplex.artifact.shards import module_shapes
from loraplex.artifact.tensors import Array, Dtype, convert, to_float32
from loraplex.artifact.vectors import vector_kinds
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.layout import (
    AdapterImage,
    Factor,
    Geometry,
    PageGeometry,
    page_checksum,
    page_demand,
    vector_mask,
)

BASE = "ab" * 32


def geometry(dtype: Dtype, page_bytes: int = 512) -> PageGeometry:
    return PageGeometry(Geometry.RANK_ROWS, dtype.itemsize, row_page_bytes=page_bytes)


def read_back(
    image: AdapterImage, layer: int, module: int, factor: Factor, shape: tuple[int, int], dtype: Dtype
) -> Array:
    out = np.zeros(shape, dtype=dtype.storage)
    for e_layer, e_module, e_factor, r0, rn, c0, cn, page, offset in image.extents.tolist():
        if (e_layer, e_module, e_factor) == (layer, module, int(factor)):
            raw = image.pages[page, offset : offset + rn * cn * dtype.itemsize]
            out[r0 : r0 + rn, c0 : c0 + cn] = raw.copy().view(dtype.storage).reshape(rn, cn)
    return out


def loaded(tmp_path: Path, dtype: torch.dtype = torch.float32) -> Artifact:
    folder = write_lora(tmp_path)
    save_file(lora_tensors(dtype=dtype), folder / "adapter_model.safetensors")
    return load_adapter(folder, tiny_base())


@pytest.mark.parametrize("page_bytes", [48, 64, 104, 512, 4096, 1 << 20])
@pytest.mark.parametrize("target", list(Dtype))
def test_factors_come_back_from_the_pages(tmp_path: Path, page_bytes: int, target: Dtype) -> None:
    artifact = loaded(tmp_path)
    image = to_image(artifact, geometry(target, page_bytes), target, BASE)
    for row, module in zip(image.modules.tolist(), artifact.modules, strict=True):
        vectors = vector_mask(vector_kinds(module))
        assert row == [module.layer, int(module.module), module.rank, module.scale_bits, vectors]
        a, b = module.tensors[TensorRole.A], module.tensors[TensorRole.B]
        got_a = read_back(
            image, module.layer, int(module.module), Factor.A, (module.rank, module.d_in), target
        )
        got_b = read_back(
            image, module.layer, int(module.module), Factor.B, (module.rank, module.d_out), target
        )
        np.testing.assert_array_equal(got_a, convert(a.data, a.dtype, target, a.name))
        np.testing.assert_array_equal(got_b.T, convert(b.data, b.dtype, target, b.name))
    assert len(image.pages) == page_demand(geometry(target, page_bytes), module_shapes(artifact))
    np.testing.assert_array_equal(image.checksums, page_checksum(image.pages))


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16])
def test_conversion_is_torchs(source: torch.dtype, target: torch.dtype) -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 4, 4096)
    values = torch.cat([values, torch.tensor([0.0, -0.0, 1.00390625, 1.01171875, 6e-8, 1e-40, 65504.0])]).to(
        source
    )
    dtypes = {torch.float32: Dtype.FLOAT32, torch.float16: Dtype.FLOAT16, torch.bfloat16: Dtype.BFLOAT16}

    def bits(tensor: torch.Tensor) -> Array:
        if tensor.dtype is torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(np.uint16)
        return tensor.numpy()

    values = values.clamp(-60000, 60000)
    got = convert(bits(values), dtypes[source], dtypes[target], "t")
    np.testing.assert_array_equal(got.view(np.uint8), bits(values.to(target)).view(np.uint8))


@pytest.mark.parametrize(("value", "target"), [(7e4, Dtype.FLOAT16), (3.4e38, Dtype.BFLOAT16)])
def test_a_value_that_does_not_fit_is_refused(value: float, target: Dtype) -> None:
    with pytest.raises(CallerError) as caught:
        convert(np.array([1.0, value], dtype=np.float32), Dtype.FLOAT32, target, "some.tensor")
    assert caught.value.code is ErrorCode.ADAPTER_NOT_FINITE
    assert caught.value.param == "some.tensor"


def test_identity_follows_content_and_layout(tmp_path: Path) -> None:
    artifact = loaded(tmp_path)
    image = to_image(artifact, geometry(Dtype.FLOAT32), Dtype.FLOAT32, BASE)
    again = to_image(loaded(tmp_path / "elsewhere"), geometry(Dtype.FLOAT32), Dtype.FLOAT32, BASE)
    assert (again.key, again.kernel_digest) == (image.key, image.kernel_digest)
    paged = to_image(artifact, geometry(Dtype.FLOAT32, 1024), Dtype.FLOAT32, BASE)
    narrow = to_image(artifact, geometry(Dtype.BFLOAT16), Dtype.BFLOAT16, BASE)
    other = to_image(artifact, geometry(Dtype.FLOAT32), Dtype.FLOAT32, "cd" * 32)
    assert paged.key == narrow.key == image.key != other.key
    assert len({i.kernel_digest for i in (image, paged, narrow, other)}) == 4


def test_every_extent_is_aligned(tmp_path: Path) -> None:
    image = to_image(loaded(tmp_path), geometry(Dtype.BFLOAT16, 400), Dtype.BFLOAT16, BASE)
    assert not (image.extents[:, 8] % 16).any()
    assert to_float32(image.extents[:1, :1].astype(np.uint16), Dtype.BFLOAT16).dtype == np.float32


@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_together_hold_each_factor(tmp_path: Path, ranks: int) -> None:
    folder = write_lora(tmp_path, target_modules=["q_proj", "v_proj"])
    artifact = load_adapter(folder, tiny_base())
    images = [
        to_image(artifact, geometry(Dtype.FLOAT32), Dtype.FLOAT32, BASE, shard=(rank, ranks))
        for rank in range(ranks)
    ]
    for module in artifact.modules:
        a, b = module.tensors[TensorRole.A], module.tensors[TensorRole.B]
        where = (module.layer, int(module.module))
        local = (module.rank, module.d_out // ranks)
        parts = [read_back(i, *where, Factor.B, local, Dtype.FLOAT32) for i in images]
        np.testing.assert_array_equal(np.concatenate(parts, axis=1).T, b.data)
        for image in images:
            whole = (module.rank, module.d_in)
            np.testing.assert_array_equal(read_back(image, *where, Factor.A, whole, Dtype.FLOAT32), a.data)
    assert len({image.kernel_digest for image in images}) == ranks
    assert len({image.key for image in images}) == 1


def test_what_cannot_be_sharded_is_refused(tmp_path: Path) -> None:
    uneven = load_adapter(write_lora(tmp_path / "a"), tiny_base())
    biased = write_lora(tmp_path / "b", target_modules=["q_proj"], lora_bias=True)
    stem = "base_model.model.model.layers.{}.self_attn.q_proj.lora_B.bias"
    keep = {name: value for name, value in lora_tensors().items() if "q_proj" in name}
    save_file(
        keep | {stem.format(i): torch.zeros(32) for i in range(3)}, biased / "adapter_model.safetensors"
    )
    vectors = load_adapter(biased, tiny_base())
    for artifact, ranks, words in ((uneven, 3, "do not divide"), (vectors, 2, "cannot be sharded")):
        with pytest.raises(CallerError) as caught:
            to_image(artifact, geometry(Dtype.FLOAT32), Dtype.FLOAT32, BASE, shard=(0, ranks))
        assert caught.value.code is ErrorCode.ADAPTER_UNSUPPORTED
        assert words in caught.value.message
