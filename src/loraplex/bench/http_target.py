"""The servers that `bench http` compares, each a child process of it.

`bare` is a granian application that sends made chunks and does nothing else. `whole` is the shipping server,
text and all, over an engine process without a model. Steps a second are that engine's, each a token for every
request; without a number, as many as it can.

Never measures anything itself. Specification: rulings "Dependencies".
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from loraplex.config import EngineConfig, ServeConfig
from loraplex.core.messages import (
    Abort,
    Ended,
    Finish,
    FromEngine,
    Inspect,
    RegisterAdapter,
    RemoveAdapter,
    Reply,
    Submit,
    Tokens,
)
from loraplex.core.ports import Clock, EventSink, Mailbox
from loraplex.process.child import END_SIGNAL
from loraplex.process.parent import Parent, run_child
from loraplex.process.pipe import Failed
from loraplex.server.announce import Announcer
from loraplex.server.app import create_app
from loraplex.server.listen import Listener, Receive, Send
from loraplex.server.run import serve

CHUNK: Final = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","created":1764500000,"model":"tiny",'
    b'"choices":[{"index":0,"text":"abc","logprobs":null,"finish_reason":null}],'
    b'"system_fingerprint":"base:abababababababab","object":"text_completion"}\n\n'
)
"""As long as a chunk of the whole server."""
VOCAB: Final = 997
STEPS: Final = "LORAPLEX_BENCH_STEPS"
BUILDER: Final = "loraplex.bench.http_target:build_fountain"
_CONFIG: Final = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": 16,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1 << 20, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "eos_token_id": 2,
}  # fmt: skip


class TargetOrder(msgspec.Struct, frozen=True):
    """Which server to be. kind: bare or whole. tokens: of a bare stream. steps: a second, of a whole server's
    engine.
    """

    kind: str
    port: int
    tokens: int
    steps: int | None


class TargetReady(msgspec.Struct, frozen=True, tag=True):
    """The server takes requests."""


TARGET_ANSWERS: Final[msgspec.msgpack.Decoder[TargetReady | Failed]] = msgspec.msgpack.Decoder(
    TargetReady | Failed
)


@dataclass
class Fountain:
    """An engine without a model: each step gives every request one token."""

    mailbox: Mailbox
    pause_s: float = 0.0
    left: dict[str, int] = field(default_factory=dict)
    _never: threading.Event = field(default_factory=threading.Event)

    def step(self, wait: bool = False) -> bool:
        """Read, then one token for each request."""
        if self.pause_s:
            self._never.wait(self.pause_s)
        out: list[FromEngine] = []
        for message in self.mailbox.receive(wait and not self.left):
            self._handle(message, out)
        for request_id, left in list(self.left.items()):
            out.append(Tokens(request_id, (70 + left % 20,)))
            if left > 1:
                self.left[request_id] = left - 1
            else:
                del self.left[request_id]
                out.append(Ended(request_id, "length"))
        if out:
            self.mailbox.send(out)
        return bool(out)

    def _handle(self, message: Any, out: list[FromEngine]) -> None:
        match message:
            case Submit():
                self.left[message.request_id] = message.sampling.max_tokens
            case Abort() | Finish():
                self.left.pop(message.request_id, None)
            case RegisterAdapter() | RemoveAdapter() | Inspect():
                out.append(Reply(message.call_id, body={}))
            case _:
                raise TypeError(f"{type(message).__name__} is not for an engine")


@dataclass
class Built:
    """What the engine's process drives."""

    engine: Fountain
    info: dict[str, Any]
    close: Callable[[], None] = lambda: None


def build_fountain(config: EngineConfig, mailbox: Mailbox, clock: Clock, events: EventSink) -> Built:
    """A `Fountain`."""
    info = {
        "base_abi": "ab" * 32, "dtype": "float32", "vocab_size": VOCAB, "eos_token_ids": [2],
        "page_tokens": 16,
        "cache_abi": "cd" * 32, "graph_revision": 1, "prefix_cache": False,
        "max_model_len": 1 << 20, "notes": [],
    }  # fmt: skip
    steps = float(os.environ.get(STEPS, "0"))
    return Built(Fountain(mailbox, 1 / steps if steps else 0.0), info)


def model_folder(folder: Path) -> Path:
    """A model without weights: a configuration and a tokenizer."""
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    return write_tokenizer(folder)


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer of printable characters for a model folder; returns the folder.

    No token is a part of a character: the server holds such a part back until the rest comes, and what a
    client sees of a model with random weights would be gaps of several steps.
    """
    tokens = ["<s>", "<pad>", "</s>", *map(chr, range(33, 127))]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


async def bare(parent: Parent, order: TargetOrder) -> None:
    """Serve made chunks until ended."""

    async def app(scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        await receive()
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(order.tokens):
            await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(END_SIGNAL, end.set)
    await Listener(app, "127.0.0.1", order.port).start()
    parent.send(TargetReady())
    await end.wait()


class _Announcer(Announcer):
    """Tells the parent, and nobody else, that the server is ready."""

    def __init__(self, config: ServeConfig, parent: Parent) -> None:
        super().__init__(config, sys.stderr)
        self._parent = parent

    def say(self, text: str) -> None:
        """Nobody reads it."""

    def ready(self, url: str, base_name: str, aliases: Sequence[str], chat: bool) -> None:
        """Requests may come."""
        self._parent.send(TargetReady())


def _end(signum: int, frame: FrameType | None) -> None:
    """The server ends as an operator would end it."""
    signal.raise_signal(signal.SIGTERM)


def run(parent: Parent, order: TargetOrder) -> int:
    """Serve until told to end."""
    if order.kind == "bare":
        asyncio.run(bare(parent, order))
        return 0
    signal.signal(END_SIGNAL, _end)
    os.environ[STEPS] = str(order.steps or 0)  # the engine's process inherits it
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        config = ServeConfig(model=str(model_folder(folder)), port=order.port, log_level="error")
        announcer = _Announcer(config, parent)
        return asyncio.run(serve(config, folder, "tiny", folder / "images", create_app, announcer, BUILDER))


if __name__ == "__main__":
    sys.exit(run_child(TargetOrder, run))
