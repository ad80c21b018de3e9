"""The base model as adapter registration needs it: its modules, identity, page geometry and, for some
methods, weights.

H_base covers the bytes of the weight files, the effective configuration, how weights are transformed on load,
and the map of target modules (0x01G). A dummy base has a digest of its own kind and never equals a real one.
"""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from loraplex.artifact.base_facts import BaseFacts
from loraplex.artifact.base_modules import BaseModules, BaseTensors
from loraplex.artifact.checkpoint import CheckpointTensors
from loraplex.artifact.identify import target_map
from loraplex.artifact.tensors import Dtype
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.ids import Module
from loraplex.core.layout import Geometry, KvShape, PageGeometry
from loraplex.identity.cache import CacheAbi
from loraplex.identity.canonical import canonical, digest
from loraplex.identity.digests import BaseAbi
from loraplex.model.spec import DecoderSpec, spec_from_config

WEIGHT_TRANSFORM_REVISION: Final = "fuse-qkv-gate-up/1"
KV_LAYOUT: Final = "layers, keys and values, positions, heads, elements"
_CHUNK: Final = 1 << 22


@dataclass(frozen=True, slots=True)
class BaseModel:
    """modules: adaptable modules. abi: H_base. kv: KV geometry of a page. dtype: element type of factors and
    KV.

    facts: what adapters' files are held against beside the modules. Plain values, which a preparation's
    process is told.
    """

    spec: DecoderSpec
    modules: BaseModules
    abi: str
    kv: KvShape
    dtype: Dtype
    weights: str | None = None
    """Folder of its weights; None for a dummy base."""
    facts: BaseFacts | None = None

    @property
    def tensors(self) -> BaseTensors | None:
        """Its weights, for the methods that need them; a fresh reader, which keeps what it learns of the
        files.
        """
        return None if self.weights is None else CheckpointTensors(self.weights, self.modules)

    @property
    def geometry(self) -> PageGeometry:
        """Geometry of adapter pages: rank rows in pages of the pool's size."""
        return PageGeometry(Geometry.RANK_ROWS, self.dtype.itemsize, row_page_bytes=self.kv.page_bytes)

    @property
    def cache_abi(self) -> CacheAbi:
        """Which KV representation its pages hold; one shard holds all heads."""
        return CacheAbi(
            base=self.abi,
            dtype=self.dtype.value,
            layout=KV_LAYOUT,
            page_tokens=self.kv.page_tokens,
            layers=self.kv.layers,
            kv_heads=self.kv.kv_heads,
            head_dim=self.kv.head_dim,
            position=_text({"rope": _plain(self.spec.rope), "max_positions": self.spec.max_positions}),
            visibility=_text({"causal": True, "windows": list(self.spec.windows)}),
            shard=(0, 1),
        )


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json; typed errors when it is missing or not an object."""
    path = folder / "config.json"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CallerError(
            ErrorCode.MODEL_SOURCE_MISSING, f"{folder} has no config.json; give a model folder"
        ) from error
    except (OSError, ValueError) as error:
        raise CallerError(ErrorCode.CONFIG_INVALID, f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise CallerError(ErrorCode.CONFIG_INVALID, f"{path} holds {type(value).__name__}, not an object")
    return value


def base_modules(spec: DecoderSpec) -> BaseModules:
    """The adaptable modules of a decoder under their checkpoint names."""
    return BaseModules(
        layers=spec.layers,
        dims=dict(spec.module_dims().dims),
        biases=_biased(spec),
        family=spec.family.value,
        tied=spec.tied_embeddings,
    )


def _biased(spec: DecoderSpec) -> frozenset[Module]:
    biased: set[Module] = set()
    if spec.qkv_bias:
        biased |= {Module.Q, Module.K, Module.V}
    if spec.o_bias:
        biased.add(Module.O)
    if spec.mlp_bias:
        biased |= {Module.GATE, Module.UP, Module.DOWN}
    return frozenset(biased)


def describe_base(
    folder: Path, dtype: Dtype, page_tokens: int, *, dummy: bool = False, abi: str | None = None
) -> BaseModel:
    """Everything about the base in `folder`. dummy: weights are generated, only config.json is read.

    abi: H_base, from whoever has hashed the weights already; they are hashed here when it is None.
    """
    config = read_config(folder)
    spec = spec_from_config(config)
    modules = base_modules(spec)
    if abi is None:
        weights = digest({"dummy": True}) if dummy else hash_weights(folder)
        abi = base_identity(spec, modules, weights).digest
    kv = spec.kv_shape(dtype.itemsize, page_tokens)
    return BaseModel(spec, modules, abi, kv, dtype, None if dummy else str(folder))


def base_identity(spec: DecoderSpec, modules: BaseModules, weights: str) -> BaseAbi:
    """H_base's record. weights: digest of the weight files."""
    return BaseAbi(
        weights=weights,
        config=digest({"spec": _plain(spec)}),
        transforms=digest({"revision": WEIGHT_TRANSFORM_REVISION}),
        target_map=target_map(modules),
    )


def hash_weights(folder: Path) -> str:
    """Digest over the names and bytes of the folder's weight files, hashed in parallel."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CallerError(
            ErrorCode.MODEL_SOURCE_MISSING, f"{folder} has no safetensors file; convert the model first"
        )
    with ThreadPoolExecutor(max_workers=4) as pool:
        try:
            return digest(dict(zip([f.name for f in files], pool.map(_sha256, files), strict=True)))
        except OSError as error:
            raise CallerError(
                ErrorCode.MODEL_SOURCE_MISSING, f"{error.filename} cannot be read: {error.strerror}"
            ) from error


def _sha256(path: Path) -> str:
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
    return hasher.hexdigest()


def _text(value: Any) -> str:
    return canonical(value).decode()


def _plain(value: Any) -> Any:
    """A record as canonical values: floats as their shortest decimal text."""
    if isinstance(value, bool) or value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    fields = getattr(type(value), "__dataclass_fields__")  # noqa: B009 - no attribute, says mypy
    return {name: _plain(getattr(value, name)) for name in fields}
