"""Write the report, as one self-contained HTML file or as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2

from unitrain.errors import ReportError
from unitrain.progress.goodput import GoodputSummary
from unitrain.report import run_statistics
from unitrain.report.charts import COLORS, NUM_RUN_COLORS, to_png, to_svg
from unitrain.report.contents import all_charts, result_charts, shown_ranks, time_charts
from unitrain.report.record import PHASES, START_SETTINGS, RunRecord, read_records

# Above these fractions of the training time, the report mentions the time spent waiting for data and for other ranks.
_DATA_FRACTION_THRESHOLD, _WAIT_FRACTION_THRESHOLD = 0.15, 0.15
_MAX_NAMED_RANKS = 4


@dataclass(frozen=True)
class HeadlineValue:
    """A key figure at the top of the report, with an explanatory note."""

    name: str
    value: str
    note: str = ""


def write_report(folders: Sequence[Path], output: Path, *, as_png: bool) -> None:
    """Write the report of the runs in `folders` to `output`. Raises ReportError and OSError."""
    records = read_records(list(folders))
    try:
        if as_png:
            to_png(all_charts(records), [record.name for record in records], output)
        else:
            output.write_text(render(records), encoding="utf-8")
    except ReportError:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        names = ", ".join(f"'{folder}'" for folder in folders)
        raise ReportError(
            f"The record of a run in {names} contains a value of an unexpected type or size "
            f"({type(error).__name__}: {error}). Remove the row from its .jsonl files if another program wrote it."
        ) from error


def load_template(name: str) -> jinja2.Template:
    """Load a template of this package. Undefined variables raise an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    return environment.get_template(name)


def render(records: Sequence[RunRecord]) -> str:
    """Render the HTML report of one run or of a comparison of several runs."""
    records = list(records)
    return load_template("page.html").render(
        colors=COLORS,
        title=", ".join(record.name for record in records),
        runs=[_describe_run(record, index) for index, record in enumerate(records)],
        result_charts=[(chart.title, to_svg(chart)) for chart in result_charts(records)],
        time_charts=[(chart.title, to_svg(chart)) for chart in time_charts(records)],
        settings=_settings(records),
        compared=_compare_headlines([headline_values(record) for record in records]),
    )


def headline_values(record: RunRecord) -> list[HeadlineValue]:
    """Return the headline values of a run."""
    progress, steps = run_statistics.run_progress(record), f"{run_statistics.last_step(record):,} steps"
    requested = "" if progress.requested is None else f" of {progress.requested:,}"
    values = [
        HeadlineValue(progress.unit, f"{progress.num_done:,.4g}{requested}", steps if progress.unit != "steps" else "")
    ]
    monitored, mode = run_statistics.monitored_result(record)
    if len(record.epochs) > 1 and (best := run_statistics.best_value(record, monitored, mode)):
        extremum = "lowest" if mode == "min" else "highest"
        values.append(
            HeadlineValue(f"best {monitored}", format_number(best.value), f"{extremum}, in epoch {best.epoch}")
        )
    values += [
        HeadlineValue(name, format_number(run_statistics.last_value(record, name)), "in the last epoch")
        for name in run_statistics.result_names(record)
    ]
    if speed := run_statistics.samples_per_second(record):
        values.append(HeadlineValue("samples per second", f"{speed:,.0f}", "over all ranks, during training"))
    if record.epochs:
        values.append(
            HeadlineValue(
                "time", format_duration(run_statistics.total_seconds(record)), "training, validation and checkpoints"
            )
        )
    if record.attempts:
        summary = GoodputSummary.of(record.attempts)
        note = f"of {format_duration(summary.total_seconds)}, {_pluralize(summary.attempts - 1, 'restart')}"
        values.append(HeadlineValue("goodput", format_percent(summary.goodput), note))
    if times := run_statistics.rank_times(record):
        if times.size > 1:
            values.append(
                HeadlineValue(
                    "waiting",
                    format_percent(times.time_fraction("wait")),
                    "of training time, for gradients of other ranks",
                )
            )
        values.append(
            HeadlineValue(
                "data loading",
                format_percent(times.time_fraction("data")),
                "of training time, waiting for the next batch",
            )
        )
    return values


def format_number(value: float | None) -> str:
    """Format a result with four significant digits, or as a whole number if its magnitude is at least 10,000. None is
    "not a number"."""
    if value is None:
        return "not a number"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.4g}"


def format_duration(seconds: float) -> str:
    """Format a duration in suitable units."""
    if seconds < 59.95:  # otherwise rounded to 60 s
        return f"{seconds:.3g} s"
    minutes, seconds_left = divmod(round(seconds), 60)
    if minutes < 10:
        return f"{minutes} min {seconds_left} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{seconds / 3600:,.0f} h" if minutes >= 6000 else f"{minutes // 60} h {minutes % 60} min"


def format_percent(fraction: float) -> str:
    """Format a fraction as a percentage."""
    return f"{100 * fraction:.0f} %" if fraction >= 0.1 else f"{100 * fraction:.1f} %"


def _describe_run(record: RunRecord, run_index: int) -> dict[str, Any]:
    start, times = record.start, run_statistics.rank_times(record)
    return {
        "name": record.name,
        "color": f"run-{run_index % NUM_RUN_COLORS}",
        "state": "finished" if run_statistics.run_progress(record).is_finished else "not finished",
        "written": f"{record.last_modified:%Y-%m-%d %H:%M} UTC",
        "environment": _describe_environment(start),
        "starts": [_describe_start(start) for start in record.starts],
        "headline": headline_values(record),
        "sentences": [*_describe_goodput(record), *([] if times is None else _describe_times(record, times))],
        "times": None if times is None else _time_rows(times),
        "epochs": _epoch_rows(record),
    }


