"""The saved adapters do what their cards say, on the real model with transformers and PEFT."""

from __future__ import annotations

import pytest
from demo.cases import adapter_folders, read_heldout
from demo.evaluate import through_reference

CASES = 16


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(adapter_folders()))
def test_adapter_is_clearly_better_than_the_base(name: str) -> None:
    folder = adapter_folders()[name]
    run = through_reference({name: folder}, {name: read_heldout(folder)[:CASES]}, "float32")
    assert run.scores[name].cases == CASES
    assert run.passed, run.scores[name]
