"""Information about this host's CPU, work at low priority, termination of the processes of a command, and termination
of workers whose rank has terminated.

Launchers start ranks in other process groups, so the processes of a command are found by an environment variable. A
DataLoader worker detects the termination of its rank only between two batches, so a hung worker would outlive a killed
rank and keep open the pipes from which launchers read the rank's output.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import os
import platform
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

_TERMINATE_SECONDS = 5.0
_KILL_TIMEOUT_SECONDS = 5.0
_KILL_PERIOD_SECONDS = 0.02
_PARENT_POLL_SECONDS = 1.0
_LOWEST_PRIORITY = 19  # the highest niceness
_RESTORE_SECONDS = 60.0
# Signals that schedulers send to every process of a job before preemption. DataLoader workers ignore them, because the
# rank handles them. The Trainer adds the signals in its configuration.
preemption_signals = {signal.SIGUSR1, signal.SIGUSR2}
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2
# The process that last called fork, and whether its main thread called it. A forked process inherits its parent's
# value.
_last_fork: tuple[int, bool] | None = None
# ID of the process in which `terminate_with_parent` was last called.
_terminates_with_parent_pid: int | None = None


def cpu_model_name() -> str:
    """Return the name of this host's CPU model, or its architecture if the name is unknown."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        text = ""
    model = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    return model[1].strip() if model else platform.machine()


def usable_cores() -> tuple[int, ...]:
    """Return the CPU cores in this process's CPU affinity, or all cores if the system does not support affinity."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def process_start_ticks() -> int | None:
    """Return the start time of this process in clock ticks since boot; None if the system has no /proc."""
    try:
        # The command name, in parentheses, may contain spaces. Field 22 is the start time, see proc(5).
        return int(Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    except OSError:
        return None


def process_age_seconds() -> float:
    """Return the time since the start of this process, in seconds; 0 if the system has no /proc."""
    ticks = process_start_ticks()
    if ticks is None:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def run_at_low_priority(function: Callable[[], None]) -> None:
    """Call `function` in a thread with the lowest CPU priority, and wait until it returns. Raises the exceptions of
    `function`.

    A separate thread is necessary, because only a privileged process can raise its priority again. In Linux, the
    niceness applies to a single thread. Threads that `function` starts inherit the low priority. If the kernel groups
    processes by session (autogroup, see sched(7)), it compares the niceness only within a session. A session leader
    therefore also lowers the priority of its session until `function` returns.
    """

    def run() -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, _LOWEST_PRIORITY)  # 0 is the calling thread
        function()

    autogroup_file = Path("/proc/self/autogroup")
    is_lowered = False
    with contextlib.suppress(OSError):
        if os.getsid(0) == os.getpid() and autogroup_file.read_text().endswith("nice 0\n"):
            autogroup_file.write_text(str(_LOWEST_PRIORITY))
            is_lowered = True
    try:
        with ThreadPoolExecutor(1, "unitrain low priority") as pool:
            pool.submit(run).result()
    finally:
        if is_lowered:
            _restore_session_priority(autogroup_file)


def _restore_session_priority(autogroup_file: Path) -> None:
    """Write the default niceness of the session to `autogroup_file`.

    The kernel accepts one change per 0.1 s from all unprivileged processes of the machine, so the ranks of a host retry
    after random pauses.
    """
    deadline, generator = time.monotonic() + _RESTORE_SECONDS, random.SystemRandom()
    while time.monotonic() < deadline:
        try:
            autogroup_file.write_text("0")
            return
        except BlockingIOError:
            time.sleep(generator.uniform(0.02, 0.2))
        except OSError:
            return


def find_process_ids(marker: bytes) -> Iterator[int]:
    """Yield the IDs of processes with `marker` (NAME=value) in their environment; none if the system has no /proc."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marker in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def exit_on_termination_signals() -> None:
    """Make SIGTERM and SIGHUP raise SystemExit, so that a command terminates its ranks before it exits.

    By default, these signals would terminate only this process and orphan the ranks, which run in other sessions. An
    ignored signal stays ignored, as under nohup. Only the main thread may call this function.
    """
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, lambda signum, _: sys.exit(128 + signum))


