"""Keys follow their file while the server runs; a file that is not whole changes nothing."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import pytest

from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.tenants import TenantLimits
from loraplex.server.auth import KeyFile


def line(key: str, tenant: str = "t", role: str = "user") -> str:
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f'{{"sha256": "{digest}", "tenant": "{tenant}", "role": "{role}"}}\n'


def known(keys: KeyFile, key: str) -> bool:
    try:
        keys.identify([b"Bearer " + key.encode()])
    except CallerError as error:
        return error.code is not ErrorCode.UNAUTHENTICATED
    return True


class Clock:
    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


def test_keys_come_and_go_with_their_lines(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", Clock()
    path.write_text(line("a") + line("b"))
    keys = KeyFile(str(path), clock)
    path.write_text(line("b", role="admin") + line("c"))
    assert (known(keys, "a"), known(keys, "c")) == (True, False)  # looked at once a second at most
    clock.s += 1
    assert (known(keys, "a"), known(keys, "c")) == (False, True)
    assert keys.identify([b"Bearer b"]).role == "admin"


def test_a_rename_over_the_file_is_seen(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", Clock()
    path.write_text(line("a"))
    keys = KeyFile(str(path), clock)
    old = path.stat()
    (tmp_path / "new").write_text(line("b"))
    os.utime(tmp_path / "new", ns=(old.st_atime_ns, old.st_mtime_ns))  # same size, same time, another file
    os.replace(tmp_path / "new", path)
    clock.s += 1
    assert (known(keys, "a"), known(keys, "b")) == (False, True)


@pytest.mark.parametrize("text", ["", "{", "keys = []", None])
def test_a_file_that_is_not_whole_changes_nothing_and_is_logged_once(
    tmp_path: Path, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "keys", Clock()
    path.write_text(line("a"))
    keys = KeyFile(str(path), clock)
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            clock.s += 1
            assert known(keys, "a")
    assert [record.getMessage().startswith("the keys stay as they were") for record in caplog.records] == [
        True
    ]
    path.write_text(line("b"))
    clock.s += 1
    assert (known(keys, "a"), known(keys, "b")) == (False, True)


def test_without_a_file_nobody_is_asked() -> None:
    assert KeyFile(None).identify([]).operator


def test_a_file_that_is_wrong_at_the_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CallerError) as caught:
        KeyFile(str(tmp_path / "missing"))
    assert caught.value.code is ErrorCode.CONFIG_INVALID


LIMITS = '{"tenant": "t", "weight": 2, "max_running": 8, "max_waiting": 100}\n'


def test_limits_come_and_go_with_their_lines(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", Clock()
    path.write_text(line("a") + LIMITS)
    keys = KeyFile(str(path), clock)
    assert keys.tenant_limits == (TenantLimits("t", 2, 8, 100),)
    path.write_text(line("a") + '{"tenant": "t", "max_running": 1}\n')
    clock.s += 1
    assert known(keys, "a")
    assert keys.tenant_limits == (TenantLimits("t", 1, 1),)
    path.write_text(line("a") + LIMITS.replace("2", "0"))
    clock.s += 1
    assert known(keys, "a")
    assert keys.tenant_limits == (TenantLimits("t", 1, 1),)  # a file that is refused changes nothing


def test_limits_stand_in_tables_of_toml_too(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    digest = hashlib.sha256(b"a").hexdigest()
    path.write_text(
        f"[[keys]]\nsha256 = '{digest}'\ntenant = 't'\n[[tenants]]\ntenant = 't'\nmax_waiting = 5\n"
    )
    assert KeyFile(str(path)).tenant_limits == (TenantLimits("t", max_waiting=5),)


def test_limits_without_a_key_are_said_and_takes_no_key_along(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The operator takes a tenant's last key away and leaves its limits: the key must not live on."""
    path, clock = tmp_path / "keys", Clock()
    path.write_text(line("a") + line("b", tenant="u") + LIMITS)
    keys = KeyFile(str(path), clock)
    path.write_text(line("b", tenant="u") + LIMITS)
    clock.s += 1
    with caplog.at_level(logging.WARNING):
        assert (known(keys, "a"), known(keys, "b")) == (False, True)
    assert "tenants without a key: t" in caplog.text


@pytest.mark.parametrize(
    "limits",
    [
        '{"tenant": "t"}',
        '{"weight": 2}',
        '{"tenant": "", "weight": 2}',
        '{"tenant": "a/b", "weight": 2}',
        '{"tenant": 1, "weight": 2}',
        '{"tenant": "t", "weight": 1.5}',
        '{"tenant": "t", "weight": "2"}',
        '{"tenant": "t", "weight": true}',
        '{"tenant": "t", "weight": 0}',
        '{"tenant": "t", "weight": null}',
        '{"tenant": "t", "max_running": 0}',
        '{"tenant": "t", "max_running": -1}',
        '{"tenant": "t", "max_running": 8193}',
        '{"tenant": "t", "max_waiting": 0}',
        '{"tenant": "t", "max_waiting": 1e3}',
        '{"tenant": "t", "max_waiting": 100000000000000000000}',
        '{"tenant": "t", "weight": 2, "role": "admin"}',
        '{"tenant": "t", "quota": 3}',
        '{"tenant": "t", "weight": 2}\n{"tenant": "t", "weight": 3}',
        '["t", 2]',
    ],
)
def test_malformed_limits_are_refused(tmp_path: Path, limits: str) -> None:
    path = tmp_path / "keys"
    path.write_text(line("a") + limits + "\n")
    with pytest.raises(CallerError) as caught:
        KeyFile(str(path))
    assert caught.value.code is ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize(
    "tables",
    [
        "[[tenants]]\ntenant = 't'",
        "[[tenants]]\ntenant = 't'\nweight = 0",
        "[[keys]]\ntenant = 't'\nweight = 2",
        "[tenants]\ntenant = 't'\nweight = 2",
        "tenants = [3]",
        "[[bounds]]\ntenant = 't'\nweight = 2",
    ],
)
def test_malformed_tables_are_refused(tmp_path: Path, tables: str) -> None:
    path = tmp_path / "keys"
    digest = hashlib.sha256(b"a").hexdigest()
    path.write_text(f"[[keys]]\nsha256 = '{digest}'\ntenant = 't'\n{tables}\n")
    with pytest.raises(CallerError) as caught:
        KeyFile(str(path))
    assert caught.value.code is ErrorCode.CONFIG_INVALID
