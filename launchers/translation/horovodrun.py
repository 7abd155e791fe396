"""horovodrun's command line."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

from unitrain.launchers import mpirun
from unitrain.launchers.errors import LaunchError
from unitrain.launchers.translation.hosts import fill, listed, named
from unitrain.launchers.translation.job import Job, Other, number
from unitrain.launchers.translation.options import Given, Options, Syntax, table, topics
from unitrain.launchers.translation.writing import Line, Written, options_of, restarts, variables_of

LAUNCHER = "horovodrun"
SYNTAX = Syntax(
    LAUNCHER,
    table(
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
_TOPICS = topics(
    ssh="--ssh-port --ssh-identity-file --start-timeout",
    output="--output-filename --prefix-output-with-timestamp",
    binding="--binding-args",
    network="--network-interfaces",
    elastic="--min-np --max-np --slots-per-host --elastic-timeout --reset-limit --blacklist-cooldown-range "
    "--host-discovery-script",
    variables="--config-file",
    diagnosis="--verbose",
)
# What horovodrun makes of its options for Horovod itself (horovod.runner.common.util.config_parser).
_VALUES = {
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


def read(words: Sequence[str]) -> Job:
    """Return the job of horovodrun's words, which come after its name."""
    options = Options(SYNTAX, words)
    hosts = named(options.last("--hosts"), options.last("--hostfile"), "--hostfile")
    size = options.number("--num-proc") or sum(host.slots for host in hosts)
    elastic, discovery = _elastic(options, size)
    if discovery is not None:
        hosts = ()  # which horovodrun then does not look at
    if not size:
        raise LaunchError("horovodrun's line does not say how many processes it starts. Add -np N to it")
    options.all("--gloo", "--disable-cache")  # its own default, and where it keeps what it knows of its hosts
    tunings = [_tuning(one) for one in options.all("--fusion-threshold-mb", "--tcp", *_VALUES, *_SWITCHES)]
    through = [_through_mpi(one) for one in options.all("--mpi-args", "--binding-args", "--network-interfaces")]
    through += _ssh(options.all("--ssh-port", "--ssh-identity-file"))
    counts, names, said = fill(size, hosts)
    return Job(
        program=options.program,
        counts=counts,
        hosts=names,
        discovery=discovery,
        others=(*tunings, *through, *elastic, *options.others(_TOPICS)),
        remarks=said,
    )


def write(job: Job) -> Written:
    """Return horovodrun's line, which is typed on one host."""
    job.check_hosts_named(LAUNCHER)
    words, said = options_of(job, LAUNCHER)
    hosts = ["-H", listed(job.slots)] if job.hosts else []
    start = [LAUNCHER, "-np", str(job.size), *hosts, *([] if "--mpi" in words else ["--gloo"]), *words]
    if len(job.hosts) > 1:
        start.append("--disable-cache")  # it remembers for an hour which hosts it could reach
    if job.address is not None and job.address not in job.hosts[:1]:
        said.append(f"Ranks met at {job.address}: horovodrun chooses an address itself.")
    line = Line([*start, *job.program], variables_of(job, LAUNCHER), job.directory)
    return Written([line], [*job.remarks, *said, *restarts(job)])


def _tuning(one: Given) -> Other:
    """Return an option by which Horovod itself is tuned, with the variable that does the same under any launcher."""
    if one.name == "--fusion-threshold-mb":
        megabytes = number(one.name, one.values[0], least=0)
        variables = {"HOROVOD_FUSION_THRESHOLD": str(megabytes * 1024 * 1024)}
    elif one.name == "--tcp":
        variables = {"NCCL_IB_DISABLE": "1"}
    elif one.name in _VALUES:
        variables = {f"HOROVOD_{_VALUES[one.name]}": one.values[0]}
    else:
        name, value = _SWITCHES[one.name]
        variables = {f"HOROVOD_{name}": value}
    return Other(LAUNCHER, one.words, "own", variables=variables)


def _through_mpi(one: Given) -> Other:
    """Return an option that says to mpirun, or to libraries, what can be said to them as well."""
    other = Other(LAUNCHER, one.words, _TOPICS.get(one.name, "own"))
    value = one.values[0]
    if one.name in ("--mpi-args", "--binding-args"):
        return replace(other, passes={"mpirun": tuple(shlex.split(value))})
    return replace(other, variables={"NCCL_SOCKET_IFNAME": value, "GLOO_SOCKET_IFNAME": value})


def _elastic(options: Options, size: int) -> tuple[list[Other], str | None]:
    """Return what makes the job an elastic one, with the counterparts of unitrain launch, and the program that prints
    its hosts."""
    if not options.flag("--min-np", "--host-discovery-script", put_back=True):
        return [], None
    found = options.all("--min-np", "--max-np", "--host-discovery-script")
    values = {one.name: one.values[0] for one in found}
    least = number("--min-np", values.get("--min-np", str(size or 1)))
    most = number("--max-np", values.get("--max-np", str(max(size, least))))
    script = values.get("--host-discovery-script")
    words = tuple(word for one in found for word in one.words)
    counterpart = ("--elastic", f"{least}:{most}", *(("--host-discovery-script", script) if script else ()))
    others = [Other(LAUNCHER, words, "elastic", passes={"unitrain": counterpart})]
    for name, theirs in (("--elastic-timeout", "--elastic-timeout"), ("--reset-limit", "--max-restarts")):
        passes = [(one.words, {"unitrain": (theirs, one.values[0])}) for one in options.all(name)]
        others += [Other(LAUNCHER, words, "elastic", passes=each) for words, each in passes]
    return others, script


def _ssh(given: list[Given]) -> list[Other]:
    """Return how other hosts are reached, which mpirun takes as one setting."""
    if not given:
        return []
    words = tuple(word for one in given for word in one.words)
    flags = {"--ssh-port": "-p", "--ssh-identity-file": "-i"}
    arguments = " ".join([*(f"{flags[one.name]} {one.values[0]}" for one in given), mpirun.SSH_OPTION[-1]])
    return [Other(LAUNCHER, words, "ssh", passes={"mpirun": (*mpirun.SSH_OPTION[:-1], arguments)})]
