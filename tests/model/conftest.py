"""The tiny Llama and its adapters on disk, made once for all tests of the model that do not bring
their own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.model.tiny import decoder
from tests.model.tuned import make_root

from loraplex.model.decoder import Decoder


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base` and every adapter of `CONFIGS`; nobody writes there."""
    return make_root(tmp_path_factory.mktemp("adapters"))


@pytest.fixture
def model(root: Path) -> Decoder:
    """A fresh decoder over `base`."""
    return decoder("llama", root / "base")
