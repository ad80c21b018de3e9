"""The description of the HTTP interface, made from the structs that decode and encode it."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from loraplex import __version__
from loraplex.server.answers import ChatCompletion, Completion
from loraplex.server.response_answers import Response
from loraplex.server.responses_wire import ResponsesRequest
from loraplex.server.wire import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadLoraAdapter,
    PutAdapter,
    PutLimits,
    TokenizeRequest,
    UnloadLoraAdapter,
)

BODIES: Final[dict[tuple[str, str], Any]] = {
    ("POST", "/v1/completions"): CompletionRequest,
    ("POST", "/v1/chat/completions"): ChatRequest,
    ("POST", "/v1/responses"): ResponsesRequest,
    ("POST", "/tokenize"): TokenizeRequest,
    ("POST", "/detokenize"): DetokenizeRequest,
    ("POST", "/v1/load_lora_adapter"): LoadLoraAdapter,
    ("POST", "/v1/unload_lora_adapter"): UnloadLoraAdapter,
    ("PUT", "/v1/adapters/{alias}"): PutAdapter,
    ("PUT", "/v1/limits"): PutLimits,
}
"""What the body of a route must be; the others take none."""
_ANSWERS: dict[tuple[str, str], Any] = {
    ("POST", "/v1/completions"): Completion,
    ("POST", "/v1/chat/completions"): ChatCompletion,
    ("POST", "/v1/responses"): Response,
}
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


def openapi(routes: list[tuple[str, str, str]]) -> dict[str, Any]:
    """An OpenAPI 3.1 document. routes: (method, path with {names}, summary)."""
    kinds = [*BODIES.values(), *_ANSWERS.values()]
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    of = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for method, path, summary in routes:
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, summary, of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "loraplex", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**components, "Error": _ERROR}},
    }


def _operation(method: str, path: str, summary: str, schema_of: dict[Any, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": "success"}
    if (method, path) in _ANSWERS:
        answer["content"] = {"application/json": {"schema": schema_of[_ANSWERS[method, path]]}}
    error = {"schema": {"$ref": "#/components/schemas/Error"}}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": answer,
            "default": {"description": "a typed error", "content": {"application/json": error}},
        },
    }
    if (method, path) in BODIES:
        body = {"application/json": {"schema": schema_of[BODIES[method, path]]}}
        operation["requestBody"] = {"required": True, "content": body}
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return operation
