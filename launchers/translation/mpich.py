"""The command line of MPICH's mpiexec (Hydra), and of Intel MPI's mpiexec, which derives from it."""

from __future__ import annotations

from collections.abc import Sequence

from unitrain.launchers.errors import LaunchError
from unitrain.launchers.hosts import Host, format_hosts
from unitrain.launchers.translation.hosts import Placement, divide_evenly, place_processes, read_hosts
from unitrain.launchers.translation.job import Job
from unitrain.launchers.translation.options import Options, Syntax, arity_table, topic_by_option
from unitrain.launchers.translation.writing import CommandLine, Translation, options_for, restart_remarks, variables_for

LAUNCHER = "mpiexec"
SYNTAX = Syntax(
    LAUNCHER,
    arity_table(
        "-genvnone -genvall -envnone -envall -enable-x -disable-x -verbose -info -print-all-exitcodes -prepend-rank "
        "-profile -disable-auto-cleanup -disable-hostname-propagation -skip-launch-node -help -version",
        "-genvlist -envlist -f -hosts -wdir -configfile -n -launcher -launcher-exec -rmk -topolib -bind-to -map-by "
        "-membind -demux -iface -ppn -prepend-pattern -outfile-pattern -errfile-pattern -nameserver -order-nodes "
        "-localhost -usize -pmi-port -gpus-per-proc",
    )
    | {"-genv": 2, "-env": 2},
    {"-np": "-n", "-machinefile": "-f", "-hostfile": "-f", "-machine": "-hosts", "-host": "-hosts", "-perhost": "-ppn",
     "-l": "-prepend-rank", "-h": "-help", "-v": "-verbose", "-wd": "-wdir", "-bootstrap": "-launcher"},
    accepts_any_dashes=True,
)  # fmt: skip
_TOPICS = topic_by_option(
    output="-prepend-rank -prepend-pattern -outfile-pattern -errfile-pattern",
    binding="-bind-to -membind -topolib",
    mapping="-map-by -order-nodes -skip-launch-node",
    network="-iface -localhost",
    ssh="-launcher -launcher-exec",
    variables="-genvnone -genvall -envnone -envall",
    diagnosis="-verbose -info -print-all-exitcodes -profile",
    resources="-gpus-per-proc",
)


def parse(words: Sequence[str]) -> Job:
    """Parse the words after `mpiexec` into a job."""
    options = Options(SYNTAX, words)
    if ":" in options.program:
        raise LaunchError(
            "The mpiexec command starts several programs, separated by ':', which unitrain translate does not support. "
            "Start one script that branches on its rank"
        )
    variables = {option.values[0]: option.values[1] for option in options.take_all("-genv", "-env")}
    lists = [option.values[0] for option in options.take_all("-genvlist", "-envlist")]
    counts, names, remarks = _read_placement(options)
    return Job(
        program=options.program,
        ranks_per_host=counts,
        hosts=names,
        environment=variables,
        forwarded=tuple(dict.fromkeys(name for text in lists for name in text.split(","))),
        directory=options.take_last("-wdir"),
        launcher_options=options.remaining(_TOPICS),
        remarks=remarks,
    )


def build(job: Job) -> Translation:
    """Return the mpiexec command. It is run once, on one host, and starts all ranks."""
    job.check_hosts_named(LAUNCHER)
    extra_options, remarks = options_for(job, LAUNCHER)
    variables = variables_for(job, LAUNCHER) | job.rendezvous_variables  # MPICH does not set a rendezvous address
    private = {name: value for name, value in variables.items() if name in job.private_values}
    options = ["-n", str(job.size)]
    if job.hosts:
        options += ["-hosts", format_hosts(job.named_hosts)]
    for name, value in variables.items():
        if name not in private:
            options += ["-genv", name, value]
    if job.directory is not None:
        options += ["-wdir", job.directory]
    # Ranks inherit mpiexec's environment. Every user of the host can read the command line.
    line = CommandLine([LAUNCHER, *options, *extra_options, *job.program], private, private_names=private)
    return Translation([line], [*job.remarks, *remarks, *restart_remarks(job)])


def _read_placement(options: Options) -> Placement:
    """Return the placement of the processes. Raises LaunchError if the number of processes is unknown."""
    size, per_host = options.take_number("-n"), options.take_number("-ppn")
    text, file = options.take_last("-hosts"), options.take_last("-f")
    hosts = read_hosts(text, file, "-f")
    has_slots = (text is not None and ":" in text) or any(host.slots > 1 for host in hosts)
    if per_host is not None and hosts:
        hosts = tuple(Host(host.name, per_host) for host in hosts)
        return place_processes(size or sum(host.slots for host in hosts), hosts)
    if size is None:
        raise LaunchError("The mpiexec command lacks the number of processes. Add: -n N")
    if per_host is not None:
        num_full_hosts, remaining = divmod(size, per_host)
        return Placement((per_host,) * num_full_hosts + ((remaining,) if remaining else ()))
    if hosts and not has_slots:  # mpiexec assigns ranks to hosts round-robin
        round_robin_remark = (
            "mpiexec assigns ranks to hosts round-robin; other launchers assign consecutive ranks to each host."
        )
        order_differs = len(hosts) > 1 and size > len(hosts)
        return Placement(
            divide_evenly(size, len(hosts)),
            tuple(host.name for host in hosts[:size]),
            (round_robin_remark,) if order_differs else (),
        )
    return place_processes(size, hosts)
