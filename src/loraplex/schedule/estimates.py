"""How long a prefill and a load will take, as far as committed steps and loads have shown.

A step takes a time for itself and a time for each of its rows: both are fitted to the steps with prefill rows
that were measured, the newest counting most. Nothing is guessed: what was not measured yet takes no time
here, so that nobody is refused for it. Times come in.

Specification: 0x09F (early abort's estimate); rulings "Scheduling".
"""

from __future__ import annotations

from typing import Final

_KEPT: Final = 0.95
"""Part of its weight that a measurement keeps when the next one comes."""


class Estimates:
    """Running sums over measured steps (count, rows, time, products) and loads (bytes, time)."""

    def __init__(self) -> None:
        self._count = self._rows = self._ns = self._rows_rows = self._rows_ns = 0.0
        self._load_bytes = self._load_ns = 0.0

    def note_step(self, rows: int, took_ns: int) -> None:
        """A step with prefill rows was committed. rows: all of its rows. took_ns: of the device."""
        self._count = self._count * _KEPT + 1
        self._rows = self._rows * _KEPT + rows
        self._ns = self._ns * _KEPT + took_ns
        self._rows_rows = self._rows_rows * _KEPT + rows * rows
        self._rows_ns = self._rows_ns * _KEPT + rows * took_ns

    def note_load(self, nbytes: int, took_ns: int) -> None:
        """A load was published, so long after its copy had begun."""
        self._load_bytes = self._load_bytes * _KEPT + nbytes
        self._load_ns = self._load_ns * _KEPT + took_ns

    def prefill_ns(self, rows: int, steps: int) -> int:
        """Time until `rows` rows, prompts' and those beside them, have run in `steps` steps."""
        if not self._count:
            return 0
        mean_rows, mean_ns = self._rows / self._count, self._ns / self._count
        spread = self._rows_rows / self._count - mean_rows * mean_rows
        together = self._rows_ns / self._count - mean_rows * mean_ns
        # Steps of one size tell nothing of a row; then a step is all that counts.
        slope = min(max(together / spread, 0.0), mean_ns / mean_rows) if spread > 1.0 else 0.0
        return int(steps * (mean_ns - slope * mean_rows) + rows * slope)

    def load_ns(self, nbytes: int) -> int:
        """Time of a load of `nbytes`."""
        return int(nbytes * self._load_ns / self._load_bytes) if self._load_bytes else 0
