"""A CUDA engine's backend: weights, warm-up, pool and graphs in the order of start-up; sizes follow what
memory is left.

Specification: rulings "Start-up".
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from loraplex.build.base_model import BaseModel
from loraplex.config import EngineConfig
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.ports import ImageSource
from loraplex.engine.sizes import EngineLimits
from loraplex.images.adoption import populate
from loraplex.images.disk_store import ImageStore
from loraplex.model.cuda.cuda_executor import CudaExecutor
from loraplex.model.cuda.setup import (
    RESERVE_BYTES,
    CudaParts,
    Warmth,
    missing_for_fused,
    prepare_libraries,
)
from loraplex.model.decoder import Decoder
from loraplex.model.fused import FusedOps
from loraplex.model.progress import Report
from loraplex.model.runner import ModelRunner, allocate_pool
from loraplex.model.weights import DecoderWeights, dummy_weights, load_weights
from loraplex.ops.triton_ops import state_of

_log = logging.getLogger(__name__)

SCRATCH_PAGES: Final = 2
POPULATE_THREADS: Final = 4
LimitsFor = Callable[[int | None], EngineLimits]
"""The engine's sizes for so many bytes of pool; None where the configuration names them."""


def cuda_runner(
    config: EngineConfig,
    base: BaseModel,
    limits_for: LimitsFor,
    images: ImageSource,
    sampled_vocab: int,
    report: Report | None = None,
) -> tuple[ModelRunner, EngineLimits]:
    """A runner that is ready, and the sizes that its control plane must plan with.

    report: told about every stage. Raises `config_invalid` where the model leaves no room for a pool.
    """
    say = report or _log.info
    device = torch.device(config.device)
    dtype = getattr(torch, base.dtype.value)
    stream = prepare_libraries()
    reason = missing_for_fused(base.spec, dtype)
    with torch.cuda.stream(stream):
        weights = _weights(config, base, dtype, device, say)
        small = limits_for(SCRATCH_PAGES * base.kv.page_bytes)
        if reason is not None:
            _log.warning("attention runs in plain torch, correct and slow: %s", reason)
            decoder = Decoder(base.spec, weights, small.max_model_len)
            sizes = limits_for(_left(base))
            pool = allocate_pool(sizes.num_pages, sizes.kv.page_bytes, device, poison=config.scrub)
            plain = ModelRunner(
                decoder, sizes.kv, sizes.bounds, images, sampled_vocab=sampled_vocab, pool=pool, stream=stream
            )
            return plain, sizes
        decoder = Decoder(base.spec, weights, small.max_model_len, _fused())
        parts = CudaParts(decoder, small.kv, max(small.token_budget, small.max_requests), say)
        _warm_up(parts, small, images, sampled_vocab, stream, say)
        sizes = limits_for(_left(base))
        pool = allocate_pool(sizes.num_pages, sizes.kv.page_bytes, device, poison=config.scrub)
        if not config.scrub:
            pool[0].zero_()
        runner = ModelRunner(
            decoder,
            sizes.kv,
            sizes.bounds,
            images,
            sampled_vocab=sampled_vocab,
            pool=pool,
            executor=parts.executor(sizes.bounds),
            stream=stream,
        )
        assert isinstance(runner.executor, CudaExecutor)
        started = time.perf_counter()
        Warmth(parts, runner.executor, _quiet).capture()
        stream.synchronize()
        say(f"decode steps captured in {time.perf_counter() - started:.1f} s")
    return runner, sizes


def lock_images(images: ImageSource, report: Report | None = None) -> Callable[[], None]:
    """Find memory for the region of an image store and page-lock it, so that its images are read in place.

    Returns what unlocks it, for when nothing is copied any more. Does nothing for a source without a region.
    Raises `config_invalid` where the machine does not have the memory.
    """
    region = images.region() if isinstance(images, ImageStore) else None
    if region is None:
        return lambda: None
    say, started, size = report or _log.info, time.perf_counter(), region.memory.size
    address = region.memory.ctypes.data
    try:
        populate(region.memory, POPULATE_THREADS)
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size, 0))
    except (OSError, RuntimeError) as error:
        raise CallerError(
            ErrorCode.CONFIG_INVALID,
            f"{size >> 20} MiB of host memory cannot be page-locked: {error}; lower host_locked_gb",
            param="host_locked_gb",
        ) from error
    region.locked = True
    say(f"host images: {size >> 20} MiB page-locked in {time.perf_counter() - started:.1f} s")

    def unlock() -> None:
        region.locked = False
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))

    return unlock


def _quiet(line: str) -> None:
    _log.debug("%s", line)


def _fused() -> FusedOps:
    from loraplex.model.cuda.flashinfer_fused import FlashInferFused  # not on every machine

    return FlashInferFused()


def _weights(
    config: EngineConfig, base: BaseModel, dtype: torch.dtype, device: torch.device, say: Report
) -> DecoderWeights:
    started = time.perf_counter()
    if config.load_format == "dummy":
        weights = dummy_weights(base.spec, dtype, device)
    else:
        weights = load_weights(Path(config.model), base.spec, dtype, device)
    torch.cuda.current_stream().synchronize()
    say(f"weights: {weights.nbytes / 1e9:.2f} GB in {time.perf_counter() - started:.1f} s")
    return weights


def _warm_up(
    parts: CudaParts,
    small: EngineLimits,
    images: ImageSource,
    sampled: int,
    stream: torch.cuda.Stream,
    say: Report,
) -> None:
    """Kernels and the largest chunk over a pool of nothing but the null page."""
    runner = ModelRunner(
        parts.decoder,
        small.kv,
        replace(small.bounds, num_pages=SCRATCH_PAGES),
        images,
        sampled_vocab=sampled,
        executor=parts.executor(small.bounds, (1,)),
        stream=stream,
        pool=torch.zeros(
            (SCRATCH_PAGES, small.kv.page_bytes), dtype=torch.uint8, device=parts.decoder.weights.device
        ),
    )
    assert isinstance(runner.executor, CudaExecutor)
    warmth = Warmth(parts, runner.executor, say)
    warmth.largest_chunk()
    warmth.adapters(state_of(runner.table))
    warmth.sampling(sampled)
    runner.close(keep_cached=True)


def _left(base: BaseModel) -> int:
    """Bytes that the page pool may take now."""
    free, total = torch.cuda.mem_get_info()
    left = free - RESERVE_BYTES
    if left < 2 * base.kv.page_bytes:
        raise CallerError(
            ErrorCode.CONFIG_INVALID,
            f"the model leaves {free >> 20} MiB of {total >> 20} MiB, {RESERVE_BYTES >> 20} MiB are kept "
            "free; "
            "no page pool fits, take a smaller model or another device",
            param="device",
        )
    return left
