"""Decide whether runs have the same numerical results, and report known causes of differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from unitrain.verify.difference import Difference, compare, reason_not_comparable
from unitrain.verify.record import Record

_UNKNOWN_CAUSE = "the cause is unknown: initial values, samples and learning rates are the same in both runs"
_HIDDEN_BY_ROUNDING = "training moves a parameter so little that rounding could hide a wrong gradient"

Status = Literal["reference", "same results", "differs", "by design", "failed"]


@dataclass(frozen=True, kw_only=True)
class RequestedRun:
    """A requested run: `processes` ranks with the global batch size of `emulated_ranks` ranks.

    `controller` is the controller of horovodrun, and `transport` is passed to `unitrain.init`. None selects the
    default.
    """

    backend: str
    emulated_ranks: int
    processes: int
    controller: str | None = None
    transport: str | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a run: its record, or the reason for its `failure` and the last lines of its output."""

    run: RequestedRun
    seconds: float
    record: Record | None = None
    failure: str | None = None
    last_lines: Sequence[str] = ()

    @property
    def name(self) -> str:
        """Backend and transport, such as "ddp over gloo"."""
        return f"{self.run.backend} over {self.transport}" if self.transport not in ("", "none") else self.run.backend

    @property
    def transport(self) -> str:
        """The transport used by the run, or else the requested transport or controller; empty if there is none.

        A controller with a different name follows in parentheses.
        """
        used = self.record.first.transport if self.record else self.run.transport or self.run.controller or ""
        controller = self.run.controller
        return f"{used} ({controller})" if controller not in (None, used) else used


@dataclass(frozen=True, kw_only=True)
class VerdictRow:
    """An outcome and its comparison with the reference.

    `reasons` explains a difference, or why no comparison was possible. `needs_float64` is True if only a run in double
    precision can distinguish the difference from rounding errors.
    """

    outcome: Outcome
    status: Status
    difference: Difference | None = None
    reasons: Sequence[str] = ()
    needs_float64: bool = False

    @property
    def name(self) -> str:
        """Backend, transport and number of processes, such as "ddp over gloo, 2 ranks"."""
        count = self.outcome.run.processes
        return f"{self.outcome.name}, {'1 process' if count == 1 else f'{count} ranks'}"


@dataclass(frozen=True, kw_only=True)
class Group:
    """The runs with the global batch size of `ranks` ranks."""

    ranks: int
    rows: Sequence[VerdictRow]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """All groups, and (name, reason) per backend or controller that is not available on this machine."""

    groups: Sequence[Group]
    skipped: Sequence[tuple[str, str]] = field(default=())

    @property
    def is_same(self) -> bool:
        """Whether at least one run has the same results as its reference, and no run failed or differs, except by
        design."""
        statuses = [row.status for group in self.groups for row in group.rows]
        return "same results" in statuses and "differs" not in statuses and "failed" not in statuses


def compare_outcomes(ranks: int, outcomes: Sequence[Outcome], tolerance: float, *, float64: bool) -> Group:
    """Compare the runs that have the global batch size of `ranks` ranks with the best reference among them.

    The reference is the first run from which no other run differs by design (see `expected_difference`) by more than
    the tolerance. Runs of a single process are tried first. If there is no such run, the reference is a run with the
    largest number of processes. Runs whose ranks have different parameters are candidates only if there are no other
    runs.
    """
    outcomes = [_fail_if_not_comparable(outcome) for outcome in outcomes]
    candidates = [(outcome, outcome.record) for outcome in outcomes if outcome.record is not None]
    candidates = [pair for pair in candidates if pair[1].first_replica_mismatch() is None] or candidates
    candidates.sort(key=lambda pair: pair[0].run.processes != 1)  # one process first
    reference = next(
        (
            pair
            for pair in candidates
            if all(_can_be_same(record, pair[1], tolerance, float64=float64) for _, record in candidates)
        ),
        None,
    )
    if reference is None and candidates:
        reference = max(candidates, key=lambda pair: pair[0].run.processes)
    rows = [_create_row(outcome, reference, tolerance, float64=float64) for outcome in outcomes]
    return Group(ranks=ranks, rows=rows)


def resolve_with_float64(group: Group, repeated: Group) -> Group:
    """Return `group` with new statuses for its rows with `needs_float64`. `repeated` contains the same runs in double
    precision."""
    repeated_rows = {row.outcome.run: row for row in repeated.rows}
    return replace(group, rows=[_resolve_row(row, repeated_rows.get(row.outcome.run)) for row in group.rows])


def _resolve_row(row: VerdictRow, repeated: VerdictRow | None) -> VerdictRow:
    if not row.needs_float64 or repeated is None:
        return row
    if repeated.difference is None:
        reason = "; ".join(repeated.reasons) or "it has no record"
        return replace(row, status="differs", reasons=[*row.reasons, f"the run in float64 failed: {reason}"])
    delta = f"{repeated.difference.parameters.delta:.1e}"
    if repeated.status == "same results":
        return replace(
            row,
            status="same results",
            reasons=[f"the difference is rounding: in float64 the parameters differ by {delta}"],
        )
    return replace(
        row,
        status="differs",
        reasons=[*row.reasons, f"the difference is not rounding: in float64 the parameters differ by {delta}"],
    )


