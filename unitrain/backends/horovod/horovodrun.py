"""Run horovodrun without environment variables on command lines: `python -m unitrain.backends.horovod.horovodrun`.

This program accepts horovodrun's options. horovodrun itself writes all environment variables into the command line of
each rank, which every user of the host can read, and its rendezvous server listens on all network interfaces. With this
program, ranks on this host inherit the environment, ranks on other hosts receive it on the standard input of their ssh
connection, and the server listens only on the address that the ranks use. Under Kubeflow's MPI operator, the
environment variables remain on the command lines. Checked with Horovod 0.28.1.

SIGUSR1 and SIGUSR2 are forwarded to the ranks on this host. If the first failed rank exits with 75 because it was
preempted, this process also exits with 75. After SIGTERM, SIGHUP or SIGINT, this process fails unless all ranks
succeed. horovodrun itself does not guarantee this, because it sometimes loses the exit codes of the ranks. This process
also exits if a process that outlives its rank holds the rank's output open.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import resource_tracker
from pathlib import Path
from shlex import quote, split
from sys import executable, exit
from typing import Any

import psutil
from horovod.runner import gloo_run, launch
from horovod.runner.common.util import env as exports
from horovod.runner.common.util import safe_shell_exec
from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer, RendezvousServer
from horovod.runner.util.remote import get_ssh_command
from horovod.runner.util.threads import in_thread

from unitrain.bootstrap import environment
from unitrain.bootstrap.signal_forwarding import (
    forward_warning_signals,
    ignore_warning_signals,
    install_no_op_warning_handlers,
    terminate_on_hangup,
)
from unitrain.errors import PREEMPTED_EXIT_CODE
from unitrain.output import guard_standard_streams, guard_stream

# Program that reads the output of `env -0` into its environment, except variables that horovodrun does not export, and
# then replaces itself with the shell that runs the rank's command.
_ENVIRONMENT_RECEIVER = (
    "import os,re,sys;"
    "entries=[entry.partition(b'=') for entry in sys.stdin.buffer.read().split(b'\\0') if entry];"
    "os.environb.update({name:value for name,_,value in entries if not re.match(sys.argv[1].encode(),name)});"
    "os.execv('/bin/sh',['/bin/sh','-c',sys.argv[2]])"
)
# Maximum time for which each of a rank's two output streams is read after the rank has exited.
_LAST_OUTPUT_SECONDS = 5.0
_READ_BYTES = 2**16
_NOT_EXPORTED = "|".join(sorted(exports.IGNORE_REGEXES))


class BoundRendezvousServer(RendezvousServer):  # type: ignore[misc]
    """Horovod's rendezvous server, listening on `address` only."""

    def __init__(self, address: str, verbose: int = 0) -> None:
        super().__init__(verbose)
        self._address = address

    def start(self, handler_cls: type[RendezvousHandler] = RendezvousHandler) -> int:
        """Start the server in a thread and return its port."""
        self._httpd = RendezvousHTTPServer((self._address, 0), handler_cls, self._verbose)
        self._listen_thread = in_thread(target=self._httpd.serve_forever)
        return int(self._httpd.server_address[1])

    def stop(self) -> None:
        """Stop the server and release its port."""
        super().stop()
        self._httpd.server_close()


def _create_command_function(run_command: str, variables: Mapping[str, str]) -> Callable[[SlotInfo], str]:
    """Add `variables` to the environment of this process, which all ranks inherit, and return a function that creates
    the command of a rank."""
    environment.export({**variables, "PYTHONUNBUFFERED": "1"})

    def command(slot: SlotInfo) -> str:
        assignments = " ".join(f"{name}={value}" for name, value in gloo_run.create_slot_env_vars(slot).items())
        # After a warning signal, which the rank also receives, the shell continues to wait for the rank.
        return f"trap : USR1 USR2; env {assignments} {run_command}"

    return command


def _remote_command(
    command: str, host: str, port: int | None = None, identity_file: str | None = None, timeout_s: int | None = None
) -> str:
    """Return the command that runs the quoted `command` on another host with this process's environment."""
    (line,) = split(command)
    here = str(Path.cwd())
    # horovodrun does not quote the folder: a shell would split "my runs" and execute "$(id)".
    command = quote(f"cd {quote(here)} > /dev/null 2>&1 ; {line.removeprefix(f'cd {here} > /dev/null 2>&1 ; ')}")
    received = quote(
        f"exec {quote(executable)} -I -S -c {quote(_ENVIRONMENT_RECEIVER)} {quote(_NOT_EXPORTED)} {command}"
    )
    over_ssh = get_ssh_command(received, host, port, identity_file, timeout_s)
    return f"env -0 | {over_ssh}"


