"""The operator's page in a real browser: it shows what a server does, to whom may see it, asks before it
changes anything, and is used by keyboard and on a phone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.process import engines
from tests.server.chromium import Tab, browser, require
from tests.server.processes import Running, started
from tests.server.tiny_server import write_adapter
from tests.server.viewing import write_keys
from tests.waiting import run

pytestmark = [pytest.mark.long, pytest.mark.e2e]
KEYS = (("operator", "default", "admin"), ("tenant", "blue", "user"))
SHOWN = "document.getElementById('main')?.hidden === false"
NAMES = "[...document.querySelectorAll('#adapter-rows .link')].map((link) => link.textContent)"
FOCUS = "document.activeElement?.id || document.activeElement?.textContent"


@asynccontextmanager
async def page(tmp_path: Path) -> AsyncIterator[tuple[Running, Tab]]:
    """A server with two adapters and keys, and a browser."""
    require()
    folder = tmp_path / "adapters"
    write_adapter(folder / "one")
    write_adapter(folder / "two", seed=1)
    keys = write_keys(tmp_path / "keys", *KEYS)
    async with (
        started(tmp_path, engines.VIRTUAL, "real", adapter_dirs=[str(folder)], api_key_file=keys) as server,
        browser(tmp_path) as tab,
    ):
        await server.until_said("ready on")
        yield server, tab


async def sign_in(server: Running, tab: Tab, key: str) -> None:
    """Open the page and give it a key, by keyboard."""
    await tab.size(1280, 800)
    await tab.open(f"{server.url}/ui")
    await tab.until("document.activeElement?.id === 'key'")
    await tab.type(key)
    await tab.press("Enter", "\r")


def test_an_operator_sees_the_server_and_is_asked_before_a_change(tmp_path: Path) -> None:
    async def test() -> None:
        async with page(tmp_path) as (server, tab):
            await sign_in(server, tab, "operator")
            await tab.until(SHOWN)
            assert await tab.value(NAMES) == ["one", "two"]
            assert await tab.value("document.querySelectorAll('#pool-map rect').length") > 100
            headers = {"authorization": "Bearer operator"}
            fields = {"model": "one", "prompt": [70] * 8, "max_tokens": 4}
            answer = await server.http.post("/v1/completions", json=fields, headers=headers)
            assert answer.status_code == 200
            await tab.until("document.querySelector('#tenant-rows tr')?.cells[3]?.textContent === '1'")
            await tab.value("document.querySelector('#adapter-rows .link').focus()")
            await tab.press("Enter", "\r")
            await tab.until("document.getElementById('dialog').open")
            buttons = "[...document.querySelectorAll('#dialog-buttons button')]"
            pin = f"{buttons}.find((button) => button.textContent === 'Pin…')"
            await tab.value(f"{pin}.click()")
            await tab.until("document.getElementById('dialog-head').textContent === 'Pin one'")
            await tab.press("Escape")
            await tab.until("!document.getElementById('dialog').open")
            one = (await server.http.get("/v1/adapters/one", headers=headers)).json()
            assert not one["pinned"]  # whoever leaves the dialog changes nothing
            await tab.value("document.querySelector('#adapter-rows .link').click()")
            await tab.until("document.getElementById('dialog').open")
            await tab.value(f"{pin}.click()")
            await tab.value("document.querySelector('#dialog-buttons .primary').click()")
            await tab.until("!document.querySelector('#adapter-rows .tag').hidden")
            assert (await server.http.get("/v1/adapters/one", headers=headers)).json()["pinned"]
            assert not [problem for problem in tab.problems if "401" not in problem]
            assert all(url.startswith(server.url) for url in tab.requested)
            stored = "localStorage.length + sessionStorage.length + document.cookie.length"
            assert await tab.value(stored) == 0

    run(test)


def test_a_tenant_sees_no_buttons_that_it_may_not_use_and_a_wrong_key_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with page(tmp_path) as (server, tab):
            await sign_in(server, tab, "wrong")
            await tab.until("document.getElementById('sign-in-error').textContent")
            assert await tab.value("document.getElementById('main').hidden")
            await tab.type("tenant")
            await tab.press("Enter", "\r")
            await tab.until(SHOWN)
            assert await tab.value("document.getElementById('limits').hidden")
            assert await tab.value("document.getElementById('viewer').textContent") == "blue, user"
            await tab.value("document.querySelector('#adapter-rows .link').click()")
            await tab.until("document.getElementById('dialog').open")
            assert await tab.value("document.getElementById('dialog-buttons').textContent") == "Close"

    run(test)


def test_a_phone_in_the_dark_and_a_keyboard(tmp_path: Path) -> None:
    async def test() -> None:
        async with page(tmp_path) as (server, tab):
            await sign_in(server, tab, "operator")
            await tab.until(SHOWN)
            light = await tab.value("getComputedStyle(document.body).backgroundColor")
            await tab.size(390, 844, dark=True, phone=True)
            await tab.until(f"getComputedStyle(document.body).backgroundColor !== '{light}'")
            assert await tab.value("document.documentElement.scrollWidth") <= 390
            await tab.value("document.activeElement.blur()")
            await tab.value("document.querySelector('.skip').focus()")
            seen = []
            for _ in range(6):
                await tab.press("Tab")
                seen.append(await tab.value(FOCUS))
                outline = "getComputedStyle(document.activeElement).outlineStyle"
                assert await tab.value(outline) == "solid", seen
            assert seen[:2] == ["sign-out", "limits"]
            assert (await tab.screenshot()).startswith(b"\x89PNG")

    run(test)
