"""Drives a model runner with plans, as a control plane of a few lines: slots, pages and frontiers by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tests.model.tiny import VOCAB, reference

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.layout import AdapterImage, KvShape, size_class_for
from loraplex.core.packed import float_bits
from loraplex.core.plan import BatchPlan, CopyColumns, Deltas, OpenColumns, PageDeltaColumns, StepResult
from loraplex.core.plan_check import PlanBounds
from loraplex.model.decoder import Decoder
from loraplex.model.runner import MakeExecutor, ModelRunner, allocate_pool
from loraplex.schedule.packing import Work, build_plan

SLOTS, MODEL_LEN = 6, 64


class Images:
    """Images by kernel digest, in memory."""

    def __init__(self) -> None:
        self.images: dict[str, AdapterImage] = {}

    def open(self, kernel_digest: str) -> AdapterImage:
        if kernel_digest not in self.images:
            raise InternalFault(ErrorCode.ADAPTER_LOAD_FAILED, f"no image {kernel_digest[:12]}")
        return self.images[kernel_digest]


@dataclass
class Request:
    """What the driver knows of one request."""

    slot: int
    prompt: list[int]
    adapter: tuple[int, int] = (0, 0)
    logprobs: int = -1
    prompt_logprobs: int = -1
    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    repetition: float = 1.0
    incarnation: int = 1
    planned: int = 0
    frontier: int = 0
    last: int | None = None
    """Token to feed, or a reference below 0."""
    out: list[int] = field(default_factory=list)


def open_rows(requests: list[Request], seed: int = 5) -> OpenColumns:
    """`BatchPlan.opens` of these requests; penalties start without history."""
    return OpenColumns.filled(
        len(requests),
        slot=[r.slot for r in requests],
        incarnation=[r.incarnation for r in requests],
        kv_start=[r.planned for r in requests],
        prompt_tokens=[len(r.prompt) for r in requests],
        temperature=float_bits([r.temperature for r in requests]),
        top_p=float_bits([r.top_p for r in requests]),
        top_k=[r.top_k for r in requests],
        min_p=float_bits([r.min_p for r in requests]),
        repetition=float_bits([r.repetition for r in requests]),
        presence=float_bits([0.0]),
        frequency=float_bits([0.0]),
        seed_low=seed,
        seed_high=0,
        bias=0,
        history=0,
        sampled_ids=0,
    )


def page_rows(entries: list[tuple[int, int, int]]) -> PageDeltaColumns:
    """`BatchPlan.page_deltas` of (request slot, index, page)."""
    return PageDeltaColumns.filled(
        len(entries),
        slot=[slot for slot, _, _ in entries],
        index=[index for _, index, _ in entries],
        page=[page for _, _, page in entries],
    )


class Driver:
    """One runner over a poisoned pool, and plans for it."""

    def __init__(
        self,
        model: Decoder,
        page_tokens: int = 4,
        slots: int = SLOTS,
        pages: int = 0,
        executor: Callable[[KvShape, PlanBounds], MakeExecutor] | None = None,
        stream: Any = None,
        adapters: int = 5,
    ) -> None:
        self.kv = model.spec.kv_shape(model.weights.dtype.itemsize, page_tokens)
        entries = self.kv.pages_for(MODEL_LEN)
        self.bounds = PlanBounds(slots, adapters, pages or 1 + slots * entries + 40, entries, VOCAB)
        self.images = Images()
        pool = allocate_pool(self.bounds.num_pages, self.kv.page_bytes, model.weights.device, poison=True)
        made = None if executor is None else executor(self.kv, self.bounds)
        self.runner = ModelRunner(
            model, self.kv, self.bounds, self.images, pool=pool, executor=made, stream=stream
        )
        self.free = np.random.default_rng(1).permutation(self.bounds.num_pages - 1).astype(np.int32) + 1
        self.generation = 0
        self.tables: dict[int, list[int]] = {}

    def take(self, count: int) -> np.ndarray:
        pages, self.free = self.free[:count], self.free[count:]
        return pages

    def plan(
        self,
        work: list[tuple[Request, int]],
        *,
        opens: list[Request] | None = None,
        reference: int = -1,
        deltas: dict[str, Any] | None = None,
    ) -> BatchPlan:
        """Rows for requests in scheduler order: (request, rows); rows 0 is a decode row. Frontiers are
        planned.
        """
        self.generation += 1
        opened = opens if opens is not None else [r for r, _ in work if r.planned == 0]
        for request in opened:
            self.tables[request.slot] = []
        page_deltas, tokens, targets, samples, start = [], [], [], [], []
        for request, rows in work:
            count = rows or 1
            end = request.planned + count
            start.append(request.planned)
            table = self.tables[request.slot]
            while len(table) < self.kv.pages_for(end):
                page = int(self.take(1)[0])
                page_deltas.append((request.slot, len(table), page))
                table.append(page)
            if rows:
                tokens += request.prompt[request.planned : end]
                scored = request.prompt_logprobs >= 0
                targets += [
                    request.prompt[i] if scored and i < len(request.prompt) else -1
                    for i in range(request.planned + 1, end + 1)
                ]
            else:
                assert request.last is not None
                tokens.append(request.last)
                targets.append(-1)
            samples.append(not rows or end == len(request.prompt))
        frontier = [r.frontier for r, _ in work]
        plan = build_plan(
            Work(
                slot=_i32([r.slot for r, _ in work]),
                incarnation=_i32([r.incarnation for r, _ in work]),
                adapter_slot=_i32([r.adapter[0] for r, _ in work]),
                adapter_generation=_i32([r.adapter[1] for r, _ in work]),
                kv_start=_i32(start),
                rows=_i32([rows or 1 for _, rows in work]),
                frontier=_i32(frontier),
                decode=np.array([rows == 0 for _, rows in work], dtype=np.bool_),
                samples=np.array(samples, dtype=np.bool_),
                logprobs=_i32([r.logprobs for r, _ in work]),
                prompt_logprobs=_i32([r.prompt_logprobs for r, _ in work]),
                tokens=_i32(tokens),
                targets=_i32(targets),
            ),
            generation=self.generation,
            reference=reference,
            deltas=Deltas(
                opens=open_rows(opened),
                page_deltas=page_rows(page_deltas),
                **(deltas or {}),
            ),
        )
        for request, rows in work:
            request.planned += rows or 1
            request.frontier += 1
        return plan

    def run(self, plan: BatchPlan) -> StepResult:
        self.runner.launch(plan.pack())
        return StepResult.unpack(self.runner.collect())

    def step(self, work: list[tuple[Request, int]], **options: Any) -> StepResult:
        """Plan, run, expect success, and note the sampled tokens."""
        plan = self.plan(work, **options)
        result = self.run(plan)
        assert result.error_message == ""
        self.note(plan, result, work)
        return result

    @staticmethod
    def note(plan: BatchPlan, result: StepResult, work: list[tuple[Request, int]]) -> None:
        by_slot = {request.slot: request for request, _ in work}
        for token, request in zip(result.tokens.tolist(), plan.samples.request.tolist(), strict=True):
            owner = by_slot[int(plan.requests.slot[request])]
            owner.out.append(token)
            owner.last = token

    def load(self, image: AdapterImage, slot: int, generation: int) -> StepResult:
        """Copy an image: a plan without rows, and more of them until one reports the end of the copy."""
        self.images.images[image.kernel_digest] = image
        result = self.run(self.plan([], deltas=self.copy(image, slot, generation)))
        while not result.error_message and not len(result.copied):
            result = self.run(self.plan([]))
        return result

    def copy(self, image: AdapterImage, slot: int, generation: int) -> dict[str, Any]:
        pages = self.take(len(image.pages))
        size_class = size_class_for(self.kv.page_bytes, image.pages.shape[1])
        return {
            "copies": copy_row(image.kernel_digest, slot, generation, pages.size, size_class),
            "copy_pages": pages,
        }


def copy_row(
    digest: str, slot: int, generation: int, pages: int = 1, size_class: int = 0, block: int = 0
) -> CopyColumns:
    """`BatchPlan.copies` of one copy."""
    return CopyColumns.filled(
        1,
        digest=np.frombuffer(bytes.fromhex(digest), dtype="<i4"),
        adapter_slot=slot,
        adapter_generation=generation,
        pages=pages,
        size_class=size_class,
        block=block,
    )


def _i32(values: Any) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def logits_of(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def greedy(tokens: list[int], count: int) -> list[int]:
    out = list(tokens)
    for _ in range(count):
        out.append(int(logits_of(reference("llama"), out)[-1].argmax()))
    return out[len(tokens) :]


def code_of(message: str) -> str:
    return message.partition(":")[0]
