"""Keeping a job going: it is started again when it fails, whatever its launcher, and when its hosts change."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import click

from unitrain.bootstrap import environment
from unitrain.bootstrap.authentication import new_key
from unitrain.errors import Preempted
from unitrain.launchers import Host, allocated_hosts, is_this_host
from unitrain.supervisor.job import Job
from unitrain.supervisor.membership import POLL_SECONDS, Membership
from unitrain.supervisor.ranks import Ranks

# What asks a job to end is passed on to it, and it is not started again.
_PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_PREEMPTED = int(Preempted(None).code or 0)
# A host or a file system that has just failed the job may need a moment, and a port may.
_PAUSE_SECONDS = 2.0
# A launcher that does not notice that a host has vanished is ended after so long, and killed after twice that.
_LAUNCHER_SECONDS = 10.0
# Ranks that are told to end do so at once, unless their host has gone.
_LEAVE_SECONDS = 15.0


class Supervisor:
    """Runs a job until it succeeds, is asked to end, or has failed more often than it is to be restarted.

    Each attempt is on the hosts that `membership` chooses, without one on those that were asked for. That the hosts
    have changed is no failure. `before_attempt` is called before each attempt.
    """

    def __init__(
        self, job: Job, membership: Membership | None = None, before_attempt: Callable[[], None] | None = None
    ) -> None:
        self._job, self._membership, self._before_attempt = job, membership, before_attempt
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = threading.Event()
        self.first_lost: int | None = None  # the rank that was killed first in the last attempt, as far as is known

    def run(self) -> int:
        """Run the job, and return the exit code of its last attempt. The main thread calls it. Raises LaunchError."""
        for number in _PASSED_ON:
            signal.signal(number, self._pass_on)
        signal.signal(signal.SIGINT, self._interrupt)
        failures = 0
        while True:
            hosts = self._job.spec.hosts if self._membership is None else self._membership.gather(self._asked)
            if self._asked.is_set():
                return _PREEMPTED
            code, ranks = self._attempt(hosts)
            self.first_lost = ranks.first_lost
            if code == 0:
                return code
            # torchrun and horovodrun end with 1, whatever their ranks end with.
            code = _PREEMPTED if ranks.preempted else code
            if self._asked.is_set() or (code == _PREEMPTED and not ranks.asked):
                return code
            if ranks.asked:
                click.echo("unitrain: the job is started again, on the hosts that there are now", err=True)
                continue
            if failures == self._job.spec.max_restarts:
                return code
            failures += 1
            click.echo(
                f"unitrain: the job ended with exit code {code}; it is started again, {failures} of "
                f"{self._job.spec.max_restarts}, and goes on from its newest checkpoint",
                err=True,
            )
            if self._membership is not None:
                self._membership.note_death(None if ranks.vanished else ranks.first_lost)
            self._asked.wait(_PAUSE_SECONDS)

    def _attempt(self, hosts: tuple[Host, ...]) -> tuple[int, Ranks]:
        """Run the job to its end, or until its hosts change; return its exit code, and how its ranks have ended."""
        if self._before_attempt is not None:
            self._before_attempt()
        listen_on, known_as = _addresses(hosts or allocated_hosts(self._job.launcher))
        key = new_key()  # another one for each attempt: nothing that an earlier one has signed is valid
        with Ranks(self._job.name, key, listen_on, known_as) as ranks:
            environment.export({environment.JOB_KEY: key})
            command = self._job.command(
                hosts if self._membership is not None else (), {environment.SUPERVISOR: ranks.address}
            )
            click.echo(command.shell(), err=True)
            environ = environment.without_ranks() | dict(command.environment)
            self._process = process = subprocess.Popen(command.argv, env=environ)
            if self._asked.is_set():  # which came before there was anything to pass it on to
                process.terminate()
            ended = threading.Event()
            follower = threading.Thread(target=self._follow_hosts, args=(ranks, ended), daemon=True)
            follower.start()
            code = _wait(process, ranks)
            ended.set()
            ranks.dismiss(_LEAVE_SECONDS)
            follower.join()
        return (code if code >= 0 else 128 - code), ranks

    def _follow_hosts(self, ranks: Ranks, ended: threading.Event) -> None:
        while self._membership is not None and not ended.wait(POLL_SECONDS):
            reason = self._membership.change()
            if reason is not None and not ended.is_set():
                click.echo(f"unitrain: {reason}: the job is asked to save and end", err=True)
                ranks.ask_to_end()
                return

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._asked.set()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if _is_in_foreground():  # the terminal sends Ctrl-C to the launcher too
            self._asked.set()
        else:
            self._pass_on(number, frame)


def _is_in_foreground() -> bool:
    """Return whether this process belongs to the foreground processes of its terminal, if it has one."""
    try:
        with Path("/dev/tty").open("rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _wait(process: subprocess.Popen[bytes], ranks: Ranks) -> int:
    """Return the launcher's exit code; where a rank's host has vanished, end a launcher that does not by itself."""
    end: list[Callable[[], None]] = [process.terminate, process.kill]
    next_at: float | None = None
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(1.0)
        if next_at is None and ranks.vanished:
            numbers = ", ".join(map(str, ranks.vanished))
            click.echo(f"unitrain: the host of rank {numbers} does not answer any more; the job is ended", err=True)
            next_at = time.monotonic() + _LAUNCHER_SECONDS
        if next_at is not None and end and time.monotonic() > next_at:
            end.pop(0)()
            next_at += _LAUNCHER_SECONDS


def _addresses(hosts: tuple[Host, ...]) -> tuple[str, str]:
    """Return the address to listen on, and the one at which all hosts reach it as far as can be told."""
    elsewhere = next((host for host in hosts if not is_this_host(host)), None)
    if elsewhere is None:
        return "127.0.0.1", "127.0.0.1"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere.name.strip("[]"), 9))  # any port: it only looks the route up
            address = str(probe.getsockname()[0])
            return address, address
    except OSError:  # known to ssh alone, perhaps
        return "", socket.gethostname()
