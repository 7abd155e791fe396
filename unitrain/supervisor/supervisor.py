"""Supervise a job under any launcher: restart it after failures and host changes."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

import click

from unitrain import launchers
from unitrain.bootstrap import environment
from unitrain.bootstrap.authentication import new_key
from unitrain.errors import Preempted
from unitrain.launchers import Command, Host, LaunchSpec, allocated_hosts, is_this_host
from unitrain.supervisor.membership import POLL_SECONDS, Membership
from unitrain.supervisor.ranks import RankConnections

# These termination and preemption signals are forwarded to the launcher. After one of them, the job is not restarted.
_FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_PREEMPTED_CODE = int(Preempted(None).code or 0)
# A failed host, file system or port may take time to recover.
_RESTART_PAUSE_SECONDS = 2.0
# A launcher that does not exit although a host is unreachable is terminated after this number of seconds, and killed
# after twice that.
_LAUNCHER_TIMEOUT_SECONDS = 10.0
# Ranks exit immediately on request, unless their host is unreachable.
_RANK_EXIT_TIMEOUT_SECONDS = 15.0


@dataclass(frozen=True)
class SupervisedJob:
    """A job that runs `spec` under `launcher`, in several attempts if `spec` allows restarts.

    `name` is the same for all attempts. A Trainer uses it to recognize checkpoints of earlier attempts.
    """

    launcher: str
    spec: LaunchSpec
    name: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def may_restart(self) -> bool:
        """Whether there may be more than one attempt."""
        return self.spec.max_restarts > 0 or self.spec.elastic is not None

    @property
    def needs_supervisor(self) -> bool:
        """Whether the `unitrain launch` process must run until the job exits."""
        return self.may_restart or bool(self.spec.wrapper)

    def command(self, hosts: tuple[Host, ...] = (), variables: Mapping[str, str] | None = None) -> Command:
        """Return the launcher command for an attempt.

        The attempt uses all slots of `hosts`, or the hosts of the spec if `hosts` is empty. The environment `variables`
        are set on every rank. Raises LaunchError.
        """
        added = dict(variables or {})
        if self.needs_supervisor:
            added[environment.JOB] = self.name
        if self.spec.elastic is not None:
            added[environment.ELASTIC] = str(self.spec.elastic)
        spec = replace(self.spec, environment={**self.spec.environment, **added})
        if hosts:
            spec = replace(spec, hosts=hosts, num_processes=sum(host.slots for host in hosts))
        return launchers.build(self.launcher, spec)


class Supervisor:
    """Runs a job until it succeeds, a signal terminates it, or the restarts are exhausted.

    `membership` selects the hosts of each attempt; without it, the hosts of the job are used. A host change does not
    count as a failure. `before_attempt` is called before each attempt.
    """

    def __init__(
        self, job: SupervisedJob, membership: Membership | None = None, before_attempt: Callable[[], None] | None = None
    ) -> None:
        self._job, self._membership, self._before_attempt = job, membership, before_attempt
        self._process: subprocess.Popen[bytes] | None = None
        self._stop_event = threading.Event()
        self.first_crashed_rank: int | None = None  # the first rank killed in the latest attempt, if known

    def run(self) -> int:
        """Run the job and return the exit code of the last attempt. Raises LaunchError.

        Must be called in the main thread.
        """
        for signum in _FORWARDED_SIGNALS:
            signal.signal(signum, self._forward_signal)
        signal.signal(signal.SIGINT, self._handle_interrupt)
        num_failures = 0
        while True:
            hosts = (
                self._job.spec.hosts if self._membership is None else self._membership.select_hosts(self._stop_event)
            )
            if self._stop_event.is_set():
                return _PREEMPTED_CODE
            code, ranks = self._run_attempt(hosts)
            self.first_crashed_rank = ranks.first_crashed_rank
            if code == 0:
                return code
            # torchrun and horovodrun exit with code 1 regardless of the exit codes of the ranks.
            code = _PREEMPTED_CODE if ranks.is_preempted else code
            if self._stop_event.is_set() or (code == _PREEMPTED_CODE and not ranks.is_exit_requested):
                return code
            if ranks.is_exit_requested:
                click.echo("unitrain: restarting the job on the hosts that are available now", err=True)
                continue
            if num_failures == self._job.spec.max_restarts:
                return code
            num_failures += 1
            click.echo(
                f"unitrain: the job ended with exit code {code}; restarting it from its newest checkpoint (restart "
                f"{num_failures} of {self._job.spec.max_restarts})",
                err=True,
            )
            if self._membership is not None:
                self._membership.record_failure(None if ranks.unreachable else ranks.first_crashed_rank)
            self._stop_event.wait(_RESTART_PAUSE_SECONDS)

    def _run_attempt(self, hosts: tuple[Host, ...]) -> tuple[int, RankConnections]:
        """Run one attempt until the job exits or its hosts change. Return the exit code and the states of the ranks."""
        if self._before_attempt is not None:
            self._before_attempt()
        listen_on, advertised_host = _select_addresses(hosts or allocated_hosts(self._job.launcher))
        key = new_key()  # a new key per attempt: messages signed in an earlier attempt are rejected
        with RankConnections(self._job.name, key, listen_on, advertised_host) as ranks:
            environment.export({environment.JOB_KEY: key})
            command = self._job.command(
                hosts if self._membership is not None else (), {environment.SUPERVISOR: ranks.address}
            )
            click.echo(command.shell(), err=True)
            environ = environment.without_rank_variables() | dict(command.environment)
            self._process = process = subprocess.Popen(command.argv, env=environ)
            if self._stop_event.is_set():  # a signal arrived before the process was started
                process.terminate()
            has_ended = threading.Event()
            monitor = threading.Thread(target=self._monitor_hosts, args=(ranks, has_ended), daemon=True)
            monitor.start()
            code = _wait_for_launcher(process, ranks)
            has_ended.set()
            ranks.exit_all_ranks(_RANK_EXIT_TIMEOUT_SECONDS)
            monitor.join()
        return (code if code >= 0 else 128 - code), ranks

    def _monitor_hosts(self, ranks: RankConnections, has_ended: threading.Event) -> None:
        while self._membership is not None and not has_ended.wait(POLL_SECONDS):
            change = self._membership.find_change()
            if change is not None and not has_ended.is_set():
                click.echo(f"unitrain: {change}: asking the job to save a checkpoint and exit", err=True)
                ranks.request_exit()
                return

    def _forward_signal(self, signum: int, frame: FrameType | None) -> None:
        self._stop_event.set()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signum)

    def _handle_interrupt(self, signum: int, frame: FrameType | None) -> None:
        if _is_in_foreground():  # on Ctrl-C, the terminal also signals the launcher
            self._stop_event.set()
        else:
            self._forward_signal(signum, frame)


def _is_in_foreground() -> bool:
    """Return whether this process is in the foreground process group of a terminal."""
    try:
        with Path("/dev/tty").open("rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _wait_for_launcher(process: subprocess.Popen[bytes], ranks: RankConnections) -> int:
    """Wait for the launcher and return its exit code. If a host is unreachable, terminate it after a timeout."""
    actions: list[Callable[[], None]] = [process.terminate, process.kill]
    next_action_at: float | None = None
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(1.0)
        if next_action_at is None and ranks.unreachable:
            numbers = ", ".join(map(str, ranks.unreachable))
            click.echo(f"unitrain: the host of rank {numbers} does not respond; ending the job", err=True)
            next_action_at = time.monotonic() + _LAUNCHER_TIMEOUT_SECONDS
        if next_action_at is not None and actions and time.monotonic() > next_action_at:
            actions.pop(0)()
            next_action_at += _LAUNCHER_TIMEOUT_SECONDS


def _select_addresses(hosts: tuple[Host, ...]) -> tuple[str, str]:
    """Return the address to listen on, and an address that is likely reachable from all hosts."""
    remote_host = next((host for host in hosts if not is_this_host(host)), None)
    if remote_host is None:
        return "127.0.0.1", "127.0.0.1"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(
                (remote_host.name.strip("[]"), 9)
            )  # the port does not matter: a UDP connect only selects a route and sends no packet
            address = str(probe.getsockname()[0])
            return address, address
    except OSError:  # the name may be an alias in the ssh configuration
        return "", socket.gethostname()