def _launch_with_bound_server(
    command: Any, exec_command: Any, settings: Any, nics: Any, variables: Any, server_ip: str
) -> None:
    gloo_run.RendezvousServer = lambda verbose: BoundRendezvousServer(server_ip, verbose)
    # The processes that horovodrun starts share multiprocessing's resource tracker, which must ignore these signals.
    with ignore_warning_signals():
        resource_tracker.ensure_running()
    failures: list[tuple[float, int]] = []

    def run_rank(*arguments: Any) -> tuple[int, float]:
        code, time = exec_command(*arguments)
        if code:
            failures.append((time, code))
        return code, time

    try:
        _launch_gloo(command, run_rank, settings, nics, variables, server_ip)
    except RuntimeError as error:
        if not failures:
            raise
        _, first_code = min(failures)
        if first_code == PREEMPTED_EXIT_CODE:
            exit(PREEMPTED_EXIT_CODE)
        exit(f"horovodrun: {str(error).strip()}")  # without its traceback, which would hide the messages of the ranks


class _OutputThread(threading.Thread):
    """Thread that forwards an output stream of a rank.

    horovodrun calls `join` after the rank has exited. A process that the rank has started may hold the stream open, so
    that reading it would never end. Unlike horovodrun's own function, the thread continues to read if a line cannot be
    written or is not UTF-8: a rank whose output nobody reads would block.
    """

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        super().__init__(target=_forward_output, args=args, name="unitrain output", daemon=True)
        self.start()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the stream has been read completely, for at most `_LAST_OUTPUT_SECONDS` by default."""
        super().join(_LAST_OUTPUT_SECONDS if timeout is None else timeout)


class _OutputFiles:
    """The terminal and the file of --output-filename to which a stream of a rank is copied."""

    def __init__(self, files: Iterable[Any]) -> None:
        self._streams = list(map(guard_stream, files))

    def write(self, text: str) -> None:
        """Write `text` to each file that can be written."""
        for stream in self._streams:
            stream.write(text)

    def flush(self) -> None:
        """Flush all files."""
        for stream in self._streams:
            stream.flush()


def _forward_output(source: Any, destination: Any, name: str, rank: int | None, has_timestamp: bool) -> None:
    """Copy the lines of `source`, a connection, to the text stream `destination`, with the prefix of horovodrun."""
    stream = guard_stream(destination)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with source:
        remaining, is_open = "", True
        while is_open:
            content = os.read(source.fileno(), _READ_BYTES)
            is_open = bool(content)
            # A carriage return also ends a line, so that progress bars are shown immediately.
            *lines, remaining = re.split(r"(?<=[\r\n])", remaining + decoder.decode(content, final=not is_open))
            for line in lines if is_open else filter(None, [*lines, remaining]):
                time_text = time.asctime() if has_timestamp else ""
                stream.write(line if rank is None else f"{time_text}[{rank}]<{name}>:{line}")
                stream.flush()


def _run_middleman(*arguments: Any) -> None:
    install_no_op_warning_handlers()
    safe_shell_exec.terminate_executor_shell_and_children = terminate_rank
    _exec_middleman(*arguments)


def terminate_rank(shell_id: int) -> None:
    """Send SIGTERM to the children of the shell with process id `shell_id`, and SIGKILL if they do not terminate in
    time.

    The shell then exits by itself, with the exit code of the rank. A shell without children is killed. Horovod's own
    function waits for the shell in a second thread; if that wait returns before the other thread has read the exit
    code, the code is 0.
    """
    with contextlib.suppress(psutil.NoSuchProcess):  # the shell has exited
        shell = psutil.Process(shell_id)
        shell.suspend()  # so that it starts no process after the list of its children has been read
        children = shell.children()
        if not children:
            shell.kill()
        for child in children:
            _call_unless_exited(child.terminate)
        shell.resume()
        _, alive = psutil.wait_procs(children, timeout=safe_shell_exec.GRACEFUL_TERMINATION_TIME_S)
        for child in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in (*child.children(recursive=True), child):
                    _call_unless_exited(process.kill)


def _call_unless_exited(send_signal: Callable[[], None]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        send_signal()


def parse_arguments() -> Any:
    """Parse this process's arguments. "--" before the command of the ranks protects it from horovodrun's parser."""
    arguments = _parse_horovodrun_arguments()
    if arguments.command[:1] == ["--"]:
        del arguments.command[0]
    return arguments


_parse_horovodrun_arguments = launch.parse_args
_launch_gloo = gloo_run.launch_gloo
_exec_middleman = safe_shell_exec._exec_middleman


def main() -> None:
    """Run horovodrun with this process's arguments."""
    guard_standard_streams()
    # Old versions of Kubeflow's MPI operator reach other pods with kubectl, which does not forward standard input.
    if not exports.is_kubeflow_mpi():
        gloo_run._slot_info_to_command_fn = _create_command_function
        gloo_run.get_remote_command = _remote_command
    launch.parse_args = parse_arguments
    gloo_run.MultiFile = _OutputFiles
    gloo_run.launch_gloo = _launch_with_bound_server
    safe_shell_exec._exec_middleman = _run_middleman
    safe_shell_exec.in_thread = _OutputThread  # the middlemen run in other processes
    forward_warning_signals("HOROVOD_RANK")
    terminate_on_hangup()
    launch.run_commandline()


if __name__ == "__main__":
    main()
