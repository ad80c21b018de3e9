"""`LLM`: the offline, in-process API over the same engine that the server drives.

Registration and generation run in the caller's thread; nothing is asynchronous here.
Specification: interface "Python".
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from msgspec.structs import replace as with_fields

from loraplex.adapters.adapter_catalog import AdapterCatalog
from loraplex.adapters.describing import Entry, live_entries
from loraplex.adapters.lifecycle import Change
from loraplex.adapters.plain_shell import PlainShell
from loraplex.adapters.prepare import PreparedAdapter, prepare_source
from loraplex.api.arguments import (
    Prompt,
    check_tokens,
    engine_config,
    read_adapters,
    read_count,
    read_names,
    read_number,
    read_prompts,
    read_registration,
    read_sampling,
)
from loraplex.build.engine_build import build_engine
from loraplex.catalog.artifacts import DEFAULT_STORE_BYTES, ArtifactStore, artifacts_folder
from loraplex.catalog.changes import Mode
from loraplex.catalog.records import DEFAULT_NAMESPACE, AliasKey, Revision
from loraplex.core.errors import CallerError, ErrorCode, LoraplexError, error_for
from loraplex.core.messages import (
    Abort,
    Ended,
    EngineCall,
    Finish,
    Inspect,
    Reply,
    Submit,
    ToEngine,
    TokenLogprobs,
    Tokens,
)
from loraplex.core.request import FinishReason, SamplingParams
from loraplex.images.disk_store import ImageStore
from loraplex.process.clock import MonotonicClock
from loraplex.process.local import LocalMailbox, NullSink, run_now
from loraplex.process.workdir import private_folder, temporary_root
from loraplex.text.codec import Detokenizer, TextCodec, load_tokenizer
from loraplex.text.engine_sampling import engine_sampling, prompt_seed


@dataclass(slots=True)
class Sample:
    """One completion. logprobs[i]: token id -> log probability for the i-th token, the sampled one always in it."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[dict[int, float]] | None = None
    finish_reason: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """Answer to one prompt. samples: all `n` completions; the short names speak of the first.

    prompt_logprobs[i]: token id -> log probability at prompt position i (top entries and the actual token), None at
    position 0. adapter: `alias@revision`, or None for the base.
    """

    prompt_token_ids: list[int]
    adapter: str | None
    samples: list[Sample]
    prompt_logprobs: list[dict[int, float] | None] | None = None

    @property
    def token_ids(self) -> list[int]:
        """Generated tokens of the first sample."""
        return self.samples[0].token_ids

    @property
    def text(self) -> str:
        """Text of the first sample; empty without a tokenizer."""
        return self.samples[0].text

    @property
    def logprobs(self) -> list[dict[int, float]] | None:
        """Log probabilities of the first sample."""
        return self.samples[0].logprobs

    @property
    def finish_reason(self) -> str | None:
        """Why the first sample ended."""
        return self.samples[0].finish_reason


@dataclass(slots=True)
class _Open:
    """A request under way: where its tokens go."""

    output: RequestOutput
    sample: Sample
    stops: tuple[str, ...]
    detokenizer: Detokenizer | None
    first: bool
    ended: bool = False
    error: LoraplexError | None = None


