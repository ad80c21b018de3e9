"""The model runner: a `Backend` that runs packed plans on one device.

Owns the page pool and the mirrors of request and adapter state; an executor does the work. It obeys: pages,
slots and victims are the plan's. A step either answers its plan or fails as a whole with a code, and a failed
step leaves the mirrors as they were; adapter deltas are idempotent and may stand.

Two rules keep a pipeline honest. Plans run in order of generation, none twice and none left out. A plan that
was launched while the failure of an earlier one had not been collected was made for a state that never came:
it is stale.

Specification: 0x01F, 0x03D, 0x03E; rulings "The plan", "Frontiers and depth".
"""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from loraplex.core.errors import CallerError, ErrorCode, InternalFault, LoraplexError
from loraplex.core.layout import KvShape
from loraplex.core.plan import BatchPlan, StepResult
from loraplex.core.plan_check import PlanBounds, check_plan
from loraplex.core.ports import ImageSource
from loraplex.model.attention.backend import AttentionBackend
from loraplex.model.attention.torch_paged import TorchPagedAttention
from loraplex.model.decoder import Decoder
from loraplex.model.executor import Executor, TorchExecutor
from loraplex.model.linear import Arena
from loraplex.model.mirrors import RequestMirrors
from loraplex.model.residents import Residents
from loraplex.model.results import Pending, Stopwatch
from loraplex.model.sampler import Sampler
from loraplex.ops.table import AdapterTable

_log = logging.getLogger(__name__)

MakeExecutor = Callable[[Decoder, AdapterTable, Sampler], Executor]
"""Makes what runs the plans of a runner, over its decoder, adapter table (and pool) and sampler."""


def allocate_pool(
    num_pages: int, page_bytes: int, device: torch.device, *, poison: bool = False
) -> torch.Tensor:
    """The page pool, uint8 [num_pages, page_bytes]; with `poison`, every byte is 0xFF (tests).

    Raises `config_invalid` where the machine does not have the memory.
    """
    nbytes = num_pages * page_bytes
    try:
        if device.type == "cpu":  # in large pages, where the system gives them
            pool = Arena(nbytes).take(nbytes).view(num_pages, page_bytes)
            pool.zero_()  # the system finds the memory now, not in the steps that first write to a page
        else:
            pool = torch.empty((num_pages, page_bytes), dtype=torch.uint8, device=device)
    except (OSError, OverflowError, RuntimeError) as error:
        raise CallerError(
            ErrorCode.CONFIG_INVALID,
            f"a pool of {nbytes / (1 << 30):.3g} GiB cannot be allocated on {device.type}: {error}; lower "
            "pool_gb",
            param="pool_gb",
        ) from error
    return pool.fill_(0xFF) if poison else pool


class ModelRunner:
    """`core.ports.Backend` over a decoder.

    kv: shape of a KV page. bounds: sizes that plans must respect, as the control plane has them. pool: from
    `allocate_pool`, or None to make it. sampled_vocab: ids from here on are never drawn. attention: of the
    executor in torch operators, None is plain torch. executor: makes another executor. stream: what all of it
    is enqueued on, None is the current one.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KvShape,
        bounds: PlanBounds,
        images: ImageSource,
        *,
        sampled_vocab: int | None = None,
        pool: torch.Tensor | None = None,
        attention: AttentionBackend | None = None,
        executor: MakeExecutor | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        spec, dtype = decoder.spec, decoder.weights.dtype
        self.device = decoder.weights.device
        if kv != spec.kv_shape(dtype.itemsize, kv.page_tokens) or bounds.vocab_size != spec.vocab_size:
            raise InternalFault(
                ErrorCode.OPERATOR_LAYOUT,
                f"{kv} with {bounds.vocab_size} tokens does not belong to this model",
            )
        self.decoder, self.bounds = decoder, bounds
        self.pool = allocate_pool(bounds.num_pages, kv.page_bytes, self.device) if pool is None else pool
        self.table = AdapterTable(self.pool, dtype, bounds.max_adapter_slots, spec.module_dims())
        self._mirrors = RequestMirrors(bounds, kv.page_tokens)
        self._residents = Residents(self.table, images)
        self.sampler = Sampler(
            bounds.max_requests, spec.vocab_size, sampled_vocab or spec.vocab_size, self.device
        )
        if executor is None:
            attention = attention or TorchPagedAttention(self.pool, kv, dtype, spec.heads, spec.windows)
            compiled = decoder.compiled_over(self.pool, kv)
            self.executor: Executor = TorchExecutor(decoder, self.table, attention, self.sampler, compiled)
        else:
            self.executor = executor(decoder, self.table, self.sampler)
        self._stream = stream
        self._last = 0
        self._launched: deque[Pending | StepResult] = deque()

    def launch(self, plan: bytes) -> None:
        """Run a packed plan; on a CPU it has run when this returns. Never raises for what a plan says."""
        generation = self._last + 1
        try:
            unpacked = BatchPlan.unpack(plan)
            generation = unpacked.generation
            with self._on_stream():
                self._launched.append(self._launch(unpacked, plan))
        except LoraplexError as error:
            self._launched.append(StepResult.failure(generation, f"{error.code.value}: {error.message}"))
        except Exception as error:  # noqa: BLE001 - the step's boundary: any failure becomes its typed result
            _log.exception("plan %d failed", generation)
            message = f"{ErrorCode.BACKEND_FAILED.value}: {type(error).__name__}: {error}"
            self._launched.append(StepResult.failure(generation, message))
        if generation == self._last + 1:
            self._last = generation

    def collect(self) -> bytes:
        """Packed result of the oldest plan not collected; waits for it."""
        if not self._launched:
            raise InternalFault(ErrorCode.BACKEND_FAILED, "no launched plan is left to collect")
        oldest = self._launched.popleft()
        return (oldest if isinstance(oldest, StepResult) else oldest.finish(self._residents)).pack()

    def close(self, *, keep_cached: bool = False) -> None:
        """Let go of the device's memory; nothing can be launched after this.

        keep_cached: what the allocator holds stays with it, for a runner that comes next.
        """
        self._residents.close()
        del self.executor, self.pool, self.table, self._residents, self.decoder, self.sampler
        self._launched.clear()
        gc.collect()  # graphs and wrappers refer to each other
        if self.device.type == "cuda" and not keep_cached:
            torch.cuda.empty_cache()

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    @torch.inference_mode()
    def _launch(self, plan: BatchPlan, packed: bytes) -> Pending:
        watch = Stopwatch(self.device)
        self._check_order(plan)
        check_plan(plan, self.bounds)
        self.executor.check_references(plan)
        self._residents.check(plan)
        with self._mirrors.step(plan) as tables:
            self._residents.apply(plan)
            try:
                pending = self.executor.execute(plan, packed, tables, watch)
            except BaseException:
                self.executor.undone(np.unique(np.concatenate([plan.opens.slot, plan.page_deltas.slot])))
                raise
        watch.stop()
        return pending

    def _check_order(self, plan: BatchPlan) -> None:
        code = ErrorCode.STALE_PLAN_GENERATION
        if plan.generation != self._last + 1:
            raise InternalFault(code, f"plan {plan.generation} came after plan {self._last}")
        if any(isinstance(step, StepResult) for step in self._launched):
            raise InternalFault(code, f"plan {plan.generation} builds on a plan that failed")
