"""Requests that are served now, by the id under which their callers know them.

Specification: interface "HTTP" (`GET /v1/requests/{x-request-id}`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class LiveRequest:
    """One that was sent to the engine. model: what its name was resolved to. samples: the engine's id of
    each, in the order of its choices.
    """

    request_id: str
    tenant: str
    model: str
    samples: Sequence[str]


class LiveRequests:
    """Callers choose ids, so that one may name several, of several tenants."""

    def __init__(self) -> None:
        self._by_id: dict[str, list[LiveRequest]] = {}

    @contextmanager
    def serving(self, request: LiveRequest) -> Iterator[None]:
        """The request is live until the context ends."""
        self._by_id.setdefault(request.request_id, []).append(request)
        try:
            yield
        finally:
            left = self._by_id[request.request_id]
            left.remove(request)
            if not left:
                del self._by_id[request.request_id]

    def find(self, request_id: str, tenant: str | None) -> list[LiveRequest]:
        """Those of an id, the newest first. tenant: whose, None for everybody's."""
        return [r for r in reversed(self._by_id.get(request_id, [])) if tenant in (None, r.tenant)]
