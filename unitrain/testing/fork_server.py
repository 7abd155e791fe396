"""Ranks that start in a tenth of a second: a process has imported what they need, and forks them.

Its children are like processes that were started anew, but for what imports have left behind and the seed of Python's
hashes, which they share. It has one thread and no backend, so that there is nothing that a fork could break.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unitrain.bootstrap import environment

# Imported beforehand, as far as it is there.
_IMPORTS = (
    "numpy", "torch", "torch._dynamo", "unitrain.trainer", "unitrain.testing.worker", "unitrain.backends.ddp",
    "unitrain.backends.horovod.backend",
)  # fmt: skip
_POLL_SECONDS = 0.02


class Child:
    """A process that a nursery has forked, with what is asked of a `subprocess.Popen`."""

    def __init__(self, fork_server: ForkServer, pid: int) -> None:
        self._nursery, self.pid = fork_server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None as long as it lives."""
        if self.returncode is None:
            self.returncode = self._nursery.ask({"poll": self.pid})["code"]
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code when there is one. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return code


class ForkServer:
    """The process that forks; it ends with the one that made it. Safe to use from several threads."""

    def __init__(self) -> None:
        self._own, theirs = socket.socketpair()
        self._asking = threading.Lock()
        self.owner = os.getpid()
        with theirs:
            # One thread for OpenMP and BLAS: those of others would not be there after a fork.
            variables = environment.without_launcher_variables() | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main()", str(theirs.fileno())],
                env=variables,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

        atexit.register(self.close)

    def close(self) -> None:
        """Let it end."""
        if self.owner == os.getpid():
            self._own.close()
            self._process.wait()

    @property
    def lives(self) -> bool:
        """Whether it can still fork, for this process."""
        return self.owner == os.getpid() and self._process.poll() is None

    def fork(self, arguments: Sequence[str], variables: Mapping[str, str]) -> Child:
        """Return a new process of `unitrain.testing.worker` with these arguments and this environment, which leads a
        session of its own and prints where this process does."""
        sys.stdout.flush()
        request = {
            "arguments": list(arguments),
            "variables": dict(variables),
            "folder": str(Path.cwd()),
            "path": sys.path,
        }
        return Child(self, self.ask(request, [1, 2])["pid"])

    def ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        """Return the answer to `request`. Raises OSError when the nursery is gone."""
        with self._asking:
            _send(self._own, request, descriptors)
            answer, _ = _receive(self._own)
        if answer is None:
            raise OSError("the process that forks ranks is gone")
        return answer


def _send(connection: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    content = json.dumps(message).encode()
    header = struct.pack("!I", len(content))
    if descriptors:
        socket.send_fds(connection, [header], descriptors)
    else:
        connection.sendall(header)
    connection.sendall(content)


def _receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    header, descriptors, _, _ = socket.recv_fds(connection, 4, 2)
    if len(header) < 4:
        return None, []
    (length,) = struct.unpack("!I", header)
    content = b""
    while len(content) < length:
        content += connection.recv(length - len(content))
    message: dict[str, Any] = json.loads(content)
    return message, descriptors


def main() -> None:
    """Import, then fork a rank for each request until the other side is gone."""
    for name in _IMPORTS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # what was imported is looked at by no collection of a child, which would copy it and take time
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        born = _serve(connection)
    if born is not None:
        _live(*born)


def _serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return None when the other side is gone; in a child, at once, with the request and the descriptors for it."""
    codes: dict[int, int | None] = {}
    while True:
        request, descriptors = _receive(connection)
        if request is None:
            return None
        if "poll" in request:
            pid = request["poll"]
            if codes[pid] is None:
                done, status = os.waitpid(pid, os.WNOHANG)
                codes[pid] = os.waitstatus_to_exitcode(status) if done else None
            _send(connection, {"code": codes[pid]})
            continue
        pid = os.fork()
        if pid == 0:
            return request, descriptors
        codes[pid] = None
        for descriptor in descriptors:
            os.close(descriptor)
        _send(connection, {"pid": pid})


def _live(request: dict[str, Any], descriptors: list[int]) -> None:
    """Become the rank that was asked for."""
    os.setsid()
    for target, descriptor in enumerate(descriptors, start=1):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(request["folder"])
    environment.replace_all(request["variables"])
    sys.path[:] = request["path"]
    sys.argv[1:] = request["arguments"]
    with contextlib.suppress(ImportError):
        import numpy as np

        np.random.seed()  # which a process of its own would have drawn
    from unitrain.testing import worker

    worker.main()
    worker.end()
