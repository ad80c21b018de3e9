"""Everything that crosses between a client process and the engine, as strict msgspec structs.

Client to engine: `Submit`, `Abort`, `Finish`, and the calls of `EngineCall`. Engine to client: `Tokens`,
`Ended`, `Reply`. The engine reads and writes them through the `Mailbox` port; whether they cross a process is
not its business.
"""

from __future__ import annotations

from typing import Any

import msgspec


class EngineSampling(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The part of the sampling parameters that the engine executes; stop strings and `n` stay with the
    client.

    seed: two's-complement 64 bits. logprobs, prompt_logprobs: -1 is off. stop_token_ids: end-of-sequence ids
    are already merged in unless they are ignored. min_tokens: before so many, none of late_token_ids is
    sampled. allowed_token_ids: all that may be sampled; empty allows every one. bad_words: token ids, the
    last of which is not sampled where the output ends with those before it. sampled_ids: ids below this may
    be sampled, where an adapter's tokenizer knows others than its base's; 0 leaves those of the base.
    """

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    stop_token_ids: tuple[int, ...]
    logprobs: int
    prompt_logprobs: int
    min_tokens: int = 0
    late_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    sampled_ids: int = 0


class Submit(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Enqueue one request. prompt: token ids as little-endian int32 bytes. adapter: semantic digest, or None.

    grammar: what the output must follow, as text that the engine's `Grammars` port reads; None leaves it
    free. own_ends: end tokens that an adapter's files add to the model's, which end such an output too.
    namespace: whose cached prefixes it may find and add to: the tenant's own, or the one that the operator
    opened to it. block_keys: 32 bytes for each full block of the prompt (`identity.cache.KeyChain`); empty
    where nothing is cached. invoked_at: position of the first token of an activated adapter's invocation, -1
    for every other request.
    """

    request_id: str
    prompt: bytes
    sampling: EngineSampling
    adapter: str | None = None
    tenant: str = "default"
    priority: int = 0
    arrival_ns: int = 0
    deadline_ns: int = 0
    grammar: str | None = None
    own_ends: tuple[int, ...] = ()
    namespace: str = "default"
    block_keys: bytes = b""
    invoked_at: int = -1


class Abort(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Withdraw a request; unknown ids are ignored (it may have just ended). `slow` tells why for the
    records.
    """

    request_id: str
    slow: bool = False


class Finish(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The client found a stop string: the request ends as if token `tokens` had been its last."""

    request_id: str
    tokens: int


class RegisterAdapter(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Take an adapter image and serve it under its semantic digest; loaded at once where that costs nobody
    anything.

    Answered by one `Reply` when that is decided; an error leaves nothing registered.

    key: semantic digest. kernel_digest: names the image in the image store. pages: pages that it fills.
    ranks: (rank, modules of that rank) pairs. modules: sorted adapted module kinds as `ids.Module` values.
    size_class: 0 for whole pages, else pages is 1 and it takes a block of a slab page. execution: digest of
    what acts where it is on, as far as KV rows can tell (`identity.execution`); empty means its own.
    invocation: token ids that switch an activated adapter on; none for one that is always on.
    """

    call_id: int
    key: str
    kernel_digest: str
    pages: int
    ranks: tuple[tuple[int, int], ...]
    modules: tuple[int, ...]
    host_bytes: int
    size_class: int = 0
    execution: str = ""
    invocation: tuple[int, ...] = ()


class RemoveAdapter(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Stop new binds of an adapter, let its requests finish, then free its pages. Replied when it is
    retired.
    """

    call_id: int
    key: str


class LoadAdapter(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Bring an adapter onto the device now, evicting for it: the shadow copy of a swap. Replied when it is
    published.

    Refused at once with the shortfall when free and reclaimable pages do not hold it. beside: the revision
    that it will replace; where that one is not on the device, this one need not be either, and its image in
    host memory is enough.
    """

    call_id: int
    key: str
    beside: str | None = None


class PrefetchAdapter(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Bring an adapter onto the device if free pages allow it that no admitted request will want (0x09J)."""

    call_id: int
    key: str


class PinAdapter(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Add one pin to an adapter, or take one away. A pinned adapter is loaded and not evicted. Replied at
    once.
    """

    call_id: int
    key: str
    pinned: bool


class RevokeAdapter(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """End an adapter that was found bad after publication, and every request on it. Replied when it
    is gone.
    """

    call_id: int
    key: str


class SetLimits(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Change what adapters may take, while serving. None: as it is.

    adapter_pages: pages of the pool. resident_adapters: adapters on the device. host_bytes: host images
    together.
    """

    call_id: int
    adapter_pages: int | None = None
    resident_adapters: int | None = None
    host_bytes: int | None = None


class Inspect(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Ask for the engine's figures (pages, requests, residency of adapters). Answered by one `Reply`.

    keys: the adapters that are asked about, None for all.
    """

    call_id: int
    keys: tuple[str, ...] | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at one position: token ids and values, the actual token first, then top entries.

    rank: of the actual token among all, from 1; 0 where that was not asked.
    """

    ids: tuple[int, ...]
    values: tuple[float, ...]
    rank: int = 0


class TokenBinding(msgspec.Struct, frozen=True, array_like=True):
    """What a request's rows were bound to when a token was computed (0x01G).

    slot, incarnation: of the request. adapter_slot, adapter_generation: 0 for the base. plan: the plan that
    computed it. cache: generation of the committed KV frontier. sampled: tokens sampled before it. admission:
    counted from 1. matched: positions of cached blocks that its keys found; reused: those that it did not
    compute again.
    """

    slot: int
    incarnation: int
    adapter_slot: int
    adapter_generation: int
    plan: int
    cache: int
    sampled: int
    admission: int
    matched: int = 0
    reused: int = 0


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """New output tokens of a request, in order. prompt_logprobs: for prompt positions 1.., as they are
    computed.

    binding: with the first token of each admission, what it was bound to.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    binding: TokenBinding | None = None


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A request ended: with a finish reason, or with an error code and message. Sent exactly once a request.

    param: the caller's field at fault, where there is one.
    """

    request_id: str
    finish_reason: str | None = None
    stop_token: int | None = None
    code: str | None = None
    message: str = ""
    param: str | None = None


class Reply(msgspec.Struct, frozen=True, tag=True):
    """Answer to a call: a body, or an error code and message."""

    call_id: int
    code: str | None = None
    message: str = ""
    body: dict[str, Any] = {}


EngineCall = (
    RegisterAdapter
    | RemoveAdapter
    | LoadAdapter
    | PrefetchAdapter
    | PinAdapter
    | RevokeAdapter
    | SetLimits
    | Inspect
)
"""What is answered by one `Reply`."""
ToEngine = Submit | Abort | Finish | EngineCall
FromEngine = Tokens | Ended | Reply
