"""The command line of Open MPI's mpirun, which is also installed as mpiexec and orterun."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unitrain.launchers import mpirun
from unitrain.launchers.arguments import merge_options
from unitrain.launchers.errors import LaunchError
from unitrain.launchers.hosts import Host, format_hosts
from unitrain.launchers.translation.hosts import (
    Placement,
    divide_evenly,
    place_by_node,
    place_oversubscribed,
    place_processes,
    read_host_entries,
    read_hosts,
)
from unitrain.launchers.translation.job import Job, LauncherOption, parse_number
from unitrain.launchers.translation.options import Options, Syntax, arity_table, topic_by_option
from unitrain.launchers.translation.words import has_expansion
from unitrain.launchers.translation.writing import (
    CommandLine,
    Translation,
    is_open_mpi_variable,
    options_for,
    restart_remarks,
    variables_for,
)

LAUNCHER = "mpirun"
SYNTAX = Syntax(
    LAUNCHER,
    arity_table(
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
    accepts_any_dashes=True,
)  # fmt: skip
_TOPICS = topic_by_option(
    output="--output-filename --tag-output --timestamp-output --merge-stderr-to-stdout --xml --xml-file --xterm "
    "--report-child-jobs-separately",
    binding="--bind-to --bind-to-core --bind-to-socket --cpu-set --cpu-list --cpus-per-proc --cpus-per-rank "
    "--use-hwthread-cpus",
    mapping="--map-by --rank-by --rankfile --cartofile --bynode --bycore --npersocket --ppr --nolocal "
    "--nooversubscribe",
    unneeded="--oversubscribe --allow-run-as-root",
    diagnosis="--report-bindings --quiet "
    "--verbose --debug --debugger --tv --display-map --display-allocation --display-devel-map "
    "--display-devel-allocation --display-diffable-map --display-topo --debug-daemons --debug-devel --do-not-launch",
    elastic="--enable-recovery --disable-recovery --continuous --max-restarts",
)


def parse(words: Sequence[str]) -> Job:
    """Parse the words after `mpirun` into a job."""
    options = Options(SYNTAX, words)
    if ":" in options.program:
        raise LaunchError(
            "The mpirun command starts several programs, separated by ':', which other launchers do not support. "
            "Start one script that branches on its rank"
        )
    texts = [option.values[0] for option in options.take_all("--host")]
    file = options.take_last("--hostfile", "--machinefile", "--default-hostfile")
    # If both options are set, --host selects hosts of the file and the number of their slots.
    hosts = (
        _read_hostfile(file)
        if file is not None and not texts
        else read_hosts(",".join(texts) if texts else None, None, "")
    )
    variables, forwarded = options.take_exports()
    counts, names, remarks = _read_placement(options, hosts)
    directory = options.take_last("--wdir")
    launcher_options = [*_take_binding_and_mca_options(options), *options.remaining(_TOPICS)]
    return Job(
        program=options.program,
        ranks_per_host=counts,
        hosts=names,
        environment=variables,
        # Other launchers do not need an option for PATH.
        forwarded=tuple(dict.fromkeys(name for name in forwarded if name != "PATH")),
        directory=directory,
        launcher_options=tuple(launcher_options),
        remarks=remarks,
    )


def parse_options(words: Sequence[str]) -> tuple[dict[str, str], list[str], list[LauncherOption]]:
    """Parse `words`, options of mpirun that another launcher passes to it. Return the variables that they set, the
    names of the variables that they forward, and the other options."""
    options = Options(SYNTAX, [*words, "program"])
    variables, forwarded = options.take_exports()
    return variables, forwarded, [*_take_binding_and_mca_options(options), *options.remaining(_TOPICS)]


def build(job: Job) -> Translation:
    """Return the mpirun command. It is run once, on one host, and starts all ranks."""
    job.check_hosts_named(LAUNCHER)
    extra_options, remarks = options_for(job, LAUNCHER)
    has_several_hosts = len(job.ranks_per_host) > 1
    variables = variables_for(job, LAUNCHER)
    if has_several_hosts or job.backend != "horovod" or job.address or job.port:
        variables |= job.rendezvous_variables  # DDP needs a rendezvous, and so does Horovod on several hosts
    options = ["-np", str(job.size)]
    if job.hosts:
        options += ["-H", format_hosts(job.named_hosts)]
    else:  # without -H, mpirun allows at most as many processes as cores
        options += ["-H", f"localhost:{job.size}"]
    # The values of the job are forwarded by name: every user of the host can read the command line.
    open_mpi_variables = {name: variables.pop(name) for name in list(variables) if is_open_mpi_variable(name)}
    private = {name: value for name, value in variables.items() if name in job.private_values}
    names = [*job.forwarded, *private, *(("PATH",) if has_several_hosts and "PATH" not in job.forwarded else ())]
    options += [word for name in dict.fromkeys(names) for word in ("-x", name)]
    options += [word for name, value in variables.items() if name not in private for word in ("-x", f"{name}={value}")]
    if job.directory is not None:
        options += ["--wdir", job.directory]
    ssh_options = (mpirun.SSH_OPTION,) if has_several_hosts else ()
    options += merge_options((*mpirun.DEFAULT_OPTIONS, *ssh_options), extra_options)
    if has_several_hosts:
        remarks.append(
            "Ranks on other hosts receive only the variables named with -x. Add the variables that they need."
        )
    line = CommandLine(
        [LAUNCHER, *options, *job.program], {**open_mpi_variables, **private}, private_names=job.private_values
    )
    return Translation([line], [*job.remarks, *remarks, *restart_remarks(job)])


def _read_placement(options: Options, hosts: tuple[Host, ...]) -> Placement:
    """Return the placement of the processes. Raises LaunchError if the number of processes is unknown."""
    size = options.take_number("--np")
    per_host = (
        options.take_number("-N")
        or options.take_number("--npernode")
        or (1 if options.take_flag("--pernode") else None)
    )
    by_node = options.take_flag("--bynode")
    oversubscribes = options.has("--oversubscribe")
    for option in options.take_all("--map-by"):
        policy, *modifiers = option.values[0].lower().split(":")
        if policy == "ppr" and modifiers[1:2] == ["node"]:
            per_host = parse_number("--map-by ppr:N:node", modifiers[0])
            del modifiers[:2]
        elif policy == "node":
            by_node = True
        if policy not in ("node", "slot", "ppr", "") or modifiers:
            options.put_back(option)
        oversubscribes = oversubscribes or "oversubscribe" in modifiers
    options.take_flag("--byslot")
    if per_host is not None:
        if hosts:
            hosts = tuple(replace(host, slots=per_host) for host in hosts)
            return place_processes(size or sum(host.slots for host in hosts), hosts)
        if size is None:
            raise LaunchError("The mpirun command lacks the number of processes. Add: -np N")
        num_full_hosts, num_remaining = divmod(size, per_host)
        return Placement((per_host,) * num_full_hosts + ((num_remaining,) if num_remaining else ()))
    remarks: tuple[str, ...] = ()
    if by_node and len(hosts) > 1:
        remarks = ("mpirun assigns ranks to hosts round-robin; other launchers assign consecutive ranks to each host.",)
    hosts, slot_remarks = _resolve_slots(hosts, size, by_node)
    size = size or sum(host.slots for host in hosts)
    if not size:
        raise LaunchError("The mpirun command lacks the number of processes. Add: -np N")
    slots = sum(host.slots for host in hosts)
    if by_node and len(hosts) > 1 and (size <= slots or oversubscribes):
        counts = place_by_node(size, hosts) if size <= slots else divide_evenly(size, len(hosts))
        return Placement(counts[:size], tuple(host.name for host in hosts[:size]), (*remarks, *slot_remarks))
    if hosts and size > slots and oversubscribes:
        counts = place_oversubscribed(size, hosts)
        return Placement(counts, tuple(host.name for host in hosts), (*remarks, *slot_remarks))
    counts, names, unused_host_remarks = place_processes(size, hosts)
    return Placement(counts, names, (*remarks, *slot_remarks, *unused_host_remarks))


def _read_hostfile(file: str) -> tuple[Host, ...]:
    """Return the hosts of a file. `slots` is 0 (meaning one per core) for a host without a slot count.

    A host that occurs several times without slots has one slot per occurrence.
    """
    slots: dict[str, list[int | None]] = {}
    for name, count in read_host_entries(file, "--hostfile"):
        slots.setdefault(name, []).append(count)
    return tuple(
        Host(name, sum(count or 1 for count in counts) if len(counts) > 1 else counts[0] or 0)
        for name, counts in slots.items()
    )


def _resolve_slots(
    hosts: tuple[Host, ...], size: int | None, by_node: bool
) -> tuple[tuple[Host, ...], tuple[str, ...]]:
    """Return the hosts and remarks. An unknown number of slots (one per core) is replaced by an upper bound.

    Raises LaunchError if the placement of processes depends on an unknown number of slots.
    """
    unknown = [host.name for host in hosts if not host.slots]
    if not unknown:
        return hosts, ()
    if by_node and size is not None:
        remark = (
            f"mpirun starts at most one process per core on {', '.join(unknown)}; the number of cores is unknown here."
        )
        return tuple(host if host.slots else Host(host.name, size) for host in hosts), (remark,)
    hosts_with_slots: list[Host] = []
    unplaced = size
    for index, host in enumerate(hosts):
        if not host.slots and (unplaced is None or (unplaced > 1 and index < len(hosts) - 1)):
            raise LaunchError(
                f"The hostfile has no slots for {host.name!r}: mpirun starts one process per core there, and the "
                f"number of cores is unknown here. Write the number of slots into the file, as in: {host.name} slots=8"
            )
        slots = host.slots or max(1, unplaced or 0)
        hosts_with_slots.append(Host(host.name, slots))
        unplaced = None if unplaced is None else max(0, unplaced - slots)
    return tuple(hosts_with_slots), ()


def _take_binding_and_mca_options(options: Options) -> list[LauncherOption]:
    """Take the --bind-to and --mca options. Return them with their equivalents, without options that `build` always
    sets."""
    bound = [option for option in options.take_all("--bind-to") if option.values[0] != "none"]
    launcher_options = [LauncherOption(LAUNCHER, option.words, "binding") for option in bound]
    for option in options.take_all("--mca", "--gmca"):
        name, value = option.values
        converted = LauncherOption(LAUNCHER, option.words, "other")
        if ("-mca", name, value) in (*mpirun.DEFAULT_OPTIONS, mpirun.SSH_OPTION, mpirun.KEEPALIVE_OPTION):
            continue
        if name == "odls_base_sigkill_timeout":
            converted = replace(converted, topic="grace", equivalents={"torchrun": ("--shutdown-timeout", value)})
        elif name.endswith("_if_include"):
            converted = replace(converted, topic="network")
            if not has_expansion(value):
                converted = replace(converted, variables={"NCCL_SOCKET_IFNAME": value, "GLOO_SOCKET_IFNAME": value})
        elif name == "plm_rsh_args":
            converted = replace(converted, topic="ssh")
        launcher_options.append(converted)
    return launcher_options
