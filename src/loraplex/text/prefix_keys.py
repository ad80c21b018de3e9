"""What a client process finds out about a tokenised prompt for the engine: where an activated adapter is
invoked, under which executions the prompt's KV rows are made, and the keys of its full blocks.

One way for the server and for `LLM`, so that both find the same blocks. Never looks anything up: the engine
does, after it has checked the namespace.

Specification: 0x08E, 0x08G, 0x08I (freeze, derive); rulings "KV compatibility".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.messages import RegisterAdapter
from loraplex.core.request import ALORA_FALLBACK
from loraplex.identity.activation import last_invocation
from loraplex.identity.cache import KeyChain, cache_root
from loraplex.identity.execution import History, adapter_execution, history_of

SHORT_PROMPT_TOKENS: Final = 4096
"""Prompts up to here have their keys in a millisecond or two; longer ones belong into a thread."""
NOT_INVOKED: Final = -1


@dataclass(frozen=True, slots=True)
class CacheTerms:
    """What the engine says of its prefix cache. base: H_base. cache_abi: digest. on: whether blocks are
    cached at all.
    """

    base: str
    cache_abi: str
    graph_revision: int
    page_tokens: int
    on: bool

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> CacheTerms:
        """The terms in what an engine says of itself (`BuiltEngine.info`)."""
        return cls(
            info["base_abi"],
            info["cache_abi"],
            info["graph_revision"],
            info["page_tokens"],
            info["prefix_cache"],
        )


@dataclass(frozen=True, slots=True)
class Acting:
    """The adapter of a request, as far as KV rows can tell. execution: digest. invocation: none for one that
    is always on.
    """

    execution: str
    invocation: tuple[int, ...]

    @classmethod
    def of(cls, register: RegisterAdapter) -> Acting:
        """What acts where the adapter of this registration is on."""
        return cls(register.execution or adapter_execution(register.key), register.invocation)


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """invoked_at: where the adapter is invoked, -1 for the base and for an adapter that is always on.
    history: of the KV rows. block_keys: 32 bytes for each full block, empty where nothing is cached.
    """

    invoked_at: int
    history: History
    block_keys: bytes


def invocation_at(tokens: Sequence[int], acting: Acting) -> int | None:
    """Position at which `acting` is invoked, -1 for one that is always on; None where the prompt lacks the
    invocation.
    """
    return last_invocation(tokens, acting.invocation) if acting.invocation else NOT_INVOKED


def prompt_keys(
    tokens: Sequence[int],
    acting: Acting | None,
    invoked_at: int,
    terms: CacheTerms,
    namespace: str,
) -> PromptKeys:
    """History and keys of one prompt. acting: None for the base. namespace: of the cache. Linear in the
    prompt.
    """
    history = history_of(
        terms.base,
        None if acting is None else acting.execution,
        None if invoked_at == NOT_INVOKED else invoked_at,
    )
    if not terms.on:
        return PromptKeys(invoked_at, history, b"")
    root = cache_root(terms.cache_abi, terms.graph_revision, namespace)
    chain = KeyChain(root, history, terms.page_tokens)
    keys = chain.extend(np.asarray(tokens, dtype="<i4").tobytes())
    return PromptKeys(invoked_at, history, b"".join(keys))


def invocation_missing(name: str, invocation: Sequence[int], text: str | None, param: str) -> CallerError:
    """The refusal of a prompt that does not invoke the activated adapter `name`. text: of the invocation, if
    known.
    """
    said = "" if text is None else f" {text!r},"
    ids = ", ".join(map(str, invocation[:8])) + (", ..." if len(invocation) > 8 else "")
    return CallerError(
        ErrorCode.INVOCATION_MISSING,
        f"{param} does not hold the invocation of {name},{said} token ids [{ids}], in one piece; add it, or "
        "set "
        f'alora_fallback to "{ALORA_FALLBACK}" to have the base answer',
        param=param,
    )
