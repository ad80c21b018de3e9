"""Files of a remote folder, read synchronously: their sizes and tags, and ranges of their bytes.

Object stores and hubs are read through obstore, web addresses by `web`, which goes nowhere else. Every read
is bound to the tag that was seen first, so bytes of two versions never mix. A source that does not answer
ends as a typed error within a bound. Runs in the preparation process, in plain calls. Never lists a folder: a
load has fixed names, and a web server has no listing.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Final

import msgspec

from loraplex.catalog.sources import HUB_SCHEME, WEB_SCHEMES, RemoteSource
from loraplex.catalog.web import WebChanged, WebError, WebFolder
from loraplex.core.errors import CallerError, CapacityError, ErrorCode

_BLOCK: Final = 1 << 20
_TIMEOUT: Final = "60s"
_CONNECT_TIMEOUT: Final = "5s"
_RETRIES: Final[Any] = {"max_retries": 3, "retry_timeout": timedelta(seconds=30)}
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "HF_ENDPOINT")


class RemoteFile(msgspec.Struct, frozen=True):
    """One file as it was when it was first looked at. tag: the store's version or entity tag, or None."""

    name: str
    size: int
    tag: str | None


class RemoteFolder:
    """The files directly under a remote source."""

    def __init__(self, source: RemoteSource) -> None:
        """Raises `adapter_source_missing` where the library cannot make anything of the source."""
        self._source = source
        self._web = WebFolder(source.url) if source.scheme in WEB_SCHEMES else None
        self._store: Any = _open(source) if self._web is None else None

    def look(self, name: str) -> RemoteFile | None:
        """Size and tag of a file, None when it is not there.

        Raises `adapter_source_unavailable`, and `adapter_source_forbidden` for what may not be read.
        """
        if self._web is not None:
            try:
                found = self._web.look(name)
            except WebError as error:
                raise self._failed(name, error) from error
            return None if found is None else RemoteFile(name, found.size, found.tag)
        try:
            meta = self._store.head(name)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._failed(name, error) from error
        return RemoteFile(name, int(meta["size"]), meta["e_tag"] or meta["version"])

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        """Bytes [start, end) of the version that was looked at. Raises `adapter_source_changed` for another
        one.
        """
        size, tag, data = (
            self._read_stored(file, start, end) if self._web is None else self._read_web(file, start, end)
        )
        if tag != file.tag or size != file.size or len(data) != end - start:
            raise self._changed(file.name)
        return data

    def _read_web(self, file: RemoteFile, start: int, end: int) -> tuple[int, str | None, bytes]:
        """(size of the file, its tag, the bytes)."""
        assert self._web is not None
        try:
            got = self._web.read(file.name, file.tag, start, end)
        except WebChanged as error:
            raise self._changed(file.name) from error
        except WebError as error:
            raise self._failed(file.name, error) from error
        return got.size, got.tag, got.data

    def _read_stored(self, file: RemoteFile, start: int, end: int) -> tuple[int, str | None, bytes]:
        """(size of the file, its tag, the bytes; one block more at most than was asked for)."""
        options: dict[str, Any] = {"range": (start, end)}
        if file.tag is not None and not file.tag.startswith("W/"):
            options["if_match"] = file.tag
        try:
            got = self._store.get(file.name, options=options)
            meta, data = got.meta, bytearray()
            for part in got.stream(min_chunk_size=_BLOCK):
                data += part
                if len(data) > end - start:
                    break
        except FileNotFoundError as error:
            raise self._changed(file.name) from error
        except Exception as error:
            if type(error).__name__ == "PreconditionError":
                raise self._changed(file.name) from error
            raise self._failed(file.name, error) from error
        return int(meta["size"]), meta["e_tag"] or meta["version"], bytes(data)

    def _failed(self, name: str, error: Exception) -> CapacityError | CallerError:
        refused = isinstance(error, WebError) and error.refused
        if refused or type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
            why = f" ({error})" if refused else ""
            return CallerError(
                ErrorCode.ADAPTER_SOURCE_FORBIDDEN,
                f"{self._source.text[:80]!r} does not let this server read {name}{why}; check its address "
                "and credentials",
                param="source",
            )
        reason = str(error).partition("\n")[0][-200:]
        return CapacityError(
            ErrorCode.ADAPTER_SOURCE_UNAVAILABLE,
            f"{name} of {self._source.text[:80]!r} cannot be read ({reason.strip()}); "
            "check the network and the address, then try again",
            param="source",
        )

    def _changed(self, name: str) -> CallerError:
        return CallerError(
            ErrorCode.ADAPTER_SOURCE_CHANGED,
            f"{name} of {self._source.text[:80]!r} changed while it was read; try again",
            param="source",
        )


def _open(source: RemoteSource) -> Any:
    from obstore.store import HTTPStore, from_url

    plain = source.url.startswith("http://") or any(
        os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS
    )
    client: Any = {"timeout": _TIMEOUT, "connect_timeout": _CONNECT_TIMEOUT, "allow_http": plain}
    token = os.environ.get("HF_TOKEN")
    if source.scheme == HUB_SCHEME and token:
        client["default_headers"] = {"authorization": f"Bearer {token}"}
    try:
        if source.scheme == HUB_SCHEME:
            return HTTPStore.from_url(source.url, client_options=client, retry_config=_RETRIES)
        return from_url(source.url, client_options=client, retry_config=_RETRIES)
    except Exception as error:
        reason = str(error).partition("\n")[0][:200]
        raise CallerError(
            ErrorCode.ADAPTER_SOURCE_MISSING,
            f"source {source.text[:80]!r} cannot be opened: {reason}",
            param="source",
        ) from error
