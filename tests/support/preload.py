"""A preloaded interpreter: Python processes of launch tests are forked from a process that has imported torch.

`import torch` takes 2 s of CPU time in each rank. Processes with `Preload.folder` on PYTHONPATH run `preload_stub.py`
as their `sitecustomize`. The stub sends its arguments, environment, working directory and file descriptors over a Unix
socket to a server. The server forks a process with the same arguments, environment, working directory and descriptors.
The stub remains the child of the launcher. It forwards signals and exits with the exit code of the forked process. If
the stub is killed, the forked process is also killed. The forked process joins the namespaces of the stub. In /proc, it
has the command line and environment of the stub. The forked process differs from a normally started process in process
ID, session, hash seed and `sys.flags`, and does not destroy its objects at exit. Tests of these properties, of signals
to process groups and of imports start their processes normally. A process also starts normally if it reads from a
terminal, has interpreter options other than -u, -P and -B, or differs from the server in a variable that Python or a
library reads at startup. With UNITRAIN_TEST_PRELOAD=0, all processes start normally.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import importlib.machinery
import io
import marshal
import os
import random
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_IMPORTS = (
    "numpy", "torch", "torch._dynamo", "torch.distributed.run", "sklearn.datasets", "pytest", "unitrain",
    "unitrain.trainer", "unitrain.testing.worker", "unitrain.backends.ddp", "unitrain.backends.horovod.backend",
)  # fmt: skip
_MODULES = (
    "torch.distributed.run",
    "unitrain.bootstrap.torchrun",
    "unitrain.backends.horovod.horovodrun",
    "unitrain.testing.worker",
    "tests.torch_suites.coordinator",
    "package.train",  # a user's module that `unitrain launch -m` runs
)
_COMMANDS = (("unitrain", "bench"), ("unitrain", "train"), ("unitrain", "tune"), ("unitrain", "verify"))
_PROGRAMS = ("torchrun", "horovodrun")
_SPAWN = "from multiprocessing.spawn import"
# Scripts that prepare another program and then replace themselves with it (exec).
_PLAIN_SCRIPTS = ("logged.py", "host_agent.py")
# Prefixes of variables that Python reads at startup, or a library during its import. If such a variable has another
# value than in the server, the process starts normally.
_PLAIN_VARIABLES = (
    "PYTHON", "TORCH_LOGS", "TORCH_TRACE", "TORCH_COMPILE", "TORCHDYNAMO", "TORCHINDUCTOR", "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_CPP_LOG_LEVEL", "LD_PRELOAD", "MKL_", "KMP_", "OPENBLAS_",
)  # fmt: skip
# Variables with these prefixes that may differ: a forked process applies their values, or they do not affect it.
_SUPPORTED_VARIABLES = (
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONFAULTHANDLER",
    "PYTHONPYCACHEPREFIX",
    "TORCHINDUCTOR_CACHE_DIR",  # torch._dynamo sets this variable
    "KMP_DUPLICATE_LIB_OK",  # scikit-learn sets this variable
    "KMP_INIT_AT_FORK",
)
_NAMESPACES = {"user": 0x10000000, "ipc": 0x08000000, "uts": 0x04000000, "net": 0x40000000, "mnt": 0x00020000,
               "pid": 0x20000000}  # fmt: skip
_START_SECONDS = 600.0
# Sizes of the memory areas from which /proc reads the command line and the environment of a forked process.
_ARGUMENT_BYTES, _ENVIRONMENT_BYTES = 16_384, 65_536
_FREE_DESCRIPTOR = 1_000


class Preload:
    """The server process, and the folder with the stub and the server's socket."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="unitrain-preload-"))
        shutil.copy(Path(__file__).with_name("preload_stub.py"), self.folder / "sitecustomize.py")
        variables = {"OPENBLAS_NUM_THREADS": "1", **os.environ, "UNITRAIN_TEST_ROOM": " " * _ENVIRONMENT_BYTES}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self.folder), " " * _ARGUMENT_BYTES],
            env=variables,
            stdin=subprocess.PIPE,  # the server exits when this pipe is closed
            start_new_session=True,
        )
        atexit.register(self.close)
        deadline = time.monotonic() + _START_SECONDS
        while not (self.folder / "server").exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the preloaded interpreter did not start: exit code {self._process.poll()}")
            time.sleep(0.02)

    def close(self) -> None:
        """Terminate the server and the processes that it has forked."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class _Forked:
    """A forked process, and the connection of its stub."""

    def __init__(self, connection: socket.socket, pid: int, waited: int) -> None:
        self.connection, self.pid, self.waited = connection, pid, waited
        self.descriptor = os.pidfd_open(waited)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def finish(self) -> None:
        """Report the exit of the process to its stub."""
        _, status = os.waitpid(self.waited, 0)
        os.close(self.descriptor)
        with self.connection, contextlib.suppress(OSError):
            self.connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))


def _serve(folder: Path) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each stub until standard input is closed. Return the request and its descriptors in each
    forked process."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen(128)
    import unitrain
    from unitrain.horovod_wheel.check import _PROBE

    shared = {
        "prefix": sys.prefix, "modules": _MODULES, "programs": _PROGRAMS, "commands": _COMMANDS,
        "codes": (_SPAWN, _PROBE), "plain_scripts": _PLAIN_SCRIPTS,
        "plain_variables": _PLAIN_VARIABLES, "supported_variables": _SUPPORTED_VARIABLES,
        "variables": {name: text for name, text in os.environ.items() if name.startswith(_PLAIN_VARIABLES)},
        "packages": ("unitrain", "torch", "horovod", "numpy", "launchers"),
        "path": [*sys.path[1:], str(Path(unitrain.__file__).parents[1]), str(folder)],
        "namespaces": {name: str(Path(f"/proc/self/ns/{name}").readlink()) for name in _NAMESPACES},
    }  # fmt: skip
    (folder / "server.part").write_bytes(marshal.dumps(shared))
    (folder / "server.part").rename(folder / "server")
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == 0:
                    for other in [*selector.get_map().values()]:
                        if isinstance(other.data, _Forked):
                            other.data.signal(signal.SIGKILL)
                    os._exit(0)
                elif key.fileobj is listener:
                    connection, _ = listener.accept()
                    request, descriptors = _receive(connection)
                    if request is None:
                        connection.close()
                        continue
                    pid, waited = _fork(request, descriptors)
                    if pid == 0:
                        return request, descriptors
                    for descriptor in descriptors:
                        os.close(descriptor)
                    forked = _Forked(connection, pid, waited)
                    selector.register(connection, selectors.EVENT_READ, forked)
                    selector.register(forked.descriptor, selectors.EVENT_READ, forked)
                elif key.fd == key.data.descriptor:
                    selector.unregister(key.data.descriptor)
                    with contextlib.suppress(KeyError, ValueError):
                        selector.unregister(key.data.connection)
                    key.data.finish()
                elif key.data.connection.fileno() != -1:
                    try:
                        numbers = key.data.connection.recv(64)
                    except OSError:
                        numbers = b""
                    for number in numbers or [signal.SIGKILL]:  # a process must not outlive its stub
                        key.data.signal(number)
                    if not numbers:
                        selector.unregister(key.data.connection)


def _receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    header, descriptors, _, _ = socket.recv_fds(connection, 4, 128)
    content, length = b"", int.from_bytes(header, "big")
    while len(content) < length:
        received = connection.recv(length - len(content))
        if not received:
            break
        content += received
    if not content or len(content) < length:
        for descriptor in descriptors:
            os.close(descriptor)
        return None, []
    return marshal.loads(content), list(descriptors)


def _fork(request: dict[str, Any], descriptors: list[int]) -> tuple[int, int]:
    """Return the process IDs of the new process and of the child to wait for. Return (0, 0) in the new process.

    If the simulated host of the stub has been killed, its PID namespace has ended, and there is no new process. Both
    IDs are then the ID of the child, which exits with code 1.
    """
    if not request["namespaces"]:
        pid = os.fork()
        return pid, pid
    # A process cannot change its own PID namespace, so one process joins the namespaces and its child is the new
    # process.
    reading, writing = os.pipe()
    between = os.fork()
    if between:
        os.close(writing)
        # If the new process could not be forked, nothing is received. Process ID 0 must not be used, because a signal
        # to it would reach this server.
        pid = int.from_bytes(os.read(reading, 4), "big") or between
        os.close(reading)
        return pid, between
    libc = ctypes.CDLL(None, use_errno=True)
    for name, descriptor in zip(request["namespaces"], descriptors[len(request["descriptors"]) :], strict=True):
        if libc.setns(descriptor, _NAMESPACES[name]):
            os.write(2, f"setns {name}: {os.strerror(ctypes.get_errno())}\n".encode())
            os._exit(1)
    try:
        pid = os.fork()
    except OSError as error:  # the PID namespace has ended: its simulated host was killed
        os.write(2, f"fork: {error.strerror}\n".encode())
        os._exit(1)
    if pid == 0:
        os.close(reading)
        os.close(writing)
        return 0, 0
    os.write(writing, pid.to_bytes(4, "big"))
    os.closerange(0, _FREE_DESCRIPTOR)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def _set_up_process(request: dict[str, Any], descriptors: list[int]) -> tuple[Any, dict[str, Any]] | None:
    """Set up this process for the request. Return the code and the namespace of a script, or None for a module."""
    is_spawned = request["arguments"][0] == "-c" and request["arguments"][1].startswith(_SPAWN)
    if not is_spawned:  # horovodrun's processes call setsid themselves
        os.setsid()
    moved = [_duplicate(descriptor) for descriptor in descriptors[: len(request["descriptors"])]]
    os.closerange(0, _FREE_DESCRIPTOR)
    for target, descriptor in zip(request["descriptors"], moved, strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(request["folder"])
    os.umask(request["umask"])
    for number in request["ignored_signals"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["signal_mask"])
    environment: dict[str, str] = request["environment"]
    os.environ.clear()
    os.environ.update(environment)
    _show_in_proc(request["command_line"], environment)
    _replace_getppid(request["stub"])
    if environment.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    sys.dont_write_bytecode = "-B" in request["options"] or bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    sys.pycache_prefix = environment.get("PYTHONPYCACHEPREFIX") or None
    _open_streams(request["streams"])
    random.seed()
    sys.modules["numpy"].random.seed()
    if threads := environment.get("OMP_NUM_THREADS", ""):
        sys.modules["torch"].set_num_threads(int(threads))
    sys.orig_argv[:] = request["command_line"]
    arguments: list[str] = request["arguments"]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    sys.path[:] = request["path"]
    importlib.invalidate_caches()
    for name in _MODULES:
        sys.modules.pop(name, None)  # runpy warns if the module to run is already imported
    if arguments[0] == "-m":
        sys.argv[:] = ["-m", *arguments[2:]]
        if "-P" not in request["options"]:
            sys.path.insert(0, str(Path.cwd()))
        return None
    if arguments[0] == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        if "-P" not in request["options"]:
            sys.path.insert(0, "")
        main.__dict__.update(__spec__=None, __package__=None, __loader__=importlib.machinery.BuiltinImporter)
        return compile(arguments[1], "<string>", "exec", dont_inherit=True), main.__dict__
    sys.argv[:] = arguments
    path = os.path.abspath(arguments[0])  # noqa: PTH100
    if "-P" not in request["options"]:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))  # noqa: PTH120
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __cached__=None, __loader__=loader)
    main.__dict__.pop("__package__", None)
    main.__package__ = None
    try:
        source = Path(arguments[0]).read_bytes()
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None
    return compile(source, path, "exec", dont_inherit=True), main.__dict__


def _duplicate(descriptor: int) -> int:
    import fcntl

    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FREE_DESCRIPTOR)


def _show_in_proc(command_line: list[str], environment: dict[str, str]) -> None:
    """Write the command line and the environment to the memory that /proc reads. The server was started with enough
    memory for both. `os.environ.clear` has removed all pointers to this memory.
    """
    numbers = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments_start, arguments_end, environment_start, environment_end = map(int, numbers[45:49])
    for start, end, texts in (
        (arguments_start, arguments_end, command_line),
        (environment_start, environment_end, [f"{name}={value}" for name, value in environment.items()]),
    ):
        content = b"".join(os.fsencode(text) + b"\0" for text in texts)[: end - start - 1]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, content, len(content))


def _replace_getppid(stub: int) -> None:
    """Make `os.getppid` return the parent of the stub, which is the launcher."""
    this, real = os.getpid(), os.getppid

    def getppid() -> int:
        if os.getpid() != this:
            return real()
        try:
            return int(Path(f"/proc/{stub}/stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):  # the stub exited before or after the file was opened
            return 1

    os.getppid = getppid


def _open_streams(streams: list[tuple[str, str, str, bool, bool]]) -> None:
    """Open new standard streams, like those of a new process."""
    for descriptor, (name, encoding, errors, is_line_buffered, is_unbuffered) in enumerate(streams):
        raw: Any = io.FileIO(descriptor, "w" if descriptor else "r", closefd=False)
        raw.name = name
        if descriptor == 0:
            raw = io.BufferedReader(raw)
        elif not is_unbuffered:
            raw = io.BufferedWriter(raw)
        stream = io.TextIOWrapper(
            raw, encoding=encoding, errors=errors, line_buffering=is_line_buffered, write_through=is_unbuffered
        )
        attribute = name.strip("<>")
        setattr(sys, attribute, stream)
        setattr(sys, f"__{attribute}__", stream)


def _run(program: tuple[Any, dict[str, Any]] | None, module: str) -> int:
    """Run the program, and return the exit code that the interpreter would return."""
    try:
        if program is None:
            runpy._run_module_as_main(module)  # type: ignore[attr-defined]
        else:
            exec(*program)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # remove the frame of this function
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _exit(code: int) -> None:
    """Exit like the interpreter, but without destroying objects. Destroying them would copy the memory shared with the
    server, which takes a second.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


@functools.cache
def _get_preload() -> Preload:
    return Preload()


def preloaded(variables: Mapping[str, str]) -> dict[str, str]:
    """Return `variables` with PYTHONPATH changed, so that Python processes are forked from this test process's server.

    The first call starts the server.
    """
    if os.environ.get("UNITRAIN_TEST_PRELOAD") == "0":
        return dict(variables)
    path = os.pathsep.join([str(_get_preload().folder), *filter(None, [variables.get("PYTHONPATH")])])
    return {**variables, "PYTHONPATH": path}


if __name__ == "__main__":
    for _name in _IMPORTS:
        importlib.import_module(_name)
    del sys.path[0]
    gc.freeze()
    _request, _descriptors = _serve(Path(sys.argv[1]))
    _program = _set_up_process(_request, _descriptors)
    _exit(_run(_program, _request["arguments"][1] if _program is None else ""))
