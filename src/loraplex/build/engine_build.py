"""Wires one engine: base description, weights, pool, backend, control plane. The only place that knows both
towers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from loraplex.artifact.tensors import Dtype
from loraplex.build.base_model import BaseModel, describe_base
from loraplex.build.base_text import read_base_facts
from loraplex.config import EngineConfig
from loraplex.core import limits
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.ports import Backend, Clock, EventSink, ImageSource, Loader, Mailbox
from loraplex.engine.sizes import UNBOUNDED, EngineLimits
from loraplex.engine.step import Engine
from loraplex.identity.closure import GRAPH_REVISION
from loraplex.images.disk_store import ImageStore
from loraplex.images.loader import InlineLoader, LoaderProcess, host_folder, in_shared_memory
from loraplex.images.region import ALIGN_BYTES, Region
from loraplex.process.worker import PlanLog, ProcessBackend
from loraplex.schedule.policy import POLICIES
from loraplex.schedule.select import MixedBound
from loraplex.text.codec import configured_ends, load_tokenizer
from loraplex.text.grammars import load_grammars

DEFAULT_POOL_GB_CPU: Final = 1.0
DEFAULT_MODEL_LEN_CPU: Final = 8192
GIB: Final = 1 << 30
DEFAULT_LOCKED_BYTES: Final = 4 << 30
NICE: Final = 10
"""How much a loader on the host of a CPU engine yields to its steps."""
MIXED_CUDA: Final = MixedBound(
    limits.MIXED_PREFILL_ROWS_CUDA, limits.MIXED_PREFILL_ROWS_EACH_CUDA, limits.MIXED_ROWS_MULTIPLE_CUDA
)


@dataclass(slots=True)
class BuiltEngine:
    """An engine ready to step. notes: sentences for a person about what was derived."""

    engine: Engine
    base: BaseModel
    limits: EngineLimits
    dtype: str
    eos_token_ids: tuple[int, ...]
    notes: list[str] = field(default_factory=list)
    close: Callable[[], None] = lambda: None

    @property
    def info(self) -> dict[str, Any]:
        """What clients need to know, as plain values."""
        return {
            "base_abi": self.base.abi,
            "dtype": self.dtype,
            "vocab_size": self.base.spec.vocab_size,
            "max_model_len": self.limits.max_model_len,
            "eos_token_ids": list(self.eos_token_ids),
            "page_tokens": self.limits.kv.page_tokens,
            "num_pages": self.limits.num_pages,
            "page_bytes": self.limits.kv.page_bytes,
            "cache_abi": self.base.cache_abi.digest,
            "graph_revision": GRAPH_REVISION,
            "prefix_cache": self.limits.prefix_cache,
            "notes": self.notes,
        }


def build_engine(
    config: EngineConfig,
    mailbox: Mailbox,
    clock: Clock,
    events: EventSink,
    images: ImageSource | None = None,
) -> BuiltEngine:
    """Load the model and make an engine over it. Raises a typed error for what cannot be served.

    images: where adapter images come from, None for the configuration's folder; only for a model in this
    process.
    """
    name, sentence = _dtype(config)
    base = describe_model(config)
    notes = [sentence, _warm_up(config)]
    with ExitStack() as held:
        if images is None:
            loader, config, host_bytes, said = make_loader(config, held)
            notes += said
        else:
            loader, host_bytes = None, None
        backend, sizes, close = make_backend(config, base, images)
        held.callback(close)
        sizes = replace(sizes, host_bytes=host_bytes)
        # Small copies of models keep the ids of the large ones: what the model does not have ends nothing.
        ends = tuple(end for end in end_tokens(Path(config.model)) if 0 <= end < base.spec.vocab_size)
        grammars = load_grammars(Path(config.model), base.spec.vocab_size, ends)
        held.callback(grammars.close)
        engine = Engine(sizes, backend, mailbox, clock, events, grammars=grammars, loader=loader)
        let_go = held.pop_all().close
    return BuiltEngine(engine, base, sizes, name, ends, notes, let_go)


def make_loader(
    config: EngineConfig, held: ExitStack
) -> tuple[Loader | None, EngineConfig, int | None, list[str]]:
    """The loader that the configuration names, the configuration that goes with it, its bytes, and what to
    say of it.

    held: what is let go of with the engine.
    """
    wanted = None if config.host_gb is None else int(config.host_gb * GIB)
    if config.loader == "inline":
        return InlineLoader(ImageStore(Path(config.images_dir))), config, wanted, []
    folder, limit, sentence = held.enter_context(host_folder(Path(config.images_dir), wanted))
    said = [sentence, *_make_region(config, folder, limit)]
    loader = LoaderProcess(config.images_dir, folder, NICE if config.device == "cpu" else 0)
    held.callback(loader.close)
    config = msgspec.structs.replace(config, host_dir=str(folder))
    return loader, config, limit, said


def _make_region(config: EngineConfig, folder: Path, limit: int) -> list[str]:
    """The region of a CUDA engine's host folder, for whoever locks it; what to say of it.

    By default half of what the limit allows, 4 GiB at most, because what is free in it between images is
    nobody else's, and none where images lie in files: what is locked there would be written to a disk. Raises
    `config_invalid` for one that was asked for and cannot be.
    """
    if config.device == "cpu" or config.host_locked_gb == 0:
        return []
    if not in_shared_memory(folder):
        if config.host_locked_gb is None:
            return ["none of them page-locked"]
        raise CallerError(
            ErrorCode.CONFIG_INVALID,
            f"host_locked_gb is {config.host_locked_gb}, and only shared memory is locked, which has no room "
            "for "
            f"{limit / GIB:.3g} GiB of host images; lower host_gb, or set host_locked_gb to 0",
            param="host_locked_gb",
        )
    default = min(limit // 2, DEFAULT_LOCKED_BYTES)
    nbytes = default if config.host_locked_gb is None else int(config.host_locked_gb * GIB)
    if nbytes > limit:
        raise CallerError(
            ErrorCode.CONFIG_INVALID,
            f"host_locked_gb is {config.host_locked_gb}, host images have {limit / GIB:.3g} GiB together",
            param="host_locked_gb",
        )
    if nbytes < ALIGN_BYTES:
        raise CallerError(
            ErrorCode.CONFIG_INVALID,
            f"{nbytes} bytes of host images are to be locked, at least {ALIGN_BYTES} can be; set "
            "host_locked_gb to 0",
            param="host_locked_gb",
        )
    Region.create(folder, nbytes)
    return [f"of them {nbytes >> 20} MiB page-locked"]


def describe_model(config: EngineConfig, abi: str | None = None) -> BaseModel:
    """The base that the configuration names, under the element type that the device can use.

    abi: H_base if it is known, so that the weights need not be hashed.
    """
    name, _ = _dtype(config)
    folder = Path(config.model)
    base = describe_base(
        folder, Dtype(name), config.page_tokens, dummy=config.load_format == "dummy", abi=abi
    )
    return replace(base, facts=read_base_facts(folder))


def _warm_up(config: EngineConfig) -> str:
    """Build or find the operators' kernels before anybody is told that the engine is ready."""
    import torch

    from loraplex.ops.dispatch import warm_up

    return warm_up(torch.device(config.device))


