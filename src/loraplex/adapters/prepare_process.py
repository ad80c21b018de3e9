"""The preparation's process: reads, verifies and converts one adapter after the other, within a bound of
memory.

A child of `adapters.prepare_pool`, which sends one `PrepareOrder`, then a `PrepareAsk` for each adapter. It
is niced. What asks for more memory than the bound ends as `adapter_too_costly`, and takes nothing from
anybody else.

Specification: rulings "Loading", "Processes".
"""

from __future__ import annotations

import logging
import os
import resource
import sys
from typing import Final

import msgspec

from loraplex.adapters.prepare import PreparedAdapter, prepare_source
from loraplex.build.base_model import BaseModel
from loraplex.catalog.artifacts import ArtifactStore
from loraplex.core.errors import CallerError, ErrorCode, LoraplexError
from loraplex.images.disk_store import ImageStore
from loraplex.process.parent import Parent, run_child
from loraplex.process.pipe import Failed

_log: Final = logging.getLogger(__name__)
_NICE: Final = 10


class PrepareOrder(msgspec.Struct, frozen=True):
    """For which base a child prepares, and where. memory_bytes: what the child may hold beside
    mapped files.
    """

    base: BaseModel
    images: str
    artifacts: str
    artifacts_bytes: int
    memory_bytes: int


class PrepareAsk(msgspec.Struct, frozen=True):
    """Prepare an adapter. source: as bytes, for paths that are not UTF-8. content: key that its files must
    have in the artifact store.
    """

    source: bytes
    content: str | None


class PrepareDone(msgspec.Struct, frozen=True, tag=True):
    """An adapter is prepared."""

    adapter: PreparedAdapter


class PrepareReady(msgspec.Struct, frozen=True, tag=True):
    """The child takes adapters."""


_asks: Final = msgspec.msgpack.Decoder(PrepareAsk)
_encode: Final = msgspec.msgpack.Encoder().encode


def run(parent: Parent, order: PrepareOrder) -> int:
    """Prepare until the parent closes its pipe."""
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_DATA, (order.memory_bytes, resource.RLIM_INFINITY))
    images, artifacts = ImageStore(order.images), ArtifactStore(order.artifacts, order.artifacts_bytes)
    parent.send(PrepareReady())
    while True:
        ask = parent.receive(_asks)
        parent.send_bytes(_answer(ask, order, images, artifacts))


def _answer(
    ask: PrepareAsk,
    order: PrepareOrder,
    images: ImageStore,
    artifacts: ArtifactStore,
) -> bytes:
    """The encoded `PrepareDone`, or `Failed`."""
    source = os.fsdecode(ask.source)
    try:
        return _encode(PrepareDone(prepare_source(source, order.base, images, artifacts, ask.content)))
    except MemoryError:
        refusal = CallerError(
            ErrorCode.ADAPTER_TOO_COSTLY,
            f"preparing {source!r} takes more than {order.memory_bytes >> 20} MiB of memory, the limit on "
            "this machine; "
            "give an adapter of lower rank or with fewer modules",
        )
        return _encode(Failed.of(refusal))
    except LoraplexError as error:
        return _encode(Failed.of(error))
    except Exception as error:  # noqa: BLE001 - the process's boundary: it ends typed, whatever happens
        _log.exception("an adapter could not be prepared")
        return _encode(Failed.of(error))


if __name__ == "__main__":
    sys.exit(run_child(PrepareOrder, run))
