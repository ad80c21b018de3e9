"""Our reading of PEFT's rules against PEFT and Python's own matcher, and against the list of PEFT's
fields.
"""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import IA3Config, LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from tests.artifact.tiny import tiny_base

from loraplex.artifact.fields import APPLIED, INERT, OFF_ONLY
from loraplex.artifact.matching import Selector, layer_index
from loraplex.artifact.patterns import PatternError, StepBudget, compile_pattern
from loraplex.artifact.peft_config import decode_config
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.limits import MAX_PATTERN_STEPS

MODULES = list(tiny_base(layers=12).modules())
PARTS = ["model", "layers", "self_attn", "mlp", "q_proj", "k_proj", "v_proj", "proj", "0", "1", "11",
"lm_head", "embed_tokens", "x"]  # fmt: skip
NAME = st.lists(st.sampled_from(PARTS), min_size=1, max_size=4).map(".".join)
PIECE = st.sampled_from(
    [
        *PARTS,
        r"\.",
        ".",
        ".*",
        ".*?",
        ".+",
        "(q|k)",
        "(?:q|v)_proj",
        "[qkv]",
        "[^.]+",
        r"\d+",
        r"\d",
        "_proj",
        "?",
        "*",
        "$",
        "^",
        "(?!.*mlp)",
        "(?=model)",
        r"\b",
        r"\w+",
        "{2}",
        "{1,}",
        "{0,2}",
        "|",
        "(",
        ")",
        "(?<=q)",
        "(?<!mlp.)",
        "[a-z]*",
        r"\S",
    ]
)
PATTERN = st.lists(PIECE, min_size=1, max_size=9).map("".join)


def decode(**fields: Any) -> Selector:
    return Selector(decode_config({"peft_type": "LORA", "r": 4, "lora_alpha": 8} | fields))


@settings(deadline=None)
@given(PATTERN, st.sampled_from([m.name for m in MODULES]))
def test_a_pattern_means_what_it_means_to_python(pattern: str, name: str) -> None:
    try:
        expected = re.fullmatch(pattern, name) is not None
    except re.error:
        with pytest.raises(PatternError):
            compile_pattern(pattern)
        return
    assert compile_pattern(pattern).fullmatch(name, StepBudget()) is expected


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        ("(a*)*b", "a" * 60, False),
        ("(a|a)*b", "a" * 60, False),
        ("(a?){60}a{60}", "a" * 60, True),
        (".*.*.*.*.*.*.*.*.*.*x", "a" * 60, False),
        ("(?:(?:a+)+)+$", "a" * 60 + "b", False),
        ("a{2,3}", "aaaa", False),
        ("a{2,3}", "aaa", True),
        ("(a{0}){1000000}b", "b", True),
        ("(aa){1000000}", "aa" * 20, False),
        (r"[^\d.]\D\s?\S\W", "ab c.", True),
        ("", "", True),
        ("[[ab]", "[", True),
    ],
)
def test_patterns_that_run_away_elsewhere_do_not_here(pattern: str, text: str, expected: bool) -> None:
    assert compile_pattern(pattern).fullmatch(text, StepBudget()) is expected


@pytest.mark.parametrize(
    "pattern",
    [
        "(?i)q",
        "(?i:q)",
        r"(q)\1",
        "(?P<a>q)(?P=a)",
        "(?>q+)",
        "q++",
        "(a)(?(1)b|c)",
        "x" * 20_000,
        "(" * 5_000 + ")" * 5_000,
    ],
)
def test_patterns_that_are_not_read(pattern: str) -> None:
    with pytest.raises(PatternError):
        compile_pattern(pattern)


def test_all_patterns_of_a_configuration_share_one_budget() -> None:
    work = StepBudget()
    heavy = compile_pattern("(.*.*)*" * 100 + "x")
    heavy.fullmatch("model.layers.0.self_attn.q_proj", work)
    assert work.left < MAX_PATTERN_STEPS - 1000
    work.left = 1000  # the rest would only take longer
    with pytest.raises(CallerError) as caught:
        heavy.fullmatch("model.layers.0.self_attn.q_proj", work)
    assert caught.value.code is ErrorCode.ADAPTER_CONFIG_INVALID


