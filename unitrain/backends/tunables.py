"""A setting that changes how fast a backend is, and no number beyond rounding."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tunable:
    """An environment variable, what it is in a sentence, what it is by itself, and what else is worth a try."""

    variable: str
    says: str
    default: str
    others: tuple[str, ...]
