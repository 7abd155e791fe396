"""Results as tables on the terminal."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from unitrain.bench.bandwidth import bus_factor
from unitrain.bench.comparison import Difference
from unitrain.bench.results import (
    PARTS,
    efficiency,
    middle,
    name_of,
    names,
    samples_per_second,
    shown_bytes,
    shown_seconds,
)

_WIDTH = 260  # where there is no terminal: no cell is broken into lines


def console() -> Console:
    """Return what tables are printed on."""
    terminal = Console(highlight=False, soft_wrap=True)
    return terminal if terminal.is_terminal else Console(highlight=False, soft_wrap=True, width=_WIDTH)


def collectives(result: dict[str, Any]) -> Table:
    """Return a row for each operation and size: time, and algorithm and bus bandwidth, of each backend; the floors."""
    ranks = result["ranks"]
    nodes = "one host" if result["num_nodes"] == 1 else f"{result['num_nodes']} hosts"
    rounds = len(result["rows"][0]["seconds"]) if result["rows"] else 0
    table = table_of(
        f"{ranks} ranks on {nodes}, {result['device']}; medians of {rounds} rounds; "
        "GB/s are 10^9 bytes a second, algorithm and bus bandwidth as in nccl-tests"
    )
    who = names(result)
    floors = list(dict.fromkeys(floor["name"] for floor in result["floors"]))
    table.add_column("operation")
    table.add_column("size", justify="right")
    for name in who:
        for heading in (name, "alg GB/s", "bus GB/s"):
            table.add_column(heading, justify="right")
    for floor in floors:
        table.add_column(f"{floor} GB/s", justify="right", style="dim")
    speed = {(one["name"], one["bytes"]): one["bytes"] / middle(one["seconds"])[1] / 1e9 for one in result["floors"]}
    taken = {(name_of(row), row["operation"], row["bytes"]): middle(row["seconds"])[1] for row in result["rows"]}
    pairs = list(dict.fromkeys((row["operation"], row["bytes"]) for row in result["rows"]))
    for number, (operation, size) in enumerate(pairs):
        cells = [operation, shown_bytes(size)]
        for name in who:
            seconds = taken.get((name, operation, size))
            if seconds is None:
                cells += ["", "", ""]
                continue
            algorithm = size / seconds / 1e9
            cells += [shown_seconds(seconds), f"{algorithm:.3g}", f"{algorithm * bus_factor(operation, ranks):.3g}"]
        cells += [f"{speed[floor, size]:.3g}" if (floor, size) in speed else "" for floor in floors]
        last = number + 1 == len(pairs) or pairs[number + 1][0] != operation
        table.add_row(*cells, end_section=last)
    return table


def train(result: dict[str, Any]) -> Table:
    """Return a row for each setting, number of ranks and backend: speed, efficiency, and where a step's time goes."""
    rounds = len(result["rows"][0]["seconds"])
    table = table_of(
        f"{result['target']}: {result['parameters']:,} parameters, {result['device']}; medians of {rounds} rounds of "
        f"{result['steps']} steps; efficiency against local on one rank; parts in ms, the mean of the ranks"
    )
    for heading in ("ranks", "backend"):
        table.add_column(heading)
    for heading in ("samples/s", "efficiency", "step", *PARTS, "memory"):
        table.add_column(heading, justify="right", overflow="fold")
    rows = sorted(result["rows"], key=lambda row: (row.get("setting") or "", row["ranks"]))
    for number, row in enumerate(rows):
        share = efficiency(result, row)
        table.add_row(
            str(row["ranks"]),
            name_of(row),
            f"{samples_per_second(row):,.4g}",
            "" if share is None else f"{share:.1%}",
            shown_seconds(middle(row["seconds"])[1]),
            *(f"{middle(row['parts'][part])[1] * 1000:.3g}" for part in PARTS),
            shown_bytes(row["memory"]),
            end_section=number + 1 == len(rows) or rows[number + 1]["ranks"] != row["ranks"],
        )
    return table


def differences(found: list[Difference]) -> Table:
    """Return a row for each measurement that two results share."""
    table = table_of(
        "ratio: time before / time after, above 1 the second is faster; in brackets the middle half of all rounds"
    )
    table.add_column("")
    for heading in ("before", "after", "ratio"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for one in found:
        shown = [
            f"{shown_seconds(median)} [{shown_seconds(low)}, {shown_seconds(high)}]"
            for low, median, high in (one.before, one.after)
        ]
        table.add_row(one.what, *shown, f"{one.ratio:.3f}", one.verdict)
    return table


def prediction(result: dict[str, Any]) -> Table:
    """Return a row for each number of ranks: the step, its exposed communication, and the efficiency."""
    model = result["model"]
    table = table_of(
        f"{model['parameters']:,.0f} parameters of {model['bytes_per_parameter']:g} bytes, "
        f"{shown_seconds(model['step_seconds'])} a step on one rank, {model['backward_share']:.0%} of it backward"
    )
    table.add_column("ranks", justify="right")
    columns = list(dict.fromkeys((row["who"], row["algorithm"]) for row in result["rows"]))
    for who, algorithm in columns:
        for heading in (f"{who} {algorithm}".strip(), "exposed", "efficiency"):
            table.add_column(heading, justify="right", overflow="fold")
    found = {(row["who"], row["algorithm"], row["ranks"]): row for row in result["rows"]}
    for ranks in dict.fromkeys(row["ranks"] for row in result["rows"]):
        cells = [f"{ranks:,}"]
        for who, algorithm in columns:
            row = found[who, algorithm, ranks]
            cells += [
                shown_seconds(row["step_seconds"]),
                shown_seconds(row["exposed_seconds"]) if row["exposed_seconds"] else "0",
                f"{row['efficiency']:.1%}",
            ]
        table.add_row(*cells)
    return table


def notes(result: dict[str, Any]) -> list[str]:
    """Return what is to be said below a table: of a prediction, its networks and how far it is off."""
    said = []
    processors = result.get("machine", {}).get("processors")
    most = max((row.get("ranks", 0) for row in result["rows"]), default=0)
    if result["kind"] == "train" and result["device"] == "cpu" and processors is not None and most > processors:
        said.append(f"{most} ranks share {processors} processors: what they take from each other looks like waiting.")
    for fit in result.get("networks", ()):
        bandwidth = f"{1 / fit['beta'] / 1e9:.3g} GB/s" if fit["beta"] else "unlimited"
        line = f"{fit['who']} {fit['algorithm']}".strip() + f": {shown_seconds(fit['alpha'])} a message, {bandwidth}"
        if fit["most_off"] is not None:
            line += (
                f", fitted to {len(fit['points'])} allreduces: {fit['typically_off']:.0%} off in the median, "
                f"{fit['most_off']:.0%} at most"
            )
        said.append(line)
    said += [
        f"{point['who']} on {point['ranks']} ranks: measured {shown_seconds(point['measured'])} a step, predicted "
        f"{shown_seconds(point['predicted'])} ({point['algorithm']}): {point['off']:+.0%}"
        for point in result.get("measured", ())
    ]
    return said


def table_of(title: str) -> Table:
    """Return an empty table in the house's looks."""
    return Table(title=title, title_justify="left", title_style="", box=SIMPLE_HEAD, pad_edge=False)


def texts(table: Table) -> tuple[list[str], list[list[str]]]:
    """Return the headings of a table and its rows, as a page shows them."""
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    return [str(column.header) for column in table.columns], [list(row) for row in zip(*columns, strict=True)]
