"""The durable record of each served request: which bytes, under which identity, at which generations,
answered it.

Written in batches by whoever served it, found by request id, bounded by age and number. Holds no prompt and
no output. Specification: 0x01G (request binding, slot binding, generation snapshot); rulings "Identity".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from sqlalchemy import delete, func, insert, select

from loraplex.catalog.database import Database
from loraplex.catalog.records import damaged, seal
from loraplex.catalog.schema import requests
from loraplex.core import limits
from loraplex.identity.canonical import canonical
from loraplex.identity.execution import History

_MS: Final = 1000


class ChoiceRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One sample. seed: the one that was drawn from. slot: the slot binding of its last admission; None for
    the base and where no token came. generations: text form of the vector that its first token of that
    admission saw. history: under which executions its KV rows were made, from which position each.
    reused_tokens: whose rows that admission did not compute.
    """

    seed: int
    finish_reason: str | None
    output_tokens: int
    slot: str | None = None
    generations: dict[str, str] | None = None
    admissions: int = 0
    history: History = ()
    reused_tokens: int = 0


class ProvenanceRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One attempt of one request. Digests: base, artifact, semantic and kernel ABI (None for the base model),
    and the request binding, which covers them, the tenant, the id, the attempt and the sampling policy.
    model: what was served, `alias@revision` or the base's name. catalog_generation: at which the name was
    resolved. at_ms: its end, since 1970. cache_abi, graph_revision, cache_namespace: what its blocks' keys
    began with (0x08H).
    """

    request_id: str
    tenant: str
    attempt: int
    at_ms: int
    model: str
    namespace: str | None
    base: str
    artifact: str | None
    semantic: str | None
    kernel: str | None
    policy: str
    binding: str
    catalog_generation: int
    outcome: str
    prompt_tokens: int
    output_tokens: int
    choices: tuple[ChoiceRecord, ...]
    cache_abi: str | None = None
    graph_revision: int = 0
    cache_namespace: str | None = None


class RequestLog:
    """The records in a catalog's database. Synchronous."""

    def __init__(
        self,
        database: Database,
        max_records: int = limits.MAX_REQUEST_RECORDS,
        max_age_s: int = limits.MAX_REQUEST_RECORD_AGE_S,
    ) -> None:
        self._database = database
        self._max_records = max_records
        self._max_age_ms = max_age_s * _MS

    def write(self, records: Sequence[ProvenanceRecord]) -> None:
        """Add records, in one transaction. Raises `catalog_unavailable`; then none was added."""
        rows = []
        for record in records:
            text = canonical(msgspec.to_builtins(record))
            rows.append(
                {
                    "request_id": record.request_id,
                    "tenant": record.tenant,
                    "at_ms": record.at_ms,
                    "record": text.decode(),
                    "seal": seal(text),
                }
            )
        if rows:
            with self._database.writing() as connection:
                connection.execute(insert(requests), rows)

    def find(self, request_id: str, tenant: str | None = None) -> list[ProvenanceRecord]:
        """Records of a request id, the last written first. tenant: only its own; None: anybody's."""
        if "\0" in request_id:  # no record has one, and not every database can be asked
            return []
        query = select(requests).where(requests.c.request_id == request_id)
        if tenant is not None:
            query = query.where(requests.c.tenant == tenant)
        with self._database.reading() as connection:
            rows = connection.execute(query.order_by(requests.c.seq.desc()).limit(limits.MAX_ATTEMPTS_SHOWN))
            return [_decode(row["record"], row["seal"], request_id) for row in rows.mappings()]

    def prune(self, now_ms: int) -> int:
        """Forget what is too old, and the oldest beyond the number kept; how many were forgotten."""
        with self._database.writing() as connection:
            newest = connection.execute(select(func.max(requests.c.seq))).scalar_one() or 0
            done = connection.execute(
                delete(requests).where(
                    (requests.c.at_ms < now_ms - self._max_age_ms)
                    | (requests.c.seq <= newest - self._max_records)
                )
            )
            return int(done.rowcount)


def _decode(text: str, sealed: str, request_id: str) -> ProvenanceRecord:
    data = text.encode()
    if seal(data) != sealed:
        raise damaged(f"the record of request {request_id!r} does not match its seal")
    try:
        record = msgspec.json.decode(data, type=ProvenanceRecord)
    except msgspec.DecodeError as error:
        raise damaged(f"the record of request {request_id!r} cannot be read: {error}") from None
    if record.request_id != request_id:
        raise damaged(f"the record of request {request_id!r} is that of {record.request_id!r}")
    return record
