"""Drivers over the device, alone and beside float32 and a half type on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from tests.gpu.level_b import Deviations, assert_level_b, note_step
from tests.gpu.world import (
    cuda_decoder,
    cuda_executor,
    half_decoder,
    reference_decoder,
    spec_of,
    stream,
)
from tests.model.drive import Driver, Request
from tests.prompts import prompt

HALF = (torch.bfloat16, torch.float16)


SIZES: dict[str, Any] = {"slots": 12, "pages": 2000, "adapters": 9}


def device_driver(
    page_tokens: int = 16, *, captured: bool = True, dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> Driver:
    """A driver over the fused kernels."""
    decoder = cuda_decoder(spec_of(**changes), dtype)
    return Driver(decoder, page_tokens, executor=cuda_executor(captured), stream=stream(), **SIZES)


class Trio:
    """Float32 and a half type on the CPU, and that type on the device, fed with float32's tokens; `check` at
    the end.
    """

    def __init__(
        self,
        page_tokens: int = 16,
        *,
        captured: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        **changes: Any,
    ) -> None:
        spec = spec_of(**changes)
        self.drivers = (
            Driver(reference_decoder(spec), page_tokens, **SIZES),
            Driver(half_decoder(spec, dtype), page_tokens, **SIZES),
            device_driver(page_tokens, captured=captured, dtype=dtype, **changes),
        )
        self.yardstick, self.own = Deviations(), Deviations()

    def follow(self, work: list[tuple[int, int]], requests: dict[int, tuple[Request, ...]]) -> None:
        """One step on each: (request, rows) in scheduler order."""
        results = [
            driver.step([(requests[i][side], rows) for i, rows in work])
            for side, driver in enumerate(self.drivers)
        ]
        note_step((self.yardstick, self.own), results[0], results[1:])
        for i, _ in work:
            first, *others = requests[i]
            for request in others:
                request.last = first.last

    def check(self) -> None:
        """Level b over everything that was followed."""
        assert_level_b(self.own, self.yardstick)


def triples(lengths: list[int]) -> dict[int, tuple[Request, ...]]:
    return {i: tuple(Request(i, prompt(n, i), logprobs=5) for _ in range(3)) for i, n in enumerate(lengths)}
