"""Many cold adapters at once on an idle engine, and a swap beside running requests: parts of `loraplex bench
load`.

Adapters are twins of one image, each with bytes of its own in a file of its own, in the page cache. Both walk
the way that a server walks: loader process, host memory, copy, checksum on the device, publication.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from loraplex.bench.load_engine import Bench, greedy
from loraplex.core.layout import AdapterImage, page_checksum
from loraplex.core.messages import LoadAdapter, RegisterAdapter, RemoveAdapter, SetLimits, Submit
from loraplex.images.disk_store import ImageStore

SWAP_TOKENS = 48
"""New tokens of each request beside a swap."""


@dataclass(frozen=True, slots=True)
class BurstRow:
    """Adapters that were asked for at once. seconds: until the last was published. steps: of the engine until
    then.
    """

    adapters: int
    image_bytes: int
    seconds: float
    steps: int

    @property
    def gb_per_s(self) -> float:
        """Bytes of images that were fetched, verified, copied, verified again and published, in GB a
        second.
        """
        return self.adapters * self.image_bytes / self.seconds / 1e9


@dataclass(frozen=True, slots=True)
class SwapRow:
    """A swap under load. ms: from asking for the new revision to its publication. finished: requests that
    ended well, on the old revision and on the new one; any other end is an error of the benchmark.
    """

    running: int
    ms: float
    finished: int


def twin(store: ImageStore, register: RegisterAdapter) -> RegisterAdapter:
    """Another adapter of the same shape in the disk store, with bytes of its own; small numbers of
    any type.
    """
    image = store.open(register.kernel_digest)
    pages = np.random.default_rng(secrets.randbits(63)).integers(0, 256, image.pages.shape, dtype=np.uint8)
    pages &= 0x3B  # no exponent of a float is so large that logits overflow
    key, kernel = secrets.token_hex(32), secrets.token_hex(32)
    made: AdapterImage = replace(
        image, key=key, kernel_digest=kernel, pages=pages, checksums=page_checksum(pages)
    )
    store.adopt(made)
    return msgspec.structs.replace(register, key=key, kernel_digest=kernel)


def register_cold(bench: Bench, messages: Sequence[RegisterAdapter]) -> None:
    """Make adapters known without loading any."""
    limits = bench.call(SetLimits(0))
    bench.call(SetLimits(0, adapter_pages=0, host_bytes=0))  # under which nothing is fetched
    for message in messages:
        bench.call(message)
    bench.call(SetLimits(0, adapter_pages=limits["adapter_pages"], host_bytes=limits["host_bytes"]))


def measure_burst(bench: Bench, register: RegisterAdapter, count: int) -> BurstRow:
    """`count` adapters, absent from device and host memory, asked for at once; they leave the engine
    afterwards.
    """
    twins = [twin(bench.store, register) for _ in range(count)]
    image_bytes = bench.store.open(register.kernel_digest).pages.nbytes
    register_cold(bench, twins)
    bench.make_cold(host=True)
    first, started = len(bench.step_cpu_ms), time.perf_counter()
    wanted = {bench.post(LoadAdapter(0, message.key)) for message in twins}
    while not wanted <= bench.replies.keys():
        bench.step()
    seconds = time.perf_counter() - started
    for number in wanted:
        bench.taken(number)
    for message in twins:
        bench.call(RemoveAdapter(0, message.key))
        bench.store.delete(message.kernel_digest)
    bench.idle()
    return BurstRow(count, image_bytes, seconds, len(bench.step_cpu_ms) - first)


def measure_swap(bench: Bench, register: RegisterAdapter, running: int) -> SwapRow:
    """Requests run on one revision, another is loaded beside them, takes the new requests, and the first
    leaves.
    """
    old, new = (twin(bench.store, register) for _ in range(2))
    bench.call(old)
    bench.call(LoadAdapter(0, old.key))
    bench.ended = 0
    first = _submit(bench, "old", old.key, running)
    _until_all_answer(bench, first)
    asked = time.perf_counter()
    bench.call(new)
    bench.call(LoadAdapter(0, new.key))
    ms = 1e3 * (time.perf_counter() - asked)
    second = _submit(bench, "new", new.key, running)
    bench.call(RemoveAdapter(0, old.key))
    while bench.ended < len(first) + len(second):
        bench.step()
    bench.call(RemoveAdapter(0, new.key))
    bench.idle()
    for message in (old, new):
        bench.store.delete(message.kernel_digest)
    return SwapRow(running, ms, bench.ended)


def _submit(bench: Bench, name: str, key: str, count: int) -> list[str]:
    rng = np.random.default_rng(2)
    ids = [f"{name}-{secrets.token_hex(4)}" for _ in range(count)]
    for request_id in ids:
        prompt = rng.integers(0, bench.base.spec.vocab_size, 64).astype("<i4").tobytes()
        bench.mailbox.post(Submit(request_id, prompt, greedy(SWAP_TOKENS), key))
    return ids


def _until_all_answer(bench: Bench, ids: Sequence[str]) -> None:
    bench.arrived.clear()
    while not set(ids) <= {request_id for request_id, _ in bench.arrived}:
        bench.step()
