"""Fork server for ranks: one process imports torch and then forks ranks, which start in 0.1 s.

The ranks behave like new processes, except that they share the effects of the imports and Python's hash seed. The fork
server has one thread and no backend, so a fork is safe.

The fork server of multiprocessing does not suffice: its children keep the environment variables and the standard output
with which the server was started, and import the `__main__` module of the parent. Ranks need the variables of their
launcher, and the output of the test that starts them.
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

# The fork server imports these modules before the first fork. A module that is not installed is skipped.
_IMPORTS = (
    "numpy", "torch", "torch._dynamo", "unitrain.trainer", "unitrain.testing.worker", "unitrain.backends.ddp",
    "unitrain.backends.horovod.backend",
)  # fmt: skip
_POLL_SECONDS = 0.02


class Child:
    """A forked process, with the methods of `subprocess.Popen` that `RankGroup` uses."""

    def __init__(self, fork_server: ForkServer, pid: int) -> None:
        self._fork_server, self.pid = fork_server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the process runs."""
        if self.returncode is None:
            self.returncode = self._fork_server.send_request({"poll": self.pid})["code"]
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process and return its exit code. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return code


class ForkServer:
    """Handle of the fork server process, which exits when this process does. Its methods are thread-safe."""

    def __init__(self) -> None:
        self._connection, child_end = socket.socketpair()
        self._lock = threading.Lock()
        self.owner_pid = os.getpid()
        imports = (*_IMPORTS, "pytest") if "pytest" in sys.modules else _IMPORTS  # test modules import it
        with child_end:
            # OpenMP and BLAS use one thread, because additional threads would not exist after a fork.
            variables = environment.without_launcher_variables() | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main()", str(child_end.fileno()), *imports],
                env=variables,
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

        atexit.register(self.close)

    def close(self) -> None:
        """Stop the fork server and wait until it exits."""
        if self.owner_pid == os.getpid():
            self._connection.close()
            self._process.wait()

    @property
    def is_running(self) -> bool:
        """Whether the fork server runs and belongs to this process."""
        return self.owner_pid == os.getpid() and self._process.poll() is None

    def fork(self, arguments: Sequence[str], variables: Mapping[str, str]) -> Child:
        """Fork a process that runs `unitrain.testing.worker` with these arguments and this environment.

        The forked process leads a new session and writes to this process's standard output and error.
        """
        sys.stdout.flush()
        request = {
            "arguments": list(arguments),
            "variables": dict(variables),
            "folder": str(Path.cwd()),
            "path": sys.path,
        }
        return Child(self, self.send_request(request, [1, 2])["pid"])

    def import_modules(self, names: Sequence[str]) -> None:
        """Import modules before the next fork, so that the ranks need not import them. A module that is not installed
        is skipped."""
        self.send_request({"import": list(names)})

    def send_request(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        """Send `request` and return the reply. Raises OSError if the fork server has exited."""
        with self._lock:
            _send(self._connection, request, descriptors)
            reply, _ = _receive(self._connection)
        if reply is None:
            raise OSError("the fork server has exited")
        return reply


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
        if not (received := connection.recv(length - len(content))):
            return None, []  # the sender has ended
        content += received
    message: dict[str, Any] = json.loads(content)
    return message, descriptors


def main() -> None:
    """Import the modules, then fork a rank for each request until the connection closes.

    The arguments are the file descriptor of the connection and the names of the modules.
    """
    _import_modules(sys.argv[2:])
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        child_request = _serve(connection)
    if child_request is not None:
        _run_rank(*child_request)


def _import_modules(names: Sequence[str]) -> None:
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # otherwise a garbage collection in a child would copy the pages of all imported modules


def _serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Answer requests to import modules, to poll a child, or to fork a child. Return None when the connection closes.

    In a forked child, return its request, and the descriptors of its standard output and error.
    """
    codes: dict[int, int | None] = {}
    while True:
        request, descriptors = _receive(connection)
        if request is None:
            return None
        if "import" in request:
            _import_modules(request["import"])
            _send(connection, {})
            continue
        if "poll" in request:
            pid = request["poll"]
            if codes[pid] is None:
                exited_pid, status = os.waitpid(pid, os.WNOHANG)
                codes[pid] = os.waitstatus_to_exitcode(status) if exited_pid else None
            _send(connection, {"code": codes[pid]})
            continue
        pid = os.fork()
        if pid == 0:
            return request, descriptors
        codes[pid] = None
        for descriptor in descriptors:
            os.close(descriptor)
        _send(connection, {"pid": pid})


def _run_rank(request: dict[str, Any], descriptors: list[int]) -> None:
    """Set up this child for its request and run the worker."""
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

        np.random.seed()  # a new process would have a random seed
    from unitrain.testing import worker

    worker.main()
    worker.exit_process()
