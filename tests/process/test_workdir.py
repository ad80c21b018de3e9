"""A server's private folder: its own while it lives, gone afterwards, also after a kill."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loraplex.core.errors import CallerError, ErrorCode
from loraplex.process.workdir import private_folder

HOLDER = """
import sys
from pathlib import Path
from loraplex.process.workdir import private_folder
with private_folder(Path(sys.argv[1])) as folder:
    (folder / "image").write_bytes(b"x")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_it_is_private_and_gone_afterwards(tmp_path: Path) -> None:
    with private_folder(tmp_path / "run") as one, private_folder(tmp_path / "run") as two:
        assert one != two
        assert one.stat().st_mode & 0o777 == 0o700
        (one / "file").touch()
        with private_folder(tmp_path / "run"):
            assert (one / "file").exists()  # its owner lives
    assert list((tmp_path / "run").iterdir()) == []


def test_what_a_killed_server_left_is_removed_by_the_next(tmp_path: Path) -> None:
    source = str(Path(__file__).resolve().parents[2] / "src")
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": source},
    ) as holder:
        assert holder.stdout is not None
        left = Path(holder.stdout.readline().strip())
        with private_folder(tmp_path):
            assert (left / "image").exists()
        holder.kill()
    assert left.exists()
    with private_folder(tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder]


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CallerError) as refused, private_folder(tmp_path / "file" / "run"):
        pass
    assert refused.value.code is ErrorCode.CONFIG_INVALID
