"""Fraction of slow ranks whose cause is reported correctly, and false alarms in runs without slowdowns.

Two ranks on two hosts (sets of namespaces on this machine, see tests/support/hosts.py) train while one rank is slowed
down: by a CPU quota, a slow `__getitem__`, a slow forward pass, a bandwidth limit on the link of the host, or busy
processes on the same core. A slowdown is reported correctly if there is a report and each report names the rank and the
cause. The ranks run in cgroups with a high weight, so that other processes of the machine hardly delay them. The
benchmark requires root and cgroup version 1.

    python benchmarks/slow_ranks.py            # writes benchmarks/results/slow_ranks.md
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch
from tables import RESULTS, save_results

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "tests" / "support"))
from hosts import Host, hosts  # noqa: E402

# The expected cause in the report, by the kind of slowdown.
CAUSES = {
    "quota": ("cpu_quota", "CPU quota"),
    "data": ("data_loading", "slow `__getitem__`"),
    "forward": ("forward", "slow forward pass"),
    "link": ("network", "`tc` on one link"),
    "neighbor": ("other_processes", "busy neighbor"),
}
QUOTA_MICROSECONDS, RATE, NEIGHBORS = 25_000, "200mbit", 3
SLOWDOWNS_PER_RUN = 10
STEPS_PER_SYNC_POINT = 100  # steps of 20 ms with a sync point every two seconds
BUSY = "while :; do :; done"


@contextlib.contextmanager
def cgroups() -> Iterator[Path]:
    """Context manager that creates a cgroup with a high weight, and in it a cgroup for each rank, one for the busy
    processes and one for this process. It yields the path of the outer cgroup."""
    parent = Path("/sys/fs/cgroup/cpu") / f"unitrain-{os.getpid()}-{time.monotonic_ns()}"
    groups = [parent, parent / "rank0", parent / "rank1", parent / "busy", parent / "start"]
    for group in groups:
        group.mkdir()
    (parent / "cpu.shares").write_text("262144")
    (parent / "busy" / "cpu.shares").write_text(str(1024 * NEIGHBORS))
    own = Path(f"/proc/{os.getpid()}/cgroup").read_text()
    (before,) = (line.split(":", 2)[2] for line in own.splitlines() if line.split(":")[1].split(",")[0] == "cpu")
    (parent / "start" / "cgroup.procs").write_text("0")  # so that slowdowns start immediately
    try:
        yield parent
    finally:
        Path(f"/sys/fs/cgroup/cpu{before}/cgroup.procs").write_text("0")
        for group in reversed(groups):
            for _ in range(600):  # retry until the last process has exited
                with contextlib.suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(0.1)


@contextlib.contextmanager
def slow_down_rank(name: str, folder: Path, groups: Path, rank_hosts: list[Host]) -> Iterator[None]:
    """Context manager that slows down a rank. `name` contains the kind and the rank, for example "quota-1"."""
    kind, rank = name.split("-")
    group, host = groups / f"rank{rank}", rank_hosts[int(rank)]
    network = ("nsenter", "-t", str(host.first), "--net", "tc", "qdisc")
    if kind in ("data", "forward"):
        (folder / name).touch()
        yield
        (folder / name).unlink()
    elif kind == "quota":
        (group / "cpu.cfs_quota_us").write_text(str(QUOTA_MICROSECONDS))
        yield
        (group / "cpu.cfs_quota_us").write_text("-1")
    elif kind == "link":
        limit = ("root", "tbf", "rate", RATE, "burst", "64kb", "latency", "200ms")
        subprocess.run([*network, "add", "dev", "eth0", *limit], check=True, timeout=20)
        yield
        subprocess.run([*network, "del", "dev", "eth0", "root"], check=True, timeout=20)
    else:
        core = int(rank) % (os.cpu_count() or 1)
        command = f"echo 0 > {groups}/busy/cgroup.procs; exec taskset -c {core} sh -c '{BUSY}'"
        before = set(host.find_processes())
        started = [host.start(["sh", "-c", command], fresh=True) for _ in range(NEIGHBORS)]
        yield
        for pid, text in host.find_processes().items():
            if pid not in before and BUSY in text:
                os.kill(pid, 9)
        for process in started:
            process.communicate(timeout=20)


def train(plan: list[list[str]], backend: str, timeout_seconds: float) -> list[dict[str, Any]]:
    """Train the runs of `plan`, which contains a list of slowdowns for each run, and return the results."""
    with tempfile.TemporaryDirectory() as name, cgroups() as groups:
        folder = Path(name)
        (folder / "hosts").mkdir()
        (folder / "plan.json").write_text(json.dumps(plan))
        with hosts(2, folder / "hosts") as both:
            options = ["--backend", backend, "-np", "2", "-H", "h1,h2"]
            script = [str(HERE / "slow_ranks_training.py"), str(folder), str(groups)]
            command = [sys.executable, "-m", "unitrain", "launch", *options, *script]
            with (folder / "output").open("w") as output:
                process = both[0].start(command, {"OMP_NUM_THREADS": "1"}, stdout=output.fileno())
                deadline = time.monotonic() + timeout_seconds
                while process.poll() is None and time.monotonic() < deadline:
                    with contextlib.suppress(FileNotFoundError):
                        request = (folder / "request").read_text()
                        with slow_down_rank(request, folder, groups, both):
                            while (folder / "request").exists() and process.poll() is None:
                                time.sleep(0.05)
                    time.sleep(0.05)
                for host in both:
                    host.kill_all()
            found = [
                json.loads((folder / f"result-{number}.json").read_text())
                for number in range(len(plan))
                if (folder / f"result-{number}.json").exists()
            ]
            if len(found) < len(plan):
                output_text = (folder / "output").read_text()[-10_000:]
                raise click.ClickException(f"{len(found)} of {len(plan)} runs ended:\n{output_text}")
            return found


def classify_reports(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the kind and the outcome of each slowdown in a run: "correct", "not reported", or the incorrect report."""
    outcomes = []
    for name, first, last in result["periods"]:
        kind, rank = name.split("-")
        reports = [
            (straggler["rank"], straggler.get("cause"))
            for step, slow in result["slow"]
            if first < step <= last
            for straggler in slow
        ]
        expected = (int(rank), CAUSES[kind][0])
        wrong = [report for report in reports if report != expected]
        outcomes.append((kind, str(wrong[0]) if wrong else "correct" if reports else "not reported"))
    return outcomes


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
@click.option("--backend", type=click.Choice(["ddp", "horovod"]), default="ddp", show_default=True)
@click.option("--kind", "kinds", type=click.Choice(list(CAUSES)), multiple=True, default=list(CAUSES))
@click.option("--slowdowns", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--runs", type=click.IntRange(min=1), default=100, show_default=True, help="Runs without slowdowns.")
def main(output: Path, backend: str, kinds: list[str], slowdowns: int, runs: int) -> None:
    """Train runs with and without slowdowns, and save the table."""
    names = [f"{kinds[index % len(kinds)]}-{index // len(kinds) % 2}" for index in range(slowdowns)]
    random.Random(0).shuffle(names)
    plan = [names[first : first + SLOWDOWNS_PER_RUN] for first in range(0, slowdowns, SLOWDOWNS_PER_RUN)]
    slowed = train(plan, backend, 60 + 20 * slowdowns)
    undisturbed = train([[] for _ in range(runs)], backend, 60 + 20 * runs)
    outcomes = [outcome for result in slowed for outcome in classify_reports(result)]
    alarms = [result["slow"] for result in undisturbed if result["slow"]]
    results = [*slowed, *undisturbed]
    cost = statistics.median(result["cost_microseconds"] for result in results) / STEPS_PER_SYNC_POINT
    step = statistics.median(result["seconds"] / result["steps"] for result in undisturbed)
    others = sum(result["cpu_of_other_processes"] for result in results) / sum(result["seconds"] for result in results)
    lines = [
        "# Causes of slow ranks",
        "",
        f"2 ranks on two hosts, with one core each and without a GPU, backend {backend}; steps of {1e3 * step:.0f} ms "
        f"without slowdowns; torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} CPU "
        f"cores. Other processes of this machine, including the injected ones, used {others:.1f} cores. Command: "
        f"`python benchmarks/slow_ranks.py --backend {backend} --slowdowns {slowdowns} --runs {runs}`.",
        "",
        "| slowdown | injected | rank and cause reported correctly | other outcomes |",
        "|---|---|---|---|",
    ]
    for kind in kinds:
        own = [outcome for found, outcome in outcomes if found == kind]
        other = Counter(outcome for outcome in own if outcome != "correct")
        described = ", ".join(f"{outcome}: {count}" for outcome, count in other.items())
        lines.append(f"| {CAUSES[kind][1]} | {len(own)} | {own.count('correct')} | {described} |")
    correct = sum(outcome == "correct" for _, outcome in outcomes)
    lines += [
        f"| **total** | **{len(outcomes)}** | **{correct}** | |",
        "",
        f"False alarms in {len(undisturbed)} runs without slowdowns: **{len(alarms)}**.",
        "",
        "CPU time of the detection per step, with steps of 20 ms and a sync point every two seconds: "
        f"**{cost:.1f} µs**, {cost / 200:.3f} % of the step.",
    ]
    for result in results:
        result["slow"] = [(step, [report_fields(straggler) for straggler in slow]) for step, slow in result["slow"]]
    save_results(lines, "slow_ranks", output, slowed=slowed, undisturbed=undisturbed, cost_microseconds=cost)


def report_fields(straggler: dict[str, Any]) -> dict[str, Any]:
    """Return the rank, phase, cause and evidence of a report."""
    return {name: straggler.get(name) for name in ("rank", "phase", "cause", "evidence")}


if __name__ == "__main__":
    main()
