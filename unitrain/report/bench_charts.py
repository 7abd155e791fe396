"""What `unitrain bench` measured as charts: a PNG, or a page with the figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2

from unitrain.bench.bandwidth import bus_factor
from unitrain.bench.results import PARTS, efficiency, middle, name_of, names, samples_per_second, shown_bytes
from unitrain.report.charts import COLOURS, RUNS, Chart, Line, LineChart, TimeChart, to_png, to_svg


def draw(result: dict[str, Any], output: Path, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write the charts of a result to `output`, a .png, or a .html page that has the figures as a table too."""
    who = shown_names(result)
    charts = _CHARTS[result["kind"]](result)
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.suffix == ".png":
        to_png(charts, who, output)
        return
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    page = environment.get_template("bench.html").render(
        colours=COLOURS,
        title=_title(result),
        place=_place(result),
        names=[(name, f"run-{run % RUNS}") for run, name in enumerate(who)],
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


def _place(result: dict[str, Any]) -> str:
    """Return where it was measured, or what a prediction goes by."""
    if result["kind"] == "prediction":
        return "By an alpha-beta model; slower ranks and input are left out."
    machine = result["machine"]
    gpu = f", {machine['gpu']}" if machine["gpu"] else ""
    return (
        f"{result.get('num_nodes', 1)} host(s), {result['device']}{gpu}; {machine['processors']} processors, "
        f"{machine['system']}, torch {machine['torch']}, Python {machine['python']}"
    )


def shown_names(result: dict[str, Any]) -> list[str]:
    """Return everyone who has a colour: who was measured, then the floors; or each network and algorithm."""
    if result["kind"] == "prediction":
        return list(dict.fromkeys(_network(row) for row in result["rows"]))
    return [*names(result), *dict.fromkeys(floor["name"] for floor in result.get("floors", ()))]


def collective_charts(result: dict[str, Any]) -> list[Chart]:
    """Return two charts for each operation: the time of a call by its size, and the bus bandwidth with the floors."""
    who = shown_names(result)
    sizes = sorted({row["bytes"] for row in result["rows"]})
    ticks = [(size, shown_bytes(size).replace(" ", "")) for size in sizes[:: -(-len(sizes) // 6)]]
    floors = [
        Line(
            name,
            [(one["bytes"], _speed(one)) for one in result["floors"] if one["name"] == name],
            who.index(name),
            "dashed",
        )
        for name in dict.fromkeys(floor["name"] for floor in result["floors"])
    ]
    charts: list[Chart] = []
    for operation in dict.fromkeys(row["operation"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["operation"] == operation]
        factor = bus_factor(operation, result["ranks"])
        times, speeds = [], []
        for name in names(result):
            own = [row for row in rows if name_of(row) == name]
            times.append(Line(name, [(row["bytes"], middle(row["seconds"])[1]) for row in own], who.index(name)))
            speeds.append(Line(name, [(row["bytes"], factor * _speed(row)) for row in own], who.index(name)))
        look: dict[str, Any] = {"x_label": "size", "legend": False, "logarithmic": True, "ticks": ticks}
        charts.append(LineChart(f"{operation}: seconds", times, **look))
        charts.append(LineChart(f"{operation}: bus bandwidth, GB/s", [*speeds, *floors], **look))
    return charts


def _speed(row: dict[str, Any]) -> float:
    """Return the algorithm bandwidth in GB/s."""
    return float(row["bytes"] / middle(row["seconds"])[1] / 1e9)


def prediction_charts(result: dict[str, Any]) -> list[Chart]:
    """Return the efficiency and the seconds of a step by the number of ranks."""
    who = shown_names(result)
    ranks = sorted({row["ranks"] for row in result["rows"]})
    look: dict[str, Any] = {"x_label": "ranks", "legend": False, "ticks": [(one, str(one)) for one in ranks]}

    def lines(figure: str, factor: float = 1.0) -> list[Line]:
        return [
            Line(name, [(row["ranks"], factor * row[figure]) for row in result["rows"] if _network(row) == name], run)
            for run, name in enumerate(who)
        ]

    return [
        LineChart("efficiency, %", lines("efficiency", 100.0), from_zero=True, **look),
        LineChart("seconds of a step", lines("step_seconds"), logarithmic=True, **look),
    ]


def _network(row: dict[str, Any]) -> str:
    return f"{row['who']} {row['algorithm']}".strip()


def train_charts(result: dict[str, Any]) -> list[Chart]:
    """Return where a step's time goes, and speed and efficiency by the number of ranks."""
    rows = sorted(result["rows"], key=lambda row: (row["setting"] or "", row["ranks"]))
    labels = [f"{name_of(row)}, {row['ranks']}" for row in rows]
    parts = {part: [1000 * middle(row["parts"][part])[1] for row in rows] for part in PARTS}
    charts: list[Chart] = [
        TimeChart("where a step's time goes, mean over ranks", labels, parts, x_label="milliseconds")
    ]
    ranks = sorted({row["ranks"] for row in rows})
    if len(ranks) > 1:
        look: dict[str, Any] = {
            "x_label": "ranks", "legend": False, "from_zero": True, "ticks": [(one, str(one)) for one in ranks],
        }  # fmt: skip
        for title, figure in (("samples per second", samples_per_second), ("efficiency, %", _percent(result))):
            lines = [
                # From one rank on, which is the same for all backends.
                Line(name, [(row["ranks"], figure(row)) for row in rows if _continues(row, name)], run)
                for run, name in enumerate(names(result))
            ]
            charts.append(LineChart(title, lines, **look))
    return charts


def _continues(row: dict[str, Any], name: str) -> bool:
    """Whether a row belongs to the line of `name`: its own, or the one on a single rank with its setting."""
    setting = name.partition(", ")[2] or None
    return name_of(row) == name or (row["ranks"] == 1 and row["setting"] == setting and row["backend"] == "local")


def _percent(result: dict[str, Any]) -> Callable[[dict[str, Any]], float | None]:
    def figure(row: dict[str, Any]) -> float | None:
        share = efficiency(result, row)
        return None if share is None else 100 * share

    return figure


_CHARTS: dict[str, Callable[[dict[str, Any]], Sequence[Chart]]] = {
    "collectives": collective_charts,
    "train": train_charts,
    "prediction": prediction_charts,
}
