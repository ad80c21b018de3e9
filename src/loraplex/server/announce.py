"""What a starting server says to the person who started it, and what to try once it is ready.

Never logs. Specification: interface "Command line".
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from loraplex.config import ServeConfig


class Announcer:
    """Prints lines for people. With JSON logs nothing is printed: standard output is then for nobody."""

    def __init__(self, config: ServeConfig, stream: TextIO | None = None) -> None:
        self._quiet = config.log_json
        self._console = Console(
            file=sys.stdout if stream is None else stream, highlight=False, soft_wrap=True
        )

    def say(self, text: str) -> None:
        """One line, whatever the text holds: a path may hold what no terminal should be sent."""
        if not self._quiet:
            plain = (char if char.isprintable() else ascii(char)[1:-1] for char in text)
            self._console.print(Text("".join(plain)))

    def ready(self, url: str, base_name: str, aliases: Sequence[str], chat: bool) -> None:
        """The server takes requests: how to try it."""
        if self._quiet:
            return
        lines = "\n\n".join(examples(url, base_name, aliases, chat))
        if self._console.is_terminal:
            self._console.print(
                Panel(Text(lines), title=f"ready on {url}; try", title_align="left", expand=False)
            )
        else:
            self._console.print(Text(f"ready on {url}; try\n\n{lines}\n"))


def examples(url: str, base_name: str, aliases: Sequence[str], chat: bool) -> list[str]:
    """Commands that work as they are: one over curl, one with the openai client, one that lists adapters."""
    model = aliases[0] if aliases else base_name
    if chat:
        path, field = "chat/completions", '"messages": [{"role": "user", "content": "Hello"}]'
        call = f'chat.completions.create(model="{model}", messages=[{{"role": "user", "content": "Hello"}}])'
    else:
        path, field = "completions", '"prompt": [1, 2, 3], "max_tokens": 8'
        call = f'completions.create(model="{model}", prompt=[1, 2, 3], max_tokens=8)'
    names = ", ".join([base_name, *aliases][:12]) + (", ..." if len(aliases) > 11 else "")
    return [
        f"models: {names}",
        (
            f'curl {url}/v1/{path} -H \'content-type: application/json\' \\\n  -d \'{{"model": "{model}", '
            f"{field}}}'"
        ),
        (
            f'from openai import OpenAI\nclient = OpenAI(base_url="{url}/v1", api_key="none")\n'
            f"print(client.{call})"
        ),
        f"loraplex adapters list --url {url}",
    ]
