"""The clients of a simulated replica: requests, cancels, malformed messages, and what came back.

Owns what the outside knows of each request: the revision that its name meant when it was sent, and what it
would produce alone. It never reads the engine.

Specification: 0x07H (a request keeps the revision that it resolved), 0x09A (arrival).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from loraplex.core.messages import (
    Abort,
    Ended,
    EngineSampling,
    Finish,
    FromEngine,
    Reply,
    Submit,
    ToEngine,
    Tokens,
)
from loraplex.core.packed import I32
from loraplex.identity.cache import KeyChain, cache_root, namespace_of
from loraplex.identity.closure import GRAPH_REVISION
from loraplex.identity.execution import history_of
from loraplex.sim.administrator import NO_ROOM, AliasBook, Image, digest
from loraplex.sim.faults import BASE, CACHE, VOCAB, Fault, Injector, Operation, Setup
from loraplex.sim.token_bounds import TokenBounds, draw_bounds
from loraplex.sim.tokens import expected_tokens
from loraplex.sim.world import VirtualClock
from loraplex.sim.wrong import Wrong

MALFORMED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"prompt": b""}, "empty_prompt"),
    ({"prompt": np.array([VOCAB], dtype="<i4").tobytes()}, "token_out_of_range"),
    ({"prompt": np.array([-1], dtype="<i4").tobytes()}, "token_out_of_range"),
    ({"prompt": bytes(4 * 500)}, "context_length_exceeded"),
    ({"prompt": b"\x00\x00\x00"}, "invalid_request"),
    ({"arrival_ns": -1}, "invalid_request"),
    ({"deadline_ns": -1}, "invalid_request"),
    ({"adapter": digest("nobody")}, "adapter_not_found"),
)
"""Fields of a submission that must be refused, with the refusal's code."""
MALFORMED_KEYS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"invoked_at": -7}, "invalid_request"),
    ({"invoked_at": 499}, "invalid_request"),
    ({"block_keys": b"x" * 31}, "invalid_request"),
    ({"block_keys": b"x" * 32 * 99}, "invalid_request"),
)
"""The same where prefixes are cached."""


def greedy(max_tokens: int, stop: tuple[int, ...] = (), bounds: TokenBounds | None = None) -> EngineSampling:
    """Sampling of a request whose tokens the virtual device alone decides."""
    return EngineSampling(
        max_tokens=max_tokens,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        logit_bias=(),
        stop_token_ids=stop,
        logprobs=-1,
        prompt_logprobs=-1,
        **({} if bounds is None else bounds.fields()),
    )


@dataclass(slots=True)
class Ask:
    """One request as its client sees it. invoked_at: position from which on its adapter acts, -1 for one that
    is always on. priority, deadline_ns: 0 for none. allowed: error codes that make sense for it; must: the
    only one that does.
    """

    request_id: str
    image: Image | None
    prompt: I32
    max_tokens: int
    stop: frozenset[int]
    arrival_ns: int
    order: int
    expected: list[int]
    tenant: str = "default"
    invoked_at: int = -1
    bounds: TokenBounds | None = None
    tokens: list[int] = field(default_factory=list)
    allowed: set[str] = field(default_factory=set)
    must: str | None = None
    finish_at: int | None = None
    overtaken: int = 0
    priority: int = 0
    deadline_ns: int = 0


