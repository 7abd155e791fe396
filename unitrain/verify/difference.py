"""Compare the recorded numbers of two runs.

The permitted difference depends on the magnitude of the values, on their total change during training, and on the
precision of their dtype. The magnitude alone would not detect a wrong gradient at a small learning rate: 20 steps of
1e-8 change every parameter by less than the default tolerance, regardless of the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from unitrain.verify.record import TENSORS_FILE, Record

# Maximum difference relative to the change of a parameter during training, to the largest value of an optimizer state,
# or to the largest loss. The key states whether the run used float64. Rounding errors are usually smaller; otherwise,
# `unitrain verify` repeats the run in float64.
RELATIVE_TOLERANCE = {False: 1e-3, True: 1e-7}
# A gradient that is zero in exact arithmetic (a bias before BatchNorm) is rounding noise in practice, and Adam
# amplifies it. Differences are permitted up to this fraction of the largest change of a tensor of the same kind.
_NOISE_FRACTION = 1e-6
# If the permitted difference of a tensor exceeds this fraction of its change during training, the comparison cannot
# detect a wrong gradient.
_CONCLUSIVE_FRACTION = 0.05
# Permitted rounding error per step, in units of the machine epsilon times the largest value of a tensor. It covers the
# rounding errors of the gradient, the update and the parameter in both runs, which rarely all have the same sign.
_ROUNDINGS_PER_STEP = 4


@dataclass(frozen=True)
class LargestDifference:
    """The largest absolute difference between two sets of values.

    `where` is the tensor name or the step. `is_within_tolerance` is True if all differences are within the tolerance.
    `is_conclusive` is False if rounding errors could hide a wrong gradient in one of the tensors.
    """

    delta: float = 0.0
    where: str = ""
    is_within_tolerance: bool = True
    is_conclusive: bool = True


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The differences between a run and its reference.

    `steps` are the numbers of steps of the run and of the reference. The `first_..._step` fields are the first step
    (from 1) whose losses differ by more than permitted, or whose samples or learning rates differ.
    `first_different_initial_parameter` is the first parameter with different initial values, and `mismatched` the first
    tensor that is missing in one run or has different shapes. Each of these is None if there is no such difference.
    """

    parameters: LargestDifference
    state: LargestDifference
    loss: LargestDifference
    steps: tuple[int, int]
    first_loss_step: int | None
    first_data_step: int | None
    first_learning_rate_step: int | None
    first_different_initial_parameter: str | None
    mismatched: str | None

    @property
    def is_within_tolerance(self) -> bool:
        """Whether both runs used the same data and agree numerically within the tolerance."""
        return (
            all(part.is_within_tolerance for part in (self.parameters, self.state, self.loss))
            and self.mismatched is None
            and self.first_data_step is None
            and self.steps[0] == self.steps[1]
        )

    @property
    def is_conclusive(self) -> bool:
        """Whether the precision of the runs is sufficient to distinguish a wrong gradient from rounding errors."""
        return self.parameters.is_conclusive and self.state.is_conclusive


def compare(run: Record, reference: Record, tolerance: float, *, float64: bool) -> Difference:
    """Compare `run` with `reference`. `float64` is true if both trained in double precision.

    Let m be the largest absolute value of the reference tensor, d the largest absolute change of an element during
    training (m for optimizer state), D the largest d over all parameters or over all optimizer state with the same key,
    and eps the machine epsilon of the dtype. The permitted difference is the smaller of `tolerance` * max(1, m) and
    RELATIVE_TOLERANCE * d + 1e-6 * D + 4 * eps * steps * m. For losses, it is the smaller of
    `tolerance` * max(1, |loss of the reference|) and RELATIVE_TOLERANCE times the largest absolute loss of the
    reference.
    """
    relative = RELATIVE_TOLERANCE[float64]
    loss, first_loss_step = _compare_losses(run.losses(), reference.losses(), tolerance, relative)
    largest_differences = {"parameter": LargestDifference(), "state": LargestDifference()}
    with (
        safe_open(run.folder / TENSORS_FILE, framework="pt") as run_tensors,
        safe_open(reference.folder / TENSORS_FILE, framework="pt") as reference_tensors,
    ):
        run_names, reference_names = set(run_tensors.keys()), set(reference_tensors.keys())
        mismatched = sorted(run_names ^ reference_names)
        changes = _changes_in_training(reference_tensors, reference)
        largest: dict[str, float] = {}
        for name, change in changes.items():
            largest[_tensor_kind(name)] = max(largest.get(_tensor_kind(name), 0.0), change)
        for name in sorted(run_names & reference_names):
            category, _, tensor_name = name.partition(" ")
            run_tensor, reference_tensor = run_tensors.get_tensor(name), reference_tensors.get_tensor(name)
            if run_tensor.shape != reference_tensor.shape:
                mismatched.append(name)
                continue
            scales = _Scales(tolerance, relative, reference.steps, changes[name], largest[_tensor_kind(name)])
            largest_differences[category] = _update_largest(
                largest_differences[category], run_tensor, reference_tensor, tensor_name, scales
            )
    return Difference(
        parameters=largest_differences["parameter"],
        state=largest_differences["state"],
        loss=loss,
        steps=(run.steps, reference.steps),
        first_loss_step=first_loss_step,
        first_data_step=_first_different_step(run.sample_digests(), reference.sample_digests()),
        first_learning_rate_step=_first_different_step(run.learning_rates(), reference.learning_rates()),
        first_different_initial_parameter=next(
            (name for name, digest in reference.first.start.items() if run.first.start.get(name) != digest), None
        ),
        mismatched=mismatched[0] if mismatched else None,
    )


