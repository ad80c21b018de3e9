"""What `serve` accepts: every refusal is typed and names the option."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.config import POLICIES, ServeConfig, is_loopback, parse_adapter, parse_tool_format
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.schedule.policy import POLICIES as schedule_policies


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "model"),
        ({"model": "m", "demo": True}, "model"),
        ({"model": "m", "port": 0}, "port"),
        ({"model": "m", "port": 65536}, "port"),
        ({"model": "m", "host": "0.0.0.0"}, "host"),
        ({"model": "m", "host": "example.org"}, "host"),
        ({"model": "m", "device": "tpu"}, "device"),
        ({"model": "m", "dtype": "int8"}, "dtype"),
        ({"model": "m", "load_format": "gguf"}, "load_format"),
        ({"model": "m", "policy": "lottery"}, "policy"),
        ({"model": "m", "pool_gb": 0.0}, "pool_gb"),
        ({"model": "m", "max_model_len": 0}, "max_model_len"),
        ({"model": "m", "log_level": "loud"}, "log_level"),
        ({"model": "m", "tool_formats": ((None, "xml"),)}, "tool_format"),
        ({"model": "m", "tool_formats": (("", "json"),)}, "tool_format"),
        ({"model": "m", "tool_formats": (("a", "json"), ("a", "hermes"))}, "tool_format"),
        ({"model": "m", "drain_s": -1.0}, "drain_s"),
        ({"model": "m", "early_abort_s": 0.0}, "early_abort_s"),
        ({"model": "m", "early_abort_s": float("nan")}, "early_abort_s"),
        ({"model": "m", "early_abort_s": 86400.0}, "early_abort_s"),
        ({"model": "m", "drain_s": float("nan")}, "drain_s"),
        ({"model": "m", "adapters": (("a", "x"), ("a", "y"))}, "adapter"),
        ({"model": "m", "share_prefixes": ("acme",)}, "share_prefixes"),
        ({"model": "m", "share_prefixes": ("acme", "acme")}, "share_prefixes"),
        ({"model": "m", "share_prefixes": ("acme", "globex", "acme")}, "share_prefixes"),
        ({"model": "m", "share_prefixes": ("acme", "")}, "share_prefixes"),
        ({"model": "m", "share_prefixes": ("acme", " globex")}, "share_prefixes"),
        ({"model": "m", "share_prefixes": ("acme", ":shared")}, "share_prefixes"),
        ({"model": "m", "share_prefixes": ("acme", "x" * 129)}, "share_prefixes"),
        ({"model": "m", "share_prefixes": ("acme", "a/b")}, "share_prefixes"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(CallerError) as refused:
        ServeConfig(**fields)
    assert (refused.value.code, refused.value.param) == (ErrorCode.CONFIG_INVALID, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"demo": True},
        {"model": "m", "host": "::1"},
        {"model": "m", "host": "127.1.2.3"},
        {"model": "m", "host": "localhost"},
        {"model": "m", "host": "0.0.0.0", "api_key_file": "keys"},
        {"model": "m", "host": "0.0.0.0", "expose_without_keys": True},
        {"model": "m", "drain_s": 0.0},
        {"model": "m", "share_prefixes": ("acme", "globex")},
    ],
)
def test_what_can_be_served(fields: dict[str, Any]) -> None:
    config = ServeConfig(**fields)
    engine = config.engine("folder", "images")
    assert (engine.model, engine.images_dir, engine.device) == ("folder", "images", config.device)
    assert engine.share_prefixes == config.share_prefixes


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.1", True), ("::1", True), ("10.0.0.1", False), ("", False)]
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_an_adapter_option_has_a_name_and_a_source() -> None:
    assert parse_adapter("sql=/a/b=c") == ("sql", "/a/b=c")
    for text in ("sql", "=x", "sql=", ""):
        with pytest.raises(CallerError) as refused:
            parse_adapter(text)
        assert refused.value.param == "adapter"


def test_an_option_says_how_calls_are_written_for_one_adapter_or_for_all() -> None:
    given = tuple(map(parse_tool_format, ("llama3", "team/a=hermes")))
    assert given == ((None, "llama3"), ("team/a", "hermes"))
    config = ServeConfig(model="m", tool_formats=given)
    assert config.tool_format_of(None) == "llama3"
    assert config.tool_format_of("team/a", "mistral") == "hermes"
    assert config.tool_format_of("b", "mistral") == "mistral"
    assert config.tool_format_of("b") == "llama3"
    assert ServeConfig(model="m").tool_format_of("b") is None


def test_the_policies_that_can_be_asked_for_are_those_there_are() -> None:
    assert tuple(schedule_policies) == POLICIES
    assert [policy.name for policy in schedule_policies.values()] == list(POLICIES)
