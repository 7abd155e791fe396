"""`unitrain doctor`: what is wrong with this machine, or between the ranks of a job, and what to do about it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

import unitrain
from unitrain.bootstrap import environment
from unitrain.errors import LauncherMismatchError, UnitrainError

# How the first rank's report is found among what a launcher prints, whatever it puts before a line.
_MARK = "unitrain doctor report: "
_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}
_LAST_LINES = 15


@click.command()
@click.option("--launch", metavar="OPTIONS", help='Look at all ranks of a launch: --launch "-np 4 -H a:2,b:2".')
@click.option("--json", "as_json", is_flag=True, help="What was found as JSON.")
@click.option(
    "--timeout-seconds",
    type=click.FloatRange(min=1),
    default=120.0,
    show_default=True,
    help="How long ranks wait for each other.",
)
@click.option("--for-launch", is_flag=True, hidden=True)
def doctor(launch: str | None, as_json: bool, timeout_seconds: float, for_launch: bool) -> None:
    """Look at this machine, or at all ranks of a job, for what will go wrong, and tell what to do about it.

    Typed under a launcher it looks at every rank, and rank 0 tells. Ends with 1 where something must be mended.

    \b
      unitrain doctor
      unitrain doctor --launch "-np 4 -H node1:2,node2:2 --launcher mpirun"
      srun unitrain doctor
    """
    if launch is not None:
        report = _launched(shlex.split(launch), timeout_seconds)
    else:
        told = _examine(timeout_seconds)
        if told is None:
            return  # another rank tells
        report = told
    if for_launch:
        click.echo(_MARK + json.dumps(report))
    elif as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _show(report)
    if not (report["ok"] or for_launch):
        sys.exit(1)


def _examine(timeout_seconds: float) -> dict[str, Any] | None:
    """Return the report of all ranks on rank 0, None on the others."""
    from unitrain.bootstrap.rendezvous import connect_ranks
    from unitrain.doctor.facts import Facts, gather
    from unitrain.doctor.findings import Told, judge
    from unitrain.doctor.probes import Between, probe

    try:
        rank_info = environment.detect()
        # First the meeting: who is missing should show before anything slow.
        rendezvous = connect_ranks(rank_info, timedelta(seconds=timeout_seconds))
        facts = gather(rank_info)
        between = probe(rendezvous) if rank_info.size > 1 else None
        gathered = rendezvous.allgather("doctor/told", [facts.as_json(), between and between.as_json()])
    except LauncherMismatchError as error:
        raise click.ClickException(f"{error} Or let unitrain launch it: unitrain doctor --launch ...") from error
    except UnitrainError as error:
        raise click.ClickException(str(error)) from error
    if rank_info.rank != 0:
        return None
    ranks = [Told(Facts.from_json(one), Between(**other) if other else None) for one, other in gathered]
    findings = judge(ranks)
    return {
        "ok": not any(finding.level == "error" for finding in findings),
        "findings": [vars(finding) for finding in findings],
        "ranks": [{"facts": one, "between": other} for one, other in gathered],
    }


def _launched(options: Sequence[str], timeout_seconds: float) -> dict[str, Any]:
    """Return the report of a launch with these options of `unitrain launch`."""
    program = str(Path(unitrain.__file__).with_name("__main__.py"))
    command = [
        sys.executable, program, "launch", *options,
        program, "doctor", "--for-launch", "--timeout-seconds", f"{timeout_seconds:g}",
    ]  # fmt: skip
    click.echo("Looking at all ranks; this takes some seconds.", err=True)
    # Horovod would bring ranks together by itself, and leave none of the others a place to meet.
    variables = {"UNITRAIN_BACKEND": environment.setting("UNITRAIN_BACKEND") or "ddp"}
    try:
        done = subprocess.run(
            command,
            env=environment.copy() | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_seconds + 60,
        )
    except subprocess.TimeoutExpired as expired:
        raise click.ClickException(
            f"The launch was not done after {timeout_seconds + 60:g} s. Allow more with --timeout-seconds."
        ) from expired
    for line in done.stdout.splitlines():
        _, found, report = line.partition(_MARK)
        if found:
            told: dict[str, Any] = json.loads(report)
            return told
    said = "\n".join((done.stderr + done.stdout).strip().splitlines()[-_LAST_LINES:])
    raise click.ClickException(f"The ranks could not be started (exit code {done.returncode}):\n{said}")


def _show(report: Mapping[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    ranks = [entry["facts"] for entry in report["ranks"]]
    first = ranks[0]
    if len(ranks) > 1:
        believed = ", ".join(first["evidence"])
        console.print(f"{len(ranks)} ranks of {first['launcher']}; rank 0 was told {believed}.", markup=False)
    transports = ", ".join(
        name if version == "yes" else f"{name} {version}" for name, version in first["transports"].items()
    )
    console.print(f"Python {first['python']}, unitrain {first['unitrain']}; ddp has {transports}.", markup=False)
    launchers = ", ".join(name for name in first["programs"] if name != "ssh")
    console.print(f"Launchers on PATH: {launchers or 'none'}.", markup=False)

    if len({one["host"] for one in ranks}) > 1:
        console.print(
            "Between hosts, torch's store and the connections of Gloo, NCCL and Horovod are neither authenticated nor "
            "encrypted: keep this network private (docs/security.md).",
            markup=False,
        )

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("host", "ranks", "cores", "memory", "GPUs", "torch", "Horovod", "address"):
        table.add_column(column, overflow="fold")
    hosts: dict[str, list[int]] = {}
    for number, facts in enumerate(ranks):
        hosts.setdefault(facts["host"], []).append(number)
    for host, numbers in hosts.items():
        table.add_row(*map(escape, _row(host, numbers, report["ranks"])))
    console.print(table)

    for finding in report["findings"]:
        level = finding["level"]
        console.print(f"[bold {_COLOURS[level]}]{level}[/]  {escape(finding['what'])}")
        console.print(f"  $ {finding['fix']}" if level != "note" else f"  {finding['fix']}", markup=False, style="dim")
    counts = [sum(finding["level"] == level for finding in report["findings"]) for level in ("error", "warning")]
    if any(counts):
        console.print(f"{counts[0]} to mend, {counts[1]} to know of.", style="bold")
    else:
        console.print("Nothing to mend.", style="bold green")


def _row(host: str, numbers: Sequence[int], ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    facts, between = ranks[numbers[0]]["facts"], ranks[numbers[0]]["between"]
    address = between["address"] if between else next((a for n, a in facts["interfaces"].items() if n != "lo"), "")
    interface = next((name for name, own in facts["interfaces"].items() if own == address), "")
    gpus: dict[str, int] = {}
    for gpu in facts["gpus"]:
        gpus[gpu["name"]] = gpus.get(gpu["name"], 0) + 1
    horovod = facts["horovod"]
    operations = [*horovod["cpu_operations"], *horovod["gpu_operations"]] if horovod else []
    return [
        host,
        ", ".join(map(str, numbers)),
        str(len({core for number in numbers for core in ranks[number]["facts"]["cores"]})),
        f"{facts['memory'] / 2**30:.0f} GiB" if facts["memory"] else "?",
        ", ".join(f"{count} x {name}" for name, count in gpus.items()) or "-",
        facts["torch"],
        f"{horovod['version']} ({', '.join(operations)})" if horovod else "-",
        f"{address} {interface}".strip(),
    ]
