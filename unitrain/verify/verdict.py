"""From what the runs recorded to whether they are the same, and what is known of why they are not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from unitrain.verify.difference import Difference, difference
from unitrain.verify.record import Record

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
    """An outcome beside its reference. `reasons` say what is known of why it is not the same, or was not compared."""

    outcome: Outcome
    status: Status
    difference: Difference | None = None
    reasons: Sequence[str] = ()


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

    That is the one process with the whole batch, unless something that is by design each rank's own keeps it apart from
    the others; then it is the first of those.
    """
    sound = [(one, one.record) for one in outcomes if one.record is not None]
    sound = [pair for pair in sound if pair[1].unlike_rank_zero() is None] or sound
    # One process first: what it is for.
    sound.sort(key=lambda pair: pair[0].run.processes != 1)
    reference = next(
        (pair for pair in sound if all(_comparable(record, pair[1], tolerance) for _, record in sound)), None
    )
    if reference is None and sound:
        reference = max(sound, key=lambda pair: pair[0].run.processes)
    rows = [_row(one, reference, tolerance, float64=float64) for one in outcomes]
    return Group(ranks=ranks, rows=rows)


def _comparable(record: Record, reference: Record, tolerance: float) -> bool:
    return by_design(record, reference) is None or difference(record, reference, tolerance).none


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
    return None


def _row(one: Outcome, reference: tuple[Outcome, Record] | None, tolerance: float, *, float64: bool) -> Row:
    if one.record is None or reference is None:
        return Row(outcome=one, status="failed", reasons=[one.problem or ""])
    replica = one.record.unlike_rank_zero()
    apart = [] if replica is None else [f"at the end {replica[1]} on rank {replica[0]} is not that of rank 0"]
    found = None if one is reference[0] else difference(one.record, reference[1], tolerance)
    if apart:
        more = [] if found is None else _reasons(found, one.record, reference[1])
        return Row(outcome=one, status="differs", difference=found, reasons=[*more, *apart])
    if found is None:
        return Row(outcome=one, status="reference")
    if found.none:
        return Row(outcome=one, status="same numbers", difference=found)
    if (why := by_design(one.record, reference[1])) is not None:
        return Row(outcome=one, status="by design", difference=found, reasons=[why])
    reasons = list(_reasons(found, one.record, reference[1])) or [_unknown(one.record, float64=float64)]
    return Row(outcome=one, status="differs", difference=found, reasons=reasons)


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


def _unknown(record: Record, *, float64: bool) -> str:
    text = "the reason is not known: it starts from the same values and has the same samples and learning rates"
    if float64:
        return text
    name = record.first.optimizer
    whose = f", which {name} can enlarge" if "adam" in name.lower() else ""
    return f"{text}. Whether it is rounding{whose}, --float64 tells"