def _compare_headlines(headlines: list[list[HeadlineValue]]) -> list[tuple[str, str, list[HeadlineValue | None]]]:
    """Return rows of (name, note, headline value per run or None). A note that all runs share is moved to the row."""
    rows = []
    for name in dict.fromkeys(value.name for headline in headlines for value in headline):
        row = [next((value for value in headline if value.name == name), None) for headline in headlines]
        notes = {value.note for value in row if value is not None}
        shared = notes.pop() if len(notes) == 1 else ""
        rows.append((name, shared, [value and replace(value, note="") if shared else value for value in row]))
    return rows


def _describe_environment(start: dict[str, Any]) -> str:
    if not start:
        return ""
    ranks, nodes = _pluralize(start["size"], "rank"), start["num_nodes"]
    where = f" on {_pluralize(nodes, 'node')}" if nodes > 1 else ""
    transport = f" over {start['transport']}" if start["transport"] != "none" else ""
    return f"{start['backend']}{transport}, {ranks}{where}, {start['device']}"


def _describe_start(start: dict[str, Any]) -> dict[str, str]:
    versions = ", ".join(f"{name} {version}" for name, version in start["versions"].items())
    start_time = start["started"].replace("T", " ").replace("+00:00", " UTC")
    return {
        "step": f"{start['step']:,}",
        "started": start_time,
        "environment": _describe_environment(start),
        "versions": versions,
    }


def _describe_times(record: RunRecord, times: run_statistics.RankTimes) -> list[str]:
    """Return sentences about slow ranks, and about the fractions of time that ranks wait for gradients and data."""
    slow = times.stragglers()
    sentences = [
        f"{_to_sentence(str(straggler))} The other ranks wait for it." for straggler in slow[:_MAX_NAMED_RANKS]
    ]
    if len(slow) > _MAX_NAMED_RANKS:
        hidden = len(slow) - _MAX_NAMED_RANKS
        sentences.append("1 more rank is slow." if hidden == 1 else f"{hidden} more ranks are slow.")
    periods = run_statistics.slow_periods(record, in_epochs=False)
    longest = sorted(periods, key=lambda period: period.steps[0] - period.steps[1])[:_MAX_NAMED_RANKS]
    for period in sorted(longest, key=lambda period: period.steps):
        first_step, last_step = period.steps
        when = (
            f"at step {first_step:,}" if first_step == last_step else f"from step {first_step:,} to step {last_step:,}"
        )
        slow_text = _to_sentence(str(period.straggler).replace(" is slow:", f" was slow {when}:"))
        sentences.append(f"{slow_text} {period.straggler.explanation}".rstrip())
    if times.size > 1 and not slow and not periods:
        work = times.work_seconds()
        difference = format_percent(1 - min(work) / (max(work) or 1.0))
        sentences.append(
            f"No stragglers: work time (data, compute and update) differs by at most {difference} between ranks."
        )
    if times.size > 1 and times.time_fraction("wait") > _WAIT_FRACTION_THRESHOLD and not slow:
        sentences.append(
            f"{format_percent(times.time_fraction('wait'))} of training time is spent waiting for gradients. "
            "Larger batches, gradient accumulation or compression reduce communication."
        )
    if times.time_fraction("data") > _DATA_FRACTION_THRESHOLD:
        sentences.append(
            f"{format_percent(times.time_fraction('data'))} of training time is spent waiting for data. "
            "Increase num_workers to load data in parallel with training."
        )
    return sentences


def _describe_goodput(record: RunRecord) -> list[str]:
    return [_to_sentence(str(GoodputSummary.of(record.attempts)))] if record.attempts else []


def _to_sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _time_rows(times: run_statistics.RankTimes) -> dict[str, Any]:
    ranks = shown_ranks(times)
    phases = [phase for phase in PHASES if any(times.seconds[phase])]
    rows = [
        (
            f"rank {rank}",
            [format_duration(times.seconds[phase][rank]) for phase in phases],
            format_duration(times.work_seconds()[rank]),
        )
        for rank in ranks
    ]
    return {"phases": phases, "rows": rows, "hidden_ranks": times.size - len(ranks)}


def _epoch_rows(record: RunRecord) -> dict[str, Any]:
    names = run_statistics.result_names(record)
    rows = [
        [
            str(row["epoch"]),
            f"{row['step']:,}",
            *(format_number(row[name]) if name in row else "" for name in names),
            f"{row.get('learning_rate', 0):.3g}",
            format_duration(row.get("seconds") or 0.0),
            f"{row.get('samples_per_second') or 0:,.0f}",
        ]
        for row in record.epochs
    ]
    return {"names": ["epoch", "step", *names, "learning rate", "training", "samples/s"], "rows": rows}


def _settings(records: list[RunRecord]) -> list[tuple[str, list[str], bool]]:
    """Return (name, value per run, whether they differ) for all settings, differing settings first."""
    configs = [
        {**{name: record.start[name] for name in START_SETTINGS}, **record.start["config"]} if record.start else {}
        for record in records
    ]
    settings = []
    for name in dict.fromkeys(name for config in configs for name in config):
        values = [_format_setting(config.get(name)) for config in configs]
        settings.append((name, values, len(set(values)) > 1))
    return sorted(settings, key=lambda setting: not setting[2])


def _format_setting(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _pluralize(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
