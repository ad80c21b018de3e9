"""The catalog's records: artifacts, immutable revisions, grants; their text, their seals, and what makes them
valid.

A record is stored as canonical JSON beside a seal, the digest of that text. What comes back from a database
is accepted only when the text is strict, the seal is right, and every digest follows from the others: a row
that somebody edited is refused, never served. Owns no storage.

Specification: 0x01G (an alias is provenance, the bytes are identity), 0x0D (alias treated as content);
rulings "Identity", "Tenants".
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final, Literal, NamedTuple, TypeVar

import msgspec

from loraplex.artifact.card import Card
from loraplex.core import limits
from loraplex.core.errors import CallerError, ErrorCode, InternalFault, LoraplexError
from loraplex.identity.canonical import canonical, check_digest
from loraplex.identity.digests import ALWAYS_ON, invocation_policy, semantic_abi

TextWord = Literal["adapter", "base"]
"""Whose chat template, end tokens and further tokens an adapter's requests use."""
DEFAULT_NAMESPACE: Final = "default"
ANY: Final = "*"
_ALIAS: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]*")
_NAMESPACE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
_OF_THE_FUNCTION: Final = (
    "base",
    "artifact",
    "activation",
    "semantic",
    "method",
    "ranks",
    "targets",
    "modules",
)
Record = TypeVar("Record", bound=msgspec.Struct)


class AliasKey(NamedTuple):
    """Under what an alias is kept: the namespace that it lies in, and the alias."""

    namespace: str
    alias: str


class Right(StrEnum):
    """What a tenant may do with an alias."""

    USE = "use"
    LIST = "list"
    LOAD = "load"
    SWAP = "swap"


class ArtifactRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An artifact over a base: its digests (H_base, H_artifact, activation policy, H_adapter_semantic) and
    figures.

    The figures are those of the files that were read: a revision has its own, the table of artifacts those of
    the first. nbytes: of all tensors, as they were read. invocation_tokens: of an activated adapter, from
    which its policy follows.
    """

    base: str
    artifact: str
    activation: str
    semantic: str
    method: str
    ranks: tuple[int, ...]
    targets: tuple[str, ...]
    tensors_applied: int
    tensors_total: int
    modules: int
    nbytes: int
    invocation_tokens: tuple[int, ...] = ()

    def same_function(self, other: ArtifactRecord) -> bool:
        """Whether both are one function. Figures of the files that it was read from may differ: one that
        carries copies of what the base has anyway has more tensors and bytes than one that does not.
        """
        return all(getattr(self, name) == getattr(other, name) for name in _OF_THE_FUNCTION)

    def check(self) -> None:
        """Raise `catalog_record_invalid` unless every digest is one and follows, and every tensor was
        applied.
        """
        for name in ("base", "artifact", "activation", "semantic"):
            _digest(name, getattr(self, name))
        if self.semantic != semantic_abi(self.base, self.artifact, self.activation):
            raise damaged("the semantic digest does not follow from base, artifact and activation")
        tokens = self.invocation_tokens
        if self.activation != (invocation_policy(tokens) if tokens else ALWAYS_ON):
            raise damaged("the activation digest does not follow from the invocation")
        if not 0 < self.tensors_applied == self.tensors_total:
            raise damaged(f"{self.tensors_applied} of {self.tensors_total} tensors were applied")
        if not self.method or self.modules < 1 or self.nbytes < 1:
            raise damaged(
                f"method {self.method!r}, {self.modules} modules and {self.nbytes} bytes make no artifact"
            )
        if list(self.ranks) != sorted(set(self.ranks)) or any(
            not 1 <= r <= limits.MAX_RANK for r in self.ranks
        ):
            raise damaged(f"ranks {list(self.ranks)} are not ascending from 1 to {limits.MAX_RANK}")
        if not self.targets or list(self.targets) != sorted(set(self.targets)):
            raise damaged(f"targets {list(self.targets)} are not there, sorted and distinct")


class Revision(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One published revision of an alias in a namespace, for ever the same.

    generation: the catalog's when it was published. source: where the bytes were read, for provenance and for
    reading them again; never part of identity. content: key in the artifact store, None for a local folder.
    actor: who published it. at_ms: when, milliseconds since 1970. card: what its card said of its use. text:
    whose text its requests use, "adapter" or "base"; None is the server's default.
    """

    namespace: str
    alias: str
    revision: int
    generation: int
    source: str
    content: str | None
    actor: str
    at_ms: int
    artifact: ArtifactRecord
    card: Card | None = None
    text: TextWord | None = None

    @property
    def name(self) -> str:
        """`alias@revision`."""
        return f"{self.alias}@{self.revision}"

    @property
    def alias_key(self) -> AliasKey:
        """The alias that it was published under."""
        return AliasKey(self.namespace, self.alias)

    @property
    def key(self) -> str:
        """Semantic digest: what the engine calls it."""
        return self.artifact.semantic

    def check(self) -> None:
        """Raise `catalog_record_invalid` unless it could have been published."""
        check_stored_name("namespace", self.namespace, _NAMESPACE)
        check_stored_name("alias", self.alias, _ALIAS)
        if self.revision < 1 or self.generation < self.revision or self.at_ms < 0:
            raise damaged(
                f"revision {self.revision} of generation {self.generation} cannot have been published"
            )
        if self.content is not None:
            _digest("content", self.content)
        if (
            not 0 < len(self.source) <= limits.MAX_SOURCE_CHARS
            or not 0 < len(self.actor) <= limits.MAX_ACTOR_CHARS
        ):
            raise damaged("source or actor is missing or too long")
        self.artifact.check()
        if self.card is not None and self.card.texts and not self.artifact.invocation_tokens:
            raise damaged("a card of an activated adapter stands beside one that is always on")

    def describe(self, live: Mapping[str, Any]) -> dict[str, Any]:
        """The adapter's public JSON (interface "HTTP"). live: the engine's entry for it, empty where it has
        none.
        """
        artifact = self.artifact
        return {
            "alias": self.alias,
            "revision": self.revision,
            "artifact_digest": artifact.artifact,
            "semantic_digest": artifact.semantic,
            "method": artifact.method,
            "ranks": list(artifact.ranks),
            "targets": list(artifact.targets),
            "invocation_tokens": list(artifact.invocation_tokens),
            "chat_suffix": None if self.card is None else self.card.chat_suffix,
            "tensors_applied": artifact.tensors_applied,
            "tensors_total": artifact.tensors_total,
            "state": live.get("state", "absent"),
            "tier_bytes": {
                "device": live.get("device_bytes", 0),
                "host": artifact.nbytes,
            },
            "leases": live.get("leases", 0),
            "pinned": live.get("pinned", False),
            "generation": self.generation,
            "source": self.source,
        }


