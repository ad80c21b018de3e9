"""What callers may send: OpenAI's request bodies and ours, decoded strictly.

An unknown field, a wrong type or an option that is not carried out is refused with the field's name; nothing
is ignored.

Specification: interface "HTTP".
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, TypeVar, get_args
from urllib.parse import parse_qsl

import msgspec

from loraplex.catalog.records import TextWord
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.limits import DEFAULT_LISTED, MAX_LISTED
from loraplex.core.neutral import ABSENT, NO_EFFECT, Unsupported, refuse_unsupported
from loraplex.server.body_size import check_body
from loraplex.server.structured_wire import StructuredOutputs
from loraplex.text.conversation import ChatMessage, FunctionTool, Role, ToolChoiceField, check_messages

T = TypeVar("T", bound=msgspec.Struct)


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """include_usage: a last chunk carries the token counts. continuous_usage_stats: every chunk does.

    include_obfuscation: whether chunks are padded, which only an answer to a guess of their lengths would
    need; none is.
    """

    include_usage: bool | None = None
    include_obfuscation: Annotated[bool | None, NO_EFFECT] = None
    continuous_usage_stats: bool | None = None


SchemaName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$"), NO_EFFECT]


class SchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named JSON schema. strict: every schema is enforced, whatever it says."""

    name: SchemaName
    schema: dict[str, Any] | bool
    description: Annotated[str | None, NO_EFFECT] = None
    strict: Annotated[bool | None, NO_EFFECT] = None


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """The answer is free."""


class JsonObjectFormat(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"
):
    """The answer is a JSON object."""


class JsonSchemaFormat(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"
):
    """The answer is JSON under a schema."""

    json_schema: SchemaFormat


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat have in common. model: the base, where it is left out and nobody's tenant but
    one is served.

    Extensions: priority and below. safety_identifier, prompt_cache_key: names of users and of prefixes, like
    `user`: prefixes are found by what they say. truncate_prompt_tokens: the last ones that are kept;
    -1: as many as the model has positions.
    add_special_tokens: what the tokenizer puts around a text; off for chat, whose template says it.
    """

    model: str | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str | None, NO_EFFECT] = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    priority: int | None = None
    ttft_deadline_ms: int | None = None
    ignore_eos: bool | None = None
    min_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    alora_fallback: str | None = None
    safety_identifier: Annotated[str | None, NO_EFFECT] = None
    prompt_cache_key: Annotated[str | None, NO_EFFECT] = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    min_tokens: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    cache_salt: Unsupported = ABSENT
    early_stopping: Unsupported = ABSENT
    guided_decoding_backend: Unsupported = ABSENT
    guided_whitespace_pattern: Unsupported = ABSENT
    kv_transfer_params: Unsupported = ABSENT
    length_penalty: Unsupported = ABSENT
    logits_processors: Unsupported = ABSENT
    metadata: Unsupported = ABSENT
    prompt_cache_retention: Unsupported = ABSENT
    repetition_detection: Unsupported = ABSENT
    request_id: Unsupported = ABSENT
    return_tokens_as_token_ids: Unsupported = ABSENT
    service_tier: Unsupported = ABSENT
    spaces_between_special_tokens: Unsupported = ABSENT
    store: Unsupported = ABSENT
    truncation_side: Unsupported = ABSENT
    use_beam_search: Unsupported = ABSENT
    vllm_xargs: Unsupported = ABSENT


class CompletionRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. prompt: text, texts, token ids, or lists of token ids."""

    prompt: str | list[Any]
    best_of: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    prompt_embeds: Unsupported = ABSENT
    suffix: Unsupported = ABSENT


class ChatRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions. parallel_tool_calls: false allows one call; without tools it says
    nothing.
    """

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    functions: Unsupported = ABSENT
    function_call: Unsupported = ABSENT
    audio: Unsupported = ABSENT
    best_of: Unsupported = ABSENT
    chat_template: Unsupported = ABSENT
    documents: Unsupported = ABSENT
    echo: Unsupported = ABSENT
    include_reasoning: Unsupported = ABSENT
    media_io_kwargs: Unsupported = ABSENT
    mm_processor_kwargs: Unsupported = ABSENT
    modalities: Unsupported = ABSENT
    prediction: Unsupported = ABSENT
    reasoning_effort: Unsupported = ABSENT
    thinking_token_budget: Unsupported = ABSENT
    verbosity: Unsupported = ABSENT
    web_search_options: Unsupported = ABSENT


class TokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /tokenize: a text or a conversation. add_special_tokens: of a text, with what the tokenizer puts
    around it.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    chat_template: Unsupported = ABSENT
    media_io_kwargs: Unsupported = ABSENT
    mm_processor_kwargs: Unsupported = ABSENT
    tools: Unsupported = ABSENT


class DetokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class LoadLoraAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/load_lora_adapter. load_inplace: a name that is taken gets a new revision instead of a
    refusal.

    base_model_name: what the adapter is for, the base or one of its last name. lora_int_id: numbers that
    clients of other servers count with; names are identity here. text: as in `PutAdapter`.
    """

    lora_name: str
    lora_path: str
    text: TextWord | None = None
    load_inplace: bool | None = None
    base_model_name: str | None = None
    lora_int_id: Annotated[int | None, NO_EFFECT] = None
    is_3d_lora_weight: Unsupported = ABSENT


class UnloadLoraAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/unload_lora_adapter. base_model_name, lora_int_id: as in `LoadLoraAdapter`."""

    lora_name: str
    base_model_name: str | None = None
    lora_int_id: Annotated[int | None, NO_EFFECT] = None
    is_3d_lora_weight: Unsupported = ABSENT


class PutAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """PUT /v1/adapters/{alias}. expected_revision: replace only this one. drain: ask for no room beside the
    old one.

    text: whose chat template, end tokens and added tokens its requests use; the server's default where it is
    left out.
    """

    source: str
    expected_revision: int | None = None
    drain: bool | None = None
    text: TextWord | None = None


class ListAdapters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of GET /v1/adapters. limit: adapters of a page. after: the name that the last page ended
    with.
    """

    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_LISTED)] = DEFAULT_LISTED
    after: str | None = None


class PutLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """PUT /v1/limits. What is left out stays.

    pool_share: part of the page pool that adapters may take. resident_adapters: adapters on the device.
    host_gb: adapter images in host memory, in GiB.
    """

    pool_share: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    resident_adapters: Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)] | None = None
    host_gb: Annotated[float, msgspec.Meta(ge=0, le=1 << 20)] | None = None


class NoFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a call that takes none, if there is one at all."""


_UNKNOWN: Final = re.compile(r"unknown field `([^`]*)`")
_MISSING: Final = re.compile(r"missing required field `([^`]*)`")
_AT: Final = re.compile(r"at `\$\.?([^`]*)`")


_PLACE: Final = re.compile(r"(content|input|output)\[\d+\]")
_VALUE: Final = re.compile(r"Invalid (?:enum )?value '([^']*)'")
_CHOICES: Final = {
    "role": get_args(Role),
    "format.type": ("text", "json_object", "json_schema"),
    "input[...].content[...].type": ("input_text", "output_text"),
    "input[...].output[...].type": ("input_text",),
    "input[...].type": ("message", "function_call", "function_call_output", "reasoning"),
    "content[...].type": ("text",),
    "tool_choice": ("none", "auto", "required"),
    "type": ("function",),
}
"""What a field may be, by the end of its path, where the decoder only says what it is not."""


def _explained(message: str, param: str | None) -> str:
    """The decoder's message, with what would have been accepted."""
    path = _PLACE.sub(r"\1[...]", param or "")
    choices = next((words for end, words in _CHOICES.items() if path.endswith(end)), ())
    found = _VALUE.search(message)
    if found is None or not choices:
        return message
    return f"{param} is {found[1]!r}, expected {' or '.join(map(repr, choices))}"


def _param(message: str) -> str | None:
    """The field at fault in the decoder's message: `stream_options.foo`."""
    inside = _AT.search(message)
    path = inside.group(1) if inside else ""
    named = _UNKNOWN.search(message) or _MISSING.search(message)
    return ".".join(part for part in (path, named.group(1) if named else "") if part) or None


def decode(body: bytes, kind: type[T]) -> T:
    """Decode a request body. Raises `invalid_request` or `unsupported_option` with the field at fault."""
    try:
        check_body(body, kind)
        value = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        param = _param(str(error))
        reason = _explained(str(error), param)
        raise CallerError(
            ErrorCode.INVALID_REQUEST, f"the request body is refused: {reason}", param=param
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CallerError(ErrorCode.INVALID_REQUEST, f"the request body is not JSON: {error}") from error
    refuse_unsupported(value)
    if isinstance(value, (ChatRequest, TokenizeRequest)) and value.messages is not None:
        check_messages(value.messages)
    return value


def decode_query(query: bytes, kind: type[T]) -> T:
    """Decode a query string, each field once. Raises `invalid_request` with the field at fault."""
    try:
        pairs = parse_qsl(
            query.decode("ascii"),
            keep_blank_values=True,
            strict_parsing=bool(query),
            errors="strict",
            max_num_fields=16,
        )
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise CallerError(
                    ErrorCode.INVALID_REQUEST,
                    f"{name} is given {names.count(name)} times; give it once",
                    param=name,
                )
        return msgspec.convert(dict(pairs), kind, strict=False)
    except msgspec.ValidationError as error:
        raise CallerError(
            ErrorCode.INVALID_REQUEST, f"the query is refused: {error}", param=_param(str(error))
        ) from error
    except ValueError as error:
        raise CallerError(ErrorCode.INVALID_REQUEST, f"the query cannot be read: {error}") from error
