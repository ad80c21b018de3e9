"""Which folder holds the model that was asked for, and what clients call it. Converts a GGUF once, with a
progress bar.

Specification: rulings "Start-up", "Embedded default".
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from loraplex.config import ServeConfig
from loraplex.core.errors import CallerError, ErrorCode

SOURCE_FILE = "source.json"


def resolve_model(config: ServeConfig) -> tuple[Path, str]:
    """(model folder, name of the base model). Raises `model_source_missing`."""
    folder, name = _found(config)
    return folder, config.served_model_name or name


def _found(config: ServeConfig) -> tuple[Path, str]:
    if config.model is None:
        from loraplex.model.gguf import demo_model
        from loraplex.model.progress import terminal_progress

        with terminal_progress() as progress:
            folder = demo_model(progress)
        return folder, base_name(folder)
    path = Path(config.model)
    if os.path.isfile(path) and path.suffix == ".gguf":
        from loraplex.model.gguf import ensure_gguf_model
        from loraplex.model.progress import terminal_progress

        with terminal_progress() as progress:
            folder = ensure_gguf_model(path, progress=progress)
        return folder, path.stem
    if not os.path.isdir(path):
        raise CallerError(
            ErrorCode.MODEL_SOURCE_MISSING,
            f"{config.model} is neither a model folder nor a GGUF file that can be read; give the path of "
            "one",
            param="model",
        )
    return path.resolve(), base_name(path.resolve())


def base_name(folder: Path) -> str:
    """What clients call the base: the name it was converted under, without its owner, else the folder's."""
    source = folder / SOURCE_FILE
    if os.path.isfile(source):
        try:
            name = json.loads(source.read_text(encoding="utf-8")).get("base_name")
        except (OSError, ValueError, AttributeError) as error:
            raise CallerError(
                ErrorCode.CONFIG_INVALID, f"{source} is not a readable JSON object: {error}"
            ) from error
        if isinstance(name, str) and name:
            return name.rsplit("/", 1)[-1]
    return folder.name
