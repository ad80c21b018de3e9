"""`loraplex top`: the essentials of a running server in a terminal, from the stream of the operator's page.

Specification: interface "Command line".
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from loraplex.server.administration.adapter_commands import DEFAULT_URL, AsJson, Key, Url
from loraplex.server.administration.admin_client import RemoteServer

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

Once = Annotated[bool, Parameter(negative="", help="Print the figures of now, and end.")]
_ROWS = 15
_RECENT_S = 5
_MIB = 1 << 20
_PAGES = (
    ("adapter", "adapters"),
    ("kv", "requests"),
    ("prefix", "prefixes"),
    ("reserved", "reserved"),
    ("free", "free"),
)


def top(*, url: Url = DEFAULT_URL, api_key: Key = None, once: Once = False, as_json: AsJson = False) -> None:
    """Show what a server does now: requests, pages, adapters, tenants; --json prints them once."""
    from rich.console import Console
    from rich.live import Live

    pictures = RemoteServer(url, api_key).pictures()
    picture = next(pictures)
    if as_json:
        print(json.dumps(picture, indent=2))
        return
    console = Console()
    if once:
        console.print(_shown(picture))
        return
    try:
        with Live(_shown(picture), console=console, auto_refresh=False) as live:
            for picture in pictures:
                live.update(_shown(picture), refresh=True)
    except KeyboardInterrupt:
        pass  # the usual way to leave


def _shown(picture: dict[str, Any]) -> RenderableType:
    """One picture as text and tables."""
    from rich.console import Group

    server, pool, requests = picture["server"], picture["pool"], picture["requests"]
    state = "ready" if server["ready"] and server["answers"] else "not ready"
    recent = [second for second in picture["seconds"] if second["s"] >= picture["now_s"] - _RECENT_S]
    tokens = sum(second["tokens"] for second in recent) / max(1, len(recent))
    first = [second["first_ms"] for second in recent if second["first_ms"] is not None]
    reasons = ", ".join(f"{n} {reason}" for reason, n in picture["queue"]["reasons"].items())
    waiting = f"{requests.get('waiting', 0)} waiting{': ' if reasons else ''}{reasons}"
    delay = f", first after {sum(first) / len(first):,.0f} ms" if first else ""
    pages = ", ".join(f"{pool[kind]:,} {what}" for kind, what in _PAGES)
    lines = [
        f"{server['base']}  {state}  loraplex {server['version']}",
        f"requests  {requests.get('running', 0)} running, {waiting}",
        f"tokens    {tokens:,.0f} a second{delay}",
        f"pages     {pool['total']:,}: {pages}",
        "",
    ]
    return Group(*lines, _adapters(picture["adapters"]), "", _tenants(picture["tenants"]))


def _table(*heads: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for at, head in enumerate(heads):
        table.add_column(head, justify="left" if at == 0 or head == "state" else "right", overflow="fold")
    return table


def _adapters(adapters: dict[str, Any]) -> Table:
    """Those with the most requests first."""
    table = _table("adapter", "revision", "state", "leases", "found on device", "MiB")
    rows = sorted(adapters["rows"], key=lambda row: (-row["leases"], -row["device_bytes"], row["name"]))
    for row in rows[:_ROWS]:
        asked = row["hits"] + row["misses"]
        table.add_row(
            row["name"],
            str(row["revision"] or "-"),
            f"{row['state']}{', pinned' if row['pinned'] else ''}",
            str(row["leases"]),
            f"{row['hits']} of {asked}" if asked else "-",
            f"{row['device_bytes'] / _MIB:,.1f}",
        )
    return table


def _tenants(tenants: list[dict[str, Any]]) -> Table:
    table = _table("tenant", "running", "waiting", "ended", "failed", "output tokens")
    for row in tenants[:_ROWS]:
        figures = (row[name] for name in ("running", "waiting", "ended", "failed", "output_tokens"))
        table.add_row(row["tenant"], *(f"{figure:,}" for figure in figures))
    return table
