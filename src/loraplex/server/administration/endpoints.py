"""Models and adapters over HTTP: OpenAI's list, vLLM's two calls, our own, residency, limits.

Specification: interface "HTTP".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from loraplex.catalog.records import Revision
from loraplex.catalog.sources import permitted
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.messages import Inspect
from loraplex.server.routing import Call, read_body
from loraplex.server.wire import (
    ListAdapters,
    LoadLoraAdapter,
    PutAdapter,
    PutLimits,
    UnloadLoraAdapter,
    decode_query,
)

GIB: Final = 1 << 30
_TOTALS: Final = ("pages", "limits")
"""Figures of the engine that a tenant may know: they say what there is, and not who uses it."""
ACTIONS = ("pin", "unpin", "prefetch", "revoke")


async def residency(call: Call) -> None:
    """Pages, requests, and where each adapter is that the caller may list, with its names.

    A tenant hears of its own requests and pins, and of totals that everybody shares; the operator of
    everything.
    """
    call.service.require_ready()
    figures = await call.service.client.call(Inspect(0))
    adapters, viewer = call.service.adapters, _viewer(call)
    visible: dict[str, list[tuple[str, Revision]]] = {}
    for name, revision in adapters.visible(call.caller.tenant):
        visible.setdefault(revision.key, []).append((name, revision))
    entries: list[dict[str, Any]] = []
    for entry in figures["adapters"]:
        listed = visible.get(entry["key"], [])
        if viewer is None or (listed and not entry["removing"]):
            shown = entry if viewer is None else adapters.seen_by(viewer, entry, [r for _, r in listed])
            entries.append({**shown, "names": sorted(f"{name}@{r.revision}" for name, r in listed)})
    if viewer is not None:
        figures = {name: figures[name] for name in _TOTALS} | {
            "requests": {"live": adapters.requests_of(viewer)}
        }
    await call.exchange.answer({**figures, "adapters": entries, "catalog_generation": adapters.generation})


async def get_provenance(call: Call) -> None:
    """What answered a request: digests, attempt and generations, for its tenant and for admins."""
    provenance = call.service.provenance
    request_id, _, what = call.rest.rpartition("/")
    if what != "provenance" or not request_id:
        raise CallerError(ErrorCode.NOT_FOUND, f"{call.exchange.path} is not served; see /openapi.json")
    request_id = unquote(request_id)
    if provenance is None:
        raise CallerError(ErrorCode.REQUEST_NOT_FOUND, "this server keeps no records", param="request_id")
    tenant = None if call.caller.operator else call.caller.tenant
    records = await provenance.find(request_id, tenant)
    attempts = [msgspec.to_builtins(record) for record in records]
    await call.exchange.answer({**attempts[0], "attempts": attempts})


def _model(call: Call, name: str, revision: Revision | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": call.site.created if revision is None else revision.at_ms // 1000,
        "owned_by": "loraplex",
        "root": call.service.base_name if revision is None else revision.source,
        "parent": None if revision is None else call.service.base_name,
        "max_model_len": call.service.engine_info.get("max_model_len"),
    }


async def list_models(call: Call) -> None:
    """The base, then every alias that the caller may use."""
    models = [_model(call, call.service.base_name, None)]
    models += [_model(call, *item) for item in call.service.adapters.visible(call.caller.tenant)]
    await call.exchange.answer({"object": "list", "data": models})


async def get_model(call: Call) -> None:
    """One model by base name, alias or alias@revision."""
    name = unquote(call.rest)
    revision = None
    if name != call.service.base_name:
        revision = await call.service.adapters.find_revision(name, call.caller.tenant)
    await call.exchange.answer(_model(call, name, revision))


async def list_adapters(call: Call) -> None:
    """Adapters that the caller may list, by name, a page at a time: `limit` of them after the name
    `after`.
    """
    wanted = decode_query(call.exchange.query, ListAdapters)
    call.service.require_ready()
    listed, more = await call.service.adapters.describe_some(
        call.caller.tenant, _viewer(call), wanted.after, wanted.limit
    )
    await call.exchange.answer({"object": "list", "data": listed, "has_more": more})


def _viewer(call: Call) -> str | None:
    """Whose own figures the caller may see, None for everybody's."""
    return None if call.caller.operator else call.caller.tenant


def _found(call: Call, alias: str) -> Revision:
    """What the caller means by an alias; one that it may not list does not exist for it."""
    revision = call.service.adapters.find(alias, call.caller.tenant)
    if revision is None:
        raise CallerError(ErrorCode.ADAPTER_NOT_FOUND, f"adapter {alias!r} is not registered", param="alias")
    return revision


def _owned(call: Call, name: str) -> Revision:
    """What the caller means by a name, if it may change it. Others' do not exist for it; shared ones it may
    only use.
    """
    call.caller.require_admin()
    return call.service.adapters.owned(name, call.caller.tenant)


async def get_adapter(call: Call) -> None:
    """One adapter."""
    revision = _found(call, unquote(call.rest))
    call.service.require_ready()
    await call.exchange.answer(await call.service.adapters.describe(revision.alias_key, _viewer(call)))


