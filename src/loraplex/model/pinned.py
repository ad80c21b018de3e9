"""Host images as page-locked memory, so that a device reads them while the host goes on.

An image is a read-only mapping of a file in shared memory; its pages are registered with the driver for as long as a
copy reads them. Where the driver refuses (a mapping that is not in memory, a limit of locked memory), the bytes go
through a page-locked buffer: slower, the same result.

Specification: 0x04A (pinned staging).
"""

from __future__ import annotations

import ctypes
import logging
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from loraplex.core.layout import AdapterImage

_log: Final = logging.getLogger(__name__)
_READ_ONLY: Final = 0x08
"""cudaHostRegisterReadOnly."""


class PinnedImages:
    """Images that copies read from now."""

    def __init__(self) -> None:
        self._registered: dict[int, list[int]] = {}
        self._staged: dict[int, torch.Tensor] = {}
        self._refused = False

    def pages(self, image: AdapterImage) -> torch.Tensor:
        """uint8 [pages, page_bytes] that a device may read without the host's help until `let_go`."""
        address = image.pages.ctypes.data
        view = torch.from_numpy(_writable_view(image))
        if address in self._registered:
            self._registered[address][0] += 1
            return view
        if not self._refused and image.pages.nbytes:
            runtime = torch.cuda.cudart()
            status = runtime.cudaHostRegister(address, image.pages.nbytes, _READ_ONLY)
            if int(status) == 0:
                self._registered[address] = [1]
                return view
            self._refused = True
            _log.warning("host images cannot be page-locked (status %s); they are staged", status)
        staged = torch.empty(view.shape, dtype=torch.uint8, pin_memory=True)
        staged.copy_(view)
        self._staged[id(image)] = staged
        return staged

    def let_go(self, image: AdapterImage) -> None:
        """No copy reads the image any more."""
        self._staged.pop(id(image), None)
        address = image.pages.ctypes.data
        uses = self._registered.get(address)
        if uses is not None:
            uses[0] -= 1
            if not uses[0]:
                del self._registered[address]
                torch.cuda.cudart().cudaHostUnregister(address)


def _writable_view(image: AdapterImage) -> npt.NDArray[np.uint8]:
    """The pages as an array that torch takes without a warning; nothing writes to it."""
    pages = image.pages
    buffer = (ctypes.c_uint8 * pages.nbytes).from_address(pages.ctypes.data)
    return np.ctypeslib.as_array(buffer).reshape(pages.shape)