class Clients:
    """`core.ports.Mailbox` of a simulated replica, and everything behind it."""

    def __init__(self, setup: Setup, clock: VirtualClock, injector: Injector) -> None:
        self._setup, self._clock, self._injector = setup, clock, injector
        self._rng = Random(f"{setup.seed}/clients")
        self._prompts = Random(f"{setup.seed}/prompts")
        self._urgent = Random(f"{setup.seed}/urgent")
        self._shares: list[float] = []
        self._bounds = Random(f"{setup.seed}/bounds")
        self._contexts = [self._context() for _ in range(3)]
        self.inbox: list[ToEngine] = []
        self.names = AliasBook(setup, injector, self.inbox)
        self.live: dict[str, Ask] = {}
        self.recent: dict[str, Ask] = {}
        self.outcomes: Counter[str] = Counter()
        self.sent = 0
        narrow = {Operation.PIN, Operation.LIMITS} & setup.operations
        self._always: frozenset[str] = NO_ROOM if narrow else frozenset()
        if setup.limits.early_abort_ns:
            self._always |= {"early_abort"}

    # ------------------------------------------------------------ the port

    def receive(self, wait: bool) -> Sequence[ToEngine]:
        """Everything sent since; never blocks."""
        inbox = list(self.inbox)
        self.inbox.clear()
        return inbox

    def pause(self) -> None:
        """The simulation's clock moves between steps."""

    def send(self, messages: Sequence[FromEngine]) -> None:
        """Check what came back against what was asked."""
        for message in messages:
            match message:
                case Tokens():
                    self._got_tokens(message)
                case Ended():
                    self._got_end(message)
                case Reply():
                    self.names.got_reply(message)

    # ------------------------------------------------------------ what clients do

    def act(self) -> None:
        """One tick of ordinary life, then of faults."""
        rng, setup = self._rng, self._setup
        if len(self.live) < setup.cap and rng.random() < setup.arrivals:
            self.submit()
        revoked = self.names.act()
        if revoked is not None:
            for ask in self.live.values():
                if ask.image is revoked:
                    ask.allowed.add("adapter_revoked")
        if self.live and rng.random() < 0.004:
            ask = list(self.live.values())[rng.randrange(len(self.live))]
            if ask.tokens and ask.finish_at is None:
                ask.finish_at = len(ask.tokens)
                self.inbox.append(Finish(ask.request_id, len(ask.tokens)))
        self._misbehave()

    def _misbehave(self) -> None:
        injector, setup = self._injector, self._setup
        if self.live and injector.strikes(Fault.CANCELLED_CLIENT):
            ask = list(self.live.values())[injector.pick(len(self.live))]
            slow = injector.pick(2) == 0
            ask.allowed.add("slow_client" if slow else "aborted")
            self.inbox.append(Abort(ask.request_id, slow=slow))
        if injector.strikes(Fault.SWAP_STORM):
            for _ in range(8):
                self.names.swap(self.names.any_alias(injector.pick(setup.aliases)))
        if injector.strikes(Fault.POOL_EXHAUSTION):
            for _ in range(setup.limits.max_requests * 2):
                self.submit(longest=True)
        if injector.strikes(Fault.MALFORMED_MESSAGE):
            cases = MALFORMED + MALFORMED_KEYS if setup.limits.prefix_cache else MALFORMED
            self._malformed(*cases[injector.pick(len(cases))])

    def submit(self, *, longest: bool = False) -> Ask:
        """Send one request for the base or for what a name means now; early names are popular ones."""
        ask = self._compose(longest)
        self.live[ask.request_id] = ask
        self.inbox.append(self._message(ask))
        return ask

    def _malformed(self, fields: dict[str, Any], code: str) -> None:
        """A submission that must be refused and change nothing."""
        ask = self._compose(False)
        ask.must = code
        message = self._message(ask)
        values: dict[str, Any] = {name: getattr(message, name) for name in Submit.__struct_fields__}
        self.live[ask.request_id] = ask
        self.inbox.append(Submit(**{**values, **fields}))

    def _compose(self, longest: bool) -> Ask:
        rng, setup = self._rng, self._setup
        usable, image = self.names.usable(), None
        if usable and rng.random() >= setup.base_share:
            image = usable[self._popular(len(usable))]
        length = setup.prompt_tokens if longest else rng.randint(1, setup.prompt_tokens)
        prompt = np.array([rng.randrange(VOCAB) for _ in range(length)], dtype=np.int32)
        max_tokens = setup.output_tokens if longest else rng.randint(1, setup.output_tokens)
        prompt = self._alike(prompt)
        prompt, invoked_at = self._invoke(prompt, image.invocation if image is not None else ())
        number, acts_at = image.number if image else 0, max(invoked_at, 0)
        expected = expected_tokens(prompt, number, max_tokens, VOCAB, acts_at)
        bounds = None
        if self._bounds.random() < setup.bounded:
            bounds = draw_bounds(self._bounds, expected, VOCAB)
            expected = expected_tokens(prompt, number, max_tokens, VOCAB, acts_at, bounds.let)
        stop: frozenset[int] = frozenset()
        if rng.random() < 0.1:
            stop = frozenset({expected[rng.randrange(max_tokens)]})
            del expected[1 + min(index for index, token in enumerate(expected) if token in stop) :]
        self.sent += 1
        priority, deadline_ns = self._urgency()
        return Ask(
            f"r{self.sent}",
            image,
            prompt,
            max_tokens,
            stop,
            self._clock.now,
            self.sent,
            expected,
            allowed=set(self._always),
            tenant=self._tenant(),
            invoked_at=invoked_at,
            priority=priority,
            deadline_ns=deadline_ns,
            bounds=bounds,
        )

    def _popular(self, count: int) -> int:
        """Which of `count` names is asked for; early ones are popular."""
        exponent = self._setup.zipf
        if not exponent:
            return int(count * self._rng.random() ** 2)
        while len(self._shares) < count:
            before = self._shares[-1] if self._shares else 0.0
            self._shares.append(before + (len(self._shares) + 1) ** -exponent)
        return bisect_left(self._shares, self._rng.random() * self._shares[count - 1], 0, count - 1)

    def _urgency(self) -> tuple[int, int]:
        """Priority and deadline of a request, 0 for none."""
        rng, step_ns = self._urgent, self._setup.costs.step_ns
        if rng.random() >= self._setup.urgent:
            return 0, 0
        if rng.random() < 0.5:
            return rng.choice([-1, 1]), 0
        return 0, self._clock.now + rng.randrange(1, 200) * step_ns

    def _context(self) -> I32:
        length = self._setup.prompt_tokens
        return np.array([self._prompts.randrange(VOCAB) for _ in range(length)], dtype=np.int32)

    def _tenant(self) -> str:
        count = self._setup.tenants
        return f"t{self._prompts.randrange(count)}" if count > 1 else "default"

    def _alike(self, prompt: I32) -> I32:
        """The prompt, or one of its length that begins as others do, or as one that was answered."""
        rng = self._prompts
        if rng.random() >= self._setup.alike:
            return prompt
        asked = list(self.recent.values()) or list(self.live.values())
        if asked and rng.random() < 0.5:
            other = asked[-1 - rng.randrange(min(len(asked), 8))]
            context = np.concatenate([other.prompt, np.array(other.tokens, dtype=np.int32)])
        else:
            context = self._contexts[rng.randrange(len(self._contexts))]
        count = min(context.size, prompt.size)
        if rng.random() < 0.7:
            count = max(count - 1 - rng.randrange(3), 0)
        return np.concatenate([context[:count], prompt[count:]]).astype(np.int32)

    def _invoke(self, prompt: I32, invocation: tuple[int, ...]) -> tuple[I32, int]:
        """The prompt with an invocation in it, and where the last one begins; -1 where none is wanted."""
        if not invocation:
            return prompt, -1
        length = len(invocation)
        if prompt.size < length:
            prompt = np.zeros(length, dtype=np.int32)
        prompt = prompt.copy()
        at = self._prompts.choice(
            [(prompt.size - length) // 2, self._prompts.randint(0, prompt.size - length)]
        )
        prompt[at : at + length] = invocation
        last = max(
            start
            for start in range(prompt.size - length + 1)
            if tuple(prompt[start : start + length].tolist()) == invocation
        )
        return prompt, last

    def namespace(self, ask: Ask) -> str:
        """Whose cached prefixes a request may find."""
        return namespace_of(ask.tenant, self._setup.limits.shared_tenants)

    def _keys(self, ask: Ask) -> bytes:
        limits = self._setup.limits
        if not limits.prefix_cache:
            return b""
        execution = ask.image.execution if ask.image is not None else None
        history = history_of(BASE, execution, ask.invoked_at if ask.invoked_at >= 0 else None)
        root = cache_root(CACHE, GRAPH_REVISION, self.namespace(ask))
        chain = KeyChain(root, history, limits.kv.page_tokens)
        return b"".join(chain.extend(ask.prompt.astype("<i4").tobytes()))

    def _message(self, ask: Ask) -> Submit:
        sampling = greedy(ask.max_tokens, tuple(sorted(ask.stop)), ask.bounds)
        key = ask.image.key if ask.image is not None else None
        prompt = ask.prompt.astype("<i4").tobytes()
        return Submit(
            ask.request_id,
            prompt,
            sampling,
            key,
            ask.tenant,
            ask.priority,
            ask.arrival_ns,
            ask.deadline_ns,
            namespace=self.namespace(ask),
            block_keys=self._keys(ask),
            invoked_at=ask.invoked_at,
        )

    def replica_died(self) -> None:
        """What a supervisor does: open requests end typed, then the new engine is told what there is."""
        for ask in list(self.live.values()):
            ask.allowed.add("engine_died")
            ask.must = None
            self._got_end(Ended(ask.request_id, code="engine_died"))
        self.inbox.clear()
        self.names.replica_died()

    # ------------------------------------------------------------ what came back

    def _got_tokens(self, message: Tokens) -> None:
        ask = self.live.get(message.request_id)
        if ask is None:
            raise Wrong("ends_once", f"tokens came for {message.request_id}, which is not open")
        ask.tokens.extend(message.token_ids)
        if ask.tokens != ask.expected[: len(ask.tokens)]:
            raise Wrong("equal_output", f"{ask.request_id} got {ask.tokens}, alone it gets {ask.expected}")

    def _got_end(self, message: Ended) -> None:
        ask = self.live.pop(message.request_id, None)
        if ask is None:
            raise Wrong("ends_once", f"{message.request_id} ended although it was not open")
        self.recent[ask.request_id] = ask
        if len(self.recent) > 256:
            del self.recent[next(iter(self.recent))]
        self.outcomes[str(message.finish_reason or message.code)] += 1
        if ask.must is not None and message.code != ask.must:
            raise Wrong("typed_end", f"{ask.request_id} must end {ask.must}, it ended {message.code}")
        if message.code is not None:
            if (
                ask.must is None
                and message.code not in ask.allowed
                and not (message.code == "deadline_exceeded" and ask.deadline_ns and not ask.tokens)
                and not self._load_failed(ask, message.code)
            ):
                raise Wrong("typed_end", f"{ask.request_id} ended {message.code}: {message.message}")
        elif message.finish_reason == "stop" and message.stop_token is None:
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
