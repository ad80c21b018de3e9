"""The command line: the only place that wires everything. Heavy libraries are imported inside the commands.

Owns what is printed for people and the exit status: 0 done, 1 our fault or no capacity, 2 the caller's to
mend. Specification: interface "Command line".
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal, NoReturn

from cyclopts import App, Parameter

from loraplex import __version__
from loraplex.bench.bench_commands import bench_app
from loraplex.catalog.catalog_commands import catalog_app
from loraplex.config import DEFAULT_DRAIN_S, DEFAULT_STORE_GB, ServeConfig, parse_adapter, parse_tool_format
from loraplex.core.errors import CallerError, ErrorCode, LoraplexError, Root
from loraplex.serve_options import (
    AdapterFloorOption,
    AdapterOption,
    CatalogOption,
    DemoOption,
    DeviceOption,
    DrainOption,
    DtypeOption,
    EarlyAbortOption,
    ExposeOption,
    HostLockedOption,
    HostMemoryOption,
    KeyFileOption,
    LateOption,
    LengthOption,
    ListenOption,
    LoadFormatOption,
    LogJsonOption,
    LogLevelOption,
    LogPromptsOption,
    ModelOption,
    OriginsOption,
    PolicyOption,
    PoolOption,
    PortOption,
    PrefixCacheOption,
    PrefixShareOption,
    RootOption,
    ServedNameOption,
    SharePrefixesOption,
    StoreOption,
    StrictOption,
    TensorParallelOption,
    TextOption,
    ToolFormatOption,
)
from loraplex.server.administration.adapter_commands import DEFAULT_URL, Key, Url, adapters_app
from loraplex.server.administration.admin_client import RemoteServer
from loraplex.server.administration.top_commands import top

AsJson = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON.")]
app = App(
    name="loraplex",
    help="Serves many LoRA adapters from one resident base model.",
    version=__version__,
    help_format="plaintext",
)
app.command(adapters_app)
app.command(catalog_app)
app.command(bench_app)
app.command(top)


def _unsupported(option: str, seen: object) -> CallerError:
    return CallerError(
        ErrorCode.UNSUPPORTED_OPTION,
        f"{option} {seen} is not implemented yet; leave it out",
        param=option.lstrip("-"),
    )


@app.command
def serve(
    model: ModelOption = None,
    *,
    demo: DemoOption = False,
    adapter: AdapterOption = (),
    adapter_dir: RootOption = (),
    adapter_dir_late: LateOption = True,
    strict_base: StrictOption = False,
    adapter_text: TextOption = "adapter",
    served_model_name: ServedNameOption = None,
    cors_origins: OriginsOption = (),
    host: ListenOption = "127.0.0.1",
    port: PortOption = 8000,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "auto",
    pool_gb: PoolOption = None,
    host_gb: HostMemoryOption = None,
    host_locked_gb: HostLockedOption = None,
    max_model_len: LengthOption = None,
    tensor_parallel: TensorParallelOption = 1,
    policy: PolicyOption = "deficit",
    api_key_file: KeyFileOption = None,
    expose_without_keys: ExposeOption = False,
    catalog: CatalogOption = None,
    store_gb: StoreOption = DEFAULT_STORE_GB,
    tool_format: ToolFormatOption = (),
    load_format: LoadFormatOption = "auto",
    log_level: LogLevelOption = "info",
    log_json: LogJsonOption = False,
    log_prompts: LogPromptsOption = False,
    drain_s: DrainOption = DEFAULT_DRAIN_S,
    adapter_floor: AdapterFloorOption = 0.0,
    prefix_cache: PrefixCacheOption = True,
    prefix_share: PrefixShareOption = 0.0,
    share_prefixes: SharePrefixesOption = "",
    early_abort_s: EarlyAbortOption = None,
) -> int:
    """Serve a base model and its adapters over HTTP."""
    if tensor_parallel != 1:
        raise _unsupported("--tensor-parallel", tensor_parallel)
    config = ServeConfig(
        model=model,
        demo=demo,
        adapters=tuple(parse_adapter(text) for text in adapter),
        adapter_dirs=adapter_dir,
        adapter_dir_late=adapter_dir_late,
        strict_base=strict_base,
        adapter_text=adapter_text,
        served_model_name=served_model_name,
        cors_origins=cors_origins,
        host=host,
        port=port,
        device=device,
        dtype=dtype,
        pool_gb=pool_gb,
        max_model_len=max_model_len,
        load_format=load_format,
        catalog=catalog,
        store_gb=store_gb,
        api_key_file=api_key_file,
        expose_without_keys=expose_without_keys,
        log_level=log_level,
        log_json=log_json,
        log_prompts=log_prompts,
        drain_s=drain_s,
        share_prefixes=tuple(share_prefixes.split(",")) if share_prefixes else (),
        host_gb=host_gb,
        host_locked_gb=host_locked_gb,
        adapter_floor=adapter_floor,
        prefix_cache=prefix_cache,
        prefix_share=prefix_share,
        policy=policy,
        early_abort_s=early_abort_s,
        tool_formats=tuple(map(parse_tool_format, tool_format)),
    )
    return run_server(config)


def run_server(config: ServeConfig) -> int:
    """Everything of `serve` after the command line: logging, model folder, private folder, the
    server's life.
    """
    from loraplex.build.model_folder import resolve_model
    from loraplex.model.converted_models import cache_root
    from loraplex.process.logs import configure_logging
    from loraplex.process.workdir import private_folder
    from loraplex.server.administration.register import check_sources
    from loraplex.server.announce import Announcer
    from loraplex.server.app import create_app
    from loraplex.server.run import serve as serve_until_told

    configure_logging(config.log_level, as_json=config.log_json)
    check_sources(config)
    folder, base_name = resolve_model(config)
    with private_folder(cache_root() / "run") as images:
        return asyncio.run(serve_until_told(config, folder, base_name, images, create_app, Announcer(config)))


@app.command
def provenance(request_id: str, /, *, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Show what answered a request as JSON: base, artifact, kernel and binding digests, attempt,
    generations.
    """
    print(json.dumps(RemoteServer(url, api_key).provenance(request_id), indent=2))


