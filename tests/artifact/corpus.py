"""All malformed adapters: (group, name, mutation of a folder by `write_lora`, expected code). For every
public entry.
"""

from __future__ import annotations

from tests.artifact.corpus_config import COMBINATIONS, TEXTS, config_cases
from tests.artifact.corpus_weights import FILES, HEADERS, TENSORS

CASES = [
    (group, *case)
    for group, cases in (
        ("config", config_cases()),
        ("pair", COMBINATIONS),
        ("text", TEXTS),
        ("header", HEADERS),
        ("tensor", TENSORS),
        ("file", FILES),
    )
    for case in cases
]
