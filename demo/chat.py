"""A small terminal client: lists what a server serves, streams answers, switches between adapters.

`python demo/chat.py --url http://127.0.0.1:8000`. Speaks the OpenAI API over httpx and knows nothing of the
server's code. Demo adapters answer single messages, so each message to an adapter is a conversation of its
own; the base keeps the conversation until `/new`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

ADAPTERS: Final = Path(__file__).parent / "adapters"
HELP: Final = """/list           what the server serves
/use NAME       talk to an adapter (or to any listed model)
/base           talk to the base model
/try            send the current adapter's next held-out case and show the right answer
/new            forget the conversation with the base
/quit           leave"""


class ServerError(Exception):
    """The server refused or could not be reached; the message is for the person at the terminal."""


@dataclass(slots=True)
class Client:
    """The three calls of the API that the terminal needs."""

    http: httpx.Client

    def models(self) -> list[dict[str, Any]]:
        """Entries of /v1/models. Raises ServerError."""
        try:
            response = self.http.get("/v1/models")
        except httpx.HTTPError as error:
            raise ServerError(f"no answer from {self.http.base_url}: {error}") from error
        if response.is_error:
            raise ServerError(_message(response))
        return list(response.json()["data"])

    def stream(self, model: str, messages: Sequence[dict[str, str]], max_tokens: int) -> Iterator[str]:
        """Pieces of the answer as they come, greedy. Raises ServerError."""
        body = {
            "model": model,
            "messages": list(messages),
            "stream": True,
            "temperature": 0,
            "max_tokens": max_tokens,
        }
        try:
            with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    raise ServerError(_message(response))
                for line in response.iter_lines():
                    if line == "data: [DONE]":
                        return
                    if line.startswith("data: "):
                        yield from _pieces(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            raise ServerError(f"the answer broke off: {error}") from error


def _pieces(event: dict[str, Any]) -> Iterator[str]:
    if "error" in event:
        raise ServerError(str(event["error"].get("message", event["error"])))
    for choice in event["choices"]:
        text = choice["delta"].get("content")
        if text:
            yield text


def _message(response: httpx.Response) -> str:
    try:
        return f"{response.status_code}: {response.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code}: {response.text[:200]}"


def examples(name: str) -> list[tuple[str, str]]:
    """(prompt, right answer) of a demo adapter's held-out cases, if its folder is beside this script."""
    path = ADAPTERS / name / "heldout.jsonl"
    if not path.is_file():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(row["messages"][-1]["content"], row["expected"]) for row in rows]


def example(name: str) -> str:
    """The first held-out prompt, or nothing."""
    return next((prompt for prompt, _ in examples(name)), "")


@dataclass(slots=True)
class Chat:
    """One person's session: which model is talked to, and what was said to the base."""

    client: Client
    console: Console
    max_tokens: int = 256
    model: str = ""
    base: str = ""
    parents: dict[str, str | None] = field(default_factory=dict)
    history: list[dict[str, str]] = field(default_factory=list)
    tried: int = 0

    def refresh(self) -> None:
        """Read the server's list; start with the base."""
        self.parents = {entry["id"]: entry.get("parent") for entry in self.client.models()}
        bases = [name for name, parent in self.parents.items() if not parent]
        if not bases:
            raise ServerError("the server lists no base model")
        self.base = bases[0]
        if self.model not in self.parents:
            self.model = self.base

    def show_list(self) -> None:
        """Print models and adapters, the current one marked."""
        table = Table("", "name", "kind", "example")
        for name, parent in sorted(self.parents.items(), key=lambda item: (item[1] is not None, item[0])):
            kind = "adapter" if parent else "base"
            table.add_row("*" if name == self.model else "", Text(name), kind, Text(example(name)))
        self.console.print(table)

    def say(self, text: str) -> None:
        """Send one message and print the answer as it arrives."""
        turn = {"role": "user", "content": text}
        messages = [*self.history, turn] if self.model == self.base else [turn]
        answer = ""
        for piece in self.client.stream(self.model, messages, self.max_tokens):
            answer += piece
            self.console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
        self.console.print()
        if self.model == self.base:
            self.history += [turn, {"role": "assistant", "content": answer}]

    def command(self, line: str) -> bool:
        """Carry out a line that starts with a slash; False ends the session."""
        match line.split():
            case ["/quit" | "/exit"]:
                return False
            case ["/list"]:
                self.refresh()
                self.show_list()
            case ["/use", name]:
                self.use(name)
            case ["/base"]:
                self.use(self.base)
            case ["/new"]:
                self.history.clear()
            case ["/try"]:
                self.try_example()
            case _:
                self.console.print(HELP, markup=False, highlight=False)
        return True

    def use(self, name: str) -> None:
        """Switch to a listed model; an unknown name changes nothing."""
        if name not in self.parents:
            self.refresh()  # it may have been added since
        if name not in self.parents:
            self.console.print(f"{name} is not served; /list shows what is", style="red", markup=False)
            return
        self.model = name
        hint = example(name)
        self.console.print(
            f"now talking to {name}" + (f"; for example: {hint}" if hint else ""), style="dim", markup=False
        )

    def try_example(self) -> None:
        """Send the current adapter's next held-out prompt, then show its right answer."""
        cases = examples(self.model)
        if not cases:
            self.console.print(f"{self.model} has no examples", style="red", markup=False)
            return
        prompt, expected = cases[self.tried % len(cases)]
        self.tried += 1
        self.console.print(f"> {prompt}", markup=False, highlight=False)
        self.say(prompt)
        self.console.print(f"right answer: {expected}", style="dim", markup=False, highlight=False)

    def line(self, text: str) -> bool:
        """One line from the person; errors are shown and the session goes on."""
        text = text.strip()
        try:
            if text.startswith("/"):
                return self.command(text)
            if text:
                self.say(text)
        except ServerError as error:
            self.console.print(str(error), style="red", markup=False)
        return True


def main(argv: Sequence[str] | None = None) -> int:
    """Read lines until /quit or end of input."""
    parser = argparse.ArgumentParser(description="Talk to a server's base model and adapters.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="server (%(default)s)")
    parser.add_argument("--model", default="", help="start with this model or adapter instead of the base")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer (%(default)s)")
    arguments = parser.parse_args(argv)
    console = Console()
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    # Reading may take as long as the model does; connecting may not.
    with httpx.Client(
        base_url=arguments.url, headers=headers, timeout=httpx.Timeout(10.0, read=None)
    ) as http:
        chat = Chat(Client(http), console, arguments.max_tokens)
        try:
            chat.refresh()
        except ServerError as error:
            console.print(str(error), style="red", markup=False)
            return 1
        if arguments.model:
            chat.use(arguments.model)
        chat.show_list()
        console.print(HELP, markup=False, highlight=False, style="dim")
        while True:
            try:
                if not chat.line(console.input(Text(f"{chat.model}> ", style="bold"))):
                    return 0
            except EOFError:
                return 0
            except KeyboardInterrupt:
                console.print("(interrupted; /quit leaves)", style="dim")


if __name__ == "__main__":
    sys.exit(main())
