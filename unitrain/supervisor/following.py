"""Follow a submitted job: print its log and the changes of its state, until it ends."""

from __future__ import annotations

import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import click

from unitrain.launchers import LaunchError

_LOG_SECONDS = 1.0
_FIRST_STATE_SECONDS, _MAX_STATE_SECONDS = 2.0, 10.0
# The log may reach this host later than the state, through a network file system.
_LAST_LOG_SECONDS = 3.0
# A program that the job has left behind may never stop writing to the log.
_MAX_LAST_LOG_SECONDS = 300.0
_COMMAND_TIMEOUT_SECONDS = 30
_UNREACHABLE_LIMIT_SECONDS = 3600.0


class UnreachableError(Exception):
    """The scheduler does not respond. The text is its message."""


class JobGoneError(Exception):
    """The scheduler has no record of the job, so the exit code of the job is unknown."""


@dataclass(frozen=True)
class JobStatus:
    """The state of a job as text for the user, and the exit code once the job has ended."""

    text: str
    exit_code: int | None = None


class FollowedJob(ABC):
    """A job of a scheduler.

    Attributes:
        name: The scheduler's name of the job, for messages.
        follow_command: The command that follows the job.
        cancel_command: The command that cancels the job.
    """

    name: str
    follow_command: str
    cancel_command: str

    @abstractmethod
    def read_status(self) -> JobStatus:
        """Return the state of the job. Raises UnreachableError and JobGoneError."""

    @abstractmethod
    def copy_log(self) -> bool:
        """Write new output of the job to standard output, and return whether there was any. Does not block."""

    def close(self) -> None:  # noqa: B027, because not every scheduler needs a process
        """Terminate the processes that read the log."""


def follow(job: FollowedJob) -> int:
    """Print the state and the log of a job until it ends, and return its exit code.

    Returns 130 after Ctrl-C, which does not affect the job, and 1 if the exit code of the job is unknown: the job has
    disappeared, or its scheduler did not respond for an hour.
    """
    try:
        return _follow(job)
    except KeyboardInterrupt:
        _print(f"{job.name} continues. Follow it with: {job.follow_command}")
        _print(f"Cancel it with: {job.cancel_command}")
        return 130
    finally:
        job.close()


def _follow(job: FollowedJob) -> int:
    shown_state, interval_seconds = "", _FIRST_STATE_SECONDS
    next_state_at = 0.0
    unreachable_since: float | None = None
    final_status: JobStatus | None = None
    while True:
        now = time.monotonic()
        if now >= next_state_at:
            try:
                status = job.read_status()
            except UnreachableError as error:
                if unreachable_since is None:
                    unreachable_since = now
                    _print(f"the scheduler does not respond, retrying: {error}")
                elif now - unreachable_since > _UNREACHABLE_LIMIT_SECONDS:
                    _print(f"{job.name} is no longer followed. Follow it again with: {job.follow_command}")
                    return 1
            except JobGoneError as error:
                _copy_rest_of_log(job)
                _print(str(error))
                return 1
            else:
                if unreachable_since is not None:
                    unreachable_since = None
                    _print("the scheduler responds again")
                # A job that is requeued can be in a final state for a moment, so a failure must be seen twice.
                if status.exit_code is not None and (status.exit_code == 0 or status == final_status):
                    _copy_rest_of_log(job)
                    _print(f"{job.name} {status.text}")
                    return status.exit_code
                final_status = status if status.exit_code is not None else None
                if final_status is None and status.text != shown_state:
                    if shown_state:
                        job.copy_log()  # the output before the change
                    shown_state, interval_seconds = status.text, _FIRST_STATE_SECONDS
                    _print(f"{job.name} {shown_state}")
            next_state_at = time.monotonic() + (_FIRST_STATE_SECONDS if final_status is not None else interval_seconds)
            interval_seconds = min(interval_seconds * 1.5, _MAX_STATE_SECONDS)
        job.copy_log()
        time.sleep(_LOG_SECONDS)


def _copy_rest_of_log(job: FollowedJob) -> None:
    """Copy the log until it has not grown for a few seconds, but for at most five minutes."""
    start = quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < _LAST_LOG_SECONDS:
        if time.monotonic() - start > _MAX_LAST_LOG_SECONDS:
            _print(f"{job.name} has ended, but its log still grows; the rest is not shown")
            return
        if job.copy_log():
            quiet_since = time.monotonic()
        time.sleep(_LOG_SECONDS / 4)


def _print(text: str) -> None:
    sys.stdout.flush()
    click.echo(f"unitrain: {text}", err=True)


def run_client(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command of the scheduler. Raises LaunchError if it cannot be started, UnreachableError if it times out."""
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_COMMAND_TIMEOUT_SECONDS, check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise LaunchError(f"{command[0]} is not on PATH. Run the command on a host that has it") from error
    except OSError as error:
        raise LaunchError(f"{command[0]} cannot be started: {error}. Check it with: type -a {command[0]}") from error
    except subprocess.TimeoutExpired as error:
        raise UnreachableError(f"{command[0]} did not respond within {_COMMAND_TIMEOUT_SECONDS} s") from error
