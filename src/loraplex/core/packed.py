"""Packed int32 buffers: a header, a section table, sections. The wire form of plans and results.

Layout in words: [magic, version, total words, sections, scalars...] then for each section (offset, rows),
then the sections' words. A record is a dataclass: an `int` field is a scalar, an `I32` field a section of one
column, a field of a `Columns` class a section of that class's columns. So names and widths are those of the
record's own fields, and nothing is parsed from text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, get_type_hints, overload

import numpy as np
import numpy.typing as npt

from loraplex.core.errors import ErrorCode, InternalFault

I32 = npt.NDArray[np.int32]

PREFIX_WORDS = 4
"""Words before the scalars of a packed record."""


class Column:
    """One int32 column of a section, or `words` of them side by side under one name.

    Read on a `Columns` class it is its number (of the first word), which is what device code is given; read
    on an instance it is a view of the column, [rows] or [rows, words].
    """

    def __init__(self, words: int = 1) -> None:
        self.words = words
        self.first = 0

    @overload
    def __get__(self, instance: None, owner: type[Columns]) -> int: ...

    @overload
    def __get__(self, instance: Columns, owner: type[Columns]) -> I32: ...

    def __get__(self, instance: Columns | None, owner: type[Columns]) -> int | I32:
        return self.first  # an instance has the view as an attribute of its own, which comes first


class Columns:
    """A section of several columns: a subclass lists them in order, everybody else reads their names.

    array: int32 [rows, width]. Values are changed in place, through the columns' views.
    """

    width: ClassVar[int]
    array: I32
    _none: ClassVar[Any]
    _words: ClassVar[tuple[str, ...]]
    """The column that each word of a row belongs to."""
    _wide: ClassVar[dict[str, slice]]
    """Columns of several words."""
    _names: ClassVar[frozenset[str]]

    def __init_subclass__(cls) -> None:
        words: list[str] = []
        cls._wide = {}
        for name, column in vars(cls).items():
            if isinstance(column, Column):
                column.first = len(words)
                words += [name] * column.words
                if column.words > 1:
                    cls._wide[name] = slice(column.first, len(words))
        cls.width, cls._words, cls._names = len(words), tuple(words), frozenset(words)
        cls._none = cls(np.empty((0, len(words)), dtype=np.int32))

    def __init__(self, array: I32) -> None:
        own = self.__dict__
        own["array"] = array
        own.update(zip(self._words, array.T, strict=True))  # at once: a plan's columns are read many times
        for name, words in self._wide.items():
            own[name] = array[:, words]

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} of {type(self).__name__} is a view; write into it: {name}[:] = ...")

    @classmethod
    def none(cls) -> Self:
        """No rows."""
        none: Self = cls._none
        return none

    @classmethod
    def zeros(cls, count: int) -> Self:
        """`count` rows of zeros."""
        return cls(np.zeros((count, cls.width), dtype=np.int32))

    @classmethod
    def filled(cls, count: int, /, **columns: npt.ArrayLike) -> Self:
        """`count` rows. columns: every one, [count] or a value for all; any other name raises TypeError."""
        made = cls(np.empty((cls.width, count), dtype=np.int32).T)  # a column's values lie side by side
        if columns.keys() != cls._names:
            raise TypeError(f"{cls.__name__} has the columns {sorted(cls._names)}, got {sorted(columns)}")
        for name, values in columns.items():
            made.__dict__[name][...] = values
        return made

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, one at least, in order."""
        return parts[0] if len(parts) == 1 else cls(np.concatenate([part.array for part in parts]))

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, rows: slice | npt.NDArray[np.bool_] | npt.NDArray[np.integer[Any]]) -> Self:
        """The chosen rows, all columns."""
        return type(self)(self.array[rows])

    __iter__ = None
    """Rows are numbers without names: `each` iterates over named columns."""


def each(*columns: I32) -> Iterator[tuple[int, ...]]:
    """Rows of some columns as Python numbers: `for slot, page in each(deltas.slot, deltas.page)`."""
    return zip(*(column.tolist() for column in columns), strict=True)


@dataclass(frozen=True, slots=True)
class Section:
    """A named section of `width` columns: those of a `Columns` class, or one-dimensional."""

    name: str
    columns: type[Columns] | None
    width: int


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """One kind of packed record: its magic number, version, scalar names and sections in order."""

    magic: int
    version: int
    scalars: tuple[str, ...]
    sections: tuple[Section, ...]
    fault: ErrorCode

    @staticmethod
    def of(record: type, *, magic: int, version: int, fault: ErrorCode) -> PackedFormat:
        """The format of a dataclass: its own fields in order, then those that it inherits."""
        types = get_type_hints(record)
        names = [name for owner in record.__mro__[:-1] for name in owner.__annotations__]
        scalars = tuple(name for name in names if types[name] is int)
        sections = tuple(
            Section(name, None, 1) if types[name] == I32 else Section(name, types[name], types[name].width)
            for name in names
            if name not in scalars
        )
        return PackedFormat(magic, version, scalars, sections, fault)

    def word_of(self, name: str) -> int:
        """Word of a scalar, or of a section's offset (its number of rows is in the next word)."""
        if name in self.scalars:
            return PREFIX_WORDS + self.scalars.index(name)
        names = [section.name for section in self.sections]
        return PREFIX_WORDS + len(self.scalars) + 2 * names.index(name)

    def pack(self, record: object) -> bytes:
        """Packed bytes of one record of this format."""
        table: list[int] = []
        offset = PREFIX_WORDS + len(self.scalars) + 2 * len(self.sections)
        parts: list[I32] = []
        for section in self.sections:
            value = getattr(record, section.name)
            array: I32 = value if section.columns is None else value.array
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
            *(getattr(record, name) for name in self.scalars),
        ]
        return np.concatenate([np.array([*prefix, *table], dtype=np.int32), *parts]).tobytes()

    def unpack(self, data: bytes | memoryview) -> dict[str, Any]:
        """Fields of the record in `data`, sections as zero-copy views; raises this format's fault."""
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
        record: dict[str, Any] = {name: int(words[PREFIX_WORDS + i]) for i, name in enumerate(self.scalars)}
        expected = table_end
        for index, section in enumerate(self.sections):
            offset, rows = int(words[head + 2 * index]), int(words[head + 2 * index + 1])
            end = offset + rows * section.width
            if offset != expected or rows < 0 or end > words.size:
                raise self._refuse(f"section {section.name} at {offset} with {rows} rows does not fit")
            view, columns = words[offset:end], section.columns
            if columns is None:
                record[section.name] = view
            else:
                record[section.name] = columns(view.reshape(rows, section.width)) if rows else columns.none()
            expected = end
        if expected != words.size:
            raise self._refuse(f"{words.size - expected} words follow the last section")
        return record

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
