"""The batch plan: everything a backend needs to run one iteration, frozen, as one packed int32 buffer.

Rows are phase-major: all prefill rows, then all decode rows from `doff` on (0x03A). Three coordinate systems live side
by side and are never derived from each other: request intervals (`prefill_indptr`), phases (`doff`) and adapter
groups (segments and grouped rows, which may cross `doff`). Sample rows carry their own inverse to scheduler order
(0x03E). State that persists on the backend (page tables, sampling state, adapter table) travels as deltas.

The control plane makes plans and never looks at a tensor; the data plane runs plans and never chooses a page, a slot
or a victim. Plan and `StepResult` are all that crosses between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from loraplex.core.errors import ErrorCode
from loraplex.core.packed import I32, PackedFormat, Section, empty

REQUEST_COLUMNS: Final = (
    "slot", "incarnation", "adapter_slot", "adapter_generation", "kv_start", "rows", "frontier", "scheduler_index",
)  # fmt: skip
SAMPLE_COLUMNS: Final = ("logit", "request", "position", "logprobs")
PROMPT_LOGPROB_COLUMNS: Final = ("logit", "request", "target", "top")
OPEN_COLUMNS: Final = (
    "slot", "incarnation", "prompt_tokens", "temperature", "top_p", "top_k", "min_p", "repetition", "presence",
    "frequency", "seed_low", "seed_high", "bias", "history",
)  # fmt: skip
COPY_DIGEST_WORDS: Final = 8
COPY_COLUMNS: Final = COPY_DIGEST_WORDS + 5
COPY_SLOT, COPY_GENERATION, COPY_PAGES, COPY_CLASS, COPY_BLOCK = range(COPY_DIGEST_WORDS, COPY_COLUMNS)
NO_REFERENCE: Final = -1

PLAN_FORMAT: Final = PackedFormat(
    magic=0x6C70_6C6E,
    version=3,
    scalars=("generation", "reference", "prefills", "decodes", "doff"),
    sections=(
        Section("tokens"),
        Section("positions"),
        Section("requests", len(REQUEST_COLUMNS)),
        Section("prefill_indptr"),
        Section("segment_offsets"),
        Section("segment_adapters"),
        Section("group_rows"),
        Section("group_offsets"),
        Section("group_adapters"),
        Section("logit_rows"),
        Section("samples", len(SAMPLE_COLUMNS)),
        Section("prompt_logprobs", len(PROMPT_LOGPROB_COLUMNS)),
        Section("mask_samples"),
        Section("mask_words"),
        Section("opens", len(OPEN_COLUMNS)),
        Section("open_bias", 2),
        Section("open_history"),
        Section("page_deltas", 3),
        Section("copies", COPY_COLUMNS),
        Section("copy_pages"),
        Section("publishes", 2),
        Section("retires", 2),
        Section("scrub_pages"),
        Section("scrub_blocks", 3),
    ),
    fault=ErrorCode.PLAN_MALFORMED,
)


def mask_width(vocab_size: int) -> int:
    """Words of one sample's token mask."""
    return -(-vocab_size // 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """One iteration. All arrays are int32; T rows, P prefill and D decode requests, R = P + D, Na adapter rows.

    generation: number of this plan, from 1. reference: generation of the plan that token references point into, or
    `NO_REFERENCE`. doff: first decode row, equal to the number of prefill rows.

    tokens [T]: a token id, or -(1 + i) for the token of sample i of the referenced plan. positions [T].
    requests [R, 8] in packed order, columns `REQUEST_COLUMNS`: request slot and its incarnation; adapter slot (0 is
    the base) and its published generation; KV positions before this step; rows in this step; the planned-frontier
    generation expected before this step; index in scheduler order.
    prefill_indptr [P + 1]: row boundaries of the prefill requests.
    segment_offsets [K + 1], segment_adapters [K]: contiguous runs of one adapter slot over all rows, base included.
    group_rows [Na], group_offsets [G + 1], group_adapters [G]: adapter rows, stably grouped by adapter slot.
    logit_rows [L]: packed rows whose logits are computed.
    samples [S, 4] in scheduler order, columns `SAMPLE_COLUMNS`: index into `logit_rows`; packed request; position of
    the token that is sampled; top log probabilities wanted (-1: none, 0: the sampled token's alone).
    prompt_logprobs [Q, 4], columns `PROMPT_LOGPROB_COLUMNS`: index into `logit_rows`; packed request; actual next
    token; top entries wanted.
    mask_samples [M]: samples, increasing, that may only be certain tokens; mask_words [M * ceil(vocabulary / 32)]: for
    each of them one bit a token, bit t of word t // 32 set where token t may be drawn. The bits are in the plan, so
    that a replay needs no grammar.
    opens [O, 14], columns `OPEN_COLUMNS`: a request slot starts over; float fields are float32 bits; `bias` entries of
    open_bias [*, 2] (token, float32 bits) and `history` tokens of open_history belong to it, in order. History (all
    tokens known so far) is sent only where penalties use it.
    page_deltas [*, 3]: (request slot, index in its page table, page).
    copies [*, 13]: eight words of the image's kernel digest, adapter slot, generation, pages, size class, block; copy_pages:
    the pages of all copies, in order. Class 0 stands for whole pages; an image of a class above has one page and lies in
    this block of it, beside blocks of others. publishes, retires [*, 2]: (adapter slot, generation).
    scrub_pages: freed pages that are filled with 0xFF before the step (tests); scrub_blocks [*, 3]: (page, size class,
    block) of freed blocks, the same.
    """

    generation: int
    reference: int
    prefills: int
    decodes: int
    doff: int
    tokens: I32
    positions: I32
    requests: I32
    prefill_indptr: I32
    segment_offsets: I32
    segment_adapters: I32
    group_rows: I32
    group_offsets: I32
    group_adapters: I32
    logit_rows: I32
    samples: I32
    prompt_logprobs: I32
    mask_samples: I32 = field(default_factory=empty)
    mask_words: I32 = field(default_factory=empty)
    opens: I32 = field(default_factory=lambda: empty(len(OPEN_COLUMNS)))
    open_bias: I32 = field(default_factory=lambda: empty(2))
    open_history: I32 = field(default_factory=empty)
    page_deltas: I32 = field(default_factory=lambda: empty(3))
    copies: I32 = field(default_factory=lambda: empty(COPY_COLUMNS))
    copy_pages: I32 = field(default_factory=empty)
    publishes: I32 = field(default_factory=lambda: empty(2))
    retires: I32 = field(default_factory=lambda: empty(2))
    scrub_pages: I32 = field(default_factory=empty)
    scrub_blocks: I32 = field(default_factory=lambda: empty(3))

    @property
    def rows(self) -> int:
        """T, the number of packed rows."""
        return int(self.tokens.size)

    @property
    def sample_rows(self) -> I32:
        """Packed row of each sample, in scheduler order (0x03E)."""
        return np.asarray(self.logit_rows[self.samples[:, 0]])

    @property
    def masks(self) -> I32:
        """[M, words] the masks of `mask_samples`."""
        return self.mask_words.reshape(self.mask_samples.size, -1) if self.mask_samples.size else empty(2)

    @property
    def row_indptr(self) -> I32:
        """[R + 1] row boundaries of all requests in packed order."""
        out = np.zeros(len(self.requests) + 1, dtype=np.int32)
        np.cumsum(self.requests[:, 5], out=out[1:])
        return out

    @property
    def row_adapters(self) -> I32:
        """[T] adapter slot of each row: request identity expanded to token identity (0x03C)."""
        return np.repeat(self.requests[:, 2], self.requests[:, 5])

    def pack(self) -> bytes:
        """The packed bytes."""
        scalars = {name: getattr(self, name) for name in PLAN_FORMAT.scalars}
        return PLAN_FORMAT.pack(scalars, {s.name: getattr(self, s.name) for s in PLAN_FORMAT.sections})

    @staticmethod
    def unpack(data: bytes | memoryview) -> BatchPlan:
        """The plan in `data`, arrays as views; raises `plan_malformed`."""
        scalars, arrays = PLAN_FORMAT.unpack(data)
        fields: dict[str, Any] = {**scalars, **arrays}
        return BatchPlan(**fields)


RESULT_FORMAT: Final = PackedFormat(
    magic=0x6C70_7273,
    version=1,
    scalars=("generation", "execute_us"),
    sections=(
        Section("tokens"),
        Section("logprob_indptr"),
        Section("logprob_ids"),
        Section("logprob_values"),
        Section("prompt_logprob_indptr"),
        Section("prompt_logprob_ids"),
        Section("prompt_logprob_values"),
        Section("copied", 3),
        Section("faults", 2),
        Section("error"),
    ),
    fault=ErrorCode.RESULT_MALFORMED,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one plan produced. generation: the plan that it answers. execute_us: device time in microseconds.

    tokens [S]: sampled tokens. logprob_indptr [S + 1] into logprob_ids and logprob_values (float32 bits): for each
    sample the sampled token first, then top entries. prompt_logprob_*: the same for each prompt position asked.
    copied [*, 3]: (adapter slot, generation, 1 when the device checksum agrees, else 0). faults [*, 2]: (packed
    request, 1) where logits were not finite. error: UTF-8 bytes of a message when the step failed as a whole, one a
    word; then nothing else counts.
    """

    generation: int
    execute_us: int
    tokens: I32
    logprob_indptr: I32
    logprob_ids: I32 = field(default_factory=empty)
    logprob_values: I32 = field(default_factory=empty)
    prompt_logprob_indptr: I32 = field(default_factory=lambda: np.zeros(1, dtype=np.int32))
    prompt_logprob_ids: I32 = field(default_factory=empty)
    prompt_logprob_values: I32 = field(default_factory=empty)
    copied: I32 = field(default_factory=lambda: empty(3))
    faults: I32 = field(default_factory=lambda: empty(2))
    error: I32 = field(default_factory=empty)

    @property
    def error_message(self) -> str:
        """Why the step failed; empty when it did not."""
        return bytes(self.error.astype(np.uint8)).decode("utf-8", "replace")

    def pack(self) -> bytes:
        """The packed bytes."""
        scalars = {name: getattr(self, name) for name in RESULT_FORMAT.scalars}
        return RESULT_FORMAT.pack(scalars, {s.name: getattr(self, s.name) for s in RESULT_FORMAT.sections})

    @staticmethod
    def unpack(data: bytes | memoryview) -> StepResult:
        """The result in `data`; raises `result_malformed`."""
        scalars, arrays = RESULT_FORMAT.unpack(data)
        fields: dict[str, Any] = {**scalars, **arrays}
        return StepResult(**fields)

    @staticmethod
    def failure(generation: int, message: str) -> StepResult:
        """The result of a step that failed as a whole."""
        text = np.frombuffer(message.encode("utf-8"), dtype=np.uint8).astype(np.int32)
        return StepResult(
            generation=generation,
            execute_us=0,
            tokens=empty(),
            logprob_indptr=np.zeros(1, np.int32),
            error=text,
        )
