"""What the processes of engine and worker have in common: each builds something by name, or says why it could not.

Knows neither engines nor models. Specification: rulings "Processes".
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import msgspec

from loraplex.core.errors import ErrorCode, LoraplexError, error_for


class Failed(msgspec.Struct, frozen=True, tag=True):
    """What was to be built could not be, or it broke later. The process exits after this."""

    code: str
    message: str
    param: str | None = None

    @staticmethod
    def of(error: Exception) -> Failed:
        """A typed error as it is; any other one is a fault of ours."""
        if isinstance(error, LoraplexError):
            return Failed(error.code.value, error.message, error.param)
        return Failed(ErrorCode.INTERNAL.value, f"{type(error).__name__}: {error}")

    @property
    def error(self) -> LoraplexError:
        """The error, on the other side."""
        return error_for(ErrorCode(self.code), self.message, param=self.param)


def load_function(name: str) -> Callable[..., Any]:
    """The function that `module:function` names."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found
