"""A vLLM engine as a child process: generates what it is told and answers how long that took.

Runs under another interpreter, the one that vLLM is installed in, and so imports nothing of ours. Frames of
JSON cross its pipes as `process/pipe.py` says. The first is {model, dtype, adapters as [name, folder] pairs,
max_rank, requests, positions, cached}, answered with {"ready"} once the engine is loaded. Then each is either
{"prompts": [[token ids]], "adapters": [index or null], "new_tokens": [n]}, answered with {"seconds",
"tokens"}, or {"clients": [[[token ids, index or null, n] by turn]]}: every client asks its turns one after
the other over all that was said before, answered with {"turns": [[client, turn, prompt tokens, cached
tokens, ms to the first token, ms in all]], "seconds", "tokens"}.
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


def _converse(engine: Any, params: Any, adapters: list[Any], clients: list[Any]) -> dict[str, Any]:
    """Have every client ask its turns; all begin together."""
    said: list[list[int]] = [[] for _ in clients]
    turns: list[list[Any]] = []
    ready, asked, tokens = [(number, 0) for number in range(len(clients))], dict[str, list[Any]](), 0
    started = time.perf_counter()
    while ready or asked:
        now = time.perf_counter()
        for number, turn in ready:
            own, adapter, new = clients[number][turn]
            said[number] += own
            request = f"{number}-{turn}-{started}"
            extra = {} if adapter is None else {"lora_request": adapters[adapter]}
            chosen = params(max_tokens=new, temperature=0.0, ignore_eos=True, detokenize=False)
            engine.add_request(request, {"prompt_token_ids": list(said[number])}, chosen, **extra)
            asked[request] = [number, turn, now, 0.0]
        ready = []
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            number, turn, at, first = asked[output.request_id]
            answer = list(output.outputs[0].token_ids)
            if not first and answer:
                first = asked[output.request_id][3] = now
            if not output.finished:
                continue
            del asked[output.request_id]
            cached = output.num_cached_tokens or 0
            turns.append([number, turn, len(said[number]), cached, 1e3 * (first - at), 1e3 * (now - at)])
            said[number] += answer
            tokens += len(answer)
            if turn + 1 < len(clients[number]):
                ready.append((number, turn + 1))
    return {"turns": turns, "seconds": time.perf_counter() - started, "tokens": tokens}


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
        enable_prefix_caching=options["cached"],
        **lora,
    )
    requests = [LoRARequest(name, index + 1, folder) for index, (name, folder) in enumerate(adapters)]
    _write(answers, ready=True)
    while (wanted := _read(orders)) is not None:
        if "clients" in wanted:
            _write(answers, **_converse(llm.llm_engine, SamplingParams, requests, wanted["clients"]))
            continue
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
