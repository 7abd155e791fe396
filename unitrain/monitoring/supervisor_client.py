"""A rank's side of its connection to the `unitrain launch` that starts its job again.

Over it the launch learns that the rank's process, or its host, has gone, and asks the job to save and end when its
hosts change; and a rank learns that its attempt at the job is over. A thread waits for that; the training does not.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress

from unitrain.bootstrap import environment
from unitrain.bootstrap.authentication import prove
from unitrain.errors import AuthenticationError

# What the launch says to a rank: end as after a preemption signal; or end at once, because the others have.
END, OVER = "end", "over"
# What a rank says to the launch, as the last it says.
BYE, PREEMPTED = "bye", "preempted"

# For which both ends show that they have the job's key.
ROLE = "supervision"

_CONNECT_SECONDS = 10.0
_BEGIN_SECONDS = 30.0
_LAST_CHECKPOINT_SECONDS = 60.0


class _Line:
    def __init__(self, connection: socket.socket, rank: int) -> None:
        self._connection, self._rank, self._process = connection, rank, os.getpid()
        self._last_word = BYE
        connection.sendall((json.dumps({"rank": rank, "job": environment.job()}) + "\n").encode())
        atexit.register(self._take_leave)
        threading.Thread(target=self._listen, name="unitrain supervised", daemon=True).start()

    def say_last(self, word: str) -> None:
        self._last_word = word

    def _take_leave(self) -> None:
        if os.getpid() == self._process:
            with suppress(OSError):
                self._connection.sendall(f"{self._last_word}\n".encode())

    def _listen(self) -> None:
        asked = False
        with suppress(OSError), self._connection.makefile(encoding="utf-8") as lines:
            for line in lines:
                if line.strip() == OVER:
                    os._exit(1)
                asked = True
                self._await_trainer()
                os.kill(self._process, signal.SIGTERM)
        # The launch is gone, and with it or soon all that it started: this is the time for a last checkpoint.
        sys.stderr.write(f"unitrain: rank {self._rank} ends, because unitrain launch is gone\n")
        if not asked:
            os.kill(self._process, signal.SIGTERM)
        time.sleep(_LAST_CHECKPOINT_SECONDS)
        os._exit(1)

    def _await_trainer(self) -> None:
        """Give the program a while to come to where the signal is handled: before, it would end without a word."""
        deadline = time.monotonic() + _BEGIN_SECONDS
        while signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and time.monotonic() < deadline:
            time.sleep(0.1)


_line: _Line | None = None


def follow(rank: int) -> None:
    """Connect this rank to the `unitrain launch` that starts its job again, where there is one; once in a process."""
    global _line
    address = environment.setting(environment.SUPERVISOR)
    if address is None or _line is not None:
        return
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS)
        prove(connection, environment.setting(environment.JOB_KEY), ROLE, accepts=False)
        connection.settimeout(None)
        _line = _Line(connection, rank)
    except (OSError, OverflowError, ValueError, AuthenticationError) as error:
        # The job can do without: what the launcher sees of it is enough to start it again.
        sys.stderr.write(f"unitrain: rank {rank} cannot reach unitrain launch at {address}: {error}\n")


def tell_preempted() -> None:
    """Let the launch know, when this process ends, that it does so after a checkpoint, as it was asked to."""
    if _line is not None:
        _line.say_last(PREEMPTED)
