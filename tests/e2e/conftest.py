"""Folders that all end-to-end tests read and none changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.e2e import judge
from tests.e2e.judge import write_folders

CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=CUDA)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the models of a test run: the same claims hold on both, in float32 to the same bounds."""
    chosen: str = request.param
    monkeypatch.setattr(judge, "DEVICE", chosen)
    return chosen


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folders(tmp_path_factory.mktemp("e2e"))
