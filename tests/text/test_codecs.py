"""An adapter's own template, end tokens and further tokens, over the base's tokenizer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jinja2.sandbox
import pytest
from tests.text.tiny_text import TEMPLATE, byte_tokenizer
from tokenizers import AddedToken

from loraplex.artifact.companions import AddedText, Companions
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.text import bounded_template
from loraplex.text.chat_template import ChatTemplate
from loraplex.text.codec import TextCodec, sampled_ids
from loraplex.text.codecs import MAX_CODECS, Codecs, TextChoice
from loraplex.text.detokenizer import Detokenizer

SPECIAL = {"bos_token": "<|start|>", "eos_token": "<|end|>"}
MESSAGES = [{"role": "user", "content": "hello"}]
OWN = "{% for m in messages %}<{{ m.content }}>{% endfor %}"


def tokens(*pairs: tuple[int, str]) -> tuple[AddedText, ...]:
    return tuple(AddedText(index, text) for index, text in pairs)


def codecs(template: str | None = TEMPLATE) -> Codecs:
    chat = None if template is None else ChatTemplate(template, SPECIAL)
    base = TextCodec(byte_tokenizer(), {1}, "<|start|>", chat, SPECIAL)
    return Codecs(base, rows=base.vocab_size + 4)


def test_the_template_of_an_adapter_is_used_and_the_bases_by_choice() -> None:
    made = codecs()
    own = Companions(chat_template=OWN)
    adapter, base = made.of(own), made.of(own, TextChoice.BASE)
    assert adapter is not None
    assert base is made.base is made.of()
    assert adapter.decode(adapter.chat(MESSAGES), skip_special=False) == "<hello>"
    assert base is not None
    assert base.decode(base.chat(MESSAGES), skip_special=False).startswith("<|start|>[user]hello")
    assert made.of(own) is adapter


def test_a_base_without_a_template_serves_chat_for_an_adapter_that_has_one() -> None:
    made = codecs(None)
    assert made.base is not None
    assert not made.base.has_chat_template
    own = made.of(Companions(chat_template=OWN))
    assert own is not None
    assert own.has_chat_template
    assert own.decode(own.chat(MESSAGES)) == "<hello>"
    assert not made.base.has_chat_template


def test_end_tokens_are_added_by_text_and_by_id() -> None:
    made = codecs()
    by_text = made.of(Companions(special=(("eos_token", "<|pad|>"),)))
    by_id = made.of(Companions(eos_token_ids=(2, 7)))
    assert by_text is not None
    assert by_id is not None
    assert (by_text.eos_token_ids, by_id.eos_token_ids) == ({1, 2}, {1, 2, 7})
    assert 7 in by_id.hidden
    assert 7 not in by_text.hidden
    assert made.base is not None
    assert made.base.eos_token_ids == {1}
    for own in (Companions(special=(("eos_token", "<|nowhere|>"),)), Companions(eos_token_ids=(10_000,))):
        with pytest.raises(CallerError) as caught:
            made.of(own)
        assert caught.value.code is ErrorCode.ADAPTER_UNSUPPORTED


def test_a_further_token_is_one_token_or_the_adapter_is_refused() -> None:
    made = codecs()
    base = made.base
    assert base is not None
    first = base.vocab_size
    own = made.of(Companions(added=tokens((2, "<|pad|>"), (first, "<|call|>"), (first + 1, "<|tool|>"))))
    assert own is not None
    assert own.encode("<|tool|><|call|>", add_special=False) == [first + 1, first]
    assert len(base.encode("<|tool|>", add_special=False)) > 1
    assert own.decode([first], skip_special=False) == "<|call|>"
    assert (base.vocab_size, own.vocab_size) == (first, first + 2)
    for added in (((first + 1, "<|gap|>"),), ((0, "<|other|>"),), ((5, "<|end|>"),)):
        with pytest.raises(CallerError) as caught:
            made.of(Companions(added=tokens(*added)))
        assert caught.value.code is ErrorCode.ADAPTER_UNSUPPORTED
    beyond = made.of(Companions(added=tokens((first + 4, "<|far|>"))))
    assert beyond is not None
    assert beyond.vocab_size == first


def test_a_further_token_is_found_and_shown_as_the_adapters_tokenizer_says() -> None:
    made = codecs()
    base = made.base
    assert base is not None
    first = base.vocab_size
    own = made.of(
        Companions(
            added=(
                AddedText(first, "<seen>", special=False),
                AddedText(first + 1, "<left>", special=False, lstrip=True),
                AddedText(first + 2, "word", special=False, single_word=True),
                AddedText(first + 3, "<|gone|>"),
            )
        )
    )
    assert own is not None
    theirs = byte_tokenizer()
    theirs.add_tokens(
        [
            AddedToken("<seen>", normalized=False),
            AddedToken("<left>", normalized=False, lstrip=True),
            AddedToken("word", normalized=False, single_word=True),
        ]
    )
    theirs.add_special_tokens([AddedToken("<|gone|>", normalized=False, special=True)])
    for text in ("a <seen> b", "a   <left> b", "a word, words", "x<|gone|>y", "swordfish <left><seen>"):
        ids = own.encode(text)
        assert ids == theirs.encode(text).ids
        assert own.decode(ids) == theirs.decode(ids)
        detokenizer = Detokenizer(own, ())
        assert detokenizer.push(ids) + detokenizer.finish() == theirs.decode(ids)
    assert (first in own.hidden, first + 3 in own.hidden) == (False, True)
    assert own.token_text(first) == "<seen>"
    assert not own.surely_exceeds(" " * 10_000 + "<left>", 8)
    assert base.surely_exceeds("x" * 10_000, 8)


def test_the_ids_that_are_sampled_are_those_that_the_adapters_tokenizer_knows() -> None:
    made = codecs()
    base = made.base
    assert base is not None
    own = made.of(Companions(added=tokens((base.vocab_size, "<|call|>"))))
    assert sampled_ids(own, base) == base.vocab_size + 1
    assert sampled_ids(made.of(Companions(chat_template=OWN)), base) == sampled_ids(base, base) == 0
    assert sampled_ids(None, None) == 0


def test_another_vocabulary_is_refused_and_the_bases_text_is_not() -> None:
    made = codecs()
    own = Companions(others=((7, "ab"),))
    with pytest.raises(CallerError, match=r"token 'ab' with the id 7") as caught:
        made.of(own)
    assert (caught.value.code, caught.value.param) == (ErrorCode.ADAPTER_UNSUPPORTED, "text")
    assert made.of(own, TextChoice.BASE) is made.base


def test_what_the_base_says_itself_changes_nothing() -> None:
    made = codecs()
    assert made.base is not None
    own = made.of(made.base.companions)
    assert own is not None
    assert own.encode("hello") == made.base.encode("hello")
    assert (own.eos_token_ids, own.vocab_size) == (made.base.eos_token_ids, made.base.vocab_size)
    assert own._tokenizer is made.base._tokenizer


def test_codecs_that_are_kept_have_a_bound() -> None:
    made = codecs()
    first = made.of(Companions(chat_template="0"))
    for index in range(1, MAX_CODECS + 1):
        made.of(Companions(chat_template=str(index)))
    assert made.of(Companions(chat_template="0")) is not first
    assert made.of(Companions(chat_template=str(MAX_CODECS))) is made.of(
        Companions(chat_template=str(MAX_CODECS))
    )


def test_a_folder_without_tokenizer_has_no_codec_for_anybody() -> None:
    assert Codecs(None, 8).of(Companions(chat_template=OWN)) is None


USUAL = (
    "{{ bos_token }}{% for m in messages %}{% if loop.first %}F{{ loop.length }}{% endif %}[{{ m['role'] }}]"
    "{{ m['content'] | trim ~ '!' }}{{ messages | tojson }}{% if not loop.last %},{% endif %}{% endfor %}"
    "{{ 'x%s' % 3 }}{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('q') }}{% set ns = namespace(i=0) %}"
    "{% for i in range(3) %}{% set ns.i = ns.i + 1 %}{% endfor %}{{ ns.i * 2 }}{{ 'abc'.replace('b', 'BB') }}"
    "{% generation %}g{% endgeneration %}{{ ['a', 'b'] | join('-') }}{% for k, v in {'a': 1}.items() %}{{ k "
    "}}{% endfor %}"
)


def test_a_usual_template_renders_the_same_within_bounds() -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": " there "}]
    assert ChatTemplate(USUAL, SPECIAL, stranger=True).render(messages) == ChatTemplate(
        USUAL, SPECIAL
    ).render(messages)


HUGE = [
    "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10**9 }}",
    "{{ ['a' * 1000000] * 100000 }}",
    "{{ 'a'.center(10**9) }}",
    "{{ '%1000000000d' % 3 }}",
    "{{ '%*d' % (1000000000, 3) }}",
    "{{ '{:1000000000}'.format(3) }}",
    "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    (
        "{% set ns = namespace(s=['ab']) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor "
        "%}{{ "
        "ns.s }}"
    ),
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(60) }}",
    "{{ 'abc' | replace('', 'x' * 100000) | replace('x', 'y' * 100000) }}",
    "{{ 2 ** 99999999 }}",
    "{% set ns = namespace(n=3) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "{{ (['a' * 100000] * 10000) | join }}",
    "{{ ''.join(['a' * 100000] * 10000) }}",
    "{{ (['a' * 100000] * 10000) | tojson }}",
    "{{ ('a\n' * 1000000) | indent(9999) }}",
]


@pytest.mark.parametrize("source", HUGE)
def test_what_a_strangers_template_takes_is_bounded(source: str) -> None:
    with pytest.raises(CallerError) as caught:
        ChatTemplate(source, {}, stranger=True).render(MESSAGES)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert caught.value.message.startswith("the adapter's chat template refuses")


def test_processor_time_ends_a_render(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10_000))
    monkeypatch.setattr(bounded_template.time, "thread_time", lambda: 0.1 * next(ticks))
    with pytest.raises(CallerError, match=r"takes more than 2\.0 s"):
        ChatTemplate("{% for i in range(99) %}x{% endfor %}", {}, stranger=True).render(MESSAGES)


@pytest.mark.parametrize(
    "source", ["{% for x in messages recursive %}{% endfor %}", "{% if %}", "{{ 'a' | wordwrap(1) }}"]
)
def test_a_template_that_cannot_run_is_refused_with_the_adapter(source: str) -> None:
    with pytest.raises(CallerError) as caught:
        codecs().of(Companions(chat_template=source))
    assert caught.value.code is ErrorCode.ADAPTER_UNSUPPORTED


def test_bounds_are_a_strangers_alone() -> None:
    template = ChatTemplate("{% for i in range(20000) %}{% endfor %}done", {})
    assert template.render(MESSAGES) == "done"
    assert isinstance(template._template.environment, jinja2.sandbox.SandboxedEnvironment)
    other: Any = replace(Companions(chat_template=OWN), eos_token_ids=(1,))
    assert codecs().of(other) is not None
