"""Talks to a running server's adapter endpoints, for the command line. Standard library only, so that it
starts fast.

A server's refusal is raised as the same typed error that the server raised. Specification: interface "HTTP".
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import SplitResult, quote, urlsplit

from loraplex.core.errors import CapacityError, ErrorCode, error_for
from loraplex.core.limits import MAX_LISTED

TIMEOUT_S: Final = 600.0
"""Registering reads, verifies and copies an adapter before it answers."""

STREAM_TIMEOUT_S: Final = 10.0
"""A picture comes every second."""


class RemoteServer:
    """A server at `url`, spoken to with `api_key` when there is one."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Raises `config_invalid` when `url` is not http://HOST[:PORT]."""
        parts = _split(url)
        if parts is None:
            raise error_for(
                ErrorCode.CONFIG_INVALID, f"--url must be http://HOST:PORT, got {url!r}", param="url"
            )
        self._url = url.rstrip("/")
        self._secure = parts.scheme == "https"
        self._netloc = parts.netloc
        self._headers = {"content-type": "application/json"}
        if api_key:
            if not api_key.isascii() or not api_key.isprintable():
                raise error_for(
                    ErrorCode.CONFIG_INVALID,
                    "--api-key holds characters that no header carries",
                    param="api_key",
                )
            self._headers["authorization"] = f"Bearer {api_key}"

    def adapters(self) -> list[dict[str, Any]]:
        """Every adapter that the caller may see."""
        found: list[dict[str, Any]] = []
        more = True
        while more:
            after = f"&after={quote(found[-1]['alias'], safe='')}" if found else ""
            page = self._call("GET", f"/v1/adapters?limit={MAX_LISTED}{after}")
            found += page["data"]
            more = page["has_more"]
        return found

    def adapter(self, alias: str) -> dict[str, Any]:
        """One adapter; `adapter_not_found` when there is none."""
        return self._call("GET", _path(alias))

    def add(self, alias: str, source: str, text: str | None = None) -> dict[str, Any]:
        """Register a new alias; `adapter_exists` when it has one. text: whose text its requests use, the
        server's default if None.
        """
        chosen = {} if text is None else {"text": text}
        self._call("POST", "/v1/load_lora_adapter", {"lora_name": alias, "lora_path": source, **chosen})
        return self.adapter(alias)

    def swap(
        self,
        alias: str,
        source: str,
        expected: int | None,
        *,
        drain: bool = False,
        text: str | None = None,
    ) -> dict[str, Any]:
        """Publish a new revision of a known alias. expected: the revision to replace, whichever is current if
        None. text: as in `add`.
        """
        if expected is None:
            expected = int(self.adapter(alias)["revision"])
        chosen = {} if text is None else {"text": text}
        return self._call(
            "PUT", _path(alias), {"source": source, "expected_revision": expected, "drain": drain, **chosen}
        )

    def remove(self, alias: str) -> None:
        """Take an alias away."""
        self._call("DELETE", _path(alias))

    def provenance(self, request_id: str) -> dict[str, Any]:
        """What answered a request; `request_not_found` when there is no record."""
        return self._call("GET", f"/v1/requests/{quote(request_id, safe='')}/provenance")

    def act(self, alias: str, action: str) -> dict[str, Any]:
        """pin, unpin, prefetch or revoke."""
        return self._call("POST", f"{_path(alias)}/{action}")

    def limits(self, changes: dict[str, Any]) -> dict[str, Any]:
        """What adapters may take, after `changes`."""
        if not changes:
            return self._call("GET", "/v1/limits")
        return self._call("PUT", "/v1/limits", changes)

    def pictures(self) -> Iterator[dict[str, Any]]:
        """What the operator's page shows, once a second, until the server ends; `engine_unavailable` then."""
        with self._connected(STREAM_TIMEOUT_S) as connection:
            connection.request("GET", "/ui/events", None, self._headers)
            response = connection.getresponse()
            if response.status != HTTPStatus.OK:
                self._answer("GET", "/ui/events", response.status, response.read().decode("utf-8", "replace"))
            for line in response:
                text = line.decode("utf-8", "replace").removeprefix("data: ").strip()
                if text == "[DONE]":
                    break
                if text:
                    picture = json.loads(text)
                    if "error" in picture:
                        self._answer("GET", "/ui/events", HTTPStatus.FORBIDDEN, text)
                    yield picture
        raise CapacityError(ErrorCode.ENGINE_UNAVAILABLE, f"{self._url} has ended the stream; ask it again")

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        with self._connected(TIMEOUT_S) as connection:
            payload = None if body is None else json.dumps(body).encode()
            connection.request(method, path, payload, self._headers)
            response = connection.getresponse()
            text = response.read().decode("utf-8", "replace")
        return self._answer(method, path, response.status, text)

    @contextmanager
    def _connected(self, timeout_s: float) -> Iterator[http.client.HTTPConnection]:
        """A connection; what breaks on it is `engine_unavailable`."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._netloc, timeout=timeout_s)
        try:
            yield connection
        except (OSError, http.client.HTTPException) as error:
            raise CapacityError(
                ErrorCode.ENGINE_UNAVAILABLE,
                f"no server answers at {self._url}: {error}; start one or give --url",
            ) from error
        finally:
            connection.close()

    def _answer(self, method: str, path: str, status: int, text: str) -> dict[str, Any]:
        try:
            value = json.loads(text) if text else {}
        except ValueError:
            value = None
        if status < 300 and (isinstance(value, dict) or path == "/v1/load_lora_adapter"):
            return value if isinstance(value, dict) else {}
        error = value.get("error") if isinstance(value, dict) else None
        if isinstance(error, dict) and error.get("code") in set(ErrorCode):
            raise error_for(ErrorCode(error["code"]), str(error.get("message")), param=error.get("param"))
        raise CapacityError(
            ErrorCode.ENGINE_UNAVAILABLE,
            f"{self._url} answered {method} {path} with status {status}; is it a loraplex server?",
        )


def _split(url: str) -> SplitResult | None:
    """The parts of http://HOST[:PORT], None for anything else."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number, half an IPv6 address
        return None
    return parts if good and parts.path in ("", "/") and not parts.query and not parts.fragment else None


def _path(alias: str) -> str:
    return "/v1/adapters/" + quote(alias, safe="")
