"""Packed int32 buffers: a header, a section table, sections. The wire form of plans and results.

Layout in words: [magic, version, total words, sections, scalars...] then for each section (offset, rows), then the
sections' words. Section names and widths are fixed by the record that uses the codec, so nothing is parsed from text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loraplex.core.errors import ErrorCode, InternalFault

I32 = npt.NDArray[np.int32]

PREFIX_WORDS = 4
"""Words before the scalars of a packed record."""


@dataclass(frozen=True, slots=True)
class Section:
    """A named int32 array of `width` columns; width 1 is one-dimensional."""

    name: str
    width: int = 1


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """One kind of packed record: its magic number, version, scalar names and sections in order."""

    magic: int
    version: int
    scalars: tuple[str, ...]
    sections: tuple[Section, ...]
    fault: ErrorCode

    def pack(self, scalars: Mapping[str, int], arrays: Mapping[str, I32]) -> bytes:
        """Packed bytes of one record. Every scalar and section must be given."""
        table: list[int] = []
        offset = PREFIX_WORDS + len(self.scalars) + 2 * len(self.sections)
        parts: list[I32] = []
        for section in self.sections:
            array = arrays[section.name]
            size = array.size
            table += (offset, size // section.width)
            if size:
                parts.append(np.ascontiguousarray(array, dtype=np.int32).reshape(-1))
                offset += size
        prefix = [
            self.magic,
            self.version,
            offset,
            len(self.sections),
            *(scalars[name] for name in self.scalars),
        ]
        return np.concatenate([np.array([*prefix, *table], dtype=np.int32), *parts]).tobytes()

    def unpack(self, data: bytes | memoryview) -> tuple[dict[str, int], dict[str, I32]]:
        """Scalars and zero-copy section views of packed bytes; raises this format's fault on any inconsistency."""
        words = self._words(data)
        head = PREFIX_WORDS + len(self.scalars)
        table_end = head + 2 * len(self.sections)
        if words.size < table_end:
            raise self._refuse(f"{words.size} words are fewer than its {table_end} words of header")
        for index, (name, want) in enumerate((("magic", self.magic), ("version", self.version))):
            if int(words[index]) != want:
                raise self._refuse(f"{name} is {int(words[index])}, expected {want}")
        if int(words[2]) != words.size:
            raise self._refuse(f"header names {int(words[2])} words, the buffer has {words.size}")
        if int(words[3]) != len(self.sections):
            raise self._refuse(f"header names {int(words[3])} sections, expected {len(self.sections)}")
        scalars = {name: int(words[PREFIX_WORDS + i]) for i, name in enumerate(self.scalars)}
        arrays: dict[str, I32] = {}
        expected = table_end
        for index, section in enumerate(self.sections):
            offset, rows = int(words[head + 2 * index]), int(words[head + 2 * index + 1])
            end = offset + rows * section.width
            if offset != expected or rows < 0 or end > words.size:
                raise self._refuse(f"section {section.name} at {offset} with {rows} rows does not fit")
            view = words[offset:end]
            arrays[section.name] = view if section.width == 1 else view.reshape(rows, section.width)
            expected = end
        if expected != words.size:
            raise self._refuse(f"{words.size - expected} words follow the last section")
        return scalars, arrays

    def _words(self, data: bytes | memoryview) -> I32:
        if len(data) % 4:
            raise self._refuse(f"{len(data)} bytes are not whole words")
        return np.frombuffer(data, dtype=np.int32)

    def _refuse(self, why: str) -> InternalFault:
        return InternalFault(self.fault, f"packed record refused: {why}")


def float_bits(values: Sequence[float] | npt.NDArray[np.floating]) -> I32:
    """float32 values as their int32 bit patterns."""
    return np.asarray(values, dtype=np.float32).view(np.int32)


def bits_float(bits: I32) -> npt.NDArray[np.float32]:
    """int32 bit patterns as float32 values."""
    return np.ascontiguousarray(bits).view(np.float32)


def empty(width: int = 1) -> I32:
    """An empty section of `width` columns."""
    return np.empty(0 if width == 1 else (0, width), dtype=np.int32)


def run_boundaries(keys: I32) -> tuple[I32, I32]:
    """Contiguous runs of equal keys. keys [n] -> offsets [K + 1], key of each run [K]."""
    if keys.size == 0:
        return np.zeros(1, dtype=np.int32), empty()
    changes = np.flatnonzero(keys[1:] != keys[:-1])
    offsets = np.empty(changes.size + 2, dtype=np.int32)
    offsets[0], offsets[1:-1], offsets[-1] = 0, changes + 1, keys.size
    return offsets, keys[offsets[:-1]]
