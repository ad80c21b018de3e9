"""A whole HTTP front over an engine that answers in this process, deterministically, one token a turn of the
loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import numpy as np
from openai import AsyncOpenAI
from tests.text.tiny_text import byte_codec
from tests.waiting import LIMIT_S

from loraplex.adapters.adapter_catalog import AdapterCatalog
from loraplex.adapters.manager import AdapterService
from loraplex.adapters.prepare import PreparedAdapter
from loraplex.adapters.revision_texts import RevisionTexts
from loraplex.artifact.card import Card, read_card
from loraplex.artifact.companions import read_companions
from loraplex.artifact.identify import AdapterIdentity
from loraplex.catalog.requests import RequestLog
from loraplex.config import ServeConfig
from loraplex.core.errors import CallerError, CapacityError, ErrorCode, LoraplexError
from loraplex.core.messages import (
    Abort,
    Ended,
    Finish,
    Inspect,
    RegisterAdapter,
    RemoveAdapter,
    RevokeAdapter,
    SetLimits,
    Submit,
    TokenBinding,
    TokenLogprobs,
    Tokens,
)
from loraplex.identity.compatibility import NOTHING_SHARED, Shared, Shares
from loraplex.identity.digests import ALWAYS_ON, invocation_policy, semantic_abi
from loraplex.process.client import RequestGroup
from loraplex.server.app import create_app
from loraplex.server.provenance import Provenance
from loraplex.server.service import Service, ServicePhase
from loraplex.text.codec import TextCodec

BASE, MAX_LEN, BASE_ABI, CACHE_ABI = "base-model", 200, "ba5e" * 16, "ca5e" * 16


def scores(token: int, position: int, top: int) -> TokenLogprobs:
    """The actual token, then `top` entries of which the first is the token itself."""
    ids = (token, token, *range(100, 100 + top))[: top + 1]
    return TokenLogprobs(ids, tuple(-0.5 * (rank + position) if rank else -0.25 for rank in range(len(ids))))


class FakeEngine:
    """The engine client's interface, answered here. script: output tokens of a request; it ends with them.

    sent: every message, in order. hold: while it is clear, nothing is generated. refuse: raised by the next
    call. reused: positions of a request that the cache had; None says nothing of what it was bound to.
    """

    def __init__(self, script: Callable[[Submit], Sequence[int]]) -> None:
        self.script = script
        self.sent: list[Any] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.refuse: LoraplexError | None = None
        self.fail_after: tuple[int, ErrorCode] | None = None
        self.queue_full = False
        self.reused: Callable[[Submit], int] | None = None
        self.resident: dict[str, RegisterAdapter] = {}
        self.running: dict[str, asyncio.Task[None]] = {}
        self.submitted = asyncio.Event()
        self.withdrawn = asyncio.Event()

    def submit(self, submits: Sequence[Submit]) -> RequestGroup:
        group = RequestGroup(cast("Any", self), [s.request_id for s in submits])
        self.sent += submits
        for index, message in enumerate(submits):
            self.running[message.request_id] = asyncio.ensure_future(self._serve(group, index, message))
        self.submitted.set()
        return group

    async def _serve(self, group: RequestGroup, index: int, message: Submit) -> None:
        def end(reason: str | None = None, **more: Any) -> None:
            self.running.pop(message.request_id, None)
            group._put(index, Ended(message.request_id, reason, **more))

        await self.hold.wait()
        if self.queue_full:
            return end(code="queue_full", message="too many wait")
        if message.adapter is not None and message.adapter not in self.resident:
            return end(code="adapter_not_found", message="not registered")
        sampling, position = message.sampling, 0
        prompt = np.frombuffer(message.prompt, "<i4").tolist()
        before = tuple(scores(t, i, sampling.prompt_logprobs) for i, t in enumerate(prompt) if i)
        before = before if sampling.prompt_logprobs >= 0 else ()
        found = 0 if self.reused is None else self.reused(message)
        bound = () if self.reused is None else (TokenBinding(1, 1, 0, 0, 1, 1, 0, 1, found, found),)
        for position, token in enumerate(self.script(message)):
            await asyncio.sleep(0)
            if self.fail_after is not None and position == self.fail_after[0]:
                return end(code=self.fail_after[1].value, message="the step failed")
            scored = (scores(token, position, sampling.logprobs),) if sampling.logprobs >= 0 else ()
            group._put(index, Tokens(message.request_id, (token,), scored, before, *bound))
            before, bound = (), ()
            if token in sampling.stop_token_ids:
                return end("stop", stop_token=token)
            if position + 1 == sampling.max_tokens:
                return end("length")
        return end("stop")

    def _taken(self, request_id: str) -> None:
        pass

    def _forget(self, request_id: str, farewell: Abort | Finish) -> None:
        task = self.running.pop(request_id, None)
        if task is not None:
            task.cancel()
            self.sent.append(farewell)
            self.withdrawn.set()

    async def call(self, message: Any) -> dict[str, Any]:
        self.sent.append(message)
        await asyncio.sleep(0)
        if self.refuse is not None and not isinstance(message, Inspect):
            error, self.refuse = self.refuse, None
            raise error
        if isinstance(message, RegisterAdapter):
            self.resident[message.key] = message
        if isinstance(message, RemoveAdapter) and self.resident.pop(message.key, None) is None:
            raise CallerError(ErrorCode.ADAPTER_NOT_FOUND, "not registered")
        if isinstance(message, RevokeAdapter):
            del self.resident[message.key]
        if isinstance(message, SetLimits):
            return dict(self.figures()["limits"])
        return self.figures()

    def figures(self) -> dict[str, Any]:
        return {
            "pages": {
                "total": 9,
                "free": 5,
                "reserved": 0,
                "adapter": 2,
                "kv": 2,
                "prefix": 0,
                "page_bytes": 4096,
            },
            "slabs": {"free_bytes": 0, "reserved_bytes": 0, "owned_bytes": 0, "tail_bytes": 0},
            "requests": {"running": len(self.running), "waiting": 0, "live": len(self.running)},
            "limits": {
                "adapter_pages": 9,
                "resident_adapters": 5,
                "host_bytes": 1 << 30,
                "adapter_pages_over": 0,
                "resident_adapters_over": 0,
                "host_bytes_over": 0,
            },
            "asked": [],
            "tenants": {name: {"weight": 1} for name in dict.fromkeys(s.tenant for s in self.of(Submit))},
            "steps": {"launched": 1, "committed": 1},
            "preemptions": 0,
            "pins": {"adapters": 0, "pages": 0},
            "host": {"used_bytes": 0, "limit_bytes": 1 << 30},
            "loads": {"under_way": 0, "wanted": 0},
            "adapters": [
                {
                    "key": k,
                    "state": "idle",
                    "device_pages": m.pages,
                    "device_bytes": m.pages * 4096,
                    "leases": 0,
                    "pinned": False,
                    "removing": False,
                }
                for k, m in self.resident.items()
            ],
        }

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


class FakeSupervisor:
    def __init__(self) -> None:
        self.ready = True
        self.restarts = 0
        self.info = {
            "max_model_len": MAX_LEN,
            "vocab_size": 300,
            "base_abi": BASE_ABI,
            "cache_abi": CACHE_ABI,
            "graph_revision": 1,
            "page_tokens": 4,
            "prefix_cache": True,
            "eos_token_ids": [1, 2],
        }

    def require_ready(self) -> None:
        if not self.ready:
            raise CapacityError(ErrorCode.ENGINE_UNAVAILABLE, "the engine is restarting")


ACTIVATED = Shares(Shared.BEFORE_INVOCATION, Shared.BEFORE_INVOCATION, Shared.BEFORE_INVOCATION, Shared.NEVER)


async def prepare(source: str) -> PreparedAdapter:
    """Stands for reading an adapter: the folder's file `weights` is all that there is to it."""
    await asyncio.sleep(0)
    file = Path(source) / "weights"
    if not file.is_file():
        raise CallerError(ErrorCode.ADAPTER_SOURCE_MISSING, f"{source} has no adapter", param="source")
    artifact = hashlib.sha256(file.read_bytes()).hexdigest()
    activated = Path(source) / "activated"
    tokens, card = json.loads(activated.read_text()) if activated.is_file() else ([], None)
    policy = invocation_policy(tokens) if tokens else ALWAYS_ON
    key = semantic_abi(BASE_ABI, artifact, policy)
    return PreparedAdapter(
        AdapterIdentity(BASE_ABI, artifact, key, policy),
        "lora",
        (8,),
        ("q", "v"),
        4,
        4,
        2,
        8192,
        1000,
        "4 of 4",
        RegisterAdapter(0, key, key, 2, ((8, 2),), (0, 2), 1000, invocation=tuple(tokens)),
        companions=read_companions(Path(source)),
        shares=ACTIVATED if tokens else NOTHING_SHARED,
        card=read_card(Path(source), activated=False) if card is None else Card(*card),
    )


