"""What Python callers pass to `LLM`: read exactly, or refused by name before anything is submitted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loraplex.api.arguments import (
    check_tokens,
    engine_config,
    read_adapters,
    read_count,
    read_grouping,
    read_model,
    read_names,
    read_number,
    read_prompts,
    read_registration,
    read_sampling,
    read_sink,
)
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.request import SamplingParams

OWN = {"model": "m", "images_dir": "i"}


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("text", ["text"]),
        ([], []),
        ([1, 2], [[1, 2]]),
        ((1, 2), [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
        ([[]], [[]]),
        (range(3), [[0, 1, 2]]),
        (np.array([1, 2]), [[1, 2]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (torch.tensor([5]), [[5]]),
        (torch.tensor([[5], [6]]), [[5], [6]]),
        ([np.array([1]), torch.tensor([2])], [[1], [2]]),
        ([np.int64(7), 8], [[7, 8]]),
        ([-1, 1 << 70], [[-1, 1 << 70]]),
    ],
)
def test_prompts_in_every_form(given: Any, read: list[Any]) -> None:
    found = read_prompts(given)
    assert found == read
    assert all(type(token) is int for prompt in found if not isinstance(prompt, str) for token in prompt)


@pytest.mark.parametrize(
    "given",
    [
        None,
        5,
        1.5,
        b"text",
        {"a": 1},
        {1, 2},
        [None],
        [1.0, 2.0],
        ["1", 2],
        [True, False],
        [[1, 2], 5],
        [[[1]]],
        [b"text"],
        [[1, "2"]],
        [[1.7]],
        [[True]],
        np.array([1.5, 2.5]),
        np.array(3),
        torch.tensor([[True]]),
        ["a", None],
    ],
    ids=repr,
)
def test_what_is_no_prompt_is_refused(given: Any) -> None:
    with pytest.raises(CallerError) as caught:
        read_prompts(given)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, "prompts")


def test_ids_outside_the_vocabulary_are_refused() -> None:
    check_tokens([0, 9], 10)
    for token in (-1, 10, 1 << 70):
        with pytest.raises(CallerError, match=f"{token} lies outside the vocabulary of 10") as caught:
            check_tokens([0, token], 10)
        assert caught.value.code is ErrorCode.TOKEN_OUT_OF_RANGE


def test_one_value_stands_for_all() -> None:
    params = SamplingParams(max_tokens=2)
    assert read_names(None, 2) == [None, None]
    assert read_names("a", 2) == ["a", "a"]
    assert read_names(("a", None), 2) == ["a", None]
    assert read_sampling(params, 2) == [params, params]
    assert read_sampling(None, 1) == read_sampling([None], 1) == [SamplingParams()]
    assert read_adapters(None) == {}
    assert read_adapters({"a": "x"}) == {"a": "x"}
    assert read_registration("a", Path("x")) == ("a", Path("x"))
    assert (read_count("n", None), read_count("n", np.int64(3))) == (None, 3)
    assert (read_number("x", None, 0, 1), read_number("x", 1, 0, 1)) == (None, 1.0)


@pytest.mark.parametrize(
    ("read", "param"),
    [
        (lambda: read_names(5, 1), "adapters"),
        (lambda: read_names([5], 1), "adapters"),
        (lambda: read_names({"a"}, 1), "adapters"),
        (lambda: read_names(["a"], 2), "adapters"),
        (lambda: read_sampling({"max_tokens": 3}, 1), "sampling"),
        (lambda: read_sampling("x", 1), "sampling"),
        (lambda: read_sampling([SamplingParams()], 2), "sampling"),
        (lambda: read_adapters(["x"]), "adapters"),
        (lambda: read_registration(5), "alias"),
        (lambda: read_registration(None, "x"), "alias"),
        (lambda: read_registration("a", None), "source"),
        (lambda: read_registration("a", b"x"), "source"),
        (lambda: read_count("n", "1"), "n"),
        (lambda: read_count("n", 1.5), "n"),
        (lambda: read_count("n", True), "n"),
        (lambda: read_number("x", float("nan"), 0, 1), "x"),
        (lambda: read_number("x", float("inf"), 0, 1), "x"),
        (lambda: read_number("x", -0.1, 0, 1), "x"),
        (lambda: read_number("x", 10**400, 0, 1), "x"),
        (lambda: read_number("x", "0.5", 0, 1), "x"),
        (lambda: read_number("x", True, 0, 1), "x"),
    ],
)
def test_another_type_is_refused_by_name(read: Any, param: str) -> None:
    with pytest.raises(CallerError, match=param) as caught:
        read()
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, param)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("pool_gb", "2"),
        ("pool_gb", True),
        ("pool_gb", float("nan")),
        ("max_model_len", "x"),
        ("max_model_len", 1.5),
        ("pipeline_depth", "1"),
        ("page_tokens", 2.5),
        ("page_tokens", 0),
        ("scrub", "no"),
        ("dtype", torch.float32),
        ("dtype", None),
        ("device", "tpu"),
        ("nonsense", 1),
        ("images_dir", "x"),
        ("model", "x"),
        ("token_budget", 8),
    ],
)
def test_an_option_of_another_type_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(CallerError, match=option) as caught:
        engine_config(OWN, {option: value})
    assert (caught.value.code, caught.value.param) == (ErrorCode.CONFIG_INVALID, option)


def test_options_are_what_was_given() -> None:
    config = engine_config(OWN, {"pool_gb": 1, "token_budget": 8, "max_requests": 8})
    assert (config.pool_gb, config.token_budget, config.max_requests) == (1.0, 8, 8)


@pytest.mark.parametrize("given", ["a file", 3, object(), []])
def test_an_event_sink_has_a_method_emit(given: Any) -> None:
    with pytest.raises(CallerError) as raised:
        read_sink(given)
    assert (raised.value.code, raised.value.param) == (ErrorCode.INVALID_REQUEST, "events")
    assert read_sink(None) is not None


@pytest.mark.parametrize("given", [5, None, b"m", "a\0b", "\ud800", ["m"]])
def test_a_model_is_a_path_that_can_be_looked_for(given: Any) -> None:
    with pytest.raises(CallerError) as raised:
        read_model(given)
    assert (raised.value.code, raised.value.param) == (ErrorCode.CONFIG_INVALID, "model")
    assert read_model("m") == read_model(Path("m")) == Path("m")


@pytest.mark.parametrize("given", ["a\0b", "\ud800"])
def test_a_source_is_a_path_that_can_be_looked_for(given: str) -> None:
    with pytest.raises(CallerError) as raised:
        read_registration("a", given)
    assert (raised.value.code, raised.value.param) == (ErrorCode.INVALID_REQUEST, "source")


@pytest.mark.parametrize("given", ["\ud800", ["a", "b\udfff"]])
def test_a_text_is_one_that_utf_8_can_write(given: Any) -> None:
    with pytest.raises(CallerError) as raised:
        read_prompts(given)
    assert (raised.value.code, raised.value.param) == (ErrorCode.INVALID_REQUEST, "prompts")


def test_groupings_are_known_ones() -> None:
    assert read_grouping(None) is None
    assert read_grouping("pets") == "pets"
    for given in ("PetS", "", 1, True, ["pets"]):
        with pytest.raises(CallerError) as refused:
            read_grouping(given)
        assert refused.value.param == "grouping"
