"""Packed int32 buffers: a header, a section table, sections. The wire form of plans and results.

Layout in words: [magic, version, total words, sections, scalars...] then for each section (offset, rows), then the
sections' words. A record is a dataclass: an `int` field is a scalar, an `I32` field a section of one column,
a field of a `Columns` class a section of that class's columns. So names and widths are those of the record's
own fields, and nothing is parsed from text.
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
        self._name = ""
        self._first = 0
        self._at: int | slice = 0

    def __set_name__(self, owner: type[Columns], name: str) -> None:
        self._name = name

    def put(self, first: int) -> int | slice:
        """Take the place from word `first` of a row on, and say which that is."""
        self._first = first
        self._at = first if self.words == 1 else slice(first, first + self.words)
        return self._at

    @overload
    def __get__(self, instance: None, owner: type[Columns]) -> int: ...

    @overload
    def __get__(self, instance: Columns, owner: type[Columns]) -> I32: ...

    def __get__(self, instance: Columns | None, owner: type[Columns]) -> int | I32:
        if instance is None:
            return self._first
        view: I32 = instance.array[:, self._at]
        instance.__dict__[self._name] = (
            view  # a plan is read many times a step: from now on a plain attribute
        )
        return view


class Columns:
    """A section of several columns: a subclass lists them in order, everybody else reads their names.

    array: int32 [rows, width]. Values are changed in place, through the columns' views.
    """

    width: ClassVar[int]
    array: I32
    _none: ClassVar[Any]
    _places: ClassVar[dict[str, int | slice]]

    def __init_subclass__(cls) -> None:
        width, places = 0, {}
        for name, column in vars(cls).items():
            if isinstance(column, Column):
                places[name] = column.put(width)
                width += column.words
        cls.width, cls._places = width, places
        cls._none = cls(np.empty((0, width), dtype=np.int32))

    def __init__(self, array: I32) -> None:
        self.__dict__["array"] = array

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
        if columns.keys() != cls._places.keys():
            raise TypeError(f"{cls.__name__} has the columns {list(cls._places)}, got {list(columns)}")
        array = np.empty((count, cls.width), dtype=np.int32)
        for name, values in columns.items():
            array[:, cls._places[name]] = values
        return cls(array)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, in order."""
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
    """A named section: one-dimensional, or with the columns of a `Columns` class."""

    name: str
    columns: type[Columns] | None = None

    @property
    def width(self) -> int:
        """Words of a row."""
        return 1 if self.columns is None else self.columns.width


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
        sections = (
            Section(name, None if types[name] == I32 else types[name])
            for name in names
            if name not in scalars
        )
        return PackedFormat(magic, version, scalars, tuple(sections), fault)

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
            record[section.name] = view if columns is None else columns(view.reshape(rows, columns.width))
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
