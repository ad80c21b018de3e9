"""`LLM`: the offline, in-process API over the same engine that the server drives.

Registration and generation run in the caller's thread; nothing is asynchronous here. Several threads may
generate at a time: what they ask runs in the same steps. Specification: interface "Python".
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from tokenizers import Tokenizer

from loraplex.adapters.adapter_catalog import AdapterCatalog
from loraplex.adapters.describing import Entry, live_entries
from loraplex.adapters.lifecycle import Change
from loraplex.adapters.plain_shell import PlainShell
from loraplex.adapters.prepare import PreparedAdapter, prepare_source
from loraplex.adapters.revision_texts import RevisionTexts
from loraplex.api.arguments import (
    Prompt,
    check_tokens,
    engine_config,
    read_adapters,
    read_count,
    read_grouping,
    read_model,
    read_names,
    read_number,
    read_prompts,
    read_registration,
    read_sampling,
    read_sink,
    read_text,
)
from loraplex.api.conversations import Conversation, read_conversations, read_offer
from loraplex.api.grouped import Grouper, task_of
from loraplex.api.jobs import Job
from loraplex.api.local_engine import LocalEngine, OpenSample, closed_error
from loraplex.api.outputs import RequestOutput
from loraplex.artifact.card import Card
from loraplex.build.engine_build import build_engine
from loraplex.catalog.artifacts import DEFAULT_STORE_BYTES, ArtifactStore, artifacts_folder
from loraplex.catalog.changes import Mode, not_registered
from loraplex.catalog.records import DEFAULT_NAMESPACE, AliasKey, Revision
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.messages import EngineCall, Inspect, Submit
from loraplex.core.ports import EventSink
from loraplex.core.request import SamplingParams
from loraplex.images.disk_store import ImageStore
from loraplex.process.clock import MonotonicClock
from loraplex.process.local import LocalMailbox, run_now
from loraplex.process.workdir import private_folder, temporary_root
from loraplex.text.assembly import Piece, SampleAssembly
from loraplex.text.codec import TextCodec, further_ends, load_tokenizer, sampled_ids
from loraplex.text.engine_sampling import check_sampling, engine_sampling, prompt_seed, word_tokens
from loraplex.text.prefix_keys import (
    NOT_INVOKED,
    Acting,
    CacheTerms,
    invocation_at,
    invocation_missing,
    prompt_keys,
)
from loraplex.text.tools.tool_use import ToolUse

_Given = str | list[int] | Conversation


class LLM:
    """A base model with adapters, in this process.

    model: folder with config.json, safetensors and, for text, a tokenizer. adapters: alias -> PEFT folder or
    remote source. device: "cpu" or "cuda". dtype: "auto", "float32", "bfloat16" or "float16". pool_gb: page
    pool in GiB. events: gets every event of the engine, in order, within the step that emits it; None for
    nobody. Further keywords are those of `config.EngineConfig`. Raises typed `LoraplexError`s. Use as a
    context manager, or call `close`.
    """

    def __init__(
        self,
        model: str | Path,
        adapters: Mapping[str, str | Path] | None = None,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        pool_gb: float | None = None,
        events: EventSink | None = None,
        **options: Any,
    ) -> None:
        private = ExitStack()
        images = private.enter_context(private_folder(temporary_root()))
        self._images = images
        # Also when nobody holds the LLM any more; after a kill, the next start removes them.
        self._forget_images = weakref.finalize(self, private.close)
        self._closing = ExitStack()
        self._closing.callback(self._forget_images)
        mailbox = LocalMailbox()
        try:
            folder = read_model(model)
            own = {"model": str(folder), "images_dir": str(images)}
            config = engine_config(own, {"device": device, "dtype": dtype, "pool_gb": pool_gb, **options})
            self._built = build_engine(config, mailbox, MonotonicClock(), read_sink(events))
            self._closing.callback(self._built.close)
            self._engine = LocalEngine(self._built, mailbox)
            self._store = ImageStore(images)
            self._artifacts = ArtifactStore(artifacts_folder(), DEFAULT_STORE_BYTES)
            self._catalog = AdapterCatalog()
            self._codec: TextCodec | None = load_tokenizer(folder)
            self._texts = RevisionTexts(self._codec)
            self._texts.begin(self._built.limits.vocab_size)
            self._closing.callback(self._catalog.close)
            self._adapters = PlainShell(
                self, self._catalog, self._prepare, self._store.delete, self._texts
            ).life
            self._vocab_size = self._built.limits.vocab_size
            self._eos_token_ids = self._built.eos_token_ids
            self._terms = CacheTerms.of(self._built.info)
            self._requests = itertools.count(1)
            self._grouper = Grouper(self._vocab_size, self._built.limits.max_model_len)
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
        if "_engine" in vars(self):
            self._engine.close()
        self._closing.close()
        vars(self).pop("_engine", None)
        vars(self).pop("_built", None)  # whoever keeps the closed `LLM` does not keep the weights

    def _opened(self) -> LocalEngine:
        """The engine, unless this `LLM` is closed."""
        engine: LocalEngine | None = vars(self).get("_engine")
        if engine is None:
            raise closed_error()
        return engine

    def _require_open(self) -> None:
        self._opened()

    @property
    def vocab_size(self) -> int:
        """Token ids that the model knows."""
        self._require_open()
        return self._vocab_size

    # Adapters

    def add_adapter(self, alias: str, source: str | Path, *, text: str | None = None) -> dict[str, Any]:
        """Register the adapter in `source`, a PEFT folder or a remote source, as `alias`; what was applied,
        or a typed error.

        text: whose chat template, end tokens and added tokens its requests use, "adapter" (also for None) or
        "base".
        """
        self._require_open()
        alias, source = read_registration(alias, source)
        return self._publish(Change(Mode.ADD, _alias_key(alias), str(source), text=read_text(text)))

    def swap_adapter(
        self,
        alias: str,
        source: str | Path,
        *,
        expected: int | None = None,
        drain: bool = False,
        text: str | None = None,
    ) -> dict[str, Any]:
        """Publish a new revision under `alias`; requests under way finish on the one that they began with.

        `pool_exhausted` where the pool has no room for both revisions; drain: ask for none beside the old
        one. text: as in `add_adapter`.
        """
        self._require_open()
        alias, source = read_registration(alias, source)
        expected = read_count("expected", expected)
        return self._publish(
            Change(Mode.SWAP, _alias_key(alias), str(source), expected, drain=drain, text=read_text(text))
        )

    def remove_adapter(self, alias: str) -> None:
        """Take `alias` away; its memory is free afterwards."""
        run_now(self._adapters.remove(self._current(alias).alias_key))

    def pin_adapter(self, alias: str) -> dict[str, Any]:
        """Keep what `alias` stands for on the device, through swaps; `pool_exhausted` where pins leave too
        little.
        """
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
        """Change what adapters may take; None leaves a limit as it is. All limits, and what is above them
        still.
        """
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
        return {**revision.describe(live.get(revision.key, {})), **self._adapters.as_read(revision)}

    async def call(self, message: EngineCall) -> dict[str, Any]:
        """What the life of adapters asks of an engine; over before it is awaited. Not meant for callers of
        `LLM`.
        """
        return self._call(message)

    def _call(self, message: EngineCall) -> dict[str, Any]:
        return self._opened().call(message)

    # Generation

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        adapters: str | Sequence[str | None] | None = None,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        grouping: str | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt, in order. Prompts are strings or lists of token ids; one adapter and one
        `SamplingParams` may stand for all. A refused request raises, and the others are withdrawn. grouping:
        "pets" asks them in the order that PetS' recurrences give, over costs measured at first use.
        """
        self._require_open()
        return self._answered(read_prompts(prompts), adapters, sampling, read_grouping(grouping))

    def chat(
        self,
        messages: Sequence[Any],
        adapters: str | Sequence[str | None] | None = None,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Any] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool = True,
    ) -> list[RequestOutput]:
        """`generate` for one conversation or several, each a list of messages with `role` and `content`.

        Messages, tools and the choice of them are what /v1/chat/completions takes.
        """
        self._require_open()
        offer = read_offer(tools, tool_choice, parallel_tool_calls)
        return self._answered(read_conversations(messages, offer), adapters, sampling)

    def stream(
        self, prompt: Prompt, adapter: str | None = None, sampling: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """The answer to one prompt as it grows, the last one whole. Leaving the iterator withdraws the
        request.
        """
        engine = self._opened()
        [job] = self._jobs(read_prompts(prompt), adapter, sampling)
        samples = self._asked(job)
        for _ in engine.growing(samples):
            yield job.output(samples)

    def get_tokenizer(self) -> Tokenizer | None:
        """The base's tokenizer, of the library `tokenizers`; None where the model folder has none."""
        self._require_open()
        return None if self._codec is None else self._codec.tokenizer

    def _answered(
        self, many: Sequence[_Given], adapters: Any, sampling: Any, grouping: str | None = None
    ) -> list[RequestOutput]:
        jobs = self._jobs(many, adapters, sampling)
        order: Sequence[int] = range(len(jobs))
        if grouping is not None:
            tasks = [task_of(job.revision, self._adapters.held.known) for job in jobs]
            order = self._grouper.order(tasks, [len(job.tokens) or 1 for job in jobs], self.generate)
        asked = [self._asked(job) for job in jobs]
        self._opened().answer([sample for index in order for sample in asked[index]])
        return [job.output(samples) for job, samples in zip(jobs, asked, strict=True)]

    def _jobs(self, many: Sequence[_Given], adapters: Any, sampling: Any) -> list[Job]:
        names, params = read_names(adapters, len(many)), read_sampling(sampling, len(many))
        return [
            self._job(prompt, name, param) for prompt, name, param in zip(many, names, params, strict=True)
        ]

    def _job(self, prompt: _Given, name: str | None, params: SamplingParams) -> Job:
        revision = self._catalog.resolve(name) if name is not None else None
        codec = self._codec_of(revision)
        card = None if revision is None else revision.card
        tokens, tools = self._encoded(prompt, codec, card)
        acting, invoked_at = None, NOT_INVOKED
        if revision is not None:
            acting = self._acting(revision)
            found = invocation_at(tokens, acting)
            if found is None and params.alora_fallback is None:
                text = revision.card.invocation if revision.card is not None else None
                raise invocation_missing(revision.name, acting.invocation, text, "prompts")
            if found is None:
                revision, acting, codec = None, None, self._codec
            else:
                invoked_at = found
        keys = prompt_keys(tokens, acting, invoked_at, self._terms, DEFAULT_NAMESPACE)
        return Job(tokens, revision, params, keys, codec, tools)

    def _encoded(
        self, prompt: _Given, codec: TextCodec | None, card: Card | None
    ) -> tuple[list[int], ToolUse | None]:
        """A prompt's tokens, and what its answer may call."""
        if not isinstance(prompt, (str, Conversation)):
            check_tokens(prompt, self.vocab_size)
            return list(prompt), None
        if codec is None:
            raise CallerError(
                ErrorCode.TOKENIZER_MISSING, "the model folder has no tokenizer; give token ids"
            )
        if isinstance(prompt, str):
            return codec.encode(prompt), None
        form, suffix = (None, None) if card is None else (card.tool_format, card.chat_suffix)
        tools = prompt.offer.use(codec.template(), form)
        return codec.chat(prompt.messages, tools, suffix), tools

    def _acting(self, revision: Revision) -> Acting:
        prepared = self._adapters.held.known.get(revision.key)
        if prepared is None:  # another thread took it away meanwhile
            raise not_registered(revision.alias)
        return Acting.of(prepared.register)

    def _codec_of(self, revision: Revision | None) -> TextCodec | None:
        """What reads and writes the text of a revision's requests."""
        if revision is None:
            return self._codec
        text = self._texts.find(revision)
        if text is None:  # another thread took it away meanwhile
            raise not_registered(revision.alias)
        return text.codec()

    def _asked(self, job: Job) -> list[OpenSample]:
        """The samples of one prompt, as the engine is asked for them."""
        tokens, params, codec = job.tokens, job.params, job.codec
        check_sampling(params, codec)
        own = further_ends(codec, self._codec)
        ends = {*self._eos_token_ids, *own}
        sampled = sampled_ids(codec, self._codec)
        grammar = job.grammar(self._codec)
        words = word_tokens(params, codec)
        seed, prompt = prompt_seed(params), np.array(tokens, dtype="<i4").tobytes()
        limit_ms = params.ttft_deadline_ms
        deadline_ns = 0 if limit_ms is None else MonotonicClock().now_ns() + limit_ms * 1_000_000
        samples = []
        for index in range(params.n):
            only_first = params if index == 0 else replace(params, prompt_logprobs=None)
            sampling = engine_sampling(only_first, seed, index, ends, words, sampled)
            submit = Submit(
                f"r{next(self._requests)}",
                prompt,
                sampling,
                job.revision.key if job.revision is not None else None,
                priority=params.priority,
                deadline_ns=deadline_ns,
                grammar=grammar,
                own_ends=() if grammar is None else tuple(sorted(own)),
                block_keys=job.keys.block_keys,
                invoked_at=job.keys.invoked_at,
            )
            assembly = SampleAssembly(index, codec, params, tokens, job.tools)
            samples.append(OpenSample(submit, assembly, Piece(index)))
        return samples


def _alias_key(alias: str) -> AliasKey:
    """An `LLM` has one tenant."""
    return AliasKey(DEFAULT_NAMESPACE, alias)
