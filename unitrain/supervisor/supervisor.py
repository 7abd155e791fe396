"""Supervise a job under any launcher: restart it after failures and host changes."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

import click

from unitrain.bootstrap.memory_folder import MemoryFolder
from unitrain.errors import Preempted
from unitrain.launchers import Host
from unitrain.monitoring.supervisor_client import LAST_CHECKPOINT_SECONDS, AttemptInfo, EarlierAttempt
from unitrain.processes import process_age_seconds
from unitrain.supervisor.attempt import Attempt, SupervisedJob, end_launcher
from unitrain.supervisor.membership import POLL_SECONDS, Membership
from unitrain.supervisor.ranks import RankConnections
from unitrain.supervisor.standby import Standby
from unitrain.threads import start_thread

# These termination and preemption signals are forwarded to the launcher. After one of them, the job is not restarted.
_FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_PREEMPTED_CODE = int(Preempted(None).code or 0)
# Exit code of an attempt whose launcher has not exited yet, if the job is not restarted.
_FAILED_CODE = 1
# A failed host, file system or port may take time to recover.
_RESTART_PAUSE_SECONDS = 2.0
# If a host is unreachable, or all ranks have exited after a crash, a launcher that does not exit is terminated after
# this number of seconds, and killed after twice this number.
_LAUNCHER_TIMEOUT_SECONDS = 10.0
# Ranks exit immediately on request, unless their host is unreachable.
_RANK_EXIT_TIMEOUT_SECONDS = 15.0
# With standby ranks: the interval between checks of the processes, and the time for the remaining ranks to exit after a
# crash. A stopped rank does not exit on request, but the launcher kills it.
_STANDBY_POLL_SECONDS = 0.05
_CRASH_EXIT_SECONDS = 2.0


class Supervisor:
    """Runs a job until it succeeds, a signal terminates it, its ranks are preempted, or the restarts are exhausted.

    `membership` selects the hosts of each attempt; without it, the hosts of the job are used. A host change does not
    count as a failure. `before_attempt` is called before each attempt.
    """

    def __init__(
        self, job: SupervisedJob, membership: Membership | None = None, before_attempt: Callable[[], None] | None = None
    ) -> None:
        self._job, self._membership, self._before_attempt = job, membership, before_attempt
        self._standby = Standby(job)
        self._process: subprocess.Popen[bytes] | None = None
        self._exiting_launchers: list[threading.Thread] = []
        self._stop_event = threading.Event()
        self._num_failures = 0
        # Start and end of each earlier attempt, in seconds of time.monotonic(), and the time spent waiting for hosts.
        self._earlier_attempts: list[tuple[float, float, float]] = []
        self._attempt_start_time = 0.0
        self._restart_reason: str | None = None
        self.first_crashed_rank: int | None = None  # the rank that was killed or crashed first in the latest attempt

    def run(self) -> int:
        """Run the job and return the exit code of the last attempt. Raises LaunchError.

        Must be called in the main thread.
        """
        for signum in _FORWARDED_SIGNALS:
            signal.signal(signum, self._forward_signal)
        signal.signal(signal.SIGINT, self._handle_interrupt)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores this signal
            # The terminal was closed. SIGTERM lets the ranks save a checkpoint, whereas SIGHUP would kill them.
            signal.signal(signal.SIGHUP, lambda _, frame: self._forward_signal(signal.SIGTERM, frame))
        memory = MemoryFolder() if self._job.may_restart else None
        if memory is not None:
            self._job = replace(self._job, memory_folder=memory.path, memory_error=memory.error)
        self._standby = Standby(self._job)
        try:
            return self._run_attempts()
        finally:
            self._standby.cancel()
            for thread in self._exiting_launchers:
                thread.join()
            if memory is not None:
                memory.close()

    def _run_attempts(self) -> int:
        while True:
            waiting_since = time.monotonic()
            hosts = () if self._membership is None else self._membership.wait_for_hosts(self._stop_event)
            if self._stop_event.is_set():
                return _PREEMPTED_CODE
            waiting_seconds = time.monotonic() - waiting_since
            code, ranks = self._run_attempt(hosts, waiting_seconds)
            self._earlier_attempts.append((self._attempt_start_time, time.monotonic(), waiting_seconds))
            self.first_crashed_rank = ranks.first_crashed_rank
            if code == 0:
                return code
            # torchrun and horovodrun exit with code 1 regardless of the exit codes of the ranks.
            code = _PREEMPTED_CODE if ranks.is_preempted else code
            if self._stop_event.is_set() or (code == _PREEMPTED_CODE and not ranks.is_exit_requested):
                return _FAILED_CODE if code is None else code
            if ranks.is_exit_requested:
                self._restart_reason = "the hosts of the job changed"
                click.echo("unitrain: restarting the job on the hosts that are available now", err=True)
                continue
            if code is not None and not self._has_restarts_left:
                return code
            self._num_failures += 1
            if code is None:
                self._restart_reason = f"rank {ranks.first_crashed_rank} was killed or crashed"
                problem = f"{self._restart_reason}; restarting the job"
            else:
                self._restart_reason = _describe_failure(code, ranks)
                problem = f"the job ended with exit code {code}; restarting it"
            click.echo(
                f"unitrain: {problem} from its newest checkpoint (restart {self._num_failures} of "
                f"{self._job.spec.max_restarts})",
                err=True,
            )
            if self._membership is not None:
                self._membership.record_failure(None if ranks.unreachable_ranks else ranks.first_crashed_rank)
            if not self._standby.is_available:
                self._stop_event.wait(_RESTART_PAUSE_SECONDS)

    @property
    def _has_restarts_left(self) -> bool:
        return self._num_failures < self._job.spec.max_restarts

    def _run_attempt(self, hosts: tuple[Host, ...], waiting_seconds: float) -> tuple[int | None, RankConnections]:
        """Run one attempt until the job exits or its hosts change. Return the exit code and the states of the ranks.

        `waiting_seconds` is the time that the supervisor waited for hosts before the attempt. The exit code is None if
        a rank was killed or crashed, and standby ranks can replace the attempt. The launcher of the attempt may then
        still be exiting, but its ranks have exited.
        """
        if self._before_attempt is not None:
            self._before_attempt()
        describe = self._begin_attempt(waiting_seconds)
        attempt = self._standby.start_attempt(hosts, describe) or Attempt(self._job, hosts, describe)
        with attempt.connections as ranks:
            self._process = attempt.process
            if self._stop_event.is_set():  # a signal arrived before the process was started
                attempt.process.terminate()
            has_ended = threading.Event()
            monitor = start_thread(self._monitor_hosts, ranks, has_ended, name="unitrain hosts", restarts=True)
            code = self._wait_for_end(attempt)
            has_ended.set()
            monitor.join()
            if code is None:
                exiting = start_thread(end_launcher, attempt.process, name="unitrain launcher end", daemon=False)
                self._exiting_launchers.append(exiting)
                return None, ranks
            if code < 0 and not ranks.unreachable_ranks:
                ranks.save_after_end_of_launcher(LAST_CHECKPOINT_SECONDS)
            ranks.exit_all_ranks(_RANK_EXIT_TIMEOUT_SECONDS)
        return (code if code >= 0 else 128 - code), ranks

    def _begin_attempt(self, waiting_seconds: float) -> Callable[[], AttemptInfo]:
        """Start the time of an attempt, and return the function that describes it. The age of the first attempt is the
        age of this process, minus the time spent waiting for hosts.
        """
        number, reason, start_time = len(self._earlier_attempts) + 1, self._restart_reason, time.monotonic()
        if number == 1:
            start_time -= max(0.0, process_age_seconds() - waiting_seconds)
        self._attempt_start_time = start_time
        earlier_attempts = tuple(
            EarlierAttempt(start_time - started, start_time - ended, waited)
            for started, ended, waited in self._earlier_attempts
        )
        return lambda: AttemptInfo(number, time.monotonic() - start_time, waiting_seconds, reason, earlier_attempts)

    def _wait_for_end(self, attempt: Attempt) -> int | None:
        """Wait for the launcher and return its exit code. Terminate the launcher after a timeout if a host is
        unreachable, or if all ranks have exited after a crash. In the second case, horovodrun and mpirun would wait
        for processes that were started by a rank and hold its output.

        If a rank was killed or crashed and standby ranks can replace the attempt, request the exit of the other ranks,
        and return None when they have exited.
        """
        process, ranks = attempt.process, attempt.connections
        actions: list[Callable[[], None]] = [process.terminate, process.kill]
        next_action_at: float | None = None
        while True:
            if self._job.uses_standby:
                ranks.wait_for_exit(_STANDBY_POLL_SECONDS)
            with suppress(subprocess.TimeoutExpired):
                return process.wait(0.0 if self._job.uses_standby else 1.0)
            if self._has_restarts_left and not self._stop_event.is_set():
                self._standby.update(attempt)
            if self._can_replace(ranks) and ranks.exit_remaining_ranks(_CRASH_EXIT_SECONDS):
                return None
            if next_action_at is None and ranks.unreachable_ranks:
                noun = "rank" if len(ranks.unreachable_ranks) == 1 else "ranks"
                numbers = ", ".join(map(str, ranks.unreachable_ranks))
                click.echo(f"unitrain: the host of {noun} {numbers} does not respond; ending the job", err=True)
                next_action_at = time.monotonic() + _LAUNCHER_TIMEOUT_SECONDS
            # torchrun does not wait for the output. It may restart the ranks itself, if --launcher-args requests this.
            if next_action_at is None and ranks.have_exited_after_crash and self._job.launcher != "torchrun":
                next_action_at = time.monotonic() + _LAUNCHER_TIMEOUT_SECONDS
            if next_action_at is not None and actions and time.monotonic() > next_action_at:
                if len(actions) == 2 and not ranks.unreachable_ranks:
                    text = "all ranks have exited, but the launcher has not; ending it"
                    click.echo(f"unitrain: {text}", err=True)
                actions.pop(0)()
                next_action_at += _LAUNCHER_TIMEOUT_SECONDS

    def _can_replace(self, ranks: RankConnections) -> bool:
        """Return whether a rank was killed or crashed, and standby ranks can replace all ranks."""
        is_requested = self._stop_event.is_set() or ranks.is_exit_requested
        has_crashed = ranks.has_running_rank_crashed and ranks.first_crashed_rank is not None
        return has_crashed and self._standby.is_available and not is_requested

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


def _describe_failure(code: int, ranks: RankConnections) -> str:
    """Return the cause of the failure of an attempt that ended with exit code `code`."""
    if ranks.first_crashed_rank is not None:
        return f"rank {ranks.first_crashed_rank} was killed or crashed"
    if ranks.unreachable_ranks:
        return f"the host of rank {ranks.unreachable_ranks[0]} did not respond"
    return f"the job ended with exit code {code}"


def _is_in_foreground() -> bool:
    """Return whether this process is in the foreground process group of a terminal."""
    try:
        with Path("/dev/tty").open("rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False
