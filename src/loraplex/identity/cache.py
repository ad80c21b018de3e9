"""KV identities: the cache ABI without adapter, the first parent of a chain, block keys, the one-piece prefix
form.

A block key says the whole history of its rows: every token before it, every execution and where each began.
It never holds a request, an alias, a slot, a page or a sampling policy. So equal tokens after different
contexts, or after different activation starts, never share.

Specification: 0x01G "Bindings of request, cache and slot", 0x08H; rulings "Identity".
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Final

import msgspec

from loraplex.identity.canonical import check_digest, digest
from loraplex.identity.digests import invalid
from loraplex.identity.execution import History, check_history

KEY_BYTES: Final = 32
TOKEN_BYTES: Final = 4
SHARED_NAMESPACE: Final = ":shared"
"""Of the tenants that the operator lets share prefixes. No tenant can have this name."""


class CacheAbi(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which KV representation. position: the RoPE contract as text; visibility: causal, or a window in
    tokens.

    page_tokens, layers, kv_heads, head_dim: page geometry of this shard. shard: (rank, ranks).
    """

    base: str
    dtype: str
    layout: str
    page_tokens: int
    layers: int
    kv_heads: int
    head_dim: int
    position: str
    visibility: str
    shard: tuple[int, int]

    @property
    def digest(self) -> str:
        """H_cache_abi, without adapter."""
        check_digest("base", self.base)
        return digest({"cache_abi": msgspec.to_builtins(self)})


def namespace_of(tenant: str, sharing: Collection[str]) -> str:
    """Where a tenant's prefixes are looked up and published: its own namespace, or the one of those that
    share.
    """
    return SHARED_NAMESPACE if tenant in sharing else tenant


def cache_root(cache_abi: str, graph_revision: int, namespace: str) -> bytes:
    """First parent of a chain of block keys, 32 bytes. namespace: who may share, a tenant's or one that was
    opened.
    """
    text = digest(
        {
            "cache_abi_sha256": check_digest("cache_abi", cache_abi),
            "dependency_graph_revision": graph_revision,
            "namespace": namespace,
        }
    )
    return bytes.fromhex(text)


def block_key(parent: bytes, execution: bytes, acts_from: int, tokens: bytes) -> bytes:
    """Key of the block after `parent`, 32 bytes.

    execution: digest of the execution that acts in the block, 32 bytes. acts_from: first position inside the
    block at which it acts; what acted before is in the parent. tokens: little-endian int32, at least one.
    """
    if len(parent) != KEY_BYTES or len(execution) != KEY_BYTES:
        raise invalid(
            f"a parent of {len(parent)} bytes and an execution of {len(execution)} were given, expected "
            f"{KEY_BYTES}"
        )
    if not tokens or len(tokens) % TOKEN_BYTES:
        raise invalid(f"a block has {len(tokens)} bytes of tokens, expected whole int32 values")
    if not 0 <= acts_from < len(tokens) // TOKEN_BYTES:
        raise invalid(f"position {acts_from} lies outside a block of {len(tokens) // TOKEN_BYTES} tokens")
    return hashlib.sha256(parent + execution + acts_from.to_bytes(TOKEN_BYTES, "little") + tokens).digest()


def _keys_under(execution: bytes, parent: bytes, tokens: bytes, offset: int, size: int) -> list[bytes]:
    """`block_key` of all full blocks of `tokens` from `offset` on, in which one execution acts throughout.

    A prompt has thousands of blocks, and each of its keys is made twice: by its client, and by the engine.
    """
    keys, acting, sha256 = [], execution + bytes(TOKEN_BYTES), hashlib.sha256
    for at in range(offset, len(tokens) - size + 1, size):
        parent = sha256(parent + acting + tokens[at : at + size]).digest()
        keys.append(parent)
    return keys


class KeyChain:
    """Makes the keys of one request's full blocks, in order; what a client begins, the engine continues.

    Holds the last key and the position that it ends at. `history` is checked on construction.
    """

    __slots__ = ("_executions", "_history", "page_tokens", "parent", "position")

    def __init__(self, root: bytes, history: History, page_tokens: int, position: int = 0) -> None:
        """root: the first parent, or the key of the block that ends at `position`, a multiple of
        `page_tokens`.
        """
        check_history(history)
        if page_tokens < 1 or position < 0 or position % page_tokens:
            raise invalid(
                f"a chain at position {position} does not lie between blocks of {page_tokens} tokens"
            )
        self._history = history
        self._executions = tuple(bytes.fromhex(interval.execution) for interval in history)
        self.parent, self.page_tokens, self.position = root, page_tokens, position

    def extend(self, tokens: bytes) -> list[bytes]:
        """Keys of the full blocks in `tokens`, which begin at `position`; a rest that fills no block is left
        out.
        """
        size = self.page_tokens * TOKEN_BYTES
        keys: list[bytes] = []
        offset, end = 0, len(tokens) - size + 1
        while offset < end and self.position < self._history[-1].start:
            execution, acts_from = self.acting(self.position)
            keys.append(block_key(self.parent, execution, acts_from, tokens[offset : offset + size]))
            self.parent = keys[-1]
            self.position += self.page_tokens
            offset += size
        if offset < end:
            keys += _keys_under(self._executions[-1], self.parent, tokens, offset, size)
            self.parent = keys[-1]
            self.position += (len(tokens) - offset) // size * self.page_tokens
        return keys

    def acting(self, position: int) -> tuple[bytes, int]:
        """The execution at the end of the block that begins at `position`, and where inside the block it
        begins.
        """
        if position >= self._history[-1].start:
            return self._executions[-1], 0
        end = position + self.page_tokens
        index = max(i for i, interval in enumerate(self._history) if interval.start < end)
        return self._executions[index], max(self._history[index].start - position, 0)


def prefix_identity(root: bytes, history: History, prompt_tokens: bytes, side_inputs: str) -> str:
    """H_prefix of a whole prompt in one piece.

    root: carries cache ABI, graph and isolation. prompt_tokens: little-endian int32. side_inputs: digest.
    """
    check_history(history)
    return digest(
        {
            "root": root.hex(),
            "history": [[interval.start, interval.execution] for interval in history],
            "prompt_tokens_sha256": hashlib.sha256(prompt_tokens).hexdigest(),
            "side_inputs_sha256": check_digest("side_inputs", side_inputs),
        }
    )