class Grant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An authorisation record: what `tenant` may do with `alias` of `namespace`; `*` stands for every one."""

    namespace: str
    alias: str
    tenant: str
    rights: tuple[Right, ...]

    def covers(self, tenant: str, alias: str, right: Right) -> bool:
        """Whether it permits `tenant` to do this with an alias of its namespace."""
        return right in self.rights and self.tenant in (ANY, tenant) and self.alias in (ANY, alias)

    def check(self) -> None:
        """Raise `catalog_record_invalid` unless names and rights are well-formed."""
        check_stored_name("namespace", self.namespace, _NAMESPACE)
        if self.alias != ANY:
            check_stored_name("alias", self.alias, _ALIAS)
        if self.tenant != ANY:
            check_stored_name("tenant", self.tenant, _NAMESPACE)
        if not self.rights or list(self.rights) != sorted(set(self.rights)):
            raise damaged(f"rights {list(self.rights)} are not there, sorted and distinct")


def seal(text: bytes) -> str:
    """The digest beside a record's text."""
    return hashlib.sha256(text).hexdigest()


def encode(record: Revision | ArtifactRecord | Grant) -> bytes:
    """A valid record as canonical text; raises `catalog_record_invalid` for any other."""
    record.check()
    return canonical(msgspec.to_builtins(record))


def decode(kind: type[Record], text: bytes | str, sealed: str) -> Record:
    """The record in a row's text, checked; raises `catalog_record_invalid` with what is wrong with it."""
    data = text.encode() if isinstance(text, str) else bytes(text)
    if seal(data) != sealed:
        raise damaged("the text of the record does not match its seal")
    try:
        record = msgspec.json.decode(data, type=kind, strict=True)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise damaged(f"the text cannot be read: {error}") from None
    check = getattr(record, "check")  # noqa: B009 - every record kind has it, which TypeVar bounds cannot say
    check()
    if canonical(msgspec.to_builtins(record)) != data:
        raise damaged("the text is not canonical")
    return record


def check_alias(alias: str) -> str:
    """The alias, or `invalid_request` with what an alias looks like."""
    if alias.endswith("/") or "//" in alias:  # somebody's slip with a path, and not another name
        raise CallerError(
            ErrorCode.INVALID_REQUEST,
            f"alias {alias[:40]!r} has an empty part between slashes",
            param="alias",
        )
    return _check_name(alias, _ALIAS, "alias", ". _ : / -")


def check_namespace(name: str) -> str:
    """The namespace or tenant, or `invalid_request` with what one looks like."""
    return _check_name(name, _NAMESPACE, "tenant", ". _ : -")


def _check_name(name: str, form: re.Pattern[str], what: str, marks: str) -> str:
    if len(name) > limits.MAX_ALIAS_CHARS or not form.fullmatch(name):
        raise CallerError(
            ErrorCode.INVALID_REQUEST,
            f"{what} {name[:40]!r} must be 1 to {limits.MAX_ALIAS_CHARS} letters, digits or {marks}, "
            "beginning with a letter or digit",
            param=what,
        )
    return name


def check_stored_name(what: str, name: str, form: re.Pattern[str]) -> None:
    """Raise `catalog_record_invalid` unless a stored name has its form."""
    if len(name) > limits.MAX_ALIAS_CHARS or not form.fullmatch(name):
        raise damaged(f"{what} {name[:40]!r} is not well-formed")


def damaged(message: str) -> InternalFault:
    """A record that the catalog would never have written."""
    return InternalFault(ErrorCode.CATALOG_RECORD_INVALID, f"a catalog record is refused: {message}")


def _digest(name: str, value: str) -> None:
    try:
        check_digest(name, value)
    except LoraplexError as error:
        raise damaged(error.message) from None
