"""The batch plan: everything a backend needs to run one iteration, frozen, as one packed int32 buffer.

Rows are phase-major: all prefill rows, then all decode rows from `doff` on (0x03A). Three coordinate systems
live side by side and are never derived from each other: request intervals (`prefill_indptr`), phases (`doff`)
and adapter groups (segments and grouped rows, which may cross `doff`). Sample rows carry their own inverse to
scheduler order (0x03E). State that persists on the backend (page tables, sampling state, adapter table)
travels as deltas.

Every section is a field of `BatchPlan` or `StepResult` and every column an attribute of its `Columns` class:
nothing else says where one lies.

The control plane makes plans and never looks at a tensor; the data plane runs plans and never chooses a page,
a slot or a victim. Plan and `StepResult` are all that crosses between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from loraplex.core.errors import ErrorCode
from loraplex.core.packed import I32, Column, Columns, PackedFormat, empty

NO_REFERENCE: Final = -1


class RequestColumns(Columns):
    """Requests of a step, in packed order.

    slot, incarnation: request slot and who holds it. adapter_slot, adapter_generation: adapter slot (0 is the
    base) and its published generation. kv_start: KV positions before this step; a request may start behind
    positions that others computed. rows: its rows in this step. frontier: the planned-frontier generation
    expected before this step. scheduler_index: its place in scheduler order.
    """

    slot = Column()
    incarnation = Column()
    adapter_slot = Column()
    adapter_generation = Column()
    kv_start = Column()
    rows = Column()
    frontier = Column()
    scheduler_index = Column()

    @property
    def kv_end(self) -> I32:
        """[R] KV positions after this step."""
        return self.kv_start + self.rows


class SampleColumns(Columns):
    """Samples, in scheduler order.

    logit: index into `logit_rows`. request: packed request. position: of the token that is sampled. logprobs:
    top log probabilities wanted (-1: none, 0: the sampled token's alone).
    """

    logit = Column()
    request = Column()
    position = Column()
    logprobs = Column()


class PromptLogprobColumns(Columns):
    """Prompt positions that are scored.

    logit: index into `logit_rows`. request: packed request. target: the actual next token. top: top entries
    wanted.
    """

    logit = Column()
    request = Column()
    target = Column()
    top = Column()


class OpenColumns(Columns):
    """Request slots that start over.

    kv_start: positions behind which it starts; their rows are others', in the pages that its page deltas name
    first. temperature to frequency: sampling options, float32 bits but for top_k. seed_low, seed_high: halves
    of the seed. bias: how many entries of `open_bias`, and history: how many tokens of `open_history`, belong
    to it, in order. sampled_ids: ids below this may be sampled, 0 leaves those of the base.
    """

    slot = Column()
    incarnation = Column()
    kv_start = Column()
    prompt_tokens = Column()
    temperature = Column()
    top_p = Column()
    top_k = Column()
    min_p = Column()
    repetition = Column()
    presence = Column()
    frequency = Column()
    seed_low = Column()
    seed_high = Column()
    bias = Column()
    history = Column()
    sampled_ids = Column()


class BiasColumns(Columns):
    """Logit biases. bias: float32 bits."""

    token = Column()
    bias = Column()


class PageDeltaColumns(Columns):
    """New entries of page tables. slot: request slot. index: in its page table."""

    slot = Column()
    index = Column()
    page = Column()


class CopyColumns(Columns):
    """Copies of adapter images.

    digest: the eight words of the image's kernel digest. pages: how many of `copy_pages`. size_class, block:
    class 0 stands for whole pages; an image of a class above has one page and lies in this block of it,
    beside blocks of others.
    """

    digest = Column(8)
    adapter_slot = Column()
    adapter_generation = Column()
    pages = Column()
    size_class = Column()
    block = Column()


class AdapterColumns(Columns):
    """Adapter slots at a generation."""

    adapter_slot = Column()
    adapter_generation = Column()


def adapter_pairs(rows: RequestColumns | CopyColumns | AdapterColumns) -> list[tuple[int, int]]:
    """(adapter slot, generation) of each row."""
    return list(zip(rows.adapter_slot.tolist(), rows.adapter_generation.tolist(), strict=True))


class BlockColumns(Columns):
    """Blocks of pages."""

    page = Column()
    size_class = Column()
    block = Column()


class CopiedColumns(Columns):
    """Copies that have ended. intact: 1 when the device checksum agrees, else 0."""

    adapter_slot = Column()
    adapter_generation = Column()
    intact = Column()


class FaultColumns(Columns):
    """Packed requests whose logits are not usable. not_finite: 1, a logit was not finite."""

    request = Column()
    not_finite = Column()


def mask_width(vocab_size: int) -> int:
    """Words of one sample's token mask."""
    return -(-vocab_size // 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deltas:
    """Changes of backend state that travel with a plan. All arrays are int32.

    opens: request slots that start over, with their entries of open_bias and their tokens of open_history:
    all tokens known so far, sent only where penalties use them. page_deltas: new entries of page tables.
    copies and copy_pages: the images to copy, and the pages of all of them in order. publishes, retires:
    adapter slots. scrub_pages, scrub_blocks: freed pages and blocks that are filled with 0xFF before the step
    (tests).
    """

    opens: OpenColumns = field(default_factory=OpenColumns.none)
    open_bias: BiasColumns = field(default_factory=BiasColumns.none)
    open_history: I32 = field(default_factory=empty)
    page_deltas: PageDeltaColumns = field(default_factory=PageDeltaColumns.none)
    copies: CopyColumns = field(default_factory=CopyColumns.none)
    copy_pages: I32 = field(default_factory=empty)
    publishes: AdapterColumns = field(default_factory=AdapterColumns.none)
    retires: AdapterColumns = field(default_factory=AdapterColumns.none)
    scrub_pages: I32 = field(default_factory=empty)
    scrub_blocks: BlockColumns = field(default_factory=BlockColumns.none)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan(Deltas):
    """One iteration. All arrays are int32; T rows, P prefill and D decode requests, R = P + D, Na adapter
    rows.

    generation: number of this plan, from 1. reference: generation of the plan that token references point
    into, or `NO_REFERENCE`. doff: first decode row, equal to the number of prefill rows.

    tokens [T]: a token id, or -(1 + i) for the token of sample i of the referenced plan. positions [T].
    requests [R] in packed order. prefill_indptr [P + 1]: row boundaries of the prefill requests.
    segment_offsets [K + 1], segment_adapters [K]: contiguous runs of one adapter slot over all rows, base
    included. group_rows [Na], group_offsets [G + 1], group_adapters [G]: adapter rows, stably grouped by
    adapter slot. logit_rows [L]: packed rows whose logits are computed. samples [S] in scheduler order.
    prompt_logprobs [Q]. mask_samples [M]: samples, increasing, that may only be certain tokens; mask_words [M
    * ceil(vocabulary / 32)]: for each of them one bit a token, bit t of word t // 32 set where token t may be
    drawn. The bits are in the plan, so that a replay needs no grammar.
    """

    generation: int
    reference: int
    prefills: int
    decodes: int
    doff: int
    tokens: I32
    positions: I32
    requests: RequestColumns
    prefill_indptr: I32
    segment_offsets: I32
    segment_adapters: I32
    group_rows: I32
    group_offsets: I32
    group_adapters: I32
    logit_rows: I32
    samples: SampleColumns
    prompt_logprobs: PromptLogprobColumns
    mask_samples: I32 = field(default_factory=empty)
    mask_words: I32 = field(default_factory=empty)

    @property
    def rows(self) -> int:
        """T, the number of packed rows."""
        return int(self.tokens.size)

    @property
    def sample_rows(self) -> I32:
        """Packed row of each sample, in scheduler order (0x03E)."""
        return np.asarray(self.logit_rows[self.samples.logit])

    @property
    def sample_slots(self) -> I32:
        """Request slot of each sample, in scheduler order."""
        return np.asarray(self.requests.slot[self.samples.request])

    @property
    def masks(self) -> I32:
        """[M, words] the masks of `mask_samples`."""
        return self.mask_words.reshape(self.mask_samples.size, -1) if self.mask_samples.size else empty(2)

    @property
    def row_indptr(self) -> I32:
        """[R + 1] row boundaries of all requests in packed order."""
        out = np.zeros(len(self.requests) + 1, dtype=np.int32)
        np.cumsum(self.requests.rows, out=out[1:])
        return out

    @property
    def row_adapters(self) -> I32:
        """[T] adapter slot of each row: request identity expanded to token identity (0x03C)."""
        return np.repeat(self.requests.adapter_slot, self.requests.rows)

    def pack(self) -> bytes:
        """The packed bytes."""
        return PLAN_FORMAT.pack(self)

    @staticmethod
    def unpack(data: bytes | memoryview) -> BatchPlan:
        """The plan in `data`, arrays as views; raises `plan_malformed`."""
        return BatchPlan(**PLAN_FORMAT.unpack(data))


PLAN_FORMAT: Final = PackedFormat.of(BatchPlan, magic=0x6C70_6C6E, version=4, fault=ErrorCode.PLAN_MALFORMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one plan produced. generation: the plan that it answers. execute_us: device time in microseconds.

    tokens [S]: sampled tokens. logprob_indptr [S + 1] into logprob_ids and logprob_values (float32 bits): for
    each sample the sampled token first, then top entries. prompt_logprob_*: the same for each prompt position
    asked, and where its own token ranks among all, from 1. copied: copies that have ended and were not
    reported before. faults: requests whose logits are not usable. error: UTF-8 bytes of a message when the
    step failed as a whole, one a word; then nothing else counts.
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
    prompt_logprob_ranks: I32 = field(default_factory=empty)
    copied: CopiedColumns = field(default_factory=CopiedColumns.none)
    faults: FaultColumns = field(default_factory=FaultColumns.none)
    error: I32 = field(default_factory=empty)

    @property
    def error_message(self) -> str:
        """Why the step failed; empty when it did not."""
        return bytes(self.error.astype(np.uint8)).decode("utf-8", "replace")

    def pack(self) -> bytes:
        """The packed bytes."""
        return RESULT_FORMAT.pack(self)

    @staticmethod
    def unpack(data: bytes | memoryview) -> StepResult:
        """The result in `data`; raises `result_malformed`."""
        return StepResult(**RESULT_FORMAT.unpack(data))

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


RESULT_FORMAT: Final = PackedFormat.of(
    StepResult, magic=0x6C70_7273, version=2, fault=ErrorCode.RESULT_MALFORMED
)
