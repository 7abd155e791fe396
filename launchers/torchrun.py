"""torchrun: torch's own launcher, started once on every host."""

from __future__ import annotations

from launchers.errors import LaunchError
from launchers.hosts import Host, check_is_here
from launchers.programs import find_program
from launchers.spec import Command, LaunchSpec

_PORT = 29500


def build(spec: LaunchSpec) -> Command:
    """Return the command for this host. Raises LaunchError for several, with what to type on each."""
    if spec.controller is not None:
        raise LaunchError(
            f"--{spec.controller} chooses horovodrun's controller, but the launcher is torchrun. "
            "Leave it out, or use: --backend horovod --launcher horovodrun"
        )
    if len(spec.hosts) > 1:
        lines = "\n".join(
            # Hosts that are left without a process come last, and have no line.
            f"  on {host.name}: {command.shell()}"
            for host, command in zip(spec.hosts, per_host(spec), strict=False)
        )
        raise LaunchError(
            f"torchrun is started once on each host, but -H names {len(spec.hosts)}. "
            f"Type on each its own line, or use --launcher horovodrun:\n{lines}"
        )
    for host in spec.hosts:
        check_is_here(host, "torchrun")
    # --standalone takes a free port, so that two jobs on one host do not meet.
    return _command(spec, ["--standalone", "--nproc-per-node", str(spec.num_processes)])


def per_host(spec: LaunchSpec) -> list[Command]:
    """Return the command of each host that gets a process, in the order of the hosts; the ranks meet on the first."""
    shares = _shares(spec.num_processes, spec.hosts)
    return [
        _command(
            spec,
            [
                *("--nnodes", str(len(shares)), "--node-rank", str(number)),
                *("--nproc-per-node", str(count)),
                *("--master-addr", spec.hosts[0].name, "--master-port", str(_PORT)),
            ],
        )
        for number, count in enumerate(shares)
    ]


def _shares(processes: int, hosts: tuple[Host, ...]) -> list[int]:
    """Return how many processes the hosts get: they are filled in order, as horovodrun does, until none is left."""
    shares = []
    for host in hosts:
        if not processes:
            break
        shares.append(min(processes, host.slots))
        processes -= shares[-1]
    return shares


def _command(spec: LaunchSpec, options: list[str]) -> Command:
    program = find_program("torchrun", spec.python, "It comes with torch: pip install torch")
    # Without it the workers of a restart read the addresses of the workers that died (pytorch#135712).
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **spec.variables}
    return Command((program, *options, spec.script, *spec.args), variables)
