"""POST /v1/responses: chat in the words of OpenAI's Responses interface. Nothing is stored.

A request becomes the chat request that asks the same and goes its way; only the answer is written in items
and in events of its own. Specification: interface "HTTP".
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from loraplex.core.errors import LoraplexError
from loraplex.core.request import FinishReason
from loraplex.server.answers import TokenLogprob, error_body
from loraplex.server.generation.chat import Chat
from loraplex.server.generation.generate import Generation, ServedModel
from loraplex.server.generation.logprobs import chat_logprobs
from loraplex.server.generation.serving import About, Prepared, serve
from loraplex.server.response_answers import (
    AnswerText,
    IncompleteDetails,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputText,
    Response,
    ResponseFailure,
    ResponseUsage,
    Status,
    named_event,
)
from loraplex.server.responses_wire import AsChat, ResponsesRequest
from loraplex.server.routing import Call, read_body
from loraplex.server.wire import ChatRequest, TextFormat
from loraplex.text.assembly import Piece
from loraplex.text.tools.tool_types import CallDelta

Tell = Callable[..., None]
"""Hears of an event by its kind and its fields."""


async def responses(call: Call) -> None:
    """Answer a conversation, in items."""
    endpoint = Responses()
    try:
        await serve(call, endpoint)
    except LoraplexError as error:
        endpoint.rename(error)
        raise


class Responses:
    """`serving.Endpoint` of one request."""

    prefix = "resp_"
    param = Chat.param

    def __init__(self) -> None:
        self._asked: ResponsesRequest | None = None
        self._same: AsChat | None = None

    async def read(self, call: Call) -> ChatRequest:
        """The body as a chat request."""
        self._asked = await read_body(call, ResponsesRequest)
        self._same = AsChat(self._asked)
        return self._same.chat

    def rename(self, error: LoraplexError) -> None:
        """Say what chat refused in this interface's words."""
        if self._same is not None:
            self._same.rename(error)

    async def prepare(self, call: Call, request: ChatRequest, model: ServedModel) -> Prepared:
        """As a conversation."""
        return await Chat().prepare(call, request, model)

    def rendering(
        self, about: About, request: ChatRequest, prepared: Prepared, generation: Generation
    ) -> ResponseRendering:
        """Items and events."""
        if self._asked is None:
            raise RuntimeError("a request is read before it is answered")
        return ResponseRendering(about, self._asked, prepared, generation)


class Output:
    """The items of an answer as they come: what is said, then calls. items: those that are whole."""

    def __init__(self, request_id: str, tell: Tell) -> None:
        self.items: list[OutputItem] = []
        self._request_id = request_id
        self._tell = tell
        self._open: OutputItem | None = None
        self._said: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._untold: list[TokenLogprob] = []
        """Log probabilities of tokens whose text is held back."""

    def add(self, piece: Piece, logprobs: Sequence[TokenLogprob]) -> None:
        """What a piece brings."""
        self._untold += logprobs
        if piece.text:
            self._say(piece.text)
        for delta in piece.calls:
            self._call(delta)
        if piece.finish_reason is not None:
            if self._open is None and not self.items:
                self._open_message()
            self._close("incomplete" if piece.finish_reason == FinishReason.LENGTH.value else "completed")

    def _say(self, text: str) -> None:
        if not isinstance(self._open, OutputMessage):
            self._close("completed")
            self._open_message()
        told, self._untold = self._untold, []
        self._said.append(text)
        self._logprobs += told
        self._tell("response.output_text.delta", **self._part_place, delta=text, logprobs=told)

    def _call(self, delta: CallDelta) -> None:
        if delta.name is not None:
            self._close("completed")
            self._open = OutputCall(
                id=self._id("fc"), status="in_progress", call_id=delta.id or "", name=delta.name, arguments=""
            )
            self._tell("response.output_item.added", output_index=self._index, item=self._open)
        if delta.arguments:
            self._said.append(delta.arguments)
            self._tell("response.function_call_arguments.delta", **self._place, delta=delta.arguments)

    def _open_message(self) -> None:
        self._open = OutputMessage(id=self._id("msg"), status="in_progress", content=[])
        self._tell("response.output_item.added", output_index=self._index, item=self._open)
        self._tell("response.content_part.added", **self._part_place, part=OutputText(text=""))

    def _close(self, status: Status) -> None:
        """End the open item, if there is one."""
        if self._open is None:
            return
        said, self._said = "".join(self._said), []
        item: OutputItem
        if isinstance(self._open, OutputMessage):
            item = msgspec.structs.replace(self._open, status=status, content=[self._whole_part(said)])
        else:
            item = msgspec.structs.replace(self._open, status=status, arguments=said)
            self._tell("response.function_call_arguments.done", **self._place, name=item.name, arguments=said)
        self._tell("response.output_item.done", output_index=self._index, item=item)
        self.items.append(item)
        self._open = None

    def _whole_part(self, said: str) -> OutputText:
        scores, self._logprobs, self._untold = [*self._logprobs, *self._untold], [], []
        part = OutputText(text=said, logprobs=scores)
        self._tell("response.output_text.done", **self._part_place, text=said, logprobs=scores)
        self._tell("response.content_part.done", **self._part_place, part=part)
        return part

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._request_id}_{self._index}"

    @property
    def _index(self) -> int:
        return len(self.items)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": "" if self._open is None else self._open.id, "output_index": self._index}

    @property
    def _part_place(self) -> dict[str, Any]:
        return {**self._place, "content_index": 0}


