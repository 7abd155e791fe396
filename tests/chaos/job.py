"""Starts the job of a trial, and finds processes and files that remain."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hosts import Host
from preload import preloaded

from .faults import Faults
from .trials import Start, Trial

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("training.py")
TRIAL_SECONDS, EXIT_SECONDS = 240.0, 20.0
_POLL_SECONDS = 0.01


class Job:
    """The processes of a trial in `folder` on the given hosts, or on this machine if there are no hosts. The processes
    have a mark in their environment."""

    def __init__(self, trial: Trial, folder: Path, hosts: list[Host]) -> None:
        self.folder, self._trial, self._hosts = folder, trial, hosts
        self._name, self._value = "UNITRAIN_TEST_LAUNCH", secrets.token_hex(8)
        self._log = folder / "output.txt"
        self._last_start, self._has_agents = 0, False
        self.faults = Faults(trial, folder, hosts, self.find_processes)

    def output(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def last_output(self) -> str:
        """Return the output since the latest start."""
        return self.output()[self._last_start :]

    def run(self, start: Start, deadline: float) -> int:
        """Run `unitrain launch` until it exits, and return its exit code. Raises TimeoutError at `deadline`.

        Under torchrun on two hosts, `unitrain launch` for an elastic job only prints the commands of torchrun's agents.
        This method runs the commands on both hosts, restarts an agent that fails on the second host, and returns the
        exit code of the first host.
        """
        (self.folder / "slots").write_text(f"{start.ranks[0]}\n")
        self._last_start, self._has_agents = len(self.output()), self._uses_agents(start)
        command = self._command(start)
        self._log_text(" ".join(command))
        if not self._has_agents:
            return self._wait(self._popen(command), deadline)
        done = subprocess.run(command, env=self._variables(), capture_output=True, text=True, check=False, timeout=60)
        agents = re.findall(r"^  on h\d: (.+)$", done.stderr, re.MULTILINE)
        if len(agents) != 2:
            raise RuntimeError(f"{command} printed {done.stderr}")
        self._log_text("\n".join(agents))
        first, second = (self._popen(["sh", "-c", agent], number) for number, agent in enumerate(agents))

        def restart_failed_agent() -> None:
            nonlocal second
            if second.poll() not in (None, 0) and self.faults.pending == 0:
                second = self._popen(["sh", "-c", agents[1]], 1)

        code = self._wait(first, deadline, restart_failed_agent)
        if code != 0:  # a user would end the other agent before a restart
            self._hosts[1].kill_all()
        return code

    def _uses_agents(self, start: Start) -> bool:
        return self._trial.is_elastic and self._trial.num_hosts == 2 and start.launcher == "torchrun"

    def _variables(self) -> dict[str, str]:
        removed = ("OMP_NUM_THREADS", "UNITRAIN_BACKEND", "PYTHONDONTWRITEBYTECODE")
        variables = {name: text for name, text in os.environ.items() if name not in removed}
        variables |= {
            self._name: self._value, "OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "PYTHONPATH": str(ROOT),
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "TMPDIR": str(self.folder / "tmp"),
        }  # fmt: skip
        return preloaded(variables)

    def _log_text(self, text: str) -> None:
        with self._log.open("a") as log:
            log.write(f"\n$ {text}\n")

    def _popen(self, command: list[str], host: int = 0) -> subprocess.Popen[bytes]:
        line = self._hosts[host].command(command) if self._hosts else command
        with self._log.open("a") as log:
            return subprocess.Popen(
                line, env=self._variables(), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def _wait(
        self, process: subprocess.Popen[bytes], deadline: float, on_poll: Callable[[], None] = lambda: None
    ) -> int:
        while process.poll() is None:
            self.faults.update()
            on_poll()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the job is still running after {TRIAL_SECONDS:g} s: {self._describe()}")
            time.sleep(_POLL_SECONDS)
        self.faults.update()
        return process.returncode

    def _command(self, start: Start) -> list[str]:
        trial = self._trial
        options = ["--backend", start.backend, "--launcher", start.launcher]
        if trial.max_restarts:
            options += ["--max-restarts", str(trial.max_restarts)]
        host_options = ["-np", str(start.ranks[0])]
        if trial.num_hosts == 2:
            host_options = ["-H", ",".join(f"h{number}:{count}" for number, count in enumerate(start.ranks, 1))]
        if trial.is_elastic:
            options += ["--elastic", "1:2"] if self._uses_agents(start) else ["--elastic", "1:3"]
            options += ["--elastic-timeout", "60"]
            if trial.num_hosts == 1:
                host_options = ["--host-discovery-script", str(self.folder / "discover")]
        if trial.standby and trial.max_restarts and not self._uses_agents(start):
            options.append("--standby")
        return [sys.executable, "-m", "unitrain", "launch", *options, *host_options, str(SCRIPT), str(self.folder)]

    def find_processes(self) -> list[int]:
        """Return the process IDs on this machine of the processes of this trial."""
        mark, found = f"{self._name}={self._value}".encode(), []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found

    def check_exited(self) -> list[str]:
        """Wait until all processes of the trial have exited. After a timeout, return the remaining processes."""
        deadline = time.monotonic() + EXIT_SECONDS
        while self.find_processes() or any(host.find_processes() for host in self._hosts):
            if time.monotonic() > deadline:
                return [f"orphans after {EXIT_SECONDS:g} s: {self._describe()}"]
            time.sleep(0.1)
        return []

    def check_memory_folders(self) -> list[str]:
        """Return the folders for checkpoints in memory that still exist.

        If a command is killed while no ranks are running, the next supervised job on the host removes the folder.
        Therefore, folders are not checked after a start with agents.
        """
        if self._has_agents:
            return []
        root = Path(f"/proc/{self._hosts[0].first}/root") if self._hosts else Path("/")
        names = set(re.findall(r"UNITRAIN_MEMORY_FOLDER=(\S+)", self.output()))
        return [f"left behind: {name}" for name in names if (root / name.lstrip("/")).exists()]

    def kill_all(self) -> None:
        for host in self._hosts:
            host.kill_all()
        deadline = time.monotonic() + 10
        while (pids := self.find_processes()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def _describe(self) -> str:
        lines = []
        for pid in {*self.find_processes(), *(pid for host in self._hosts for pid in host.find_processes())}:
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                lines.append(f"{pid} {state} {line[:200]}")
        return "\n".join(lines)
