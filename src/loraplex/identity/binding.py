"""Request and slot bindings: who asked for which function, and where it is published right now.

Specification: 0x01G "Bindings of request, cache and slot".
"""

from __future__ import annotations

import msgspec

from loraplex.identity.canonical import check_digest, digest


class RequestBinding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One attempt of one request, bound to one function and one generation policy.

    semantic: the adapter's semantic ABI, or None for the base. lineage: the request that this one continues
    or replays; its own id otherwise. policy: digest of the sampling parameters.
    """

    namespace: str
    request_id: str
    attempt: int
    lineage: str
    base: str
    semantic: str | None
    policy: str

    @property
    def digest(self) -> str:
        """The request binding."""
        return digest(
            {
                "request_namespace": self.namespace,
                "request_id": self.request_id,
                "attempt": self.attempt,
                "lineage_id": self.lineage,
                "base_sha256": check_digest("base", self.base),
                "adapter_semantic_sha256": (
                    None if self.semantic is None else check_digest("semantic", self.semantic)
                ),
                "generation_policy_sha256": check_digest("policy", self.policy),
            }
        )


class SlotBinding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one slot of one worker publishes in one generation. A slot is an entry of the row-table
    directory.
    """

    worker_epoch: int
    device: str
    slot: int
    slot_generation: int
    pointer_table_generation: int
    semantic: str
    kernel: str

    @property
    def digest(self) -> str:
        """The slot binding."""
        return digest(
            {
                "worker_epoch": self.worker_epoch,
                "device_id": self.device,
                "slot_index": self.slot,
                "slot_generation": self.slot_generation,
                "pointer_table_generation": self.pointer_table_generation,
                "adapter_semantic_sha256": check_digest("semantic", self.semantic),
                "local_kernel_sha256": check_digest("kernel", self.kernel),
            }
        )
