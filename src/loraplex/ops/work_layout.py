"""Where each word of a work list and of the records lies: one table for the host that writes and the kernels
that read.

`*_WORDS` are sizes and `*_AT` offsets, in int32 words; an `*_AT64` counts words of 64 bits. A list of rows
holds 16-bit row numbers, two a word.

Never here: what the words mean for a launch (`worklist` and `triton_kernels` say that). Specification:
rulings "Operators".
"""

from __future__ import annotations

from typing import Final

from loraplex.core.ids import LAYER_MODULES

MODULES: Final = len(LAYER_MODULES)
GROUPS: Final = ((0, 3), (3, 4), (4, 6), (6, 7))
"""Modules that share an input, as [first, last) of LAYER_MODULES: q k v; o; gate up; down."""
LISTED_WORDS: Final = 8

# The head of a work list: the number of blocks, then one word a group for each of the other two.
HEAD_WORDS: Final = 16
HEAD_BLOCKS_AT: Final = 0
HEAD_RECORDS_AT: Final = 1
HEAD_WIDE_AT: Final = 5

# A block: rows of one adapter slot; the last two have one word a module.
BLOCK_WORDS: Final = 32
BLOCK_SLOT_AT: Final = 0
BLOCK_COUNT_AT: Final = 1
BLOCK_ROW0_AT: Final = 2
BLOCK_LISTED_AT: Final = 4
BLOCK_RECORD_AT: Final = 12
BLOCK_Z_AT: Final = 19

# What all layers share of a shrink record.
META_WORDS: Final = 16
META_COUNT_AT: Final = 0
META_Z_AT: Final = 1
META_ROW0_AT: Final = 2
META_LISTED_AT: Final = 8

# A shrink record of one layer; it begins with A's address, 64 bits.
SHRINK_WORDS: Final = 4
SHRINK_VALID_AT: Final = 2
SHRINK_LIST_AT: Final = 3

# An expand record of one layer; it begins with B's address, 64 bits.
EXPAND_WORDS: Final = 8
EXPAND_RANK_AT: Final = 2
EXPAND_SCALE_AT: Final = 3
EXPAND_LIST_AT: Final = 4
EXPAND_FLAGS_AT: Final = 5
EXPAND_INDEX_AT64: Final = 3

# Bits of an expand record's flags, and of the factor table's: which vectors there are.
HAS_G: Final = 1
HAS_C: Final = 2
HAS_H: Final = 4

assert GROUPS[-1][1] == MODULES, "the groups cover the layer's modules"
