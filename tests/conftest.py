"""What must be true before any test module is imported."""

import importlib.util
import os


def _has_gpu() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    import torch

    return torch.cuda.is_available()


# Triton reads this once, when it is first imported by anybody: kernels run in its interpreter where there is no GPU.
if not _has_gpu():
    os.environ["TRITON_INTERPRET"] = "1"


from hypothesis import settings  # noqa: E402 - after the environment is right

# No test asserts wall-clock time: an example may take long on a busy machine.
settings.register_profile("loraplex", deadline=None)
settings.load_profile("loraplex")
