"""Time that passes only when told to."""

from __future__ import annotations


class VirtualClock:
    """Callable like time.monotonic; seconds."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
