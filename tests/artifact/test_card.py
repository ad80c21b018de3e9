"""What the card of an activated adapter may say, and what of it is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loraplex.artifact.card import MAX_TEXT_CHARS, Card, read_card
from loraplex.core.errors import CallerError, ErrorCode

BOTH = 'alora_invocation: "<|im_start|>judge\\n"\nalora_chat_suffix : "<|im_start|>judge\\n"\n'


def card(folder: Path, text: str, *, activated: bool = True) -> Card | None:
    (folder / "README.md").write_text(text)
    return read_card(folder, activated=activated)


def test_both_texts(tmp_path: Path) -> None:
    found = card(tmp_path, f"---\nlicense: apache-2.0\n{BOTH}tags:\n  - lora\n---\n# judge\n")
    assert found == Card("<|im_start|>judge\n", "<|im_start|>judge\n")
    assert found.texts == {
        "alora_invocation": "<|im_start|>judge\n",
        "alora_chat_suffix": "<|im_start|>judge\n",
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# a card\n",
        f"# a card\n{BOTH}",
        f"---\n{BOTH}",
        "---\nlicense: mit\n---\n",
        f"---\n---\n{BOTH}",
        "---\n",
    ],
)
def test_nothing_is_said_outside_the_front_matter(tmp_path: Path, text: str) -> None:
    assert card(tmp_path, text) is None
    assert card(tmp_path, text, activated=False) is None


def test_no_card(tmp_path: Path) -> None:
    assert read_card(tmp_path, activated=True) is None


@pytest.mark.parametrize(
    "line",
    [
        "alora_invocation: plain",
        'alora_invocation: ""',
        "alora_invocation: 5",
        'alora_invocation: ["a"]',
        "alora_invocation: null",
        "alora_invocation:",
        'alora_invocation: "open',
        "alora_invocation: 'single'",
        f'alora_invocation: "{"x" * (MAX_TEXT_CHARS + 1)}"',
        'alora_invocations: "a"',
        'alora_: "a"',
        'alora_chat_suffix: "a"\nalora_chat_suffix: "a"',
    ],
)
def test_malformed(tmp_path: Path, line: str) -> None:
    with pytest.raises(CallerError) as caught:
        card(tmp_path, f"---\n{line}\n---\n")
    assert caught.value.code is ErrorCode.ADAPTER_CONFIG_INVALID
    assert caught.value.param is not None
    assert caught.value.param.startswith("alora_")


def test_the_card_of_an_adapter_that_is_always_on_says_nothing_of_an_invocation(tmp_path: Path) -> None:
    with pytest.raises(CallerError, match="no alora_invocation_tokens"):
        card(tmp_path, f"---\n{BOTH}---\n", activated=False)


def test_a_card_is_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "README.md")
    with pytest.raises(CallerError):
        read_card(tmp_path, activated=True)


@pytest.mark.parametrize("activated", [True, False])
def test_a_card_says_how_calls_are_written(tmp_path: Path, activated: bool) -> None:
    (tmp_path / "README.md").write_text('---\nlicense: mit\ntool_format: "hermes"\n---\n# a\n')
    found = read_card(tmp_path, activated=activated)
    assert found == Card(tool_format="hermes")
    assert found.texts == {}


@pytest.mark.parametrize("line", ['tool_format: "xml"', "tool_format: hermes", "tool_format: 1"])
def test_a_form_of_calls_that_is_not_known_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "README.md").write_text(f"---\n{line}\n---\n")
    with pytest.raises(CallerError) as refused:
        read_card(tmp_path, activated=False)
    assert refused.value.code is ErrorCode.ADAPTER_CONFIG_INVALID
