"""What a base's folder says beside its weights, for adapters to be held against: names, commit, tokenizer,
companions.

Specification: 0x01G (base identity); rulings "Text".
"""

from __future__ import annotations

from pathlib import Path

from loraplex.artifact.base_facts import BaseFacts, base_names, hub_commit
from loraplex.artifact.companions import NO_COMPANIONS
from loraplex.build.base_model import read_config
from loraplex.build.model_folder import base_name
from loraplex.text.codec import load_tokenizer


def read_base_facts(folder: Path, *names: str) -> BaseFacts:
    """The facts of the base in `folder`. names: others that it is served under. Raises what its files'
    readers raise.
    """
    path = folder.absolute()
    given = read_config(folder).get("_name_or_path")
    texts = [*names, base_name(path), str(path), *([given] if isinstance(given, str) else [])]
    codec = load_tokenizer(folder)
    return BaseFacts(
        names=base_names(texts),
        commit=hub_commit(str(path)),
        token_ids=None if codec is None else codec.vocab_size,
        companions=NO_COMPANIONS if codec is None else codec.companions,
    )
