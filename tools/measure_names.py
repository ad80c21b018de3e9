"""How soon a server with thousands of adapters serves the first, and all; and what its lists cost then.

Run as `python tools/measure_names.py [COUNT]`, 5,000 without one. Every adapter has bytes of its own, for a
random base of two layers. Prints a line for each figure. Needs nothing but the server and a free port.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

PORT = 18_422
HIDDEN, LAYERS, RANK = 48, 2, 2
TIMES = 5
BASE = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": HIDDEN,
    "intermediate_size": 72, "num_hidden_layers": LAYERS, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "eos_token_id": 2,
}  # fmt: skip
ADAPTER = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": 4,
    "target_modules": ["q_proj"],
    "bias": "none",
    "task_type": "CAUSAL_LM",
}


def write(root: Path, count: int) -> None:
    """The base and its adapters."""
    base, rng = root / "base", np.random.default_rng(1)
    base.mkdir()
    (base / "config.json").write_text(json.dumps(BASE))
    stem = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    for index in range(count):
        folder = root / "adapters" / f"a{index:05d}"
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text(json.dumps(ADAPTER))
        tensors = {}
        for layer in range(LAYERS):
            for side, shape in (("A", (RANK, HIDDEN)), ("B", (HIDDEN, RANK))):
                tensors[stem.format(layer, side)] = rng.standard_normal(shape).astype(np.float32)
        save_file(tensors, folder / "adapter_model.safetensors")


def ask(path: str, body: dict[str, Any] | None = None) -> tuple[bytes, float]:
    """An answer and its milliseconds."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}{path}", data, {"content-type": "application/json"}
    )
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = answer.read()
    return found, 1e3 * (time.monotonic() - began)


def complete(name: str) -> float:
    """Milliseconds of a short answer."""
    return ask("/v1/completions", {"model": name, "prompt": [1, 2, 3], "max_tokens": 2})[1]


def say(what: str, value: float, unit: str) -> None:
    """One figure."""
    sys.stdout.write(f"{what:60} {value:10,.1f} {unit}\n")
    sys.stdout.flush()


def measure(process: subprocess.Popen[bytes], count: int) -> None:
    """The figures of a server that was started a moment ago."""
    began = time.monotonic()
    while True:
        try:
            ask("/ready")
            break
        except OSError:
            if process.poll() is not None:
                raise SystemExit(process.returncode) from None
            time.sleep(0.1)
    say("ready", time.monotonic() - began, "s")
    complete("a00000")
    say("the first was served", time.monotonic() - began, "s")
    say("the last, which is asked for before its turn", complete(f"a{count - 1:05d}"), "ms")
    worst, known = 0.0, 0
    while known < count:
        listed, took = ask("/v1/models")
        known, worst = len(json.loads(listed)["data"]) - 1, max(worst, took)
        time.sleep(0.5)
    say("all were registered", time.monotonic() - began, "s")
    say("the slowest /v1/models meanwhile", worst, "ms")
    for path in ("/v1/models", "/v1/adapters", "/v1/adapters?limit=1000", "/v1/residency", "/metrics"):
        answers = [ask(path) for _ in range(TIMES)]
        took = statistics.median(taken for _, taken in answers)
        say(f"{path}, {len(answers[0][0]) / 1e3:,.0f} kB", took, "ms")
    began, pages, after, more = time.monotonic(), 0, "", True
    while more:
        page = json.loads(ask(f"/v1/adapters?limit=1000{after}")[0])
        pages, more, after = pages + 1, page["has_more"], f"&after={page['data'][-1]['alias']}"
    say(f"the whole list in {pages} pages", 1e3 * (time.monotonic() - began), "ms")
    say("a short answer", complete(f"a{count // 2:05d}"), "ms")


def main() -> int:
    """Write, start, measure, end."""
    count = int(sys.argv[1]) if sys.argv[1:] else 5_000
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write(root, count)
        options = {
            "--adapter-dir": root / "adapters",
            "--load-format": "dummy",
            "--dtype": "float32",
            "--pool-gb": "0.5",
            "--port": PORT,
            "--log-level": "error",
        }
        words = [str(word) for pair in options.items() for word in pair]
        command = [sys.executable, "-m", "loraplex.cli", "serve", str(root / "base"), *words]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            try:
                measure(process, count)
            finally:
                began = time.monotonic()
                process.terminate()
                process.wait()
                say("ended", time.monotonic() - began, "s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
