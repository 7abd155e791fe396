"""Time for which a rank waited for CPU cores, read from /proc and from the cgroups of the process.

If a file is missing, as on systems other than Linux, the values read from it are zero.
"""

from __future__ import annotations

import os
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from unitrain.processes import usable_cores

# Limits that bound the time of a reading.
_MAX_THREADS, _MAX_WORKERS, _MAX_PROCESSES = 64, 32, 4096
# The waits of a thread are ignored if it uses less than this fraction of the CPU time of the busiest thread, because
# such a thread does not delay the rank.
_MIN_BUSY_FRACTION = 0.25
# Other processes on the rank's cores are named if they use at least this fraction of a core.
_MIN_NEIGHBOR_CPU_FRACTION = 0.05
_MAX_NAMED_NEIGHBORS = 2
_PROC = Path("/proc")


class CpuSeconds(NamedTuple):
    """Changes of the CPU counters between two readings, in seconds.

    `run_queue` is the time for which the most delayed busy thread was runnable but not running, including time in which
    a CPU quota stopped it. `worker_run_queue` is the same time for DataLoader workers. `throttled` is the time in which
    a CPU quota stopped the process. `used` is the CPU time of the process divided by the number of its cores.
    """

    run_queue: float = 0.0
    worker_run_queue: float = 0.0
    throttled: float = 0.0
    used: float = 0.0


class CpuReader:
    """Reads the CPU counters of this process and of the child processes of the thread that creates this object."""

    def __init__(self) -> None:
        self._thread_id = threading.get_native_id()
        self._thread_times: dict[str, tuple[int, int]] = {}
        self._worker_times: dict[str, tuple[int, int]] = {}
        self._throttled_seconds: dict[str, float] = {}
        self._cgroup_membership = ""
        self._stat_files: list[str] = []
        self._process_seconds = time.process_time()

    def read(self) -> CpuSeconds:
        """Return the changes of the counters since the last call. In the first call, all values but `used` are 0."""
        threads = _read_schedstat(_list_thread_schedstat_files())
        workers = _read_schedstat(self._list_worker_schedstat_files())
        run_queue, worker_wait = _longest_wait(self._thread_times, threads), _longest_wait(self._worker_times, workers)
        self._thread_times, self._worker_times = threads, workers
        throttled = self._read_throttled()
        used, before = time.process_time(), self._process_seconds
        self._process_seconds = used
        if threads:  # the counter of a cgroup is the sum of the throttled times of all its threads
            throttled = min(throttled, max(run_queue, worker_wait))
        return CpuSeconds(run_queue, worker_wait, throttled, (used - before) / len(usable_cores()))

    def quota_cores(self) -> float | None:
        """Return the lowest CPU quota of the process's cgroups, in cores, or None if they have no quota."""
        self._update_stat_files()
        return min(filter(None, (_read_quota(Path(path).parent) for path in self._stat_files)), default=None)

    def _list_worker_schedstat_files(self) -> list[str]:
        children = _read(f"/proc/self/task/{self._thread_id}/children").split()
        return [f"/proc/{child}/schedstat" for child in children[:_MAX_WORKERS]]

    def _read_throttled(self) -> float:
        """Return the seconds since the last call for which a CPU quota stopped the process (maximum over cgroups)."""
        self._update_stat_files()
        before, self._throttled_seconds = (
            self._throttled_seconds,
            {path: _read_throttled_seconds(path) for path in self._stat_files},
        )
        return max(
            (seconds - before.get(path, seconds) for path, seconds in self._throttled_seconds.items()), default=0.0
        )

    def _update_stat_files(self) -> None:
        membership = _read_all("/proc/self/cgroup")
        if membership != self._cgroup_membership:
            self._cgroup_membership = membership
            self._stat_files = find_cpu_stat_files(membership, _read_all("/proc/self/mountinfo"))


def find_cpu_stat_files(membership: str, mounts: str) -> list[str]:
    """Return the paths of the cpu.stat files of a process's cgroups and of their parents, for cgroup versions 1 and 2.

    Cgroups that cannot have a CPU quota are omitted. `membership` and `mounts` are the contents of /proc/self/cgroup
    and /proc/self/mountinfo.
    """
    paths: list[str] = []
    for line in membership.splitlines():
        hierarchy_id, controllers, path = line.split(":", 2)
        is_v2 = hierarchy_id == "0" and not controllers
        if not is_v2 and "cpu" not in controllers.split(","):
            continue
        for mount in mounts.splitlines():
            before, _, after = mount.partition(" - ")
            root, folder = before.split()[3:5]
            file_system, _, options = after.split(" ")[:3]  # the second field, the mount source, may be empty
            if file_system != ("cgroup2" if is_v2 else "cgroup") or (not is_v2 and "cpu" not in options.split(",")):
                continue
            # In a container, the mount contains only the subtree of the container's cgroup.
            inner = path.removeprefix(root) if root != "/" and path.startswith(root) else path
            own_cgroup = Path(folder, inner.lstrip("/"))
            cgroups = [own_cgroup, *(parent for parent in own_cgroup.parents if parent.is_relative_to(folder))]
            candidates = [str(cgroup / "cpu.stat") for cgroup in cgroups]
            paths += [candidate for candidate in candidates if "nr_throttled" in _read(candidate)]
            break
    return paths


