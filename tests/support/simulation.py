"""Simulated time and works."""

from __future__ import annotations


class Clock:
    """The simulated time in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Event:
    """A simulated work or event, which is done when requested by the test."""

    def __init__(self) -> None:
        self.done = False

    def is_completed(self) -> bool:
        return self.done
