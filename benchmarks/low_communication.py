"""Low-communication training of a small GPT on two hosts with a slow network, compared with synchronous training.

The hosts are simulated as in slow_network.py, with one rank each. Each method trains the same number of steps on the
same samples. The benchmark needs root.

    python benchmarks/low_communication.py      # writes benchmarks/results/low_communication.md

The times are compared with the predictions of `unitrain bench predict`.
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
from low_communication_training import ALONE, BATCH, LENGTH, PEAK_LR, Method, build, methods
from slow_network import HERE, hosts, slow_down
from tables import BACKENDS, RESULTS, save_results

from unitrain.bench.cost_model import Network
from unitrain.bench.cost_prediction import Model, cost_functions, fit_networks
from unitrain.bench.method_prediction import predict_method
from unitrain.bench.results import read
from unitrain.optim.outer_gradient import bytes_per_synchronization

BASELINE = "synchronous"
RANKS = 2
NAMES = list(methods(25))
PARAMETERS = sum(parameter.numel() for parameter in build().parameters())


def measure(
    rate: str, delay: float, backend: str, arguments: dict[str, Any], timeout_seconds: float
) -> tuple[dict[str, Any], Network]:
    """Return the runs of each method, with seconds, bytes sent by the first host and validation losses, and the network
    that is fitted to allreduces between the hosts, as by `unitrain bench predict`."""
    network = (delay, bits_per_second(rate)) if delay else None
    with tempfile.TemporaryDirectory() as folder, hosts(2, Path(folder), network=network) as both:
        if not delay:
            for host in both:
                slow_down(host, rate)
        launch = [sys.executable, "-m", "unitrain", "launch", "--backend", backend, "-H", "h1:1,h2:1"]
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
        measured = Path(folder) / "collectives.json"
        bench = ["bench", "collectives", "--backends", backend, "--operations", "allreduce", "--device", "cpu"]
        limits = ["--sizes", "4KB,64KB,1MB,4MB", "--seconds", "20", "--json", str(measured)]
        script = str(HERE / "low_communication_training.py")
        for command in (["-m", "unitrain", *bench, *limits], [script, json.dumps(arguments)]):
            done = both[0].run([*launch, *command], variables, timeout_seconds, fresh=True)
            if done.returncode:
                raise click.ClickException(done.stdout)
        ((fitted, _),) = fit_networks(read(measured, "collectives"), None, cost_functions(["ring"], None, 1)).values()
    line = next(line for line in done.stdout.splitlines() if '{"results"' in line)
    results: dict[str, Any] = json.loads(line[line.index("{") :])["results"]
    return results, fitted


def bits_per_second(rate: str) -> float:
    """Return a `rate` such as "100mbit" as a number."""
    return float(rate.removesuffix("bit")[:-1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[rate.removesuffix("bit")[-1]]


def predicted_seconds(method: Method, alone: float, network: Network, local_steps: int) -> float | None:
    """Return the predicted seconds per step, or None for PowerSGD. `alone` is the time without communication."""
    if method.prediction is None:
        return None if method.communicates else alone
    model = Model(parameters=PARAMETERS, bytes_per_parameter=4, step_seconds=alone, backward_share=2 / 3)
    return predict_method(method.prediction, model, RANKS, network, local_steps=local_steps).seconds


def expected_bytes(method: Method) -> float | None:
    """Return the number of bytes of a step that a rank sends, without headers. None for PowerSGD, and without
    communication."""
    if not method.communicates:
        return None
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


def rows(
    name_of_network: str,
    backend: str,
    found: dict[str, Any],
    network: Network,
    arguments: dict[str, Any],
    target: float,
) -> list[str]:
    """Return a line of the table for each method."""
    steps, lines = arguments["steps"], []
    wanted = target * statistics.median(run["curve"][-1][1] for run in found[BASELINE])
    baseline = statistics.median(run["seconds"] for run in found[BASELINE])
    alone = statistics.median(run["seconds"] for run in found[ALONE]) / steps
    for name, runs in found.items():
        method = methods(arguments["local_steps"])[name]
        sent = statistics.median(run["bytes"] for run in runs) / steps
        expected = expected_bytes(method)
        exact = "" if expected is None else f"{expected / 1e3:,.1f}"
        relative = "" if expected is None else f"{sent / expected:.3f}"
        seconds = [run["seconds"] / steps for run in runs]
        predicted = predicted_seconds(method, alone, network, arguments["local_steps"])
        prediction = "" if predicted is None else f"{predicted / statistics.median(seconds):.2f}"
        losses = [run["curve"][-1][1] for run in runs]
        base = [run["curve"][-1][1] for run in found[BASELINE]]
        change = [100 * (loss / other - 1) for loss, other in zip(losses, base, strict=True)]
        times = [time for run in runs if (time := seconds_to(wanted, run)) is not None]
        reached = (
            f"{statistics.median(times):.1f} s" if len(times) == len(runs) else f"{len(times)} of {len(runs)} runs"
        )
        speedup = baseline / steps / statistics.median(seconds)
        lines.append(
            f"| {name_of_network} | {backend} | {name} | {sent / 1e3:,.1f} | {exact} | {relative} | "
            f"{1000 * statistics.median(seconds):.1f} ms | {prediction} | {speedup:.2f} | "
            f"{spread(losses, 3)} | {spread(change, 1)} % | {reached} |"
        )
    return lines


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
@click.option("--rate", "rates", multiple=True, default=["100mbit"], show_default=True, help="In tc notation.")
@click.option("--delay", default=0.0, show_default=True, help="Seconds from one host to the other.")
@click.option("--backend", "backends", type=click.Choice(BACKENDS), multiple=True, default=BACKENDS)
@click.option("--method", "names", type=click.Choice(NAMES), multiple=True, default=NAMES)
@click.option("--steps", type=click.IntRange(min=1), default=400, show_default=True)
@click.option("--local-steps", type=click.IntRange(min=6), default=25, show_default=True)
@click.option("--evaluate-every", type=click.IntRange(min=1), default=25, show_default=True)
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--target", default=1.1, show_default=True, help="Loss to reach, relative to synchronous training.")
@click.option(
    "--limit-seconds", "timeout_seconds", default=1400.0, show_default=True, help="Limit per rate and backend."
)
def main(
    output: Path,
    rates: list[str],
    delay: float,
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
    names = list(dict.fromkeys([ALONE, BASELINE, *names]))
    arguments = {
        "methods": names,
        "steps": steps // evaluate_every * evaluate_every,
        "local_steps": local_steps,
        "evaluate_every": evaluate_every,
        "seeds": seeds,
    }
    found: dict[str, Any] = {}
    suffix = f", {1000 * delay:g} ms" if delay else ""
    chosen = "".join(f"--method '{name}' " for name in names[2:])
    lines = [
        "# Low-communication training on two hosts with a slow network",
        "",
        f"One rank on each of two hosts, one thread per rank, without a GPU; a GPT of {PARAMETERS:,} parameters, "
        f"{BATCH} texts of {LENGTH} characters per rank and step, {arguments['steps']} steps of AdamW with a peak "
        f"learning rate of {PEAK_LR:g}, {local_steps} local steps; torch {torch.__version__}, Python "
        f"{platform.python_version()}, {os.cpu_count()} CPU cores for both ranks. Bytes are those that the first host "
        "sent over its network interface. They include headers, acknowledgements and consistency checks, which the "
        "expected number does not. The predicted time is that of `unitrain bench predict --methods`, with the time "
        "without communication and a network that is fitted to allreduces between the hosts. The loss is that of the "
        "validation texts at the end, with the same learning rate for all methods; the last column is the training "
        f"time until it is at most {target:g} times the final loss of synchronous training. Medians of {seeds} seeds; "
        "in brackets the range. Command: "
        f"`python benchmarks/low_communication.py {chosen}--steps {steps} --local-steps {local_steps} --seeds {seeds}"
        f"{''.join(f' --rate {rate}' for rate in rates)}{f' --delay {delay:g}' if delay else ''}`.",
        "",
        "| bandwidth | backend | method | KB sent per step | expected | ratio | step | predicted / measured | "
        "speed relative to synchronous | final loss | change of the loss | time to the target |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for rate in rates:
        for backend in backends:
            measured, network = measure(rate, delay, backend, arguments, timeout_seconds)
            found[f"{rate}, {backend}"] = {"network": vars(network), "runs": measured}
            lines += rows(f"{rate}{suffix}", backend, measured, network, arguments, target)
            save_results(lines, "low_communication", output, **found)  # the next backend takes minutes and may fail


if __name__ == "__main__":
    main()
