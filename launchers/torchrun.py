"""torchrun: the launcher of torch. It must be started on every host."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from unitrain.launchers import agents, slurm
from unitrain.launchers.arguments import names_forwarded_by_default
from unitrain.launchers.errors import LaunchError
from unitrain.launchers.hosts import check_distinct, is_this_host, processes_per_host
from unitrain.launchers.rendezvous import DEFAULT_PORT, rendezvous_variables
from unitrain.launchers.spec import Command, LaunchSpec, after_options, launcher_module_command

# Without this variable, restarted workers read the addresses of the previous workers (pytorch#135712).
RESTART_VARIABLES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def build(spec: LaunchSpec) -> Command:
    """Return the command, which runs on this host. It is torchrun itself if all ranks run here.

    Otherwise, it starts torchrun over ssh on each host that runs ranks. If the spec does not name hosts and a Slurm
    allocation has several hosts, the hosts are those of the allocation, and srun replaces ssh. If all ranks run on this
    host, the rendezvous uses a free port, so that two jobs do not collide. On several hosts, the rendezvous is at
    MASTER_ADDR or else on the first host. Its port is MASTER_PORT, or else the spec's port, or else
    `slurm.Allocation.port` in a Slurm allocation, or else 29500. Raises LaunchError for an elastic job on other hosts.
    """
    spec.check_no_controller("torchrun")
    job = None
    if not spec.hosts and (job := slurm.read_multi_host_allocation()) is not None:
        job.check_slots(spec.num_processes)
        spec = replace(spec, hosts=job.hosts, port=spec.port or job.port)
    if not spec.hosts or (len(spec.hosts) == 1 and is_this_host(spec.hosts[0])):
        return _command(spec, ["--standalone", "--nproc-per-node", str(spec.num_processes)])
    check_distinct(spec.hosts)
    if spec.elastic is not None:
        raise LaunchError(_elastic_instructions(spec))
    spec = replace(spec, max_restarts=0)  # the supervisor restarts the job on all hosts
    hosts = spec.hosts[: len(processes_per_host(spec.num_processes, spec.hosts))]
    commands = list(zip(hosts, commands_per_host(spec), strict=True))
    # Every user of this host can read the command line, so it contains only the names of the variables. All hosts have
    # the same values, which `agents` reads from its environment.
    variables = commands[0][1].environment
    names = {*names_forwarded_by_default(), *spec.forwarded, *variables}
    return Command(
        agents.build_command(commands, names, spec.python, through_slurm=job is not None),
        variables,
        per_host=tuple((host.name, command) for host, command in commands),
    )


def commands_per_host(spec: LaunchSpec) -> list[Command]:
    """Return one command per host that runs processes, in host order.

    The commands contain the values of forwarded variables. Raises LaunchError if the first of several hosts is named
    localhost or 127.*, and if the range of an elastic job does not fit the hosts.
    """
    counts = processes_per_host(spec.num_processes, spec.hosts)
    forwarded = {name: os.environ[name] for name in spec.forwarded if name in os.environ}
    spec = replace(spec, environment={**forwarded, **spec.environment})
    variables = rendezvous_variables(spec.hosts, spec.port or DEFAULT_PORT, spec.environment)
    address, port = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
    if spec.max_restarts or spec.elastic is not None:
        options = [_options_with_restarts(spec, node_rank, counts, (address, port)) for node_rank in range(len(counts))]
    else:
        options = static_rendezvous_options(counts, address, port)
    return [_command(spec, host_options) for host_options in options]


def static_rendezvous_options(ranks_per_host: Sequence[int], address: str, port: int = DEFAULT_PORT) -> list[list[str]]:
    """Return torchrun's options on each host for a static rendezvous at `address`."""
    return [
        [
            *("--nnodes", str(len(ranks_per_host)), "--node-rank", str(node_rank)),
            *("--nproc-per-node", str(num_ranks)),
            *("--master-addr", address, "--master-port", str(port)),
        ]
        for node_rank, num_ranks in enumerate(ranks_per_host)
    ]


