"""From what the runs recorded to whether they are the same, and what is known of why they are not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from unitrain.verify.difference import Difference, difference, not_comparable
from unitrain.verify.record import Record

_UNKNOWN = "the reason is not known: both runs have the same initial values, samples and learning rates"
_HIDDEN = "training moves a parameter so little that rounding hides a wrong gradient"

Status = Literal["reference", "same numbers", "differs", "by design", "failed"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run to be made: `processes` of them, with the global batch of `as_ranks`; `controller` is horovodrun's, and
    `transport` what unitrain.init is asked for, both None where nothing is said."""

    backend: str
    as_ranks: int
    processes: int
    controller: str | None = None
    transport: str | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a run: its record, or the `problem` with the last `words` it printed."""

    run: Run
    seconds: float
    record: Record | None = None
    problem: str | None = None
    words: Sequence[str] = ()

    @property
    def name(self) -> str:
        """Backend and transport, as it turned out where it is known."""
        return f"{self.run.backend} over {self.transport}" if self.transport not in ("", "none") else self.run.backend

    @property
    def transport(self) -> str:
        """What moved the data; with the controller, where that is something else."""
        moved = self.record.first.transport if self.record else self.run.transport or self.run.controller or ""
        controller = self.run.controller
        return f"{moved} ({controller})" if controller not in (None, moved) else moved


@dataclass(frozen=True, kw_only=True)
class Row:
    """An outcome and its comparison with the reference. `reasons` explain a difference, or why nothing was compared.

    `needs_float64` is True if only double precision can tell whether the difference is more than rounding.
    """

    outcome: Outcome
    status: Status
    difference: Difference | None = None
    reasons: Sequence[str] = ()
    needs_float64: bool = False

    @property
    def name(self) -> str:
        """Backend, transport and number of processes, as "ddp over gloo, 2 ranks"."""
        count = self.outcome.run.processes
        return f"{self.outcome.name}, {'1 process' if count == 1 else f'{count} ranks'}"


@dataclass(frozen=True, kw_only=True)
class Group:
    """The runs with the global batch of so many ranks."""

    ranks: int
    rows: Sequence[Row]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """All groups, and what could not run here: (what, why)."""

    groups: Sequence[Group]
    skipped: Sequence[tuple[str, str]] = field(default=())

    @property
    def same(self) -> bool:
        """Whether something was compared, and nothing failed or differs."""
        found = [row.status for group in self.groups for row in group.rows]
        return "same numbers" in found and "differs" not in found and "failed" not in found


def judge(ranks: int, outcomes: Sequence[Outcome], tolerance: float, *, float64: bool) -> Group:
    """Compare the runs that have the global batch of so many `ranks` with the one that is the best reference.

    That is the one process with the whole batch, unless something that is by design each rank's own, or derived from
    the number of ranks, keeps it apart from the others; then it is the first of those.
    """
    outcomes = [_checked(one) for one in outcomes]
    sound = [(one, one.record) for one in outcomes if one.record is not None]
    sound = [pair for pair in sound if pair[1].unlike_rank_zero() is None] or sound
    # One process first: what it is for.
    sound.sort(key=lambda pair: pair[0].run.processes != 1)
    reference = next(
        (pair for pair in sound if all(_comparable(one, pair[1], tolerance, float64=float64) for _, one in sound)),
        None,
    )
    if reference is None and sound:
        reference = max(sound, key=lambda pair: pair[0].run.processes)
    rows = [_row(one, reference, tolerance, float64=float64) for one in outcomes]
    return Group(ranks=ranks, rows=rows)


def confirm(group: Group, again: Group) -> Group:
    """Return `group` with the verdict of `again`, the same runs in double precision, where single precision cannot
    tell whether a difference is rounding."""
    found = {row.outcome.run: row for row in again.rows}
    return replace(group, rows=[_confirmed(row, found.get(row.outcome.run)) for row in group.rows])


def _confirmed(row: Row, again: Row | None) -> Row:
    if not row.needs_float64 or again is None:
        return row
    if again.difference is None:
        reason = "; ".join(again.reasons) or "it has no record"
        return replace(row, status="differs", reasons=[*row.reasons, f"the run in float64 failed: {reason}"])
    delta = f"{again.difference.parameters.delta:.1e}"
    if again.status == "same numbers":
        return replace(
            row,
            status="same numbers",
            reasons=[f"the difference is rounding: in float64 the parameters differ by {delta}"],
        )
    return replace(
        row,
        status="differs",
        reasons=[*row.reasons, f"it is not rounding: in float64 the parameters differ by {delta}"],
    )


def _checked(outcome: Outcome) -> Outcome:
    """Return the outcome as failed if its numbers prove nothing."""
    if outcome.record is None or (why := not_comparable(outcome.record)) is None:
        return outcome
    return replace(outcome, record=None, problem=why)


def _comparable(record: Record, reference: Record, tolerance: float, *, float64: bool) -> bool:
    return by_design(record, reference) is None or difference(record, reference, tolerance, float64=float64).none


def by_design(record: Record, reference: Record) -> str | None:
    """Return why two runs must not be the same when one has more ranks, or None when they must be."""
    if record.first.size == reference.first.size:
        return None
    ranks = f"{record.first.size} of them" if record.first.size > 1 else "one"
    if record.global_batch()[:1] != reference.global_batch()[:1]:
        batches = (record.global_batch() or [0])[0], (reference.global_batch() or [0])[0]
        return f"its global batch is {batches[0]} samples, that of the others {batches[1]}"
    if random := sorted({*record.first.random, *reference.first.random}):
        names = ", ".join(random)
        return (
            f"random numbers are drawn while it trains ({names}), as for dropout: each rank has its own, here {ranks}"
        )
    if reference.first.batch_statistics != "none" and record.normalised() != reference.normalised():
        return "BatchNorm computes over other samples at a time"
    if (rounding := reference.first.rounding) != "none":
        return f"each rank rounds its gradients to {rounding} before they are added up, here {ranks}"
    sizes = f"{record.first.size} here and {reference.first.size} in the reference"
    for step, (own, other) in enumerate(zip(record.learning_rates(), reference.learning_rates(), strict=False), 1):
        if own != other:
            rates = [", ".join(f"{rate:.6g}" for rate in one) for one in (own, other)]
            return (
                f"the script derives its learning rate from the number of ranks ({sizes}): in step {step} it is "
                f"{rates[0]} instead of {rates[1]}"
            )
    if record.steps != reference.steps:
        return (
            f"the script derives the length of the run from the number of ranks ({sizes}): it has {record.steps} steps "
            f"instead of {reference.steps}"
        )
    return None


def _row(one: Outcome, reference: tuple[Outcome, Record] | None, tolerance: float, *, float64: bool) -> Row:
    if one.record is None or reference is None:
        return Row(outcome=one, status="failed", reasons=[one.problem or ""])
    replica = one.record.unlike_rank_zero()
    apart = [] if replica is None else [f"at the end {replica[1]} on rank {replica[0]} is not that of rank 0"]
    found = None if one is reference[0] else difference(one.record, reference[1], tolerance, float64=float64)
    if apart:
        more = [] if found is None else _reasons(found, one.record, reference[1])
        return Row(outcome=one, status="differs", difference=found, reasons=[*more, *apart])
    if found is None:
        return Row(outcome=one, status="reference")
    if found.none and found.resolved:
        return Row(outcome=one, status="same numbers", difference=found)
    if (why := by_design(one.record, reference[1])) is not None:
        return Row(outcome=one, status="by design", difference=found, reasons=[why])
    if reasons := list(_reasons(found, one.record, reference[1])):
        return Row(outcome=one, status="differs", difference=found, reasons=reasons)
    reason = _HIDDEN if found.none else _UNKNOWN
    return Row(outcome=one, status="differs", difference=found, reasons=[reason], needs_float64=not float64)


def _reasons(found: Difference, here: Record, there: Record) -> Iterator[str]:
    """Yield what is known to be different beside the numbers that come of it, causes before what they may cause."""
    if found.unlike is not None:
        yield f"{found.unlike} is not in both, or not of the same shape"
    elif found.start is not None:
        yield (
            f"{found.start} starts from other values. Seed before the model is built: torch.manual_seed(0), and make "
            "it alike on every backend"
        )
    if found.first_data is not None:
        batches = [run.global_batch()[found.first_data - 1] for run in (here, there)]
        counts = f" ({batches[0]} and {batches[1]} of them)" if batches[0] != batches[1] else ""
        yield (
            f"step {found.first_data} has other samples{counts}. Seed whatever shuffles, splits or changes them, with "
            "the same seed on every rank"
        )
    if (step := found.first_learning_rate) is not None:
        rates = [", ".join(f"{rate:.6g}" for rate in run.learning_rates()[step - 1]) for run in (here, there)]
        yield f"the learning rate of step {step} is {rates[0]} instead of {rates[1]}"
    if found.steps[0] != found.steps[1]:
        yield f"it ended after {found.steps[0]} steps, the reference after {found.steps[1]}"
