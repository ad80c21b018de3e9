"""An engine in its callers' process: their threads step it, one at a time, until what they asked is answered.

Owns the requests that are open, the replies that are awaited, and whose turn it is to step. What several
threads ask at a time runs in the same steps; whoever steps serves all of them. Never reads arguments and
never tokenises.

Specification: rulings "Processes" (the server and `LLM` drive the same engine).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace as with_fields

from loraplex.build.engine_build import BuiltEngine
from loraplex.core.errors import CallerError, ErrorCode, LoraplexError, error_for
from loraplex.core.messages import Abort, Ended, EngineCall, Finish, Reply, Submit, Tokens
from loraplex.process.local import LocalMailbox
from loraplex.text.assembly import Piece, SampleAssembly


def closed_error() -> CallerError:
    """What is asked of a closed `LLM`."""
    return CallerError(ErrorCode.INVALID_REQUEST, "this LLM is closed; make another one")


@dataclass(slots=True)
class OpenSample:
    """A sample under way. answer: what it has come to. error: with which it ended instead."""

    submit: Submit
    assembly: SampleAssembly
    answer: Piece
    error: LoraplexError | None = None


class LocalEngine:
    """Steps `built`, whose mailbox is `mailbox`. Its methods may be called from any thread."""

    def __init__(self, built: BuiltEngine, mailbox: LocalMailbox) -> None:
        self._engine = built.engine
        self._mailbox = mailbox
        self._open: dict[str, OpenSample] = {}
        self._replies: dict[int, Reply] = {}
        self._numbers = itertools.count(1)
        self._turn = threading.Condition()
        self._stepping: int | None = None
        self._closed = False

    def call(self, message: EngineCall) -> dict[str, Any]:
        """Send a call (its id is chosen here) and return the reply's body, or raise the reply's
        typed error.
        """
        number = next(self._numbers)
        self._mailbox.post(with_fields(message, call_id=number))
        self._until(lambda: number in self._replies)
        reply = self._replies.pop(number)
        if reply.code is not None:
            raise error_for(ErrorCode(reply.code), reply.message)
        return reply.body

    def answer(self, samples: Sequence[OpenSample]) -> None:
        """Have every sample answered. Raises the first one's error; in any failure what is still open is
        withdrawn.
        """
        try:
            self.begin(samples)
            self._until(lambda: all(sample.assembly.over for sample in samples))
            for sample in samples:
                if sample.error is not None:
                    raise sample.error
        finally:
            self.withdraw(samples)

    def growing(self, samples: Sequence[OpenSample]) -> Iterator[None]:
        """Have samples answered; a turn each time that any has grown. Raises as `answer` does; leaving it
        withdraws them.
        """
        seen = 0

        def grown() -> bool:
            return seen < sum(len(sample.answer.token_ids) for sample in samples)

        try:
            self.begin(samples)
            while not all(sample.assembly.over for sample in samples) or grown():
                self._until(lambda: grown() or all(sample.assembly.over for sample in samples))
                for sample in samples:
                    if sample.error is not None:
                        raise sample.error
                seen = sum(len(sample.answer.token_ids) for sample in samples)
                yield
        finally:
            self.withdraw(samples)

    def begin(self, samples: Sequence[OpenSample]) -> None:
        """Send the requests of samples."""
        for sample in samples:
            self._open[sample.submit.request_id] = sample
            self._mailbox.post(sample.submit)

    def withdraw(self, samples: Sequence[OpenSample]) -> None:
        """Abort what is still open of samples, and leave nothing of them behind in the engine."""
        for sample in samples:
            if self._open.pop(sample.submit.request_id, None) is not None and not sample.assembly.over:
                self._mailbox.post(Abort(sample.submit.request_id))
        self._until(self._settled)

    def _settled(self) -> bool:
        """Whether the engine has read everything and holds nothing of what was withdrawn; who still waits
        steps on.
        """
        return self._closed or (not self._mailbox.pending and (self._engine.idle or bool(self._open)))

    def close(self) -> None:
        """Wait for the step under way; what waits in other threads is refused. Refused itself within
        a step.
        """
        with self._turn:
            if self._stepping == threading.get_ident():
                raise CallerError(
                    ErrorCode.INVALID_REQUEST, "an event sink must not close the LLM whose event it gets"
                )
            self._closed = True
            while self._stepping is not None:
                self._turn.wait()

    def _until(self, over: Callable[[], bool]) -> None:
        """Step, or let another thread step, until `over`."""
        me = threading.get_ident()
        while True:
            with self._turn:
                if self._stepping == me:
                    raise CallerError(
                        ErrorCode.INVALID_REQUEST, "an event sink must not use the LLM whose event it gets"
                    )
                while self._stepping is not None and not over():
                    self._turn.wait()
                if over():
                    return
                if self._closed:
                    raise closed_error()
                self._stepping = me
            try:
                self.step()
            finally:
                with self._turn:
                    self._stepping = None
                    self._turn.notify_all()

    def step(self) -> None:
        """One step of the engine, and what it brought. Only for who steps alone."""
        self._engine.step()
        for message in self._mailbox.take():
            if isinstance(message, Reply):
                self._replies[message.call_id] = message
            else:
                self._take(message)

    def _take(self, message: Tokens | Ended) -> None:
        sample = self._open.get(message.request_id)
        if sample is None:
            return
        try:
            last = sample.assembly.take(message, sample.answer)
        except LoraplexError as error:
            sample.error = error
            return
        if last is not None:
            self._mailbox.post(Finish(message.request_id, last))
