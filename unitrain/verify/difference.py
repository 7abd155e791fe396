"""How far two runs are apart, in numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from unitrain.verify.record import TENSORS, Record


@dataclass(frozen=True)
class Furthest:
    """The largest |difference| of some values, where it is, and whether all are within the tolerance."""

    delta: float = 0.0
    where: str = ""
    within: bool = True


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A run against its reference. Steps count from 1; None for one that does not exist.

    `unlike` names a parameter or state that only one of both has, or has in another shape.
    """

    parameters: Furthest
    state: Furthest
    loss: Furthest
    steps: tuple[int, int]
    first_loss: int | None
    first_data: int | None
    first_learning_rate: int | None
    start: str | None
    unlike: str | None

    @property
    def none(self) -> bool:
        """Whether both runs have the same numbers, within the tolerance, from the same data."""
        return (
            all(part.within for part in (self.parameters, self.state, self.loss))
            and self.unlike is None
            and self.first_data is None
            and self.steps[0] == self.steps[1]
        )


def difference(run: Record, reference: Record, tolerance: float) -> Difference:
    """Compare `run` with `reference`.

    A value is within the tolerance when |difference| <= tolerance * max(1, m), m being the largest |value| of the
    reference's tensor, or the loss itself.
    """
    losses, expected = run.losses(), reference.losses()
    worst, first_loss = Furthest(), None
    for step, (loss, other) in enumerate(zip(losses, expected, strict=False), 1):
        delta = _distance(loss, other)
        within = delta <= tolerance * max(1.0, abs(other)) or delta == 0
        if not within and first_loss is None:
            first_loss = step
        if delta > worst.delta:
            worst = Furthest(delta, f"step {step}", worst.within and within)
        elif not within:
            worst = Furthest(worst.delta, worst.where, False)
    found = {"parameter": Furthest(), "state": Furthest()}
    with (
        safe_open(run.folder / TENSORS, framework="pt") as here,
        safe_open(reference.folder / TENSORS, framework="pt") as there,
    ):
        names = set(here.keys()), set(there.keys())
        unlike = sorted(names[0] ^ names[1])
        for name in sorted(names[0] & names[1]):
            kind, _, rest = name.partition(" ")
            left, right = here.get_tensor(name), there.get_tensor(name)
            if left.shape != right.shape:
                unlike.append(name)
                continue
            found[kind] = _further(found[kind], left, right, rest, tolerance)
    return Difference(
        parameters=found["parameter"],
        state=found["state"],
        loss=worst,
        steps=(run.steps, reference.steps),
        first_loss=first_loss,
        first_data=_first_unlike(run.data(), reference.data()),
        first_learning_rate=_first_unlike(run.learning_rates(), reference.learning_rates()),
        start=next((name for name, bits in reference.first.start.items() if run.first.start.get(name) != bits), None),
        unlike=unlike[0] if unlike else None,
    )


def _further(worst: Furthest, left: Tensor, right: Tensor, where: str, tolerance: float) -> Furthest:
    if not left.numel():
        return worst
    left, right = left.double(), right.double()
    same = (left == right) | (left.isnan() & right.isnan())
    delta = torch.where(same, 0.0, (left - right).abs().nan_to_num(nan=math.inf, posinf=math.inf)).max().item()
    largest = right.abs().nan_to_num(nan=0.0, posinf=0.0).max().item()
    within = worst.within and delta <= tolerance * max(1.0, largest)
    return Furthest(delta, where, within) if delta > worst.delta else Furthest(worst.delta, worst.where, within)


def _distance(left: float, right: float) -> float:
    if left == right or (math.isnan(left) and math.isnan(right)):
        return 0.0
    delta = abs(left - right)
    return math.inf if math.isnan(delta) else delta


def _first_unlike(left: Sequence[Any], right: Sequence[Any]) -> int | None:
    return next((step for step, (a, b) in enumerate(zip(left, right, strict=False), 1) if a != b), None)
