"""The program that memory checkers run: it launches every kernel there is, and sees one that is left out."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.gpu import every_kernel

from loraplex.model.cuda import draw_kernels

# The interpreter of Triton 3.6 itself turns one-element arrays into scalars.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU test; the program itself runs on a device")
def test_it_launches_every_kernel_and_all_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    every_kernel.main()
    assert "12 kernels on cpu" in capsys.readouterr().out


def test_a_kernel_that_is_left_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("adapter_kernels", "step_kernels", "sampling_kernels"):
        monkeypatch.setattr(every_kernel, part, lambda: None)
        monkeypatch.setattr(getattr(every_kernel, part), "__name__", part)
    with pytest.raises(AssertionError, match=r"not launched: .*cut_kernel.*shrink_kernel"):
        every_kernel.main()
    assert not isinstance(draw_kernels.cut_kernel, every_kernel.Noted)
