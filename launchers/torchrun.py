"""torchrun: torch's own launcher, started once on every host."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from unitrain.launchers import agents, slurm
from unitrain.launchers.addresses import DEFAULT_PORT, meeting_place
from unitrain.launchers.errors import LaunchError
from unitrain.launchers.exports import handed_on, looks_secret
from unitrain.launchers.hosts import check_spellings, is_here, shares
from unitrain.launchers.programs import module_command
from unitrain.launchers.spec import Command, LaunchSpec

# Without it the workers of a restart read the addresses of the workers that died (pytorch#135712).
RESTARTS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def build(spec: LaunchSpec) -> Command:
    """Return the command; it is typed on one host, and starts an agent on each of the others over ssh, or through
    Slurm in an allocation of several hosts, whose hosts are taken where none are given.

    One agent on this host takes a free port to meet at, so that two jobs do not meet. Several meet on the first host,
    at the spec's port or 29500.
    """
    spec.check_no_controller("torchrun")
    job = None
    if not spec.hosts and (job := slurm.allocation_of_several_hosts()) is not None:
        job.check_slots(spec.num_processes)
        spec = replace(spec, hosts=job.hosts, port=spec.port or job.port)
    if not spec.hosts or (len(spec.hosts) == 1 and is_here(spec.hosts[0])):
        return _command(spec, ["--standalone", "--nproc-per-node", str(spec.num_processes)])
    check_spellings(spec.hosts)
    if spec.elastic is not None:
        raise LaunchError(_typed_on_each(spec))
    spec = replace(spec, max_restarts=0)  # who started it starts all of it again
    hosts = spec.hosts[: len(shares(spec.num_processes, spec.hosts))]
    commands = list(zip(hosts, per_host(spec), strict=True))
    names = {*handed_on(), *spec.forwarded}
    return Command(
        agents.plan(commands, names, spec.python, through_slurm=job is not None),
        per_host=tuple((host.name, command) for host, command in commands),
    )


def per_host(spec: LaunchSpec) -> list[Command]:
    """Return the command of each host that gets a process, in the order of the hosts; the ranks meet on the first.

    Forwarded variables are on the line with their values, but for those that look secret. Raises LaunchError where
    the first of several hosts has a name that means another one on each.
    """
    counts = shares(spec.num_processes, spec.hosts)
    secrets = _secrets(spec)
    forwarded = {name: os.environ[name] for name in spec.forwarded if name in os.environ and name not in secrets}
    spec = replace(spec, environment={**forwarded, **spec.environment})
    if spec.max_restarts or spec.elastic is not None:
        return [_command(spec, _restarted(spec, number, counts)) for number in range(len(counts))]
    place = meeting_place(spec.hosts, spec.port or DEFAULT_PORT, spec.environment)
    options = node_options(counts, place["MASTER_ADDR"], int(place["MASTER_PORT"]))
    return [_command(spec, one) for one in options]


def node_options(counts: Sequence[int], address: str, port: int = DEFAULT_PORT) -> list[list[str]]:
    """Return the options of each of several hosts, which get `counts` processes and meet at `address`."""
    return [
        [
            *("--nnodes", str(len(counts)), "--node-rank", str(number)),
            *("--nproc-per-node", str(count)),
            *("--master-addr", address, "--master-port", str(port)),
        ]
        for number, count in enumerate(counts)
    ]


def _typed_on_each(spec: LaunchSpec) -> str:
    """Return what to do for an elastic job: a torchrun goes with its host, and one may come with another."""
    lines = "\n".join(
        # Hosts that are left without a process come last, and have no line.
        f"  on {host.name}: {command.shell()}"
        for host, command in zip(spec.hosts, per_host(spec), strict=False)
    )
    secrets = ", ".join(_secrets(spec))
    first = f" with {secrets} set there" if secrets else ""
    if spec.elastic is not None:
        lines += "\n  on a host that is added: the last of them, with its own name after --local-addr"
    return (
        f"torchrun is started once on each host, but -H names {len(spec.hosts)}. "
        f"Type on each its own line{first}, or use --launcher horovodrun:\n{lines}"
    )


def _restarted(spec: LaunchSpec, number: int, counts: Sequence[int]) -> list[str]:
    """Return the options of host `number` of a job that is started again by the torchruns that are left of it."""
    least, most = (len(counts), len(counts)) if spec.elastic is None else spec.elastic.nodes(spec.hosts)
    return rejoin_options(
        f"{least}:{most}",
        counts[number],
        spec.max_restarts,
        (spec.hosts[0].name, DEFAULT_PORT),
        is_first=number == 0,
        own=spec.hosts[number].name,
        job=spec.environment.get("UNITRAIN_JOB", "unitrain"),
    )


def rejoin_options(
    nodes: str,
    processes: int,
    max_restarts: int,
    endpoint: tuple[str, int],
    *,
    is_first: bool,
    own: str | None,
    job: str = "unitrain",
    settings: Mapping[str, str] | None = None,
) -> list[str]:
    """Return the options of one of several hosts whose torchruns meet again after a failure, as only c10d lets them.

    They meet at `endpoint`, which the first host serves; the others know this host as `own`. `settings` are the user's
    own of --rdzv-conf.
    """
    conf = {
        # Its own name may mean another address on a host than that by which the others know it.
        "is_host": "true" if is_first else "false",
        # Seconds in which others are waited for once there are enough, and until a host is given up: 3 x 2.
        "last_call_timeout": "10",
        "keep_alive_interval": "2",
        "keep_alive_max_attempt": "3",
        **{name: value for name, value in (settings or {}).items() if name != "is_host"},
    }
    return [
        *("--nnodes", nodes, "--nproc-per-node", str(processes)),
        *("--max-restarts", str(max_restarts)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{endpoint[0]}:{endpoint[1]}"),
        *("--rdzv-id", job, *(("--local-addr", own) if own is not None else ())),
        *("--rdzv-conf", ",".join(f"{name}={value}" for name, value in conf.items())),
    ]


def _secrets(spec: LaunchSpec) -> list[str]:
    return [
        name for name in spec.forwarded if name not in spec.environment and looks_secret(name, os.environ.get(name, ""))
    ]


def _command(spec: LaunchSpec, options: list[str]) -> Command:
    start = module_command(
        "torchrun", "torch", spec.python, "Install torch there: pip install torch", planned=spec.planned
    )
    return Command((*start, *options, *spec.launcher_args, *spec.program), {**RESTARTS, **spec.variables})
