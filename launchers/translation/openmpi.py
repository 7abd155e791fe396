"""The command line of Open MPI's mpirun, also called mpiexec and orterun."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unitrain.launchers import mpirun
from unitrain.launchers.arguments import looks_secret, merge_options
from unitrain.launchers.errors import LaunchError
from unitrain.launchers.hosts import Host
from unitrain.launchers.translation.hosts import dealt, entries, fill, listed, named, spread
from unitrain.launchers.translation.job import Job, Other, number
from unitrain.launchers.translation.options import Options, Syntax, table, topics
from unitrain.launchers.translation.words import expands
from unitrain.launchers.translation.writing import Line, Written, is_of_open_mpi, options_of, restarts, variables_of

LAUNCHER = "mpirun"
SYNTAX = Syntax(
    LAUNCHER,
    table(
        "--quiet --verbose --version --continuous --debug --display-allocation --display-map --get-stack-traces "
        "--leave-session-attached --output-proctable --report-state-on-timeout --tv --merge-stderr-to-stdout "
        "--report-child-jobs-separately --tag-output --timestamp-output --xml --index-argv-by-rank --nolocal "
        "--nooversubscribe --oversubscribe --use-hwthread-cpus --report-bindings --debug-devel --debug-daemons "
        "--debug-daemons-file --display-devel-allocation --display-devel-map --display-diffable-map --display-topo "
        "--do-not-launch --do-not-resolve --bind-to-core --bind-to-socket --bycore --bynode --byslot --pernode "
        "--allow-run-as-root --enable-instant-on-support --fwd-mpirun-port --noprefix --preload-binary "
        "--set-cwd-to-session-dir --show-progress --use-regexp --dvm --novm --disable-recovery --enable-recovery",
        "--np --help --cpu-set --debugger --report-events --report-pid --report-uri --timeout --tune --output-filename "
        "--xml-file --xterm --stdin --cartofile --cpus-per-proc --cpus-per-rank --host --map-by -N --ppr --rankfile "
        "--rank-by --bind-to --cpu-list --npernode --npersocket --am --app --default-hostfile --hostfile "
        "--launch-agent --machinefile --path --personality --prefix --preload-files --wdir -x --hnp --max-vm-size "
        "--ompi-server --max-restarts",
    )
    | {"--mca": 2, "--gmca": 2},
    {
        "-c": "--np", "-n": "--np", "--n": "--np", "-H": "--host", "-rf": "--rankfile", "-cf": "--cartofile",
        "-q": "--quiet", "-v": "--verbose", "-V": "--version", "-d": "--debug-devel", "-s": "--preload-binary",
        "--wd": "--wdir", "-h": "--help",
    },
    any_dashes=True,
)  # fmt: skip
_TOPICS = topics(
    output="--output-filename --tag-output --timestamp-output --merge-stderr-to-stdout --xml --xml-file --xterm "
    "--quiet --report-child-jobs-separately",
    binding="--bind-to --bind-to-core --bind-to-socket --cpu-set --cpu-list --cpus-per-proc --cpus-per-rank "
    "--report-bindings --use-hwthread-cpus",
    mapping="--map-by --rank-by --rankfile --cartofile --bynode --bycore --npersocket --ppr --nolocal --oversubscribe "
    "--nooversubscribe",
    diagnosis="--verbose --debug --debugger --tv --display-map --display-allocation --display-devel-map "
    "--display-devel-allocation --display-diffable-map --display-topo --debug-daemons --debug-devel --do-not-launch",
    elastic="--enable-recovery --disable-recovery --continuous --max-restarts",
)


def read(words: Sequence[str]) -> Job:
    """Return the job of mpirun's words, which come after its name."""
    options = Options(SYNTAX, words)
    if ":" in options.program:
        raise LaunchError(
            "mpirun's line starts several programs, with a ':' between them, which no other launcher does. "
            "Start one script, which looks at its rank"
        )
    texts = [one.values[0] for one in options.all("--host")]
    file = options.last("--hostfile", "--machinefile", "--default-hostfile")
    # With both, --host chooses some hosts of the file, and says how many slots are used.
    hosts = _of_file(file) if file is not None and not texts else named(",".join(texts) if texts else None, None, "")
    variables: dict[str, str] = {}
    forwarded: list[str] = []
    for one in options.all("-x"):
        name, equals, value = one.values[0].partition("=")
        if equals:
            variables[name] = value
        else:
            forwarded.append(name)
    counts, names, said = _placed(options, hosts)
    directory = options.last("--wdir")
    others = [*_settings(options), *options.others(_TOPICS)]
    return Job(
        program=options.program,
        counts=counts,
        hosts=names,
        environment=variables,
        forwarded=tuple(dict.fromkeys(name for name in forwarded if name != "PATH")),  # which all others hand on
        directory=directory,
        others=tuple(others),
        remarks=said,
    )


def write(job: Job) -> Written:
    """Return mpirun's line, which is typed on one host."""
    job.check_hosts_named(LAUNCHER)
    given, said = options_of(job, LAUNCHER)
    several = len(job.counts) > 1
    variables = variables_of(job, LAUNCHER)
    if several or job.backend != "horovod" or job.address or job.port:
        variables |= job.rendezvous  # DDP's ranks meet there, and Horovod's on several hosts
    options = ["-np", str(job.size)]
    if job.hosts:
        options += ["-H", listed(job.slots)]
    else:  # as many as are asked for, and not as there are cores
        options += ["-H", f"localhost:{job.size}"]
    # A value that looks secret is only named: everybody may list the line.
    own = {name: variables.pop(name) for name in list(variables) if is_of_open_mpi(name)}
    secrets = {name: value for name, value in variables.items() if looks_secret(name, value)}
    names = [*job.forwarded, *secrets, *(("PATH",) if several and "PATH" not in job.forwarded else ())]
    options += [word for name in dict.fromkeys(names) for word in ("-x", name)]
    options += [word for name, value in variables.items() if name not in secrets for word in ("-x", f"{name}={value}")]
    if job.directory is not None:
        options += ["--wdir", job.directory]
    options += merge_options((*mpirun.DEFAULT_OPTIONS, *((mpirun.SSH_OPTION,) if several else ())), given)
    if several:
        said.append("On other hosts mpirun's ranks have no variable but those named with -x: name what else they need.")
    line = Line([LAUNCHER, *options, *job.program], {**own, **secrets})
    return Written([line], [*job.remarks, *said, *restarts(job)])


