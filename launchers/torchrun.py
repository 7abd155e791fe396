"""torchrun: torch's own launcher, started once on every host."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from launchers.addresses import DEFAULT_PORT
from launchers.errors import LaunchError
from launchers.exports import looks_secret
from launchers.hosts import check_is_here, shares
from launchers.programs import find_program
from launchers.spec import Command, LaunchSpec

# Without it the workers of a restart read the addresses of the workers that died (pytorch#135712).
RESTARTS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def build(spec: LaunchSpec) -> Command:
    """Return the command for this host. Raises LaunchError for several, with what to type on each."""
    spec.check_no_controller("torchrun")
    if len(spec.hosts) > 1:
        lines = "\n".join(
            # Hosts that are left without a process come last, and have no line.
            f"  on {host.name}: {command.shell()}"
            for host, command in zip(spec.hosts, per_host(spec), strict=False)
        )
        secrets = ", ".join(_secrets(spec))
        first = f" with {secrets} set there" if secrets else ""
        if spec.elastic is not None:
            lines += "\n  on a host that is added: the last of them, with its own name after --local-addr"
        raise LaunchError(
            f"torchrun is started once on each host, but -H names {len(spec.hosts)}. "
            f"Type on each its own line{first}, or use --launcher horovodrun:\n{lines}"
        )
    for host in spec.hosts:
        check_is_here(host, "torchrun")
    # --standalone takes a free port, so that two jobs on one host do not meet.
    return _command(spec, ["--standalone", "--nproc-per-node", str(spec.num_processes)])


def per_host(spec: LaunchSpec) -> list[Command]:
    """Return the command of each host that gets a process, in the order of the hosts; the ranks meet on the first.

    Forwarded variables are on the line with their values, but for those that look secret.
    """
    counts = shares(spec.num_processes, spec.hosts)
    secrets = _secrets(spec)
    forwarded = {name: os.environ[name] for name in spec.forwarded if name in os.environ and name not in secrets}
    spec = replace(spec, environment={**forwarded, **spec.environment})
    if spec.max_restarts or spec.elastic is not None:
        return [_command(spec, _restarted(spec, number, counts)) for number in range(len(counts))]
    return [_command(spec, options) for options in node_options(counts, spec.hosts[0].name)]


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


def _restarted(spec: LaunchSpec, number: int, counts: Sequence[int]) -> list[str]:
    """Return the options of host `number` of a job that is started again by the torchruns that are left of it."""
    first, own = spec.hosts[0].name, spec.hosts[number].name
    least, most = (len(counts), len(counts)) if spec.elastic is None else spec.elastic.nodes(spec.hosts)
    settings = {
        # Its own name may mean another address on a host than that by which the others know it.
        "is_host": "true" if number == 0 else "false",
        # Seconds in which others are waited for once there are enough, and until a host is given up: 3 x 2.
        "last_call_timeout": "10",
        "keep_alive_interval": "2",
        "keep_alive_max_attempt": "3",
    }
    return [
        *("--nnodes", f"{least}:{most}", "--nproc-per-node", str(counts[number])),
        *("--max-restarts", str(spec.max_restarts)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{DEFAULT_PORT}"),
        *("--rdzv-id", spec.environment.get("UNITRAIN_JOB", "unitrain"), "--local-addr", own),
        *("--rdzv-conf", ",".join(f"{name}={value}" for name, value in settings.items())),
    ]


def _secrets(spec: LaunchSpec) -> list[str]:
    return [
        name for name in spec.forwarded if name not in spec.environment and looks_secret(name, os.environ.get(name, ""))
    ]


def _command(spec: LaunchSpec, options: list[str]) -> Command:
    program = find_program("torchrun", spec.python, "It comes with torch: pip install torch")
    return Command((program, *options, *spec.launcher_args, spec.script, *spec.args), {**RESTARTS, **spec.variables})
