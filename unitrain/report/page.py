"""The page itself: one file of HTML that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2

from unitrain.report import figures
from unitrain.report.charts import COLOURS, RUNS, to_svg
from unitrain.report.contents import result_charts, shown_ranks, time_charts
from unitrain.report.record import Record

_LITTLE_DATA, _LITTLE_WAIT = 0.15, 0.15
_MOST_NAMED = 4


@dataclass(frozen=True)
class Figure:
    """A headline figure, and what is to be known of it."""

    name: str
    value: str
    note: str = ""


def render(records: Sequence[Record]) -> str:
    """Return the page about one run, or comparing several."""
    records = list(records)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    return environment.get_template("page.html").render(
        colours=COLOURS,
        title=", ".join(record.name for record in records),
        runs=[_run(record, number) for number, record in enumerate(records)],
        result_charts=[(chart.title, to_svg(chart)) for chart in result_charts(records)],
        time_charts=[(chart.title, to_svg(chart)) for chart in time_charts(records)],
        settings=_settings(records),
        compared=_compared([headline(record) for record in records]),
    )


def headline(record: Record) -> list[Figure]:
    """Return the figures that a reader looks for first."""
    progress, steps = figures.progress(record), f"{figures.last_step(record):,} steps"
    asked = "" if progress.asked is None else f" of {progress.asked:,}"
    found = [Figure(progress.unit, f"{progress.done:,.4g}{asked}", steps if progress.unit != "steps" else "")]
    judged, mode = figures.judged_by(record)
    if len(record.epochs) > 1 and (best := figures.best(record, judged, mode)):
        kind = "lowest" if mode == "min" else "highest"
        found.append(Figure(f"best {judged}", number(best.value), f"{kind}, in epoch {best.epoch}"))
    found += [
        Figure(name, number(figures.last(record, name)), "in the last epoch") for name in figures.result_names(record)
    ]
    if speed := figures.samples_per_second(record):
        found.append(Figure("samples per second", f"{speed:,.0f}", "of all ranks, while training"))
    if record.epochs:
        found.append(Figure("time", duration(figures.elapsed(record)), "training, validation and checkpoints"))
    if times := figures.rank_times(record):
        if times.size > 1:
            found.append(Figure("waiting", percent(times.share("wait")), "of training, for gradients of other ranks"))
        found.append(Figure("data", percent(times.share("data")), "of training, for the next batch"))
    return found


def number(value: float | None) -> str:
    """Return a result as it is read: four digits that count, or "not a number" where there was none."""
    if value is None:
        return "not a number"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.4g}"


def duration(seconds: float) -> str:
    """Return a time in the units that fit it."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, hours = seconds / 60, seconds / 3600
    if hours < 1:
        return f"{minutes:.0f} min {seconds % 60:.0f} s" if minutes < 10 else f"{minutes:.0f} min"
    return f"{hours:,.0f} h" if hours >= 100 else f"{int(hours)} h {int(minutes % 60)} min"


def percent(share: float) -> str:
    """Return a share as a percentage."""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"


def _run(record: Record, run: int) -> dict[str, Any]:
    start, times = record.start, figures.rank_times(record)
    return {
        "name": record.name,
        "colour": f"run-{run % RUNS}",
        "state": "finished" if figures.progress(record).finished else "not finished",
        "written": f"{record.written:%Y-%m-%d %H:%M} UTC",
        "place": _place(start),
        "starts": [_start(start) for start in record.starts],
        "headline": headline(record),
        "sentences": [] if times is None else _sentences(record, times),
        "times": None if times is None else _time_rows(times),
        "epochs": _epoch_rows(record),
    }


def _compared(headlines: list[list[Figure]]) -> list[tuple[str, str, list[Figure | None]]]:
    """Return (name, note, figure of each run or None); a note that is the same everywhere is told once."""
    rows = []
    for name in dict.fromkeys(figure.name for figures_of_run in headlines for figure in figures_of_run):
        row = [next((figure for figure in one if figure.name == name), None) for one in headlines]
        notes = {figure.note for figure in row if figure is not None}
        shared = notes.pop() if len(notes) == 1 else ""
        rows.append((name, shared, [figure and replace(figure, note="") if shared else figure for figure in row]))
    return rows


