"""Start, monitor and terminate programs on several hosts, over ssh or through Slurm.

`build_command` is for launchers that must be started on every host (torchrun). `add_cleanup` is for launchers that run
on this host and start the remote processes themselves. One agent per host terminates the processes that outlive the
launcher: the ranks of horovodrun, and the local ranks of a killed mpirun.

Both functions return a command that calls `main` in a new process, with the plan as JSON arguments. The plan contains
only the names of the variables that `build_command` forwards. `Agents` reads their values from its environment, and
sends them over the connections to the hosts.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from unitrain.launchers import host_agent
from unitrain.launchers.errors import PREEMPTED_EXIT_CODE
from unitrain.launchers.hosts import Host, is_this_host, processes_per_host
from unitrain.launchers.spec import Command, LaunchSpec, python_command

# With these options, ssh never prompts. It accepts a new host's key, rejects a changed key, and detects a lost host
# within 15 s.
SSH = (
    "ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "StrictHostKeyChecking=accept-new",
    "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3", "-o", "LogLevel=ERROR",
)  # fmt: skip
_SRUN = ("srun", "--nodes=1", "--ntasks=1", "--overlap", "--cpu-bind=none", "--quit-on-interrupt")
# Linux limits one argument to 128 KiB.
_MAX_ARGUMENT_CHARACTERS = 100_000
# Agents identify the processes of a launch on several hosts by this variable.
LAUNCH_ID_VARIABLE = "UNITRAIN_LAUNCH"
_FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_HEARTBEAT_SECONDS = 2.0
# Time for ranks that have lost a peer to raise their own errors, which are more specific than "terminated".
_FAILURE_GRACE_SECONDS = 5.0
_SHUTDOWN_TIMEOUT_SECONDS = 40.0  # torchrun allows its ranks 30 s


def build_command(
    commands: Sequence[tuple[Host, Command]], forwarded: Iterable[str], python: str, through_slurm: bool
) -> tuple[str, ...]:
    """Return a command that runs all `commands`, each on its host, and forwards the variables named in `forwarded`. The
    environments of the commands are not used.

    The agents of other hosts are started over ssh or, if `through_slurm` is true, all agents are started with srun.
    """
    hosts: list[dict[str, object]] = []
    for host, command in commands:
        start = (
            [*_SRUN, f"--nodelist={host.name}", *_agent_loader(python)]
            if through_slurm
            else _agent_command(host, python)
        )
        hosts.append({"name": host.name, "start": start, "argv": command.argv})
    return _main_command(python, hosts, forwarded, "")


def add_cleanup(command: Command, launcher: str, spec: LaunchSpec) -> Command:
    """Return a command that runs `command` on this host, and terminates orphaned processes on all hosts with ranks.

    `launcher` is the name of the launcher that `command` starts, for messages. The environment of the spec must contain
    LAUNCH_ID_VARIABLE, which all processes of the launch inherit.
    """
    marker = f"{LAUNCH_ID_VARIABLE}={spec.environment[LAUNCH_ID_VARIABLE]}"
    # The agents must not inherit the variable, because an agent kills every process that has it.
    variables = {name: value for name, value in command.environment.items() if name != LAUNCH_ID_VARIABLE}
    used = spec.hosts[: len(processes_per_host(spec.num_processes, spec.hosts))]
    hosts: list[dict[str, object]] = [{"name": launcher, "start": _agent_loader(spec.python), "argv": command.argv}]
    hosts += [
        {"name": host.name, "start": _agent_command(host, spec.python), "argv": None}
        for host in used
        if not is_this_host(host)
    ]
    return Command(_main_command(spec.python, hosts, (), marker), variables)


def _agent_loader(python: str) -> list[str]:
    """Return the command that reads the source of the agent from standard input and runs it."""
    code = "import sys;exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))"
    return [*python_command(python, code=code)]


def _agent_command(host: Host, python: str) -> list[str]:
    if is_this_host(host):
        return _agent_loader(python)
    return [*SSH, "--", host.name.strip("[]"), f"exec {shlex.join(_agent_loader(python))}"]


def _main_command(
    python: str, hosts: list[dict[str, object]], forwarded: Iterable[str], marker: str
) -> tuple[str, ...]:
    compressed = [hosts[0], *(_differing_fields(host, hosts[0]) for host in hosts[1:])]
    plan = {"hosts": compressed, "forwarded": sorted(forwarded), "marker": marker, "folder": str(Path.cwd())}
    text = json.dumps(plan, separators=(",", ":"))
    starts = range(0, len(text), _MAX_ARGUMENT_CHARACTERS)
    parts = [text[start : start + _MAX_ARGUMENT_CHARACTERS] for start in starts]
    # Not -m: runpy would warn that the package has already imported this module.
    return (*python_command(python, code="from unitrain.launchers.agents import main;main()"), *parts)


def _differing_fields(host: dict[str, object], first_host: dict[str, object]) -> dict[str, object]:
    """Return the fields of `host` that differ from those of `first_host`.

    If both values of a field are lists of equal length, the result contains a dictionary of the differing items by
    index. This dictionary is empty if the lists are equal.
    """
    differing: dict[str, object] = {}
    for field, value in host.items():
        common = first_host.get(field)
        if isinstance(value, list | tuple) and isinstance(common, list | tuple) and len(value) == len(common):
            pairs = enumerate(zip(value, common, strict=True))
            differing[field] = {str(index): word for index, (word, first_word) in pairs if word != first_word}
        elif field not in first_host or value != common:
            differing[field] = value
    return differing


def parse_plan(arguments: Iterable[str]) -> dict[str, Any]:
    """Parse the plan from the arguments of `main`, and restore all fields of every host."""
    plan: dict[str, Any] = json.loads("".join(arguments))
    first, *others = plan["hosts"]
    for host_index, differing in enumerate(others, 1):
        host = dict(first)
        for field, value in differing.items():
            if isinstance(first.get(field), list) and isinstance(value, dict):
                value = [value.get(str(index), word) for index, word in enumerate(first[field])]
            host[field] = value
        plan["hosts"][host_index] = host
    return plan


class Agents:
    """The running agents of a plan, one per host."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        forwarded = {name: os.environ[name] for name in plan["forwarded"] if name in os.environ}
        source = Path(host_agent.__file__).read_bytes()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._received_signals: collections.deque[int] = collections.deque()
        self._cleanup_hosts = {host["name"] for host in plan["hosts"] if not host["argv"]}
        self._ssh_hosts = {host["name"] for host in plan["hosts"] if host["start"][0] == SSH[0]}
        for host in plan["hosts"]:
            job = {"argv": host["argv"], "folder": plan["folder"], "marker": plan["marker"], "variables": forwarded}
            # A new session, so that Ctrl-C is forwarded to the ranks and does not interrupt ssh.
            process = subprocess.Popen(host["start"], stdin=subprocess.PIPE, start_new_session=True)
            self._running[host["name"]] = process
            self._send(process, f"{len(source)}\n".encode() + source + json.dumps(job).encode() + b"\n")

    def run(self) -> int:
        """Wait until all programs have exited. Return the exit code of the first failed program, or 0.

        The exit code is 128 + N if signal N killed the agent. The other programs receive SIGTERM 5 s after the first
        failure, and are killed after another 40 s. Must be called in the main thread.
        """
        for signum in _FORWARDED_SIGNALS:
            signal.signal(signum, self._record_signal)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores this signal
            # The terminal was closed. SIGTERM lets the ranks save a checkpoint.
            signal.signal(signal.SIGHUP, lambda _, frame: self._record_signal(signal.SIGTERM, frame))
        exit_code, failed_at, is_terminated, last_heartbeat = 0, 0.0, False, time.monotonic()
        while self._running.keys() - self._cleanup_hosts:
            for name, process in list(self._running.items()):
                if process.poll() is None:
                    continue
                del self._running[name]
                self._close_input(process)
                if process.returncode and not exit_code:
                    exit_code, failed_at = process.returncode, time.monotonic()
                    # ssh exits with 255 if it loses the connection.
                    is_lost = process.returncode == 255 and name in self._ssh_hosts
                    reason = ": the connection to the host was lost" if is_lost else ""
                    if exit_code != PREEMPTED_EXIT_CODE:
                        host_agent.print_message(f"{name} failed first, with exit code {exit_code}{reason}")
            now = time.monotonic()
            if exit_code and not is_terminated and now - failed_at > _FAILURE_GRACE_SECONDS:
                self._send_all(f"{signal.SIGTERM:d}\n".encode())
                is_terminated = True
            if exit_code and now - failed_at > _FAILURE_GRACE_SECONDS + _SHUTDOWN_TIMEOUT_SECONDS:
                break
            if now - last_heartbeat > _HEARTBEAT_SECONDS:
                self._send_all(b"\n")
                last_heartbeat = now
            while self._received_signals:
                self._send_all(f"{self._received_signals.popleft()}\n".encode())
            time.sleep(0.05)
        self.end()
        return exit_code if exit_code >= 0 else 128 - exit_code

    def end(self) -> None:
        """Terminate all running programs on every host."""
        for process in self._running.values():
            self._close_input(process)
        for process in self._running.values():
            try:
                process.wait(3 * host_agent.GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # in an uninterruptible system call
                    process.wait(host_agent.GRACE_SECONDS)

    def _record_signal(self, signum: int, frame: FrameType | None) -> None:
        # The signal may interrupt a write to a pipe, and buffered files are not reentrant.
        self._received_signals.append(signum)

    def _send_all(self, line: bytes) -> None:
        for process in self._running.values():
            self._send(process, line)

    @staticmethod
    def _send(process: subprocess.Popen[bytes], text: bytes) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the agent has exited; `run` detects this
            process.stdin.write(text)
            process.stdin.flush()

    @staticmethod
    def _close_input(process: subprocess.Popen[bytes]) -> None:
        """Close the standard input of an agent, which then terminates its program and exits."""
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()


def main() -> None:
    """Run the plan in the arguments of this process, and exit with the exit code of `Agents.run`."""
    agents = Agents(parse_plan(sys.argv[1:]))
    try:
        sys.exit(agents.run())
    finally:
        agents.end()