def kill_processes(process: subprocess.Popen[bytes], marker: bytes) -> None:
    """Kill `process` (a session leader), its process group, and all processes with `marker`. Wait for `process` at most
    5 s.

    The wait is limited because a process in an uninterruptible system call, for example for a file server that does not
    respond, does not terminate until the call returns.
    """
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + _KILL_TIMEOUT_SECONDS
    # Repeat, because the processes may have started further processes.
    while (process_ids := list(find_process_ids(marker))) and time.monotonic() < deadline:
        for pid in process_ids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_KILL_PERIOD_SECONDS)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_TIMEOUT_SECONDS)


def terminate_processes(process: subprocess.Popen[bytes], marker: bytes) -> None:
    """Terminate `process`, a launcher and session leader, wait for it at most 5 s, and call `kill_processes`.

    A launcher that receives SIGTERM also terminates its ranks on other hosts. A killed srun does not.
    """
    try:
        if process.poll() is None:
            process.terminate()
            process.wait(_TERMINATE_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        kill_processes(process, marker)


@functools.cache
def terminate_workers_with_rank() -> None:
    """Make sure that every DataLoader worker forked by this process from now on terminates when this process does.

    This includes workers of the user's DataLoaders, but not spawned workers. Spawned workers of unitrain's own
    DataLoaders call `terminate_with_parent` through `WorkerInit`.
    """
    if not hasattr(os, "register_at_fork"):
        return
    _libc()

    def before_fork() -> None:
        global _last_fork
        _last_fork = os.getpid(), threading.current_thread() is threading.main_thread()

    def after_fork_in_child() -> None:
        if _is_called_by_dataloader(sys._getframe()):
            terminate_with_parent()

    os.register_at_fork(before=before_fork, after_in_child=after_fork_in_child)


def parent_death_signal_setter(signum: signal.Signals) -> Callable[[], bool]:
    """Return a function that makes the kernel send signal `signum` to the calling process when its parent terminates.

    The function returns whether the kernel supports this. It may be called in a forked process, in which loading a
    library is not safe. The kernel sends the signal when the thread that started the process terminates.
    """
    if sys.platform != "linux":
        return lambda: False
    prctl = _libc().prctl
    return lambda: bool(prctl(_PR_SET_PDEATHSIG, signum) == 0)


def replace_parent_death_signal(signum: int) -> int:
    """Replace the signal that this process receives when its parent terminates, and return the previous signal. 0
    stands for no signal.

    Call it in the main thread, because the kernel stores the signal per thread.
    """
    if sys.platform != "linux":
        return 0
    earlier = ctypes.c_int(0)
    _libc().prctl(_PR_GET_PDEATHSIG, ctypes.byref(earlier))
    _libc().prctl(_PR_SET_PDEATHSIG, signum)
    return earlier.value


def terminate_with_parent() -> None:
    """Arrange that this process is killed when its parent terminates for any reason. A second call has no effect.

    If the main thread of the parent forked this process, the kernel kills it. Otherwise, a thread polls the parent: the
    rank that forked this process or, for a process of a fork server, both the fork server and the rank.
    """
    global _terminates_with_parent_pid
    if _terminates_with_parent_pid == os.getpid():
        return
    _terminates_with_parent_pid = os.getpid()
    parent_pids, spawning_rank = {os.getppid()}, multiprocessing.parent_process()
    if _last_fork is not None and _last_fork[0] == os.getppid():
        # The kernel sends the signal when the forking thread terminates; the main thread terminates with the process.
        if _last_fork[1] and parent_death_signal_setter(signal.SIGKILL)():
            if os.getppid() != _last_fork[0]:  # the parent terminated before the call
                os.kill(os.getpid(), signal.SIGKILL)
            return
    elif spawning_rank is not None and spawning_rank.pid is not None:
        parent_pids.add(spawning_rank.pid)  # if `getppid` returned a fork server
    thread = threading.Thread(target=_kill_this_process_after, args=(parent_pids,), name="unitrain worker", daemon=True)
    thread.start()


def _kill_this_process_after(parent_pids: set[int]) -> None:
    parent = os.getppid()
    while os.getppid() == parent and all(map(_is_alive, parent_pids)):
        time.sleep(_PARENT_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_called_by_dataloader(frame: FrameType | None) -> bool:
    module: Any = sys.modules.get("torch.utils.data.dataloader")
    while module is not None and frame is not None:
        if frame.f_code.co_filename == module.__file__:
            return True
        frame = frame.f_back
    return False


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
