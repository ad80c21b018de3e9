"""Configuration, parsed once. Options are what a user can decide; everything else is derived or a limit."""

from __future__ import annotations

import msgspec

from loraplex.core.errors import CallerError, ErrorCode

DEVICES = ("cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "dummy")
BACKENDS = ("inline", "process")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine: model, device and sizes. None: derived from the model and the machine.

    model: folder with config.json. images_dir: where verified adapter images lie. pool_gb: size of the page pool in
    GiB. page_tokens: positions in a KV page. pipeline_depth: 0 or 1. backend: the model runs in the engine's process,
    or in one of its own that gets only packed plans. plan_log: file that receives every packed plan. scrub: fill freed
    pages with 0xFF (tests).
    """

    model: str
    images_dir: str
    device: str = "cpu"
    dtype: str = "auto"
    pool_gb: float | None = None
    max_model_len: int | None = None
    max_requests: int = 256
    token_budget: int | None = None
    pipeline_depth: int = 1
    page_tokens: int = 16
    load_format: str = "auto"
    backend: str = "inline"
    plan_log: str | None = None
    scrub: bool = False

    def __post_init__(self) -> None:
        _one_of("device", self.device, DEVICES)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        _one_of("backend", self.backend, BACKENDS)
        if self.pool_gb is not None and not 0 < self.pool_gb < 1 << 20:
            raise CallerError(ErrorCode.CONFIG_INVALID, f"pool_gb must be above 0, got {self.pool_gb}", param="pool_gb")
        for name in ("max_model_len", "max_requests", "token_budget", "page_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise CallerError(ErrorCode.CONFIG_INVALID, f"{name} must be at least 1, got {value}", param=name)


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise CallerError(
            ErrorCode.CONFIG_INVALID, f"{name} must be one of {', '.join(choices)}, got {value!r}", param=name
        )
