"""A vLLM engine as a child process: generates what it is told and answers how long that took, one JSON object a line.

Runs under another interpreter, the one that vLLM is installed in, and so imports nothing of ours. Arguments: one JSON
object (model, dtype, adapters as [name, folder] pairs, max_rank, requests, positions). Then each line of standard input is
{"prompts": [[token ids]], "adapters": [index or null], "new_tokens": [n]} and is answered with {"seconds", "tokens"}.
"""

from __future__ import annotations

import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _FOLDER]  # `http` must be Python's own

import json  # noqa: E402
import time  # noqa: E402
from typing import Any  # noqa: E402


def main() -> None:
    """Load, say so, then answer until standard input ends."""
    options: dict[str, Any] = json.loads(sys.argv[1])
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    answers = os.fdopen(os.dup(1), "w")  # whatever the library prints must not mix with answers
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found, unused-ignore]
    from vllm.lora.request import LoRARequest  # type: ignore[import-not-found, unused-ignore]

    adapters = options["adapters"]
    lora = (
        {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": options["max_rank"]}
        if adapters
        else {}
    )
    llm = LLM(
        model=options["model"], dtype=options["dtype"], max_model_len=options["positions"],
        max_num_seqs=options["requests"], enable_prefix_caching=False, **lora,
    )  # fmt: skip
    requests = [LoRARequest(name, index + 1, folder) for index, (name, folder) in enumerate(adapters)]

    def answer(**values: object) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    answer(ready=True)
    for line in sys.stdin:
        wanted = json.loads(line)
        prompts = [{"prompt_token_ids": prompt} for prompt in wanted["prompts"]]
        params = [
            SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True, detokenize=False)
            for n in wanted["new_tokens"]
        ]
        chosen = [None if index is None else requests[index] for index in wanted["adapters"]]
        extra = {"lora_request": chosen} if adapters else {}
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False, **extra)
        seconds = time.perf_counter() - started
        answer(seconds=seconds, tokens=sum(len(o.outputs[0].token_ids) for o in outputs))


if __name__ == "__main__":
    main()
