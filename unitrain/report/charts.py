"""The charts of a report, drawn with matplotlib: as SVG whose colours are the page's own, and as one PNG."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from unitrain.errors import ReportError
from unitrain.report.figures import Points

# After Okabe and Ito, which colour-blind readers can tell apart. A page replaces each by the variable of its name, so
# that it can have others where it is dark.
COLOURS = {
    "run-0": "#0072b2", "run-1": "#d55e00", "run-2": "#009e73",
    "run-3": "#b8528f", "run-4": "#8a6d00", "run-5": "#2f9fd6",
    "data": "#e69f00", "compute": "#0173b3", "wait": "#d55e01", "update": "#009e74",
    "validation": "#56b4e9", "checkpoint": "#9a9a9a",
    "forward": "#56b4ea", "backward": "#0173b4", "exposed": "#d55e02", "optimizer": "#009e75",
    "ink": "#1f2328", "muted": "#656d76", "grid": "#e4e7eb", "paper": "#ffffff",
}  # fmt: skip
RUNS = sum(name.startswith("run-") for name in COLOURS)
_WIDTH, _HEIGHT = 5.4, 2.9
_STYLE: dict[Any, Any] = {
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",  # text stays text, in the page's own font
    "font.family": "sans-serif",
    "font.sans-serif": ["Inter", "Helvetica Neue", "Arial", "DejaVu Sans"],
    "font.size": 8.5,
    "axes.edgecolor": COLOURS["muted"],
    "axes.labelcolor": COLOURS["muted"],
    "axes.titlecolor": COLOURS["ink"],
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": COLOURS["grid"],
    "grid.linewidth": 0.8,
    "xtick.color": COLOURS["muted"],
    "ytick.color": COLOURS["muted"],
    "ytick.left": False,
    "text.color": COLOURS["ink"],
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
}


Style = Literal["solid", "dashed", "faint"]


@dataclass(frozen=True)
class Line:
    """Points of one run; a `faint` one is what another one is the mean of."""

    label: str
    points: Points
    run: int = 0
    style: Style = "solid"


@dataclass(frozen=True)
class LineChart:
    """Values over epochs or steps. `marks` are positions to mark with a word, `dots` points with their label, and
    `spells` are shaded from a position to another, with a word. With `ticks`, (position, label) each, the positions
    are on a logarithmic axis.
    """

    title: str
    lines: Sequence[Line]
    x_label: str
    legend: bool = True
    logarithmic: bool = False
    from_zero: bool = False
    marks: Sequence[tuple[float, str]] = ()
    dots: Sequence[tuple[float, float, str, int]] = ()
    spells: Sequence[tuple[float, float, str]] = ()
    ticks: Sequence[tuple[float, str]] = ()


@dataclass(frozen=True)
class TimeChart:
    """Seconds by part, stacked: a bar for each label. They lie where the labels are names, and stand over numbers."""

    title: str
    labels: Sequence[str]
    seconds: Mapping[str, Sequence[float]]
    standing: bool = False
    x_label: str = ""


Chart = LineChart | TimeChart


def to_svg(chart: Chart) -> str:
    """Return the chart as an SVG element that takes its colours from the page and asks for nothing from outside."""
    with mpl.rc_context({**_STYLE, "svg.hashsalt": chart.title}):
        height = _HEIGHT
        if isinstance(chart, TimeChart) and not chart.standing:
            height = 1.15 + 0.24 * len(chart.labels)
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        _draw(figure.subplots(), chart)
        written = io.StringIO()
        figure.savefig(
            written, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    svg = written.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' (xmlns(:\w+)?|width|height|version)="[^"]*"', "", svg, count=5)
    svg = re.sub(r'<g id="\w+">', "<g>", svg)
    for name, colour in COLOURS.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg


def to_png(charts: Sequence[Chart], names: Sequence[str], path: Path) -> None:
    """Write the charts of the runs of these names to one PNG, two in a row. Raises ReportError where there are none."""
    if not charts:
        raise ReportError(
            f"Nothing has been recorded of {', '.join(names)} yet, so there is nothing to draw. Wait for the first "
            "loss, which is recorded every two seconds, or every TrainConfig.log_every_n_steps steps."
        )
    with mpl.rc_context(_STYLE):
        rows = -(-len(charts) // 2)
        figure = Figure(figsize=(2 * _WIDTH + 0.4, rows * (_HEIGHT + 0.25) + 0.4), layout="constrained", dpi=160)
        if len(names) == 1:
            figure.suptitle(names[0], x=0.012, ha="left", fontsize=12, fontweight="bold")
        else:
            runs = [Line2D([], [], color=COLOURS[f"run-{run % RUNS}"], label=name) for run, name in enumerate(names)]
            figure.legend(handles=runs, loc="outside upper left", ncols=4, fontsize=10)
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # type: ignore[union-attr, call-arg]
        axes = figure.subplots(rows, 2, squeeze=False).flat
        for place, chart in zip(axes, charts, strict=False):
            _draw(place, chart)
        for place in list(figure.axes)[len(charts) :]:
            place.remove()
        figure.savefig(path, format="png", facecolor=COLOURS["paper"])


def _draw(axes: Axes, chart: Chart) -> None:
    axes.set_title(chart.title)
    axes.set_xlabel(chart.x_label)
    axes.xaxis.set_major_formatter(FuncFormatter(_tick))
    axes.yaxis.set_major_formatter(FuncFormatter(_tick))
    if isinstance(chart, LineChart):
        _draw_lines(axes, chart)
    elif chart.standing:
        _draw_bars(axes, chart, axes.bar, "bottom")
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.set_ylabel("seconds")
    else:
        _draw_bars(axes, chart, axes.barh, "left")
        axes.grid(False, axis="y")
        axes.grid(True, axis="x")
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.invert_yaxis()
        axes.tick_params(axis="y", labelcolor=COLOURS["ink"])


def _draw_lines(axes: Axes, chart: LineChart) -> None:
    last_run = max((line.run for line in chart.lines), default=0)
    for line in chart.lines:
        if not line.points:
            continue
        x, y = zip(*line.points, strict=True)
        values = [float("nan") if value is None else value for value in y]
        look: dict[str, Any] = {"color": COLOURS[f"run-{line.run % RUNS}"], "label": line.label}
        if line.style == "faint":
            look |= {"linewidth": 0.9, "alpha": 0.4, "zorder": 1.5}
        else:
            # Where few points are far apart, and where one stands alone between gaps, a line would not show them.
            look |= {"marker": "o", "markersize": 3.2 if len(values) <= 40 else 0.8}
            look["linestyle"] = (0, (4, 2)) if line.style == "dashed" else "-"
            if not chart.legend:  # runs compared: where they are equal, those beneath show beside the one on top
                look["linewidth"] = 1.3 + 1.1 * (last_run - line.run)
        axes.plot(x, values, **look)
    if chart.logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(_tick))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
    positions = [position for line in chart.lines for position, _ in line.points]
    if chart.ticks:
        axes.set_xscale("log")
        axes.set_xticks(*zip(*chart.ticks, strict=True), minor=False)
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=not 0 < max(positions) - min(positions) < 1, min_n_ticks=1))
    axes.margins(x=0.03, y=0.1)
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    for begin, end, word in chart.spells:
        axes.axvspan(begin, end, color=COLOURS["wait"], alpha=0.16, linewidth=0, zorder=0)
        axes.annotate(
            word, ((begin + end) / 2, 0), xycoords=("data", "axes fraction"), xytext=(0, 3), textcoords="offset points",
            ha="center", va="bottom", fontsize=7.5, color=COLOURS["wait"],
        )  # fmt: skip
    for position, word in chart.marks:
        axes.axvline(position, color=COLOURS["muted"], linewidth=0.8, linestyle=(0, (1, 2)))
        axes.annotate(
            word, (position, 0), xycoords=("data", "axes fraction"), xytext=(3, 3), textcoords="offset points",
            va="bottom", fontsize=7.5, color=COLOURS["muted"],
        )  # fmt: skip
    for position, value, label, run in chart.dots:
        colour = COLOURS[f"run-{run % RUNS}"]
        axes.plot([position], [value], "o", markersize=7, markerfacecolor="none", markeredgecolor=colour)
        axes.annotate(
            label, (position, value), xytext=(0, 8), textcoords="offset points", ha="center",
            fontsize=8, fontweight="bold", color=colour,
        )  # fmt: skip
    if chart.legend and len(chart.lines) > 1:
        _legend_above(axes, len(chart.lines))


def _draw_bars(axes: Axes, chart: TimeChart, draw: Callable[..., Any], offset: str) -> None:
    before = [0.0] * len(chart.labels)
    places = [float(label) for label in chart.labels] if chart.standing else range(len(chart.labels))
    look = {"linewidth": 0.6, "edgecolor": COLOURS["paper"]}
    for part, values in chart.seconds.items():
        if any(values):
            draw(places, values, 0.72, **{offset: before}, color=COLOURS[part], label=part, **look)
        before = [base + value for base, value in zip(before, values, strict=True)]
    if not chart.standing:
        axes.set_yticks(places, chart.labels)
    _legend_above(axes, sum(any(values) for values in chart.seconds.values()))


def _legend_above(axes: Axes, entries: int) -> None:
    look: dict[str, Any] = {"columnspacing": 1.1, "handlelength": 1.1, "handletextpad": 0.5, "ncols": entries}
    if entries > 3:  # no room beside the title: between it and the axes
        axes.set_title(axes.get_title(loc="left"), pad=24)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderpad=0, borderaxespad=0.7, **look)
    else:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), borderpad=0, borderaxespad=1.2, **look)


def _tick(value: float, _: int = 0) -> str:
    """Return a number as people write it: 12,000, 0.0025, 2.5e-5."""
    if 0 < abs(value) < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
