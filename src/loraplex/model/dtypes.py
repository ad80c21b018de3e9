"""Which floating-point type a model runs in on a device, and why, in a sentence for people."""

from __future__ import annotations

from typing import Final

import torch

from loraplex.core.errors import CallerError, ErrorCode

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def _cpu_bfloat16() -> str:
    """Name of the processor's bfloat16 instructions; empty when it has none."""
    capabilities = torch.cpu.get_capabilities()
    for flag in ("amx_bf16", "avx512_bf16"):
        if capabilities.get(flag):
            return flag
    return ""


def resolve_dtype(name: str, device: torch.device) -> tuple[torch.dtype, str]:
    """The type that `--dtype name` means on `device`, and a sentence that says so.

    "auto" is bfloat16 only where the processor multiplies it in hardware, else float32. Raises
    `config_invalid`.
    """
    if name != "auto" and name not in TORCH_DTYPES:
        raise CallerError(
            ErrorCode.CONFIG_INVALID,
            f"dtype must be auto, {', '.join(TORCH_DTYPES)}; got {name!r}",
            param="dtype",
        )
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CallerError(
            ErrorCode.CONFIG_INVALID,
            f"device is cuda, and torch {torch.__version__} sees no CUDA device here; use cpu, or a machine "
            "with a driver "
            "and torch built for it",
            param="device",
        )
    if name != "auto":
        return TORCH_DTYPES[name], f"{name}, as asked"
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) >= (8, 0):
            return torch.bfloat16, f"bfloat16: {torch.cuda.get_device_name(device)} multiplies it in hardware"
        return torch.float32, f"float32: {torch.cuda.get_device_name(device)} has no bfloat16"
    flag = _cpu_bfloat16()
    if flag:
        return torch.bfloat16, f"bfloat16: this processor has {flag}"
    return torch.float32, "float32: this processor has neither avx512_bf16 nor amx_bf16"
