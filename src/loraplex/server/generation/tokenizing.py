"""POST /tokenize and /detokenize: what a prompt is as token ids, by the text of the model that is asked.

Specification: interface "HTTP".
"""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.core import limits
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.server.generation.chat import conversation_ids
from loraplex.server.generation.generate import bind_model, check_ids, need_codec
from loraplex.server.routing import Call, named_model, read_body, require_fitting
from loraplex.server.wire import DetokenizeRequest, TokenizeRequest
from loraplex.text.codec import SHORT_TEXT_CHARS, TextCodec
from loraplex.text.conversation import template_messages

_ALL_TEXT_TOKENS = limits.MAX_PROMPT_TOKENS


async def tokenize(call: Call) -> None:
    """Token ids of a text or of a conversation."""
    request = await read_body(call, TokenizeRequest)
    call.service.require_ready()
    if (request.prompt is None) == (request.messages is None):
        raise CallerError(ErrorCode.INVALID_REQUEST, "give prompt or messages, one of them", param="prompt")
    async with bind_model(call.service, named_model(call, request.model), call.caller.tenant) as model:
        codec = need_codec(model.codec, "prompt" if request.messages is None else "messages")
        texts = [request.prompt or ""] if request.messages is None else [m.text for m in request.messages]
        require_fitting(codec, texts, _ALL_TEXT_TOKENS, "prompt" if request.messages is None else "messages")
        long = sum(map(len, texts)) > SHORT_TEXT_CHARS or len(texts) > limits.SHORT_CONVERSATION
        ids = await call.service.workers.run_if(long, lambda: _ids(codec, request))
        strings = [codec.token_text(token) for token in ids] if request.return_token_strs else None
        await call.exchange.answer(
            {
                "count": len(ids),
                "max_model_len": call.service.engine_info["max_model_len"],
                "tokens": ids,
                "token_strs": strings,
            }
        )


def _ids(codec: TextCodec, request: TokenizeRequest) -> Sequence[int]:
    if request.messages is None:
        return codec.encode(request.prompt or "", add_special=request.add_special_tokens is not False)
    return conversation_ids(codec, request, template_messages(request.messages))


async def detokenize(call: Call) -> None:
    """The text of token ids, special ones included."""
    request = await read_body(call, DetokenizeRequest)
    call.service.require_ready()
    async with bind_model(call.service, named_model(call, request.model), call.caller.tenant) as model:
        codec = need_codec(model.codec, "tokens")
        check_ids(call.service, request.tokens, "tokens")
        long = len(request.tokens) > SHORT_TEXT_CHARS
        text = await call.service.workers.run_if(
            long, lambda: codec.decode(request.tokens, skip_special=False)
        )
        await call.exchange.answer({"prompt": text})
