"""Traffic as users make it: how many ask, how often, for which adapters, how much; and what became of it.

A closed loop keeps so many requests open; arrivals are Poisson. Lengths are fixed or log-normal, adapters are
taken in turn or by Zipf's law. Draws depend on a seed alone. Never touches a socket or a clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np

SIGMA: Final = 0.7
TTFT_MS: Final = 500.0
TPOT_MS: Final = 20.0
"""The objective: a request that meets both counts as good."""


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """One case. clients: of a closed loop; 0: arrivals at `rate` a second. adapters: 0 for the base alone.

    zipf: exponent of their popularity, 0 for in turn. prompt, new: tokens of each request, or medians where
    `mixed`, then at most `prompt_most` and `new_most`. text: prompts are text, a byte a token, else token
    ids.
    """

    clients: int = 0
    rate: float = 0.0
    adapters: int = 0
    zipf: float = 0.0
    mixed: bool = False
    prompt: int = 128
    new: int = 128
    prompt_most: int = 2000
    new_most: int = 600
    text: bool = False

    @property
    def name(self) -> str:
        """How tables name it."""
        who = f"C={self.clients}" if self.clients else f"R={self.rate:g}"
        whom = f"Zipf {self.adapters}" if self.zipf else f"over {self.adapters}" if self.adapters else "base"
        sizes = "mixed" if self.mixed else f"{self.prompt}/{self.new}"
        return f"{who}, {whom}, {sizes}{', text' if self.text else ''}"


def mixed(**options: float) -> Traffic:
    """Log-normal lengths, medians 220 in and 130 out, Zipf 1.0 over 256 adapters unless said otherwise."""
    return msgspec.convert(
        {"adapters": 256, "zipf": 1.0, **options, "mixed": True, "prompt": 220, "new": 130}, Traffic
    )


CASES: Final = (
    Traffic(clients=64),
    Traffic(clients=64, adapters=64),
    Traffic(clients=256, adapters=256),
    mixed(clients=128),
    mixed(rate=35.0),
    mixed(rate=35.0, adapters=0, zipf=0.0),
)
"""The rows of docs/benchmarks.md."""


class Ask(msgspec.Struct, frozen=True):
    """One request to make. adapter: its index, -1 for the base. after_s: since the one before, for
    arrivals.
    """

    prompt: int
    new: int
    adapter: int
    after_s: float


def draws(traffic: Traffic, seed: int, part: int, parts: int) -> Iterator[Ask]:
    """Requests without end; part of so many drawers that share the traffic."""
    rng = np.random.default_rng((seed, part))
    weights = 1.0 / np.arange(1, traffic.adapters + 1) ** traffic.zipf
    shares = weights / weights.sum() if traffic.adapters else weights
    number = part
    while True:
        adapter = -1
        if traffic.adapters:
            adapter = (
                int(rng.choice(traffic.adapters, p=shares)) if traffic.zipf else number % traffic.adapters
            )
        number += parts
        prompt, new = traffic.prompt, traffic.new
        if traffic.mixed:
            spread = np.exp(SIGMA * rng.standard_normal(2))
            prompt = int(np.clip(prompt * spread[0], 1, traffic.prompt_most))
            new = int(np.clip(new * spread[1], 1, traffic.new_most))
        yield Ask(prompt, new, adapter, float(rng.exponential(parts / traffic.rate)) if traffic.rate else 0.0)


class Done(msgspec.Struct, frozen=True):
    """A request that ended inside the measured time. Milliseconds; tpot, longest: 0 for a single token."""

    ttft: float
    tpot: float
    longest: float


class Seen(msgspec.Struct):
    """What one client process saw. tokens: that came inside the measured time. failed: requests, with a first
    message.
    """

    done: list[Done] = []
    tokens: float = 0.0
    failed: int = 0
    message: str = ""


class Row(msgspec.Struct, frozen=True):
    """One measured case; times in milliseconds at the median and the 99th percentile.

    longest: the longest time between two tokens of a request. good: share of requests that met the objective;
    goodput: of them, how many a second. server_cores, engine_cores: processor seconds a second of each
    process.
    """

    case: str
    seconds: float
    requests: int
    tokens_per_s: float
    ttft: tuple[float, float]
    tpot: tuple[float, float]
    longest: tuple[float, float]
    good: float
    goodput: float
    server_cores: float
    engine_cores: float


def row(traffic: Traffic, seen: Sequence[Seen], seconds: float, server_s: float, engine_s: float) -> Row:
    """The figures of a case. server_s, engine_s: processor time inside the measured time."""
    done = [one for part in seen for one in part.done]
    good = sum(one.ttft <= TTFT_MS and one.tpot <= TPOT_MS for one in done)
    several = [one for one in done if one.tpot]
    return Row(
        traffic.name,
        seconds,
        len(done),
        sum(part.tokens for part in seen) / seconds,
        _middle([one.ttft for one in done]),
        _middle([one.tpot for one in several]),
        _middle([one.longest for one in several]),
        good / max(len(done), 1),
        good / seconds,
        server_s / seconds,
        engine_s / seconds,
    )


def _middle(values: Sequence[float]) -> tuple[float, float]:
    if not values:
        return 0.0, 0.0
    return round(float(np.percentile(values, 50)), 2), round(float(np.percentile(values, 99)), 2)


HEAD: Final = (
    f"{'case':28} {'tok/s':>8} {'TTFT':>11} {'TPOT':>11} {'longest':>11} "
    f"{'good':>5} {'req/s':>6} {'server':>6} {'engine':>6}"
)


def line(figures: Row) -> str:
    """A row of the printed table."""

    def pair(values: tuple[float, float]) -> str:
        return "/".join(f"{value:.1f}" if value < 100 else f"{value:.0f}" for value in values)

    return (
        f"{figures.case:28} {figures.tokens_per_s:8,.0f} {pair(figures.ttft):>11} {pair(figures.tpot):>11} "
        f"{pair(figures.longest):>11} {figures.good:5.2f} {figures.goodput:6.1f} {figures.server_cores:6.2f} "
        f"{figures.engine_cores:6.2f}"
    )
