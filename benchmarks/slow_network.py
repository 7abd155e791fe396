"""Settings that `unitrain tune` finds for two hosts with a slow network.

The hosts are two sets of namespaces on this machine, each with an sshd (tests/support/hosts.py). The kernel limits the
send bandwidth of each host. `unitrain tune` runs on the first host, and the benchmark saves its output. A gain in the
output is the median over pairs of runs, with the lowest and the highest value. The benchmark requires root.

    python benchmarks/slow_network.py
    python benchmarks/slow_network.py --ranks-per-host 2 --rate 200mbit

Each command writes benchmarks/results/slow_network.md and .json, and keeps the results of other commands.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import Any

import click
import torch
from slow_network_training import PARAMETERS
from tables import BACKENDS, RESULTS

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "tests" / "support"))
from hosts import Host, hosts  # noqa: E402


def slow_down(host: Host, rate: str) -> None:
    """Limit the send bandwidth of a host to `rate`, in tc notation."""
    burst = str(burst_bytes(rate))
    shape = ("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", burst, "latency", "100ms")
    subprocess.run(["nsenter", "-t", str(host.first), "--net", *shape], check=True, timeout=20)


def burst_bytes(rate: str) -> int:
    """Return the number of bytes that a host can send without the limit `rate` after a pause: up to 20 ms worth of
    data, but at most 256 KiB."""
    return min(256 << 10, round(0.02 * bits_per_second(rate) / 8))


def bits_per_second(rate: str) -> float:
    """Return a `rate` in tc notation, for example "100mbit", in bits per second."""
    return float(rate.removesuffix("bit")[:-1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[rate.removesuffix("bit")[-1]]


def tune(first: Host, backend: str, ranks_per_host: int, minutes: float, seconds: float) -> list[str]:
    """Return the output of `unitrain tune` on the `first` of the two hosts."""
    options = f"--backend {backend} -np {2 * ranks_per_host} -H h1:{ranks_per_host},h2:{ranks_per_host}"
    limits = ["--minutes", str(minutes), "--seconds", str(seconds), "--compression"]
    script = str(HERE / "slow_network_training.py")
    process = first.start(
        [sys.executable, "-m", "unitrain", "tune", *limits, "--launch", options, script], {"OMP_NUM_THREADS": "1"}
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        click.echo(line, nl=False)
        lines.append(line.rstrip())
    if process.wait(timeout=60):
        raise click.ClickException(f"unitrain tune ended with exit code {process.returncode}.")
    return [line.replace(f"{HERE}/", "") for line in lines if line and not line.startswith(" ")]


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
@click.option("--backend", "backends", type=click.Choice(BACKENDS), multiple=True, default=BACKENDS)
@click.option("--rate", default="1gbit", show_default=True, help="Bandwidth limit per host, in tc notation.")
@click.option("--ranks-per-host", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--minutes", type=float, default=10, show_default=True, help="Duration of the search per backend.")
@click.option("--seconds", type=float, default=2, show_default=True, help="Duration of the timed steps per run.")
def main(output: Path, backends: list[str], rate: str, ranks_per_host: int, minutes: float, seconds: float) -> None:
    """Tune on each backend, and save the output."""
    output = output.resolve()
    options = f"--minutes {minutes:g} --seconds {seconds:g} --rate {rate} --ranks-per-host {ranks_per_host}"
    machine = f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} CPU cores"
    saved = output / "slow_network.json"
    found: dict[str, dict[str, Any]] = json.loads(saved.read_text()) if saved.exists() else {}
    # Settings are saved in the current folder.
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        (Path(folder) / "hosts").mkdir()
        with hosts(2, Path(folder) / "hosts") as both:
            for host in both:
                slow_down(host, rate)
            for backend in backends:
                title = f"{rate}, {ranks_per_host} rank{'s' * (ranks_per_host > 1)} per host, {backend}"
                found[title] = {
                    "command": f"python benchmarks/slow_network.py {options} --backend {backend}",
                    "machine": machine,
                    "lines": tune(both[0], backend, ranks_per_host, minutes, seconds),
                }
    lines = [
        "# Settings that `unitrain tune` finds on two hosts with a slow network",
        "",
        f"One thread per rank, without a GPU; a model of {PARAMETERS:,} parameters, 32 samples per rank.",
    ]
    for title, result in found.items():
        lines += ["", f"## {title}", "", f"{result['machine']}. Command: `{result['command']}`.", ""]
        lines += [f"    {line}" for line in result["lines"]]
    output.mkdir(parents=True, exist_ok=True)
    saved.write_text(json.dumps(found, indent=1) + "\n")
    (output / "slow_network.md").write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