def reason_not_comparable(record: Record) -> str | None:
    """Return the reason why a comparison with this run is not meaningful (a non-finite value, or no parameter changed),
    or None.
    """
    for step, loss in enumerate(record.losses(), 1):
        if not math.isfinite(loss):
            return f"the loss of step {step} is {loss}, so the run cannot be compared"
    with safe_open(record.folder / TENSORS_FILE, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            if not tensors.get_tensor(name).isfinite().all():
                return f"{name} is not finite after {record.steps} steps, so the run cannot be compared"
    if not any(record.first.max_change.values()):
        return (
            f"no parameter changed in {record.steps} steps, so a comparison would prove nothing. Train more steps "
            "(--steps), or check the learning rate and the parameters that the optimizer holds"
        )
    return None


@dataclass(frozen=True)
class _Scales:
    """The values that determine the permitted difference of one tensor (see `compare`).

    `change` is the change of the tensor during training, and `largest_change` is the largest change of a tensor of the
    same kind.
    """

    tolerance: float
    relative: float
    steps: int
    change: float
    largest_change: float


def _compare_losses(
    losses: Sequence[float], expected: Sequence[float], tolerance: float, relative: float
) -> tuple[LargestDifference, int | None]:
    """Return the largest difference of the losses, and the first step whose losses differ by more than permitted."""
    largest, first_step = LargestDifference(), None
    largest_loss = max((abs(loss) for loss in expected), default=0.0)
    for step, (loss, expected_loss) in enumerate(zip(losses, expected, strict=False), 1):
        delta = _distance(loss, expected_loss)
        is_within_tolerance = delta == 0 or delta <= min(
            tolerance * max(1.0, abs(expected_loss)), relative * largest_loss
        )
        if not is_within_tolerance and first_step is None:
            first_step = step
        if delta > largest.delta:
            largest = LargestDifference(delta, f"step {step}", largest.is_within_tolerance and is_within_tolerance)
        elif not is_within_tolerance:
            largest = LargestDifference(largest.delta, largest.where, False)
    return largest, first_step


def _tensor_kind(name: str) -> str:
    """Return "parameter", or the key of optimizer state such as "exp_avg"."""
    category, _, tensor_name = name.partition(" ")
    return category if category == "parameter" else tensor_name.rpartition(" ")[2]


def _changes_in_training(tensors: Any, record: Record) -> dict[str, float]:
    """Return the change of each tensor during training. Optimizer state starts from zero."""
    return {
        name: record.first.max_change[name.partition(" ")[2]]
        if _tensor_kind(name) == "parameter"
        else _largest_value(tensors.get_tensor(name).double())
        for name in tensors.keys()  # noqa: SIM118
    }


def _largest_value(tensor: Tensor) -> float:
    return tensor.abs().nan_to_num(nan=0.0, posinf=0.0).max().item() if tensor.numel() else 0.0


def _update_largest(
    largest: LargestDifference, left: Tensor, right: Tensor, name: str, scales: _Scales
) -> LargestDifference:
    """Return `largest` updated with the difference between the tensors `left` and `right` named `name`."""
    if not left.numel():
        return largest
    eps = torch.finfo(right.dtype).eps if right.is_floating_point() else 0.0
    left, right = left.double(), right.double()
    same = (left == right) | (left.isnan() & right.isnan())
    delta = torch.where(same, 0.0, (left - right).abs().nan_to_num(nan=math.inf, posinf=math.inf)).max().item()
    largest_value = _largest_value(right)
    permitted = min(
        scales.tolerance * max(1.0, largest_value),
        scales.relative * scales.change
        + _NOISE_FRACTION * scales.largest_change
        + _ROUNDINGS_PER_STEP * eps * scales.steps * largest_value,
    )
    has_gradient = scales.change > _NOISE_FRACTION / _CONCLUSIVE_FRACTION * scales.largest_change
    is_hidden = delta != 0 and has_gradient and permitted > _CONCLUSIVE_FRACTION * scales.change
    return LargestDifference(
        max(delta, largest.delta),
        name if delta > largest.delta else largest.where,
        largest.is_within_tolerance and delta <= permitted,
        largest.is_conclusive and not is_hidden,
    )


def _distance(left: float, right: float) -> float:
    if left == right or (math.isnan(left) and math.isnan(right)):
        return 0.0
    delta = abs(left - right)
    return math.inf if math.isnan(delta) else delta


def _first_different_step(left: Sequence[Any], right: Sequence[Any]) -> int | None:
    return next((step for step, (a, b) in enumerate(zip(left, right, strict=False), 1) if a != b), None)
