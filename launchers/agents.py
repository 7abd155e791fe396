"""One program on each of several hosts, started over ssh or through Slurm, that live and end together.

A launcher that reaches the other hosts itself runs on this one alone, and on each of the others a watchman ends what it
leaves there: horovodrun's ranks live on when horovodrun is gone, and mpirun's on its own host when it is killed.

A launcher that has to be started on every host becomes a process that calls `main`. Its arguments are the plan, which
is JSON and names variables without their values; these are sent over the connection.
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

import click

from unitrain.launchers import host_agent
from unitrain.launchers.hosts import Host, is_here, shares
from unitrain.launchers.spec import Command, LaunchSpec

# Without a question that nobody would answer. A new host's key is taken, one that has changed is refused, and a host
# that is gone is noticed.
SSH = (
    "ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "StrictHostKeyChecking=accept-new",
    "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3", "-o", "LogLevel=ERROR",
)  # fmt: skip
_SRUN = ("srun", "--nodes=1", "--ntasks=1", "--overlap", "--cpu-bind=none", "--quit-on-interrupt")
# Linux takes no longer argument than 128 KiB.
_ARGUMENT_CHARACTERS = 100_000
# What the processes of a launch have in their environment, where they are to be known by it.
MARK = "UNITRAIN_LAUNCH"
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_BEAT_SECONDS = 2.0
# Ranks that lose a peer fail by themselves, and what they say tells more than that they were ended.
_SECONDS_TO_FAIL = 5.0
_SECONDS_TO_END = 40.0  # torchrun gives its ranks 30
_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: the ranks were warned, and have saved


def plan(
    per_host: Sequence[tuple[Host, Command]], forwarded: Iterable[str], python: str, through_slurm: bool
) -> tuple[str, ...]:
    """Return the command that runs each command on its host, with the variables named in `forwarded`."""
    hosts: list[dict[str, object]] = []
    for host, command in per_host:
        start = [*_SRUN, f"--nodelist={host.name}", *_holder(python)] if through_slurm else _start(host, python)
        variables = dict(command.environment)
        hosts.append({"name": host.name, "start": start, "argv": command.argv, "variables": variables})
    return _command(python, hosts, forwarded, "")


def guarded(command: Command, spec: LaunchSpec) -> Command:
    """Return the command that runs `command` here, and lets nothing of it outlive it on the spec's hosts.

    The mark of the launch, which all its processes have, is among the spec's variables.
    """
    mark = f"{MARK}={spec.environment[MARK]}"
    # The processes that watch over the launch do not have the mark, or they would end each other.
    variables = {name: value for name, value in command.environment.items() if name != MARK}
    elsewhere = [host for host in spec.hosts[: len(shares(spec.num_processes, spec.hosts))] if not is_here(host)]
    hosts: list[dict[str, object]] = [
        {"name": Path(command.argv[0]).name, "start": _holder(spec.python), "argv": command.argv}
    ]
    hosts += [{"name": host.name, "start": _start(host, spec.python), "argv": None} for host in elsewhere]
    return Command(_command(spec.python, hosts, (), mark), variables)


def _holder(python: str) -> list[str]:
    return [python, "-P", "-c", "import sys;exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))"]


def _start(host: Host, python: str) -> list[str]:
    if is_here(host):
        return _holder(python)
    return [*SSH, "--", host.name.strip("[]"), f"exec {shlex.join(_holder(python))}"]


def _command(python: str, hosts: list[dict[str, object]], forwarded: Iterable[str], mark: str) -> tuple[str, ...]:
    short = [hosts[0], *(_without_common(host, hosts[0]) for host in hosts[1:])]
    told = {"hosts": short, "forwarded": sorted(forwarded), "mark": mark, "folder": str(Path.cwd())}
    text = json.dumps(told, separators=(",", ":"))
    parts = [text[start : start + _ARGUMENT_CHARACTERS] for start in range(0, len(text), _ARGUMENT_CHARACTERS)]
    # With -m, runpy would warn that the package has imported this module already.
    return (python, "-P", "-c", "from unitrain.launchers.agents import main;main()", *parts)


def _without_common(host: dict[str, object], first: dict[str, object]) -> dict[str, object]:
    """Return the fields of `host` that differ from those of the `first` host, of lists only the words that differ."""
    short: dict[str, object] = {}
    for field, value in host.items():
        common = first.get(field)
        if isinstance(value, list | tuple) and isinstance(common, list | tuple) and len(value) == len(common):
            pairs = enumerate(zip(value, common, strict=True))
            short[field] = {str(at): own for at, (own, other) in pairs if own != other}
        elif field not in first or value != common:
            short[field] = value
    return short


def read_plan(parts: Iterable[str]) -> dict[str, Any]:
    """Return the plan that is written in the arguments `parts`, with all fields of every host."""
    told: dict[str, Any] = json.loads("".join(parts))
    first, *others = told["hosts"]
    for number, short in enumerate(others, 1):
        host = dict(first)
        for field, value in short.items():
            if isinstance(first.get(field), list) and isinstance(value, dict):
                value = [value.get(str(at), word) for at, word in enumerate(first[field])]
            host[field] = value
        told["hosts"][number] = host
    return told


class Agents:
    """The programs at work."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        forwarded = {name: os.environ[name] for name in told["forwarded"] if name in os.environ}
        source = Path(host_agent.__file__).read_bytes()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._received: collections.deque[int] = collections.deque()
        self._watchmen = {host["name"] for host in told["hosts"] if not host["argv"]}
        for host in told["hosts"]:
            variables = {**forwarded, **host.get("variables", {})}
            job = {"argv": host["argv"], "folder": told["folder"], "mark": told["mark"], "variables": variables}
            # In a session of its own: a Ctrl-C is passed on, and must not break the connection.
            process = subprocess.Popen(host["start"], stdin=subprocess.PIPE, start_new_session=True)
            self._running[host["name"]] = process
            self._tell(process, f"{len(source)}\n".encode() + source + json.dumps(job).encode() + b"\n")

    def run(self) -> int:
        """Wait until all have ended, and return the exit code of the first that failed, or 0. The main thread calls
        it."""
        for number in _PASSED_ON:
            signal.signal(number, self._pass_on)
        failed, failed_at, asked, beat = 0, 0.0, False, time.monotonic()
        while self._running.keys() - self._watchmen:
            for name, process in list(self._running.items()):
                if process.poll() is None:
                    continue
                del self._running[name]
                self._close(process)
                if process.returncode and not failed:
                    failed, failed_at = process.returncode, time.monotonic()
                    lost = ": the connection to it broke" if process.returncode == 255 else ""
                    if failed != _PREEMPTED:
                        click.echo(f"unitrain: {name} failed first, with exit code {failed}{lost}", err=True)
            now = time.monotonic()
            if failed and not asked and now - failed_at > _SECONDS_TO_FAIL:
                self._tell_all(f"{signal.SIGTERM:d}\n".encode())
                asked = True
            if failed and now - failed_at > _SECONDS_TO_FAIL + _SECONDS_TO_END:
                break
            if now - beat > _BEAT_SECONDS:
                self._tell_all(b"\n")
                beat = now
            while self._received:
                self._tell_all(f"{self._received.popleft()}\n".encode())
            time.sleep(0.05)
        self.end()
        return failed if failed >= 0 else 128 - failed

    def end(self) -> None:
        """End all that still run, on every host."""
        for process in self._running.values():
            self._close(process)
        for process in self._running.values():
            try:
                process.wait(3 * host_agent.GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        # The loop may be writing to a pipe at this moment, and a buffered file refuses a second writer.
        self._received.append(number)

    def _tell_all(self, line: bytes) -> None:
        for process in self._running.values():
            self._tell(process, line)

    @staticmethod
    def _tell(process: subprocess.Popen[bytes], text: bytes) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it is gone, which is seen elsewhere
            process.stdin.write(text)
            process.stdin.flush()

    @staticmethod
    def _close(process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()


def main() -> None:
    """Run the plan in this process's arguments, and exit with its exit code."""
    agents = Agents(read_plan(sys.argv[1:]))
    try:
        sys.exit(agents.run())
    finally:
        agents.end()
