"""Checks of pages in more than name, for the CPU's pool and for a device's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tests.model.drive import Driver, Request, logits_of
from tests.model.rig import Rig
from tests.model.tiny import reference
from tests.model.tuned import image, tuned
from tests.prompts import prompt

from loraplex.core.ids import Module
from loraplex.core.layout import Factor

STEPS = 1_000


def owned_bytes(driver: Driver, requests: list[Request], slots: list[int]) -> torch.Tensor:
    """Which bytes of the pool belong to a resident factor or to a position that holds KV."""
    pool, kv = driver.runner.pool, driver.kv
    owned = torch.zeros_like(pool, dtype=torch.bool)
    flat = owned.view(-1)
    for slot in slots:
        resident = driver.runner.table.adapter(slot)
        for layer, module in np.argwhere(resident.index >= 0).tolist():
            views = resident.module(layer, Module(module))
            assert views is not None
            for piece in (p for factor in Factor for p in views.pieces(factor)):
                start = piece.view.data_ptr() - pool.data_ptr()
                flat[start : start + piece.view.numel() * piece.view.itemsize] = True
    shape = (-1, kv.layers, 2, kv.page_tokens, kv.kv_heads * kv.head_dim * kv.itemsize)
    for request in requests:
        for position in range(request.planned):
            page = driver.tables[request.slot][position // kv.page_tokens]
            owned.view(shape)[page, :, :, position % kv.page_tokens] = True
    return owned


def check_owned_bytes(driver: Driver, names: list[str], poison: int) -> None:
    """PEFT's choices, whatever lies beside what requests and adapters own. Slots 1, 2, ... hold the adapters
    named.
    """
    requests = [Request(i, prompt(3 + 2 * i, i), adapter=(i, 7 if i else 0)) for i in range(len(names) + 1)]
    slots = list(range(1, len(names) + 1))

    def scrub() -> None:
        pool = driver.runner.pool
        pool[~owned_bytes(driver, requests, slots)] = poison

    scrub()
    driver.step([(r, 2) for r in requests])  # chunks with and without history
    scrub()
    driver.step([(r, len(r.prompt) - 2) for r in requests])
    for _ in range(4):
        scrub()
        driver.step([(r, 0) for r in requests])
    for request in requests:
        judge = tuned(names[request.slot - 1]) if request.slot else reference("llama")
        choices = logits_of(judge, request.prompt + request.out).argmax(dim=-1).tolist()
        assert request.out == choices[len(request.prompt) - 1 : -1]


def check_warm_steps(root: Path, driver: Driver, moved: list[int]) -> None:
    """moved: bytes of every copy into the pool since "all-r4" and "rs-r16" were loaded into slots 1 and 2."""
    model = driver.runner.decoder
    total = sum(len(image(root, model, n, driver.kv.page_bytes).pages) for n in ("all-r4", "rs-r16"))
    assert sum(moved) == total * driver.kv.page_bytes
    moved.clear()
    requests = [Request(i, prompt(5, i), adapter=(i, 7 if i else 0)) for i in range(3)]
    before = torch.cat(
        [driver.runner.table.adapter(slot).pool[driver.runner.table.adapter(slot).pages] for slot in (1, 2)]
    )
    driver.step([(r, 5) for r in requests])
    for _ in range(6):
        driver.step([(r, 0) for r in requests])
    after = torch.cat(
        [driver.runner.table.adapter(slot).pool[driver.runner.table.adapter(slot).pages] for slot in (1, 2)]
    )
    assert not moved
    assert torch.equal(before, after)


def check_open_copy(rig: Rig, held: Callable[[], int], let_go: Callable[[], None]) -> None:
    """The copy of "rs-r16" stays open for STEPS steps. held: copies that are held; let_go: end them."""
    rig.submit("warm", prompt(4, 1), "qv-r3", 2)
    for _ in range(50):
        rig.engine.step()
    assert "warm" in rig.mailbox.ended
    cold_prompt = prompt(6, 9)
    rig.submit("cold", cold_prompt, "rs-r16", 5)
    live: dict[str, str | None] = {}
    for step in range(STEPS):
        while len(live) < 3:
            name = f"r{step}.{len(live)}"
            live[name] = [None, "qv-r3"][len(live) % 2]
            rig.submit(name, prompt(5, step), live[name], 50)
        before = {name: len(rig.mailbox.tokens.get(name, ())) for name in live}
        rig.engine.step()
        for name in [*live]:
            got = len(rig.mailbox.tokens.get(name, ()))
            # A request that has answered once answers in every step until it ends.
            assert before[name] == 0 or got == before[name] + 1, (step, name)
            if name in rig.mailbox.ended:
                del live[name]
    assert "cold" not in rig.mailbox.ended
    assert not rig.mailbox.tokens.get("cold")
    assert held() == 1
    let_go()
    rig.run()
    known = cold_prompt + rig.mailbox.tokens["cold"]
    choices = logits_of(tuned("rs-r16"), known).argmax(dim=-1).tolist()
    assert known[len(cold_prompt) :] == choices[len(cold_prompt) - 1 : -1]
    assert all(end.code is None for ends in rig.mailbox.ended.values() for end in ends)
    rig.engine.check()
