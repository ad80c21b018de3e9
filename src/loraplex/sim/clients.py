"""The clients of a simulated replica: requests, adapters by name, swaps, cancels and malformed messages.

Owns what the outside knows: which revision a name meant when a request was sent, what that request alone would produce,
and what came back. It never reads the engine. `Wrong` is raised by whoever sees a promise broken.

Specification: 0x07H (a request keeps the revision that it resolved), 0x09A (arrival), DESIGN 4 "Leases".
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from loraplex.core.messages import (
    Abort,
    Ended,
    EngineSampling,
    Finish,
    FromEngine,
    Inspect,
    RegisterAdapter,
    RemoveAdapter,
    Reply,
    Submit,
    ToEngine,
    Tokens,
)
from loraplex.core.packed import I32
from loraplex.engine.deltas import digest_words
from loraplex.sim.faults import VOCAB, Fault, Injector, Setup
from loraplex.sim.tokens import adapter_number, expected_tokens
from loraplex.sim.world import VirtualClock


class Wrong(Exception):
    """A checker saw a promise broken. checker: which one."""

    def __init__(self, checker: str, message: str) -> None:
        super().__init__(f"{checker}: {message}")
        self.checker = checker


def digest(name: str) -> str:
    """64 hexadecimal characters that stand for `name`."""
    return hashlib.sha256(name.encode()).hexdigest()


@dataclass(slots=True)
class Image:
    """One revision of an alias. known: the engine has confirmed it."""

    key: str
    kernel_digest: str
    number: int
    pages: int
    known: bool = False


@dataclass(slots=True)
class Ask:
    """One request as its client sees it. allowed: error codes that an injected fault makes legal."""

    request_id: str
    image: Image | None
    prompt: I32
    max_tokens: int
    stop: frozenset[int]
    arrival_ns: int
    order: int
    expected: list[int]
    tokens: list[int] = field(default_factory=list)
    allowed: set[str] = field(default_factory=set)
    finish_at: int | None = None
    ended: Ended | None = None
    overtaken: int = 0


class Clients:
    """`core.ports.Mailbox` of a simulated replica, and everything behind it."""

    def __init__(self, setup: Setup, clock: VirtualClock, injector: Injector) -> None:
        self._setup, self._clock, self._injector = setup, clock, injector
        self._rng = Random(f"{setup.seed}/clients")
        self.inbox: list[ToEngine] = []
        self.live: dict[str, Ask] = {}
        self.recent: dict[str, Ask] = {}
        self.outcomes: Counter[str] = Counter()
        self.sent = 0
        self.images: dict[str, Image] = {}
        self.by_number: dict[int, Image] = {}
        self._names: dict[str, Image] = {}
        self._revisions: Counter[str] = Counter()
        self._calls: dict[int, tuple[str, str, Image]] = {}
        self._call = 0
        self.removing: dict[str, Image] = {}
        for index in range(setup.aliases):
            self._register(f"a{index}")

    # ------------------------------------------------------------ the port

    def receive(self, wait: bool) -> Sequence[ToEngine]:
        """Everything sent since; never blocks."""
        inbox, self.inbox = self.inbox, []
        return inbox

    def send(self, messages: Sequence[FromEngine]) -> None:
        """Check what came back against what was asked."""
        for message in messages:
            match message:
                case Tokens():
                    self._got_tokens(message)
                case Ended():
                    self._got_end(message)
                case Reply():
                    self._got_reply(message)

    # ------------------------------------------------------------ what clients do

    def act(self) -> None:
        """One tick of ordinary life."""
        rng, setup = self._rng, self._setup
        if len(self.live) < setup.cap and rng.random() < setup.arrivals:
            self.submit()
        if rng.random() < setup.swaps:
            self._swap(f"a{rng.randrange(setup.aliases)}")
        if self.live and rng.random() < 0.004:
            ask = self._any_live()
            if ask.tokens and ask.finish_at is None:
                ask.finish_at = len(ask.tokens)
                self.inbox.append(Finish(ask.request_id, len(ask.tokens)))
        if rng.random() < 0.01:
            self._call += 1
            self.inbox.append(Inspect(self._call))
            self._calls[self._call] = ("inspect", "", Image("", "", 0, 0))
        self._misbehave()

    def _misbehave(self) -> None:
        injector, setup = self._injector, self._setup
        if self.live and injector.strikes(Fault.CANCELLED_CLIENT):
            ask = list(self.live.values())[injector.pick(len(self.live))]
            ask.allowed |= {"aborted", "slow_client"}
            self.inbox.append(Abort(ask.request_id, slow=injector.pick(2) == 0))
        if injector.strikes(Fault.SWAP_STORM):
            for _ in range(8):
                self._swap(f"a{injector.pick(setup.aliases)}")
        if injector.strikes(Fault.POOL_EXHAUSTION):
            for _ in range(setup.limits.max_requests * 2):
                self.submit(longest=True)
        if injector.strikes(Fault.MALFORMED_MESSAGE):
            self._malformed(injector.pick(6))

    def _any_live(self) -> Ask:
        return list(self.live.values())[self._rng.randrange(len(self.live))]

    def submit(self, *, longest: bool = False, base: bool = False) -> Ask:
        """Send one request for the base or for what a random name means now."""
        rng, setup = self._rng, self._setup
        names = [name for name, image in self._names.items() if image.known]
        image = None
        if names and not base and rng.random() >= setup.base_share:
            image = self._names[names[int(len(names) * rng.random() ** 2)]]
        length = setup.prompt_tokens if longest else rng.randint(1, setup.prompt_tokens)
        prompt = np.array([rng.randrange(VOCAB) for _ in range(length)], dtype=np.int32)
        max_tokens = setup.output_tokens if longest else rng.randint(1, setup.output_tokens)
        expected = expected_tokens(prompt, image.number if image else 0, max_tokens, VOCAB)
        stop = frozenset({expected[rng.randrange(max_tokens)]} if rng.random() < 0.1 else ())
        if stop:
            del expected[expected.index(next(iter(stop))) + 1 :]
        self.sent += 1
        ask = Ask(f"r{self.sent}", image, prompt, max_tokens, stop, self._clock.now, self.sent, expected)
        self.live[ask.request_id] = ask
        self.inbox.append(self._message(ask))
        return ask

    @staticmethod
    def _message(ask: Ask) -> Submit:
        sampling = EngineSampling(
            max_tokens=ask.max_tokens, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, repetition_penalty=1.0,
            presence_penalty=0.0, frequency_penalty=0.0, logit_bias=(), stop_token_ids=tuple(sorted(ask.stop)),
            logprobs=-1, prompt_logprobs=-1,
        )  # fmt: skip
        key = ask.image.key if ask.image is not None else None
        prompt = ask.prompt.astype("<i4").tobytes()
        return Submit(ask.request_id, prompt, sampling, key, arrival_ns=ask.arrival_ns)

    def _register(self, alias: str) -> None:
        self._revisions[alias] += 1
        name = f"{alias}@{self._revisions[alias]}"
        kernel = digest("kernel/" + name)
        number = adapter_number(digest_words(kernel))
        image = Image(digest(name), kernel, number, 1 + self._rng.randrange(self._setup.adapter_pages))
        self.images[image.key] = image
        self.by_number[number] = image
        self._call += 1
        self._calls[self._call] = ("register", alias, image)
        self.inbox.append(self._registration(self._call, image))

    @staticmethod
    def _registration(call: int, image: Image) -> RegisterAdapter:
        return RegisterAdapter(call, image.key, image.kernel_digest, image.pages, ((4, 2),), (0, 1), 1000)

    def _swap(self, alias: str) -> None:
        if not any(kind == "register" and name == alias for kind, name, _ in self._calls.values()):
            self._register(alias)

    def _remove(self, image: Image) -> None:
        self._call += 1
        self._calls[self._call] = ("remove", "", image)
        image.known = False
        self.removing[image.key] = image
        self.inbox.append(RemoveAdapter(self._call, image.key))

    def _malformed(self, kind: int) -> None:
        """A message that must be refused and change nothing."""
        ask = self.submit()
        message = self._message(ask)
        self.inbox.pop()
        vocab = np.array([VOCAB], dtype="<i4").tobytes()
        fields, code = [
            ({"prompt": b""}, "empty_prompt"),
            ({"prompt": vocab}, "token_out_of_range"),
            ({"adapter": digest("nobody")}, "adapter_not_found"),
            ({"prompt": message.prompt * 64}, "context_too_long"),
            ({"prompt": b"\x00\x00\x00"}, "invalid_request"),
            ({"arrival_ns": -1}, "invalid_request"),
        ][kind]
        values = {name: getattr(message, name) for name in Submit.__struct_fields__}
        self.inbox.append(Submit(**{**values, **fields}))
        ask.allowed = {code, "!"}

    # ------------------------------------------------------------ a replica dies and comes back

    def replica_died(self) -> None:
        """What a supervisor does: open requests end typed, the new engine is told every name's revision."""
        for ask in list(self.live.values()):
            ask.allowed.add("engine_died")
            self._got_end(Ended(ask.request_id, code="engine_died"))
        self.inbox.clear()
        calls, self._calls = self._calls, {}
        self.removing.clear()
        for name, image in self._names.items():
            image.known = False
            self._call += 1
            self._calls[self._call] = ("register", name, image)
            self.inbox.append(self._registration(self._call, image))
        for kind, alias, _ in calls.values():
            if kind == "register" and alias not in self._names:
                self._register(alias)

    # ------------------------------------------------------------ what came back

    def _got_tokens(self, message: Tokens) -> None:
        ask = self.live.get(message.request_id)
        if ask is None:
            raise Wrong("ends_once", f"tokens came for {message.request_id}, which is not open")
        ask.tokens.extend(message.token_ids)
        if ask.tokens != ask.expected[: len(ask.tokens)]:
            raise Wrong(
                "equal_output",
                f"{ask.request_id} got {ask.tokens}, alone it gets {ask.expected[: len(ask.tokens)]}",
            )

    def _got_end(self, message: Ended) -> None:
        ask = self.live.pop(message.request_id, None)
        if ask is None:
            raise Wrong("ends_once", f"{message.request_id} ended although it was not open")
        ask.ended = message
        self.recent[ask.request_id] = ask
        if len(self.recent) > 256:
            del self.recent[next(iter(self.recent))]
        self.outcomes[message.finish_reason or message.code or ""] += 1
        if message.code is not None:
            if message.code not in ask.allowed and not self._load_failed(ask, message.code):
                raise Wrong("typed_end", f"{ask.request_id} ended {message.code}: {message.message}")
            return
        if "!" in ask.allowed:
            raise Wrong("typed_end", f"{ask.request_id} was malformed and ended {message.finish_reason}")
        if message.finish_reason == "stop" and message.stop_token is None:
            if ask.finish_at is None:
                raise Wrong("equal_output", f"{ask.request_id} stopped without a reason")
        elif len(ask.tokens) != len(ask.expected):
            raise Wrong(
                "equal_output",
                f"{ask.request_id} ended after {len(ask.tokens)} of {len(ask.expected)} tokens",
            )

    def _load_failed(self, ask: Ask, code: str) -> bool:
        """Whether a copy of the request's adapter was struck by a fault."""
        struck = ask.image is not None and ask.image.number in self._injector.struck_images
        return struck and code == "adapter_load_failed"

    def _got_reply(self, message: Reply) -> None:
        kind, alias, image = self._calls.pop(message.call_id, ("", "", None))
        if image is None:
            raise Wrong("ends_once", f"call {message.call_id} was answered although it was not open")
        if kind == "inspect":
            self._check_figures(message)
        elif kind == "remove":
            self.removing.pop(image.key, None)
            if message.code is not None:
                raise Wrong("typed_end", f"a removal was refused {message.code}: {message.message}")
        elif message.code is None:
            old, image.known = self._names.get(alias), True
            self._names[alias] = image
            if old is not None and old is not image:
                self._remove(old)
        elif image.number not in self._injector.struck_images:
            raise Wrong("typed_end", f"a registration was refused {message.code}: {message.message}")
        elif self._names.get(alias) is image:
            self._call += 1
            self._calls[self._call] = ("register", alias, image)
            self.inbox.append(self._registration(self._call, image))
        else:
            self._remove(image)
            if alias not in self._names:
                self._register(alias)

    @staticmethod
    def _check_figures(message: Reply) -> None:
        pages = message.body["pages"]
        total = pages["free"] + pages["reserved"] + pages["adapter"] + pages["kv"]
        if message.code is not None or total != pages["total"]:
            raise Wrong("conservation", f"the engine's own figures do not add up: {pages}")
