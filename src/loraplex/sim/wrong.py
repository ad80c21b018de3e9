"""The one exception of the simulator: a checker saw a promise broken."""

from __future__ import annotations


class Wrong(Exception):
    """checker: which one saw it."""

    def __init__(self, checker: str, message: str) -> None:
        super().__init__(message)
        self.checker = checker
