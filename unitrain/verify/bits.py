"""`unitrain verify --bits`: compare runs on different numbers of ranks bit by bit."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from unitrain.output import plain_console
from unitrain.verify.record import Record
from unitrain.verify.verdict import Outcome

_WIDTH_WITHOUT_TERMINAL = 200


@dataclass(frozen=True, kw_only=True)
class BitRow:
    """An outcome, and the first difference from the reference or the reason for the failure."""

    outcome: Outcome
    status: Literal["reference", "bit-equal", "differs", "failed"]
    reason: str = ""


def compare_bits(outcomes: Sequence[Outcome]) -> list[BitRow]:
    """Compare all outcomes with the first successful one, the reference, and the ranks of each run with its rank 0."""
    reference: Record | None = None
    rows = []
    for outcome in outcomes:
        if outcome.record is None:
            rows.append(BitRow(outcome=outcome, status="failed", reason=outcome.failure or ""))
            continue
        difference = find_replica_difference(outcome.record)
        if reference is None:
            reference = outcome.record
            rows.append(BitRow(outcome=outcome, status="differs" if difference else "reference", reason=difference))
            continue
        difference = difference or find_first_difference(outcome.record, reference)
        rows.append(BitRow(outcome=outcome, status="differs" if difference else "bit-equal", reason=difference))
    return rows


def is_bit_equal(rows: Sequence[BitRow]) -> bool:
    """Return whether at least two runs were compared, and all runs are bit-equal."""
    statuses = [row.status for row in rows]
    return "bit-equal" in statuses and set(statuses) <= {"reference", "bit-equal"}


def find_first_difference(record: Record, reference: Record) -> str:
    """Return a description of the first difference from `reference`: an initial value, a value of a step, or the number
    of steps. The description is empty if all bits are equal."""
    for name, digest in reference.first.start.items():
        if record.first.start.get(name) != digest:
            return f"the initial values of parameter {name} differ. Call torch.manual_seed(0) before the model is built"
    steps = zip(_values_by_step(record), _values_by_step(reference), strict=False)
    for step, (values, reference_values) in enumerate(steps, 1):
        for name in values:
            if values[name] != reference_values.get(name):
                return f"step {step} is the first with a difference: {name}"
        if missing_names := reference_values.keys() - values.keys():
            return f"step {step} is the first with a difference: {min(missing_names)} is missing"
    if record.steps != reference.steps:
        return f"the run ended after {record.steps} steps, the reference after {reference.steps}"
    return ""


def find_replica_difference(record: Record) -> str:
    """Return a description of the first tensor that differs between rank 0 and another rank; empty if all are equal."""
    for index in range(record.steps):
        first = record.first.steps[index].tensors
        for rank_record in record.rank_records:
            for name, digest in rank_record.steps[index].tensors.items():
                if first.get(name) != digest:
                    return f"after step {index + 1}, {name} on rank {rank_record.rank} differs from rank 0"
    return ""


def show_bits(rows: Sequence[BitRow], title: str, skipped: Sequence[tuple[str, str]]) -> None:
    """Print the status of each run, the first differences, and the verdict."""
    terminal = plain_console(soft_wrap=True)
    console = terminal if terminal.is_terminal else plain_console(width=_WIDTH_WITHOUT_TERMINAL)
    console.print(title)
    for row in rows:
        reason = f": {row.reason}" if row.reason else ""
        console.print(f"  {_name(row.outcome)}: {row.status}{reason}")
        for line in row.outcome.last_lines:
            console.print(f"    | {line}")
    for name, reason in skipped:
        console.print(f"  skipped {name}: {reason}")
    failed = sum(row.status in ("differs", "failed") for row in rows)
    if is_bit_equal(rows):
        verdict = f"Verdict: the same bits in {len(rows)} runs."
    elif failed:
        verdict = f"Verdict: not the same bits. Of {len(rows)} runs, {failed} differ or failed."
    else:
        verdict = "Verdict: nothing was compared. Name several numbers of ranks, as in -np 1,2,3."
    console.print(verdict)


def write_bits(rows: Sequence[BitRow], settings: Mapping[str, Any], path: Path) -> None:
    """Write the settings, all rows and the verdict to `path` as JSON."""
    bits = [
        {
            "backend": row.outcome.run.backend,
            "transport": row.outcome.transport,
            "processes": row.outcome.run.processes,
            "status": row.status,
            "reason": row.reason,
            "seconds": round(row.outcome.seconds, 1),
            "output": list(row.outcome.last_lines),
        }
        for row in rows
    ]
    path.write_text(json.dumps({**settings, "same": is_bit_equal(rows), "rows": bits}, indent=2) + "\n")


def _values_by_step(record: Record) -> list[dict[str, Any]]:
    """Return the values to compare in each step, in the order in which they are computed."""
    steps: list[dict[str, Any]] = []
    for index, samples in enumerate(record.sample_digests()):
        rank_steps = [rank_record.steps[index] for rank_record in record.rank_records]
        steps.append(
            {
                "the samples": samples,
                "the loss": math.fsum(loss for step in rank_steps for loss in step.losses),
                "the learning rate": list(rank_steps[0].learning_rates),
                **rank_steps[0].tensors,
            }
        )
    return steps


def _name(outcome: Outcome) -> str:
    count = outcome.run.processes
    return f"{outcome.name}, {'1 process' if count == 1 else f'{count} ranks'}"
