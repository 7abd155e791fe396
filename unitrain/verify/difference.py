"""Compare the recorded numbers of two runs.

A difference is permitted if it is small against the size of the values, the distance that training has moved them, and
the rounding of their dtype. The size alone would accept a wrong gradient wherever the learning rate is small: 20 steps
of 1e-8 change no parameter by more than the default tolerance, whatever its gradient is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from unitrain.verify.record import TENSORS, Record

# Largest difference relative to the distance that a parameter has moved, or to the largest value of optimizer state.
# Rounding alone stays below it in most runs; `unitrain verify` repeats a run in float64 where it does not.
RELATIVE = {False: 1e-3, True: 1e-7}
# A true gradient of zero, as of a bias in front of BatchNorm, is rounding in practice, and Adam enlarges it. So a
# difference is permitted up to this part of the distance that the furthest tensor has moved.
_NOISE = 1e-6
# A tensor whose permitted difference exceeds this part of the distance it moved does not show a wrong gradient.
_RESOLVED = 0.05
_ROUNDINGS_PER_STEP = 4  # of the update, the gradient and the parameter, in each of two runs


@dataclass(frozen=True)
class Furthest:
    """The largest |difference| of some values, its place, and whether all differences are within the tolerance.

    `resolved` is False if rounding hides a wrong gradient in one of the tensors.
    """

    delta: float = 0.0
    where: str = ""
    within: bool = True
    resolved: bool = True


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A run against its reference. Steps count from 1; None if there is no such step.

    `unlike` names a parameter or state that only one of the runs has, or has in another shape.
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

    @property
    def resolved(self) -> bool:
        """Whether the precision of the runs suffices to tell a wrong gradient from rounding."""
        return self.parameters.resolved and self.state.resolved


def difference(run: Record, reference: Record, tolerance: float, *, float64: bool) -> Difference:
    """Compare `run` with `reference`; both trained in double precision if `float64`.

    Let m be the largest |value| of the reference's tensor, d the distance it moved (m for optimizer state), D the
    largest d of all parameters (of the same kind of state), and eps the resolution of the dtype. A difference is
    permitted up to the smaller of `tolerance` * max(1, m) and RELATIVE * d + 1e-6 * D + 4 * eps * steps * m.
    A loss is compared with the largest loss of the run in place of d.
    """
    losses, expected = run.losses(), reference.losses()
    worst, first_loss = Furthest(), None
    relative = RELATIVE[float64]
    largest_loss = max((abs(loss) for loss in expected), default=0.0)
    for step, (loss, other) in enumerate(zip(losses, expected, strict=False), 1):
        delta = _distance(loss, other)
        within = delta == 0 or delta <= min(tolerance * max(1.0, abs(other)), relative * largest_loss)
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
        distances = _distances(there, reference)
        furthest: dict[str, float] = {}
        for name, distance in distances.items():
            furthest[_kind(name)] = max(furthest.get(_kind(name), 0.0), distance)
        for name in sorted(names[0] & names[1]):
            kind, _, rest = name.partition(" ")
            left, right = here.get_tensor(name), there.get_tensor(name)
            if left.shape != right.shape:
                unlike.append(name)
                continue
            scales = _Scales(tolerance, relative, reference.steps, distances[name], furthest[_kind(name)])
            found[kind] = _further(found[kind], left, right, rest, scales)
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


def not_comparable(record: Record) -> str | None:
    """Return why the numbers of a run prove nothing: a value is not finite, or training moved no parameter."""
    for step, loss in enumerate(record.losses(), 1):
        if not math.isfinite(loss):
            return f"the loss of step {step} is {loss}, and nothing can be compared with that"
    with safe_open(record.folder / TENSORS, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            if not tensors.get_tensor(name).isfinite().all():
                return f"{name} is not finite after {record.steps} steps, and nothing can be compared with that"
    if not any(record.first.moved.values()):
        return (
            f"no parameter has changed after {record.steps} steps, so nothing is compared. Train more steps (--steps), "
            "or check the learning rate and which parameters the optimizer has"
        )
    return None


@dataclass(frozen=True)
class _Scales:
    """The scales by which the difference of one tensor is measured. `distance` is that of the tensor, `furthest` the
    largest of its kind."""

    tolerance: float
    relative: float
    steps: int
    distance: float
    furthest: float


def _kind(name: str) -> str:
    """Return "parameter", or the key of optimizer state such as "exp_avg"."""
    kind, _, rest = name.partition(" ")
    return kind if kind == "parameter" else rest.rpartition(" ")[2]


def _distances(tensors: Any, record: Record) -> dict[str, float]:
    """Return the distance that each tensor has moved: optimizer state starts from zero."""
    return {
        name: record.first.moved[name.partition(" ")[2]]
        if _kind(name) == "parameter"
        else _largest(tensors.get_tensor(name).double())
        for name in tensors.keys()  # noqa: SIM118
    }


def _largest(tensor: Tensor) -> float:
    return tensor.abs().nan_to_num(nan=0.0, posinf=0.0).max().item() if tensor.numel() else 0.0


def _further(worst: Furthest, left: Tensor, right: Tensor, where: str, scales: _Scales) -> Furthest:
    if not left.numel():
        return worst
    eps = torch.finfo(right.dtype).eps if right.is_floating_point() else 0.0
    left, right = left.double(), right.double()
    same = (left == right) | (left.isnan() & right.isnan())
    delta = torch.where(same, 0.0, (left - right).abs().nan_to_num(nan=math.inf, posinf=math.inf)).max().item()
    largest = _largest(right)
    permitted = min(
        scales.tolerance * max(1.0, largest),
        scales.relative * scales.distance
        + _NOISE * scales.furthest
        + _ROUNDINGS_PER_STEP * eps * scales.steps * largest,
    )
    has_gradient = scales.distance > _NOISE / _RESOLVED * scales.furthest
    hidden = delta != 0 and has_gradient and permitted > _RESOLVED * scales.distance
    return Furthest(
        max(delta, worst.delta),
        where if delta > worst.delta else worst.where,
        worst.within and delta <= permitted,
        worst.resolved and not hidden,
    )


def _distance(left: float, right: float) -> float:
    if left == right or (math.isnan(left) and math.isnan(right)):
        return 0.0
    delta = abs(left - right)
    return math.inf if math.isnan(delta) else delta


def _first_unlike(left: Sequence[Any], right: Sequence[Any]) -> int | None:
    return next((step for step, (a, b) in enumerate(zip(left, right, strict=False), 1) if a != b), None)
