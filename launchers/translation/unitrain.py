"""The command line of `unitrain launch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from unitrain.launchers.arguments import check_no_backend, parse_launcher_args
from unitrain.launchers.devices import parse_devices, select_devices_without_query
from unitrain.launchers.elastic import DEFAULT_ELASTIC_RESTARTS, parse_elastic
from unitrain.launchers.errors import LaunchError
from unitrain.launchers.hosts import format_hosts, parse_host_options
from unitrain.launchers.spec import CONFIG_SUFFIXES
from unitrain.launchers.translation.hosts import place_processes
from unitrain.launchers.translation.job import Job, LauncherOption
from unitrain.launchers.translation.options import Options, ParsedOption, Syntax, arity_table, topic_by_option
from unitrain.launchers.translation.words import join
from unitrain.launchers.translation.writing import (
    DEFAULT_BACKENDS,
    CommandLine,
    Translation,
    options_for,
    variables_for,
)

LAUNCHER = "unitrain launch"
SYNTAX = Syntax(
    LAUNCHER,
    arity_table(
        "--gloo --mpi --dry-run --help --module --untuned --standby",
        "--backend --launcher --num-processes --hosts --hostfile --interface -x --max-restarts --launcher-args "
        "--elastic --host-discovery-script --elastic-timeout --log-dir --devices --metrics-port --metrics-address",
    ),
    {"-np": "--num-processes", "-n": "--num-processes", "-H": "--hosts", "-h": "--help", "-m": "--module"},
)
_TOPICS = topic_by_option(output="--log-dir", elastic="--elastic --elastic-timeout --host-discovery-script")
_TARGET = "unitrain"
_DEFAULT_LAUNCHERS = {"ddp": "torchrun", "horovod": "horovodrun"}


def parse(words: Sequence[str], default_backend: str | None = None) -> Job:
    """Parse the words after `unitrain launch` into a job. `default_backend` is the value of UNITRAIN_BACKEND."""
    options = Options(SYNTAX, words)
    hostfile = options.take_last("--hostfile")
    hosts = parse_host_options(
        options.take_last("--hosts"), Path(hostfile).expanduser() if hostfile is not None else None
    )
    slots = sum(host.slots for host in hosts)
    num_processes = options.take_number("--num-processes")
    devices = options.take_last("--devices")
    selected = None
    if devices is not None:
        selected = select_devices_without_query(parse_devices(devices), num_processes, hosts)
        num_processes, hosts = selected.num_processes, selected.hosts
    size = num_processes or slots or 1
    script = options.take_last("--host-discovery-script")
    elastic = options.take_last("--elastic")
    if script is not None and elastic is None:
        raise LaunchError(
            f"--host-discovery-script '{script}' is for elastic jobs, and --elastic is missing. Add the allowed number "
            "of ranks: --elastic 1:8"
        )
    max_restarts = options.take_number("--max-restarts", minimum=0)
    if elastic is not None:
        max_restarts = DEFAULT_ELASTIC_RESTARTS if max_restarts is None else max_restarts
        max_ranks = parse_elastic(elastic).max_ranks
        size = min(max_ranks, slots or max_ranks)
    controller = options.take_all("--gloo", "--mpi")
    backend, launcher = options.take_last("--backend") or default_backend, options.take_last("--launcher")
    launcher = launcher or (
        "horovodrun" if controller and backend is None else _DEFAULT_LAUNCHERS.get(backend or "", "torchrun")
    )
    backend = backend or DEFAULT_BACKENDS.get(launcher, "ddp")
    variables, forwarded = options.take_exports()
    check_no_backend(variables)
    if selected is not None:
        variables = {**variables, **selected.variables}
    texts = [option.values[0] for option in options.take_all("--launcher-args")]
    launcher_options = [LauncherOption(launcher, tuple(parse_launcher_args([text])), "other") for text in texts]
    launcher_options += [
        LauncherOption("horovodrun", ("--mpi",), "other") for option in controller[-1:] if option.name == "--mpi"
    ]
    for option in options.take_all("--interface"):
        launcher_options.append(_interface_option(option))
    if elastic is not None:
        elastic_words = ("--elastic", elastic, *(("--host-discovery-script", script) if script is not None else ()))
        launcher_options.append(LauncherOption(LAUNCHER, elastic_words, "elastic"))
    counts, names, remarks = place_processes(size, hosts)
    if launcher == "srun" and not hosts:
        remarks = (
            *remarks,
            "srun uses the hosts of the allocation; the translated command assumes one host. Name the hosts with "
            "--hosts.",
        )
    options.take_all("--dry-run")
    program = ("python", *options.program)
    if options.take_flag("--module"):
        program = ("python", "-m", *options.program)
    elif Path(options.program[0]).suffix in CONFIG_SUFFIXES:
        program = ("python", "-m", "unitrain", "train", *options.program)
    return Job(
        program=program,
        ranks_per_host=counts,
        hosts=names,
        backend=backend,
        environment=variables,
        public_names=frozenset(selected.variables if selected is not None else ()),
        forwarded=tuple(dict.fromkeys(forwarded)),
        max_restarts=max_restarts,
        discovery_script=script,
        launcher_options=(*launcher_options, *options.remaining(_TOPICS)),
        remarks=remarks,
    )


def build(job: Job) -> Translation:
    """Return the `unitrain launch` command. Its launcher is the backend's default, except that mpirun replaces torchrun
    on several hosts.
    """
    job.check_hosts_named(LAUNCHER)
    if not _is_python_program(job):
        raise LaunchError(
            f"unitrain launch runs Python scripts, but the job runs: {join(job.program)}. "
            "Use a Python script, or choose another launcher, as in: --to torchrun"
        )
    default_launcher = _DEFAULT_LAUNCHERS.get(job.backend or "ddp", "torchrun")
    launcher = "mpirun" if len(job.ranks_per_host) > 1 and default_launcher == "torchrun" else default_launcher
    unitrain_options, other_options = _split_options(job.launcher_options)
    # The backend is an option of unitrain launch, so it is not needed as a variable.
    inner_job = replace(job, launcher_options=other_options, backend=None)
    extra_options, remarks = options_for(inner_job, launcher, advice_target=_TARGET)
    if any(
        option.launcher != LAUNCHER and "--elastic" in option.equivalents.get(_TARGET, ())
        for option in job.launcher_options
    ):
        remarks.append(
            "With --elastic, unitrain launch restarts the job when its hosts change: a Trainer then resumes from its "
            "newest checkpoint, and hvd.elastic is not used."
        )
    variables = variables_for(inner_job, launcher)
    has_rendezvous = len(job.ranks_per_host) > 1 or job.address or job.port
    if has_rendezvous and launcher != "horovodrun":  # horovodrun has its own rendezvous
        variables |= job.rendezvous_variables
    private = {name: value for name, value in variables.items() if name in job.private_values}
    options = [*(("--backend", job.backend) if job.backend else ())]
    if launcher != default_launcher:
        options += ["--launcher", launcher]
    if "--elastic" not in unitrain_options:  # this option sets the number of ranks
        options += ["-np", str(job.size)]
    if job.hosts:
        options += ["-H", format_hosts(job.named_hosts)]
    if launcher == "horovodrun" and any(option.words == ("--mpi",) for option in job.launcher_options):
        options.append("--mpi")
        extra_options = [word for word in extra_options if word != "--mpi"]
    for name in dict.fromkeys([*job.forwarded, *private]):
        options += ["-x", name]
    for name, value in variables.items():
        if name not in private:
            options += ["-x", f"{name}={value}"]
    default_restarts = DEFAULT_ELASTIC_RESTARTS if "--elastic" in unitrain_options else 0
    if job.max_restarts not in (None, default_restarts):
        options += ["--max-restarts", str(job.max_restarts)]
    options += unitrain_options
    if extra_options:
        options += ["--launcher-args", join(extra_options)]
    words = ["unitrain", "launch", *options, *job.program[1:]]
    line = CommandLine(words, private, job.directory, private_names=private)
    return Translation([line], [*job.remarks, *remarks])


def _is_python_program(job: Job) -> bool:
    """Return whether the job runs a Python script, or a module with -m."""
    if job.python is None or len(job.program) < 2:
        return False
    first_argument = job.program[1]
    return not first_argument.startswith("-") or (first_argument == "-m" and len(job.program) > 2)


def _split_options(options: Sequence[LauncherOption]) -> tuple[list[str], tuple[LauncherOption, ...]]:
    """Return the words of the options that unitrain launch itself has, and the other options.

    The words come from options of an original `unitrain launch` command, and from the equivalents of other launchers'
    options.
    """
    words: list[str] = []
    other_options: list[LauncherOption] = []
    for option in options:
        if option.launcher == LAUNCHER:
            words += option.words
        elif _TARGET in option.equivalents:
            words += option.equivalents[_TARGET]
        else:
            other_options.append(option)
    return words, tuple(other_options)


def _interface_option(option: ParsedOption) -> LauncherOption:
    """Return --interface with the equivalents that unitrain launch generates for other launchers."""
    name = option.values[0]
    variables = dict.fromkeys(("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME"), name)
    settings = [word for part in ("btl", "oob") for word in ("-mca", f"{part}_tcp_if_include", name)]
    equivalents = {
        "horovodrun": ("--network-interfaces", name),
        "mpirun": (*(word for item in variables.items() for word in ("-x", "=".join(item))), *settings),
    }
    return LauncherOption(LAUNCHER, option.words, "network", equivalents=equivalents, variables=variables)
