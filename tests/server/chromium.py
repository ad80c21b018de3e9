"""A headless Chromium for tests: Debian's binary, spoken to over a pipe in its DevTools protocol; no port, no
driver, no library.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import pause

_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-component-update",
    "--remote-debugging-pipe",
)  # fmt: skip


def binary() -> str | None:
    """The browser, None where there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


def require() -> str:
    """The browser; where continuous integration lacks it the test fails, elsewhere it is skipped."""
    found = binary()
    if found is None and os.environ.get("CI"):
        pytest.fail("Chromium is not installed; tools/setup_services.py installs it")
    if found is None:
        pytest.skip("Chromium is not installed (on Debian: apt-get install chromium)")
    return found


class Tab:
    """One page. problems: what it wrote to its console as an error, threw, or was forbidden by its policy."""

    def __init__(self, reader: asyncio.StreamReader, writer: Any) -> None:
        self._reader, self._writer = reader, writer
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number, self._session = 0, ""
        self.problems: list[str] = []
        self.requested: list[str] = []

    async def listen(self) -> None:
        """Read what the browser says until it ends."""
        while True:
            message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            if "id" in message:
                self._answers.pop(message["id"]).set_result(message)
                continue
            about = message.get("params", {})
            match message["method"]:
                case "Runtime.exceptionThrown":
                    self.problems.append(json.dumps(about["exceptionDetails"]))
                case "Runtime.consoleAPICalled" if about["type"] in ("error", "warning"):
                    self.problems.append(json.dumps(about["args"]))
                case "Log.entryAdded" if about["entry"]["level"] in ("error", "warning"):
                    self.problems.append(about["entry"]["text"])
                case "Network.requestWillBeSent":
                    self.requested.append(about["request"]["url"])

    async def ask(self, method: str, **fields: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        self._number += 1
        future = asyncio.get_running_loop().create_future()
        self._answers[self._number] = future
        message = {"id": self._number, "method": method, "params": fields}
        if self._session:
            message["sessionId"] = self._session
        self._writer.write(json.dumps(message).encode() + b"\0")
        answer = await future
        assert "error" not in answer, (method, answer["error"])
        return dict(answer["result"])

    async def begin(self) -> None:
        """Attach to a page of its own."""
        target = (await self.ask("Target.createTarget", url="about:blank"))["targetId"]
        attached = await self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.ask(f"{domain}.enable")

    async def size(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        """The window, and the colours that the system asks for."""
        await self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.ask("Emulation.setEmulatedMedia", features=[scheme])

    async def open(self, url: str) -> None:
        """Go to an address."""
        await self.ask("Page.navigate", url=url)

    async def value(self, expression: str) -> Any:
        """What an expression of the page is."""
        answer = await self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression of the page is true."""
        while not await self.value(f"Boolean({expression})"):
            await pause()

    async def press(self, key: str, text: str = "") -> None:
        """A key by its name."""
        code = {"Tab": 9, "Enter": 13, "Escape": 27}[key]
        fields = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.ask("Input.dispatchKeyEvent", type="keyDown", **fields, **({"text": text} if text else {}))
        await self.ask("Input.dispatchKeyEvent", type="keyUp", **fields)

    async def type(self, text: str) -> None:
        """A text into the field that has the focus."""
        await self.ask("Input.insertText", text=text)

    async def screenshot(self) -> bytes:
        """What is to be seen, as PNG."""
        return base64.b64decode((await self.ask("Page.captureScreenshot", format="png"))["data"])


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Tab]:
    """A browser with one page; its profile lies in `folder`."""
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()

    # The protocol reads descriptor 3 and writes 4: a shell moves the pipes there.
    moved = f'exec "$@" 3</proc/self/fd/{to_read} 4>/proc/self/fd/{from_write}'
    process = await asyncio.create_subprocess_exec(
        "/bin/sh",
        "-c",
        moved,
        "sh",
        require(),
        *_OPTIONS,
        f"--user-data-dir={folder / 'profile'}",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        pass_fds=(to_read, from_write),
        env={**os.environ, "HOME": str(folder)},
    )
    os.close(to_read)
    os.close(from_write)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=64 << 20)
    incoming, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(from_read, "rb")
    )
    writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(to_write, "wb"))
    tab = Tab(reader, writer)
    listening = asyncio.create_task(tab.listen())
    try:
        await tab.begin()
        yield tab
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        process.kill()
        await process.wait()
        writer.close()
        incoming.close()
        await asyncio.sleep(0)
