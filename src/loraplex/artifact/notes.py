"""What is said about an adapter that is served all the same: registration, `verify` and its JSON show it.

Specification: rulings "Errors" (nothing is ignored without a word).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class NoteKind(StrEnum):
    """What a note is about."""

    OTHER_BASE = "other_base"
    OTHER_BASE_REVISION = "other_base_revision"
    MASKED_TOKENS = "masked_tokens"
    CHAT_TEMPLATE = "chat_template"
    END_TOKENS = "end_tokens"
    ADDED_TOKENS = "added_tokens"
    OTHER_VOCABULARY = "other_vocabulary"


@dataclass(frozen=True, slots=True)
class Note:
    """Something that an adapter is served in spite of. message: one sentence for people."""

    kind: NoteKind
    message: str