def _read_throttled_seconds(path: str) -> float:
    for line in _read(path).splitlines():
        name, _, value = line.partition(" ")
        if name == "throttled_usec":  # cgroup version 2
            return int(value) / 1e6
        if name == "throttled_time":  # version 1
            return int(value) / 1e9
    return 0.0


def _read_quota(folder: Path) -> float | None:
    text = _read(str(folder / "cpu.max")) or " ".join(
        (_read(str(folder / "cpu.cfs_quota_us")), _read(str(folder / "cpu.cfs_period_us")))
    )
    numbers = text.split()
    if len(numbers) != 2 or not numbers[0].isdigit():  # no quota: "max", or -1
        return None
    return int(numbers[0]) / int(numbers[1])


def _list_thread_schedstat_files() -> list[str]:
    try:
        threads = os.listdir("/proc/self/task")[:_MAX_THREADS]  # noqa: PTH208
    except OSError:
        return []
    return [f"/proc/self/task/{thread}/schedstat" for thread in threads]


def _read_schedstat(paths: list[str]) -> dict[str, tuple[int, int]]:
    """Return the nanoseconds on a core and the nanoseconds on a run queue, by path. Unreadable files are left out."""
    times_by_path = {}
    for path in paths:
        if fields := _read(path).split():
            times_by_path[path] = (int(fields[0]), int(fields[1]))
    return times_by_path


def _longest_wait(before: dict[str, tuple[int, int]], now: dict[str, tuple[int, int]]) -> float:
    """Return the longest time, in seconds, that a busy thread spent on a run queue between two readings. Threads that
    are not in both readings are ignored."""
    changes = [
        (ran - before[path][0], waited - before[path][1]) for path, (ran, waited) in now.items() if path in before
    ]
    busiest = max((ran for ran, _ in changes), default=0)
    return max((waited for ran, waited in changes if ran >= _MIN_BUSY_FRACTION * busiest), default=0) / 1e9


@dataclass(frozen=True)
class ProcessTimes:
    """CPU seconds and names of other processes that last ran on this rank's cores, by process ID.

    `time` is the time of the reading (time.perf_counter()). Child processes of this process, such as DataLoader
    workers, are not included.
    """

    time: float
    seconds_and_names: dict[int, tuple[float, str]]

    @classmethod
    def read(cls) -> ProcessTimes:
        """Read the times of at most 4,096 processes. This takes about 20 µs per process."""
        cores, own_pid, seconds_and_names = set(usable_cores()), os.getpid(), dict[int, tuple[float, str]]()
        ticks = os.sysconf("SC_CLK_TCK")
        try:
            processes = [name for name in os.listdir(_PROC) if name.isdigit()][:_MAX_PROCESSES]  # noqa: PTH208
        except OSError:
            processes = []
        for name in processes:
            # The name in parentheses may contain spaces and parentheses.
            match = re.match(r"\d+ \((.*)\) (.*)", _read(f"/proc/{name}/stat"), re.DOTALL)
            fields = match[2].split() if match else []
            if match and len(fields) > 36 and own_pid not in (int(name), int(fields[1])) and int(fields[36]) in cores:
                seconds_and_names[int(name)] = ((int(fields[11]) + int(fields[12])) / ticks, match[1])
        return cls(time.perf_counter(), seconds_and_names)

    def describe_since(self, before: ProcessTimes) -> str:
        """Return a text that names at most two processes, those that used the most CPU time since `before`, such as
        "python (process 17) used 48% of a core". Processes that used less than 5 % of a core are omitted, so the text
        may be empty."""
        elapsed = max(self.time - before.time, 1e-9)
        used = {
            pid: (seconds - before.seconds_and_names[pid][0]) / elapsed
            for pid, (seconds, _) in self.seconds_and_names.items()
            if pid in before.seconds_and_names
        }
        busiest = sorted(used, key=lambda pid: -used[pid])[:_MAX_NAMED_NEIGHBORS]
        return ", ".join(
            f"{self.seconds_and_names[pid][1]} (process {pid}) used {used[pid]:.0%} of a core"
            for pid in busiest
            if used[pid] >= _MIN_NEIGHBOR_CPU_FRACTION
        )


def _read_all(path: str) -> str:
    """Return the content of a file of any length; empty if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _read(path: str) -> str:
    """Return the content of a short file; empty if it cannot be read. The content of a longer file in /proc is
    truncated, because the kernel returns at most about 4 KiB per read."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return ""
    try:
        return os.read(file, 65536).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(file)
