"""Print the verdict as a table, or write it as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from unitrain.output import plain_console
from unitrain.verify.difference import Difference, LargestDifference
from unitrain.verify.verdict import Group, Status, Verdict, VerdictRow

_WIDTH_WITHOUT_TERMINAL = 200  # wide enough to avoid wrapped cells
_VERBS = {"differs": "differs", "failed": "failed", "by design": "differs by design"}
_COUNTED_STATUSES: dict[Status, tuple[str, str]] = {
    "differs": ("differs from its reference", "differ from their reference"),
    "failed": ("failed", "failed"),
}
_STYLES = {"same results": "green", "differs": "red", "failed": "red", "by design": "yellow"}


def show(verdict: Verdict, title: str) -> None:
    """Print a table with one section per number of ranks, the reasons for differences, and the verdict."""
    terminal = plain_console(soft_wrap=True)
    console = terminal if terminal.is_terminal else plain_console(soft_wrap=True, width=_WIDTH_WITHOUT_TERMINAL)
    table = Table(
        title=f"{title}\nΔ is the largest difference from the reference",
        title_justify="left",
        title_style="",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for heading in ("ranks", "backend", "transport"):
        table.add_column(heading)
    for heading in ("global batch", "Δ parameters", "Δ optimizer", "Δ loss"):
        table.add_column(heading, justify="right")
    for heading in ("samples", "replicas", ""):
        table.add_column(heading)
    for group in verdict.groups:
        for row in group.rows:
            table.add_row(*_format_cells(row), end_section=row is group.rows[-1])
    console.print(table)
    for group in verdict.groups:
        for row in group.rows:
            _print_reasons(console, group, row)
    for name, reason in verdict.skipped:
        console.print(Text.assemble(("skipped", "bold"), f" {name}: {reason}"))
    console.print(_format_verdict(verdict), style="bold green" if verdict.is_same else "bold red")


def write_json(verdict: Verdict, settings: Mapping[str, Any], path: Path) -> None:
    """Write the settings, all rows and the verdict to `path`. Non-finite numbers become null."""
    report = {
        **settings,
        "same": verdict.is_same,
        "groups": [{"ranks": group.ranks, "rows": [_as_data(row) for row in group.rows]} for group in verdict.groups],
        "skipped": [{"name": name, "reason": reason} for name, reason in verdict.skipped],
    }
    path.write_text(json.dumps(_replace_non_finite(report), indent=2) + "\n")


def _format_cells(row: VerdictRow) -> list[str | Text]:
    outcome, difference = row.outcome, row.difference
    style = _STYLES.get(row.status)
    status = Text(row.status, style or "")
    identity: list[str | Text] = [str(outcome.run.processes), outcome.run.backend, outcome.transport]
    if outcome.record is None:
        return [*identity, "", "", "", "", "", "", status]
    identity.append(str(outcome.record.global_batch_sizes()[0]))
    mismatch = outcome.record.first_replica_mismatch()
    is_single = outcome.record.first.size == 1
    replicas = "" if is_single else "bit-equal" if mismatch is None else f"rank {mismatch[0]} differs"
    if difference is None:
        return [*identity, "", "", "", "", replicas, status]
    data = "same" if difference.first_data_step is None else f"differ in step {difference.first_data_step}"
    numbers = [_format_delta(part) for part in (difference.parameters, difference.state, difference.loss)]
    return [*identity, *numbers, data, replicas, status]


def _print_reasons(console: Console, group: Group, row: VerdictRow) -> None:
    """Print, below the table, the reasons for the status of a row."""
    if row.status == "reference" or not (row.reasons or row.status in _VERBS):
        return
    verb = _VERBS.get(row.status)
    console.print(Text.assemble((row.name, "bold"), f" {verb}:" if verb else ":"))
    parts = [*row.reasons]
    if row.status == "differs" and row.difference is not None:
        parts += _describe_location(row.difference)
    if row.status == "by design":
        parts.append(f"only runs on {group.ranks} ranks can be compared with each other")
    for line in [*(f"{part}." for part in parts), *(f"| {line}" for line in row.outcome.last_lines)]:
        console.print(f"  {line}")


def _describe_location(difference: Difference) -> list[str]:
    """Return messages that locate the differences."""
    sentences = [] if difference.first_loss_step is None else [f"losses differ from step {difference.first_loss_step}"]
    for noun, part in (("parameter", difference.parameters), ("optimizer state", difference.state)):
        if not part.is_within_tolerance:
            sentences.append(f"the {noun} with the largest difference is {part.where}")
    return sentences


def _format_verdict(verdict: Verdict) -> str:
    rows = [row for group in verdict.groups for row in group.rows]
    count = Counter(row.status for row in rows)
    if verdict.is_same:
        return f"Verdict: the same results{', except for differences by design' if count['by design'] else ''}."
    parts = [f"{n} {texts[n > 1]}" for status, texts in _COUNTED_STATUSES.items() if (n := count[status])]
    if parts:
        return f"Verdict: not the same results. Of {len(rows)} runs, {' and '.join(parts)}."
    return (
        "Verdict: nothing was compared. A comparison takes two backends on the same number of ranks: omit --backends, "
        "or name two."
    )


def _format_delta(difference: LargestDifference) -> str:
    return f"{difference.delta:.1e}" if difference.delta else "0"


def _as_data(row: VerdictRow) -> dict[str, Any]:
    outcome = row.outcome
    record = outcome.record
    recorded = (
        {}
        if record is None
        else {
            "device": record.first.device,
            "optimizer": record.first.optimizer,
            "steps": record.steps,
            "losses": record.losses(),
            "data": [f"{digest:016x}" for digest in record.sample_digests()],
            "global_batch_sizes": record.global_batch_sizes(),
            "learning_rates": record.learning_rates(),
            "random_numbers": record.first.used_rngs,
            "replicas_bit_equal": record.first_replica_mismatch() is None,
        }
    )
    return {
        "backend": outcome.run.backend,
        "transport": outcome.transport,
        "processes": outcome.run.processes,
        "status": row.status,
        "reasons": list(row.reasons),
        "seconds": round(outcome.seconds, 1),
        "difference": None if row.difference is None else dataclasses.asdict(row.difference),
        "output": list(outcome.last_lines),
        **recorded,
    }


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _replace_non_finite(inner) for key, inner in value.items()}
    return [_replace_non_finite(inner) for inner in value] if isinstance(value, list | tuple) else value
