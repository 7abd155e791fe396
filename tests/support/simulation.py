"""Simulated clock and work handles."""

from __future__ import annotations


class Clock:
    """A simulated clock that returns the time in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Event:
    """A simulated work handle or event that completes when the test requests it."""

    def __init__(self) -> None:
        self.done = False

    def is_completed(self) -> bool:
        return self.done
