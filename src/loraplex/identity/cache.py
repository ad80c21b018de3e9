"""KV identities: the cache ABI without adapter, the root of a prefix chain, block keys, the one-piece prefix form.

A key says under which function, over which tokens, in which namespace KV rows were made. It never holds a request,
an alias, a slot or a sampling policy. A new root begins where the execution digest changes.
Specification: 0x01G "Bindings of request, cache and slot", 0x08H; rulings "Identity".
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from loraplex.identity.canonical import check_digest, digest
from loraplex.identity.digests import invalid

KEY_BYTES: Final = 32
TOKEN_BYTES: Final = 4


class CacheAbi(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which KV representation. position: the RoPE contract as text; visibility: causal, or a window in tokens.

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


def base_execution(base: str) -> str:
    """E of an interval in which no adapter acts: the base alone (0x08H)."""
    return digest({"execution": "base", "base_sha256": check_digest("base", base)})


def adapter_execution(semantic: str) -> str:
    """E of an interval in which an adapter acts from the start of the interval's root on."""
    return digest({"execution": "adapter", "adapter_semantic_sha256": check_digest("semantic", semantic)})


def cache_root(cache_abi: str, execution: str, graph_revision: int, namespace: str) -> bytes:
    """Root of a chain of block keys, 32 bytes. namespace: who may share, the tenant's or one that was opened."""
    text = digest(
        {
            "cache_abi_sha256": check_digest("cache_abi", cache_abi),
            "execution_sha256": check_digest("execution", execution),
            "dependency_graph_revision": graph_revision,
            "namespace": namespace,
        }
    )
    return bytes.fromhex(text)


def block_key(parent: bytes, tokens: bytes) -> bytes:
    """Key of the block after `parent`, 32 bytes. tokens: little-endian int32, at least one."""
    if len(parent) != KEY_BYTES:
        raise invalid(f"a parent key has {len(parent)} bytes, expected {KEY_BYTES}")
    if not tokens or len(tokens) % TOKEN_BYTES:
        raise invalid(f"a block has {len(tokens)} bytes of tokens, expected whole int32 values")
    return hashlib.sha256(parent + tokens).digest()


def prefix_identity(root: bytes, prompt_tokens: bytes, side_inputs: str) -> str:
    """H_prefix of a whole prompt in one piece, the always-on case.

    The root carries cache ABI, adapter and isolation. prompt_tokens: little-endian int32. side_inputs: digest.
    """
    return digest(
        {
            "root": root.hex(),
            "prompt_tokens_sha256": hashlib.sha256(prompt_tokens).hexdigest(),
            "side_inputs_sha256": check_digest("side_inputs", side_inputs),
        }
    )


NO_SIDE_INPUTS: Final = digest({"side_inputs": []})
"""Side inputs of a request that has tokens only."""