def _dtype(config: EngineConfig) -> tuple[str, str]:
    """Name of the element type, and a sentence on why it was chosen."""
    import torch

    from loraplex.model.dtypes import resolve_dtype

    dtype, sentence = resolve_dtype(config.dtype, torch.device(config.device))
    return str(dtype).removeprefix("torch."), sentence


def make_backend(
    config: EngineConfig, base: BaseModel, images: ImageSource | None = None
) -> tuple[Backend, EngineLimits, Callable[[], None]]:
    """The backend that the configuration names, the sizes to plan with, and what lets go of it."""
    if config.backend == "process":
        sizes = engine_limits(config, base)
        worker = ProcessBackend(config, base_abi=base.abi)
        backend: Backend = worker
        close: Callable[[], None] = worker.close
    else:
        backend, sizes, close = make_runner(config, base, images)
    if config.plan_log is None:
        return backend, sizes, close
    try:
        log = PlanLog(Path(config.plan_log), backend)
    except OSError as error:
        close()
        raise CallerError(
            ErrorCode.CONFIG_INVALID,
            f"plan_log {config.plan_log} cannot be written: {error.strerror}",
            param="plan_log",
        ) from error

    def close_both() -> None:
        log.close()
        close()

    return log, sizes, close_both


def _nothing() -> None:
    """What there is to let go of a runner in this process."""


def make_runner(
    config: EngineConfig, base: BaseModel, images: ImageSource | None = None
) -> tuple[Backend, EngineLimits, Callable[[], None]]:
    """Weights, pool and runner in this process, the sizes that follow, and what lets go of the device.

    With `scrub`, the pool starts poisoned.
    """
    import torch

    folder = Path(config.model)
    source = images or ImageStore(Path(config.host_dir or config.images_dir))
    vocab = sampled_vocab(folder, base)
    if config.device == "cuda":
        from loraplex.build.cuda_start import cuda_runner, lock_images

        runner, sizes = cuda_runner(config, base, partial(engine_limits, config, base), source, vocab)
        try:
            unlock = lock_images(source)
        except BaseException:
            runner.close()  # its threads hold the pool for as long as they live
            raise

        def let_go() -> None:
            try:
                runner.close()
            finally:
                unlock()

        return runner, sizes, let_go

    from loraplex.model.decoder import Decoder
    from loraplex.model.runner import ModelRunner, allocate_pool
    from loraplex.model.weights import dummy_weights, load_weights

    device, dtype = torch.device(config.device), getattr(torch, base.dtype.value)
    sizes = engine_limits(config, base)
    if config.load_format == "dummy":
        weights = dummy_weights(base.spec, dtype, device)
    else:
        weights = load_weights(folder, base.spec, dtype, device)
    decoder = Decoder(base.spec, weights, sizes.max_model_len)
    pool = allocate_pool(sizes.num_pages, sizes.kv.page_bytes, device, poison=config.scrub)
    return (
        ModelRunner(decoder, sizes.kv, sizes.bounds, source, sampled_vocab=vocab, pool=pool),
        sizes,
        _nothing,
    )