async def put_adapter(call: Call) -> None:
    """Register an alias, or swap what it stands for."""
    call.caller.require_admin()
    request = await read_body(call, PutAdapter)
    call.service.require_ready()
    source = permitted(request.source, call.service.config.adapter_dirs)
    adapters = call.service.adapters
    alias_key = adapters.target(unquote(call.rest), call.caller.tenant)
    revision = await adapters.put(
        alias_key,
        source,
        call.caller.name,
        expected=request.expected_revision,
        drain=bool(request.drain),
        text=request.text,
    )
    call.facts.model = revision.name
    await call.exchange.answer(
        await adapters.describe(alias_key, _viewer(call)), 201 if revision.revision == 1 else 200
    )


async def delete_adapter(call: Call) -> None:
    """Take an alias away."""
    owned = _owned(call, unquote(call.rest))
    call.service.require_ready()
    revision = await call.service.adapters.remove(owned.alias_key, call.caller.name)
    await call.exchange.answer({"alias": revision.alias, "revision": revision.revision, "deleted": True})


async def adapter_action(call: Call) -> None:
    """pin, unpin, prefetch, revoke."""
    call.caller.require_admin()
    quoted, _, action = call.rest.rpartition("/")
    if action not in ACTIONS or not quoted:
        raise CallerError(ErrorCode.NOT_FOUND, f"{call.exchange.path} is not served")
    alias_key = _owned(call, unquote(quoted)).alias_key
    call.service.require_ready()
    adapters = call.service.adapters
    match action:
        case "pin":
            await adapters.pin(alias_key)
        case "unpin":
            await adapters.unpin(alias_key)
        case "prefetch":
            await adapters.prefetch(alias_key)
        case _:
            caller = call.caller
            gone = await adapters.revoke(alias_key, caller.name, _viewer(call))
            names = sorted(revision.name for revision in gone if adapters.may_list(revision, caller.tenant))
            await call.exchange.answer({"alias": alias_key.alias, "revoked": names})
            return
    await call.exchange.answer(await adapters.describe(alias_key, _viewer(call)))


def _limits(call: Call, limits: Mapping[str, int], pages: Mapping[str, int]) -> dict[str, Any]:
    total = pages["total"]
    return {
        "pool_share": limits["adapter_pages"] / total,
        "adapter_pages": limits["adapter_pages"],
        "pool_pages": total,
        "resident_adapters": limits["resident_adapters"],
        "host_bytes": limits["host_bytes"],
        "over": {
            name: limits[f"{name}_over"] for name in ("adapter_pages", "resident_adapters", "host_bytes")
        },
    }


async def get_limits(call: Call) -> None:
    """What adapters may take, and what is above a lowered limit still."""
    call.service.require_ready()
    figures = await call.service.client.call(Inspect(0))
    await call.exchange.answer(_limits(call, figures["limits"], figures["pages"]))


async def put_limits(call: Call) -> None:
    """Change what adapters may take, while serving."""
    if not call.caller.operator:
        raise CallerError(
            ErrorCode.FORBIDDEN, "limits are the operator's: an admin key of the tenant 'default'"
        )
    request = await read_body(call, PutLimits)
    call.service.require_ready()
    pages = (await call.service.client.call(Inspect(0)))["pages"]
    limits = await call.service.adapters.controls.set_limits(
        None if request.pool_share is None else int(request.pool_share * pages["total"]),
        request.resident_adapters,
        None if request.host_gb is None else int(request.host_gb * GIB),
    )
    await call.exchange.answer(_limits(call, limits, pages))


def _check_base(call: Call, named: str | None) -> None:
    """Raise `invalid_request` where a client means another base than the one that is served."""
    base = call.service.base_name
    if named is not None and named != base and named.rstrip("/").rpartition("/")[2] != base:
        raise CallerError(
            ErrorCode.INVALID_REQUEST,
            f"base_model_name is {named[:80]!r}, this server has {base!r}; leave it out or ask the server of "
            "that base",
            param="base_model_name",
        )


@contextmanager
def _vllm_names() -> Iterator[None]:
    """A refusal names the field as the caller sent it."""
    try:
        yield
    except CallerError as error:
        error.param = {"alias": "lora_name", "source": "lora_path"}.get(error.param or "", error.param)
        raise


async def load_lora_adapter(call: Call) -> None:
    """vLLM's call: register a new name. One that is taken is refused unless it is to be replaced; then it is
    swapped.
    """
    call.caller.require_admin()
    request = await read_body(call, LoadLoraAdapter)
    call.service.require_ready()
    _check_base(call, request.base_model_name)
    adapters = call.service.adapters
    change = adapters.put if request.load_inplace else adapters.add
    with _vllm_names():
        source = permitted(request.lora_path, call.service.config.adapter_dirs)
        alias_key = adapters.target(request.lora_name, call.caller.tenant)
        revision = await change(alias_key, source, call.caller.name, text=request.text)
    call.facts.model = revision.name
    await _success(call, f"Success: LoRA adapter '{revision.alias}' added successfully.")


async def unload_lora_adapter(call: Call) -> None:
    """vLLM's call: take a name away."""
    call.caller.require_admin()
    request = await read_body(call, UnloadLoraAdapter)
    call.service.require_ready()
    _check_base(call, request.base_model_name)
    with _vllm_names():
        owned = _owned(call, request.lora_name)
        revision = await call.service.adapters.remove(owned.alias_key, call.caller.name)
    await _success(call, f"Success: LoRA adapter '{revision.alias}' removed successfully.")


async def _success(call: Call, text: str) -> None:
    await call.exchange.respond(200, text.encode(), "text/plain; charset=utf-8")
