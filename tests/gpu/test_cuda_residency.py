"""Pages and copies on the device: owned bytes alone are read, warm steps copy nothing, open and damaged
copies delay nobody.

The bodies are those of the CPU's tests; here copies move on a stream and a thread of their own beside the
steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("flashinfer")

from tests.gpu.drivers import device_driver  # noqa: E402
from tests.gpu.world import GPU  # noqa: E402
from tests.model.copy_checks import TornOnce, check_damaged_copies, check_removal_under_load  # noqa: E402
from tests.model.cuda.adapters import GENERATION, SORTS, load_sorts  # noqa: E402
from tests.model.cuda.world import plain_executor  # noqa: E402
from tests.model.drive import Request  # noqa: E402
from tests.model.page_checks import check_open_copy, check_owned_bytes, check_warm_steps, owned_bytes  # noqa: E402
from tests.model.rig import Rig, check_engine, check_preemption  # noqa: E402
from tests.model.streamed import count_moved, fail_first_copies, hold_copies  # noqa: E402
from tests.model.tiny import decoder  # noqa: E402
from tests.model.tuned import CONFIGS, image, loaded, make_root  # noqa: E402
from tests.prompts import prompt  # noqa: E402

from loraplex.model.decoder import Decoder  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("adapters"))


@pytest.fixture
def model(root: Path) -> Decoder:
    return decoder("llama", root / "base", torch.float32, GPU)


def rig_of(root: Path, model: Decoder, **options: Any) -> Rig:
    """The control plane over the executor of a device, in float32."""
    return Rig(root, model, executor=plain_executor, **{"pages": 200, **options})


@pytest.mark.parametrize("poison", [0x00, 0x7F, 0xFF])
@pytest.mark.parametrize("page_tokens", [1, 4, 16])
def test_only_owned_bytes_are_read(root: Path, model: Decoder, page_tokens: int, poison: int) -> None:
    names = list(CONFIGS)
    check_owned_bytes(loaded(root, model, names, page_tokens, plain_executor), names, poison)


@pytest.mark.parametrize("sorts", [SORTS[:4], SORTS], ids=["captured", "all"])
def test_fused_kernels_give_the_same_bits_whatever_lies_beside_what_is_owned(sorts: Any) -> None:
    """Captured steps in bfloat16 over FlashInfer. The null page is padding rows' own and holds finite
    numbers.
    """
    outputs = []
    for poison in (0x00, 0x3C, 0xFF):
        driver = device_driver()
        load_sorts(driver, sorts)
        slots = list(range(1, len(sorts) + 1))
        requests = [
            Request(i, prompt(4 + 3 * i, i), adapter=(i, GENERATION if i else 0), logprobs=5)
            for i in range(len(sorts) + 1)
        ]
        steps = []
        for step in range(6):
            foreign = ~owned_bytes(driver, requests, slots)
            foreign[0] = False
            driver.runner.pool[foreign] = poison
            torch.cuda.synchronize()
            work = [(r, 2 if step == 0 else len(r.prompt) - 2 if step == 1 else 0) for r in requests]
            result = driver.step(work)
            steps.append(
                (result.tokens.tolist(), result.logprob_values.tolist(), result.faults.array.tolist())
            )
        outputs.append(steps)
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_warm_step_copies_no_byte(root: Path, model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = count_moved(monkeypatch)
    check_warm_steps(root, loaded(root, model, ["all-r4", "rs-r16"], 4, plain_executor), moved)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_copy_that_stays_open_for_a_thousand_steps_delays_nobody(
    root: Path, model: Decoder, depth: int
) -> None:
    rig = rig_of(root, model, depth=depth)
    digest = image(root, model, "rs-r16", rig.runner.pool.shape[1]).kernel_digest
    copies = hold_copies(rig, digest)
    check_open_copy(rig, lambda: len(copies.events), copies.let_go)
    copies.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_torn_copies_are_made_again(root: Path, model: Decoder, depth: int) -> None:
    check_damaged_copies(rig_of(root, model, depth=depth, images=TornOnce()))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("half_way", [False, True])
def test_copies_that_fail_on_the_device_are_made_again(
    root: Path, model: Decoder, depth: int, half_way: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = fail_first_copies(monkeypatch, half_way=half_way)
    check_damaged_copies(rig_of(root, model, depth=depth))
    assert failed


@pytest.mark.parametrize("depth", [0, 1])
def test_an_adapter_leaves_while_it_is_used(root: Path, model: Decoder, depth: int) -> None:
    check_removal_under_load(rig_of(root, model, depth=depth))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("pages", "reloads"), [(200, False), (40, True)])
def test_adapters_are_evicted_and_restored(
    root: Path, model: Decoder, depth: int, pages: int, reloads: bool
) -> None:
    check_engine(rig_of(root, model, depth=depth, pages=pages), reloads)


@pytest.mark.parametrize("depth", [0, 1])
def test_preempted_requests_answer_the_same(root: Path, model: Decoder, depth: int) -> None:
    check_preemption(rig_of(root, model, depth=depth, pages=28))
