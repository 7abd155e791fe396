"""The goodput of runs as text: the wall-clock time by category, for the whole run and for each attempt."""

from __future__ import annotations

from collections.abc import Sequence

from unitrain.errors import ReportError
from unitrain.progress.goodput import CATEGORIES, GOODPUT_FILE, AttemptRecord, GoodputSummary
from unitrain.report.record import RunRecord

_STATUS = {
    "running": "running, or killed",
    "finished": "finished",
    "stopped": "stopped",
    "failed": "failed",
}


def describe_goodput(records: Sequence[RunRecord]) -> str:
    """Return the goodput of each run as text. Raises ReportError if a run has not recorded it."""
    return "\n\n".join(_describe_run(record) for record in records)


def _describe_run(record: RunRecord) -> str:
    if not record.attempts:
        raise ReportError(
            f"Run '{record.name}' has no {GOODPUT_FILE}: no Trainer of this version has written to this folder. Pass "
            "another folder."
        )
    summary = GoodputSummary.of(record.attempts)
    total = summary.total_seconds or 1.0
    restarts = "1 restart" if summary.attempts == 2 else f"{summary.attempts - 1} restarts"
    lines = [
        f"{record.name}: {100 * summary.goodput:.1f} % goodput, {summary.steps:,} steps, "
        f"{restarts}, {summary.replayed_steps:,} replayed steps",
        "",
        f"  {'category':<12}{'seconds':>12}{'share':>9}",
    ]
    for name, description in CATEGORIES.items():
        seconds = summary.seconds[name]
        if seconds or name == "training":
            lines.append(f"  {name:<12}{seconds:>12,.1f}{100 * seconds / total:>7.1f} %  {description}")
    lines.append(f"  {'total':<12}{summary.total_seconds:>12,.1f}{100:>7.1f} %")
    if len(record.attempts) > 1:
        lines += ["", f"  {'attempt':<9}{'ranks':>6}{'steps':>20}{'replayed':>10}{'seconds':>12}  status"]
        lines += [
            _describe_attempt(attempt_number, attempt)
            for attempt_number, attempt in enumerate(record.attempts, start=1)
        ]
    return "\n".join(lines)


def _describe_attempt(attempt_number: int, attempt: AttemptRecord) -> str:
    steps = f"{attempt.first_step:,} to {attempt.last_step:,}"
    seconds = sum(attempt.seconds.values())
    return (
        f"  {attempt_number:<9}{attempt.ranks:>6}{steps:>20}{attempt.replayed_steps:>10,}{seconds:>12,.1f}  "
        f"{_STATUS.get(attempt.status, attempt.status)}"
    )
