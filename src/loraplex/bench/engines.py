"""The engines that `bench decode` puts side by side: ours, transformers + PEFT, and vLLM in a process of its
own.

Each generates the same token counts for the same prompts, greedy, ending at no end-of-sequence token. Owns
how each is driven, nothing of what is measured.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.request import SamplingParams
from loraplex.process.child import BlockingChild, describe_exit
from loraplex.process.pipe import PipeClosed

STATIC_BATCH: Final = 16
"""Requests that transformers + PEFT runs at once."""


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """One batch of requests. adapters: index of each request's adapter, None for the base; new_tokens: of
    each.
    """

    prompts: list[list[int]]
    adapters: list[int | None]
    new_tokens: list[int]


class Engine(Protocol):
    """An engine that is loaded and ready."""

    name: str

    def generate(self, work: RequestBatch) -> int:
        """Answer every request; the number of tokens that were asked for."""
        ...

    def cpu_seconds(self) -> float:
        """Processor time used so far, by every process of the engine."""
        ...

    def close(self) -> None:
        """Let go of memory and processes."""
        ...


class Ours:
    """`LLM` in this process."""

    name = "loraplex"

    def __init__(self, model: Path, adapters: Sequence[tuple[str, Path]], device: str, dtype: str) -> None:
        from loraplex.api import LLM

        self._names = [name for name, _ in adapters]
        self._llm = LLM(model, dict(adapters), device=device, dtype=dtype)
        self.vocab = self._llm.vocab_size

    def generate(self, work: RequestBatch) -> int:
        """See `Engine.generate`."""
        params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in work.new_tokens]
        names = [None if index is None else self._names[index] for index in work.adapters]
        return sum(len(output.token_ids) for output in self._llm.generate(work.prompts, names, params))

    def cpu_seconds(self) -> float:
        """See `Engine.cpu_seconds`."""
        return time.process_time()

    def close(self) -> None:
        """See `Engine.close`."""
        self._llm.close()


class Peft:
    """transformers, and PEFT over a second copy of the model, so that base rows do not pay for adapters."""

    name = "transformers + PEFT"

    def __init__(self, model: Path, adapters: Sequence[tuple[str, Path]], device: str, dtype: str) -> None:
        import torch

        from loraplex.model.dtypes import resolve_dtype

        try:
            from peft import PeftModel
            from transformers import AutoModelForCausalLM
        except ImportError as error:
            raise CallerError(
                ErrorCode.CONFIG_INVALID,
                f"the peer needs {error.name}; install the dev extra or pass --no-peer",
            ) from error
        element, _ = resolve_dtype(dtype, torch.device(device))

        def load() -> Any:
            found: Any = AutoModelForCausalLM.from_pretrained(model, dtype=element)
            return found.to(device).eval()

        self._device, self._names = device, [name for name, _ in adapters]
        self._base, self._tuned = load(), None
        if adapters:
            tuned = PeftModel.from_pretrained(load(), adapters[0][1], adapter_name=self._names[0])
            for name, path in adapters[1:]:
                tuned.load_adapter(path, adapter_name=name)
            self._tuned = tuned.eval()

    def generate(self, work: RequestBatch) -> int:
        """See `Engine.generate`: static batches in order of length, padded left, as long as their longest
        answer.
        """
        order = sorted(range(len(work.prompts)), key=lambda i: (len(work.prompts[i]) + work.new_tokens[i], i))
        for at in range(0, len(order), STATIC_BATCH):
            self._batch(work, order[at : at + STATIC_BATCH])
        return sum(work.new_tokens)

    def cpu_seconds(self) -> float:
        """See `Engine.cpu_seconds`."""
        return time.process_time()

    def _batch(self, work: RequestBatch, chosen: list[int]) -> None:
        import torch

        width = max(len(work.prompts[i]) for i in chosen)
        ids = torch.zeros((len(chosen), width), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, i in enumerate(chosen):
            ids[row, width - len(work.prompts[i]) :] = torch.tensor(work.prompts[i])
            mask[row, width - len(work.prompts[i]) :] = 1
        count = max(work.new_tokens[i] for i in chosen)
        names = [work.adapters[i] for i in chosen]
        tuned = any(index is not None for index in names)
        extra = (
            {"adapter_names": ["__base__" if i is None else self._names[i] for i in names]} if tuned else {}
        )
        model: Any = self._tuned if tuned else self._base
        with torch.inference_mode():
            model.generate(
                input_ids=ids.to(self._device),
                attention_mask=mask.to(self._device),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                **extra,
            )

    def close(self) -> None:
        """See `Engine.close`."""
        self._base = self._tuned = None


class Vllm:
    """vLLM under another interpreter; one engine without adapters and, where there are any, one with them."""

    name = "vllm"

    def __init__(
        self,
        python: Path,
        model: Path,
        adapters: Sequence[tuple[str, Path]],
        dtype: str,
        requests: int,
        positions: int,
        *,
        cached: bool = False,
    ) -> None:
        """requests: that run at once. positions: of the longest. cached: whether it reuses prefixes."""
        common = {
            "model": str(model),
            "dtype": dtype,
            "requests": requests,
            "positions": positions,
            "cached": cached,
        }
        self._children: list[BlockingChild] = []
        try:
            self._start(python, {**common, "adapters": [], "max_rank": 0})
            if adapters:
                named = [[name, str(path.absolute())] for name, path in adapters]
                rank = max(_rank(path) for _, path in adapters)
                self._start(python, {**common, "adapters": named, "max_rank": rank})
        except BaseException:
            self.close()
            raise

    def generate(self, work: RequestBatch) -> int:
        """See `Engine.generate`."""
        tuned = any(index is not None for index in work.adapters)
        wanted = {"prompts": work.prompts, "adapters": work.adapters, "new_tokens": work.new_tokens}
        return int(self.ask(wanted, tuned=tuned)["tokens"])

    def ask(self, wanted: dict[str, Any], *, tuned: bool) -> dict[str, Any]:
        """What the process answers to an order. tuned: the one with adapters, else the one without."""
        return self._ask(self._children[-1 if tuned else 0], wanted)

    def cpu_seconds(self) -> float:
        """See `Engine.cpu_seconds`."""
        return sum(tree_cpu_seconds(child.pid) for child in self._children)

    def close(self) -> None:
        """See `Engine.close`."""
        for child in self._children:
            child.stop()

    def _start(self, python: Path, options: dict[str, Any]) -> None:
        script = Path(__file__).with_name("vllm_peer.py")
        child = BlockingChild.start_script(python, script, "the vLLM process")
        self._children.append(child)
        self._ask(child, options)

    @staticmethod
    def _ask(child: BlockingChild, wanted: dict[str, Any]) -> dict[str, Any]:
        try:
            child.send_bytes(json.dumps(wanted).encode())
            answer: dict[str, Any] = json.loads(child.receive_bytes())
        except PipeClosed:
            how = describe_exit(child.ended())
            raise CallerError(
                ErrorCode.CONFIG_INVALID,
                f"the vLLM process ended ({how}); load the model with vLLM by hand to see why",
            ) from None
        return answer


def tree_cpu_seconds(root: int) -> float:
    """Processor time of a process and its living descendants, from /proc."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, rest = int(stat.parent.name), stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it ended meanwhile
        parents[pid] = int(rest[1])
        used[pid] = (int(rest[11]) + int(rest[12])) / os.sysconf("SC_CLK_TCK")
    total = 0.0
    for pid, seconds in used.items():
        at = pid
        while at not in (0, root):
            at = parents.get(at, 0)
        total += seconds if at == root else 0.0
    return total


def _rank(folder: Path) -> int:
    """The rank that vLLM must make room for: one of its own sizes."""
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    largest = max([int(config["r"]), *config.get("rank_pattern", {}).values()])
    return next((size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= largest), largest)
