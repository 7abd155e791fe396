"""One attempt of a supervised job: the launcher's process, and the connections to its ranks."""

from __future__ import annotations

import secrets
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import click

from unitrain import launchers
from unitrain.bootstrap import environment
from unitrain.bootstrap.authentication import new_key
from unitrain.bootstrap.network import find_free_port
from unitrain.launchers import Command, Host, LaunchSpec, allocated_hosts, is_this_host
from unitrain.monitoring.supervisor_client import AttemptInfo
from unitrain.processes import parent_death_signal_setter
from unitrain.supervisor import standby_rank
from unitrain.supervisor.ranks import RankConnections

# Time that `end_launcher` waits for a launcher before it sends SIGTERM, and again before it sends SIGKILL.
_LAUNCHER_EXIT_SECONDS = 10.0
# Standby ranks that wait for their start respond within milliseconds, unless they are stopped.
_RESPONSE_SECONDS = 5.0


@dataclass(frozen=True)
class SupervisedJob:
    """A job that runs `spec` under `launcher`, in several attempts if `spec` allows restarts.

    `name` is the same for all attempts. A Trainer uses it to recognize checkpoints of earlier attempts. With
    `uses_standby`, the ranks of the next attempt are started in advance. Attempts whose rank 0 runs on this host use
    `memory_folder` for checkpoints in memory; `memory_error` is the reason why it could not be created.
    """

    launcher: str
    spec: LaunchSpec
    uses_standby: bool = False
    memory_folder: Path | None = None
    memory_error: str | None = None
    name: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def may_restart(self) -> bool:
        """Whether there may be more than one attempt."""
        return self.spec.max_restarts > 0 or self.spec.elastic is not None

    @property
    def needs_supervisor(self) -> bool:
        """Whether the `unitrain launch` process must run until the job exits."""
        return self.may_restart or bool(self.spec.wrapper)

    def uses_only_this_host(self, hosts: tuple[Host, ...] = ()) -> bool:
        """Return whether all ranks of an attempt on `hosts`, or on the hosts of the spec, run on this host."""
        return all(map(is_this_host, self._resolve_hosts(hosts)))

    def runs_rank_zero_on_this_host(self, hosts: tuple[Host, ...] = ()) -> bool:
        """Return whether rank 0 of an attempt on `hosts`, or on the hosts of the spec, runs on this host."""
        return all(map(is_this_host, self._resolve_hosts(hosts)[:1]))

    def select_addresses(self, hosts: tuple[Host, ...]) -> tuple[str, str]:
        """Return an address to listen on, and an address that is likely reachable from all hosts of an attempt."""
        return _select_addresses(self._resolve_hosts(hosts))

    def _resolve_hosts(self, hosts: tuple[Host, ...]) -> tuple[Host, ...]:
        return hosts or self.spec.hosts or allocated_hosts(self.launcher)

    def count_ranks(self, hosts: tuple[Host, ...]) -> int:
        """Return the number of ranks of an attempt on `hosts`, or on the hosts of the spec if `hosts` is empty."""
        return sum(host.slots for host in hosts) or self.spec.num_processes

    def build_command(
        self, hosts: tuple[Host, ...] = (), variables: Mapping[str, str] | None = None, *, is_standby: bool = False
    ) -> Command:
        """Return the launcher command for an attempt.

        The attempt uses all slots of `hosts`, or the hosts of the spec if `hosts` is empty. The environment `variables`
        are set on every rank. With `is_standby`, the ranks wait until the supervisor starts them. Raises LaunchError.
        """
        added = dict(variables or {})
        if self.needs_supervisor:
            added[environment.JOB_ID_VARIABLE] = self.name
        if self.spec.elastic is not None:
            added[environment.ELASTIC_VARIABLE] = str(self.spec.elastic)
        if self.memory_folder is not None and self.runs_rank_zero_on_this_host(hosts):
            added[environment.SHARED_MEMORY_FOLDER_VARIABLE] = str(self.memory_folder)
        if self.memory_error is not None and self.runs_rank_zero_on_this_host(hosts):
            added[environment.SHARED_MEMORY_ERROR_VARIABLE] = self.memory_error
        wrapper = (*self.spec.wrapper, *(standby_rank.wrapper_arguments() if is_standby else ()))
        spec = replace(self.spec, environment={**self.spec.environment, **added}, wrapper=wrapper)
        if hosts:
            spec = replace(spec, hosts=hosts, num_processes=sum(host.slots for host in hosts))
        if is_standby and not self.uses_only_this_host(hosts):
            spec = replace(spec, port=find_free_port())  # the running attempt uses the port of the spec
        return launchers.build(self.launcher, spec)