def _fail_if_not_comparable(outcome: Outcome) -> Outcome:
    if outcome.record is None or (reason := reason_not_comparable(outcome.record)) is None:
        return outcome
    return replace(outcome, record=None, failure=reason)


def _can_be_same(record: Record, reference: Record, tolerance: float, *, float64: bool) -> bool:
    return (
        expected_difference(record, reference) is None
        or compare(record, reference, tolerance, float64=float64).is_within_tolerance
    )


def expected_difference(record: Record, reference: Record) -> str | None:
    """Return the reason why two runs on different numbers of ranks differ by design, or None if their results must be
    the same.

    The causes are settings that apply per rank or depend on the number of ranks. Runs on the same number of ranks must
    have the same results.
    """
    if record.first.size == reference.first.size:
        return None
    ranks = f"{record.first.size} ranks here" if record.first.size > 1 else "1 rank here"
    if record.global_batch_sizes()[:1] != reference.global_batch_sizes()[:1]:
        batches = (record.global_batch_sizes() or [0])[0], (reference.global_batch_sizes() or [0])[0]
        return f"its global batch is {batches[0]} samples, the reference's is {batches[1]}"
    if random := sorted({*record.first.used_rngs, *reference.first.used_rngs}):
        return (
            f"training draws random numbers ({', '.join(random)}), for example for dropout, and each rank draws "
            f"different ones ({ranks})"
        )
    if reference.first.batch_statistics != "none" and record.batch_norm_groups() != reference.batch_norm_groups():
        return "BatchNorm normalizes over groups of a different size"
    if (rounding := reference.first.compression_dtype) != "none":
        return f"each rank rounds its gradients to {rounding} before they are reduced ({ranks})"
    sizes = f"{record.first.size} here, {reference.first.size} in the reference"
    for step, (own, reference_rates) in enumerate(
        zip(record.learning_rates(), reference.learning_rates(), strict=False), 1
    ):
        if own != reference_rates:
            rates = [", ".join(f"{rate:.6g}" for rate in rates_of_run) for rates_of_run in (own, reference_rates)]
            return (
                f"the script derives its learning rate from the number of ranks ({sizes}): it is {rates[0]} instead of "
                f"{rates[1]} in step {step}"
            )
    if record.steps != reference.steps:
        return (
            f"the script derives the length of the run from the number of ranks ({sizes}): {record.steps} steps "
            f"instead of {reference.steps}"
        )
    return None


def _create_row(
    outcome: Outcome, reference: tuple[Outcome, Record] | None, tolerance: float, *, float64: bool
) -> VerdictRow:
    if outcome.record is None or reference is None:
        return VerdictRow(outcome=outcome, status="failed", reasons=[outcome.failure or ""])
    difference = None
    if outcome is not reference[0]:
        difference = compare(outcome.record, reference[1], tolerance, float64=float64)
    if (mismatch := outcome.record.first_replica_mismatch()) is not None:
        rank, parameter = mismatch
        reasons = [] if difference is None else list(_known_causes(difference, outcome.record, reference[1]))
        reasons.append(f"after the last step, {parameter} on rank {rank} differs from rank 0")
        return VerdictRow(outcome=outcome, status="differs", difference=difference, reasons=reasons)
    if difference is None:
        return VerdictRow(outcome=outcome, status="reference")
    if difference.is_within_tolerance and difference.is_conclusive:
        return VerdictRow(outcome=outcome, status="same results", difference=difference)
    if (reason := expected_difference(outcome.record, reference[1])) is not None:
        return VerdictRow(outcome=outcome, status="by design", difference=difference, reasons=[reason])
    if causes := list(_known_causes(difference, outcome.record, reference[1])):
        return VerdictRow(outcome=outcome, status="differs", difference=difference, reasons=causes)
    reason = _HIDDEN_BY_ROUNDING if difference.is_within_tolerance else _UNKNOWN_CAUSE
    return VerdictRow(
        outcome=outcome, status="differs", difference=difference, reasons=[reason], needs_float64=not float64
    )


def _known_causes(difference: Difference, run: Record, reference: Record) -> Iterator[str]:
    """Yield the known causes of a difference, root causes first."""
    if difference.mismatched is not None:
        yield f"{difference.mismatched} exists in only one of the runs, or has different shapes in them"
    elif difference.first_different_initial_parameter is not None:
        yield (
            f"{difference.first_different_initial_parameter} has different initial values. Call torch.manual_seed(0) "
            "before the model is built, and build it in the same way on every backend"
        )
    if difference.first_data_step is not None:
        sizes = [record.global_batch_sizes()[difference.first_data_step - 1] for record in (run, reference)]
        counts = f" ({sizes[0]} instead of {sizes[1]})" if sizes[0] != sizes[1] else ""
        yield (
            f"step {difference.first_data_step} has different samples{counts}. Seed everything that shuffles, splits "
            "or augments the data, with the same seed on every rank"
        )
    if (step := difference.first_learning_rate_step) is not None:
        rates = [", ".join(f"{rate:.6g}" for rate in record.learning_rates()[step - 1]) for record in (run, reference)]
        yield f"the learning rate of step {step} is {rates[0]} instead of {rates[1]}"
    if difference.steps[0] != difference.steps[1]:
        yield f"the run ended after {difference.steps[0]} steps, the reference after {difference.steps[1]}"
