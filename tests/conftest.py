"""What must be true before any test module is imported, and the command line for tests of it."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path


def _has_gpu() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    import torch

    return torch.cuda.is_available()


# Triton reads this once, when it is first imported by anybody: kernels run in its interpreter where there is
# no GPU.
if not _has_gpu():
    os.environ["TRITON_INTERPRET"] = "1"


import pytest  # noqa: E402 - after the environment is right
from hypothesis import settings  # noqa: E402

# A helper's assertion shows its values, as a test's does. What is imported already is run without pytest.
folders = {f"tests.{path.name}" for path in Path(__file__).parent.iterdir() if path.is_dir()}
pytest.register_assert_rewrite(*sorted(folders - sys.modules.keys()))

# No test asserts wall-clock time: an example may take long on a busy machine.
settings.register_profile("loraplex", deadline=None)
settings.load_profile("loraplex")


class Result:
    """What a command came to."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err


@pytest.fixture
def loraplex(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs the command line in this process."""
    from loraplex import cli

    def run(*words: str) -> Result:
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        out, err = capsys.readouterr()
        status = ended.value.code
        return Result(status if isinstance(status, int) else 0, out, err)

    return run


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test logged or printed reaches the process that reports it: a name that is no UTF-8, for one,
    would end the worker.
    """
    report = yield
    report.sections = [
        (title, text.encode("utf-8", "backslashreplace").decode()) for title, text in report.sections
    ]
    return report
