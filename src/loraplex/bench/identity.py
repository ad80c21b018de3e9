"""How fast identity is: verifying, hashing and host-loading an adapter; registering many; looking names up.

The yardstick is `sha256sum` over the same file in the same run: a load cannot be faster than one hash over
its bytes on as many threads. Files come from the page cache. Specification: rulings "Loading".
"""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save_file

from loraplex.adapters.adapter_catalog import AdapterCatalog
from loraplex.artifact.base_modules import BaseModules
from loraplex.artifact.convert import to_image
from loraplex.artifact.identify import identify
from loraplex.artifact.read_artifact import load_adapter
from loraplex.artifact.tensors import Dtype
from loraplex.catalog.changes import Draft, Mode
from loraplex.catalog.records import AliasKey, ArtifactRecord
from loraplex.catalog.store import CatalogStore
from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.layout import Geometry, PageGeometry
from loraplex.identity.digests import ALWAYS_ON, semantic_abi
from loraplex.images.disk_store import ImageStore

MIB: Final = 1 << 20
LAYERS, HIDDEN, KV_DIM = 32, 4096, 1024
"""Attention projections of an 8B Llama."""
TARGETS: Final = (("q_proj", HIDDEN), ("k_proj", KV_DIM), ("v_proj", KV_DIM), ("o_proj", HIDDEN))
PAGE_BYTES: Final = 2 * LAYERS * 16 * KV_DIM * 2
_ABI: Final = hashlib.sha256(b"bench").hexdigest()


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. cpu: the same per second of processor time, which other work on the machine does not
    change.

    ratio: of `cpu` to the first row's in the same run. None where there is no yardstick.
    """

    case: str
    value: float
    unit: str
    cpu: float | None = None
    ratio: float | None = None


@dataclass(frozen=True, slots=True)
class IdentityOptions:
    """mib: size of the adapter. names: adapters looked up. registrations: published one after the other."""

    mib: int = 80
    registrations: int = 1000
    names: int = 10_000
    repeats: int = 5


def run_identity(options: IdentityOptions, say: Callable[[str], None]) -> list[Row]:
    """Every figure; files are made in a temporary folder and removed."""
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as name:
        folder = Path(name)
        say(f"making an adapter of {options.mib} MiB")
        say("verifying, hashing and loading it")
        rows = _loading(folder, options)
        say(f"publishing {options.registrations} revisions")
        rows += _publishing(folder, options)
        say(f"looking up {options.names} names")
        rows += _looking_up(options)
    return rows


def base_modules() -> BaseModules:
    """The base that the adapter is made for."""
    return BaseModules.llama(
        layers=LAYERS, hidden=HIDDEN, intermediate=14336, q_dim=HIDDEN, kv_dim=KV_DIM, vocab=128_256
    )


def write_adapter(folder: Path, mib: int) -> Path:
    """A float16 adapter of about `mib` MiB on q, k, v and o of every layer."""
    folder.mkdir()
    row = sum(HIDDEN + d_out for _, d_out in TARGETS)
    rank = max(1, round(mib * MIB / (2 * LAYERS * row)))
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [t for t, _ in TARGETS],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    tensors = {}
    for layer in range(LAYERS):
        for target, d_out in TARGETS:
            stem = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            tensors[f"{stem}.lora_A.weight"] = rng.random((rank, HIDDEN), dtype=np.float32).astype(np.float16)
            tensors[f"{stem}.lora_B.weight"] = rng.random((d_out, rank), dtype=np.float32).astype(np.float16)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def _loading(folder: Path, options: IdentityOptions) -> list[Row]:
    adapter = write_adapter(folder / "adapter", options.mib)
    weights = adapter / "adapter_model.safetensors"
    size = weights.stat().st_size / MIB
    base = base_modules()
    geometry = PageGeometry(Geometry.RANK_ROWS, 2, row_page_bytes=PAGE_BYTES)
    artifact = load_adapter(adapter, base)

    def host_load() -> None:
        read = load_adapter(adapter, base)
        to_image(read, geometry, Dtype.FLOAT16, _ABI)

    def stored() -> None:
        image = to_image(load_adapter(adapter, base), geometry, Dtype.FLOAT16, _ABI)
        store = ImageStore(folder / "images")
        store.put(image)
        store.delete(image.kernel_digest)

    cases: list[tuple[str, Callable[[], object]]] = [
        (
            "sha256sum, whole file",
            lambda: subprocess.run(["sha256sum", weights], check=True, capture_output=True),
        ),
        ("hashlib, whole file, one thread", lambda: _hash(weights)),
        ("verify + hash (every tensor)", lambda: load_adapter(adapter, base)),
        ("verify + hash + host load", host_load),
        ("verify + hash + host load + stored durably", stored),
        ("identity of what was read", lambda: identify(artifact, _ABI)),
    ]
    if shutil.which("sha256sum") is None:
        cases.pop(0)
    taken = _medians([call for _, call in cases], options.repeats)
    yardstick = taken[0][1]
    return [
        Row(
            f"{name}, {size:.0f} MiB",
            round(size / wall, 1),
            "MiB/s",
            round(size / cpu, 1),
            round(yardstick / cpu, 2),
        )
        for (name, _), (wall, cpu) in zip(cases, taken, strict=True)
    ]


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _medians(calls: list[Callable[[], object]], repeats: int) -> list[tuple[float, float]]:
    """Median seconds, of the clock and of the processor, of each call; all take turns."""
    taken: list[list[tuple[float, float]]] = [[] for _ in calls]
    for turn in range(repeats + 1):
        for call, seconds in zip(calls, taken, strict=True):
            begun, used = time.perf_counter(), _processor_s()
            call()
            if turn:  # the first one fills caches
                seconds.append((time.perf_counter() - begun, _processor_s() - used))
    return [
        (statistics.median(wall for wall, _ in pairs), max(statistics.median(cpu for _, cpu in pairs), 1e-6))
        for pairs in taken
    ]


def _processor_s() -> float:
    """Processor time of this process, its threads, and its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _draft(number: int) -> Draft:
    content = hashlib.sha256(str(number).encode()).hexdigest()
    record = ArtifactRecord(
        _ABI,
        content,
        ALWAYS_ON,
        semantic_abi(_ABI, content, ALWAYS_ON),
        "lora",
        (16,),
        ("k", "o", "q", "v"),
        256,
        256,
        128,
        1 << 20,
    )
    return Draft(AliasKey("default", f"customer-{number}"), f"/adapters/{number}", record)