def test_a_pattern_for_each_module_is_cheap() -> None:
    names = {m.name: 1 + i % 9 for i, m in enumerate(tiny_base(layers=40).modules())}
    selector = decode(target_modules="all-linear", rank_pattern=names)
    for module in tiny_base(layers=40).modules():
        assert selector.rank(module) == names[module.name]
    assert MAX_PATTERN_STEPS - selector._work.left < MAX_PATTERN_STEPS // 50


LAYERS = st.one_of(st.none(), st.integers(0, 12), st.lists(st.integers(0, 12), max_size=3))


@settings(deadline=None)
@given(
    st.one_of(PATTERN, st.lists(NAME, min_size=1, max_size=4)),
    st.one_of(st.none(), PATTERN, st.lists(NAME, max_size=2)),
    LAYERS,
    st.sampled_from([None, "", [], "layers", "model.layers", "blocks", ["blocks", "layers"]]),
)
def test_selection_is_pefts(targets: Any, exclude: Any, layers: Any, layers_pattern: Any) -> None:
    fields = {
        "target_modules": targets,
        "exclude_modules": exclude,
        "layers_to_transform": layers,
        "layers_pattern": layers_pattern,
    }
    try:
        selector = decode(**fields)
    except CallerError:
        return  # PEFT refuses it too, or it is a pattern that is not read; the corpus covers refusals
    peft = SimpleNamespace(**fields, target_parameters=None)
    for module in MODULES:
        assert selector.selects(module) is bool(check_target_module_exists(peft, module.name)), module.name


@settings(deadline=None)
@given(st.lists(st.one_of(NAME, PATTERN), max_size=4, unique=True))
def test_rank_and_alpha_patterns_are_pefts(keys: list[str]) -> None:
    ranks = {key: index + 1 for index, key in enumerate(keys)}
    try:
        selector = decode(target_modules=["q_proj"], rank_pattern=ranks, alpha_pattern=ranks)
    except CallerError:
        return
    for module in MODULES:
        try:
            key = get_pattern_key(list(ranks), module.name)
        except re.error:
            return  # a key that is a pattern alone, but not inside the group that PEFT puts it in
        assert selector.rank(module) == ranks.get(key, 4)
        assert selector.alpha(module) == str(ranks.get(key, 8))


def test_all_linear_is_every_layer_module() -> None:
    selector = decode(target_modules="All-Linear")
    assert {m.name for m in MODULES if not selector.selects(m)} == {"lm_head", "model.embed_tokens"}


@pytest.mark.parametrize(
    ("name", "patterns", "expected"),
    [
        ("model.layers.3.self_attn.q_proj", (), 3),
        ("model.layers.3.experts.7.q_proj", (), 3),
        ("layers.3.q_proj", (), None),
        ("model.layers.3", (), None),
        ("lm_head", (), None),
        ("model.layers.3.self_attn.q_proj", ("h",), None),
        ("model.layers.3.self_attn.q_proj", ("h", "layers"), 3),
        ("layers.3.q_proj", ("layers",), 3),
        ("model.layers.3.q_proj", ("model.layers",), 3),
    ],
)
def test_layer_index(name: str, patterns: tuple[str, ...], expected: int | None) -> None:
    assert layer_index(name, patterns) == expected


@pytest.mark.parametrize("config", [LoraConfig, IA3Config])
def test_every_field_of_peft_is_classified_once(config: type) -> None:
    kind = config().peft_type.value
    for field in dataclasses.fields(config):
        places = [table for table in (APPLIED[kind], INERT, OFF_ONLY) if field.name in table]
        allowed = 2 if field.name == "modules_to_save" else 1  # listed as known, refused unless empty
        assert 1 <= len(places) <= allowed, field.name


@pytest.mark.parametrize(
    "config",
    [LoraConfig(target_modules=["q_proj"]), IA3Config(target_modules=["k_proj"], feedforward_modules=[])],
)
def test_every_default_of_peft_is_accepted(config: Any) -> None:
    record = {k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()}
    record["peft_type"] = record["peft_type"].value
    decoded = decode_config(record)
    assert decoded.targets is not None
    assert (decoded.kind.value, decoded.targets.names) == (config.peft_type.value, set(config.target_modules))
    assert decoded.rank == getattr(config, "r", 0)
