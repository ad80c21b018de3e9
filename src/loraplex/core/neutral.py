"""Fields that a body may carry though nothing is done with them: what asks for nothing is accepted, all else
is refused.

Owns the one table of values that ask for nothing, and the mark of fields that have no effect. Specification:
interface "HTTP".
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET

from loraplex.core.errors import CallerError, ErrorCode

Unsupported = Annotated[
    msgspec.Raw,
    msgspec.Meta(
        extra_json_schema={
            "type": "null",
            "description": "not carried out; leave it out, or send what asks for nothing",
        }
    ),
]
"""A field that a peer's interface knows and this server does not carry out. Decoded only where it is short.
"""
ABSENT: Final[Any] = UNSET
NO_EFFECT: Final = msgspec.Meta(extra={"effect": "none"})
"""Marks a field of any type that is accepted and changes nothing: a name for the caller's own books, or a
wish that holds anyway. A test finds every other field that nobody reads.
"""
Unread = Annotated[
    msgspec.Raw,
    NO_EFFECT,
    msgspec.Meta(extra_json_schema={"description": "says nothing that other fields do not; never read"}),
]
"""A field that clients send along with what they repeat. It stays bytes, however much it holds."""
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "annotations": ([],),
    "audio": ({},),
    "background": (False,),
    "best_of": (1,),
    "disable_additional_properties": (False,),
    "disable_any_whitespace": (False,),
    "disable_fallback": (False,),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "encrypted_content": ("",),
    "function_call": ({}, "none"),
    "functions": ([],),
    "guided_decoding_backend": ("auto",),
    "include_reasoning": (True,),
    "is_3d_lora_weight": (False,),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "metadata": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "reasoning": ("", {}, {"effort": "none"}),
    "reasoning_content": ("",),
    "reasoning_effort": ("none",),
    "refusal": ("",),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "summary": ([],),
    "tools": ([],),
    "truncation": ("disabled",),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
}
"""Values of a field, besides null, that ask for nothing; of a field that is not listed there are none."""
REASONS: Final[Mapping[str, str]] = {
    "background": "an answer comes on the connection that asks for it",
    "conversation": "no conversation is stored; send it whole as input",
    "previous_response_id": "no answer is stored; send the conversation whole as input",
    "prompt": "no prompt is stored; send it as instructions and input",
}
"""Why a field is not carried out, where its caller may wonder."""
_SHORT_BYTES: Final = 64


def refuse_unsupported(value: msgspec.Struct, prefix: str = "") -> None:
    """Raise `unsupported_option` for the first such field that asks for something, of a struct and of those
    directly in its fields. prefix: where it lies.
    """
    for name in _unsupported(type(value)):
        given = getattr(value, name)
        if given is not UNSET and not _asks_for_nothing(name, bytes(given)):
            reason = f": {REASONS[name]}" if name in REASONS else ""
            raise CallerError(
                ErrorCode.UNSUPPORTED_OPTION,
                f"{prefix}{name} is not supported by this server{reason}; leave it out",
                param=prefix + name,
            )
    for name in value.__struct_fields__:
        inside = getattr(value, name)
        if isinstance(inside, msgspec.Struct):
            refuse_unsupported(inside, f"{prefix}{name}.")


def _asks_for_nothing(name: str, raw: bytes) -> bool:
    if raw == b"null":
        return True
    neutral = NEUTRAL.get(name, ())
    if not neutral or len(raw) > _SHORT_BYTES:
        return False
    value = _given(msgspec.json.decode(raw))
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def _given(value: Any) -> Any:
    """A value without the fields that are null in it."""
    if not isinstance(value, dict):
        return value
    return {name: held for name, held in value.items() if held is not None}


@functools.cache
def _unsupported(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Names of the fields that are not carried out."""
    return tuple(field.name for field in msgspec.structs.fields(kind) if field.type is Unsupported)
