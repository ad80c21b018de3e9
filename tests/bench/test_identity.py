"""`loraplex bench identity` in small: every row is there and positive."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loraplex import cli


def test_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "identity.json"
    words = ["--mib", "1", "--registrations", "5", "--names", "20", "--repeats", "1", "--json", str(out)]
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "identity", *words])
    assert ended.value.code == 0
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 12
    assert all(row["value"] > 0 for row in rows)
    assert rows[0]["ratio"] == 1.0
    assert "look-ups of alias, 20 adapters" in capsys.readouterr().out


def test_nothing_to_measure_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "identity", "--mib", "0"])
    assert ended.value.code == 2
    assert "config_invalid" in capsys.readouterr().err
