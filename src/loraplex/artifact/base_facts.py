"""What an adapter's files say about their base, held against the base that is served.

An adapter of another base with the same shapes computes something, only nothing that anybody trained; and a
token that the base's tokenizer does not have is never sampled here. Neither can be proven from the weights,
so both are said as notes, and a base of another name is refused only where that was asked for. Specification:
0x01G (base identity).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from loraplex.artifact.base_modules import BaseModules
from loraplex.artifact.companions import NO_COMPANIONS, Companions
from loraplex.artifact.jsontext import show
from loraplex.artifact.notes import Note, NoteKind
from loraplex.artifact.record import Artifact
from loraplex.artifact.refuse import wrong_base
from loraplex.core.ids import Module

_HUB_FOLDER: Final = re.compile(r"models--(?P<repo>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})$")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_SHOWN: Final = 8


@dataclass(frozen=True, slots=True)
class BaseFacts:
    """The served base, as far as it is not its modules.

    names: that it goes by, as `base_names` gives them. commit: of the hub, where its folder says it.
    token_ids: ids that its tokenizer knows, None without one. companions: its own chat template, end tokens
    and added tokens. strict: an adapter that names another base or revision is refused.
    """

    names: frozenset[str]
    commit: str | None = None
    token_ids: int | None = None
    companions: Companions = NO_COMPANIONS
    strict: bool = False


def base_names(texts: Iterable[str]) -> frozenset[str]:
    """Names of one model, given as names or paths: their last parts, without owner, in lower case."""
    return frozenset(name for text in texts if (name := _last_part(text)))


def hub_commit(path: str) -> str | None:
    """The commit in the path of a folder of the hub's cache."""
    match = _HUB_FOLDER.search(path.rstrip("/"))
    return None if match is None else match["commit"]


def base_notes(record: Mapping[str, Any], facts: BaseFacts) -> tuple[Note, ...]:
    """What a configuration says about its base that is not so of the served one.

    Raises `adapter_base_mismatch` instead where the facts are strict.
    """
    named, revision = record.get("base_model_name_or_path"), record.get("revision")
    notes: list[Note] = []
    if isinstance(named, str) and (name := _last_part(named)) and name not in facts.names:
        served = ", ".join(sorted(facts.names))
        notes.append(
            Note(
                NoteKind.OTHER_BASE,
                f"the adapter was trained on {show(named)}, the base served here is {served}",
            )
        )
    trained = revision if isinstance(revision, str) and _COMMIT.fullmatch(revision) else None
    if trained is None and isinstance(named, str):
        trained = hub_commit(named)
    if not notes and trained and facts.commit and trained != facts.commit:
        notes.append(
            Note(
                NoteKind.OTHER_BASE_REVISION,
                f"the adapter was trained on revision {trained} of its base, revision {facts.commit} is "
                "served here",
            )
        )
    if notes and facts.strict:
        raise wrong_base(
            "base_model_name_or_path", f"{notes[0].message}; serve that one, or leave out --strict-base"
        )
    return tuple(notes)


def token_notes(artifact: Artifact, own: Companions, base: BaseModules, facts: BaseFacts) -> tuple[Note, ...]:
    """That the adapter changes logits of tokens which are never sampled, because no tokenizer has them.

    own: the adapter's, whose further tokens are sampled.
    """
    known = facts.token_ids
    if known is not None:
        known = max([known, *(token.index + 1 for token in own.added if token.index < base.vocab)])
    head = any(m.module is Module.LM_HEAD for m in artifact.modules)
    if known is None or known >= base.vocab or not head:
        return ()
    return (
        Note(
            NoteKind.MASKED_TOKENS,
            f"the adapter changes the output layer, whose token ids {known} to {base.vocab - 1} the "
            "tokenizer does not know: "
            "they are never sampled here, although PEFT may choose them",
        ),
    )


def companion_notes(own: Companions, base: BaseModules, facts: BaseFacts) -> tuple[Note, ...]:
    """What the files beside an adapter say about text that the base's own do not say.

    A difference from the base is named whether it is used or not; one that cannot be used says so.
    """
    theirs = facts.companions
    notes: list[Note] = []
    if own.chat_template is not None and own.chat_template != theirs.chat_template:
        kind = "the base has none" if theirs.chat_template is None else "the base has another"
        notes.append(Note(NoteKind.CHAT_TEMPLATE, f"the adapter has a chat template of its own, {kind}"))
    further_ids = sorted(set(own.eos_token_ids) - set(theirs.eos_token_ids))
    if further_ids or own.eos_token not in (None, theirs.eos_token):
        named = [show(own.eos_token)] if own.eos_token not in (None, theirs.eos_token) else []
        ends = ", ".join([*named, *map(str, further_ids[:_SHOWN])])
        notes.append(Note(NoteKind.END_TOKENS, f"the adapter has end tokens that the base has not: {ends}"))
    known = {(token.index, token.text) for token in theirs.added}
    further = sorted({(token.index, token.text) for token in own.added} - known)
    if further:
        texts = ", ".join(f"{show(text)} ({index})" for index, text in further[:_SHOWN])
        more = f" and {len(further) - _SHOWN} more" if len(further) > _SHOWN else ""
        notes.append(
            Note(NoteKind.ADDED_TOKENS, f"the adapter has tokens that the base has not: {texts}{more}")
        )
    beyond = [index for index, _ in further if index >= base.vocab]
    if beyond:
        notes.append(
            Note(
                NoteKind.ADDED_TOKENS,
                f"token ids of the adapter reach {max(beyond)}, the base's vocabulary ends at {base.vocab}: "
                "they are "
                "not used",
            )
        )
    if own.others:
        texts = ", ".join(f"{show(text)} ({index})" for index, text in own.others)
        notes.append(
            Note(
                NoteKind.OTHER_VOCABULARY,
                f"the adapter's tokenizer has a vocabulary with tokens that the base's has not: {texts}",
            )
        )
    return tuple(notes)


def _last_part(text: str) -> str:
    plain = text.replace("\\", "/").rstrip("/")
    match = _HUB_FOLDER.search(plain)
    last = match["repo"].rsplit("--", 1)[-1] if match else plain.rsplit("/", 1)[-1]
    name = last.removesuffix(".gguf").casefold()
    return "" if name in (".", "..") else name
