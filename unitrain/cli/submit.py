"""`unitrain submit`: a training script as a job of Slurm's or Kubernetes'."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from unitrain.backends import registry
from unitrain.bootstrap import environment
from unitrain.cli.translate import show
from unitrain.errors import ConfigError, did_you_mean
from unitrain.launchers import LaunchError, parse_exports
from unitrain.launchers.arguments import looks_secret
from unitrain.launchers.translation import Job, Translation, kubernetes, sbatch
from unitrain.launchers.translation.hosts import divide_evenly
from unitrain.supervisor.checks import check_script

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?", re.ASCII)
_MEMORY = re.compile(r"(?P<amount>\d+)(?P<unit>[KMGT])i?", re.ASCII)
_PROGRAMS = {"slurm": ["sbatch"], "kubernetes": ["kubectl", "apply", "-f", "-"]}
_SUBMIT_SECONDS = 60


@click.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
@click.option("--to", "target", required=True, metavar="SCHEDULER", help="slurm or kubernetes.")
@click.option("--backend", default="ddp", metavar="NAME", help="ddp, horovod, or a plug-in. [default: ddp]")
@click.option("--nodes", type=click.IntRange(min=1), default=1, metavar="N", help="Hosts, or pods. [default: 1]")
@click.option(
    "-np",
    "-n",
    "--num-processes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Ranks in all. [default: one for each GPU, else one for each node]",
)
@click.option("--gpus-per-node", type=click.IntRange(min=0), metavar="N", help="GPUs of each node.")
@click.option("--cpus-per-task", type=click.IntRange(min=1), metavar="N", help="Cores of each rank.")
@click.option("--memory", metavar="SIZE", help="Memory of each node, as in 64G.")
@click.option("--time", "limit", metavar="TIME", help="Time limit, as Slurm writes it: 90, 4:00:00 or 2-12.")
@click.option("--job-name", metavar="NAME", help="[default: the script's]")
@click.option("--partition", metavar="NAME", help="slurm: where it runs.")
@click.option("--account", metavar="NAME", help="slurm: who pays.")
@click.option("--output", metavar="FILE", help="slurm: where the log goes. [default: %x-%j.out]")
@click.option(
    "--signal-seconds",
    type=click.IntRange(min=1, max=65535),
    metavar="N",
    help="slurm: how long before the end of its time a job saves, ends, and is queued again. [default: 120]",
)
@click.option("--kind", metavar="KIND", help="kubernetes: PyTorchJob, TrainJob or MPIJob. [default: the backend's]")
@click.option("--image", metavar="NAME", help="kubernetes: the containers' image.")
@click.option("--namespace", metavar="NAME", help="kubernetes: where it runs.")
@click.option(
    "-x", "exports", multiple=True, metavar="NAME[=VALUE]", help="Hand a variable on to all ranks. Repeatable."
)
@click.option("--dry-run", is_flag=True, help="Print the script or manifest and stop.")
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[OPTION=VALUE]... SCRIPT [ARGS]...")
def submit(
    target: str,
    backend: str,
    nodes: int,
    num_processes: int | None,
    gpus_per_node: int | None,
    cpus_per_task: int | None,
    memory: str | None,
    limit: str | None,
    job_name: str | None,
    partition: str | None,
    account: str | None,
    output: str | None,
    signal_seconds: int | None,
    kind: str | None,
    image: str | None,
    namespace: str | None,
    exports: tuple[str, ...],
    dry_run: bool,
    words: tuple[str, ...],
) -> None:
    """Hand SCRIPT with its ARGS to a scheduler, as a job that may be stopped and goes on from its newest checkpoint.

    The batch script or manifest is shown first. Options that unitrain does not know go to Slurm as they are, each in
    one word: --qos=high.

    \b
      unitrain submit --to slurm --nodes 2 --gpus-per-node 8 --time 12:00:00 --partition gpu train.py --epochs 90
      unitrain submit --to kubernetes --nodes 2 --gpus-per-node 8 --image registry/train:1 --dry-run train.py
      unitrain submit --to kubernetes --kind TrainJob --image registry/train:1 train.py
    """
    try:
        registry.check_result_name(backend)
        if target not in _PROGRAMS:
            near = did_you_mean(target, _PROGRAMS)
            raise LaunchError(f"Unknown scheduler {target!r}. {near}Available: {', '.join(_PROGRAMS)}.")
        given, script, args = _parted(words, target)
        seconds = None if limit is None else _seconds(limit)
        forwarded, values = parse_exports(exports)
        if target == "kubernetes":  # whose pods have nothing of this shell; what looks secret comes from a secret there
            here = {name: environment.copy().get(name, "") for name in forwarded if name not in values}
            values |= {name: value for name, value in here.items() if not looks_secret(name, value)}
        size = num_processes or nodes * max(gpus_per_node or 1, 1)
        if size < nodes:
            raise LaunchError(f"-np {size} leaves some of {nodes} nodes without a rank. Use: --nodes {size}")
        job = Job(
            program=(sys.executable if target == "slurm" else "python", script, *args),
            counts=divide_evenly(size, nodes),
            backend=backend,
            environment=values,
            forwarded=forwarded,
        )
        if target == "slurm":
            _refuse(target, {"--kind": kind, "--image": image, "--namespace": namespace})
            asked = {
                "--job-name": job_name,
                "--gpus-per-node": gpus_per_node or None,
                "--cpus-per-task": cpus_per_task,
                "--mem": None if memory is None else "".join(_memory(memory)),
                "--time": limit,
                "--partition": partition,
                "--account": account,
                "--output": output,
                "--signal": None if signal_seconds is None else f"USR1@{signal_seconds}",
            }
            directives = [f"{name}={value}" for name, value in asked.items() if value is not None]
            translated = sbatch.write(job, [*directives, *given])
        else:
            theirs = {"--partition": partition, "--account": account, "--output": output}
            _refuse(target, {**theirs, "--signal-seconds": signal_seconds})
            pods = kubernetes.Pods(
                kind=kind,
                name=job_name,
                namespace=namespace,
                image=image or "IMAGE",
                gpus=gpus_per_node,
                cpus=None if cpus_per_task is None else str(cpus_per_task * job.counts[0]),
                memory=None if memory is None else "{}{}i".format(*_memory(memory)),
                timeout_seconds=seconds,
            )
            translated = kubernetes.write(job, pods)
            if image is None and not dry_run:
                raise LaunchError("A job of Kubernetes needs an image with the script in it. Add --image NAME")
    except (LaunchError, ConfigError) as error:
        raise click.UsageError(str(error)) from error
    show(translated)
    if not dry_run:
        _hand_over(target, translated)


def _parted(words: Sequence[str], target: str) -> tuple[list[str], str, tuple[str, ...]]:
    """Return the options that go before the script, the script, and its arguments. Raises LaunchError."""
    given = list(itertools.takewhile(lambda word: word.startswith("-"), words))
    rest = words[len(given) :]
    if not rest:
        raise LaunchError("No script was given to run. End the line as in: train.py")
    if given and target != "slurm":
        raise LaunchError(
            f"unitrain submit has no option {given[0]!r} for {target}. Change the manifest itself: --dry-run > job.yaml"
        )
    if target == "slurm":
        try:
            check_script(Path(rest[0]))
        except LaunchError as error:
            if not given:
                raise
            raise LaunchError(
                f"{error} Options of sbatch's own are one word each, as in: {given[-1].partition('=')[0]}={rest[0]}"
            ) from error
    return given, rest[0], tuple(rest[1:])


def _refuse(target: str, options: dict[str, object]) -> None:
    """Raise LaunchError for an option that another scheduler has."""
    for name, value in options.items():
        if value is not None:
            other = "kubernetes" if target == "slurm" else "slurm"
            raise LaunchError(f"{name} {value} is for {other}, and the job goes to {target}. Leave {name} out")


def _seconds(text: str) -> int:
    """Return the seconds of a time as Slurm writes it: minutes, minutes:seconds, hours:minutes:seconds, days-hours,
    days-hours:minutes, days-hours:minutes:seconds. Raises LaunchError."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise LaunchError(f"--time must be minutes, or as in 4:00:00 and 2-12, got {text!r}. Use: --time 4:00:00")
    first, second, third = (int(match[name] or 0) for name in ("first", "second", "third"))
    if match["days"] is not None:
        return int(match["days"]) * 86400 + first * 3600 + second * 60 + third
    if match["third"] is not None:
        return first * 3600 + second * 60 + third
    return first * 60 + second


def _memory(text: str) -> tuple[str, str]:
    match = _MEMORY.fullmatch(text)
    if match is None:
        raise LaunchError(f"--memory must be a number with K, M, G or T, got {text!r}. Use: --memory 64G")
    return match["amount"], match["unit"]


def _hand_over(target: str, translated: Translation) -> None:
    """Give the job to the scheduler, and end with its exit code."""
    command = _PROGRAMS[target]
    if shutil.which(command[0]) is None:
        raise click.UsageError(
            f"{command[0]}, which hands the job over, is not on PATH. Go to a host that has it, or keep what is to be "
            "handed over: --dry-run > job"
        )
    sys.stdout.flush()
    try:
        done = subprocess.run(command, input=translated.text, text=True, timeout=_SUBMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise click.ClickException(
            f"{command[0]} did not answer within {_SUBMIT_SECONDS} s, and may still have taken the job. Look with: "
            f"{'squeue --me' if target == 'slurm' else 'kubectl get pods'}"
        ) from None
    sys.exit(done.returncode)
