"""Configuration, parsed once. Options are what a user can decide; everything else is derived or a limit."""

from __future__ import annotations

import ipaddress
import re

import msgspec

from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.tool_formats import TOOL_FORMATS

DEVICES = ("cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "dummy")
BACKENDS = ("inline", "process")
LOADERS = ("inline", "process")
POLICIES = ("deficit", "fcfs", "resident-greedy", "clustered", "rank-bucketed")
"""`schedule.policy.POLICIES` by name, the default first."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine: model, device and sizes. None: derived from the model and the machine.

    model: folder with config.json. images_dir: where verified adapter images lie. pool_gb: size of the page
    pool in GiB. page_tokens: positions in a KV page. pipeline_depth: 0 or 1. token_budget: rows of a step, at
    least max_requests. backend: the model runs in the engine's process, or in one of its own that gets only
    packed plans. loader: host images are verified by the engine's thread, where the disk store has them, or
    brought into shared memory by a process. host_gb: host images together, in GiB. host_locked_gb: of them,
    in a region that a CUDA device locks and reads in place, in GiB; 0 for none. host_dir: where backends find
    host images; None where they lie in images_dir. adapter_share: part of the pool that adapters may take at
    first. share_prefixes: tenants that find one another's cached prefixes. adapter_floor: part of the pool
    below which running requests take no adapter's pages. prefix_cache: whether prefixes are cached at all.
    prefix_share: part of the pool that cached prefixes keep while several requests run. policy: who is let in
    first. early_abort_s: seconds from a request's arrival within which its first token must be possible; None
    refuses nobody for that. plan_log: file that receives every packed plan. scrub: fill freed pages with 0xFF
    (tests).
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
    loader: str = "inline"
    host_gb: float | None = None
    host_locked_gb: float | None = None
    host_dir: str | None = None
    adapter_share: float = 1.0
    share_prefixes: tuple[str, ...] = ()
    adapter_floor: float = 0.0
    prefix_cache: bool = True
    prefix_share: float = 0.0
    policy: str = POLICIES[0]
    early_abort_s: float | None = None
    plan_log: str | None = None
    scrub: bool = False

    def __post_init__(self) -> None:
        _one_of("device", self.device, DEVICES)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        _one_of("backend", self.backend, BACKENDS)
        _one_of("loader", self.loader, LOADERS)
        _one_of("policy", self.policy, POLICIES)
        if self.host_gb is not None and not 0 < self.host_gb < 1 << 20:
            raise CallerError(
                ErrorCode.CONFIG_INVALID, f"host_gb must be above 0, got {self.host_gb}", param="host_gb"
            )
        _locked_size(self)
        for part in ("adapter_share", "adapter_floor", "prefix_share"):
            if not 0 <= getattr(self, part) <= 1:
                raise _invalid(part, f"{part} must be from 0 to 1, got {getattr(self, part)}")
        if self.prefix_share and not self.prefix_cache:
            raise _invalid(
                "prefix_share", f"prefix_share is {self.prefix_share} where no prefix is cached; leave it out"
            )
        if self.early_abort_s is not None and not 0.001 <= self.early_abort_s < 86400:
            raise _invalid(
                "early_abort_s",
                f"early_abort_s must be from 0.001 seconds to less than a day, got {self.early_abort_s}",
            )
        if self.pool_gb is not None and not 0 < self.pool_gb < 1 << 20:
            raise CallerError(
                ErrorCode.CONFIG_INVALID, f"pool_gb must be above 0, got {self.pool_gb}", param="pool_gb"
            )
        for name in ("max_model_len", "max_requests", "token_budget", "page_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise CallerError(
                    ErrorCode.CONFIG_INVALID, f"{name} must be at least 1, got {value}", param=name
                )
        if self.token_budget is not None and self.token_budget < self.max_requests:
            raise CallerError(
                ErrorCode.CONFIG_INVALID,
                f"token_budget {self.token_budget} is below max_requests {self.max_requests}, and each "
                "running request "
                "may take a row of every step; raise it or lower max_requests",
                param="token_budget",
            )


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise CallerError(
            ErrorCode.CONFIG_INVALID, f"{name} must be one of {', '.join(choices)}, got {value!r}", param=name
        )


LOOPBACK_NAMES = ("localhost",)
TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
SERVED_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[A-Za-z0-9.:\[\]_-]+")
TEXTS = ("adapter", "base")
LOG_LEVELS = ("debug", "info", "warning", "error")
DEFAULT_DRAIN_S = 30.0
DEFAULT_STORE_GB = 32.0


def _locked_size(config: EngineConfig) -> None:
    wanted = config.host_locked_gb
    if wanted is None:
        return
    if not 0 <= wanted < 1 << 20:
        raise _invalid("host_locked_gb", f"host_locked_gb must be at least 0, got {wanted}")
    if wanted and config.loader != "process":
        raise _invalid(
            "host_locked_gb",
            f"host_locked_gb locks memory that a loader process fills; with the {config.loader} loader it "
            "must be 0",
        )
    if wanted and config.device == "cpu":
        raise _invalid("host_locked_gb", "host_locked_gb locks memory for a CUDA device; on cpu it must be 0")


def _sharing_tenants(tenants: tuple[str, ...]) -> None:
    for tenant in tenants:
        if not TENANT.fullmatch(tenant):
            raise _invalid(
                "share_prefixes",
                f"tenant {tenant[:40]!r} must be 1 to 128 letters, digits or . _ : -, beginning with a "
                "letter or digit",
            )
    if tenants and len(set(tenants)) != len(tenants):
        raise _invalid("share_prefixes", f"share_prefixes names a tenant twice: {', '.join(tenants)}")
    if len(tenants) == 1:
        raise _invalid(
            "share_prefixes",
            f"tenant {tenants[0]!r} alone has nobody to share prefixes with; name at least two",
        )


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `loraplex serve` was asked for. `engine` makes the engine's part of it.

    model: folder or GGUF file; None with demo. served_model_name: what clients call the base, None for the
    folder's name. cors_origins: web pages of these origins may call, `*` for all. adapters: (alias, source).
    adapter_dirs: folders whose subfolders are registered, and the only places that remote callers may load
    from; also URL prefixes. adapter_dir_late: a name that is not known is looked for there again.
    strict_base: refuse adapters that name another base model. adapter_text: whose chat template and tokens an
    adapter uses that was registered without a choice, its own or the base's. catalog: URL of its database,
    None for one that ends with the server. store_gb: limit of the store of downloaded adapters, GiB.
    api_key_file: without one, only loopback. expose_without_keys: listen elsewhere all the same. log_prompts:
    prompts may stand in the log. host_gb: adapter images in host memory, in GiB. host_locked_gb,
    adapter_floor, prefix_cache, prefix_share, share_prefixes, policy, early_abort_s: see `EngineConfig`.
    drain_s: how long open requests may go on after SIGTERM. tool_formats: (alias, how calls are written);
    alias None for every model but adapters whose cards say it.
    """

    model: str | None = None
    demo: bool = False
    served_model_name: str | None = None
    cors_origins: tuple[str, ...] = ()
    adapters: tuple[tuple[str, str], ...] = ()
    adapter_dirs: tuple[str, ...] = ()
    adapter_dir_late: bool = True
    strict_base: bool = False
    adapter_text: str = "adapter"
    host: str = "127.0.0.1"
    port: int = 8000
    device: str = "cpu"
    dtype: str = "auto"
    pool_gb: float | None = None
    max_model_len: int | None = None
    load_format: str = "auto"
    catalog: str | None = None
    store_gb: float = DEFAULT_STORE_GB
    api_key_file: str | None = None
    expose_without_keys: bool = False
    log_level: str = "info"
    log_json: bool = False
    log_prompts: bool = False
    drain_s: float = DEFAULT_DRAIN_S
    share_prefixes: tuple[str, ...] = ()
    host_gb: float | None = None
    host_locked_gb: float | None = None
    adapter_floor: float = 0.0
    prefix_cache: bool = True
    prefix_share: float = 0.0
    policy: str = POLICIES[0]
    early_abort_s: float | None = None
    tool_formats: tuple[tuple[str | None, str], ...] = ()

    def __post_init__(self) -> None:
        if self.demo == (self.model is not None):
            raise _invalid("model", "give a model folder or --demo, one of them")
        _check_names(self.served_model_name, self.cors_origins)
        _one_of("log_level", self.log_level, LOG_LEVELS)
        _one_of("adapter_text", self.adapter_text, TEXTS)
        if not 1 <= self.port <= 65535:
            raise _invalid("port", f"port must be from 1 to 65535, got {self.port}")
        if not 0 <= self.drain_s < 86400:
            raise _invalid(
                "drain_s", f"drain_s must be at least 0 seconds and below a day, got {self.drain_s}"
            )
        if not 0 < self.store_gb < 1 << 20:
            raise _invalid("store_gb", f"store_gb must be above 0, got {self.store_gb}")
        _check_formats(self.tool_formats)
        names = [alias for alias, _ in self.adapters]
        for alias in names:
            if names.count(alias) > 1:
                raise _invalid("adapter", f"adapter {alias!r} is given {names.count(alias)} times")
        if self.api_key_file is None and not self.expose_without_keys and not is_loopback(self.host):
            raise _invalid(
                "host",
                f"without keys the server listens on loopback only, not on {self.host}; "
                "give --api-key-file, or --expose-without-keys to serve anybody who can reach it",
            )
        _sharing_tenants(self.share_prefixes)
        self.engine("model", "images")  # refuses what an engine would refuse, before anything is started

    def tool_format_of(self, alias: str | None, own: str | None = None) -> str | None:
        """How a model writes calls of tools, None where only its template says it. own: what an adapter's
        card says.
        """
        given = dict(self.tool_formats)
        return (given.get(alias) if alias is not None else None) or own or given.get(None)

    def engine(self, folder: str, images_dir: str) -> EngineConfig:
        """Configuration of the engine over the model in `folder`."""
        return EngineConfig(
            model=folder,
            images_dir=images_dir,
            device=self.device,
            dtype=self.dtype,
            pool_gb=self.pool_gb,
            max_model_len=self.max_model_len,
            load_format=self.load_format,
            loader="process",
            host_gb=self.host_gb,
            host_locked_gb=self.host_locked_gb,
            adapter_floor=self.adapter_floor,
            prefix_cache=self.prefix_cache,
            prefix_share=self.prefix_share,
            share_prefixes=self.share_prefixes,
            policy=self.policy,
            early_abort_s=self.early_abort_s,
        )


def _check_names(served: str | None, origins: tuple[str, ...]) -> None:
    if served is not None and not SERVED_NAME.fullmatch(served):
        raise _invalid(
            "served_model_name",
            f"--served-model-name takes letters, digits and . _ : / -, got {served!r:.80}",
        )
    for origin in origins:
        if not ORIGIN.fullmatch(origin):
            raise _invalid(
                "cors_origins", f"--cors-origins takes * or SCHEME://HOST[:PORT], got {origin!r:.80}"
            )


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reached from this host only."""
    if host in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_adapter(text: str) -> tuple[str, str]:
    """`NAME=SOURCE` of the command line."""
    alias, equals, source = text.partition("=")
    if not alias or not equals or not source:
        raise _invalid("adapter", f"--adapter takes NAME=SOURCE, got {text!r}")
    return alias, source


def parse_tool_format(text: str) -> tuple[str | None, str]:
    """`FORMAT` or `ALIAS=FORMAT` of the command line."""
    alias, equals, form = text.rpartition("=")
    return (alias if equals else None), form


def _check_formats(formats: tuple[tuple[str | None, str], ...]) -> None:
    for at, (alias, form) in enumerate(formats):
        if alias == "" or form not in TOOL_FORMATS:
            raise _invalid(
                "tool_format",
                f"--tool-format takes one of {', '.join(TOOL_FORMATS)}, or ALIAS= and one of them, got "
                f"{form!r}",
            )
        if alias in [earlier for earlier, _ in formats[:at]]:
            raise _invalid("tool_format", f"--tool-format is given twice for {alias or 'every model'}")


def _invalid(param: str, message: str) -> CallerError:
    return CallerError(ErrorCode.CONFIG_INVALID, message, param=param)
