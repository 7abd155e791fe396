"""Low-communication training of a small GPT on two hosts with a slow network, compared with synchronous training.

The losses of a method do not depend on the network or the backend, so they are measured with two ranks on this machine.
The times and bytes are measured on two simulated hosts with one rank each (tests/support/hosts.py; requires root), with
limited bandwidth and, optionally, a delay. The times are compared with the predictions of `unitrain bench predict`. The
table and the chart combine both: the time until a method reaches a validation loss is the number of steps multiplied by
the time of a step. Methods with local steps start with a warm-up of synchronous steps.

    python benchmarks/low_communication.py losses            # 1,000 steps of each method, for three seeds
    python benchmarks/low_communication.py outer             # 400 steps of DiLoCo with each outer optimizer
    python benchmarks/low_communication.py speeds --rate 10mbit --rate 100mbit
    python benchmarks/low_communication.py speeds --rate 10mbit --delay 0.025
    python benchmarks/low_communication.py speeds --rate 100mbit --width 512 --layers 4 --batch 1

Each command writes benchmarks/results/low_communication.md, .json and .svg, and keeps the results of earlier commands.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import torch
from low_communication_training import (
    ALONE,
    LENGTH,
    OUTER_LR,
    OUTER_MOMENTUM,
    SYNCHRONOUS,
    Method,
    Workload,
    build,
    methods,
)
from slow_network import HERE, bits_per_second, burst_bytes, hosts, slow_down
from tables import BACKENDS, RESULTS, save_results

from unitrain.bench.cost_model import Network
from unitrain.bench.cost_prediction import Model, cost_functions, fit_networks
from unitrain.bench.method_prediction import predict_method
from unitrain.bench.results import read
from unitrain.optim.outer_gradient import bytes_per_synchronization

NAME = "low_communication"
RANKS = 2
NAMES = list(methods(25))
DEFAULT = Workload()
SCRIPT = str(HERE / "low_communication_training.py")
LAUNCH = [sys.executable, "-m", "unitrain", "launch"]
# Headers of Ethernet, IPv4 and TCP with time stamps, and the payload of a segment with an MTU of 1,500 bytes.
HEADER_BYTES, SEGMENT_BYTES = 66, 1448
# Maximum size of a packet with generic segmentation offload. A network interface counts it as one packet.
MAX_OFFLOADED_BYTES = 64 << 10


def parse_results(output: str) -> Any:
    """Return the results in `output`, the text that `low_communication_training.py` printed."""
    line = next(line for line in output.splitlines() if '{"results"' in line)
    return json.loads(line[line.index("{") :])["results"]


def measure_speeds(
    rate: str, delay: float, backend: str, arguments: dict[str, Any], timeout_seconds: float
) -> dict[str, Any]:
    """Return the seconds and bytes per step of each method, and a network model that is fitted to collectives between
    the hosts, as in `unitrain bench predict`."""
    network = (delay, bits_per_second(rate)) if delay else None
    with tempfile.TemporaryDirectory() as folder, hosts(RANKS, Path(folder), network=network) as both:
        if not delay:
            for host in both:
                slow_down(host, rate)
        launch = [*LAUNCH, "--backend", backend, "-H", "h1:1,h2:1"]
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
        measured = Path(folder) / "collectives.json"
        bench = ["bench", "collectives", "--backends", backend, "--operations", "allreduce"]
        limits = ["--sizes", "4KB,64KB,1MB,4MB", "--seconds", "20", "--device", "cpu", "--json", str(measured)]
        for command in (["-m", "unitrain", *bench, *limits], [SCRIPT, json.dumps(arguments)]):
            done = both[0].run([*launch, *command], variables, timeout_seconds, fresh=True)
            if done.returncode:
                raise click.ClickException(done.stdout)
        ((fitted, _),) = fit_networks(read(measured, "collectives"), None, cost_functions(["ring"], None, 1)).values()
    return {"network": vars(fitted), "methods": parse_results(done.stdout)}


@functools.cache
def count_parameters(workload: Workload) -> int:
    """Return the number of parameters of the model."""
    return sum(parameter.numel() for parameter in build(workload).parameters())


def predicted_seconds(
    method: Method, num_parameters: int, alone: float, network: Network, local_steps: int
) -> float | None:
    """Return the predicted seconds per step, or None for PowerSGD. `alone` is the time without communication."""
    if method.predicted_method is None:
        return None if method.communicates else alone
    model = Model(parameters=num_parameters, bytes_per_parameter=4, step_seconds=alone, backward_share=2 / 3)
    return predict_method(method.predicted_method, model, RANKS, network, local_steps=local_steps).seconds


def expected_bytes(method: Method, num_parameters: int, packet_bytes: int, idle_bytes: float) -> float | None:
    """Return the number of bytes that a rank sends per step, or None for PowerSGD, and without communication.

    The payload is sent in packets of `packet_bytes` bytes. A rank is assumed to receive as many bytes as it sends, and
    to acknowledge every second packet in a packet of its own, which RFC 1122 recommends; acknowledgements that are sent
    together with data make the measured number smaller. `idle_bytes` is the traffic of a step without communication.
    """
    if not method.communicates:
        return None
    if method.local_sgd is not None:
        payload = bytes_per_synchronization(num_parameters, RANKS, method.local_sgd.compression)
        payload /= method.local_sgd.steps
    elif method.compression in ("none", "bf16"):
        payload = bytes_per_synchronization(num_parameters, RANKS, "none", 4 if method.compression == "none" else 2)
    else:
        return None
    return payload * (1 + 1.5 * HEADER_BYTES / packet_bytes) + idle_bytes


def counted_packet_bytes(network_name: str) -> int:
    """Return the payload of one packet as the network interface counts it. On a network with a delay, segmentation
    offload is disabled; the bandwidth limit divides packets that are larger than its burst."""
    if " ms" in network_name or burst_bytes(network_name) < MAX_OFFLOADED_BYTES:
        return SEGMENT_BYTES
    return MAX_OFFLOADED_BYTES


def spread(values: list[float], digits: int) -> str:
    """Return the median and the range of `values`."""
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


def train(names: list[str], local_steps: int, settings: dict[str, Any], arguments: dict[str, Any]) -> Any:
    """Train with each method and two ranks on this machine, and return the runs. Show the progress on standard error.

    `settings` are keyword arguments of `methods`, and `arguments` are keyword arguments of `measure_losses`.
    """
    given = {
        "measure": "losses",
        "methods": names,
        "local_steps": local_steps,
        "settings": settings,
        "workload": vars(DEFAULT),
        "arguments": arguments,
    }
    process = subprocess.Popen(
        [*LAUNCH, "--backend", "ddp", "-np", str(RANKS), SCRIPT, json.dumps(given)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    printed = []
    for line in process.stdout:
        click.echo(line[:200], nl=not line[:200].endswith("\n"), err=True)
        printed.append(line)
    if process.wait():
        raise click.ClickException(f"the training ended with exit code {process.returncode}.")
    return parse_results("".join(printed))


def steps_to_target(losses: dict[str, Any], name: str, target: float) -> float | None:
    """Return the median number of steps until the validation loss is at most `target` times the final loss of
    synchronous training with the same seed, or None if a run does not reach it."""
    counts = []
    for run, baseline in zip(losses[name]["curves"], losses[SYNCHRONOUS]["curves"], strict=True):
        step = next((step for step, loss in run if loss <= target * baseline[-1][1]), None)
        if step is None:
            return None
        counts.append(step)
    return statistics.median(counts)


def loss_lines(losses: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """Return the table of the losses."""
    finals = {name: [curve[-1][1] for curve in found["curves"]] for name, found in losses.items()}
    rates = [f"{rate:g}" for rate in settings["peak_lrs"]]
    choice = (
        f"is {rates[0]} for all methods"
        if len(rates) == 1
        else f"of each method is the best of {', '.join(rates)} with the first seed"
    )
    lines = [
        "## Losses",
        "",
        f"{RANKS} ranks, {settings['steps']:,} steps of AdamW. The methods with local steps begin with "
        f"{settings['warmup_steps']} synchronous steps, and then synchronize after every {settings['local_steps']} "
        f"steps. DiLoCo has the outer learning rate {OUTER_LR:g} and the outer momentum {OUTER_MOMENTUM:g}. The peak "
        f"learning rate {choice}. The loss is that of the validation texts at the end: the median of "
        f"{settings['seeds']} seeds and the range; the change is relative to synchronous training with the same seed. "
        f"The last column is the number of steps until the loss is at most {settings['target']:g} times the final loss "
        f"of synchronous training, evaluated every {settings['evaluate_every']} steps.",
        "",
        "| method | peak learning rate | final loss | change | steps to the target |",
        "|---|---|---|---|---|",
    ]
    for name, values in finals.items():
        change = [100 * (loss / base - 1) for loss, base in zip(values, finals[SYNCHRONOUS], strict=True)]
        steps = steps_to_target(losses, name, settings["target"])
        lines.append(
            f"| {name} | {losses[name]['best']:g} | {spread(values, 3)} | {spread(change, 1)} % | "
            f"{'not reached' if steps is None else f'{steps:g}'} |"
        )
    return [*lines, ""]


def outer_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of the outer optimizers of DiLoCo."""
    lines = [
        "## Outer optimizers",
        "",
        "The validation loss of DiLoCo at the end of a run, for one seed, by the settings of the outer optimizer and "
        "the number of synchronous steps at the beginning. The change is relative to synchronous training.",
        "",
        "| steps | warm-up | outer learning rate | outer momentum | final loss | change |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        chosen = row["settings"]
        lines.append(
            f"| {row['steps']:,} | {chosen['warmup_steps']} | {chosen['outer_lr']:g} | {chosen['outer_momentum']:g} | "
            f"{row['final']:.3f} | {100 * (row['final'] / row['synchronous'] - 1):.1f} % |"
        )
    return [*lines, ""]


def speed_lines(cells: dict[str, Any], losses: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """Return a table of the times and bytes per workload, with a row per network, backend and method."""
    target = settings.get("target", 1.0)
    lines = [
        "## Times",
        "",
        "One rank on each of two hosts. Medians over turns of each method; in brackets the range. Bytes are those that "
        "the first host sent over its network interface. The expected number is the sum of the gradients or weights, "
        "their Ethernet, IP and TCP headers, acknowledgements, and the bytes of a step without communication. "
        "Consistency checks and Horovod's negotiation are not included. The predicted time is that of `unitrain bench "
        "predict --methods`, with the time without communication and a network that is fitted to collectives between "
        f"the hosts. The last column is the time of the steps until the loss is at most {target:g} times the final "
        "loss of synchronous training (see above), including the synchronous steps at the beginning.",
        "",
    ]
    for workload in sorted({cell_workload(cell) for cell in cells.values()}, key=count_parameters):
        lines += [
            f"### {count_parameters(workload):,} parameters, "
            f"{workload.batch} {'text' if workload.batch == 1 else 'texts'} per rank and step",
            "",
            "| network | backend | method | KB sent per step | expected | ratio | step | predicted / measured | "
            "speed relative to synchronous | time to the target |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for key, cell in cells.items():
            if cell_workload(cell) == workload:
                lines += cell_rows(key, cell, losses if workload == DEFAULT else {}, settings)
        lines.append("")
    return lines[:-1]


def cell_workload(cell: dict[str, Any]) -> Workload:
    """Return the workload of the measured `cell`."""
    return Workload(**cell.get("workload", {}))


def network_and_backend(key: str) -> list[str]:
    """Return the network and the backend in the `key` of a cell."""
    return key.split("; ")[0].rsplit(", ", 1)


def cell_rows(key: str, cell: dict[str, Any], losses: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """Return a row of the table per method. `key` contains the network and the backend of the measured `cell`."""
    network_name, backend = network_and_backend(key)
    target, warmup_steps = settings.get("target", 1.0), settings.get("warmup_steps", 0)
    num_parameters = count_parameters(cell_workload(cell))
    seconds = {name: statistics.median(found["seconds"]) for name, found in cell["methods"].items()}
    network, local_steps = Network(**cell["network"]), cell["local_steps"]
    packet_bytes = counted_packet_bytes(network_name)
    idle_bytes = statistics.median(cell["methods"][ALONE]["bytes"])
    rows = []
    for name, method in methods(local_steps).items():
        if name not in cell["methods"]:
            continue
        found = cell["methods"][name]
        sent = statistics.median(found["bytes"])
        expected = expected_bytes(method, num_parameters, packet_bytes, idle_bytes)
        predicted = predicted_seconds(method, num_parameters, seconds[ALONE], network, local_steps)
        steps = steps_to_target(losses, name, target) if name in losses else None
        warmup = min(warmup_steps, steps or 0) if method.local_sgd is not None else 0
        total = None if steps is None else warmup * seconds[SYNCHRONOUS] + (steps - warmup) * seconds[name]
        rows.append(
            f"| {network_name} | {backend} | {name} | {sent / 1e3:,.1f} | "
            f"{'' if expected is None else f'{expected / 1e3:,.1f}'} | "
            f"{'' if expected is None else f'{sent / expected:.3f}'} | "
            f"{spread([1000 * value for value in found['seconds']], 1)} ms | "
            f"{'' if predicted is None else f'{predicted / seconds[name]:.2f}'} | "
            f"{seconds[SYNCHRONOUS] / seconds[name]:.2f} | "
            f"{'' if total is None else f'{total:.0f} s'} |"
        )
    return rows


def draw(cells: dict[str, Any], path: Path) -> None:
    """Write a chart of the speed relative to synchronous training by bandwidth, as SVG."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasSVG(figure)
    panels = figure.subplots(1, len(BACKENDS), sharey=True)
    for axes, backend in zip(panels, BACKENDS, strict=True):
        found = {}
        for key, cell in cells.items():
            network, name = network_and_backend(key)
            if name == backend and " ms" not in network and cell_workload(cell) == DEFAULT:
                found[bits_per_second(network) / 1e6] = cell["methods"]
        for name in NAMES[1:]:
            points = [
                (
                    rate,
                    statistics.median(by_method[SYNCHRONOUS]["seconds"])
                    / statistics.median(by_method[name]["seconds"]),
                )
                for rate, by_method in sorted(found.items())
                if name in by_method
            ]
            axes.loglog([rate for rate, _ in points], [speed for _, speed in points], marker="o", label=name)
        axes.set(title=backend, xlabel="bandwidth (Mbit/s)")
        axes.minorticks_off()
    panels[0].set_ylabel("speed relative to synchronous training")
    panels[0].legend(fontsize="small")
    with rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": NAME}
    ):  # store text as text, and make the file reproducible
        figure.savefig(path, metadata={"Date": None})


def save(output: Path, figures: dict[str, Any]) -> None:
    """Write the tables, the results in JSON and the chart."""
    settings = figures["settings"]
    lines = [
        "# Low-communication training on two hosts with a slow network",
        "",
        f"One thread per rank, without a GPU; a GPT of {count_parameters(DEFAULT):,} parameters, {DEFAULT.batch} texts "
        f"of {LENGTH} characters per rank and step, unless stated otherwise; torch {torch.__version__}, Python "
        f"{platform.python_version()}, {os.cpu_count()} CPU cores for both ranks. Commands: "
        + ", ".join(f"`python benchmarks/low_communication.py {command}`" for command in figures["commands"])
        + ".",
        "",
        *(loss_lines(figures["losses"], settings) if figures["losses"] else []),
        *(outer_lines(figures["outer"]) if figures["outer"] else []),
        *speed_lines(figures["speeds"], figures["losses"], settings),
    ]
    save_results(lines, NAME, output, **figures)
    draw(figures["speeds"], output / f"{NAME}.svg")


def load(output: Path, command: str) -> dict[str, Any]:
    """Return the saved results, with `command` added to the list of commands."""
    path = output / f"{NAME}.json"
    empty: dict[str, Any] = {"losses": {}, "settings": {}, "outer": [], "speeds": {}, "commands": []}
    figures: dict[str, Any] = empty | (json.loads(path.read_text()) if path.exists() else {})
    if command.startswith("losses"):  # replace the losses of earlier commands
        figures["commands"] = [earlier for earlier in figures["commands"] if not earlier.startswith("losses")]
    figures["commands"] = list(dict.fromkeys([*figures["commands"], command]))
    return figures


method_option = click.option("--method", "names", type=click.Choice(NAMES), multiple=True, default=NAMES)
local_steps_option = click.option("--local-steps", type=click.IntRange(min=6), default=25, show_default=True)
warmup_steps_option = click.option("--warmup-steps", type=click.IntRange(min=0), default=200, show_default=True)
output_option = click.option("--output", type=click.Path(path_type=Path), default=RESULTS, show_default=True)


@click.group()
def main() -> None:
    """Measure low-communication training with one of the subcommands."""


@main.command("losses")
@output_option
@method_option
@local_steps_option
@click.option("--steps", type=click.IntRange(min=1), default=1000, show_default=True)
@warmup_steps_option
@click.option("--evaluate-every", type=click.IntRange(min=1), default=50, show_default=True)
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--peak-lr", "peak_lrs", type=float, multiple=True, default=[1e-3, 2e-3, 4e-3], show_default=True)
@click.option("--target", default=1.02, show_default=True, help="Loss to reach, relative to synchronous training.")
def losses_command(
    output: Path,
    names: tuple[str, ...],
    local_steps: int,
    steps: int,
    warmup_steps: int,
    evaluate_every: int,
    seeds: int,
    peak_lrs: tuple[float, ...],
    target: float,
) -> None:
    """Train with each method on this machine, and save the validation losses."""
    command = f"losses --steps {steps} --warmup-steps {warmup_steps} --local-steps {local_steps} --seeds {seeds}"
    command += "".join(f" --peak-lr {peak_lr:g}" for peak_lr in peak_lrs)
    command += "".join(f' --method "{name}"' for name in names if names != tuple(NAMES))
    arguments = {"peak_lrs": list(peak_lrs), "seeds": seeds, "steps": steps, "evaluate_every": evaluate_every}
    settings = {**arguments, "local_steps": local_steps, "warmup_steps": warmup_steps, "target": target}
    saved = load(output, command)
    if saved["settings"] != settings:  # replace the losses of other settings
        saved["losses"] = {}
    for name in dict.fromkeys([SYNCHRONOUS, *(name for name in names if name != ALONE)]):
        if name not in saved["losses"] or name in names:
            saved["losses"] |= train([name], local_steps, {"warmup_steps": warmup_steps}, arguments)
            saved["settings"] = settings
            save(output, saved)  # save now, because the next method takes minutes


@main.command("outer")
@output_option
@local_steps_option
@click.option("--steps", type=click.IntRange(min=1), default=400, show_default=True)
@warmup_steps_option
@click.option("--peak-lr", default=4e-3, show_default=True)
@click.option(
    "--outer",
    "outer_optimizers",
    type=(float, float),
    multiple=True,
    default=[(0.7, 0.9), (0.7, 0.5), (1.0, 0.5), (1.0, 0.6)],
    show_default=True,
    help="Learning rate and momentum of the outer optimizer.",
)
def outer_command(
    output: Path,
    local_steps: int,
    steps: int,
    warmup_steps: int,
    peak_lr: float,
    outer_optimizers: tuple[tuple[float, float], ...],
) -> None:
    """Train with DiLoCo and each outer optimizer on this machine, and add the validation losses for one seed."""
    command = f"outer --steps {steps} --warmup-steps {warmup_steps} --local-steps {local_steps} --peak-lr {peak_lr:g}"
    command += "".join(f" --outer {lr:g} {momentum:g}" for lr, momentum in outer_optimizers)
    arguments = {"peak_lrs": [peak_lr], "seeds": 1, "steps": steps, "evaluate_every": steps}
    chosen = [
        {"warmup_steps": warmup_steps, "outer_lr": lr, "outer_momentum": momentum} for lr, momentum in outer_optimizers
    ]
    finals = []
    for name, settings in [(SYNCHRONOUS, {}), *(("DiLoCo", settings) for settings in chosen)]:
        found = train([name], local_steps, settings, arguments)
        finals.append(found[name]["curves"][0][-1][1])
    figures = load(output, command)
    rows = [row for row in figures["outer"] if row["settings"] not in chosen or row["steps"] != steps]
    for settings, final in zip(chosen, finals[1:], strict=True):
        rows.append({"settings": settings, "steps": steps, "final": final, "synchronous": finals[0]})
    figures["outer"] = rows
    save(output, figures)


@main.command("speeds")
@output_option
@method_option
@local_steps_option
@click.option("--rate", "rates", multiple=True, default=["100mbit"], show_default=True, help="In tc notation.")
@click.option("--delay", default=0.0, show_default=True, help="Seconds from one host to the other.")
@click.option("--backend", "backends", type=click.Choice(BACKENDS), multiple=True, default=BACKENDS)
@click.option("--width", default=DEFAULT.width, show_default=True, help="Width of the model.")
@click.option("--layers", default=DEFAULT.layers, show_default=True, help="Layers of the model.")
@click.option("--batch", default=DEFAULT.batch, show_default=True, help="Texts per rank and step.")
@click.option("--seconds", default=4.0, show_default=True, help="Duration of a turn.")
@click.option("--rounds", type=click.IntRange(min=1), default=2, show_default=True)
@click.option(
    "--limit-seconds", "timeout_seconds", default=900.0, show_default=True, help="Limit per rate and backend."
)
def speeds_command(
    output: Path,
    names: tuple[str, ...],
    local_steps: int,
    rates: tuple[str, ...],
    delay: float,
    backends: tuple[str, ...],
    width: int,
    layers: int,
    batch: int,
    seconds: float,
    rounds: int,
    timeout_seconds: float,
) -> None:
    """Measure the time and the bytes of a step of each method at each bandwidth and on each backend."""
    workload = Workload(width, layers, batch)
    suffix = f", {2000 * delay:g} ms round-trip time" if delay else ""
    command = "speeds" + "".join(f" --rate {rate}" for rate in rates) + (f" --delay {delay:g}" if delay else "")
    if workload != DEFAULT:
        command += f" --width {width} --layers {layers} --batch {batch}"
    command += "".join(f' --method "{name}"' for name in names if names != tuple(NAMES))
    size = "" if workload == DEFAULT else f"; width {width}, layers {layers}, batch {batch}"
    arguments = {"seconds": seconds, "rounds": rounds, "local_steps": local_steps}
    chosen = list(dict.fromkeys([ALONE, SYNCHRONOUS, *names]))
    given = {
        "measure": "speeds",
        "methods": chosen,
        "local_steps": local_steps,
        "settings": {},
        "workload": vars(workload),
        "arguments": arguments,
    }
    for rate in rates:
        for backend in backends:
            cell = measure_speeds(rate, delay, backend, given, timeout_seconds)
            figures = load(output, command)
            entry = {**cell, "local_steps": local_steps, "workload": vars(workload)}
            figures["speeds"][f"{rate}{suffix}, {backend}{size}"] = entry
            save(output, figures)  # save now, because the next backend takes minutes and may fail


if __name__ == "__main__":
    main()
