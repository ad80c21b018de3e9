"""Text with the demo model's own tokenizer: any split, any script, stop strings over tokens, its template,
formats.
"""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest

from loraplex.model.gguf import demo_model
from loraplex.text.codec import TextCodec, load_tokenizer
from loraplex.text.detokenizer import Detokenizer
from loraplex.text.grammars import GuidanceGrammars, load_grammars, schema_grammar

pytestmark = pytest.mark.e2e
TEXTS = {
    "emoji": "👩‍🚀 and 🇩🇪🏳️‍🌈 end",
    "cjk": "日本語のテキスト、中文和한국어。",
    "combining": "e\u0301a\u0308o\u0302\u0323 Z\u0351\u036b\u0343algo",
    "arabic": "مرحبا بالعالم",
    "mixed": "\ttabs\n\n  spaces   and <|im_start|>not special text",
    "long word": "Donaudampfschifffahrtsgesellschaft" * 3,
}


@cache
def codec() -> TextCodec:
    found = load_tokenizer(demo_model())
    assert found is not None
    return found


@pytest.mark.parametrize("name", TEXTS)
def test_every_boundary_gives_the_whole_text(name: str) -> None:
    text = TEXTS[name].replace("<|im_start|>", "")
    ids = codec().encode(text, add_special=False)
    assert codec().decode(ids) == text
    for cut in range(len(ids) + 1):
        detokenizer = Detokenizer(codec(), context=codec().encode("before it"))
        first = detokenizer.push(ids[:cut])
        assert "\ufffd" not in first, "a character was cut"
        assert text.startswith(first)
        assert first + detokenizer.push(ids[cut:]) + detokenizer.finish() == text
    one_by_one = Detokenizer(codec())
    pieces = [one_by_one.push([token]) for token in ids]
    assert "".join(pieces) + one_by_one.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_stop_string_over_three_tokens() -> None:
    text = "One two three four five"
    ids = codec().encode(text, add_special=False)
    assert len(ids) == 5
    for stop in ("wo three fo", " three four", "e two three"):
        detokenizer = Detokenizer(codec(), [stop])
        out = "".join(detokenizer.push([token]) for token in ids)
        assert out == text.partition(stop)[0]
        assert detokenizer.stopped_at is not None
        assert codec().decode(ids[: detokenizer.stopped_at]).find(stop) < 0, "it is found at its last token"


def test_special_tokens_and_nothing_at_all() -> None:
    (end,) = codec().encode("<|im_end|>", add_special=False)
    assert end in codec().eos_token_ids
    detokenizer = Detokenizer(codec(), ["x"])
    assert detokenizer.push([end]) + detokenizer.finish() == ""
    empty = Detokenizer(codec())
    assert empty.push([]) + empty.finish() == ""
    hello = codec().encode(" hello", add_special=False)
    around = Detokenizer(codec())
    assert around.push([*hello, end, *hello]) + around.finish() == " hello hello"


def test_the_template_is_the_model_s_and_nothing_is_doubled() -> None:
    ids = codec().chat([{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}])
    text = codec().decode(ids, skip_special=False)
    assert text == "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("seed", range(3))
def test_masks_over_the_real_vocabulary_lead_to_what_the_schema_says(seed: int) -> None:
    grammars = load_grammars(demo_model(), 49152, codec().eos_token_ids)
    assert isinstance(grammars, GuidanceGrammars)
    schema = {
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 12},
        "n": {"type": "integer"}},
        "required": ["city", "n"], "additionalProperties": False,
    }  # fmt: skip
    text, rng = schema_grammar(schema), np.random.default_rng(seed)
    while (constraint := grammars.open(text)) is None:
        grammars._compiled[text].result()
    out: list[int] = []
    for _ in range(200):
        masks, reasons = grammars.masks([constraint])
        assert reasons == [""]
        allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))
        ends = [token for token in allowed.tolist() if codec().token_text(token).endswith(("}", '"', ","))]
        out.append(int(rng.choice(ends if ends and rng.random() < 0.4 else allowed)))
        if constraint.accept(out[-1]):
            break
    value = json.loads(codec().decode(out))
    assert list(value) == ["city", "n"]
    assert len(value["city"]) <= 12
    assert isinstance(value["n"], int)
