"""A whole server with a bare application and an engine of the tests, as a process: `python -m
tests.server.bare_server`.

Arguments: a JSON object of `ServeConfig` fields, the builder's name, a folder to work in, and `real` for the
shipping application in place of the bare one. The bare application knows two paths: `/ready`, and
`/ask?TOKENS&ADAPTER`, which answers with the tokens and how the request ended.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tests.engine.rig import sampling

from loraplex.build.model_folder import resolve_model
from loraplex.config import ServeConfig
from loraplex.core.errors import LoraplexError, Root
from loraplex.core.messages import Submit, Tokens
from loraplex.process.logs import configure_logging
from loraplex.process.workdir import private_folder
from loraplex.server.announce import Announcer
from loraplex.server.app import create_app as real_app
from loraplex.server.listen import AsgiApp
from loraplex.server.run import serve
from loraplex.server.service import Service


class BareApp:
    """The application."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.asked = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        try:
            status, value = await self.answer(scope["path"], scope["query_string"].decode())
        except LoraplexError as error:
            status, value = error.status, {"code": error.code.value}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(value).encode()})

    async def answer(self, path: str, query: str) -> tuple[int, Any]:
        """Status and value."""
        service = self.service
        if path == "/ready":
            open_requests = service.client.open_requests
            state = {"pid": service.supervisor.pid, "open": open_requests, "phase": service.phase.value}
            return 200 if service.ready else 503, state
        service.require_ready()
        prompt, _, model = query.partition("&")
        adapter = service.adapters.resolve(model).key if model else None
        self.asked += 1
        tokens = np.array([int(item) for item in prompt.split(",")], dtype="<i4")
        submit = Submit(f"r{self.asked}", tokens.tobytes(), sampling(max_tokens=5), adapter)
        group = service.client.submit([submit])
        seen: list[int] = []
        while True:
            for _, message in await group.read():
                if not isinstance(message, Tokens):
                    return 200, {"tokens": seen, "end": message.finish_reason or message.code}
                seen.extend(message.token_ids)


def create_app(service: Service) -> AsgiApp:
    """The bare application over `service`."""
    return BareApp(service)


def main() -> int:
    """Serve until told to stop."""
    fields, builder, work = json.loads(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    fields["adapters"] = tuple(map(tuple, fields.get("adapters", ())))
    fields["adapter_dirs"] = tuple(fields.get("adapter_dirs", ()))
    config = ServeConfig(**fields)
    configure_logging(config.log_level, as_json=config.log_json)
    folder, base_name = resolve_model(config)
    with private_folder(work) as images:
        announcer = Announcer(config)
        application = real_app if sys.argv[4:] == ["real"] else create_app
        return asyncio.run(serve(config, folder, base_name, images, application, announcer, builder))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LoraplexError as refusal:
        print(refusal, file=sys.stderr)
        sys.exit(2 if refusal.root is Root.CALLER else 1)
