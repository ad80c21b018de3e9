"""`loraplex adapters`: an operator's commands over the adapters of a running server.

Specification: interface "Command line".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from loraplex.server.administration.admin_client import RemoteServer

adapters_app = App(name="adapters", help="Adapters of a running server.")
AsJson = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON.")]
Url = Annotated[str, Parameter(name="--url", env_var="LORAPLEX_URL", help="Where the server is.")]
Key = Annotated[str | None, Parameter(name="--api-key", env_var="LORAPLEX_API_KEY", help="Key to present.")]
Text = Annotated[
    Literal["adapter", "base"] | None,
    Parameter(help="Whose chat template, end tokens and added tokens its requests use."),
]
DEFAULT_URL = "http://127.0.0.1:8000"
_PIPE_COLUMNS = 1000


@adapters_app.command(name="list")
def list_adapters(*, url: Url = DEFAULT_URL, api_key: Key = None, as_json: AsJson = False) -> None:
    """List adapters, their revisions and where they are."""
    adapters = RemoteServer(url, api_key).adapters()
    if as_json:
        print(json.dumps(adapters, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    for head in ("alias", "revision", "method", "ranks", "state", "leases", "device", "semantic digest"):
        table.add_column(head, overflow="fold")
    for item in adapters:
        ranks = "/".join(map(str, item["ranks"])) or "-"
        size = f"{item['tier_bytes']['device'] / 1024:,.0f} KiB"
        row = (item["alias"], item["revision"], item["method"], ranks, item["state"], item["leases"], size)
        table.add_row(*map(str, row), item["semantic_digest"][:12])
    # Whoever reads it through a pipe has no width.
    width = None if sys.stdout.isatty() else _PIPE_COLUMNS
    Console(highlight=False, width=width).print(table if adapters else "no adapters")


@adapters_app.command
def show(alias: str, /, *, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Show one adapter as JSON."""
    print(json.dumps(RemoteServer(url, api_key).adapter(alias), indent=2))


@adapters_app.command
def add(
    alias: str, source: str, /, *, text: Text = None, url: Url = DEFAULT_URL, api_key: Key = None
) -> None:
    """Register the adapter in the folder SOURCE under a new ALIAS."""
    _print_applied(RemoteServer(url, api_key).add(alias, _absolute(source), text))


@adapters_app.command
def swap(
    alias: str,
    source: str,
    /,
    *,
    expected: Annotated[int | None, Parameter(help="Replace only this revision.")] = None,
    drain: Annotated[
        bool, Parameter(negative="", help="Ask for no room beside the old revision; new requests wait.")
    ] = False,
    text: Text = None,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Publish the adapter in SOURCE as a new revision of ALIAS; requests under way finish on the old one."""
    server = RemoteServer(url, api_key)
    _print_applied(server.swap(alias, _absolute(source), expected, drain=drain, text=text))


@adapters_app.command
def remove(alias: str, /, *, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Take ALIAS away."""
    RemoteServer(url, api_key).remove(alias)
    print(f"{alias} is removed")


@adapters_app.command
def pin(alias: str, /, *, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Keep ALIAS on the device, whatever it stands for."""
    print(f"{alias} is pinned, {RemoteServer(url, api_key).act(alias, 'pin')['state']}")


@adapters_app.command
def unpin(alias: str, /, *, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Let ALIAS be evicted again."""
    print(f"{alias} is not pinned, {RemoteServer(url, api_key).act(alias, 'unpin')['state']}")


@adapters_app.command
def prefetch(alias: str, /, *, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Load ALIAS now, if that takes nothing that requests will want."""
    print(f"{alias} is {RemoteServer(url, api_key).act(alias, 'prefetch')['state']}")


@adapters_app.command
def revoke(alias: str, /, *, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """End what ALIAS stands for, under every name, and the requests on it."""
    print(f"revoked: {', '.join(RemoteServer(url, api_key).act(alias, 'revoke')['revoked'])}")


@adapters_app.command
def limits(
    *,
    pool_share: Annotated[float | None, Parameter(help="Part of the page pool, 0 to 1.")] = None,
    resident: Annotated[int | None, Parameter(help="Adapters on the device.")] = None,
    host_gb: Annotated[float | None, Parameter(help="Adapter images in host memory, in GiB.")] = None,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Show or change what adapters may take, while the server serves."""
    changes = {"pool_share": pool_share, "resident_adapters": resident, "host_gb": host_gb}
    known = {name: value for name, value in changes.items() if value is not None}
    print(json.dumps(RemoteServer(url, api_key).limits(known), indent=2))


def _print_applied(item: dict[str, Any]) -> None:
    applied = f"{item['tensors_applied']} of {item['tensors_total']} tensors applied"
    print(f"{item['alias']}@{item['revision']}: {applied}, {item['semantic_digest'][:12]}, {item['state']}")


def _absolute(source: str) -> str:
    """A local path as the server sees it; the server has another working folder."""
    return source if "://" in source else str(Path(source).absolute())
