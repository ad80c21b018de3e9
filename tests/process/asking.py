"""Requests to an engine process, and what comes back of one."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.engine.rig import sampling

from loraplex.core.messages import Ended, Submit, Tokens
from loraplex.process.client import RequestGroup


def submit(name: str, prompt: list[int], **changes: Any) -> Submit:
    return Submit(name, np.array(prompt, dtype="<i4").tobytes(), sampling(**changes))


async def read_all(group: RequestGroup) -> tuple[list[int], Ended]:
    tokens: list[int] = []
    ended: Ended | None = None
    while not group.done:
        for _, message in await group.read():
            match message:
                case Tokens():
                    tokens.extend(message.token_ids)
                case Ended():
                    assert ended is None
                    ended = message
    assert ended is not None
    return tokens, ended
