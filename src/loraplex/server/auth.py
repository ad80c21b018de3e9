"""Who calls: API keys, their tenants and roles, and the limits of each tenant.

The key file holds SHA-256 digests, never keys: JSON objects one a line, or TOML with `[[keys]]`, each with
`sha256`, `tenant` and, optionally, `role` (`user` or `admin`). An object without `sha256`, in TOML one of
`[[tenants]]`, gives a tenant its `weight`, `max_running` and `max_waiting`. Without a file everybody is the
admin of the tenant `default`.

A tenant's aliases are its own; those of `default`, which the command line registers, may be used by all.

Specification: rulings "Tenants", "Scheduling".
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import msgspec

from loraplex.catalog.records import DEFAULT_NAMESPACE
from loraplex.config import TENANT
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.tenants import TenantLimits, check_tenants

DEFAULT_TENANT: Final = DEFAULT_NAMESPACE
LOOK_S: Final = 1.0
_log: Final = logging.getLogger(__name__)
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


class KeyRole(StrEnum):
    """user: generates and lists. admin: also changes the adapters of its tenant."""

    USER = "user"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls. tenant: empty for nobody known, whose role permits nothing."""

    tenant: str
    role: KeyRole

    @property
    def operator(self) -> bool:
        """Whether this is who runs the server: the admin of the tenant `default`, whose adapters all
        may use.
        """
        return self.role is KeyRole.ADMIN and self.tenant == DEFAULT_TENANT

    @property
    def name(self) -> str:
        """Who published something, in the catalog's records: a tenant and a role, never a key."""
        return f"{self.tenant} {self.role}"

    def require_admin(self) -> None:
        """Raise `forbidden` for other roles."""
        if self.role is not KeyRole.ADMIN:
            raise CallerError(ErrorCode.FORBIDDEN, "changing adapters needs a key with the role admin")


NOBODY: Final = Caller("", KeyRole.USER)
"""Whoever was not asked for a key, or had none that is known."""


class _KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sha256: str
    tenant: str
    role: KeyRole = KeyRole.USER


class KeyRing:
    """Known keys. An empty ring asks nobody for a key. tenant_limits: in the order of the file."""

    def __init__(self, callers: Mapping[str, Caller], tenant_limits: Sequence[TenantLimits] = ()) -> None:
        """callers: by SHA-256 of their key, in lower-case hexadecimal."""
        self._callers = dict(callers)
        self.tenant_limits = tuple(tenant_limits)

    @property
    def one_tenant(self) -> bool:
        """Whether every caller is of the same tenant."""
        return len({caller.tenant for caller in self._callers.values()}) <= 1

    def identify(self, authorization: Sequence[bytes]) -> Caller:
        """The caller behind the `Authorization` headers of a request, as they were sent.

        `unauthenticated` when there must be one and is none, or more than one: which of two counts is
        nobody's to guess.
        """
        if not self._callers:
            return Caller(DEFAULT_TENANT, KeyRole.ADMIN)
        scheme, _, key = (authorization[0] if len(authorization) == 1 else b"").partition(b" ")
        # Digests are compared, not keys: how long a look-up takes says nothing about a key. They are of the
        # key's bytes, as `sha256sum` saw them in the operator's terminal.
        caller = self._callers.get(hashlib.sha256(key.strip(b" \t")).hexdigest())
        if scheme.lower() != b"bearer" or caller is None:
            raise CallerError(
                ErrorCode.UNAUTHENTICATED, "send a known API key as 'Authorization: Bearer KEY', once"
            )
        return caller