def echo(message: Submit) -> Sequence[int]:
    """Output is the prompt without its BOS, then the end token."""
    ids = np.frombuffer(message.prompt, "<i4").tolist()
    return [*(token for token in ids if token), 1]


class Front:
    """server: parts of the server. http, openai: clients of it without a network."""

    def __init__(self, folder: Path, codec: TextCodec | None, **config: Any) -> None:
        self.roots = folder / "adapters"
        self.roots.mkdir(exist_ok=True)
        self.engine = FakeEngine(echo)
        self.supervisor = FakeSupervisor()
        settings = ServeConfig(model="m", adapter_dirs=(str(self.roots),), **config)
        texts = RevisionTexts(codec, settings.adapter_text)
        texts.begin(self.supervisor.info["vocab_size"])
        self.adapters = AdapterService(self.engine, AdapterCatalog(frozenset({BASE})), prepare, texts=texts)
        self.provenance = Provenance(RequestLog(self.adapters.catalog.store.database), self.adapters.off_loop)
        self.service = Service(
            settings,
            BASE,
            codec,
            cast("Any", self.engine),
            cast("Any", self.supervisor),
            self.adapters,
            self.provenance,
        )
        self.service.phase = ServicePhase.OPEN
        self.app = create_app(self.service)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(cast("Any", self.app)), base_url="http://t"
        )
        self.openai = AsyncOpenAI(api_key="k", base_url="http://t/v1", http_client=self.http, max_retries=0)
        self.codec = codec

    def source(self, name: str, content: str = "") -> str:
        """An adapter folder under the allowed root."""
        folder = self.roots / name
        folder.mkdir(exist_ok=True)
        (folder / "weights").write_text(content or name)
        return str(folder)

    def activated(self, name: str, invocation: str, suffix: str | None = None) -> str:
        """An activated adapter's folder; with a suffix its card gives both texts."""
        source = Path(self.source(name))
        card = None if suffix is None else [invocation, suffix]
        (source / "activated").write_text(json.dumps([self.ids(invocation), card]))
        return str(source)

    def ids(self, text: str) -> list[int]:
        assert self.codec is not None
        return self.codec.encode(text, add_special=False)

    def say(self, text: str, end: bool = True) -> None:
        """What every request answers from now on."""
        tokens = [*self.ids(text), *([1] if end else [])]
        self.engine.script = lambda _: tokens

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": BASE, "prompt": "hello", **body})

    async def chat(self, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "hello"}]
        return await self.http.post(
            "/v1/chat/completions", json={"model": BASE, "messages": messages, **body}
        )

    async def respond(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/responses", json={"model": BASE, "input": "hello", **body})

    async def events(self, path: str, **body: Any) -> list[Any]:
        """Decoded events of a stream, without the closing [DONE]."""
        response = await self.http.post(path, json={"model": BASE, "stream": True, **body})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        return [msgspec.json.decode(line) for line in lines]


def run(
    folder: Path,
    test: Callable[[Front], Awaitable[None]],
    *,
    text: bool = True,
    codec: TextCodec | None = None,
    **config: Any,
) -> None:
    """Run a test over a fresh front; nothing may be left running in the engine."""

    @asynccontextmanager
    async def front() -> AsyncIterator[Front]:
        made = Front(folder, codec or (byte_codec(folder) if text else None), **config)
        try:
            yield made
        finally:
            await made.http.aclose()
            await made.adapters.close()

    async def bounded() -> None:
        async with asyncio.timeout(LIMIT_S), front() as made:
            await test(made)
            assert not made.engine.running

    asyncio.run(bounded())


def error_of(response: httpx.Response) -> tuple[int, str, str | None]:
    body = response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["message"]
    return response.status_code, body["code"], body["param"]
