"""The command line of MPICH's mpiexec, called Hydra, and of Intel MPI's, which is made from it."""

from __future__ import annotations

from collections.abc import Sequence

from unitrain.launchers.arguments import looks_secret
from unitrain.launchers.errors import LaunchError
from unitrain.launchers.hosts import Host
from unitrain.launchers.translation.hosts import fill, listed, named, spread
from unitrain.launchers.translation.job import Job
from unitrain.launchers.translation.options import Options, Syntax, table, topics
from unitrain.launchers.translation.writing import Line, Written, options_of, restarts, variables_of

LAUNCHER = "mpiexec"
SYNTAX = Syntax(
    LAUNCHER,
    table(
        "-genvnone -genvall -envnone -envall -enable-x -disable-x -verbose -info -print-all-exitcodes -prepend-rank "
        "-profile -disable-auto-cleanup -disable-hostname-propagation -skip-launch-node -help -version",
        "-genvlist -envlist -f -hosts -wdir -configfile -n -launcher -launcher-exec -rmk -topolib -bind-to -map-by "
        "-membind -demux -iface -ppn -prepend-pattern -outfile-pattern -errfile-pattern -nameserver -order-nodes "
        "-localhost -usize -pmi-port -gpus-per-proc",
    )
    | {"-genv": 2, "-env": 2},
    {"-np": "-n", "-machinefile": "-f", "-hostfile": "-f", "-machine": "-hosts", "-host": "-hosts", "-perhost": "-ppn",
     "-l": "-prepend-rank", "-h": "-help", "-v": "-verbose", "-wd": "-wdir", "-bootstrap": "-launcher"},
    any_dashes=True,
)  # fmt: skip
_TOPICS = topics(
    output="-prepend-rank -prepend-pattern -outfile-pattern -errfile-pattern",
    binding="-bind-to -membind -topolib",
    mapping="-map-by -order-nodes -skip-launch-node",
    network="-iface -localhost -nameserver",
    ssh="-launcher -launcher-exec -rmk -enable-x -disable-x",
    variables="-genvnone -genvall -envnone -envall -configfile",
    diagnosis="-verbose -info -print-all-exitcodes -profile",
    resources="-gpus-per-proc",
)


def read(words: Sequence[str]) -> Job:
    """Return the job of mpiexec's words, which come after its name."""
    options = Options(SYNTAX, words)
    if ":" in options.program:
        raise LaunchError(
            "mpiexec's line starts several programs, with a ':' between them, which no other launcher does. "
            "Start one script, which looks at its rank"
        )
    variables = {one.values[0]: one.values[1] for one in options.all("-genv", "-env")}
    lists = [one.values[0] for one in options.all("-genvlist", "-envlist")]
    counts, names, said = _placed(options)
    return Job(
        program=options.program,
        counts=counts,
        hosts=names,
        environment=variables,
        forwarded=tuple(dict.fromkeys(name for text in lists for name in text.split(","))),
        directory=options.last("-wdir"),
        others=options.others(_TOPICS),
        remarks=said,
    )


def write(job: Job) -> Written:
    """Return mpiexec's line, which is typed on one host."""
    job.check_hosts_named(LAUNCHER)
    given, said = options_of(job, LAUNCHER)
    variables = variables_of(job, LAUNCHER) | job.rendezvous  # MPICH gives its ranks no address
    secrets = {name: value for name, value in variables.items() if looks_secret(name, value)}
    options = ["-n", str(job.size)]
    if job.hosts:
        options += ["-hosts", listed(job.slots)]
    for name, value in variables.items():
        if name not in secrets:
            options += ["-genv", name, value]
    if job.directory is not None:
        options += ["-wdir", job.directory]
    line = Line([LAUNCHER, *options, *given, *job.program], secrets)  # whose ranks have its whole environment
    return Written([line], [*job.remarks, *said, *restarts(job)])


def _placed(options: Options) -> tuple[tuple[int, ...], tuple[str, ...], tuple[str, ...]]:
    """Return how many processes each host gets, the hosts' names, and what is to be said."""
    size, per_host = options.number("-n"), options.number("-ppn")
    text, file = options.last("-hosts"), options.last("-f")
    hosts = named(text, file, "-f")
    counted = (text is not None and ":" in text) or any(host.slots > 1 for host in hosts)
    if per_host is not None and hosts:
        hosts = tuple(Host(host.name, per_host) for host in hosts)
        return fill(size or sum(host.slots for host in hosts), hosts)
    if size is None:
        raise LaunchError("mpiexec's line does not say how many processes it starts. Add -n N to it")
    if per_host is not None:
        whole, rest = divmod(size, per_host)
        return (per_host,) * whole + ((rest,) if rest else ()), (), ()
    if hosts and not counted:  # it deals them out in turn
        dealt = "mpiexec deals ranks out to the hosts in turn here: elsewhere they are numbered host by host."
        several = len(hosts) > 1 and size > len(hosts)
        return spread(size, len(hosts)), tuple(host.name for host in hosts[:size]), (dealt,) if several else ()
    return fill(size, hosts)
