"""A viewer of the operator's page: the application's side of a connection whose client takes pictures as it
likes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.server.rig import Front


def write_keys(file: Path, *keys: tuple[str, str, str]) -> str:
    """A key file of (key, tenant, role)."""
    rows = [
        json.dumps({"sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant, "role": role})
        for key, tenant, role in keys
    ]
    file.write_text("\n".join(rows))
    return str(file)


class Viewer:
    """takes: messages that its client reads; None for all. messages: what was sent. full: set once it reads
    no more.
    """

    def __init__(self, takes: int | None = None) -> None:
        self._takes = takes
        self._asked = False
        self.status = 0
        self.gone = asyncio.Event()
        self.full = asyncio.Event()
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.taken = 0

    async def receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if self._takes is not None and self.taken >= self._takes:
            self.full.set()
            await asyncio.Event().wait()
        self.taken += 1
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.messages.put_nowait(message)

    async def body(self) -> bytes:
        """The next part of the answer."""
        return bytes((await self.messages.get())["body"])

    async def picture(self) -> dict[str, Any]:
        """The next picture, or an error's body."""
        text = (await self.body()).decode()
        return dict(json.loads(text.partition("\n\n")[0].removeprefix("data: ")))

    async def failure(self) -> str:
        """The code of the error that ends the stream."""
        while True:
            picture = await self.picture()
            if "error" in picture:
                return str(picture["error"]["code"])

    async def end(self) -> None:
        """Read until the stream ends."""
        while True:
            if not await self.body():
                return


@asynccontextmanager
async def viewing(front: Front, key: str | None = None, takes: int | None = None) -> AsyncIterator[Viewer]:
    """A viewer with a key, which goes away when the context ends."""
    viewer = Viewer(takes)
    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    scope = {"type": "http", "method": "GET", "path": "/ui/events", "headers": headers}
    serving = asyncio.ensure_future(front.app(scope, viewer.receive, viewer.send))
    try:
        yield viewer
    finally:
        viewer.gone.set()
        await serving


def named_rows(picture: dict[str, Any]) -> list[str]:
    """Names of the adapters of a picture."""
    rows: Iterable[dict[str, Any]] = picture["adapters"]["rows"]
    return sorted(row["name"] for row in rows)
