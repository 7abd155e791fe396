"""The command line of horovodrun."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

from unitrain.launchers import mpirun
from unitrain.launchers.errors import LaunchError
from unitrain.launchers.hosts import format_hosts
from unitrain.launchers.translation import openmpi
from unitrain.launchers.translation.hosts import place_processes, read_hosts
from unitrain.launchers.translation.job import Job, LauncherOption, parse_number
from unitrain.launchers.translation.options import Options, ParsedOption, Syntax, arity_table, topic_by_option
from unitrain.launchers.translation.writing import CommandLine, Translation, options_for, restart_remarks, variables_for

LAUNCHER = "horovodrun"
SYNTAX = Syntax(
    LAUNCHER,
    arity_table(
        "--help --version --check-build --disable-cache --verbose --hierarchical-allreduce --no-hierarchical-allreduce "
        "--hierarchical-allgather --no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune "
        "--no-autotune --timeline-mark-cycles --no-timeline-mark-cycles --no-stall-check --stall-check "
        "--mpi-threads-disable --no-mpi-threads-disable --tcp --log-with-timestamp --log-without-timestamp "
        "--prefix-output-with-timestamp --log-hide-timestamp --no-log-hide-timestamp --gloo --mpi --jsrun",
        "--num-proc --start-timeout --network-interfaces --output-filename --config-file --ssh-port "
        "--ssh-identity-file --fusion-threshold-mb --cycle-time-ms --cache-capacity --autotune-log-file "
        "--autotune-warmup-samples --autotune-steps-per-sample --autotune-bayes-opt-max-samples "
        "--autotune-gaussian-process-noise --min-np --max-np --slots-per-host --elastic-timeout --reset-limit "
        "--timeline-filename --stall-check-warning-time-seconds --stall-check-shutdown-time-seconds --mpi-args "
        "--binding-args --num-nccl-streams --thread-affinity --gloo-timeout-seconds --log-level --hosts --hostfile "
        "--host-discovery-script",
    )
    | {"--blacklist-cooldown-range": 2},
    {
        "-np": "--num-proc", "-h": "--help", "-v": "--version", "-cb": "--check-build", "-p": "--ssh-port",
        "-i": "--ssh-identity-file", "-H": "--hosts", "-hostfile": "--hostfile",
        "--network-interface": "--network-interfaces", "--min-num-proc": "--min-np", "--max-num-proc": "--max-np",
        "-prefix-timestamp": "--prefix-output-with-timestamp",
    },
)  # fmt: skip
_TOPICS = topic_by_option(
    ssh="--ssh-port --ssh-identity-file",
    output="--output-filename --prefix-output-with-timestamp",
    elastic="--min-np --max-np --slots-per-host --elastic-timeout --reset-limit --blacklist-cooldown-range "
    "--host-discovery-script",
    variables="--config-file",
    diagnosis="--verbose",
)
# The variables, without HOROVOD_, that horovodrun sets for these options (horovod.runner.common.util.config_parser).
_VARIABLE_BY_OPTION = {
    "--cycle-time-ms": "CYCLE_TIME", "--cache-capacity": "CACHE_CAPACITY", "--num-nccl-streams": "NUM_NCCL_STREAMS",
    "--autotune-log-file": "AUTOTUNE_LOG", "--autotune-warmup-samples": "AUTOTUNE_WARMUP_SAMPLES",
    "--autotune-steps-per-sample": "AUTOTUNE_STEPS_PER_SAMPLE",
    "--autotune-bayes-opt-max-samples": "AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
    "--autotune-gaussian-process-noise": "AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "--timeline-filename": "TIMELINE",
    "--stall-check-warning-time-seconds": "STALL_CHECK_TIME_SECONDS", "--thread-affinity": "THREAD_AFFINITY",
    "--stall-check-shutdown-time-seconds": "STALL_SHUTDOWN_TIME_SECONDS", "--log-level": "LOG_LEVEL",
    "--gloo-timeout-seconds": "GLOO_TIMEOUT_SECONDS",
}  # fmt: skip
_SWITCHES = {
    "--hierarchical-allreduce": ("HIERARCHICAL_ALLREDUCE", "1"),
    "--no-hierarchical-allreduce": ("HIERARCHICAL_ALLREDUCE", "0"),
    "--hierarchical-allgather": ("HIERARCHICAL_ALLGATHER", "1"),
    "--no-hierarchical-allgather": ("HIERARCHICAL_ALLGATHER", "0"),
    "--torus-allreduce": ("TORUS_ALLREDUCE", "1"), "--no-torus-allreduce": ("TORUS_ALLREDUCE", "0"),
    "--autotune": ("AUTOTUNE", "1"), "--timeline-mark-cycles": ("TIMELINE_MARK_CYCLES", "1"),
    "--no-timeline-mark-cycles": ("TIMELINE_MARK_CYCLES", "0"), "--no-stall-check": ("STALL_CHECK_DISABLE", "1"),
    "--stall-check": ("STALL_CHECK_DISABLE", "0"), "--mpi-threads-disable": ("MPI_THREADS_DISABLE", "1"),
    "--no-mpi-threads-disable": ("MPI_THREADS_DISABLE", "0"), "--log-with-timestamp": ("LOG_HIDE_TIME", "0"),
    "--log-without-timestamp": ("LOG_HIDE_TIME", "1"), "--log-hide-timestamp": ("LOG_HIDE_TIME", "1"),
    "--no-log-hide-timestamp": ("LOG_HIDE_TIME", "0"),
}  # fmt: skip


def parse(words: Sequence[str]) -> Job:
    """Parse the words after `horovodrun` into a job."""
    options = Options(SYNTAX, words)
    hosts = read_hosts(options.take_last("--hosts"), options.take_last("--hostfile"), "--hostfile")
    size = options.take_number("--num-proc") or sum(host.slots for host in hosts)
    elastic, discovery_script = _take_elastic_options(options, size)
    if discovery_script is not None:
        hosts = ()  # horovodrun ignores -H with a discovery script
    if not size:
        raise LaunchError("The horovodrun command lacks the number of processes. Add: -np N")
    options.take_all("--gloo", "--disable-cache")  # `build` adds these options where they are needed
    tuning_options = [
        _tuning_option(option)
        for option in options.take_all("--fusion-threshold-mb", "--tcp", *_VARIABLE_BY_OPTION, *_SWITCHES)
    ]
    variables, forwarded, forwarded_options = _take_mpi_options(options)
    forwarded_options += [_interface_option(option) for option in options.take_all("--network-interfaces")]
    forwarded_options += _merge_ssh_options(options.take_all("--ssh-port", "--ssh-identity-file"))
    counts, names, remarks = place_processes(size, hosts)
    return Job(
        program=options.program,
        ranks_per_host=counts,
        hosts=names,
        environment=variables,
        forwarded=forwarded,
        discovery_script=discovery_script,
        launcher_options=(*tuning_options, *forwarded_options, *elastic, *options.remaining(_TOPICS)),
        remarks=remarks,
    )


def build(job: Job) -> Translation:
    """Return the horovodrun command. It is run once, on one host, and starts all ranks."""
    job.check_hosts_named(LAUNCHER)
    words, remarks = options_for(job, LAUNCHER)
    hosts = ["-H", format_hosts(job.named_hosts)] if job.hosts else []
    start = [LAUNCHER, "-np", str(job.size), *hosts, *([] if "--mpi" in words else ["--gloo"]), *words]
    if len(job.hosts) > 1:
        start.append("--disable-cache")  # otherwise, horovodrun caches for an hour which hosts are reachable
    if job.address is not None and job.address not in job.hosts[:1]:
        remarks.append(f"The rendezvous address {job.address} is left out: horovodrun chooses one itself.")
    variables = variables_for(job, LAUNCHER)
    line = CommandLine([*start, *job.program], variables, job.directory, private_names=job.private_values)
    return Translation([line], [*job.remarks, *remarks, *restart_remarks(job)])


def _tuning_option(option: ParsedOption) -> LauncherOption:
    """Return a Horovod tuning option, with the equivalent variable for all launchers."""
    if option.name == "--fusion-threshold-mb":
        megabytes = parse_number(option.name, option.values[0], minimum=0)
        variables = {"HOROVOD_FUSION_THRESHOLD": str(megabytes * 1024 * 1024)}
    elif option.name == "--tcp":
        variables = {"NCCL_IB_DISABLE": "1"}
    elif option.name in _VARIABLE_BY_OPTION:
        variables = {f"HOROVOD_{_VARIABLE_BY_OPTION[option.name]}": option.values[0]}
    else:
        name, value = _SWITCHES[option.name]
        variables = {f"HOROVOD_{name}": value}
    return LauncherOption(LAUNCHER, option.words, "other", variables=variables)


def _take_mpi_options(options: Options) -> tuple[dict[str, str], tuple[str, ...], list[LauncherOption]]:
    """Take --mpi-args and --binding-args, which contain options of mpirun. Return the variables that these set, the
    names of the variables that they forward, and the launcher options.

    For horovodrun, the options are written as they were, with the variables by name.
    """
    values: dict[str, str] = {}
    forwarded: dict[str, None] = {}
    launcher_options: list[LauncherOption] = []
    for option in options.take_all("--mpi-args", "--binding-args"):
        variables, names, nested = openmpi.parse_options(shlex.split(option.values[0]))
        values |= variables
        forwarded |= dict.fromkeys(names)
        words = [word for name in (*variables, *names) for word in ("-x", name)]
        words += [word for nested_option in nested for word in nested_option.words]
        launcher_options.append(LauncherOption(LAUNCHER, (option.name, shlex.join(words)), "other", is_nested=True))
        launcher_options += [
            replace(nested_option, equivalents={LAUNCHER: (), **nested_option.equivalents}) for nested_option in nested
        ]
    return values, tuple(forwarded), launcher_options


def _interface_option(option: ParsedOption) -> LauncherOption:
    """Return --network-interfaces with the variables of the libraries."""
    variables = dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), option.values[0])
    return LauncherOption(LAUNCHER, option.words, "network", variables=variables)


def _take_elastic_options(options: Options, size: int) -> tuple[list[LauncherOption], str | None]:
    """Take the elastic options. Return them with their equivalents for `unitrain launch`, and the host discovery
    script."""
    if not options.has("--min-np", "--host-discovery-script"):
        return [], None
    elastic_options = options.take_all("--min-np", "--max-np", "--host-discovery-script")
    values = {option.name: option.values[0] for option in elastic_options}
    min_ranks = parse_number("--min-np", values.get("--min-np", str(size or 1)))
    max_ranks = parse_number("--max-np", values.get("--max-np", str(max(size, min_ranks))))
    script = values.get("--host-discovery-script")
    words = tuple(word for option in elastic_options for word in option.words)
    counterpart = ("--elastic", f"{min_ranks}:{max_ranks}", *(("--host-discovery-script", script) if script else ()))
    launcher_options = [LauncherOption(LAUNCHER, words, "elastic", equivalents={"unitrain": counterpart})]
    for name, unitrain_name in (("--elastic-timeout", "--elastic-timeout"), ("--reset-limit", "--max-restarts")):
        equivalents = [
            (option.words, {"unitrain": (unitrain_name, option.values[0])}) for option in options.take_all(name)
        ]
        launcher_options += [
            LauncherOption(LAUNCHER, words, "elastic", equivalents=equivalents_of_option)
            for words, equivalents_of_option in equivalents
        ]
    return launcher_options, script


def _merge_ssh_options(parsed: list[ParsedOption]) -> list[LauncherOption]:
    """Return the ssh options as one launcher option, because mpirun has one setting for all of them."""
    if not parsed:
        return []
    words = tuple(word for option in parsed for word in option.words)
    flags = {"--ssh-port": "-p", "--ssh-identity-file": "-i"}
    arguments = " ".join([*(f"{flags[option.name]} {option.values[0]}" for option in parsed), mpirun.SSH_OPTION[-1]])
    return [LauncherOption(LAUNCHER, words, "ssh", equivalents={"mpirun": (*mpirun.SSH_OPTION[:-1], arguments)})]
