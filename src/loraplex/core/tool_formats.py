"""Names of the forms in which models write calls of tools; what each is, `text/tools` says."""

from __future__ import annotations

from typing import Final

TOOL_FORMATS: Final = ("hermes", "llama3", "mistral", "mistral_args", "qwen3_coder", "json")
