"""Forms in which an answer that begins as a JSON object is a call: the grammar that they share.

Owns the rules only; what such a call looks like is each form's.
"""

from __future__ import annotations

from typing import Final

from loraplex.text.tools.call_grammar import Asked, Vocabulary, mark, plain_tokens

NO_OBJECT: Final = "SAID: /[ \\t\\r\\n]*[^{ \\t\\r\\n](.|\\n)*/\n"
"""Text that does not begin as an object."""


def object_rules(asked: Asked, between: str, begin: str, vocabulary: Vocabulary) -> str:
    """Rules from `start` to `calls`. between: a terminal that separates calls. begin: a token that opens them
    too.
    """
    calls = "calls: call\n" if asked.single else f"calls: call ({between} call)*\n"
    index = vocabulary.token_id(begin) if begin else None
    if asked.required:
        prefix = "" if index is None else f"{mark(begin, vocabulary)}? "
        return f"start: ws? {prefix}ws? calls\n{calls}"
    opened = "" if index is None else f" | free <[{index}]> ws? calls"
    tokens = plain_tokens(vocabulary, [begin])
    free = "free: SAID?\n" if tokens is None else f"free: SAID? ({tokens} TEXT)*\n"
    return f"{NO_OBJECT}{free}start: free | ws? calls{opened}\n{calls}"
