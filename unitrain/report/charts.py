"""Draw charts with matplotlib, as SVG with the colors of the HTML page, or as one PNG."""

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
from unitrain.report.run_statistics import Points

# Based on the color-blind-safe palette of Okabe and Ito. To support dark mode, `to_svg` replaces each color with the
# CSS variable of the same name, so all values must be distinct.
COLORS = {
    "run-0": "#0072b2", "run-1": "#d55e00", "run-2": "#009e73",
    "run-3": "#b8528f", "run-4": "#8a6d00", "run-5": "#2f9fd6",
    "data": "#e69f00", "compute": "#0173b3", "wait": "#d55e01", "update": "#009e74",
    "validation": "#56b4e9", "checkpoint": "#9a9a9a",
    "training": "#0173b5", "replayed": "#cc78bc", "startup": "#de8f05", "hosts": "#ca9161", "restart": "#d55e03",
    "other": "#949494",
    "forward": "#56b4ea", "backward": "#0173b4", "exposed": "#d55e02", "optimizer": "#009e75",
    "ink": "#1f2328", "muted": "#656d76", "grid": "#e4e7eb", "paper": "#ffffff",
}  # fmt: skip
NUM_RUN_COLORS = sum(name.startswith("run-") for name in COLORS)
_WIDTH, _HEIGHT = 5.4, 2.9
_STYLE: dict[Any, Any] = {
    "lines.solid_capstyle": "round",
    "text.parse_math": False,  # names of metrics may contain $
    "svg.fonttype": "none",  # keep text elements, rendered in the font of the page
    "font.family": "sans-serif",
    "font.sans-serif": ["Inter", "Helvetica Neue", "Arial", "DejaVu Sans"],
    "font.size": 8.5,
    "axes.edgecolor": COLORS["muted"],
    "axes.labelcolor": COLORS["muted"],
    "axes.titlecolor": COLORS["ink"],
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
    "grid.color": COLORS["grid"],
    "grid.linewidth": 0.8,
    "xtick.color": COLORS["muted"],
    "ytick.color": COLORS["muted"],
    "ytick.left": False,
    "text.color": COLORS["ink"],
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
}


Style = Literal["solid", "dashed", "faint"]


@dataclass(frozen=True)
class Line:
    """The points of one run, or of one series of a benchmark. `run_index` selects the color. A `faint` line shows
    values between epochs next to a `solid` line that shows one value per epoch."""

    label: str
    points: Points
    run_index: int = 0
    style: Style = "solid"


@dataclass(frozen=True)
class LineChart:
    """Values over epochs or steps, or over message sizes or numbers of ranks.

    `is_logarithmic` and `from_zero` refer to the y axis. `marks` are labeled x values: (x, label). `dots` are labeled
    points of a run: (x, y, label, run index). `spans` are labeled, shaded intervals of x: (begin, end, label). With
    `ticks`, a list of (x value, label), the x axis is logarithmic.
    """

    title: str
    lines: Sequence[Line]
    x_label: str
    has_legend: bool = True
    is_logarithmic: bool = False
    from_zero: bool = False
    marks: Sequence[tuple[float, str]] = ()
    dots: Sequence[tuple[float, float, str, int]] = ()
    spans: Sequence[tuple[float, float, str]] = ()
    ticks: Sequence[tuple[float, str]] = ()


@dataclass(frozen=True)
class DurationChart:
    """Stacked bars of durations by phase, one bar per label. Bars are horizontal, or vertical for numeric labels.

    The `durations` of vertical bars are in seconds. For horizontal bars, `x_label` names the unit.
    """

    title: str
    labels: Sequence[str]
    durations: Mapping[str, Sequence[float]]
    is_vertical: bool = False
    x_label: str = ""


Chart = LineChart | DurationChart


def to_svg(chart: Chart) -> str:
    """Return the chart as an SVG element with CSS variables as colors and without external resources."""
    with mpl.rc_context({**_STYLE, "svg.hashsalt": chart.title}):
        height = _HEIGHT
        if isinstance(chart, DurationChart) and not chart.is_vertical:
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
    for name, color in COLORS.items():
        svg = svg.replace(color, f"var(--{name})")
    return svg


