"""Implementation of `unitrain submit`: write and submit a batch script or manifest for a training script."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import yaml

from unitrain.backends import registry
from unitrain.bootstrap import environment
from unitrain.launchers import LaunchError, parse_exports
from unitrain.launchers.errors import did_you_mean
from unitrain.launchers.translation import Job, Translation, kubernetes, sbatch
from unitrain.launchers.translation.hosts import divide_evenly
from unitrain.supervisor import following
from unitrain.supervisor.checks import check_config_options, check_script, is_config_file
from unitrain.supervisor.kubernetes_job import KubernetesJob
from unitrain.supervisor.slurm_job import SlurmJob

_TIME_PATTERN = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?", re.ASCII)
_MEMORY_PATTERN = re.compile(r"(?P<amount>\d+)(?P<unit>[KMGT])i?", re.ASCII)
_SUBMIT_COMMANDS = {"slurm": ["sbatch"], "kubernetes": ["kubectl", "apply", "-f", "-"]}
_SUBMIT_TIMEOUT_SECONDS = 60


@dataclass(frozen=True, kw_only=True)
class SubmitRequest:
    """The arguments of `unitrain submit`. None means that the option is not set.

    `script_and_args` contains the options of sbatch, the script and its arguments.
    """

    scheduler: str
    script_and_args: Sequence[str]
    backend: str = "ddp"
    nodes: int = 1
    num_processes: int | None = None
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    memory: str | None = None
    time_limit: str | None = None
    job_name: str | None = None
    partition: str | None = None
    account: str | None = None
    output: str | None = None
    signal_seconds: int | None = None
    kind: str | None = None
    runtime: str | None = None
    mpi_runtime: str | None = None
    image: str | None = None
    namespace: str | None = None
    exports: tuple[str, ...] = ()
    is_followed: bool = False
    is_dry_run: bool = False


def build_submission(request: SubmitRequest) -> Translation:
    """Return the batch script or manifest for a request. Raises LaunchError and ConfigError."""
    registry.check_backend_name(request.backend)
    scheduler = request.scheduler
    if scheduler not in _SUBMIT_COMMANDS:
        suggestion = did_you_mean(scheduler, _SUBMIT_COMMANDS)
        raise LaunchError(f"Unknown scheduler {scheduler!r}. {suggestion}Available: {', '.join(_SUBMIT_COMMANDS)}.")
    scheduler_options, script, args = _split_arguments(request.script_and_args, scheduler)
    if is_config_file(script):
        check_config_options(script, args)
    timeout_seconds = None if request.time_limit is None else _parse_time(request.time_limit)
    forwarded, values = parse_exports(request.exports)
    if scheduler == "kubernetes":
        # Pods do not inherit the environment of this shell. They read the values from a Kubernetes Secret.
        variables = environment.copy()
        values |= {name: variables.get(name, "") for name in forwarded if name not in values}
    size = request.num_processes or request.nodes * max(request.gpus_per_node or 1, 1)
    if size < request.nodes:
        raise LaunchError(f"-np {size} leaves some of {request.nodes} nodes without a rank. Use: --nodes {size}")
    job = Job(
        program=(
            sys.executable if scheduler == "slurm" else "python",
            *(("-m", "unitrain", "train") if is_config_file(script) else ()),
            script,
            *args,
        ),
        ranks_per_host=divide_evenly(size, request.nodes),
        backend=request.backend,
        environment=values,
        forwarded=forwarded,
    )
    if scheduler == "slurm":
        arrays = [option for option in scheduler_options if re.match(r"--array\b|-a", option)]
        if request.is_followed and arrays:
            raise LaunchError(f"--follow shows one job, but {arrays[0]} submits several. Leave --follow out")
        return sbatch.build(job, [*_directives(request), *scheduler_options])
    return _build_manifest(request, job, timeout_seconds)


def submit(scheduler: str, translation: Translation) -> int:
    """Submit a batch script or manifest with sbatch or kubectl, and return the exit code of this command.

    Raises LaunchError if the command is not installed, and TimeoutError if it times out.
    """
    return _submit(scheduler, translation).returncode


def submit_and_follow(scheduler: str, translation: Translation) -> int:
    """Submit a job, print its state and log until it ends, and return its exit code.

    If the job is not accepted, return the exit code of sbatch or kubectl. Raises LaunchError and TimeoutError as
    `submit` does.
    """
    process = _submit(scheduler, translation, stdout=subprocess.PIPE)
    click.echo(process.stdout, nl=False)
    if process.returncode != 0:
        return process.returncode
    if scheduler == "slurm":
        return following.follow(SlurmJob.from_output(process.stdout))
    return following.follow(KubernetesJob.from_manifest(translation.text or ""))


def _submit(scheduler: str, translation: Translation, stdout: int | None = None) -> subprocess.CompletedProcess[str]:
    command = _SUBMIT_COMMANDS[scheduler]
    if shutil.which(command[0]) is None:
        raise LaunchError(
            f"{command[0]}, which submits the job, is not on PATH. Run the command on a host that has it, or save the "
            "job to a file: --dry-run > job"
        )
    try:
        return subprocess.run(
            command,
            input=_submitted_text(translation),
            env=environment.copy() | dict(translation.private_values),
            stdout=stdout,
            text=True,
            timeout=_SUBMIT_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(
            f"{command[0]} did not respond within {_SUBMIT_TIMEOUT_SECONDS} s, but may have accepted the job. Check "
            f"with: {'squeue --me' if scheduler == 'slurm' else 'kubectl get pods'}"
        ) from None


def _submitted_text(translation: Translation) -> str:
    """Return the text for the standard input of sbatch or kubectl: a Kubernetes Secret with the values of the user's
    variables precedes the manifest."""
    text = translation.text or ""
    if translation.secret is None:
        return text
    namespace = yaml.safe_load(text)["metadata"].get("namespace")
    return f"{kubernetes.build_secret(translation.secret, namespace, translation.private_values)}---\n{text}"


def _directives(request: SubmitRequest) -> list[str]:
    """Return the sbatch options for a request."""
    kubernetes_options = {
        "--kind": request.kind, "--runtime": request.runtime, "--mpi-runtime": request.mpi_runtime,
        "--image": request.image, "--namespace": request.namespace,
    }  # fmt: skip
    _reject_options_of_other_scheduler("slurm", kubernetes_options)
    values = {
        "--job-name": request.job_name,
        "--gpus-per-node": request.gpus_per_node or None,
        "--cpus-per-task": request.cpus_per_task,
        "--mem": None if request.memory is None else "".join(_parse_memory(request.memory)),
        "--time": request.time_limit,
        "--partition": request.partition,
        "--account": request.account,
        "--output": request.output,
        "--signal": None if request.signal_seconds is None else f"USR1@{request.signal_seconds}",
    }
    return [f"{name}={value}" for name, value in values.items() if value is not None]


def _build_manifest(request: SubmitRequest, job: Job, timeout_seconds: int | None) -> Translation:
    slurm_options = {"--partition": request.partition, "--account": request.account, "--output": request.output}
    _reject_options_of_other_scheduler("kubernetes", {**slurm_options, "--signal-seconds": request.signal_seconds})
    settings = kubernetes.ManifestSettings(
        kind=request.kind,
        runtime=request.runtime,
        mpi_runtime=request.mpi_runtime,
        name=request.job_name,
        namespace=request.namespace,
        image=request.image or "IMAGE",
        gpus=request.gpus_per_node,
        cpus=None if request.cpus_per_task is None else str(request.cpus_per_task * job.ranks_per_host[0]),
        memory=None if request.memory is None else "{}{}i".format(*_parse_memory(request.memory)),
        timeout_seconds=timeout_seconds,
    )
    manifest = kubernetes.build(job, settings)
    if request.image is None and not request.is_dry_run:
        raise LaunchError("A Kubernetes job needs an image that contains the script. Add --image NAME")
    return manifest


def _split_arguments(script_and_args: Sequence[str], scheduler: str) -> tuple[list[str], str, tuple[str, ...]]:
    """Return the options before the script, the script, and its arguments. Raises LaunchError."""
    options = list(itertools.takewhile(lambda word: word.startswith("-"), script_and_args))
    remaining = script_and_args[len(options) :]
    if not remaining:
        raise LaunchError("The command lacks a script. End it as in: train.py")
    if options and scheduler != "slurm":
        raise LaunchError(
            f"unitrain submit has no option {options[0]!r} for {scheduler}. Edit the manifest instead: "
            "--dry-run > job.yaml"
        )
    if scheduler == "slurm":
        try:
            check_script(Path(remaining[0]), runs_here=False)
        except LaunchError as error:
            if not options:
                raise
            option = options[-1].partition("=")[0]
            separator = "=" if option.startswith("--") else ""  # sbatch reads "-J=name" as the name "=name"
            raise LaunchError(
                f"{error} Write options of sbatch as one word each: {option}{separator}{remaining[0]}"
            ) from error
    return options, remaining[0], tuple(remaining[1:])


def _reject_options_of_other_scheduler(scheduler: str, options: Mapping[str, object]) -> None:
    """Raise LaunchError if one of the `options`, which only the other scheduler supports, is set."""
    for name, value in options.items():
        if value is not None:
            other_scheduler = "kubernetes" if scheduler == "slurm" else "slurm"
            raise LaunchError(
                f"{name} {value} is an option for {other_scheduler}, but --to is {scheduler}. Leave {name} out"
            )


def _parse_time(text: str) -> int:
    """Return the seconds of a time limit in Slurm's notation. Raises LaunchError.

    The formats are minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes and
    days-hours:minutes:seconds.
    """
    match = _TIME_PATTERN.fullmatch(text)
    if match is None:
        raise LaunchError(f"--time must be minutes, or as in 4:00:00 and 2-12, got {text!r}. Use: --time 4:00:00")
    first, second, third = (int(match[name] or 0) for name in ("first", "second", "third"))
    if match["days"] is not None:
        return int(match["days"]) * 86400 + first * 3600 + second * 60 + third
    if match["third"] is not None:
        return first * 3600 + second * 60 + third
    return first * 60 + second


def _parse_memory(text: str) -> tuple[str, str]:
    """Parse a memory size such as "64G" into amount and unit. Raises LaunchError."""
    match = _MEMORY_PATTERN.fullmatch(text)
    if match is None:
        raise LaunchError(f"--memory must be a number with K, M, G or T, got {text!r}. Use: --memory 64G")
    return match["amount"], match["unit"]
