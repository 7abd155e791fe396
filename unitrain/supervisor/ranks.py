"""The connections of a job's ranks to the command that started it: who has gone, how, and telling them to end."""

from __future__ import annotations

import errno
import json
import socket
import threading
from contextlib import suppress

from unitrain.bootstrap.authentication import prove
from unitrain.errors import AuthenticationError
from unitrain.monitoring.supervisor_client import BYE, END, OVER, PREEMPTED, ROLE

# A host that has vanished is noticed after 5 + 3 x 5 seconds.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
# What is read of somebody who says no more than that it has come.
_HELLO_SECONDS = 10.0
# How much later than the launcher's end that of its ranks may be noticed.
_NOTICE_SECONDS = 1.0


class Ranks:
    """The ranks of one attempt at the job named `job`, as they connect to `address` and leave.

    `lost` are those that have left without a word, in the order in which they went; their process was killed.
    `vanished` are those whose host no longer answers. `preempted` is whether they have ended as a preemption signal
    asks for. `key` is the job's, which ranks show that they have. A context manager: on leaving it nobody is waited
    for.
    """

    def __init__(self, job: str, key: str | None, listen_on: str, known_as: str) -> None:
        self._job, self._key = job, key
        self._listener = socket.create_server((listen_on, 0), backlog=1024)
        self.address = f"{known_as}:{self._listener.getsockname()[1]}"
        self.lost: list[int] = []
        self.vanished: list[int] = []
        self.preempted = self.asked = False
        self._orderly = self._over = False
        self._present: dict[int, socket.socket] = {}
        self._change = threading.Condition()
        threading.Thread(target=self._accept, name="unitrain ranks", daemon=True).start()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._change:
            for connection in self._present.values():
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    @property
    def first_lost(self) -> int | None:
        """The rank that was killed before any other had left in any way, None where there is none."""
        return self.lost[0] if self.lost and not self._orderly else None

    def ask_to_end(self) -> None:
        """Ask rank 0 to end the job after a checkpoint, now or as soon as it has come; the others follow it."""
        with self._change:
            self.asked = True
            if 0 in self._present:
                _say(self._present[0], END)

    def dismiss(self, seconds: float) -> None:
        """Tell all ranks that are left to end at once; those that after `seconds` have not are taken for vanished."""
        with self._change:
            self._over = True  # for those who come only now, too
            self._change.wait_for(self._none_present, _NOTICE_SECONDS)
            for connection in self._present.values():
                _say(connection, OVER)
            self._change.wait_for(self._none_present, seconds)
            self.vanished += sorted(self._present)

    def _none_present(self) -> bool:
        return not self._present

    def _accept(self) -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._attend, args=(connection,), daemon=True).start()

    def _attend(self, connection: socket.socket) -> None:
        with connection:
            rank = self._greet(connection)
            if rank is None:
                return
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
            with self._change:
                self._present[rank] = connection
                if self._over:
                    _say(connection, OVER)
                elif self.asked and rank == 0:
                    _say(connection, END)
            last_word, vanished = "", False
            try:
                while received := connection.recv(64):
                    last_word += received.decode(errors="replace")
            except OSError as error:
                vanished = error.errno not in (errno.ECONNRESET, errno.EPIPE, errno.EBADF)
            with self._change:
                if self._present.get(rank) is connection:
                    self._leave(rank, last_word.strip(), vanished)

    def _greet(self, connection: socket.socket) -> int | None:
        """Return the rank that a newcomer says it has, None for one that is not of this job."""
        text = b""
        try:
            connection.settimeout(_HELLO_SECONDS)
            prove(connection, self._key, ROLE, accepts=True)
            while not text.endswith(b"\n"):
                if len(text) > 1000 or not (more := connection.recv(1)):
                    return None
                text += more
            connection.settimeout(None)
            told = json.loads(text)
            return int(told["rank"]) if told["job"] == self._job else None
        except (OSError, ValueError, TypeError, KeyError, AuthenticationError):
            return None

    def _leave(self, rank: int, last_word: str, vanished: bool) -> None:
        del self._present[rank]
        if vanished:
            self.vanished.append(rank)
        elif last_word in (BYE, PREEMPTED):
            self.preempted |= last_word == PREEMPTED
            self._orderly |= not self.lost
        else:
            self.lost.append(rank)
        self._change.notify_all()


def _say(connection: socket.socket, word: str) -> None:
    with suppress(OSError):
        connection.sendall(f"{word}\n".encode())