def _placed(options: Options, hosts: tuple[Host, ...]) -> tuple[tuple[int, ...], tuple[str, ...], tuple[str, ...]]:
    """Return how many processes each host gets, the hosts' names, and what is to be said."""
    size = options.number("--np")
    per_host = options.number("-N") or options.number("--npernode") or (1 if options.flag("--pernode") else None)
    by_node = options.flag("--bynode")
    several_a_slot = options.flag("--oversubscribe", put_back=True)
    for one in options.all("--map-by"):
        policy, *modifiers = one.values[0].lower().split(":")
        if policy == "ppr" and modifiers[1:2] == ["node"]:
            per_host = number("--map-by ppr:N:node", modifiers[0])
            del modifiers[:2]
        elif policy == "node":
            by_node = True
        if policy not in ("node", "slot", "ppr", "") or modifiers:
            options.put_back(one)
        several_a_slot = several_a_slot or "oversubscribe" in modifiers
    options.flag("--byslot")
    if per_host is not None:
        if hosts:
            hosts = tuple(replace(host, slots=per_host) for host in hosts)
            return fill(size or sum(host.slots for host in hosts), hosts)
        if size is None:
            raise LaunchError("mpirun's line does not say how many processes it starts. Add -np N to it")
        whole, rest = divmod(size, per_host)
        return (per_host,) * whole + ((rest,) if rest else ()), (), ()
    said: tuple[str, ...] = ()
    if by_node and len(hosts) > 1:
        said = ("mpirun deals ranks out to the hosts in turn here: elsewhere they are numbered host by host.",)
    hosts, more = _with_slots(hosts, size, by_node)
    size = size or sum(host.slots for host in hosts)
    if not size:
        raise LaunchError("mpirun's line does not say how many processes it starts. Add -np N to it")
    slots = sum(host.slots for host in hosts)
    if by_node and len(hosts) > 1 and (size <= slots or several_a_slot):
        counts = dealt(size, hosts) if size <= slots else spread(size, len(hosts))
        return counts[:size], tuple(host.name for host in hosts[:size]), (*said, *more)
    counts, names, left = fill(size, hosts)
    return counts, names, (*said, *more, *left)


def _of_file(file: str) -> tuple[Host, ...]:
    """Return the hosts of a file, with 0 slots where the file does not say how many: as many as the host has cores.

    A host that is named several times without slots has as many as it is named.
    """
    slots: dict[str, list[int | None]] = {}
    for name, count in entries(file, "--hostfile"):
        slots.setdefault(name, []).append(count)
    return tuple(
        Host(name, sum(count or 1 for count in counts) if len(counts) > 1 else counts[0] or 0)
        for name, counts in slots.items()
    )


def _with_slots(hosts: tuple[Host, ...], size: int | None, by_node: bool) -> tuple[tuple[Host, ...], tuple[str, ...]]:
    """Return the hosts with slots also where only the host itself knows them, and what is to be said of that.

    Raises LaunchError where the processes of the hosts cannot be told without.
    """
    unknown = [host.name for host in hosts if not host.slots]
    if not unknown:
        return hosts, ()
    if by_node and size is not None:
        said = (
            f"mpirun starts at most as many processes on {', '.join(unknown)} as there are cores, which are not known."
        )
        return tuple(host if host.slots else Host(host.name, size) for host in hosts), (said,)
    found: list[Host] = []
    left = size
    for place, host in enumerate(hosts):
        if not host.slots and (left is None or (left > 1 and place < len(hosts) - 1)):
            raise LaunchError(
                f"The hostfile has no slots for {host.name!r}: mpirun starts as many processes there as it has cores, "
                f"which only that host knows. Write their number into the file, as in: {host.name} slots=8"
            )
        slots = host.slots or max(1, left or 0)
        found.append(Host(host.name, slots))
        left = None if left is None else max(0, left - slots)
    return tuple(found), ()


def _settings(options: Options) -> list[Other]:
    """Return what is set in ways that have counterparts, but for what unitrain itself sets, which is no loss."""
    bound = [one for one in options.all("--bind-to") if one.values[0] != "none"]
    found = [Other(LAUNCHER, one.words, "binding") for one in bound]
    for one in options.all("--mca", "--gmca"):
        name, value = one.values
        other = Other(LAUNCHER, one.words, "own")
        if ("-mca", name, value) in (*mpirun.DEFAULT_OPTIONS, mpirun.SSH_OPTION):
            continue
        if name == "odls_base_sigkill_timeout":
            other = replace(other, topic="grace", passes={"torchrun": ("--shutdown-timeout", value)})
        elif name.endswith("_if_include"):
            other = replace(other, topic="network")
            if not expands(value):
                other = replace(other, variables={"NCCL_SOCKET_IFNAME": value, "GLOO_SOCKET_IFNAME": value})
        elif name == "plm_rsh_args":
            other = replace(other, topic="ssh")
        found.append(other)
    return found
