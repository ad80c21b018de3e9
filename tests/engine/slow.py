"""A control plane whose copies and fetches end when a test says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from tests.engine.rig import Rig

from loraplex.core.messages import (
    EngineCall,
    SetLimits,
)
from loraplex.core.plan import CopiedColumns, StepResult
from loraplex.core.ports import Fetched
from loraplex.engine.step import Engine
from loraplex.memory.residency import AdapterState
from loraplex.sim.device import VirtualDevice


class SlowDevice(VirtualDevice):
    """Copies end when told to, in the result of a later plan. held: while true, none ends."""

    held = False

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.ended: list[list[int]] = []
        self.extra: list[list[int]] = []

    def collect(self) -> bytes:
        result = StepResult.unpack(super().collect())
        self.ended += result.copied.array.tolist()
        if result.error.size:
            return result.pack()
        out = self.extra + ([] if self.held else self.ended)
        self.extra = []
        if not self.held:
            self.ended = []
        rows = np.array(out, dtype=np.int32).reshape(-1, CopiedColumns.width)
        return replace(result, copied=CopiedColumns(rows)).pack()


class SlowLoader:
    """Fetches end when told to. fail: digests whose fetch fails. asked, dropped: everything that the engine
    did.
    """

    def __init__(self) -> None:
        self.held = False
        self.fail: dict[str, str] = {}
        self.asked: list[str] = []
        self.dropped: list[str] = []
        self.open: list[str] = []

    def fetch(self, kernel_digest: str) -> None:
        self.asked.append(kernel_digest)
        self.open.append(kernel_digest)

    def drop(self, kernel_digest: str) -> None:
        self.dropped.append(kernel_digest)

    def poll(self, wait: bool) -> Sequence[Fetched]:
        if self.held:
            return []
        ended, self.open = self.open, []
        return [Fetched(d, self.fail.get(d), "injected" if d in self.fail else "") for d in ended]


class SlowRig(Rig):
    def __init__(self, **changes: object) -> None:
        super().__init__(**changes)  # type: ignore[arg-type]
        self.device = SlowDevice(self.limits.bounds, self.limits.kv.page_tokens, self.faults)
        self.loader = SlowLoader()
        self.engine = Engine(self.limits, self.device, self.mailbox, self.clock, self.log, loader=self.loader)

    def call(self, message: type[EngineCall], *args: object, **more: object) -> int:
        self.calls += 1
        self.mailbox.inbox.append(message(self.calls, *args, **more))  # type: ignore[arg-type, call-arg]
        return self.calls

    def state_of(self, key: str) -> AdapterState:
        return self.engine.state.adapters[key].state

    def until(self, key: str, state: AdapterState) -> None:
        for _ in range(200):
            if key in self.engine.state.adapters and self.state_of(key) is state:
                return
            self.step()
        raise AssertionError(f"{key} never was {state}")

    def body(self, call: int) -> dict[str, object]:
        reply = self.mailbox.replies[call]
        assert reply.code is None, reply
        return reply.body

    def code(self, call: int) -> str | None:
        return self.mailbox.replies[call].code

    @property
    def free(self) -> int:
        return self.engine.state.pool.counts().free


def make_cold(rig: SlowRig, *keys: str) -> None:
    """Push adapters off the device by a lowered limit, which is raised again."""
    pages = rig.engine.state.caps.adapter_pages
    rig.call(SetLimits, adapter_pages=0)
    rig.run()
    rig.call(SetLimits, adapter_pages=pages)
    rig.run()
    for key in keys:
        assert rig.state_of(key) is AdapterState.HOST_READY
