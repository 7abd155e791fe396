"""Select the charts of a report and collect their data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unitrain.progress.goodput import CATEGORIES
from unitrain.report import run_statistics
from unitrain.report.charts import Chart, DurationChart, Line, LineChart, Style
from unitrain.report.record import PHASES, RunRecord

_MAX_BARS, _MAX_MEMORY_LINES = 24, 4
_GIB, _MIN_MEMORY_GROWTH = 2**30, 1.1
# The loss axis is logarithmic if the ratio of the highest to the lowest loss exceeds this.
_LOGARITHMIC_RATIO = 30
# Label and color of a result by name prefix.
_DATASETS = {"train": ("training", 0), "val": ("validation", 1), "": ("", 2)}


def all_charts(records: Sequence[RunRecord]) -> list[Chart]:
    """Return all charts, results first."""
    return [*result_charts(records), *time_charts(records)]


def result_charts(records: Sequence[RunRecord]) -> list[LineChart]:
    """Return the non-empty charts of loss, metrics, learning rate, throughput, MFU and memory."""
    records = list(records)
    in_epochs = run_statistics.has_epoch_axis(records)
    marks = _resumption_marks(records[0], in_epochs) if len(records) == 1 else []
    charts = [_metric_chart(records, metric, in_epochs) for metric in run_statistics.metric_names(records)]
    for title, name in (
        ("learning rate", "learning_rate"),
        ("samples per second", "samples_per_second"),
        ("tokens per second", "tokens_per_second"),
        ("model FLOPs utilization", "mfu"),
    ):
        lines = []
        for run_index, record in enumerate(records):
            rows = record.epochs
            if name == "learning_rate":
                rows = sorted([*record.epochs, *record.steps], key=lambda row: int(row["step"]))
            elif name == "samples_per_second" and len(record.steps) > len(record.epochs):
                style: Style = "faint" if record.epochs else "solid"
                lines.append(
                    Line("between epochs", run_statistics.chart_points(record.steps, name, in_epochs), run_index, style)
                )
            elif name != "samples_per_second":
                rows = [row for row in record.steps if name in row]
            lines.append(Line(record.name, run_statistics.chart_points(rows, name, in_epochs), run_index))
        spans = _slow_rank_spans(records, in_epochs) if name == "samples_per_second" else []
        charts.append(LineChart(title, lines, "", has_legend=False, from_zero=True, spans=spans))
    charts.append(_memory_chart(records, in_epochs))
    x_label = "epoch" if in_epochs else "step"
    return [
        replace(chart, x_label=x_label, marks=marks) for chart in charts if any(line.points for line in chart.lines)
    ]


def time_charts(records: Sequence[RunRecord]) -> list[DurationChart]:
    """Return charts of time: by rank, epoch and attempt for one run, and per epoch for several runs."""
    return [*_rank_time_charts(records), *_attempt_charts(records)]


def _attempt_charts(records: Sequence[RunRecord]) -> list[DurationChart]:
    """Return a chart of the wall-clock time of a run by category, if it was restarted."""
    if len(records) != 1 or len(records[0].attempts) < 2:
        return []
    attempts = records[0].attempts[-_MAX_BARS:]
    first = len(records[0].attempts) - len(attempts) + 1
    labels = [f"attempt {attempt_number}" for attempt_number in range(first, first + len(attempts))]
    seconds = {name: [attempt.seconds.get(name, 0.0) for attempt in attempts] for name in CATEGORIES}
    return [DurationChart("wall-clock time of each attempt", labels, seconds, x_label="seconds")]


def _rank_time_charts(records: Sequence[RunRecord]) -> list[DurationChart]:
    times = [(record, rank_times) for record in records if (rank_times := run_statistics.rank_times(record))]
    if not times:
        return []
    if len(records) > 1:
        seconds = {
            phase: [rank_times.mean(phase) / rank_times.num_epochs for _, rank_times in times] for phase in PHASES
        }
        title = "time per epoch, mean over ranks"
        return [DurationChart(title, [record.name for record, _ in times], seconds, x_label="seconds per epoch")]
    record, rank_times = times[0]
    ranks = shown_ranks(rank_times)
    seconds = {phase: [rank_times.seconds[phase][rank] for rank in ranks] for phase in PHASES}
    charts = [DurationChart("time of each rank", [f"rank {rank}" for rank in ranks], seconds, x_label="seconds")]
    rows = [row for row in record.epochs if row.get("compute_seconds")]
    if len({row["epoch"] for row in rows}) > 1:
        by_epoch = {
            epoch: [row for row in rows if row["epoch"] == epoch] for epoch in sorted({row["epoch"] for row in rows})
        }
        mean = {
            phase: [
                sum(sum(row[f"{phase}_seconds"]) / len(row[f"{phase}_seconds"]) for row in group)
                for group in by_epoch.values()
            ]
            for phase in PHASES
        }
        labels = [str(epoch) for epoch in by_epoch]
        charts.append(
            DurationChart("time of each epoch, mean over ranks", labels, mean, is_vertical=True, x_label="epoch")
        )
    return charts


def shown_ranks(times: run_statistics.RankTimes) -> list[int]:
    """Return the ranks to show: all ranks, or the ranks with the most work if there are many."""
    work = times.work_seconds()
    return sorted(sorted(range(times.size), key=lambda rank: -work[rank])[:_MAX_BARS])


def _metric_chart(records: list[RunRecord], metric: str, in_epochs: bool) -> LineChart:
    is_comparison = len(records) > 1
    lines: list[Line] = []
    dots = []
    for run_index, record in enumerate(records):
        names = [name for name in run_statistics.result_names(record) if run_statistics.split_name(name)[1] == metric]
        between_epochs = run_statistics.chart_points(record.steps, "loss", in_epochs) if metric == "loss" else []
        if len(between_epochs) > 1 or not names:
            lines.append(Line("between epochs", between_epochs, run_index, "faint" if names else "solid"))
        for name in names:
            dataset, color = _DATASETS[run_statistics.split_name(name)[0]]
            style: Style = "dashed" if is_comparison and dataset == "training" and len(names) > 1 else "solid"
            lines.append(
                Line(
                    dataset,
                    run_statistics.chart_points(record.epochs, name, in_epochs),
                    run_index if is_comparison else color,
                    style,
                )
            )
            monitored, mode = run_statistics.monitored_result(record)
            if (
                name == monitored
                and not is_comparison
                and len(record.epochs) > 1
                and (best := run_statistics.best_value(record, name, mode))
            ):
                position = best.epochs if in_epochs else best.step
                dots.append((position, best.value, f"best: {best.value:.4g}", color))
    values = [value for line in lines for _, value in line.points if value is not None]
    is_logarithmic = (
        metric == "loss" and bool(values) and min(values) > 0 and max(values) / min(values) > _LOGARITHMIC_RATIO
    )
    return LineChart(metric, lines, "", has_legend=not is_comparison, is_logarithmic=is_logarithmic, dots=dots)


def _memory_chart(records: Sequence[RunRecord], in_epochs: bool) -> LineChart:
    """Return the chart of the memory of the ranks that use the most, or of the maximum over ranks for several runs.

    It has no line for a run in which this maximum has changed by less than 10 %.
    """
    lines = []
    for run_index, record in enumerate(records):
        rows = [row for row in record.steps if row.get("memory_bytes")]
        maxima = [max(row["memory_bytes"]) for row in rows]
        if not rows or max(maxima) < _MIN_MEMORY_GROWTH * min(maxima):
            continue
        last = rows[-1]["memory_bytes"]
        top_ranks = sorted(range(len(last)), key=lambda rank: -last[rank])[:_MAX_MEMORY_LINES]
        for index, ranks in enumerate(
            [[rank] for rank in sorted(top_ranks)] if len(records) == 1 else [range(len(last))]
        ):
            rows_in_gib = [
                {
                    **row,
                    "gib": max(row["memory_bytes"][rank] for rank in ranks if rank < len(row["memory_bytes"])) / _GIB,
                }
                for row in rows
                if ranks[0] < len(row["memory_bytes"])
            ]
            color = index if len(records) == 1 else run_index
            label = f"rank {ranks[0]}" if len(records) == 1 else record.name
            lines.append(Line(label, run_statistics.chart_points(rows_in_gib, "gib", in_epochs), color))
    return LineChart("memory, GiB", lines, "", has_legend=len(records) == 1, from_zero=True)


def _slow_rank_spans(records: Sequence[RunRecord], in_epochs: bool) -> list[tuple[float, float, str]]:
    if len(records) > 1:
        return []
    periods = run_statistics.slow_periods(records[0], in_epochs)
    spans = [(*period.positions, f"rank {period.straggler.rank} slow") for period in periods]
    return [(begin, end, label) for begin, end, label in spans if end > begin]


def _resumption_marks(record: RunRecord, in_epochs: bool) -> list[tuple[float, str]]:
    position = "epochs" if in_epochs else "step"
    marks = []
    for before, start in zip(record.starts, record.starts[1:], strict=False):
        changes = [
            f"{start[name]}{unit}"
            for name, unit in (("backend", ""), ("size", " ranks"))
            if start[name] != before[name]
        ]
        marks.append((start[position], ": ".join(["resumed", *([", ".join(changes)] if changes else [])])))
    return marks
