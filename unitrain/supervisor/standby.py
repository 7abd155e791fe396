"""Standby ranks: the ranks of the next attempt, which have imported torch and wait until the running attempt fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import click

from unitrain.launchers import Host, LaunchError
from unitrain.monitoring.supervisor_client import AttemptInfo
from unitrain.supervisor.attempt import Attempt, SupervisedJob
from unitrain.threads import start_thread

# The standby ranks are started this long after all ranks of the running attempt have called `unitrain.init`. By then,
# these ranks usually execute their first steps.
_START_DELAY_SECONDS = 3.0


class Standby:
    """Keeps standby ranks for the next attempt of `job` on the hosts of the running attempt.

    It does nothing unless `job.uses_standby` is set. Only the main thread of the supervisor calls its methods.
    """

    def __init__(self, job: SupervisedJob) -> None:
        self._job = job
        self._attempt: Attempt | None = None
        self._served_attempt: Attempt | None = None  # the running attempt for which standby ranks were started
        self._running_since: float | None = None
        self._is_ready = False
        self._cancellations: list[threading.Thread] = []

    @property
    def is_available(self) -> bool:
        """Whether standby ranks are waiting or are being started."""
        return self._attempt is not None and self._attempt.can_start

    def update(self, running_attempt: Attempt) -> None:
        """Start the standby ranks when `running_attempt` has run for a few seconds. Must be called periodically.

        The standby ranks are started once per attempt. Ranks that exit before they are needed are not replaced.
        """
        if not self._job.uses_standby:
            return
        if self._attempt is not None:
            if not self._is_ready and self._attempt.is_ready:
                self._is_ready = True
                click.echo("unitrain: the standby ranks are ready", err=True)
            elif not self._attempt.can_start:
                click.echo("unitrain: the standby ranks have exited, so a restart will start new ranks", err=True)
                self._begin_cancellation()
            return
        if (
            self._served_attempt is running_attempt
            or not running_attempt.is_running
            or not self._job.runs_rank_zero_on_this_host(running_attempt.hosts)
        ):
            return
        self._running_since = self._running_since or time.monotonic()
        if time.monotonic() - self._running_since < _START_DELAY_SECONDS:
            return
        self._served_attempt, self._running_since = running_attempt, None
        try:
            self._attempt = Attempt(self._job, running_attempt.hosts, is_standby=True)
        except (LaunchError, OSError) as error:  # OSError: for example, too many processes or open files
            click.echo(f"unitrain: cannot start standby ranks: {error}", err=True)

    def start_attempt(self, hosts: tuple[Host, ...], describe: Callable[[], AttemptInfo]) -> Attempt | None:
        """Start the standby ranks and return their attempt; return None if none run on `hosts` or one does not respond.

        `describe` returns the description of the attempt for rank 0.
        """
        attempt = self._attempt
        if attempt is None or not attempt.can_start or attempt.hosts != hosts:
            self._begin_cancellation()
            return None
        if not (attempt.wait_for_responses() and attempt.can_start):  # a rank may have exited during the wait
            click.echo("unitrain: the standby ranks do not respond, so the restart starts new ranks", err=True)
            self._begin_cancellation()
            return None
        self._attempt, self._is_ready = None, False
        attempt.start(describe)
        return attempt

    def cancel(self) -> None:
        """Let the standby ranks exit, and wait for them."""
        self._begin_cancellation()
        for thread in self._cancellations:
            thread.join()

    def _begin_cancellation(self) -> None:
        """Let the standby ranks exit. If one is stopped, this takes up to 40 s, so another thread waits."""
        self._running_since, self._is_ready = None, False
        if self._attempt is not None:
            attempt, self._attempt = self._attempt, None
            self._cancellations.append(start_thread(attempt.cancel, name="unitrain standby", daemon=False))
