"""Low-communication training of a small GPT on two hosts with a slow network, compared with synchronous training.

The hosts are simulated as in slow_network.py, with one rank each. Each method trains the same number of steps on the
same samples. The benchmark needs root.

    python benchmarks/low_communication.py      # writes benchmarks/results/low_communication.md
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import torch
from low_communication_training import BATCH, LENGTH, PEAK_LR, Method, build, methods
from slow_network import HERE, hosts, slow_down
from tables import BACKENDS, RESULTS, save_results

from unitrain.optim.outer_gradient import bytes_per_synchronization

BASELINE = "synchronous"
RANKS = 2
PARAMETERS = sum(parameter.numel() for parameter in build().parameters())


def measure(rate: str, backend: str, arguments: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
    """Return the runs of each method: seconds, bytes sent by the first host, and validation losses."""
    with tempfile.TemporaryDirectory() as folder, hosts(2, Path(folder)) as both:
        for host in both:
            slow_down(host, rate)
        launch = [sys.executable, "-m", "unitrain", "launch", "--backend", backend, "-H", "h1:1,h2:1"]
        script = str(HERE / "low_communication_training.py")
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
        done = both[0].run([*launch, script, json.dumps(arguments)], variables, timeout_seconds, fresh=True)
    lines = [line for line in done.stdout.splitlines() if '{"results"' in line]
    if done.returncode or not lines:
        raise click.ClickException(done.stdout)
    results: dict[str, Any] = json.loads(lines[0][lines[0].index("{") :])["results"]
    return results


def expected_bytes(method: Method) -> float | None:
    """Return the number of bytes of a step that a rank sends, without headers. None for PowerSGD."""
    if method.local is not None:
        return bytes_per_synchronization(PARAMETERS, RANKS, method.local.compression) / method.local.steps
    if method.compression in ("none", "bf16"):
        return bytes_per_synchronization(PARAMETERS, RANKS, "none", 4 if method.compression == "none" else 2)
    return None


def seconds_to(loss: float, run: dict[str, Any]) -> float | None:
    """Return the seconds until the validation loss of `run` is at most `loss`, or None."""
    return next((seconds for seconds, found in run["curve"] if found <= loss), None)


def spread(values: list[float], digits: int) -> str:
    """Return the median and the range of `values`."""
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


def rows(rate: str, backend: str, found: dict[str, Any], arguments: dict[str, Any], target: float) -> list[str]:
    """Return a line of the table for each method."""
    steps, lines = arguments["steps"], []
    wanted = target * statistics.median(run["curve"][-1][1] for run in found[BASELINE])
    baseline = statistics.median(run["seconds"] for run in found[BASELINE])
    for name, runs in found.items():
        sent = statistics.median(run["bytes"] for run in runs) / steps
        expected = expected_bytes(methods(arguments["local_steps"])[name])
        exact = "" if expected is None else f"{expected / 1e3:,.1f}"
        relative = "" if expected is None else f"{sent / expected:.3f}"
        seconds = [run["seconds"] / steps for run in runs]
        losses = [run["curve"][-1][1] for run in runs]
        base = [run["curve"][-1][1] for run in found[BASELINE]]
        change = [100 * (loss / other - 1) for loss, other in zip(losses, base, strict=True)]
        times = [time for run in runs if (time := seconds_to(wanted, run)) is not None]
        reached = (
            f"{statistics.median(times):.1f} s" if len(times) == len(runs) else f"{len(times)} of {len(runs)} runs"
        )
        lines.append(
            f"| {rate} | {backend} | {name} | {sent / 1e3:,.1f} | {exact} | {relative} | "
            f"{1000 * statistics.median(seconds):.1f} ms | {baseline / steps / statistics.median(seconds):.2f} | "
            f"{spread(losses, 3)} | {spread(change, 1)} % | {reached} |"
        )
    return lines


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
@click.option("--rate", "rates", multiple=True, default=["100mbit"], show_default=True, help="In tc notation.")
@click.option("--backend", "backends", type=click.Choice(BACKENDS), multiple=True, default=BACKENDS)
@click.option("--method", "names", type=click.Choice(list(methods(1))), multiple=True, default=list(methods(1)))
@click.option("--steps", type=click.IntRange(min=1), default=400, show_default=True)
@click.option("--local-steps", type=click.IntRange(min=1), default=25, show_default=True)
@click.option("--evaluate-every", type=click.IntRange(min=1), default=25, show_default=True)
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--target", default=1.1, show_default=True, help="Loss to reach, relative to synchronous training.")
@click.option(
    "--limit-seconds", "timeout_seconds", default=1400.0, show_default=True, help="Limit per rate and backend."
)
def main(
    output: Path,
    rates: list[str],
    backends: list[str],
    names: list[str],
    steps: int,
    local_steps: int,
    evaluate_every: int,
    seeds: int,
    target: float,
    timeout_seconds: float,
) -> None:
    """Measure at each bandwidth and on each backend, and save the table."""
    names = list(dict.fromkeys([BASELINE, *names]))
    arguments = {
        "methods": names,
        "steps": steps // evaluate_every * evaluate_every,
        "local_steps": local_steps,
        "evaluate_every": evaluate_every,
        "seeds": seeds,
    }
    found: dict[str, Any] = {}
    chosen = "".join(f"--method '{name}' " for name in names[1:])
    lines = [
        "# Low-communication training on two hosts with a slow network",
        "",
        f"One rank on each of two hosts, one thread per rank, without a GPU; a GPT of {PARAMETERS:,} parameters, "
        f"{BATCH} texts of {LENGTH} characters per rank and step, {arguments['steps']} steps of AdamW with a peak "
        f"learning rate of {PEAK_LR:g}, {local_steps} local steps; torch {torch.__version__}, Python "
        f"{platform.python_version()}, {os.cpu_count()} CPU cores for both ranks. Bytes are those that the first host "
        "sent over its network interface. They include headers, acknowledgements and consistency checks, which the "
        "expected number does not. The loss is that of the validation texts at the end, with the same "
        f"learning rate for all methods; the last column is the training time until it is at most {target:g} times the "
        f"final loss of synchronous training. Medians of {seeds} seeds; in brackets the range. Command: "
        f"`python benchmarks/low_communication.py {chosen}--steps {steps} --local-steps {local_steps} --seeds {seeds}"
        f"{''.join(f' --rate {rate}' for rate in rates)}`.",
        "",
        "| bandwidth | backend | method | KB sent per step | expected | ratio | step | speed relative to synchronous | "
        "final loss | change of the loss | time to the target |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for rate in rates:
        for backend in backends:
            measured = measure(rate, backend, arguments, timeout_seconds)
            found[f"{rate}, {backend}"] = measured
            lines += rows(rate, backend, measured, arguments, target)
    save_results(lines, "low_communication", output, **found)


if __name__ == "__main__":
    main()