class LLM:
    """A base model with adapters, in this process.

    model: folder with config.json, safetensors and, for text, a tokenizer. adapters: alias -> PEFT folder or remote source. device:
    "cpu" or "cuda". dtype: "auto", "float32", "bfloat16" or "float16". pool_gb: page pool in GiB. Further keywords are
    those of `config.EngineConfig`. Raises typed `LoraplexError`s. Use as a context manager, or call `close`.
    """

    def __init__(
        self,
        model: str | Path,
        adapters: Mapping[str, str | Path] | None = None,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        pool_gb: float | None = None,
        **options: Any,
    ) -> None:
        private = ExitStack()
        images = private.enter_context(private_folder(temporary_root()))
        self._images = images
        # Also when nobody holds the LLM any more; after a kill, the next start removes them.
        self._forget_images = weakref.finalize(self, private.close)
        self._closing = ExitStack()
        self._closing.callback(self._forget_images)
        self._mailbox = LocalMailbox()
        try:
            own = {"model": str(model), "images_dir": str(images)}
            config = engine_config(own, {"device": device, "dtype": dtype, "pool_gb": pool_gb, **options})
            self._built = build_engine(config, self._mailbox, MonotonicClock(), NullSink())
            self._closing.callback(self._built.close)
            self._store = ImageStore(images)
            self._artifacts = ArtifactStore(artifacts_folder(), DEFAULT_STORE_BYTES)
            self._catalog = AdapterCatalog()
            self._closing.callback(self._catalog.close)
            self._adapters = PlainShell(self, self._catalog, self._prepare, self._store.delete).life
            self._open: dict[str, _Open] = {}
            self._replies: dict[int, Reply] = {}
            self._calls = self._requests = 0
            self._codec: TextCodec | None = load_tokenizer(Path(model))
            for alias, source in read_adapters(adapters).items():
                self.add_adapter(alias, source)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the model and of temporary files; further calls raise `invalid_request`."""
        self._closing.close()
        vars(self).pop("_built", None)  # whoever keeps the closed `LLM` does not keep the weights

    def _require_open(self) -> None:
        if "_built" not in vars(self):
            raise CallerError(ErrorCode.INVALID_REQUEST, "this LLM is closed; make another one")

    @property
    def vocab_size(self) -> int:
        """Token ids that the model knows."""
        self._require_open()
        return self._built.limits.vocab_size

    # Adapters

    def add_adapter(self, alias: str, source: str | Path) -> dict[str, Any]:
        """Register the adapter in `source`, a PEFT folder or a remote source, as `alias`; what was applied, or a typed error."""
        self._require_open()
        alias, source = read_registration(alias, source)
        return self._publish(Change(Mode.ADD, _alias_key(alias), str(source)))

    def swap_adapter(
        self, alias: str, source: str | Path, *, expected: int | None = None, drain: bool = False
    ) -> dict[str, Any]:
        """Publish a new revision under `alias`; requests under way finish on the one that they began with.

        `pool_exhausted` where the pool has no room for both revisions; drain: ask for none beside the old one.
        """
        self._require_open()
        alias, source = read_registration(alias, source)
        expected = read_count("expected", expected)
        return self._publish(Change(Mode.SWAP, _alias_key(alias), str(source), expected, drain=drain))

    def remove_adapter(self, alias: str) -> None:
        """Take `alias` away; its memory is free afterwards."""
        run_now(self._adapters.remove(self._current(alias).alias_key))

    def pin_adapter(self, alias: str) -> dict[str, Any]:
        """Keep what `alias` stands for on the device, through swaps; `pool_exhausted` where pins leave too little."""
        revision = self._current(alias)
        run_now(self._adapters.pin(revision.alias_key))
        return self._describe(revision)

    def unpin_adapter(self, alias: str) -> dict[str, Any]:
        """Let `alias` be evicted again."""
        revision = self._current(alias)
        run_now(self._adapters.unpin(revision.alias_key))
        return self._describe(revision)

    def prefetch_adapter(self, alias: str) -> dict[str, Any]:
        """Load `alias` now; `pool_exhausted` where that would take what requests will want."""
        revision = self._current(alias)
        run_now(self._adapters.prefetch(revision.alias_key))
        return self._describe(revision)

    def revoke_adapter(self, alias: str) -> None:
        """Take away every name of what `alias` stands for; it is never registered again here."""
        run_now(self._adapters.revoke(self._current(alias).alias_key))

    def set_limits(
        self,
        *,
        pool_share: float | None = None,
        resident_adapters: int | None = None,
        host_gb: float | None = None,
    ) -> dict[str, Any]:
        """Change what adapters may take; None leaves a limit as it is. All limits, and what is above them still."""
        self._require_open()
        pages = self._built.limits.num_pages - 1
        share = read_number("pool_share", pool_share, 0, 1)
        host = read_number("host_gb", host_gb, 0, 1 << 20)
        return run_now(
            self._adapters.controls.set_limits(
                None if share is None else int(share * pages),
                read_count("resident_adapters", resident_adapters),
                None if host is None else int(host * (1 << 30)),
            )
        )

    def adapters(self) -> list[dict[str, Any]]:
        """What is registered, with digests and residency."""
        live = live_entries(self.inspect())
        return [self._described(revision, live) for revision in self._catalog]

    def inspect(self) -> dict[str, Any]:
        """The engine's figures: pages, requests, residency."""
        self._require_open()
        return self._call(Inspect(0))

    def _current(self, alias: str) -> Revision:
        self._require_open()
        return self._catalog.current(_alias_key(read_registration(alias)[0]))

    def _publish(self, wanted: Change) -> dict[str, Any]:
        return self._describe(run_now(self._adapters.change(wanted)))

    async def _prepare(self, source: str, content: str | None = None) -> PreparedAdapter:
        return prepare_source(source, self._built.base, self._store, self._artifacts, content)

    def _describe(self, revision: Revision) -> dict[str, Any]:
        return self._described(revision, live_entries(self.inspect()))

    def _described(self, revision: Revision, live: Mapping[str, Entry]) -> dict[str, Any]:
        return {**revision.describe(live.get(revision.key, {})), "notes": self._adapters.notes_of(revision)}

    async def call(self, message: EngineCall) -> dict[str, Any]:
        """What the life of adapters asks of an engine; over before it is awaited. Not meant for callers of `LLM`."""
        return self._call(message)

    def _call(self, message: EngineCall) -> dict[str, Any]:
        self._calls += 1
        self._post(with_fields(message, call_id=self._calls))
        while self._calls not in self._replies:
            self._step()
        reply = self._replies.pop(self._calls)
        if reply.code is not None:
            raise error_for(ErrorCode(reply.code), reply.message)
        return reply.body

    # Generation

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        adapters: str | Sequence[str | None] | None = None,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt, in order. Prompts are strings or lists of token ids; one adapter and one
        `SamplingParams` may stand for all. A refused request raises, and the others are withdrawn.
        """
        self._require_open()
        many = read_prompts(prompts)
        names, params = read_names(adapters, len(many)), read_sampling(sampling, len(many))
        jobs = [
            self._job(prompt, name, param) for prompt, name, param in zip(many, names, params, strict=True)
        ]
        try:
            outputs = [self._submit(*job) for job in jobs]
            while any(not job.ended for job in self._open.values()):
                self._step()
            for job in self._open.values():
                if job.error is not None:
                    raise job.error
        finally:
            self._withdraw()
        return outputs

    def _job(
        self, prompt: Prompt, name: str | None, params: SamplingParams
    ) -> tuple[list[int], Revision | None, SamplingParams]:
        revision = self._catalog.resolve(name) if name is not None else None
        if isinstance(prompt, str):
            if self._codec is None:
                raise CallerError(
                    ErrorCode.TOKENIZER_MISSING, "the model folder has no tokenizer; give token ids"
                )
            return self._codec.encode(prompt), revision, params
        tokens = list(prompt)
        check_tokens(tokens, self.vocab_size)
        return tokens, revision, params

    def _submit(self, tokens: list[int], revision: Revision | None, params: SamplingParams) -> RequestOutput:
        seed = prompt_seed(params)
        stops = params.stop_strings
        if stops and self._codec is None:
            raise CallerError(ErrorCode.TOKENIZER_MISSING, "stop strings need a tokenizer", param="stop")
        output = RequestOutput(tokens, revision.name if revision else None, [])
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None]
        for index in range(params.n):
            self._requests += 1
            request_id = f"r{self._requests}"
            sample = Sample(logprobs=[] if params.logprobs is not None else None)
            output.samples.append(sample)
            detokenizer = Detokenizer(self._codec, stops, context=tokens) if self._codec is not None else None
            self._open[request_id] = _Open(output, sample, stops, detokenizer, first=index == 0)
            only_first = params if index == 0 else replace(params, prompt_logprobs=None)
            self._post(
                Submit(
                    request_id,
                    np.array(tokens, dtype="<i4").tobytes(),
                    engine_sampling(only_first, seed, index, self._built.eos_token_ids),
                    revision.key if revision is not None else None,
                )
            )
        return output

    def _withdraw(self) -> None:
        """Abort what is still open, so that an error leaves nothing behind."""
        for request_id, job in self._open.items():
            if not job.ended:
                self._post(Abort(request_id))
        while not self._built.engine.idle or self._mailbox.pending:
            self._step()
        self._open.clear()

    def _post(self, message: ToEngine) -> None:
        self._mailbox.post(message)

    def _step(self) -> None:
        self._built.engine.step()
        for message in self._mailbox.take():
            match message:
                case Reply():
                    self._replies[message.call_id] = message
                case Tokens():
                    self._take_tokens(message)
                case Ended():
                    self._take_end(message)

    def _take_tokens(self, message: Tokens) -> None:
        job = self._open.get(message.request_id)
        if job is None or job.ended:
            return
        if job.output.prompt_logprobs is not None and job.first:
            job.output.prompt_logprobs.extend(_as_dict(entry) for entry in message.prompt_logprobs)
        for index, token in enumerate(message.token_ids):
            job.sample.token_ids.append(token)
            if job.sample.logprobs is not None:
                job.sample.logprobs.append(_as_dict(message.logprobs[index]))
            if job.detokenizer is None:
                continue
            job.sample.text += job.detokenizer.push([token])
            if job.detokenizer.stopped_at is not None:
                job.ended, job.sample.finish_reason = True, FinishReason.STOP.value
                self._post(Finish(message.request_id, len(job.sample.token_ids)))
                return

    def _take_end(self, message: Ended) -> None:
        job = self._open.get(message.request_id)
        if job is None or job.ended:
            return
        job.ended = True
        if message.code is not None:
            job.error = error_for(ErrorCode(message.code), message.message, param=message.param)
            return
        job.sample.finish_reason = message.finish_reason
        if job.detokenizer is not None:
            job.sample.text += job.detokenizer.finish()


def _alias_key(alias: str) -> AliasKey:
    """An `LLM` has one tenant."""
    return AliasKey(DEFAULT_NAMESPACE, alias)


def _as_dict(entry: TokenLogprobs) -> dict[int, float]:
    return dict(zip(reversed(entry.ids), reversed(entry.values), strict=True))
