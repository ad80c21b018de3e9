"""A request's prompts as the prefix cache knows them: who acts from where, in whose namespace, under which
keys.

Owns the choice between an activated adapter and the base for prompts that do not invoke it, which is made
once, before anything is submitted, and is never changed.

Specification: 0x08E, 0x08G, 0x08I (freeze, derive, authorise); rulings "KV compatibility".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loraplex.core.errors import CallerError, ErrorCode
from loraplex.identity.cache import namespace_of
from loraplex.server.generation.generate import ServedModel, base_model
from loraplex.server.service import Service
from loraplex.text.prefix_keys import (
    NOT_INVOKED,
    SHORT_PROMPT_TOKENS,
    CacheTerms,
    PromptKeys,
    invocation_at,
    invocation_missing,
    prompt_keys,
)


@dataclass(frozen=True, slots=True)
class Keyed:
    """model: what answers, the base where nothing was invoked and the caller asked for that. keys: of each
    prompt.

    terms, namespace: under which they were made.
    """

    model: ServedModel
    keys: Sequence[PromptKeys]
    terms: CacheTerms
    namespace: str


async def keyed(
    service: Service,
    model: ServedModel,
    prompts: Sequence[Sequence[int]],
    tenant: str,
    fallback: bool,
    param: str,
) -> Keyed:
    """Find the invocations and make the keys of prompts; long ones do not hold up the event loop.

    fallback: whether the base answers prompts without the invocation. Raises `invocation_missing` where it
    does not, and where only some of the prompts would be answered by the base.
    """
    terms = CacheTerms.of(service.engine_info)
    namespace = namespace_of(tenant, service.config.share_prefixes)

    def work() -> Keyed:
        served, positions = _activated(service, model, prompts, fallback, param)
        keys = [
            prompt_keys(ids, served.acting, at, terms, namespace)
            for ids, at in zip(prompts, positions, strict=True)
        ]
        return Keyed(served, keys, terms, namespace)

    return await service.workers.run_if(sum(map(len, prompts)) > SHORT_PROMPT_TOKENS, work)


def _activated(
    service: Service, model: ServedModel, prompts: Sequence[Sequence[int]], fallback: bool, param: str
) -> tuple[ServedModel, list[int]]:
    """What answers, and from which position of each prompt."""
    acting = model.acting
    if acting is None:
        return model, [NOT_INVOKED] * len(prompts)
    positions = [invocation_at(ids, acting) for ids in prompts]
    found = [at for at in positions if at is not None]
    if len(found) == len(prompts):
        return model, found
    if not fallback:
        raise invocation_missing(model.name, acting.invocation, model.invocation_text, param)
    if found:
        raise CallerError(
            ErrorCode.INVOCATION_MISSING,
            f"{len(found)} of {len(prompts)} prompts hold the invocation of {model.name}, and one answer is "
            "by one model; "
            "send the others apart",
            param=param,
        )
    return base_model(service), [NOT_INVOKED] * len(prompts)
