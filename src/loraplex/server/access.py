"""What is remembered of a request when it is over: metrics, the access line, and the record of what answered
it.

Never answers. Prompts are in neither line nor metrics, unless the operator asked for them.

Specification: rulings "Promise"; 0x01G (records).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from loraplex.core.errors import LoraplexError
from loraplex.process.logs import fields
from loraplex.server.auth import Caller
from loraplex.server.exchange import Exchange
from loraplex.server.generation.generate import Generation
from loraplex.server.metrics import Metrics, outcome_of
from loraplex.server.provenance import request_record
from loraplex.server.service import Service

_access: Final = logging.getLogger("loraplex.access")
_NS: Final = 1e9
GENERATING: Final = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
PROBES: Final = ("/health", "/ready", "/metrics")
"""Asked every few seconds by machines; their lines would bury those of requests."""


@dataclass(slots=True)
class Facts:
    """What is known of a request while it is served.

    model: what its name was resolved to. stream: whether the answer comes in pieces. prompt: for the line, if
    it is to be there. generation: once the engine was asked. outcome, code: how it ended.
    """

    model: str | None = None
    stream: bool | None = None
    prompt: str | None = None
    generation: Generation | None = None
    outcome: str = "ok"
    code: str | None = None

    def failed(self, error: LoraplexError) -> None:
        """It ended with an error."""
        self.outcome, self.code = outcome_of(error), error.code.value


def account(
    service: Service, metrics: Metrics, exchange: Exchange, caller: Caller, facts: Facts, begun_ns: int
) -> None:
    """Count a request that is over, and write its line and its record."""
    now, generation = service.clock.now_ns(), facts.generation
    path = exchange.path.removesuffix("/")
    first_s = None
    if generation is not None and generation.first_token_ns:
        first_s = (generation.first_token_ns - begun_ns) / _NS
    if path in GENERATING:
        metrics.requests.labels(path.removeprefix("/v1/").replace("/", "_"), facts.outcome).inc()
        metrics.duration.observe((now - begun_ns) / _NS)
        if generation is not None:
            metrics.prompt_tokens.inc(generation.prompt_tokens)
            metrics.output_tokens.inc(generation.output_tokens)
            _remember(service, exchange, caller, generation, facts.code or facts.outcome)
        if first_s is not None:
            metrics.ttft.observe(first_s)
    _access.log(
        logging.DEBUG if path in PROBES else logging.INFO,
        "request",
        extra=fields(
            request_id=exchange.request_id,
            method=exchange.method,
            path=exchange.path,
            status=exchange.status,
            outcome=facts.outcome,
            code=facts.code,
            tenant=caller.tenant or None,
            model=facts.model,
            prompt=facts.prompt,
            stream=facts.stream,
            prompt_tokens=None if generation is None else generation.prompt_tokens,
            output_tokens=None if generation is None else generation.output_tokens,
            ttft_ms=None if first_s is None else round(first_s * 1e3, 3),
            duration_ms=round((now - begun_ns) / 1e6, 3),
        ),
    )


def _remember(
    service: Service, exchange: Exchange, caller: Caller, generation: Generation, outcome: str
) -> None:
    """The record of what answered a request that reached the engine."""
    provenance, seen = service.provenance, generation.choices_seen()
    if provenance is None or not seen:
        return
    provenance.add(
        request_record(
            exchange.request_id,
            caller.tenant,
            provenance.attempts.next(caller.tenant, exchange.request_id),
            generation.served,
            seen,
            outcome,
            generation.prompt_tokens,
            generation.ran_on,
        )
    )
