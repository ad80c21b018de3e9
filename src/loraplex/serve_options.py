"""Options of `loraplex serve` with their help, one type each. What they mean is `config.ServeConfig`'s."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from loraplex.core.tool_formats import TOOL_FORMATS

ModelOption = Annotated[str | None, Parameter(help="Model folder or GGUF file.")]
ListenOption = Annotated[str, Parameter(help="Address to listen on.")]
PortOption = Annotated[int, Parameter(help="Port to listen on.")]
DeviceOption = Annotated[Literal["cpu", "cuda"], Parameter(help="Where the model runs.")]
TensorParallelOption = Annotated[int, Parameter(help="Devices that share the model; 1 for now.")]
KeyFileOption = Annotated[str | None, Parameter(help="File of key hashes, tenants and roles.")]
LoadFormatOption = Annotated[
    Literal["auto", "dummy"], Parameter(help="dummy: random weights, only config.json is read.")
]
LogJsonOption = Annotated[bool, Parameter(negative="", help="Log one JSON object a line.")]
AdapterOption = Annotated[
    tuple[str, ...],
    Parameter(
        negative="",
        help="NAME=SOURCE: serve the adapter in SOURCE, a folder or s3://, hf:// and others, as NAME.",
    ),
]
RootOption = Annotated[
    tuple[str, ...],
    Parameter(
        negative="",
        help="Serve each adapter folder in it; the only place that clients may load from. Or a URL prefix.",
    ),
]
StrictOption = Annotated[
    bool, Parameter(negative="", help="Refuse adapters that were trained on another model by their own word.")
]
LateOption = Annotated[bool, Parameter(help="Look into --adapter-dir again for a name that is not known.")]
ServedNameOption = Annotated[
    str | None, Parameter(help="What clients call the base model; the folder's name by default.")
]
OriginsOption = Annotated[
    tuple[str, ...],
    Parameter(negative="", help="ORIGIN: web pages of it may call from a browser; * for every one."),
]
LogLevelOption = Annotated[
    Literal["debug", "info", "warning", "error"], Parameter(help="What is logged, to standard error.")
]
TextOption = Annotated[
    Literal["adapter", "base"],
    Parameter(
        help="Whose chat template, end tokens and added tokens an adapter uses that says nothing of it."
    ),
]
CatalogOption = Annotated[
    str | None,
    Parameter(
        help="Where names and revisions are kept: sqlite:////PATH or postgresql://...; else until the end."
    ),
]
HostLockedOption = Annotated[
    float | None,
    Parameter(help="Of them, page-locked for a CUDA device, in GiB; half of them and 4 at most by default."),
]
StoreOption = Annotated[float, Parameter(help="Most of the disk that downloaded adapters may take, in GiB.")]
LogPromptsOption = Annotated[
    bool, Parameter(negative="", help="Log what callers ask; without it no prompt is written anywhere.")
]
ToolFormatOption = Annotated[
    tuple[str, ...],
    Parameter(
        negative="",
        help=f"{', '.join(TOOL_FORMATS[:-1])} or {TOOL_FORMATS[-1]}: how calls of tools are written, in "
        "place of what the chat template shows; ALIAS=FORMAT for one adapter.",
    ),
]
DemoOption = Annotated[bool, Parameter(negative="", help="Serve the demo model, SmolLM2-135M-Instruct.")]
DtypeOption = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    Parameter(help="Type of weights and cache; auto is bfloat16 where the hardware multiplies it."),
]
PoolOption = Annotated[
    float | None, Parameter(help="Page pool for KV and adapters, in GiB; 1 on cpu, what is left on cuda.")
]
HostMemoryOption = Annotated[
    float | None, Parameter(help="Adapter images in host memory, in GiB; a quarter of it by default.")
]
LengthOption = Annotated[
    int | None, Parameter(help="Positions of one request at most; the model's, on cpu at most 8192.")
]
AdapterFloorOption = Annotated[
    float,
    Parameter(help="Part of the pool below which running requests take no adapter's pages, 0 to 1."),
]
PrefixCacheOption = Annotated[
    bool, Parameter(help="Keep prefixes and answers for requests that begin alike.")
]
PrefixShareOption = Annotated[
    float,
    Parameter(help="Part of the pool that cached prefixes keep while several requests run, 0 to 1."),
]
SharePrefixesOption = Annotated[
    str, Parameter(help="TENANT,...: tenants that find one another's cached prefixes; two at least.")
]
PolicyOption = Annotated[
    str,
    Parameter(
        help="Who runs next: deficit (the tenant with least service), fcfs, resident-greedy, clustered or "
        "rank-bucketed."
    ),
]
EarlyAbortOption = Annotated[
    float | None,
    Parameter(
        help="Refuse requests whose first token cannot come in so many seconds; under overload the oldest go."
    ),
]
DrainOption = Annotated[float, Parameter(help="Seconds that open requests may take after SIGTERM.")]
ExposeOption = Annotated[
    bool, Parameter(negative="", help="Listen beyond loopback although there are no keys.")
]