class Attempt:
    """A started launcher, and the connections to its ranks. Raises LaunchError if its command cannot be built.

    The attempt runs on `hosts`, or on the hosts of the job's spec if `hosts` is empty. With `is_standby`, its ranks
    import torch and then wait for `start`. `describe` returns the description of the attempt for rank 0.
    """

    def __init__(
        self,
        job: SupervisedJob,
        hosts: tuple[Host, ...],
        describe: Callable[[], AttemptInfo] | None = None,
        *,
        is_standby: bool = False,
    ) -> None:
        self.hosts, self.num_ranks = hosts, job.count_ranks(hosts)
        listen_on, advertised_host = job.select_addresses(hosts)
        key = new_key()  # a new key per attempt: messages signed in an earlier attempt are rejected
        self.connections = RankConnections(job.name, key, listen_on, advertised_host, is_standby=is_standby)
        self.connections.describe_attempt = describe
        try:
            environment.export({environment.JOB_KEY_VARIABLE: key})
            variables = {environment.SUPERVISOR_VARIABLE: self.connections.address}
            command = job.build_command(hosts, variables, is_standby=is_standby)
            if not is_standby:
                click.echo(command.shell(), err=True)
            self.process = subprocess.Popen(
                command.argv,
                env=environment.without_rank_variables() | dict(command.environment),
                stdin=subprocess.DEVNULL if is_standby else None,  # the running attempt reads the terminal
                # If `unitrain launch` is killed, the launcher terminates its ranks. Ranks that have called
                # `unitrain.init` also detect this themselves.
                preexec_fn=parent_death_signal_setter(signal.SIGTERM),
            )
        except BaseException:
            self.connections.close()
            raise

    @property
    def is_ready(self) -> bool:
        """Whether all standby ranks wait for `start`."""
        return self.connections.num_ready == self.num_ranks

    @property
    def is_running(self) -> bool:
        """Whether all ranks have called `unitrain.init`, and none has shut its backend down."""
        return self.connections.num_running == self.num_ranks

    @property
    def can_start(self) -> bool:
        """Whether the launcher runs and no standby rank has exited."""
        return self.process.poll() is None and not self.connections.has_disconnected_ranks

    def wait_for_responses(self) -> bool:
        """Request a response from all standby ranks that wait for `start`. Return whether they respond within 5 s.

        If the ranks are still being started, return True without a request.
        """
        return not self.is_ready or self.connections.wait_for_responses(_RESPONSE_SECONDS)

    def start(self, describe: Callable[[], AttemptInfo]) -> None:
        """Start the standby ranks. `describe` returns the description of the attempt for rank 0."""
        self.connections.describe_attempt = describe
        self.connections.start()

    def cancel(self) -> None:
        """Let the standby ranks exit, and wait for their launcher."""
        if not self.is_ready:  # the launcher may not have started the ranks yet
            self.process.terminate()
        self.connections.exit_remaining_ranks(_LAUNCHER_EXIT_SECONDS)
        end_launcher(self.process)
        self.connections.close()


def end_launcher(process: subprocess.Popen[bytes]) -> None:
    """Wait for a launcher whose ranks have exited. Terminate it after a timeout, and kill it after a second one.

    The wait ends after a third timeout: a process in an uninterruptible system call cannot be killed.
    """
    for action in (process.terminate, process.kill, None):
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LAUNCHER_EXIT_SECONDS)
            return
        if action is not None:
            action()


def _select_addresses(hosts: tuple[Host, ...]) -> tuple[str, str]:
    """Return the address to listen on, and an address that is likely reachable from all hosts."""
    remote_host = next((host for host in hosts if not is_this_host(host)), None)
    if remote_host is None:
        return "127.0.0.1", "127.0.0.1"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # The port does not matter: connecting a datagram socket only selects a route, and sends no packet.
            probe.connect((remote_host.name.strip("[]"), 9))
            address = str(probe.getsockname()[0])
            return address, address
    except OSError:  # the name may be an alias in the ssh configuration
        return "", socket.gethostname()