def _publishing(folder: Path, options: IdentityOptions) -> list[Row]:
    rows = []
    for name, url in (("in memory", "sqlite://"), ("SQLite file", f"sqlite:///{folder / 'catalog.db'}")):
        catalog = AdapterCatalog(store=CatalogStore.open(url))
        begun = time.perf_counter()
        for number in range(options.registrations):
            catalog.publish(_draft(number), Mode.ADD)
        took = time.perf_counter() - begun
        rows.append(
            Row(f"{options.registrations} publications, {name}", round(options.registrations / took), "/s")
        )
        catalog.close()
    again = time.perf_counter()
    opened = AdapterCatalog(store=CatalogStore.open(f"sqlite:///{folder / 'catalog.db'}"))
    rows.append(
        Row(
            f"opening and checking {len(opened)} adapters",
            round((time.perf_counter() - again) * 1000, 1),
            "ms",
        )
    )
    opened.close()
    return rows


def _looking_up(options: IdentityOptions) -> list[Row]:
    catalog = AdapterCatalog()
    for number in range(options.names):
        catalog.publish(_draft(number), Mode.ADD)
    names = [f"customer-{number}" for number in range(options.names)]
    picked = np.random.default_rng(1).permutation(options.names).tolist() * 10
    rows = []
    for case, tenant, suffix in (
        ("alias", "default", ""),
        ("alias@revision", "default", "@1"),
        ("alias, another tenant", "acme", ""),
    ):
        asked = [names[index] + suffix for index in picked]
        begun = time.perf_counter()
        for name in asked:
            catalog.resolve(name, tenant)
        took = time.perf_counter() - begun
        rows.append(Row(f"look-ups of {case}, {options.names} adapters", round(len(asked) / took), "/s"))
    if len(catalog) != options.names:
        raise InternalFault(ErrorCode.INTERNAL, f"{len(catalog)} of {options.names} adapters are there")
    catalog.close()
    return rows


def line(row: Row) -> str:
    """A row for a terminal."""
    ratio = "" if row.ratio is None else f"  {row.cpu:>9,.0f} per CPU second, {row.ratio:.2f} of sha256sum's"
    return f"{row.case:50}  {row.value:>12,.1f} {row.unit}{ratio}"


def as_json(options: IdentityOptions, rows: list[Row]) -> str:
    """Options and rows as JSON."""
    value: dict[str, Any] = {"options": asdict(options), "rows": [asdict(row) for row in rows]}
    return json.dumps(value, indent=2)
