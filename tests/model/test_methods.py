"""Every method that is served, in one mixed batch over a base with biases, against PEFT in float32; every
family.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from tests.model.methods import BASE, CONFIGS, artifact, check_mixed_batch, driver_of, image, write_folders
from tests.model.tiny import decoder

from loraplex.adapters.prepare import EXECUTABLE
from loraplex.artifact.read_artifact import require_executable
from loraplex.artifact.record import Method
from loraplex.core.layout import Factor
from loraplex.model import executor
from loraplex.ops.dispatch import FAMILIES, make_operator
from loraplex.ops.triton_lora import Tuning
from loraplex.ops.triton_ops import TritonState

# The interpreter of Triton 3.6 itself turns one-element arrays into scalars.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")


INTERPRETED = ["lora", "dora-bitfit", "ia3-splits-qkv"]
"""For Triton's interpreter, where a program takes 10 ms."""

SMALL = Tuning(
    block_rows=4,
    splits=2,
    chunk_floor=32,
    max_bk=64,
    bn=64,
    shrink_warps=1,
    expand_warps=1,
    shrink_ctas=1,
    expand_ctas=1,
)
SMALL_PREFILL = Tuning(
    block_rows=16,
    splits=2,
    chunk_floor=32,
    max_bk=64,
    bn=64,
    shrink_warps=1,
    expand_warps=1,
    shrink_ctas=1,
    expand_ctas=1,
    rank_tile=32,
    max_run=1,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folders(tmp_path_factory.mktemp("methods"))


def test_every_method_is_executable_and_all_but_alora_are_here(root: Path) -> None:
    seen: set[Method] = set()
    for name in CONFIGS:
        found = artifact(root, name)
        require_executable(found, EXECUTABLE)
        seen |= found.methods
    assert (
        seen | {Method.ALORA} == EXECUTABLE == frozenset(Method)
    )  # when an adapter acts is no operator's business


def test_only_what_differs_from_the_base_has_a_constant(root: Path) -> None:
    """IA3 scales the base's bias with everything else; plain LoRA leaves it alone: neither stores a c."""
    for name, has_constant in (
        ("lora", False),
        ("ia3", False),
        ("ia3-splits-qkv", False),
        ("dora", True),
        ("lora-bias", True),
        ("bitfit", True),
    ):
        factors = set(image(root, name, 2304).extents[:, 2].tolist())
        assert (Factor.C in factors) is has_constant, name
        assert bool(factors & {Factor.H, Factor.G, Factor.C}) is (name != "lora"), name


@pytest.mark.parametrize("family", [*sorted(FAMILIES), "triton"])
def test_a_mixed_batch_of_every_method_equals_peft(
    root: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "make_operator", functools.partial(make_operator, family=family))
    names = list(CONFIGS) if family != "triton" else INTERPRETED
    driver = driver_of(decoder(BASE, root / "base"), names)
    if family == "triton":
        driver.runner.table.kernel_state = TritonState(driver.runner.table, tunings=(SMALL_PREFILL, SMALL))
    check_mixed_batch(root, driver, names)
