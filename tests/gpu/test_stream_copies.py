"""Copies on a stream of their own: bytes, checksums, order, and a damaged image."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PAGES, PAGE_BYTES = 64, 1 << 20


def test_pages_arrive_and_are_summed_where_they_lie() -> None:
    from loraplex.core.ids import Module
    from loraplex.core.layout import EXTENT_COLUMNS, MODULE_COLUMNS, AdapterImage, page_checksum
    from loraplex.model.copies import Copy
    from loraplex.model.stream_copies import StreamCopies
    from loraplex.ops.dims import ModuleDims
    from loraplex.ops.table import AdapterTable

    pool = torch.zeros((PAGES, PAGE_BYTES), dtype=torch.uint8, device="cuda")
    table = AdapterTable(pool, torch.bfloat16, 8, ModuleDims(1, {Module.Q: (8, 8)}))
    copies = StreamCopies(table)
    rng = np.random.default_rng(0)
    images = []
    for slot in range(1, 5):
        data = rng.integers(0, 256, (10, PAGE_BYTES), dtype=np.uint8)
        empty = np.zeros((0, MODULE_COLUMNS), dtype=np.int32), np.zeros((0, EXTENT_COLUMNS), dtype=np.int32)
        images.append(AdapterImage("ab" * 32, f"{slot:02x}" * 32, 2, *empty, data, page_checksum(data)))
    torn = replace(images[3], checksums=images[3].checksums ^ 1)
    placed = rng.permutation(np.arange(1, PAGES))[:40].astype(np.int32).reshape(4, 10)
    for slot, (image, pages) in enumerate(zip([*images[:3], torn], placed, strict=True), start=1):
        copies.start(Copy(slot, 7, image, pages))
    ended = []
    while len(ended) < 4:
        copies.advance(idle=True)
        ended += copies.ended()
    assert [(copy.slot, copy.intact) for copy in ended] == [(1, True), (2, True), (3, True), (4, False)]
    for image, pages in zip(images, placed, strict=True):
        assert np.array_equal(
            pool[torch.from_numpy(pages.astype(np.int64)).cuda()].cpu().numpy(), image.pages
        )


def test_blocks_of_one_page_are_filled_beside_bytes_that_stay() -> None:
    from loraplex.core.ids import Module
    from loraplex.core.layout import EXTENT_COLUMNS, MODULE_COLUMNS, AdapterImage, block_bytes, page_checksum
    from loraplex.model.copies import Copy
    from loraplex.model.stream_copies import StreamCopies
    from loraplex.ops.dims import ModuleDims
    from loraplex.ops.table import AdapterTable

    pool = torch.full((PAGES, PAGE_BYTES), 0x5A, dtype=torch.uint8, device="cuda")
    table = AdapterTable(pool, torch.bfloat16, 8, ModuleDims(1, {Module.Q: (8, 8)}))
    copies = StreamCopies(table)
    rng = np.random.default_rng(0)
    width = block_bytes(PAGE_BYTES, 3)
    empty = np.zeros((0, MODULE_COLUMNS), dtype=np.int32), np.zeros((0, EXTENT_COLUMNS), dtype=np.int32)
    page = np.array([5], dtype=np.int32)
    images = {}
    for slot, block in ((1, 0), (2, 3), (3, 7)):
        data = rng.integers(0, 256, (1, width), dtype=np.uint8)
        images[block] = AdapterImage("ab" * 32, f"{slot:02x}" * 32, 2, *empty, data, page_checksum(data))
        copies.start(Copy(slot, 7, images[block], page, 3, block))
    ended = []
    while len(ended) < 3:
        copies.advance(idle=True)
        ended += copies.ended()
    assert [(copy.block, copy.intact) for copy in ended] == [(0, True), (3, True), (7, True)]
    whole = pool.cpu().numpy()
    for block in range(8):
        part = whole[5, block * width : (block + 1) * width]
        expected = images[block].pages[0] if block in images else np.full(width, 0x5A, dtype=np.uint8)
        assert np.array_equal(part, expected), block
    assert (np.delete(whole, 5, axis=0) == 0x5A).all()
    copies.close()
