"""The faults that the runner injects into a job."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from hosts import Host

from .trials import Fault, Incident, Trial

_COMMAND = "-m unitrain launch"
# Parts of the command lines of launchers that `unitrain launch` starts.
_LAUNCHERS = ("torch.distributed.run", "unitrain.bootstrap.torchrun", "horovodrun", "mpirun")
# A slow link: sending the queue of 32 KB takes up to 0.25 s, and further packets are dropped. Some kernels lack netem.
_SLOW_LINK = ("tbf", "rate", "1mbit", "burst", "4kb", "limit", "32kb")


class Faults:
    """Injects the faults of a trial in `folder` when its incidents happen. The faults affect the processes that
    `find_processes` returns.

    Call `update` often. `pending` is the number of faults that have not started or have not ended.
    """

    def __init__(self, trial: Trial, folder: Path, hosts: list[Host], find_processes: Callable[[], list[int]]) -> None:
        self._trial, self._folder, self._hosts, self._find_processes = trial, folder, hosts, find_processes
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = itertools.count()
        self._seen: set[int] = set()
        self.injected: list[tuple[str, str]] = []
        """(fault, phase of the incident) of each injected fault."""
        self.log: list[str] = []
        self._began = time.monotonic()

    @property
    def pending(self) -> int:
        return len(self._queue)

    def update(self) -> None:
        """Inject the faults that are due, and end temporary faults whose time has passed."""
        for path in (self._folder / "incidents").iterdir():
            index = int(path.name)
            if index not in self._seen and "\n" in (text := path.read_text()):
                self._seen.add(index)
                self._begin(self._trial.incidents[index], text)
        while self._queue and self._queue[0][0] <= time.monotonic():
            heapq.heappop(self._queue)[2]()

    def finish(self) -> None:
        """End all active faults, and cancel the faults that have not started."""
        for host in self._hosts:
            self._end_network_fault(host)
        (self._folder / "disk" / "full").unlink(missing_ok=True)
        (self._folder / "slow").unlink(missing_ok=True)
        self._queue.clear()
        self._signal(self._find_processes(), signal.SIGCONT)

    def _begin(self, incident: Incident, text: str) -> None:
        if incident.own:
            self._record(f"{incident.own} itself", incident.phase)
        if incident.own == "stop":
            pids = self._find_pids(text)
            self._schedule(incident.own_seconds, lambda: self._signal(pids, signal.SIGCONT))
        for fault in incident.faults:
            self._schedule(fault.delay_seconds, lambda fault=fault: self._inject(fault, incident.phase))  # type: ignore[misc]

    def _schedule(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (time.monotonic() + seconds, next(self._counter), action))

    def _record(self, name: str, phase: str) -> None:
        self.injected.append((name, phase))
        self.log.append(f"{time.monotonic() - self._began:6.2f} s  {name} ({phase})")

    def _inject(self, fault: Fault, phase: str) -> None:
        self._record(fault.kind, phase)
        match fault.kind:
            case "kill a rank":
                self._signal(self._rank_pids(fault.number), signal.SIGKILL)
            case "kill all ranks":
                self._signal([pid for rank in range(3) for pid in self._rank_pids(rank)], signal.SIGKILL)
            case "kill the command":
                self._signal(self._command_pids(), signal.SIGKILL)
            case "kill the launcher":
                self._signal(self._launcher_pids(), signal.SIGKILL)
            case "terminate the command":
                self._signal(self._command_pids(), signal.SIGTERM)
            case "stop a rank":
                self._stop(self._rank_pids(fault.number), fault.seconds)
            case "stop the command":
                self._stop(self._command_pids(), fault.seconds)
            case "stop the launcher":
                self._stop(self._launcher_pids(), fault.seconds)
            case "full disk":
                self._fill_disk()
                full = self._folder / "disk" / "full"
                self._schedule(fault.seconds, lambda: full.unlink(missing_ok=True))
            case "change the slots":
                (self._folder / "slow").touch()
                (self._folder / "slots").write_text(f"{fault.number}\n")
                self._schedule(9.0, lambda: (self._folder / "slow").unlink(missing_ok=True))
            case _:
                self._disturb_network(self._hosts[1], fault)

    def _stop(self, pids: list[int], seconds: float) -> None:
        self._signal(pids, signal.SIGSTOP)
        # nsenter stops itself when its command is stopped.
        self._schedule(
            seconds, lambda: self._signal([*pids, *self._find_by_command_line(("nsenter ",))], signal.SIGCONT)
        )

    def _fill_disk(self) -> None:
        """Fill the small file system of the output folder."""
        with contextlib.suppress(OSError), (self._folder / "disk" / "full").open("ab", buffering=0) as file:
            for size in (1 << 16, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while file.write(bytes(size)):
                        pass

    def _disturb_network(self, host: Host, fault: Fault) -> None:
        if fault.kind == "slow link":
            self._control_traffic(host, "replace", *_SLOW_LINK)
        else:
            host.disconnect_network()
            if fault.kind == "lose a host":
                host.kill_all()  # so that the other host is not notified
        self._schedule(fault.seconds, lambda: self._end_network_fault(host))

    def _end_network_fault(self, host: Host) -> None:
        host.reconnect_network()
        self._control_traffic(host, "del")

    def _control_traffic(self, host: Host, operation: str, *discipline: str) -> None:
        command = ["nsenter", "-t", str(host.first), "--net", "tc", "qdisc", operation, "dev", "eth0", "root"]
        subprocess.run([*command, *discipline], capture_output=True, check=bool(discipline), timeout=20)

    def _rank_pids(self, rank: int) -> list[int]:
        """Return the process ID on this machine of `rank`, modulo the number of ranks, in the newest attempt. Return an
        empty list if it is not running."""
        rows = {int(path.name): path.read_text().split() for path in (self._folder / "ranks").iterdir()}
        sizes = [int(words[2]) for words in rows.values() if len(words) == 3]
        words = rows.get(rank % max(sizes), []) if sizes else []
        return self._find_pids(json.dumps([words[0], int(words[1])])) if len(words) == 3 else []

    def _find_pids(self, text: str) -> list[int]:
        """Return the process ID on this machine of the process that `text` names by its host name and its ID on that
        host. Return an empty list if it is not running."""
        name, pid = json.loads(text)
        running = self._find_processes()
        if not self._hosts:
            return [pid] if pid in running else []
        host = next(host for host in self._hosts if host.name == name)
        on_host = host.find_processes()
        return [found for found in running if found in on_host and _namespace_ids(found)[-1:] == [str(pid)]]

    def _command_pids(self) -> list[int]:
        return self._find_by_command_line((_COMMAND,))

    def _launcher_pids(self) -> list[int]:
        return self._find_by_command_line(_LAUNCHERS)

    def _find_by_command_line(self, words: Iterable[str]) -> list[int]:
        """Return the processes whose command line contains one of the words.

        The command line of `unitrain launch` also contains the words of launchers, and the command line of nsenter
        contains the words of its command. Therefore, these programs match only their own words.
        """
        found = []
        for pid in self._find_processes():
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                own_word = next((word for word in ("nsenter ", _COMMAND) if word in line), "")
                if any(word in line for word in words) and own_word in (*words, ""):
                    found.append(pid)
        return found

    def _signal(self, pids: Iterable[int], signum: signal.Signals) -> None:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signum)


def _namespace_ids(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return line.split()[1:]
    return []