def c10d_rendezvous_options(
    nodes: str,
    nproc_per_node: int,
    max_restarts: int,
    endpoint: tuple[str, int],
    *,
    is_first: bool,
    local_address: str | None,
    run_id: str = "unitrain",
    settings: Mapping[str, str] | None = None,
) -> list[str]:
    """Return torchrun's options on one of several hosts of a job with restarts.

    The static rendezvous does not support restarts, so the options select the c10d rendezvous.

    Args:
        nodes: "MIN:MAX" hosts.
        nproc_per_node: The number of ranks on this host.
        endpoint: The address and port of the rendezvous, which the first host serves.
        is_first: Whether this host is the first one.
        local_address: The name by which the other hosts reach this host, or None for torchrun's default.
        settings: Values of --rdzv-conf that the user has set; is_host is ignored.
    """
    conf = {
        # `is_host` is set explicitly, because torchrun otherwise compares the endpoint with the host's own name, which
        # may resolve to 127.0.1.1.
        "is_host": "true" if is_first else "false",
        # Once the minimum number of hosts has joined, wait 10 s for further hosts. A host counts as lost after 3 missed
        # keep-alives, 2 s apart.
        "last_call_timeout": "10",
        "keep_alive_interval": "2",
        "keep_alive_max_attempt": "3",
        **{name: value for name, value in (settings or {}).items() if name != "is_host"},
    }
    address = endpoint[0].strip("[]")  # without the brackets of an IPv6 address
    return [
        *("--nnodes", nodes, "--nproc-per-node", str(nproc_per_node)),
        *("--max-restarts", str(max_restarts)),
        *("--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"{f'[{address}]' if ':' in address else address}:{endpoint[1]}"),
        *("--rdzv-id", run_id, *(("--local-addr", local_address.strip("[]")) if local_address is not None else ())),
        *("--rdzv-conf", ",".join(f"{name}={value}" for name, value in conf.items())),
    ]


def _elastic_instructions(spec: LaunchSpec) -> str:
    """Return the error message for an elastic job on several hosts, with the command to run on each of them.

    A host joins or leaves such a job when torchrun is started or stopped on it.
    """
    commands = commands_per_host(spec)
    lines = "\n".join(
        # Hosts without a process come last and have no line.
        f"  on {host.name}: {command.without_values_of(spec.forwarded).shell()}"
        for host, command in zip(spec.hosts, commands, strict=False)
    )
    private_names = ", ".join(spec.forwarded)
    prerequisite = f", with your values of {private_names}" if private_names else ""
    lines += (
        "\n  on a host that is added later: the last of these commands, with the name of the new host in --local-addr"
    )
    if len(commands) == 1:  # the command of the first host, which serves the rendezvous
        lines += ", and is_host=false instead of is_host=true"
    return (
        "An elastic job under torchrun must be started by hand on each of its hosts. "
        f"Use --launcher horovodrun, or run each of these commands on its host{prerequisite}:\n{lines}"
    )


def _options_with_restarts(
    spec: LaunchSpec, node_rank: int, ranks_per_host: Sequence[int], endpoint: tuple[str, int]
) -> list[str]:
    """Return the options of host `node_rank` for a job that torchrun's agents restart."""
    num_nodes = len(ranks_per_host)
    min_nodes, max_nodes = (num_nodes, num_nodes) if spec.elastic is None else spec.elastic.node_range(spec.hosts)
    return c10d_rendezvous_options(
        f"{min_nodes}:{max_nodes}",
        ranks_per_host[node_rank],
        spec.max_restarts,
        endpoint,
        is_first=node_rank == 0,
        local_address=spec.hosts[node_rank].name,
        run_id=spec.environment.get("UNITRAIN_JOB", "unitrain"),
    )


def _command(spec: LaunchSpec, options: list[str]) -> Command:
    fix = "Install torch there: pip install torch"
    module = "unitrain.bootstrap.torchrun"
    start = launcher_module_command(module, "torch", spec.python, fix, is_dry_run=spec.is_dry_run)
    # -m is an option of torchrun, unless a wrapper runs the module.
    num_flags = 1 if spec.module and not spec.wrapper else 0
    flags, program = spec.program[:num_flags], after_options(spec.program[num_flags:])
    return Command((*start, *options, *spec.launcher_args, *flags, *program), {**RESTART_VARIABLES, **spec.variables})