class KeyFile:
    """The ring of a key file, as the file is now: who edits it gives and takes keys while the server runs.

    Looked at once a second at most, when somebody calls. A file that cannot be read, or holds no key, changes
    nothing until it is whole again, and the log says so once. What runs already goes on. Raises what
    `read_keys` raises at the start.
    """

    def __init__(self, path: str | None, now: Callable[[], float] = time.monotonic) -> None:
        """now: seconds."""
        self._path, self._now = path, now
        self._seen = self._look()
        self._ring = read_keys(path)
        self._looked_at = now()

    @property
    def one_tenant(self) -> bool:
        """Whether every caller is of the same tenant."""
        return self._ring.one_tenant

    @property
    def tenant_limits(self) -> tuple[TenantLimits, ...]:
        """Weights and limits of tenants, as of the last call that was identified."""
        return self._ring.tenant_limits

    def identify(self, authorization: Sequence[bytes]) -> Caller:
        """See `KeyRing.identify`."""
        if self._path is not None and self._now() - self._looked_at >= LOOK_S:
            self._looked_at = self._now()
            self._follow(self._path)
        return self._ring.identify(authorization)

    def _follow(self, path: str) -> None:
        seen = self._look()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._ring = read_keys(path)
        except CallerError as error:
            _log.warning("the keys stay as they were: %s", error.message)
        else:
            _log.info("the keys were read again from %s", path)

    def _look(self) -> tuple[int, int, int] | None:
        """What changes with the file's content; None where there is no file."""
        try:
            found = os.stat(self._path) if self._path is not None else None
        except OSError:
            return None
        return None if found is None else (found.st_ino, found.st_size, found.st_mtime_ns)


def read_keys(path: str | None) -> KeyRing:
    """The ring in a key file; the empty one without a file. Raises `config_invalid` with the entry
    at fault.
    """
    if path is None:
        return KeyRing({})
    try:
        text = Path(path).read_text(encoding="utf-8")
        entries = _entries(text)
    except (OSError, ValueError) as error:
        raise _invalid(f"{path} cannot be read as JSON lines or TOML: {error}") from error
    callers: dict[str, Caller] = {}
    tenants: list[TenantLimits] = []
    for number, value in enumerate(entries, 1):
        entry = _entry(number, value, path)
        if isinstance(entry, TenantLimits):
            tenants.append(entry)
            continue
        if not _DIGEST.fullmatch(entry.sha256) or entry.sha256 in callers:
            raise _invalid(
                f"key {number} of {path} needs a sha256 of 64 lower-case hexadecimal digits, given once"
            )
        callers[entry.sha256] = Caller(entry.tenant, entry.role)
    if not callers:
        raise _invalid(f"{path} holds no key; leave --api-key-file out to serve without keys")
    check_tenants(tenants)
    unknown = {given.tenant for given in tenants} - {caller.tenant for caller in callers.values()}
    if unknown:  # refusing the file would keep a key that its operator just took away
        _log.warning("%s has limits of tenants without a key: %s", path, ", ".join(sorted(unknown)))
    return KeyRing(callers, tenants)


def _entry(number: int, value: Any, path: str) -> _KeyEntry | TenantLimits:
    """One entry: of a key, or of a tenant where it has no `sha256`."""
    kind = "key" if isinstance(value, dict) and "sha256" in value else "tenant"
    entry: _KeyEntry | TenantLimits
    try:
        entry = msgspec.convert(value, _KeyEntry) if kind == "key" else msgspec.convert(value, TenantLimits)
    except msgspec.ValidationError as error:
        raise _invalid(f"entry {number} of {path}, read as a {kind}'s: {error}") from error
    if not TENANT.fullmatch(entry.tenant):
        raise _invalid(f"entry {number} of {path} needs a tenant of letters, digits or . _ : -")
    if entry == TenantLimits(entry.tenant):
        raise _invalid(
            f"entry {number} of {path} is neither a key, which has sha256, nor a tenant's limits, weight, "
            "max_running or max_waiting"
        )
    return entry


def _entries(text: str) -> list[Any]:
    """Entries as they were written; TOML's keys first."""
    if text.lstrip().startswith("{"):
        return [msgspec.json.decode(line) for line in text.splitlines() if line.strip()]
    value = tomllib.loads(text)
    keys, tenants = value.pop("keys", []), value.pop("tenants", [])
    if value or not isinstance(keys, list) or not isinstance(tenants, list):
        raise ValueError("expected only [[keys]] and [[tenants]] tables")
    if any(not isinstance(entry, dict) or "sha256" not in entry for entry in keys) or any(
        not isinstance(entry, dict) or "sha256" in entry for entry in tenants
    ):
        raise ValueError("each of [[keys]] needs a sha256, and none of [[tenants]] has one")
    return [*keys, *tenants]


def _invalid(message: str) -> CallerError:
    return CallerError(ErrorCode.CONFIG_INVALID, message, param="api_key_file")
