"""Folders that all end-to-end tests read and none changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.e2e.judge import write_folders


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folders(tmp_path_factory.mktemp("e2e"))
