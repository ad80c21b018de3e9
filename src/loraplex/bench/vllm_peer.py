"""A vLLM engine as a child process: generates what it is told and answers how long that took.

Runs under another interpreter, the one that vLLM is installed in, and so imports nothing of ours. Frames of
JSON cross its pipes as `process/pipe.py` says. The first is {model, dtype, adapters as [name, folder] pairs,
max_rank, requests, positions}, answered with {"ready"} once the engine is loaded. Then each is {"prompts":
[[token ids]], "adapters": [index or null], "new_tokens": [n]} and is answered with {"seconds", "tokens"}.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from typing import Any, BinaryIO

_LENGTH = struct.Struct("<I")


def _read(pipe: BinaryIO) -> dict[str, Any] | None:
    """The next frame, None when there will be none."""
    header = pipe.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    frame: dict[str, Any] = json.loads(pipe.read(*_LENGTH.unpack(header)))
    return frame


def _write(pipe: BinaryIO, **values: object) -> None:
    payload = json.dumps(values).encode()
    pipe.write(_LENGTH.pack(len(payload)) + payload)
    pipe.flush()


def main() -> None:
    """Load, say so, then answer until there is nobody to answer."""
    orders, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the library prints must not mix with answers
    options = _read(orders)
    if options is None:
        return
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found, unused-ignore]
    from vllm.lora.request import LoRARequest  # type: ignore[import-not-found, unused-ignore]

    adapters = options["adapters"]
    lora = (
        {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": options["max_rank"]}
        if adapters
        else {}
    )
    llm = LLM(
        model=options["model"],
        dtype=options["dtype"],
        max_model_len=options["positions"],
        max_num_seqs=options["requests"],
        enable_prefix_caching=False,
        **lora,
    )
    requests = [LoRARequest(name, index + 1, folder) for index, (name, folder) in enumerate(adapters)]
    _write(answers, ready=True)
    while (wanted := _read(orders)) is not None:
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
        _write(answers, seconds=seconds, tokens=sum(len(o.outputs[0].token_ids) for o in outputs))


if __name__ == "__main__":
    main()
