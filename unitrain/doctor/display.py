"""Print the report of an examination."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from unitrain.output import plain_console

_COLORS = {"error": "red", "warning": "yellow", "note": "cyan"}


def show(report: Mapping[str, Any]) -> None:
    """Print the software versions of rank 0, a table of the hosts, and the findings with fixes."""
    console = plain_console()
    facts_by_rank = [entry["facts"] for entry in report["ranks"]]
    first = facts_by_rank[0]
    if len(facts_by_rank) > 1:
        launch = f"{len(facts_by_rank)} ranks under {first['launcher']}"
        console.print(f"{launch}; environment of rank 0: {', '.join(first['evidence'])}.")
    transports = ", ".join(
        name if version == "yes" else f"{name} {version}" for name, version in first["transports"].items()
    )
    versions = f"Python {first['python']}, unitrain {first['unitrain']}"
    console.print(f"{versions}; transports of ddp: {transports}.")
    launchers = ", ".join(name for name in first["programs"] if name != "ssh")
    console.print(f"Launchers on PATH: {launchers or 'none'}.")

    if len({facts["host"] for facts in facts_by_rank}) > 1:
        console.print(
            "Between hosts, the TCPStore and the connections of Gloo, NCCL and Horovod are neither authenticated nor "
            "encrypted. Keep this network private (docs/security.md).",
        )

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("host", "ranks", "cores", "memory", "GPUs", "torch", "Horovod", "address"):
        table.add_column(column, overflow="fold", no_wrap=column == "torch")
    hosts: dict[str, list[int]] = {}
    for rank, facts in enumerate(facts_by_rank):
        hosts.setdefault(facts["host"], []).append(rank)
    for host, host_ranks in hosts.items():
        table.add_row(*_create_host_row(host, host_ranks, report["ranks"]))
    console.print(table)

    for finding in report["findings"]:
        level = finding["level"]
        console.print(Text.assemble((level, f"bold {_COLORS[level]}"), f"  {finding['what']}"))
        console.print(f"  Fix: {finding['fix']}", style="dim")
    counts = [sum(finding["level"] == level for finding in report["findings"]) for level in ("error", "warning")]
    if any(counts):
        console.print(f"{_count(counts[0], 'error')}, {_count(counts[1], 'warning')}.", style="bold")
    else:
        console.print("No problems found.", style="bold green")


def _create_host_row(host: str, host_ranks: Sequence[int], ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    facts, checks = ranks[host_ranks[0]]["facts"], ranks[host_ranks[0]]["peer_checks"]
    address = (
        checks["address"]
        if checks
        else next((address for name, address in facts["interfaces"].items() if name != "lo"), "")
    )
    interface = next((name for name, own_address in facts["interfaces"].items() if own_address == address), "")
    gpus: dict[str, int] = {}
    for gpu in facts["gpus"]:
        gpus[gpu["name"]] = gpus.get(gpu["name"], 0) + 1
    horovod = facts["horovod"]
    operations = [*horovod["cpu_operations"], *horovod["gpu_operations"]] if horovod else []
    return [
        host,
        ", ".join(map(str, host_ranks)),
        str(len({core for rank in host_ranks for core in ranks[rank]["facts"]["cores"]})),
        f"{facts['memory'] / 2**30:.0f} GiB" if facts["memory"] else "?",
        ", ".join(f"{count} x {name}" for name, count in gpus.items()) or "-",
        facts["torch"],
        f"{horovod['version']} ({', '.join(operations)})" if horovod else "-",
        f"{address} {interface}".strip(),
    ]


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
