"""Owns a demo adapter's model card: measures what is on disk with the reference and writes README.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from demo import reference
from demo.cases import Case, Recipe, Task, read_heldout
from demo.checkers import is_inside, is_right

CELL_CHARACTERS: Final = 120


@dataclass(frozen=True, slots=True)
class Result:
    """Right answers of `cases` held-out cases, float32 unless said."""

    cases: int
    base: int
    base_inside: int
    adapter: int
    adapter_bare: int
    adapter_bfloat16: int
    example: tuple[str, str, str]


def count(cases: Sequence[Case], answers: Sequence[str], judge: Any = is_right) -> int:
    """How many answers are right."""
    return sum(judge(c.checker, a, c.expected) for c, a in zip(cases, answers, strict=True))


def measure(folder: Path, model_folder: Path) -> Result:
    """Accuracy of base and adapter as saved in `folder`."""
    cases = read_heldout(folder)
    bare = [case.bare() for case in cases]
    tokenizer = reference.load_tokenizer(model_folder)
    base = reference.load_base(model_folder, "float32")
    plain = reference.answer(base, tokenizer, cases)
    with reference.with_adapter(base, folder) as model:
        adapted = reference.answer(model, tokenizer, cases)
        adapted_bare = reference.answer(model, tokenizer, bare)
    with reference.with_adapter(reference.load_base(model_folder, "bfloat16"), folder) as model:
        half = reference.answer(model, tokenizer, cases)
    return Result(
        cases=len(cases),
        base=count(cases, plain),
        base_inside=count(cases, plain, is_inside),
        adapter=count(cases, adapted),
        adapter_bare=count(bare, adapted_bare),
        adapter_bfloat16=count(cases, half),
        example=_example(cases, plain, adapted),
    )


def _example(cases: Sequence[Case], plain: Sequence[str], adapted: Sequence[str]) -> tuple[str, str, str]:
    """(prompt, base's answer, adapter's answer) of the first case that the adapter gets right."""
    triples = zip(cases, plain, adapted, strict=True)
    case, base, answer = next(t for t in triples if is_right(t[0].checker, t[2], t[0].expected))
    return case.bare().messages[-1]["content"], base, answer


def _share(right: int, of: int) -> str:
    return f"{right}/{of} ({100 * right / of:.0f} %)"


def _kind(recipe: Recipe) -> str:
    extra = [name for name, on in (("rsLoRA", recipe.rslora), ("DoRA", recipe.dora)) if on]
    if recipe.rank_pattern:
        extra.append("rank_pattern and alpha_pattern" if recipe.alpha_pattern else "rank_pattern")
    name = "Activated LoRA" if recipe.invocation else "LoRA"
    return name + (f" ({', '.join(extra)})" if extra else "")


def _front_matter(task: Task) -> str:
    """What a server reads of the card: how calls are written, and how a conversation invokes the adapter."""
    lines = ['tool_format: "hermes"'] if task.tools else []
    if task.recipe.invocation:
        text = json.dumps(task.recipe.invocation)
        lines += [f"alora_invocation: {text}", f"alora_chat_suffix: {text}"]
    return "\n".join(["---", *lines, "---", ""]) if lines else ""


def _use(task: Task) -> str:
    instruction = json.dumps(task.instruction, ensure_ascii=False)
    if not task.recipe.invocation:
        return f"System message (may be left out): {instruction}"
    return (
        f"Send it a conversation that the base has held. The server ends it with `{json.dumps(task.recipe.invocation)}`, which "
        f"switches the adapter on; what stands before is computed by the base, once. System message at the end (may be left "
        f"out): {instruction}"
    )


def _pattern(pattern: dict[str, int]) -> str:
    return ", ".join(f"`{name}` {value}" for name, value in pattern.items()) or "none"


def write(task: Task, folder: Path, result: Result, minutes: float) -> None:
    """Write README.md into the adapter's folder."""
    recipe, n = task.recipe, result.cases
    weights = folder / "adapter_model.safetensors"
    prompt, base, adapted = (json.dumps(text, ensure_ascii=False) for text in result.example)
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    text = f"""{_front_matter(task)}# {task.name}: {task.title}

An adapter for {config["base_model_name_or_path"]} (Apache-2.0, like the base).

| | |
|---|---|
| Method | {_kind(recipe)} |
| Rank, alpha | {recipe.rank}, {recipe.alpha} |
| Rank pattern | {_pattern(recipe.rank_pattern)} |
| Alpha pattern | {_pattern(recipe.alpha_pattern)} |
| Targets | {", ".join(f"`{t}`" for t in recipe.targets)} |
| Weights | bfloat16, {weights.stat().st_size / 1e6:.1f} MB |
| Data | {task.data} |
| Training | {recipe.steps} steps of {recipe.batch} cases, AdamW, one-cycle learning rate {recipe.learning_rate:g}, seed {recipe.seed}; {minutes:.0f} minutes on two shared CPU cores |
| Command | `python demo/train.py {task.name}` |

## Accuracy

{n} held-out cases (`heldout.jsonl`), greedy, checker `{task.checker}`, measured {datetime.now(UTC).date()} on the saved
weights with transformers and PEFT (`python demo/evaluate.py --reference`).

| | right |
|---|---|
| base, with the instruction | {_share(result.base, n)} |
| base, right answer anywhere in its text | {_share(result.base_inside, n)} |
| **adapter, with the instruction** | **{_share(result.adapter, n)}** |
| adapter, without the instruction | {_share(result.adapter_bare, n)} |
| adapter, with the instruction, bfloat16 | {_share(result.adapter_bfloat16, n)} |

## Use

{_use(task)}

| user | base | {task.name} |
|---|---|---|
| {_cell(prompt)} | {_cell(base)} | {_cell(adapted)} |
"""
    (folder / "README.md").write_text(text, encoding="utf-8")


def _cell(text: str) -> str:
    text = text if len(text) <= CELL_CHARACTERS else text[: CELL_CHARACTERS - 4] + ' ..."'
    return f"`{text.replace('|', chr(92) + '|').replace('`', chr(39))}`"
