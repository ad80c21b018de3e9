"""Copies that fail or arrive torn, and swaps and restorations beside running requests: nobody else notices,
nothing is lost.

The bodies take a `Rig`, so that a device's copies, on a stream and a thread of their own, are held to the
same.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.model.copy_checks import TornOnce, check_damaged_copies, check_removal_under_load
from tests.model.drive import Images
from tests.model.rig import Rig

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.layout import AdapterImage
from loraplex.model.decoder import Decoder


class Cut:
    """The reader of an image whose file has lost its last page."""

    def __init__(self, pages: np.ndarray) -> None:
        self.pages = pages

    def read(self, index: int, into: np.ndarray) -> None:
        if index == len(self.pages) - 1:
            raise InternalFault(ErrorCode.ADAPTER_LOAD_FAILED, "the file ends here")
        np.copyto(into, self.pages[index])


class CutOnce(Images):
    """The first opening of each image finds its file cut."""

    def __init__(self) -> None:
        super().__init__()
        self.cut: set[str] = set()

    def open(self, kernel_digest: str) -> AdapterImage:
        image = super().open(kernel_digest)
        first = kernel_digest not in self.cut
        self.cut.add(kernel_digest)
        return replace(image, reader=Cut(image.pages)) if first else image


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("damage", [TornOnce, CutOnce])
def test_damaged_copies_are_made_again(
    root: Path, model: Decoder, damage: type[TornOnce | CutOnce], depth: int
) -> None:
    check_damaged_copies(Rig(root, model, depth=depth, pages=200, images=damage()))


@pytest.mark.parametrize("depth", [0, 1])
def test_an_adapter_leaves_while_it_is_used(root: Path, model: Decoder, depth: int) -> None:
    check_removal_under_load(Rig(root, model, depth=depth, pages=200))
