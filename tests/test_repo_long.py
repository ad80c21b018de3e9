"""Builds the wheel as a user would and looks into it."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import loraplex

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "loraplex"


@pytest.mark.long
def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy, so that the build leaves nothing in the checkout
    names = ["pyproject.toml", "README.md", "LICENSE"]
    tracked = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    for path in [ROOT / name for name in names] + tracked:
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())

    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(tmp_path),
    ]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"loraplex-{loraplex.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        info = f"loraplex-{loraplex.__version__}.dist-info"
        metadata = archive.read(f"{info}/METADATA").decode()
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
    shipped = {name for name in inside if not name.startswith(info)}
    assert shipped == {str(path.relative_to(ROOT / "src")) for path in tracked}
    assert f"{info}/licenses/LICENSE" in inside
    assert re.search(r"^License-Expression: Apache-2\.0$", metadata, re.MULTILINE)
    assert "loraplex = loraplex.cli:main" in entry_points
