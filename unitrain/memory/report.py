"""The report of `unitrain memory`: a summary, the memory by category, and the savings of each setting."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from unitrain.bench.results import format_bytes
from unitrain.bench.tables import create_table
from unitrain.memory.record import RankMemory
from unitrain.memory.savings import Saving, Usage, list_savings, persistent_bytes
from unitrain.output import plain_console

_WIDTH = 80
_REMAINDER = "remainder"


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """A category of memory: its predicted and measured bytes, and the bytes at the peak. None if unknown."""

    name: str
    predicted: int | None
    measured: int | None
    at_peak: int


def memory_rows(usage: Usage) -> list[MemoryRow]:
    """Return the memory of a rank by category. The bytes at the peak add up to the peak."""
    record, size = usage.record, usage.record.size
    parts = size if usage.shard == "parameters" else 1  # shards of each parameter; this rank has one of them
    formula = persistent_bytes(
        parameters=record.parameters * parts,
        gradients=record.trained * parts,
        state=record.formula_state or 0,
        shard=usage.shard,
        ranks=size,
    )
    is_in_step = record.step_peak > record.forward_backward_peak
    rows = [
        MemoryRow(
            name="parameters",
            predicted=round(formula["parameters"]),
            measured=record.parameters,
            at_peak=record.parameters,
        ),
        MemoryRow(
            name="gradients",
            predicted=round(formula["gradients"]),
            measured=record.gradients,
            at_peak=record.gradient_storages if is_in_step else usage.gradients,
        ),
        MemoryRow(
            name="optimizer state",
            predicted=None if record.formula_state is None else round(formula["state"]),
            measured=record.state,
            at_peak=record.state,
        ),
        MemoryRow(
            name="activations",
            predicted=None,
            measured=record.activations,
            at_peak=0 if is_in_step else record.activations_at_peak,
        ),
    ]
    optional = {
        "gradient buckets": record.buckets,
        "model buffers": record.buffers,
        "averaged weights": record.average,
    }
    optional_rows = [
        MemoryRow(name=name, predicted=num_bytes, measured=num_bytes, at_peak=num_bytes)
        for name, num_bytes in optional.items()
        if num_bytes
    ]
    rows = [*rows[:2], *optional_rows, *rows[2:]]  # after the parameters and gradients
    fusion = min(record.fusion_buffer, record.other)
    if fusion:
        rows.append(MemoryRow(name="Horovod's fusion buffer", predicted=fusion, measured=None, at_peak=fusion))
    remainder = record.peak - (record.other - fusion) - sum(row.at_peak for row in rows)
    rows.append(MemoryRow(name=_REMAINDER, predicted=None, measured=None, at_peak=remainder))
    libraries = "other tensors" if record.device.startswith("cuda") else "Python, libraries and data"
    rows.append(MemoryRow(name=libraries, predicted=None, measured=None, at_peak=record.other - fusion))
    return rows


def summarize(usage: Usage, savings: Sequence[Saving], ranks: int) -> str:
    """Return a text that names the largest category of memory and the setting with the largest savings.

    Percentages are relative to training memory.
    """
    record = usage.record
    *rows, untracked = memory_rows(usage)
    training_bytes = record.peak - untracked.at_peak
    largest = max(rows, key=lambda row: row.at_peak)
    name = "Temporary tensors" if largest.name == _REMAINDER else largest.name
    verb = "are" if name.endswith("s") else "is"
    text = (
        f"{name[0].upper()}{name[1:]} {verb} the largest part of training memory: "
        f"{format_bytes(largest.at_peak)} of {format_bytes(training_bytes)} per rank "
        f"({_percent(largest.at_peak, training_bytes)})."
    )
    if not savings:
        return (
            f"{text} {untracked.name[0].upper()}{untracked.name[1:]} need {format_bytes(untracked.at_peak)}, so none "
            "of the settings would save a significant part of the memory."
        )
    best = savings[0]
    about = "about " if best.is_estimate else ""
    over = f" over {ranks} ranks" if best.setting.startswith("shard") else ""
    text += (
        f" {best.setting}{over} would save the most: {about}{format_bytes(best.saved_bytes)} "
        f"({_percent(best.saved_bytes, training_bytes)})."
    )
    if largest.name == "activations" and ranks > 1 and usage.shard == "none":
        sharding = [saving.saved_bytes for saving in savings if saving.setting.startswith("shard")]
        text += f" Sharding over {ranks} ranks would save at most {_percent(max(sharding, default=0), training_bytes)}."
    return text


def show(records: Sequence[RankMemory], ranks: int, console: Console | None = None) -> None:
    """Print the report. Sharding is predicted for `ranks` ranks."""
    console = console or plain_console(width=_WIDTH)
    usage = Usage.of_ranks(records)
    savings = list_savings(usage, ranks)
    console.print(summarize(usage, savings, ranks))
    console.print(_memory_table(usage))
    if savings:
        console.print(_savings_table(usage, savings, ranks))
    for note in notes(usage):
        console.print(note)


def _memory_table(usage: Usage) -> Table:
    record = usage.record
    optimizers = ", ".join(dict.fromkeys(record.optimizers))
    table = create_table(
        f"Rank {record.rank} of {record.size}, {record.backend or 'own loop'}, {record.device}, {optimizers}"
    )
    table.add_column("")
    for heading in ("predicted", "measured", "at the peak", "share"):
        table.add_column(heading, justify="right")
    *rows, untracked = memory_rows(usage)
    training_bytes = record.peak - untracked.at_peak
    for index, row in enumerate(rows):
        table.add_row(
            row.name,
            "" if row.predicted is None else format_bytes(row.predicted),
            "" if row.measured is None else format_bytes(row.measured),
            format_bytes(row.at_peak) if row.at_peak >= 0 else f"-{format_bytes(-row.at_peak)}",
            _percent(row.at_peak, training_bytes),
            end_section=index + 1 == len(rows),
        )
    for name, size in (("training", training_bytes), (untracked.name, untracked.at_peak), ("peak", record.peak)):
        table.add_row(name, "", "", format_bytes(size), "")
    return table


def _savings_table(usage: Usage, savings: Sequence[Saving], ranks: int) -> Table:
    table = create_table(f"Predicted savings of each setting per rank (shard: over {ranks} ranks; ~: estimate)")
    table.add_column("setting", overflow="fold")
    for heading in ("saves", "peak"):
        table.add_column(heading, justify="right", no_wrap=True)
    for saving in savings:
        setting = f"{saving.setting}\n  {saving.note}" if saving.note else saving.setting
        saved = f"{'~' if saving.is_estimate else ''}{format_bytes(saving.saved_bytes)}"
        table.add_row(setting, saved, format_bytes(usage.record.peak - saving.saved_bytes))
    return table


def notes(usage: Usage) -> list[str]:
    """Return notes that explain the numbers in the report."""
    record = usage.record
    lines = [
        "Activations are the tensors that autograd saves for the backward pass. The remainder is the measured peak "
        "minus all other rows: temporary tensors, and memory that the allocator has not returned."
    ]
    if record.settings.get("checkpoint_activations"):
        lines.append("The remainder includes the activations of one block, which are recomputed in the backward pass.")
    if record.step_peak > record.forward_backward_peak:
        lines.append("The peak is in the optimizer step, when activations are not in memory.")
    if record.gradient_storages > record.early_gradients:
        lines.append(
            f"Gradients need {format_bytes(record.gradient_storages)} after the backward pass, and "
            f"{format_bytes(record.early_gradients)} when activations are at their maximum. With several ranks, "
            "gradients that are not sharded are in memory all the time."
        )
    if record.startup_peak > record.peak:
        lines.append(f"The first steps needed more memory, up to {format_bytes(record.startup_peak)}.")
    return lines


def write_json(records: Sequence[RankMemory], ranks: int, settings: dict[str, Any], path: Path) -> None:
    """Write the summary, the memory by category, the savings in bytes, and the records of all ranks to `path`."""
    usage = Usage.of_ranks(records)
    savings = list_savings(usage, ranks)
    content = {
        **settings,
        "summary": summarize(usage, savings, ranks),
        "rank": usage.record.rank,
        "peak": usage.record.peak,
        "memory": [asdict(row) for row in memory_rows(usage)],
        "savings": [asdict(saving) for saving in savings],
        "ranks": [asdict(record) for record in records],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def _percent(size: int, total: int) -> str:
    return f"{size / total:.0%}"
