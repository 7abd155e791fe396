"""Print results as tables."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from unitrain.bench.comparison import Difference
from unitrain.bench.results import (
    PHASES,
    bus_factor,
    efficiency,
    format_bytes,
    format_seconds,
    quartiles,
    row_name,
    row_names,
    samples_per_second,
)
from unitrain.output import plain_console

_WIDTH_WITHOUT_TERMINAL = 260  # wide enough to avoid wrapped cells


def create_console() -> Console:
    """Return the console for tables."""
    terminal = plain_console(soft_wrap=True)
    return terminal if terminal.is_terminal else plain_console(soft_wrap=True, width=_WIDTH_WITHOUT_TERMINAL)


def collectives(result: dict[str, Any]) -> Table:
    """Return a table with a row per operation and size: time and bandwidths per backend, and the lower bounds."""
    ranks = result["ranks"]
    nodes = "one host" if result["num_nodes"] == 1 else f"{result['num_nodes']} hosts"
    rounds = len(result["rows"][0]["seconds"]) if result["rows"] else 0
    table = create_table(
        f"{ranks} ranks on {nodes}, {result['device']}; medians of {rounds} rounds; "
        "1 GB/s is 10^9 bytes per second; algorithm and bus bandwidth as in nccl-tests"
    )
    backends = row_names(result)
    floors = list(dict.fromkeys(floor["name"] for floor in result["floors"]))
    table.add_column("operation")
    table.add_column("size", justify="right")
    for name in backends:
        for heading in (name, "alg GB/s", "bus GB/s"):
            table.add_column(heading, justify="right")
    for floor in floors:
        table.add_column(f"{floor} GB/s", justify="right", style="dim")
    speed = {(row["name"], row["bytes"]): row["bytes"] / quartiles(row["seconds"])[1] / 1e9 for row in result["floors"]}
    seconds_by_case = {
        (row_name(row), row["operation"], row["bytes"]): quartiles(row["seconds"])[1] for row in result["rows"]
    }
    pairs = list(dict.fromkeys((row["operation"], row["bytes"]) for row in result["rows"]))
    for index, (operation, size) in enumerate(pairs):
        cells = [operation, format_bytes(size)]
        for name in backends:
            seconds = seconds_by_case.get((name, operation, size))
            if seconds is None:
                cells += ["", "", ""]
                continue
            algorithm = size / seconds / 1e9
            cells += [format_seconds(seconds), f"{algorithm:.3g}", f"{algorithm * bus_factor(operation, ranks):.3g}"]
        cells += [f"{speed[floor, size]:.3g}" if (floor, size) in speed else "" for floor in floors]
        is_last_of_operation = index + 1 == len(pairs) or pairs[index + 1][0] != operation
        table.add_row(*cells, end_section=is_last_of_operation)
    return table


def train(result: dict[str, Any]) -> Table:
    """Return a table with a row per setting, number of ranks and backend: throughput, efficiency, time, and memory."""
    rounds = len(result["rows"][0]["seconds"])
    table = create_table(
        f"{result['target']}: {result['parameters']:,} parameters, {result['device']}; medians of {rounds} rounds of "
        f"{result['steps']} steps; efficiency relative to one rank; phases of a step in ms, mean over ranks"
    )
    for heading in ("ranks", "backend"):
        table.add_column(heading)
    for heading in ("samples/s", "efficiency", "step", *PHASES, "memory"):
        table.add_column(heading, justify="right", overflow="fold")
    rows = sorted(result["rows"], key=lambda row: (row.get("setting") or "", row["ranks"]))
    for index, row in enumerate(rows):
        relative_throughput = efficiency(result, row)
        table.add_row(
            str(row["ranks"]),
            row_name(row),
            f"{samples_per_second(row):,.4g}",
            "" if relative_throughput is None else f"{relative_throughput:.1%}",
            format_seconds(quartiles(row["seconds"])[1]),
            *(f"{quartiles(row['phases'][phase])[1] * 1000:.3g}" for phase in PHASES),
            format_bytes(row["memory"]),
            end_section=index + 1 == len(rows) or rows[index + 1]["ranks"] != row["ranks"],
        )
    return table


def differences_table(differences: list[Difference]) -> Table:
    """Return a table with a row per measurement shared by two results."""
    table = create_table(
        "ratio: time before / time after (above 1, the second result is faster); in brackets: lower and upper quartile"
    )
    table.add_column("")
    for heading in ("before", "after", "ratio"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for difference in differences:
        quartile_texts = [
            f"{format_seconds(median)} [{format_seconds(low)}, {format_seconds(high)}]"
            for low, median, high in (difference.before, difference.after)
        ]
        table.add_row(difference.name, *quartile_texts, f"{difference.speedup:.3f}", difference.verdict)
    return table


def prediction(result: dict[str, Any]) -> Table:
    """Return a table with a row per number of ranks: step time, exposed communication and efficiency."""
    model = result["model"]
    table = create_table(
        f"{model['parameters']:,.0f} parameters of {model['bytes_per_parameter']:g} bytes, "
        f"{format_seconds(model['step_seconds'])} per step on one rank, {model['backward_share']:.0%} of it in backward"
    )
    table.add_column("ranks", justify="right")
    columns = list(dict.fromkeys((row["name"], row["algorithm"]) for row in result["rows"]))
    for name, algorithm in columns:
        for heading in (f"{name} {algorithm}".strip(), "exposed", "efficiency"):
            table.add_column(heading, justify="right", overflow="fold")
    row_by_case = {(row["name"], row["algorithm"], row["ranks"]): row for row in result["rows"]}
    for ranks in dict.fromkeys(row["ranks"] for row in result["rows"]):
        cells = [f"{ranks:,}"]
        for name, algorithm in columns:
            row = row_by_case[name, algorithm, ranks]
            cells += [
                format_seconds(row["step_seconds"]),
                format_seconds(row["exposed_seconds"]) if row["exposed_seconds"] else "0",
                f"{row['efficiency']:.1%}",
            ]
        table.add_row(*cells)
    return table


def method_prediction(result: dict[str, Any]) -> Table:
    """Return a table with a row per network, number of ranks and method: step time, exposed communication, and bytes
    sent per step."""
    model = result["model"]
    table = create_table(
        f"{model['parameters']:,.0f} parameters, {format_seconds(model['step_seconds'])} per step on one rank, "
        f"{result['local_steps']} local steps"
    )
    has_names = any(row["name"] for row in result["rows"])
    for heading in (["network"] if has_names else []) + ["method"]:
        table.add_column(heading)
    for heading in ("ranks", "step", "exposed", "sent per step", "speedup"):
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        table.add_row(
            *([row["name"]] if has_names else []),
            row["method"],
            f"{row['ranks']:,}",
            format_seconds(row["step_seconds"]),
            format_seconds(row["exposed_seconds"]) if row["exposed_seconds"] else "0",
            format_bytes(round(row["sent_bytes"])),
            f"{row['speedup']:.2f}",
        )
    return table


def table_notes(result: dict[str, Any]) -> list[str]:
    """Return the notes to print below a table.

    A note on training states that ranks share processors. The notes on a prediction contain the networks and the errors
    of their fits, the settings of methods, and comparisons with measured steps.
    """
    notes = []
    processors = result.get("machine", {}).get("processors")
    max_ranks = max((row.get("ranks", 0) for row in result["rows"]), default=0)
    if result["kind"] == "train" and result["device"] == "cpu" and processors is not None and max_ranks > processors:
        notes.append(
            f"{max_ranks} ranks share {processors} processors, so waiting times include the computation of other ranks."
        )
    for fit in result.get("networks", ()):
        bandwidth = f"{1 / fit['beta'] / 1e9:.3g} GB/s" if fit["beta"] else "unlimited"
        line = (
            f"{fit['name']} {fit['algorithm']}".strip() + f": {format_seconds(fit['alpha'])} per message, {bandwidth}"
        )
        if fit["overhead_seconds"]:
            line += f", {format_seconds(fit['overhead_seconds'])} per operation"
        if fit["max_error"] is not None:
            line += (
                f", fitted to {len(fit['points'])} measurements: median error {fit['median_error']:.0%}, "
                f"largest error {fit['max_error']:.0%}"
            )
        notes.append(line)
    notes += [f"{method}: TrainConfig({setting})" for method, setting in result.get("settings", {}).items() if setting]
    notes += [
        f"{point['name']} on {point['ranks']} ranks: measured {format_seconds(point['measured'])} per step, predicted "
        f"{format_seconds(point['predicted'])} ({point['algorithm']}): {point['relative_error']:+.0%}"
        for point in result.get("measured", ())
    ]
    return notes


def create_table(title: str) -> Table:
    """Return a table without columns."""
    return Table(title=title, title_justify="left", title_style="", box=SIMPLE_HEAD, pad_edge=False)


def table_texts(table: Table) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the cells of a table, for an HTML page."""
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    return [str(column.header) for column in table.columns], [list(row) for row in zip(*columns, strict=True)]
