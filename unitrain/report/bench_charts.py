"""Draw the results of `unitrain bench`: a PNG, or an HTML page with charts and a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unitrain.bench.results import (
    PHASES,
    bus_factor,
    efficiency,
    format_bytes,
    quartiles,
    row_name,
    row_names,
    samples_per_second,
)
from unitrain.report.charts import COLORS, NUM_RUN_COLORS, Chart, DurationChart, Line, LineChart, to_png, to_svg
from unitrain.report.page import load_template


def draw(result: dict[str, Any], output: Path, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write the charts of a result to `output`: a .png file, or a .html page with charts and the table."""
    series = legend_names(result)
    charts = _CHARTS[result["kind"]](result)
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.suffix == ".png":
        to_png(charts, series, output)
        return
    page = load_template("bench.html").render(
        colors=COLORS,
        title=_title(result),
        environment=_environment(result),
        names=[(name, f"run-{run_index % NUM_RUN_COLORS}") for run_index, name in enumerate(series)],
        charts=[(chart.title, to_svg(chart)) for chart in charts],
        headings=headings,
        rows=rows,
        version=result["unitrain"],
    )
    output.write_text(page, encoding="utf-8")


def _title(result: dict[str, Any]) -> str:
    if result["kind"] == "prediction":
        return f"prediction for {result['model']['parameters']:,.0f} parameters"
    return result["target"] if result["kind"] == "train" else f"collectives on {result['ranks']} ranks"


def _environment(result: dict[str, Any]) -> str:
    """Return the hosts and software of a measurement, or the assumptions of a prediction."""
    if result["kind"] == "prediction":
        return "Predicted with an alpha-beta model. Data loading and differences between ranks are not included."
    machine = result["machine"]
    gpu = f", {machine['gpu']}" if machine["gpu"] else ""
    return (
        f"{result.get('num_nodes', 1)} host(s), {result['device']}{gpu}; {machine['processors']} processors, "
        f"{machine['system']}, torch {machine['torch']}, Python {machine['python']}"
    )


def legend_names(result: dict[str, Any]) -> list[str]:
    """Return the legend entries: backends and lower bounds, or the networks and algorithms of a prediction."""
    if result["kind"] == "prediction":
        return list(dict.fromkeys(_network_label(row) for row in result["rows"]))
    return [*row_names(result), *dict.fromkeys(floor["name"] for floor in result.get("floors", ()))]


def collective_charts(result: dict[str, Any]) -> list[Chart]:
    """Return two charts per operation against message size: time per call, and bus bandwidth with upper bounds."""
    series = legend_names(result)
    sizes = sorted({row["bytes"] for row in result["rows"]})
    ticks = [(size, format_bytes(size).replace(" ", "")) for size in sizes[:: -(-len(sizes) // 6)]]
    # The floors are lower bounds on the time, that is, upper bounds on the bandwidth. They are not multiplied by the
    # bus factor, because bus bandwidth is comparable with the bandwidth of the hardware.
    floors = [
        Line(
            name,
            [(row["bytes"], _algorithm_bandwidth(row)) for row in result["floors"] if row["name"] == name],
            series.index(name),
            "dashed",
        )
        for name in dict.fromkeys(floor["name"] for floor in result["floors"])
    ]
    charts: list[Chart] = []
    for operation in dict.fromkeys(row["operation"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["operation"] == operation]
        factor = bus_factor(operation, result["ranks"])
        times, speeds = [], []
        for name in row_names(result):
            rows_of_name = [row for row in rows if row_name(row) == name]
            times.append(
                Line(name, [(row["bytes"], quartiles(row["seconds"])[1]) for row in rows_of_name], series.index(name))
            )
            speeds.append(
                Line(
                    name,
                    [(row["bytes"], factor * _algorithm_bandwidth(row)) for row in rows_of_name],
                    series.index(name),
                )
            )
        options: dict[str, Any] = {"x_label": "size", "has_legend": False, "is_logarithmic": True, "ticks": ticks}
        charts.append(LineChart(f"{operation}: seconds", times, **options))
        charts.append(LineChart(f"{operation}: bus bandwidth, GB/s", [*speeds, *floors], **options))
    return charts


def _algorithm_bandwidth(row: dict[str, Any]) -> float:
    """Return the algorithm bandwidth (bytes / seconds) in GB/s."""
    return float(row["bytes"] / quartiles(row["seconds"])[1] / 1e9)


def prediction_charts(result: dict[str, Any]) -> list[Chart]:
    """Return charts of efficiency and step time against the number of ranks."""
    series = legend_names(result)
    ranks = sorted({row["ranks"] for row in result["rows"]})
    options: dict[str, Any] = {
        "x_label": "ranks",
        "has_legend": False,
        "ticks": [(n, str(n)) for n in ranks],
    }

    def lines(column: str, factor: float = 1.0) -> list[Line]:
        return [
            Line(
                name,
                [(row["ranks"], factor * row[column]) for row in result["rows"] if _network_label(row) == name],
                run_index,
            )
            for run_index, name in enumerate(series)
        ]

    return [
        LineChart("efficiency, %", lines("efficiency", 100.0), from_zero=True, **options),
        LineChart("seconds per step", lines("step_seconds"), is_logarithmic=True, **options),
    ]


def _network_label(row: dict[str, Any]) -> str:
    return f"{row['name']} {row['algorithm']}".strip()


def train_charts(result: dict[str, Any]) -> list[Chart]:
    """Return charts of time per phase, and of throughput and efficiency against the number of ranks."""
    rows = sorted(result["rows"], key=lambda row: (row["setting"] or "", row["ranks"]))
    labels = [f"{row_name(row)}, {row['ranks']}" for row in rows]
    phases = {phase: [1000 * quartiles(row["phases"][phase])[1] for row in rows] for phase in PHASES}
    charts: list[Chart] = [
        DurationChart("time per phase of a step, mean over ranks", labels, phases, x_label="milliseconds")
    ]
    ranks = sorted({row["ranks"] for row in rows})
    if len(ranks) > 1:
        options: dict[str, Any] = {
            "x_label": "ranks", "has_legend": False, "from_zero": True, "ticks": [(n, str(n)) for n in ranks],
        }  # fmt: skip
        for title, compute in (
            ("samples per second", samples_per_second),
            ("efficiency, %", _efficiency_function(result)),
        ):
            lines = [
                # Every line starts at the single-rank measurement, which is shared by all backends.
                Line(name, [(row["ranks"], compute(row)) for row in rows if _is_on_line(row, name)], run_index)
                for run_index, name in enumerate(row_names(result))
            ]
            charts.append(LineChart(title, lines, **options))
    return charts


def _is_on_line(row: dict[str, Any], name: str) -> bool:
    """Return whether a row is on the line of `name`: its name matches, or it was measured on one rank with the same
    setting."""
    setting = name.partition(", ")[2] or None
    return row_name(row) == name or (row["ranks"] == 1 and row["setting"] == setting and row["backend"] == "local")


def _efficiency_function(result: dict[str, Any]) -> Callable[[dict[str, Any]], float | None]:
    """Return the function that returns the scaling efficiency of a row in percent, or None if it is unknown."""

    def compute_percent(row: dict[str, Any]) -> float | None:
        relative_throughput = efficiency(result, row)
        return None if relative_throughput is None else 100 * relative_throughput

    return compute_percent


_CHARTS: dict[str, Callable[[dict[str, Any]], Sequence[Chart]]] = {
    "collectives": collective_charts,
    "train": train_charts,
    "prediction": prediction_charts,
}
