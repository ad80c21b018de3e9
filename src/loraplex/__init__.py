"""loraplex: a serving runtime for thousands of LoRA adapters over one resident base model.

Owns the version and the public names. It must stay free of imports of ours: importing any part of the package
runs this file first, so an import here would reach the deterministic core through the back door. Public names
come from a module `__getattr__` that imports them when they are asked for.
"""

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AnswerForm",
    "LoraplexError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "demo_model",
]

_HOMES = {
    "LLM": "api",
    "RequestOutput": "api",
    "SamplingParams": "core.request",
    "AnswerForm": "core.request",
    "LoraplexError": "core.errors",
    "demo_model": "model.gguf",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'loraplex' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"loraplex.{_HOMES[name]}"), name)
