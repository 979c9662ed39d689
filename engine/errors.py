"""Errors that an engine process reports to whoever started it."""

from __future__ import annotations


class StartError(Exception):
    """The engine cannot start: what is wrong, what was expected and what to do. `code` is for programs."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Refused(Exception):
    """A request that cannot run here. `code` is one of EngineError's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
