"""A rank's connection to the supervisor: the `unitrain launch` process that restarts its job.

Through this connection, the supervisor detects failures of the rank's process or host. It requests a checkpoint and an
exit when the job's hosts change, and terminates the remaining ranks of a failed attempt. A background thread receives
the supervisor's messages, so training is not delayed. Standby ranks of the next attempt connect early, and wait until
the supervisor starts them.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import asdict, dataclass, replace

from unitrain.bootstrap import environment
from unitrain.bootstrap.memory_folder import remove_abandoned_folder
from unitrain.errors import AuthenticationError
from unitrain.monitoring.peer_connection import PREEMPTED_MESSAGE, DisconnectReason, PeerConnection
from unitrain.output import print_to_stderr
from unitrain.threads import start_thread

# Messages of the supervisor: save a checkpoint and exit, or exit immediately because the attempt has failed.
SAVE_AND_EXIT, EXIT = "save and exit", "exit"
# Message of the supervisor that starts a standby rank.
START = "start"
# Message of the supervisor to standby ranks, and their response. A stopped process does not respond.
CHECK, RESPONDING = "check", "responding"
# Messages of a rank: it waits for its start, it has called `unitrain.init`, or it has shut its backend down.
READY, RUNNING, SHUT_DOWN = "ready", "running", "shut down"
CONNECTION_PURPOSE = "supervision"
# Prefixes of messages from the supervisor to rank 0, which contain JSON: one message for each earlier attempt, then one
# for this attempt.
EARLIER_ATTEMPT, ATTEMPT = "earlier attempt ", "attempt "

_CONNECT_TIMEOUT_SECONDS = 10.0
# If the supervisor's host does not respond, a rank detects this after 15 + 5 x 5 seconds.
_KEEPALIVE_IDLE_SECONDS, _KEEPALIVE_INTERVAL_SECONDS, _KEEPALIVE_PROBES = 15, 5, 5
_MAX_SIGNAL_DELAY_SECONDS = 30.0
LAST_CHECKPOINT_SECONDS = 60.0
"""Time for which a rank may save a checkpoint after the end of its launcher or of the supervisor."""
_ATTEMPT_TIMEOUT_SECONDS = 2.0


@dataclass(frozen=True)
class EarlierAttempt:
    """An earlier attempt of a supervised job.

    `started_before_seconds` and `ended_before_seconds` are the times from its start and from its end to the start of
    the current attempt. `waiting_seconds` is the time for which the supervisor waited for hosts before this earlier
    attempt.
    """

    started_before_seconds: float
    ended_before_seconds: float
    waiting_seconds: float


@dataclass(frozen=True)
class AttemptInfo:
    """An attempt of a supervised job.

    `number` counts from 1. `age_seconds` is the time since the start of the attempt, which begins before its launcher
    is started. `waiting_seconds` is the time for which the supervisor waited for hosts before the attempt. `reason`
    states why the job was restarted. `earlier_attempts` are the earlier attempts of the job, oldest first.
    """

    number: int
    age_seconds: float
    waiting_seconds: float
    reason: str | None
    earlier_attempts: tuple[EarlierAttempt, ...] = ()

    def to_messages(self) -> list[str]:
        """Return the messages to rank 0 that describe this attempt and the earlier attempts."""
        values = asdict(self)
        earlier_attempts = values.pop("earlier_attempts")
        earlier_messages = [EARLIER_ATTEMPT + json.dumps(earlier_attempt) for earlier_attempt in earlier_attempts]
        return [*earlier_messages, ATTEMPT + json.dumps(values)]


class _SupervisorClient:
    def __init__(self, connection: PeerConnection, rank: int, *, is_standby: bool) -> None:
        self.connection, self._rank, self._pid = connection, rank, os.getpid()
        self.is_started = threading.Event()
        self.attempt: AttemptInfo | None = None
        self.attempt_received_at = 0.0
        self.has_attempt = threading.Event()
        if not is_standby:
            self.is_started.set()
        connection.send(json.dumps({"rank": rank, "job": environment.job_id(), "standby": is_standby}))
        start_thread(self._run, name="unitrain supervisor client", restarts=True)

    def _run(self) -> None:
        is_exit_requested = False
        earlier_attempts: list[EarlierAttempt] = []
        while isinstance(message := self.connection.receive(), str):
            if message == START:
                self.is_started.set()
                continue
            if message == CHECK:
                self.connection.send(RESPONDING)
                continue
            if message.startswith(EARLIER_ATTEMPT):
                earlier_attempts.append(EarlierAttempt(**json.loads(message.removeprefix(EARLIER_ATTEMPT))))
                continue
            if message.startswith(ATTEMPT):
                values = json.loads(message.removeprefix(ATTEMPT))
                self.attempt = AttemptInfo(**values, earlier_attempts=tuple(earlier_attempts))
                self.attempt_received_at = time.monotonic()
                self.has_attempt.set()
                continue
            if message == EXIT:
                break
            is_exit_requested = True
            self._wait_for_signal_handler()
            os.kill(self._pid, signal.SIGTERM)
        if message == EXIT:
            os._exit(1 if self.is_started.is_set() else 0)  # a standby rank that is not needed has not failed
        if not self.is_started.is_set():
            remove_abandoned_folder()
            os._exit(0)
        # The launcher and its ranks must terminate with the supervisor. Leave this rank time for a last checkpoint.
        is_lost = message is DisconnectReason.UNREACHABLE
        cause = "the host of unitrain launch does not respond" if is_lost else "unitrain launch has ended"
        print_to_stderr([f"unitrain: stopping rank {self._rank} because {cause}"])
        if not is_exit_requested:
            os.kill(self._pid, signal.SIGTERM)
        remove_abandoned_folder()
        time.sleep(LAST_CHECKPOINT_SECONDS)
        os._exit(1)

    def _wait_for_signal_handler(self) -> None:
        """Wait until the program handles SIGTERM, but for at most 30 seconds. Before that, the signal would terminate
        the program without a checkpoint.
        """
        deadline = time.monotonic() + _MAX_SIGNAL_DELAY_SECONDS
        while signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and time.monotonic() < deadline:
            time.sleep(0.1)


_client: _SupervisorClient | None = None


def connect(rank: int, *, is_standby: bool = False) -> None:
    """Connect this rank to the supervisor of its job, if there is one. Only the first call in a process connects.

    With `is_standby`, the rank counts as running only after the second call, which `unitrain.init` makes.
    """
    global _client
    address = environment.get_variable(environment.SUPERVISOR_VARIABLE)
    if _client is not None:
        _client.connection.send(RUNNING)
    if address is None or _client is not None:
        return
    host, _, port = address.rpartition(":")
    try:
        connection = PeerConnection.connect(host, int(port), CONNECTION_PURPOSE, _CONNECT_TIMEOUT_SECONDS)
        connection.set_timeout(None)
        connection.enable_keepalive(_KEEPALIVE_IDLE_SECONDS, _KEEPALIVE_INTERVAL_SECONDS, _KEEPALIVE_PROBES)
        _client = _SupervisorClient(connection, rank, is_standby=is_standby)
    except (OSError, OverflowError, ValueError, AuthenticationError) as error:
        # The connection is optional: without it, the supervisor restarts the job based on the exit code of the
        # launcher.
        print_to_stderr([f"unitrain: rank {rank} cannot reach unitrain launch at {address}: {error}"])


def wait_for_start() -> bool:
    """Report that this standby rank is ready, and wait until the supervisor starts it.

    Returns False if the rank is not connected. If the supervisor exits or does not need the rank, the process exits.
    """
    if _client is None:
        return False
    _client.connection.send(READY)
    return _client.is_started.wait()


def wait_for_attempt_info() -> AttemptInfo | None:
    """Return the attempt to which this process belongs, or None if no supervisor describes it within two seconds. Only
    rank 0 calls it."""
    if _client is None or not _client.has_attempt.wait(_ATTEMPT_TIMEOUT_SECONDS) or _client.attempt is None:
        return None
    seconds_since_receipt = time.monotonic() - _client.attempt_received_at
    return replace(_client.attempt, age_seconds=_client.attempt.age_seconds + seconds_since_receipt)


def report_shutdown() -> None:
    """Report that this rank has shut its backend down. Afterwards, the exit of its process does not affect other
    ranks."""
    if _client is not None:
        _client.connection.send(SHUT_DOWN)


def report_preempted() -> None:
    """Make this process report at its exit that it ended after the requested checkpoint."""
    if _client is not None:
        _client.connection.final_message = PREEMPTED_MESSAGE
