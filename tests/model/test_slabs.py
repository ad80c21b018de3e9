"""Small adapters of one page through the real runner: right beside each other, and bitwise untouched by each
other.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from tests.model.drive import Driver, Request, copy_row, logits_of
from tests.model.tiny import reference, save
from tests.model.tuned import image, publish
from tests.prompts import prompt
from tests.sections import adapters

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.layout import AdapterImage
from loraplex.core.plan import BlockColumns
from loraplex.model.copies import SteppedCopies
from loraplex.model.decoder import Decoder

PAGE_TOKENS = 16
TINY: dict[str, Any] = {
    "one-layer": lambda: peft.LoraConfig(
        r=1, lora_alpha=2, target_modules=["q_proj"], layers_to_transform=[1]
    ),
    "last-layer": lambda: peft.LoraConfig(
        r=1, lora_alpha=3, target_modules=["v_proj"], layers_to_transform=[2]
    ),
    "vectors": lambda: peft.IA3Config(target_modules=["k_proj", "v_proj"], feedforward_modules=[]),
    "down": lambda: peft.LoraConfig(r=2, lora_alpha=2, target_modules=["down_proj"], layers_to_transform=[0]),
}


@cache
def tuned(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice about targets
        base = type(reference("llama"))(reference("llama").config)
        base.load_state_dict(reference("llama").state_dict())
        model = peft.get_peft_model(base, TINY[name]())
    generator = torch.Generator().manual_seed(len(name))
    for parameter_name, parameter in model.named_parameters():
        if "lora_" in parameter_name:
            parameter.data.normal_(0.0, 0.5, generator=generator)
        elif "ia3_" in parameter_name:
            parameter.data.normal_(1.0, 0.5, generator=generator)
    return model.eval()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-adapters")
    save("llama", folder / "base")
    for name in TINY:
        tuned(name).save_pretrained(folder / name)
    return folder


def into(
    driver: Driver, made: AdapterImage, slot: int, page: int, block: int, size_class: int = 3
) -> dict[str, Any]:
    """Deltas that copy an image into one block of a page."""
    driver.images.images[made.kernel_digest] = made
    row = copy_row(made.kernel_digest, slot, 7, 1, size_class, block)
    return {"copies": row, "copy_pages": np.array([page], dtype=np.int32)}


def in_blocks_of(made: AdapterImage, page_bytes: int, size_class: int) -> AdapterImage:
    """The image in a block of this class, which may be larger than it needs."""
    from loraplex.core.layout import block_bytes, page_checksum

    pages = np.zeros((1, block_bytes(page_bytes, size_class)), dtype=np.uint8)
    pages[:, : made.pages.shape[1]] = made.pages
    return replace(made, pages=pages, checksums=page_checksum(pages))


def shared(root: Path, model: Decoder, names: list[str]) -> tuple[Driver, int]:
    """A driver with the adapters in every other block of one page, slots 1, 2, ..., generation 7; and that
    page.
    """
    driver = Driver(model, PAGE_TOKENS, pages=60)
    page = int(driver.take(1)[0])
    for slot, name in enumerate(names, start=1):
        made = in_blocks_of(image(root, model, name, driver.kv.page_bytes), driver.kv.page_bytes, 3)
        result = driver.step([], deltas=into(driver, made, slot, page, 2 * slot - 1))
        assert result.copied.array.tolist() == [[slot, 7, 1]]
        driver.step([], deltas=publish(driver, slot, 7))
    return driver, page


def test_an_image_is_a_block_wide(root: Path, model: Decoder) -> None:
    page_bytes = Driver(model, PAGE_TOKENS, pages=60).kv.page_bytes
    made = {name: image(root, model, name, page_bytes) for name in TINY}
    widths = {name: one.pages.shape for name, one in made.items()}
    assert page_bytes == 6144
    assert widths == {"one-layer": (1, 384), "last-layer": (1, 384), "vectors": (1, 384), "down": (1, 1536)}


def test_each_row_runs_under_its_own_block(root: Path, model: Decoder) -> None:
    names = [name for name in TINY if name != "down"]
    driver, _ = shared(root, model, names)
    requests = [Request(i, prompt(5 + i, i), adapter=(i, 7 if i else 0)) for i in range(4)]
    driver.step([(r, len(r.prompt)) for r in requests])
    for _ in range(4):
        driver.step([(r, 0) for r in requests])
    for request in requests:
        judge = tuned(names[request.slot - 1]) if request.slot else reference("llama")
        choices = logits_of(judge, request.prompt + request.out).argmax(dim=-1).tolist()
        assert request.out == choices[len(request.prompt) - 1 : -1]


def test_a_copy_a_scrub_and_a_retirement_touch_no_byte_beside_their_block(root: Path, model: Decoder) -> None:
    """While a neighbour and the base run: their log probabilities are bitwise those of a page with nobody
    else in it.
    """
    names = ["one-layer", "last-layer"]
    newcomer = "vectors"
    seen = []
    for disturbed in (False, True):
        driver, page = shared(root, model, names)
        pool, width = driver.runner.pool, driver.kv.page_bytes // 8
        made = in_blocks_of(image(root, model, newcomer, driver.kv.page_bytes), driver.kv.page_bytes, 3)
        base = Request(0, prompt(9, 1), logprobs=5)
        other = Request(1, prompt(7, 2), adapter=(1, 7), logprobs=5)
        results = [driver.step([(other, 7), (base, 9)])]
        before = pool[page].clone()
        deltas: list[dict[str, Any]] = [{}, {}, {}, {}]
        if disturbed:
            deltas[0] = into(driver, made, 3, page, 2)
            deltas[1] = publish(driver, 3, 7)
            deltas[2] = {"retires": adapters((3, 7), (2, 7))}
            deltas[3] = {"scrub_blocks": BlockColumns.filled(2, page=page, size_class=3, block=(2, 3))}
        for delta in deltas:
            results.append(driver.step([(base, 0), (other, 0)], deltas=delta))
            kept = [block for block in range(8) if block not in (2, 3)]
            for block in kept:
                part = slice(block * width, (block + 1) * width)
                assert torch.equal(pool[page, part], before[part]), block
        if disturbed:
            assert (pool[page, 2 * width : 4 * width] == 0xFF).all()
        seen.append([*base.out, *other.out, *(v for r in results for v in r.logprob_values.tolist())])
    assert seen[0] == seen[1]


def test_a_block_is_filled_in_pieces_while_its_neighbour_runs(root: Path, model: Decoder) -> None:
    driver, page = shared(root, model, ["one-layer"])
    driver.runner._residents._copies = copies = SteppedCopies(driver.runner.table, piece_bytes=0)
    made = in_blocks_of(image(root, model, "last-layer", driver.kv.page_bytes), driver.kv.page_bytes, 3)
    request = Request(0, prompt(6, 1), adapter=(1, 7))
    result = driver.step([(request, 6)], deltas=into(driver, made, 2, page, 0))
    assert result.copied.array.tolist() == []
    copies._pieces[False] = 1  # one page or block a step
    assert driver.step([(request, 0)]).copied.array.tolist() == [[2, 7, 1]]
    choices = logits_of(tuned("one-layer"), request.prompt + request.out).argmax(dim=-1).tolist()
    assert request.out == choices[len(request.prompt) - 1 : -1]


def test_damage_in_a_block_is_seen_and_damage_beside_it_is_not_its_own(root: Path, model: Decoder) -> None:
    driver, page = shared(root, model, ["one-layer"])
    good = in_blocks_of(image(root, model, "last-layer", driver.kv.page_bytes), driver.kv.page_bytes, 3)
    for byte in (0, 100, good.pages.shape[1] - 1):  # the block's tail is summed too
        pages = good.pages.copy()
        pages[0, byte] ^= 1
        assert driver.step(
            [], deltas=into(driver, replace(good, pages=pages), 2, page, 2)
        ).copied.array.tolist() == [[2, 7, 0]]
    table = driver.runner.table
    sums = table.checksums([page], 3, 1).tolist()
    driver.runner.pool[page, : driver.kv.page_bytes // 8] ^= 0xFF
    assert table.checksums([page], 3, 1).tolist() == sums
    assert table.checksums([page]).tolist() != sums


def test_a_slot_is_not_installed_over_bytes_of_another(root: Path, model: Decoder) -> None:
    driver, page = shared(root, model, ["one-layer", "last-layer"])  # in blocks 1 and 3 of eight
    made = image(root, model, "vectors", driver.kv.page_bytes)
    table, size = driver.runner.table, driver.kv.page_bytes
    fine = [(3, 0), (3, 2), (3, 7), (4, 0), (4, 1), (4, 4), (1, 1), (2, 2)]
    taken = [(3, 1), (3, 3), (4, 2), (4, 7), (1, 0), (2, 0), (2, 1)]
    for size_class, block in fine:
        table.install(4, in_blocks_of(made, size, size_class), [page], size_class, block)
    for size_class, block in taken:
        with pytest.raises(InternalFault) as caught:
            table.install(4, in_blocks_of(made, size, size_class), [page], size_class, block)
        assert caught.value.code is ErrorCode.PLAN_PAGE_TABLE, (size_class, block)
    with pytest.raises(InternalFault) as caught:
        table.install(4, in_blocks_of(made, size, 0), [page])
    assert caught.value.code is ErrorCode.PLAN_PAGE_TABLE
    for size_class, block in ((3, 8), (3, -1), (7, 0), (-1, 0), (0, 1)):
        with pytest.raises(InternalFault) as caught:
            table.install(4, made, [page], size_class, block)
        assert caught.value.code is ErrorCode.PLAN_PAGE_TABLE
    with pytest.raises(InternalFault) as caught:  # an image of another width than its block
        table.install(4, made, [page], 3, 0)
    assert caught.value.code is ErrorCode.OPERATOR_LAYOUT