def _place(start: dict[str, Any]) -> str:
    if not start:
        return ""
    ranks, nodes = _count(start["size"], "rank"), start["num_nodes"]
    where = f" on {_count(nodes, 'node')}" if nodes > 1 else ""
    transport = f" over {start['transport']}" if start["transport"] != "none" else ""
    return f"{start['backend']}{transport}, {ranks}{where}, {start['device']}"


def _start(start: dict[str, Any]) -> dict[str, str]:
    versions = ", ".join(f"{name} {version}" for name, version in start["versions"].items())
    begun = start["started"].replace("T", " ").replace("+00:00", " UTC")
    return {"step": f"{start['step']:,}", "started": begun, "place": _place(start), "versions": versions}


def _sentences(record: Record, times: figures.RankTimes) -> list[str]:
    """Return what the division of time tells, in words."""
    slow = times.stragglers()
    told = [f"{_sentence(str(straggler))} They wait for it." for straggler in slow[:_MOST_NAMED]]
    if len(slow) > _MOST_NAMED:
        told.append(f"{len(slow) - _MOST_NAMED} more ranks are slow.")
    spells = figures.spells(record, in_epochs=False)
    longest = sorted(spells, key=lambda spell: spell.steps[0] - spell.steps[1])[:_MOST_NAMED]
    for spell in sorted(longest, key=lambda spell: spell.steps):
        first, last = spell.steps
        when = f"at step {first:,}" if first == last else f"from step {first:,} to step {last:,}"
        told.append(_sentence(str(spell.straggler).replace(" is slow:", f" was slow {when}:")))
    if times.size > 1 and not slow and not spells:
        most, least = max(times.own_work()), min(times.own_work())
        told.append(f"No rank is much slower: their own work differs by at most {percent(1 - least / (most or 1.0))}.")
    if times.size > 1 and times.share("wait") > _LITTLE_WAIT and not slow:
        told.append(
            f"{percent(times.share('wait'))} of training is spent waiting for gradients: larger batches, accumulation "
            "or compression communicate less."
        )
    if times.share("data") > _LITTLE_DATA:
        told.append(
            f"{percent(times.share('data'))} of training is spent waiting for data: more num_workers load it beside "
            "the training."
        )
    return told


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _time_rows(times: figures.RankTimes) -> dict[str, Any]:
    ranks = shown_ranks(times)
    parts = [part for part in figures.PARTS if any(times.seconds[part])]
    rows = [
        (f"rank {rank}", [duration(times.seconds[part][rank]) for part in parts], duration(times.own_work()[rank]))
        for rank in ranks
    ]
    return {"parts": parts, "rows": rows, "left_out": times.size - len(ranks)}


def _epoch_rows(record: Record) -> dict[str, Any]:
    names = figures.result_names(record)
    rows = [
        [
            str(row["epoch"]),
            f"{row['step']:,}",
            *(number(row[name]) if name in row else "" for name in names),
            f"{row.get('learning_rate', 0):.3g}",
            duration(row.get("seconds") or 0.0),
            f"{row.get('samples_per_second') or 0:,.0f}",
        ]
        for row in record.epochs
    ]
    return {"names": ["epoch", "step", *names, "learning rate", "training", "samples/s"], "rows": rows}


def _settings(records: list[Record]) -> list[tuple[str, list[str], bool]]:
    """Return (name, value for each run, whether they differ) for what the runs were asked for, differences first."""
    described = [
        "model", "parameters", "optimizer", "scheduler", "samples_per_epoch", "steps_per_epoch", "batch_size",
        "global_batch_size",
    ]  # fmt: skip
    asked = [
        {**{name: record.start[name] for name in described}, **record.start["config"]} if record.start else {}
        for record in records
    ]
    settings = []
    for name in dict.fromkeys(name for one in asked for name in one):
        values = [_shown(one.get(name)) for one in asked]
        settings.append((name, values, len(set(values)) > 1))
    return sorted(settings, key=lambda setting: not setting[2])


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
