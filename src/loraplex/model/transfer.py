"""Host numbers on their way to a device, without waiting for what the device does."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A tensor of `values` on the device; the array is the caller's again at once.

    A copy from memory that is not page-locked waits for the stream: every step in flight would be waited for.
    """
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor.to(device, copy=True)
    return tensor.pin_memory().to(device, non_blocking=True)