@app.command
def verify(
    adapter: str,
    /,
    *,
    base: Path,
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16",
    page_tokens: int = 16,
    manifest: Path | None = None,
    strict_base: Annotated[bool, Parameter(negative="")] = False,
    text: Literal["adapter", "base"] = "adapter",
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Read an adapter as a server would, and print what it is or why it is refused.

    Args:
        adapter: PEFT folder, or a remote source (s3://, hf://OWNER/NAME@COMMIT, ...), which is downloaded.
        base: folder of the base model.
        dtype: element type that the server would use.
        page_tokens: positions in a page, which sets the page's size.
        strict_base: refuse an adapter that names another base, or another revision of it, as its own.
        manifest: file with a manifest that the adapter must have, as --json printed it, or that of a whole
            launch.
        text: whose chat template, end tokens and added tokens the adapter's requests would use.
        as_json: print JSON.
    """
    from loraplex.adapters.verification import verify_source
    from loraplex.artifact.verify import check_same, expected_manifest, refusal_record

    try:
        expected = None if manifest is None else expected_manifest(_read_manifest(manifest), str(manifest))
        found = verify_source(adapter, base, dtype, page_tokens, strict_base=strict_base, text=text)
        if expected is not None:
            check_same(expected, found.manifest)
    except LoraplexError as error:
        if not as_json:
            raise
        print(json.dumps(refusal_record(error), indent=2))
        return 2 if error.root is Root.CALLER else 1
    print(json.dumps(found.record(), indent=2) if as_json else "\n".join(found.lines()))
    return 0


def _read_manifest(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise CallerError(
            ErrorCode.CONFIG_INVALID,
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}",
            param="manifest",
        ) from error


@app.command
def sim(
    *,
    seed: Annotated[int, Parameter(help="Which timeline.")] = 0,
    ticks: Annotated[int, Parameter(help="Steps of the engine while faults strike.")] = 10_000,
    depth: Annotated[Literal[0, 1] | None, Parameter(help="Pipeline depth instead of the seed's.")] = None,
    workers: Annotated[int, Parameter(help="More than 1: so many engines behind one placer, no faults.")] = 1,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help="Print JSON.")] = False,
) -> int:
    """Attack the control plane over a virtual device: faults first, then everything must finish."""
    from loraplex.sim.faults import draw_setup
    from loraplex.sim.report import report_lines
    from loraplex.sim.simulation import simulate

    if ticks < 1 or seed < 0:
        raise CallerError(
            ErrorCode.CONFIG_INVALID,
            f"seed must be at least 0 and ticks at least 1, got {seed} and {ticks}",
            param="ticks",
        )
    if workers != 1:
        return _sim_fleet(seed, ticks, workers, as_json)
    report = simulate(seed, ticks, setup=draw_setup(seed, depth=depth))
    fixed = "" if depth is None else f" --depth {depth}"
    command = f"loraplex sim --seed {seed} --ticks {ticks}{fixed}"
    if as_json:
        print(json.dumps({**report.record(), "replay": command}, indent=2))
    else:
        print("\n".join(report_lines(report, command)))
    return 1 if report.violation is not None else 0


def _sim_fleet(seed: int, ticks: int, workers: int, as_json: bool) -> int:
    from loraplex.sim.fleet import fleet_lines, simulate_fleet

    report = simulate_fleet(seed, ticks, workers)
    print(json.dumps(report.record(), indent=2) if as_json else "\n".join(fleet_lines(report)))
    return 1 if report.violation is not None else 0


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    """A command that is told to end lets go of what it has started, as one that is interrupted does."""
    sys.exit(128 + signum)


def main(words: Sequence[str] | None = None) -> None:
    """Entry of the `loraplex` command. words: instead of the process's own."""
    before = signal.signal(signal.SIGTERM, _end)
    try:
        status = app(sys.argv[1:] if words is None else words)
    except KeyboardInterrupt:
        print("loraplex: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except LoraplexError as error:
        print(f"loraplex: {error.message} [{error.code.value}]", file=sys.stderr)
        logging.getLogger(__name__).debug("refused", exc_info=True)
        sys.exit(2 if error.root is Root.CALLER else 1)
    finally:
        signal.signal(signal.SIGTERM, before)
    sys.exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
