"""Which charts a report has: what of the runs is put into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unitrain.report import figures
from unitrain.report.charts import Chart, Line, LineChart, Style, TimeChart
from unitrain.report.record import Record

_MOST_RANKS = 24
# From this ratio of the highest to the lowest loss on, its axis is logarithmic.
_WIDE = 30
_PARTS_OF_DATA = {"train": ("training", 0), "val": ("validation", 1), "": ("", 2)}


def all_charts(records: Sequence[Record]) -> list[Chart]:
    """Return every chart, results first."""
    return [*result_charts(records), *time_charts(records)]


def result_charts(records: Sequence[Record]) -> list[LineChart]:
    """Return a chart of the loss, of every metric, of the learning rate and of the speed, as far as there is any."""
    records = list(records)
    in_epochs = figures.counts_epochs(records)
    marks = _resumed(records[0], in_epochs) if len(records) == 1 else []
    charts = [_metric_chart(records, metric, in_epochs) for metric in figures.metrics(records)]
    for title, name in (("learning rate", "learning_rate"), ("samples per second", "samples_per_second")):
        lines = []
        for run, record in enumerate(records):
            rows = record.epochs
            if name == "learning_rate":
                rows = sorted([*record.epochs, *record.steps], key=lambda row: int(row["step"]))
            elif len(record.steps) > len(record.epochs):
                style: Style = "faint" if record.epochs else "solid"
                lines.append(Line("between epochs", figures.points(record.steps, name, in_epochs), run, style))
            lines.append(Line(record.name, figures.points(rows, name, in_epochs), run))
        spells = _spells(records, in_epochs) if name == "samples_per_second" else []
        charts.append(LineChart(title, lines, "", legend=False, from_zero=True, spells=spells))
    x_label = "epoch" if in_epochs else "step"
    return [
        replace(chart, x_label=x_label, marks=marks) for chart in charts if any(line.points for line in chart.lines)
    ]


def time_charts(records: Sequence[Record]) -> list[TimeChart]:
    """Return a chart of where each rank's time went and when, or, of several runs, of where an epoch's went."""
    times = [(record, rank_times) for record in records if (rank_times := figures.rank_times(record))]
    if len(records) > 1:
        seconds = {part: [one.mean(part) / one.epochs for _, one in times] for part in figures.PARTS}
        title = "where an epoch's time goes, mean over ranks"
        return [TimeChart(title, [record.name for record, _ in times], seconds, x_label="seconds per epoch")][
            : len(times)
        ]
    if not times:
        return []
    record, one = times[0]
    ranks = shown_ranks(one)
    seconds = {part: [one.seconds[part][rank] for rank in ranks] for part in figures.PARTS}
    charts = [TimeChart("where each rank's time went", [f"rank {rank}" for rank in ranks], seconds, x_label="seconds")]
    rows = [row for row in record.epochs if row.get("compute_seconds")]
    if len({row["epoch"] for row in rows}) > 1:
        by_epoch = {
            epoch: [row for row in rows if row["epoch"] == epoch] for epoch in sorted({row["epoch"] for row in rows})
        }
        mean = {
            part: [
                sum(sum(row[f"{part}_seconds"]) / len(row[f"{part}_seconds"]) for row in group)
                for group in by_epoch.values()
            ]
            for part in figures.PARTS
        }
        labels = [str(epoch) for epoch in by_epoch]
        charts.append(TimeChart("where it went, mean over ranks", labels, mean, standing=True, x_label="epoch"))
    return charts


def shown_ranks(times: figures.RankTimes) -> list[int]:
    """Return the ranks to show: all, or of very many those with the most work of their own."""
    work = times.own_work()
    return sorted(sorted(range(times.size), key=lambda rank: -work[rank])[:_MOST_RANKS])


def _metric_chart(records: list[Record], metric: str, in_epochs: bool) -> LineChart:
    compared = len(records) > 1
    lines: list[Line] = []
    dots = []
    for run, record in enumerate(records):
        names = [name for name in figures.result_names(record) if figures.split_name(name)[1] == metric]
        looks = figures.points(record.steps, "loss", in_epochs) if metric == "loss" else []
        if len(looks) > 1 or not names:
            lines.append(Line("between epochs", looks, run, "faint" if names else "solid"))
        for name in names:
            part, colour = _PARTS_OF_DATA[figures.split_name(name)[0]]
            style: Style = "dashed" if compared and part == "training" and len(names) > 1 else "solid"
            lines.append(Line(part, figures.points(record.epochs, name, in_epochs), run if compared else colour, style))
            judged, mode = figures.judged_by(record)
            if (
                name == judged
                and not compared
                and len(record.epochs) > 1
                and (best := figures.best(record, name, mode))
            ):
                position = best.position if in_epochs else best.step
                dots.append((position, best.value, f"best: {best.value:.4g}", colour))
    values = [value for line in lines for _, value in line.points if value is not None]
    wide = metric == "loss" and bool(values) and min(values) > 0 and max(values) / min(values) > _WIDE
    return LineChart(metric, lines, "", legend=not compared, logarithmic=wide, dots=dots)


def _spells(records: Sequence[Record], in_epochs: bool) -> list[tuple[float, float, str]]:
    if len(records) > 1:
        return []
    spells = [
        (*spell.positions, f"rank {spell.straggler.rank} slow") for spell in figures.spells(records[0], in_epochs)
    ]
    return [(begin, end, word) for begin, end, word in spells if end > begin]


def _resumed(record: Record, in_epochs: bool) -> list[tuple[float, str]]:
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
