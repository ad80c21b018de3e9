"""Pages in more than name: nothing outside owned bytes is read, a warm step copies nothing, an open copy
delays nobody.

Specification: rulings "Tests" (no decorative plan, no pages in name only).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.model.page_checks import check_open_copy, check_owned_bytes, check_warm_steps
from tests.model.rig import Rig
from tests.model.tuned import CONFIGS, image, loaded

from loraplex.core.layout import AdapterImage
from loraplex.model.copies import Copy, SteppedCopies
from loraplex.model.decoder import Decoder
from loraplex.ops.table import AdapterTable


@pytest.mark.parametrize("poison", [0x00, 0x7F, 0xFF])
@pytest.mark.parametrize("page_tokens", [1, 4, 16])
def test_only_owned_bytes_are_read(root: Path, model: Decoder, page_tokens: int, poison: int) -> None:
    names = list(CONFIGS)
    check_owned_bytes(loaded(root, model, names, page_tokens), names, poison)


def test_a_warm_step_copies_no_byte(root: Path, model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    copy_page = AdapterTable.copy_page

    def count(self: AdapterTable, page: int, image: AdapterImage, index: int, offset: int) -> None:
        moved.append(image.pages.shape[1])
        copy_page(self, page, image, index, offset)

    monkeypatch.setattr(AdapterTable, "copy_page", count)
    check_warm_steps(root, loaded(root, model, ["all-r4", "rs-r16"]), moved)


class HeldCopies(SteppedCopies):
    """Copies of which one image's do not move until they are let go."""

    def __init__(self, table: AdapterTable, digest: str) -> None:
        super().__init__(table)
        self.digest = digest
        self.kept: list[Copy] = []

    def start(self, copy: Copy) -> None:
        if copy.image.kernel_digest == self.digest:
            self.kept.append(copy)
        else:
            super().start(copy)

    def let_go(self) -> None:
        for copy in self.kept:
            super().start(copy)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_copy_that_stays_open_for_a_thousand_steps_delays_nobody(
    root: Path, model: Decoder, depth: int
) -> None:
    rig = Rig(root, model, depth=depth, pages=200)
    copies = HeldCopies(
        rig.runner.table, image(root, model, "rs-r16", rig.runner.pool.shape[1]).kernel_digest
    )
    rig.runner._residents._copies = copies
    check_open_copy(rig, lambda: len(copies.kept), copies.let_go)