_OPENING: Final = ("response.created", "response.in_progress")


class ResponseRendering:
    """`serving.Rendering` of items."""

    def __init__(
        self, about: About, request: ResponsesRequest, prepared: Prepared, generation: Generation
    ) -> None:
        self._about = about
        self._request = request
        self._prepared = prepared
        self._generation = generation
        self._numbers = itertools.count()
        self._told: list[bytes] = []
        self._output = Output(about.call.exchange.request_id, self._tell if request.stream else _silent)
        self._finish_reason: str | None = None

    def opening(self) -> bytes:
        """That the answer has begun."""
        begun = self._response("in_progress")
        for kind in _OPENING:
            self._tell(kind, response=begun)
        return self._taken()

    def chunk(self, piece: Piece) -> bytes:
        """What a piece adds to items."""
        self._take(piece)
        return self._taken()

    def closing(self) -> bytes:
        """The whole answer once more."""
        whole = self._whole()
        self._tell(f"response.{whole.status}", response=whole)
        return self._taken()

    def failed(self, error: LoraplexError) -> bytes:
        """The answer as far as it came, and why it came no further."""
        said = error_body(error)["error"]
        failure = ResponseFailure(said["code"], said["message"])
        self._tell("response.failed", response=self._response("failed", error=failure))
        return self._taken()

    def whole(self, parts: dict[int, list[Piece]]) -> msgspec.Struct:
        """The answer with its items."""
        for piece in parts.get(0, ()):
            self._take(piece)
        return self._whole()

    def _take(self, piece: Piece) -> None:
        codec, top = self._about.served.codec, self._request.top_logprobs or 0
        scores = (
            chat_logprobs(codec, piece.logprobs, top).content
            if self._request.wants_logprobs and codec is not None
            else ()
        )
        self._output.add(piece, scores)
        self._finish_reason = piece.finish_reason or self._finish_reason

    def _whole(self) -> Response:
        usage = ResponseUsage.of(self._generation.usage())
        if self._finish_reason == FinishReason.LENGTH.value:
            return self._response("incomplete", usage=usage, incomplete_details=IncompleteDetails())
        return self._response("completed", usage=usage)

    def _response(self, status: Status, **more: Any) -> Response:
        asked, params = self._request, self._prepared.params
        form = None if asked.text is None else asked.text.format
        return Response(
            id=self._about.id,
            created_at=self._about.call.created,
            status=status,
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            max_tool_calls=asked.max_tool_calls,
            metadata=asked.metadata or {},
            model=self._about.model,
            output=list(self._output.items),
            parallel_tool_calls=asked.parallel_tool_calls is not False,
            prompt_cache_key=asked.prompt_cache_key,
            safety_identifier=asked.safety_identifier,
            system_fingerprint=self._about.served.fingerprint,
            temperature=params.temperature,
            text=AnswerText(form or TextFormat()),
            tool_choice=asked.tool_choice or "auto",
            tools=asked.tools or [],
            top_logprobs=asked.top_logprobs or 0,
            top_p=params.top_p,
            user=asked.user,
            **more,
        )

    def _tell(self, kind: str, **fields: Any) -> None:
        self._told.append(named_event(kind, next(self._numbers), fields))

    def _taken(self) -> bytes:
        told, self._told = self._told, []
        return b"".join(told)


def _silent(kind: str, **fields: Any) -> None:
    """Nobody hears of the events of an answer that is sent whole."""
