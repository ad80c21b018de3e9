"""Trains one demo adapter with PEFT: `python demo/train.py TASK`.

Writes demo/adapters/TASK: adapter_config.json, adapter_model.safetensors (bfloat16), heldout.jsonl and, from
what was saved, the model card README.md with the accuracy of base and adapter on the held-out cases. Needs
the packages of demo/requirements.txt. CPU is enough: minutes a task on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from demo import card, reference
from demo.cases import ADAPTERS, Draft, Recipe, Task, write_heldout
from demo.tasks import TASKS
from loraplex.model.gguf import DEMO_BASE_NAME, demo_model
from loraplex.model.progress import terminal_progress

BARE_SHARE: Final = 0.5
"""Share of training cases without the instruction, so that the adapter also works without being told its task."""
IGNORED: Final = -100


def lora_config(recipe: Recipe, tokenizer: Any) -> LoraConfig:
    """PEFT's configuration for a recipe."""
    tokens = tokenizer.encode(recipe.invocation, add_special_tokens=False) if recipe.invocation else None
    return LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=list(recipe.targets),
        rank_pattern=recipe.rank_pattern,
        alpha_pattern=recipe.alpha_pattern,
        use_rslora=recipe.rslora,
        use_dora=recipe.dora,
        alora_invocation_tokens=tokens,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def batches(task: Task, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Endless right-padded batches; labels are the answer's tokens and the end of turn, IGNORED elsewhere.

    A batch is with the instruction or without it as a whole, so that little of it is padding. That of an activated adapter
    begins with its invocation, and `context` is what stands before.
    """
    drafts = task.training_drafts(task.recipe.seed)
    order = torch.Generator().manual_seed(task.recipe.seed)
    while True:
        bare = torch.rand((), generator=order).item() < BARE_SHARE
        rows = [encode(task, draft, bare, tokenizer) for draft in islice(drafts, task.recipe.batch)]
        pad = tokenizer.pad_token_id
        context: dict[str, Any] = {}
        if task.recipe.invocation:
            size = len(tokenizer.encode(task.recipe.invocation, add_special_tokens=False))
            context = {"context": left_padded([ids[: start - size] for ids, start in rows], pad)}
            rows = [(ids[start - size :], size) for ids, start in rows]
        width = max(len(ids) for ids, _ in rows)
        yield context | {
            "input_ids": torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in rows]),
            "attention_mask": torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows]),
            "labels": torch.tensor(
                [[IGNORED] * start + ids[start:] + [IGNORED] * (width - len(ids)) for ids, start in rows]
            ),
        }


def left_padded(rows: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids, attention mask) of rows that end together."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


def activated_hidden(
    model: Any, context: tuple[torch.Tensor, torch.Tensor], batch: dict[str, torch.Tensor]
) -> Any:
    """Hidden states from the invocation on. The base computes what stands before, without a gradient: no adapter acts there."""
    causal, (ids, mask) = model.get_base_model(), context
    with torch.no_grad(), model.disable_adapter():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        past = causal.model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True)
    rows, width = batch["input_ids"].shape
    with model.base_model._enable_peft_forward_hooks(alora_offsets=[width] * rows):
        return causal.model(
            input_ids=batch["input_ids"],
            attention_mask=torch.cat([mask, batch["attention_mask"]], dim=1),
            position_ids=mask.sum(1, keepdim=True) + torch.arange(width),
            past_key_values=past.past_key_values,
        ).last_hidden_state


def encode(task: Task, draft: Draft, bare: bool, tokenizer: Any) -> tuple[list[int], int]:
    """(token ids of prompt and answer, where the answer starts)."""
    case = task.case(draft)
    prompt = tokenizer.encode(
        reference.prompt_text(tokenizer, (case.bare() if bare else case).messages, task.recipe.invocation),
        add_special_tokens=False,
    )
    answer = tokenizer.encode(draft.answer, add_special_tokens=False)
    return [*prompt, *answer, tokenizer.eos_token_id], len(prompt)


def train(task: Task, base: Any, tokenizer: Any) -> Any:
    """A PEFT model trained by the task's recipe."""
    recipe = task.recipe
    torch.manual_seed(recipe.seed)
    model = get_peft_model(base, lora_config(recipe, tokenizer)).train()
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, total_steps=recipe.steps, pct_start=0.15
    )
    causal: Any = model.get_base_model()
    started = time.monotonic()
    for step, batch in enumerate(islice(batches(task, tokenizer), recipe.steps), start=1):
        labels = batch.pop("labels")[:, 1:]
        context = batch.pop("context", None)
        if context is None:
            hidden = causal.model(**batch).last_hidden_state[:, :-1]
        else:
            hidden = activated_hidden(model, context, batch)[:, :-1]
        # Logits of the answer's positions only: the vocabulary is a fifth of this model.
        scored = labels != IGNORED
        loss: Any = torch.nn.functional.cross_entropy(causal.lm_head(hidden[scored]).float(), labels[scored])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == recipe.steps:
            print(
                f"{task.name} step {step}/{recipe.steps} loss {loss.item():.4f} {time.monotonic() - started:.0f}s",
                flush=True,
            )
    return model


def save(model: Any, folder: Path) -> None:
    """PEFT's two files, weights in bfloat16, the base by its public name."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty card
    weights = folder / "adapter_model.safetensors"
    save_file(
        {k: v.bfloat16().contiguous() for k, v in load_file(weights).items()},
        weights,
        metadata={"format": "pt"},
    )
    weights.chmod(0o644)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = DEMO_BASE_NAME
    config["inference_mode"] = True
    config["target_modules"] = sorted(config["target_modules"])
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    """Train, save, measure what was saved, write the card."""
    parser = argparse.ArgumentParser(
        description="Train one demo adapter and write its folder and model card."
    )
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("--out", type=Path, default=None, help="adapter folder (demo/adapters/TASK)")
    parser.add_argument(
        "--dtype",
        choices=sorted(reference.DTYPES),
        default="bfloat16",
        help="dtype of the base while training",
    )
    arguments = parser.parse_args()
    task = TASKS[arguments.task]
    folder = arguments.out or ADAPTERS / task.name
    with terminal_progress() as progress:
        model_folder = demo_model(progress)
    tokenizer = reference.load_tokenizer(model_folder)
    started = time.monotonic()
    model = train(task, reference.load_base(model_folder, arguments.dtype), tokenizer)
    minutes = (time.monotonic() - started) / 60
    save(model, folder)
    write_heldout(task, folder)
    result = card.measure(folder, model_folder)
    card.write(task, folder, result, minutes)
    print(result)


if __name__ == "__main__":
    main()