def to_png(charts: Sequence[Chart], names: Sequence[str], path: Path) -> None:
    """Write the charts to one PNG with two columns. `names` are the names of the runs, or of the series of a benchmark.
    Raises ReportError if `charts` is empty.
    """
    if not charts:
        raise ReportError(
            f"{', '.join(names)}: nothing has been recorded yet, so there is nothing to draw. Wait until the first "
            "loss is recorded: after about two seconds, or after TrainConfig.log_every_n_steps steps."
        )
    with mpl.rc_context(_STYLE):
        rows = -(-len(charts) // 2)
        figure = Figure(figsize=(2 * _WIDTH + 0.4, rows * (_HEIGHT + 0.25) + 0.4), layout="constrained", dpi=160)
        if len(names) == 1:
            figure.suptitle(names[0], x=0.012, ha="left", fontsize=12, fontweight="bold")
        else:
            runs = [
                Line2D([], [], color=COLORS[f"run-{run_index % NUM_RUN_COLORS}"], label=_legend_text(name))
                for run_index, name in enumerate(names)
            ]
            figure.legend(handles=runs, loc="outside upper left", ncols=4, fontsize=10)
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # type: ignore[union-attr, call-arg]
        axes = figure.subplots(rows, 2, squeeze=False).flat
        for panel, chart in zip(axes, charts, strict=False):
            _draw(panel, chart)
        for panel in list(figure.axes)[len(charts) :]:
            panel.remove()
        figure.savefig(path, format="png", facecolor=COLORS["paper"])


def _draw(axes: Axes, chart: Chart) -> None:
    axes.set_title(chart.title)
    axes.set_xlabel(chart.x_label)
    axes.xaxis.set_major_formatter(FuncFormatter(_format_tick))
    axes.yaxis.set_major_formatter(FuncFormatter(_format_tick))
    if isinstance(chart, LineChart):
        _draw_lines(axes, chart)
    elif chart.is_vertical:
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
        axes.tick_params(axis="y", labelcolor=COLORS["ink"])


def _draw_lines(axes: Axes, chart: LineChart) -> None:
    last_run = max((line.run_index for line in chart.lines), default=0)
    for line in chart.lines:
        if not line.points:
            continue
        x, y = zip(*line.points, strict=True)
        values = [float("nan") if value is None else value for value in y]
        options: dict[str, Any] = {
            "color": COLORS[f"run-{line.run_index % NUM_RUN_COLORS}"],
            "label": _legend_text(line.label),
        }
        if line.style == "faint":
            options |= {"linewidth": 0.9, "alpha": 0.4, "zorder": 1.5}
        else:
            # Markers make isolated points between gaps visible.
            options |= {"marker": "o", "markersize": 3.2 if len(values) <= 40 else 0.8}
            options["linestyle"] = (0, (4, 2)) if line.style == "dashed" else "-"
            if not chart.has_legend:
                # A chart of several runs has no legend. The lines of earlier runs are wider, so that they remain
                # visible below the lines of later runs with equal values.
                options["linewidth"] = 1.3 + 1.1 * (last_run - line.run_index)
        axes.plot(x, values, **options)
    if chart.is_logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(_format_tick))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
    positions = [position for line in chart.lines for position, _ in line.points]
    if chart.ticks:
        axes.set_xscale("log")
        axes.set_xticks(*zip(*chart.ticks, strict=True), minor=False)
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        extent = max(positions, default=0.0) - min(positions, default=0.0)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=not 0 < extent < 1, min_n_ticks=1))
    axes.margins(x=0.03, y=0.1)
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    for begin, end, label in chart.spans:
        axes.axvspan(begin, end, color=COLORS["wait"], alpha=0.16, linewidth=0, zorder=0)
        axes.annotate(
            label, ((begin + end) / 2, 0), xycoords=("data", "axes fraction"), xytext=(0, 3),
            textcoords="offset points", ha="center", va="bottom", fontsize=7.5, color=COLORS["wait"],
        )  # fmt: skip
    for position, label in chart.marks:
        axes.axvline(position, color=COLORS["muted"], linewidth=0.8, linestyle=(0, (1, 2)))
        axes.annotate(
            label, (position, 0), xycoords=("data", "axes fraction"), xytext=(3, 3), textcoords="offset points",
            va="bottom", fontsize=7.5, color=COLORS["muted"],
        )  # fmt: skip
    for position, value, label, run_index in chart.dots:
        color = COLORS[f"run-{run_index % NUM_RUN_COLORS}"]
        axes.plot([position], [value], "o", markersize=7, markerfacecolor="none", markeredgecolor=color)
        axes.annotate(
            label, (position, value), xytext=(0, 8), textcoords="offset points", ha="center",
            fontsize=8, fontweight="bold", color=color,
        )  # fmt: skip
    if chart.has_legend and len(chart.lines) > 1:
        _add_legend(axes, len(chart.lines))


def _draw_bars(axes: Axes, chart: DurationChart, draw: Callable[..., Any], offset_keyword: str) -> None:
    offsets = [0.0] * len(chart.labels)
    positions = [float(label) for label in chart.labels] if chart.is_vertical else range(len(chart.labels))
    options = {"linewidth": 0.6, "edgecolor": COLORS["paper"]}
    for phase, values in chart.durations.items():
        if any(values):
            draw(positions, values, 0.72, **{offset_keyword: offsets}, color=COLORS[phase], label=phase, **options)
        offsets = [base + value for base, value in zip(offsets, values, strict=True)]
    if not chart.is_vertical:
        axes.set_yticks(positions, chart.labels)
    _add_legend(axes, sum(any(values) for values in chart.durations.values()))


def _add_legend(axes: Axes, num_entries: int) -> None:
    options: dict[str, Any] = {"columnspacing": 1.1, "handlelength": 1.1, "handletextpad": 0.5, "ncols": num_entries}
    if num_entries > 3:  # the legend is too wide for the title line, so it is placed between the title and the axes
        axes.set_title(axes.get_title(loc="left"), pad=24)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderpad=0, borderaxespad=0.7, **options)
    else:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), borderpad=0, borderaxespad=1.2, **options)


def _legend_text(text: str) -> str:
    """Return `text` for a legend. matplotlib omits texts that begin with an underscore."""
    return f" {text}" if text.startswith("_") else text


def _format_tick(value: float, _: int = 0) -> str:
    """Format a number compactly, such as 12,000, 0.0025 or 2.5e-5."""
    if 0 < abs(value) < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
