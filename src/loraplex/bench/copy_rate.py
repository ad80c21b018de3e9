"""Owns the copy rate, which every floor, roofline and ratio of the benchmarks is priced at, and how a call is
timed.

One definition for all of them: bytes read plus bytes written in a second by a large copy within a device's
own memory. Never prices anything itself. Specification: 0x06D.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Final

import torch

COPY_BYTES: Final = {"cpu": 256 << 20, "cuda": 1 << 30}
"""Larger than any cache, so that the rate is memory's."""
REPEATS: Final = 7


def copy_rate(device: torch.device, threads: int | None = None) -> float:
    """Bytes a second, read plus written. threads: how many copy on a CPU; None for torch's own number."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        seconds = median_seconds(lambda: target.copy_(source), REPEATS, device)
    finally:
        torch.set_num_threads(before)
    return 2 * source.numel() / seconds


def median_seconds(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Median of a call's seconds, after one that warms up; on CUDA of the device's own clock."""
    call()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
    return statistics.median(times)
