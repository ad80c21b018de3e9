"""Writes tiny GGUF files: a real container, real quantised blocks, a real byte-level tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 2, 64, 4, 2, 16, 96

Edit = Callable[["gguf.GGUFWriter"], None]


def write_tiny(
    path: Path, *, edit: Edit | None = None, pre: str = "smollm", tied: bool = True, drop: str = ""
) -> Path:
    """A two-layer Llama with Q4_1 linears, a Q8_0 embedding and a byte-level tokenizer with a few merges."""
    rng = np.random.default_rng(7)
    alphabet = list(bytes_to_unicode().values())
    tokens = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<think>",
        *alphabet,
        "Ġt",
        "he",
        "Ġthe",
        "ĠĠ",
        "ĊĊ",
    ]
    types = [3, 3, 3, 4] + [1] * (len(tokens) - 4)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["Ġ t", "h e", "Ġt he", "Ġ Ġ", "Ċ Ċ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    if edit is not None:
        edit(writer)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.attn_norm": (HIDDEN,), f"blk.{i}.ffn_norm": (HIDDEN,)}
        shapes |= {f"blk.{i}.attn_q": (q, HIDDEN), f"blk.{i}.attn_output": (HIDDEN, q)}
        shapes |= {f"blk.{i}.attn_k": (kv, HIDDEN), f"blk.{i}.attn_v": (kv, HIDDEN)}
        shapes |= {
            f"blk.{i}.ffn_gate": (INNER, HIDDEN),
            f"blk.{i}.ffn_up": (INNER, HIDDEN),
            f"blk.{i}.ffn_down": (HIDDEN, INNER),
        }
    if not tied:
        shapes["output"] = (len(tokens), HIDDEN)
    for name, shape in shapes.items():
        if name == drop:
            continue
        values = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values)
            continue
        kind = (
            gguf.GGMLQuantizationType.Q8_0
            if name in ("token_embd", "output")
            else gguf.GGMLQuantizationType.Q4_1
        )
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