def build_runner(config: EngineConfig, base_abi: str | None = None) -> Backend:
    """What a worker's process builds: the runner that an engine would have in its own. base_abi: H_base, if
    known.
    """
    return make_runner(config, describe_model(config, base_abi))[0]


def engine_limits(config: EngineConfig, base: BaseModel, pool_bytes: int | None = None) -> EngineLimits:
    """Sizes of an engine, derived where the configuration leaves them open.

    pool_bytes: what the pool gets where the configuration does not say, a measured figure or the CPU's
    default.
    """
    kv, on_cpu = base.kv, config.device == "cpu"
    if config.pool_gb is None and pool_bytes is None and not on_cpu:
        raise CallerError(
            ErrorCode.CONFIG_INVALID,
            "a model in a process of its own on cuda needs pool_gb: its memory is not seen from here",
            param="pool_gb",
        )
    if config.pool_gb is not None or pool_bytes is None:
        pool_bytes = int((config.pool_gb if config.pool_gb is not None else DEFAULT_POOL_GB_CPU) * GIB)
    pages = pool_bytes // kv.page_bytes
    if pages < 2:
        raise CallerError(
            ErrorCode.CONFIG_INVALID,
            f"a pool of {pool_bytes / GIB:.3g} GiB holds {pages} pages of {kv.page_bytes} bytes; at least 2 "
            "are needed",
            param="pool_gb",
        )
    longest = base.spec.max_positions
    if config.max_model_len is not None and config.max_model_len > longest:
        raise CallerError(
            ErrorCode.CONFIG_INVALID,
            f"max_model_len {config.max_model_len} exceeds the model's context of {longest}",
            param="max_model_len",
        )
    length = config.max_model_len or (min(longest, DEFAULT_MODEL_LEN_CPU) if on_cpu else longest)
    budget = config.token_budget or (limits.TOKEN_BUDGET_CPU if on_cpu else limits.TOKEN_BUDGET_CUDA)
    return EngineLimits(
        kv=kv,
        num_pages=pages,
        max_requests=config.max_requests,
        max_model_len=length,
        token_budget=max(budget, config.max_requests),
        mixed=UNBOUNDED if on_cpu else MIXED_CUDA,
        vocab_size=base.spec.vocab_size,
        depth=config.pipeline_depth,
        scrub=config.scrub,
        adapter_pages=int(config.adapter_share * (pages - 1)),
        adapter_floor=int(config.adapter_floor * (pages - 1)),
        base_abi=base.abi,
        cache_abi=base.cache_abi.digest,
        policy=POLICIES[config.policy],
        prefix_cache=config.prefix_cache,
        prefix_floor=int(config.prefix_share * (pages - 1)),
        shared_tenants=frozenset(config.share_prefixes),
        prefill_tokens_per_s=limits.PREFILL_TOKENS_PER_S_CPU if on_cpu else limits.PREFILL_TOKENS_PER_S_CUDA,
        copies_in_flight=limits.MAX_COPIES_IN_FLIGHT if on_cpu else limits.MAX_COPIES_IN_FLIGHT_CUDA,
        copy_starts=1 if on_cpu else limits.COPY_STARTS_CUDA,
        early_abort_ns=0 if config.early_abort_s is None else int(config.early_abort_s * 1e9),
    )


def sampled_vocab(folder: Path, base: BaseModel) -> int:
    """Ids that may be sampled: those that the tokenizer knows, all where there is none."""
    codec = load_tokenizer(folder)
    return base.spec.vocab_size if codec is None else min(codec.vocab_size, base.spec.vocab_size)


def end_tokens(folder: Path) -> tuple[int, ...]:
    """End-of-sequence ids of the model, ascending: as clients with a tokenizer see them, see
    `runtime.text`.
    """
    ends = configured_ends(folder)
    if not ends and (codec := load_tokenizer(folder)) is not None:
        ends = codec.eos_token_ids
    return tuple(sorted(ends))
