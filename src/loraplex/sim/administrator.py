"""What an operator of a simulated replica does: adapters by name, swaps, removals, pins, prefetches, limits,
revocations.

Owns what each name means now and which calls are open. Every call is answered once; which refusals are legal
is decided here from what the operator did and what the injector struck, never from the engine.

Specification: 0x07F (a name moves only after its new revision is there), 0x09J, rulings "Leases".
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Final

from loraplex.core.messages import (
    Inspect,
    LoadAdapter,
    PinAdapter,
    PrefetchAdapter,
    RegisterAdapter,
    RemoveAdapter,
    Reply,
    RevokeAdapter,
    SetLimits,
    ToEngine,
)
from loraplex.engine.deltas import digest_words
from loraplex.identity.execution import adapter_execution, base_execution
from loraplex.sim.faults import BASE, Injector, Operation, Setup
from loraplex.sim.tokens import adapter_number, head_only
from loraplex.sim.wrong import Wrong


class CallKind(StrEnum):
    """What an open call asked for."""

    REGISTER = "register"
    REMOVE = "remove"
    REVOKE = "revoke"
    LOAD = "load"
    PREFETCH = "prefetch"
    PIN = "pin"
    UNPIN = "unpin"
    LIMITS = "limits"
    INSPECT = "inspect"


NO_ROOM = frozenset({"pool_exhausted", "adapter_slots_exhausted", "host_memory_exhausted"})
"""Refusals that name a limit: legal wherever an operator asks for more than there is."""
LEGAL = {
    CallKind.REGISTER: frozenset[str](),
    CallKind.REMOVE: frozenset[str](),
    CallKind.REVOKE: frozenset[str](),
    CallKind.LOAD: NO_ROOM | {"adapter_not_found"},
    CallKind.PREFETCH: NO_ROOM | {"adapter_not_found"},
    CallKind.PIN: NO_ROOM | {"adapter_not_found"},
    CallKind.UNPIN: frozenset({"adapter_not_found"}),
    CallKind.LIMITS: NO_ROOM,
    CallKind.INSPECT: frozenset[str](),
}


INVOCATIONS: Final = ((7,), (8, 9))
"""What switches activated adapters on: few, so that several have one in common."""


def digest(name: str) -> str:
    """64 hexadecimal characters that stand for `name`."""
    return hashlib.sha256(name.encode()).hexdigest()


@dataclass(slots=True)
class Image:
    """One revision of an alias. size_class: of its block, 0 for whole pages. invocation: tokens that switch
    it on, none for one that is always on. known: the engine has confirmed it, and requests may name it. pins:
    confirmed ones.
    """

    alias: str
    key: str
    kernel_digest: str
    number: int
    pages: int
    size_class: int = 0
    invocation: tuple[int, ...] = ()
    known: bool = False
    pins: int = 0

    @property
    def execution(self) -> str:
        """What acts where it is on, as far as KV rows can tell."""
        return base_execution(BASE) if head_only(self.number) else adapter_execution(self.key)


@dataclass(frozen=True, slots=True)
class _Call:
    kind: CallKind
    image: Image | None


class AliasBook:
    """Aliases of one replica and the calls about them. inbox: where messages to the engine go."""

    def __init__(self, setup: Setup, injector: Injector, inbox: list[ToEngine]) -> None:
        self._setup, self._injector, self.inbox = setup, injector, inbox
        self._rng = Random(f"{setup.seed}/names")
        self._small = Random(f"{setup.seed}/small names")
        self._activation = Random(f"{setup.seed}/activation")
        self._current: dict[str, Image] = {}
        self._by_key: dict[str, Image] = {}
        self._revisions: Counter[str] = Counter()
        self._calls: dict[int, _Call] = {}
        self._serial = 0
        self.refusals: Counter[str] = Counter()
        for index in range(setup.aliases):
            self._register(f"a{index}")

    def usable(self) -> list[Image]:
        """Revisions that requests may name now, in the order of their names' first registration."""
        return [image for image in self._current.values() if image.known]

    def pinned(self, key: str) -> bool:
        """Whether a revision that is still named has a pin that nobody is about to take away."""
        image = self._by_key.get(key)
        if image is None or not image.known or not image.pins:
            return False
        return not any(call.kind is CallKind.UNPIN and call.image is image for call in self._calls.values())

    @property
    def open_calls(self) -> list[str]:
        """Kinds of calls without an answer."""
        return [call.kind.value for call in self._calls.values()]

    def any_alias(self, number: int) -> str:
        """An alias by a number."""
        return f"a{number % self._setup.aliases}"

    def act(self) -> Image | None:
        """One tick of an operator's life; the image that was revoked in it, if one was."""
        rng, setup = self._rng, self._setup
        if rng.random() < setup.swaps:
            self.swap(self.any_alias(rng.randrange(1 << 30)))
        if rng.random() < 0.01:
            self._send(CallKind.INSPECT, None, Inspect(self._next()))
        if rng.random() >= 0.03:
            return None
        usable = self.usable()
        image = usable[rng.randrange(len(usable))] if usable else None
        operation = list(Operation)[rng.randrange(len(Operation))]
        if operation not in setup.operations or image is None:
            return None
        return self._operate(operation, image)

    def _operate(self, operation: Operation, image: Image) -> Image | None:
        rng, limits = self._rng, self._setup.limits
        match operation:
            case Operation.PIN:
                pinned = not image.pins or rng.random() < 0.3
                kind = CallKind.PIN if pinned else CallKind.UNPIN
                self._send(kind, image, PinAdapter(self._next(), image.key, pinned))
            case Operation.PREFETCH:
                self._send(CallKind.PREFETCH, image, PrefetchAdapter(self._next(), image.key))
            case Operation.LOAD:
                self._send(CallKind.LOAD, image, LoadAdapter(self._next(), image.key))
            case Operation.LIMITS:
                pages = rng.randrange(self._setup.adapter_pages, limits.num_pages)
                slots = rng.randrange(1, limits.max_adapter_slots)
                least = self._setup.adapter_pages * limits.kv.page_bytes
                host = rng.randrange(least, 6 * least)
                self._send(CallKind.LIMITS, None, SetLimits(self._next(), pages, slots, host))
            case Operation.REVOKE:
                if rng.random() < 0.8:
                    return None
                image.known = False
                self._send(CallKind.REVOKE, image, RevokeAdapter(self._next(), image.key))
                self.swap(image.alias)
                return image
        return None

    def swap(self, alias: str) -> None:
        """Register a new revision, unless one is on its way; the name moves when it is there."""
        if not any(
            c.kind is CallKind.REGISTER and c.image and c.image.alias == alias for c in self._calls.values()
        ):
            self._register(alias)

    def replica_died(self) -> None:
        """What a supervisor does: the new engine is told every name's revision."""
        calls, self._calls = self._calls, {}
        for image in self._current.values():
            image.known, image.pins = False, 0
            self._ask_to_register(image)
        for call in calls.values():
            if call.kind is CallKind.REGISTER and call.image and call.image.alias not in self._current:
                self._register(call.image.alias)

    def _register(self, alias: str) -> None:
        self._revisions[alias] += 1
        name = f"{alias}@{self._revisions[alias]}"
        kernel = digest("kernel/" + name)
        pages = 1 + self._rng.randrange(self._setup.adapter_pages)
        size_class = 0
        if self._small.random() < self._setup.small_share:
            classes = self._setup.limits.kv.page_tokens.bit_length() - 1
            pages, size_class = 1, 1 + self._small.randrange(classes)
        number = adapter_number(digest_words(kernel))
        invocation: tuple[int, ...] = ()
        if self._activation.random() < self._setup.activated:
            invocation = self._activation.choice(INVOCATIONS)
        self._ask_to_register(Image(alias, digest(name), kernel, number, pages, size_class, invocation))

    def _ask_to_register(self, image: Image) -> None:
        self._by_key[image.key] = image
        message = RegisterAdapter(
            self._next(),
            image.key,
            image.kernel_digest,
            image.pages,
            ((4, 2),),
            (0, 1),
            1000,
            image.size_class,
            image.execution,
            image.invocation,
        )
        self._send(CallKind.REGISTER, image, message)

    def _next(self) -> int:
        self._serial += 1
        return self._serial

    def _send(self, kind: CallKind, image: Image | None, message: ToEngine) -> None:
        self._calls[self._serial] = _Call(kind, image)
        self.inbox.append(message)

    # ------------------------------------------------------------ answers

    def got_reply(self, message: Reply) -> None:
        """Check an answer and move names by it."""
        call = self._calls.pop(message.call_id, None)
        if call is None:
            raise Wrong("ends_once", f"call {message.call_id} was answered although it was not open")
        if message.code is not None:
            self._refused(call, message)
            return
        image = call.image
        match call.kind:
            case CallKind.REGISTER if image is not None:
                old, image.known = self._current.get(image.alias), True
                self._current[image.alias] = image
                if old is not None and old is not image and old.known:
                    old.known = False
                    self._send(CallKind.REMOVE, old, RemoveAdapter(self._next(), old.key))
            case CallKind.PIN if image is not None:
                image.pins += 1
            case CallKind.UNPIN if image is not None:
                image.pins -= 1
            case CallKind.INSPECT:
                pages = message.body["pages"]
                if (
                    sum(pages[name] for name in ("free", "reserved", "adapter", "kv", "prefix"))
                    != pages["total"]
                ):
                    raise Wrong("conservation", f"the engine's own figures do not add up: {pages}")
            case _:
                pass

    def _refused(self, call: _Call, message: Reply) -> None:
        image = call.image
        self.refusals[f"{call.kind.value}: {message.code}"] += 1
        struck = image is not None and image.number in self._injector.struck_images
        if message.code not in LEGAL[call.kind] and not (struck and message.code == "adapter_load_failed"):
            raise Wrong("typed_end", f"a {call.kind.value} was refused {message.code}: {message.message}")
        if call.kind is CallKind.REGISTER and image is not None and not self._injector.stopped:
            current = self._current.get(image.alias)
            if current is None or current is image:
                self._register(image.alias)
