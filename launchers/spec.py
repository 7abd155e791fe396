"""The launch spec, which does not depend on the launcher, and the command that executes it. Both are plain data."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import Path

from unitrain.launchers.elastic import ElasticRange
from unitrain.launchers.errors import LaunchError, MissingLauncherError
from unitrain.launchers.hosts import Host, check_slots, processes_per_host
from unitrain.launchers.rendezvous import parse_master_port

# Prevents a typo such as -np 80000 from starting processes until the host runs out of memory.
MAX_PROCESSES_PER_HOST = 4096
CONFIG_SUFFIXES = (".yaml", ".yml", ".json")  # of the configuration files that `unitrain train` runs


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """Request to run `python script args...` on `num_processes` ranks on `hosts`.

    If `hosts` is empty, the ranks run on the hosts of the Slurm allocation, or else on this host.

    Attributes:
        script: A file or, with `module`, the name of a module, which is run as by `python -m`.
        backend: Passed to the script as UNITRAIN_BACKEND.
        controller: The controller of horovodrun, "gloo" or "mpi".
        environment: Variables to set on every rank.
        forwarded: Names of variables to forward to every rank. A value in `environment` takes precedence. The values of
            these variables are on no command line, and are not shown.
        launcher_args: Options of the launcher, placed after the options derived from this spec. With mpirun and srun,
            they replace default options of the same name.
        elastic: The allowed number of ranks of an elastic job, or None. `unitrain launch` restarts the job, except with
            torchrun on other hosts: the user then starts torchrun on each host, and torchrun restarts the job.
        max_restarts: The maximum number of restarts after a failure.
        interface: The network interface for communication between hosts, or None for the default route.
        port: The port of the rendezvous on the first host, or None for the default.
        wrapper: A Python script with arguments that every rank runs instead of `script`. The wrapper receives `script`
            and `args` as additional arguments.
        is_dry_run: Whether the command is only displayed, so that its programs need not be installed on this host.

    Raises LaunchError for fewer than one process, for more processes than slots, and for an invalid MASTER_PORT.
    """

    script: str
    module: bool = False
    args: tuple[str, ...] = ()
    num_processes: int = 1
    hosts: tuple[Host, ...] = ()
    backend: str | None = None
    controller: str | None = None
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)
    forwarded: tuple[str, ...] = ()
    launcher_args: tuple[str, ...] = ()
    elastic: ElasticRange | None = None
    max_restarts: int = 0
    interface: str | None = None
    port: int | None = None
    wrapper: tuple[str, ...] = ()
    is_dry_run: bool = False

    def __post_init__(self) -> None:
        if self.num_processes < 1:
            raise LaunchError(f"A run needs at least 1 process, got -np {self.num_processes}. Use: -np 1")
        if self.hosts:
            check_slots(self.num_processes, self.hosts)
        if self.environment.get("MASTER_PORT"):
            parse_master_port(self.environment)

    @property
    def program(self) -> tuple[str, ...]:
        """The arguments of Python on every rank: `wrapper`, then the script, or -m and the module, then `args`."""
        return (*self.wrapper, *(("-m",) if self.module else ()), self.script, *self.args)

    @property
    def processes_on_fullest_host(self) -> int:
        """The largest number of processes that run on one host. Raises LaunchError above MAX_PROCESSES_PER_HOST."""
        hosts = self.hosts or (Host("localhost", self.num_processes),)
        largest = max(processes_per_host(self.num_processes, hosts))
        if largest > MAX_PROCESSES_PER_HOST:
            raise LaunchError(
                f"-np {self.num_processes} would start {largest} processes on one host; the limit is "
                f"{MAX_PROCESSES_PER_HOST}. Use a smaller -np, or name more hosts: -H node1:8,node2:8"
            )
        return largest

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of every rank: `environment`, and the variables that unitrain adds under every
        launcher."""
        variables = dict(self.environment)
        if self.backend is not None:
            variables["UNITRAIN_BACKEND"] = self.backend
        if self.interface is not None:
            names = ("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME")
            variables |= dict.fromkeys(names, self.interface)
        # By default, a rank of torchrun uses one thread, and a rank of horovodrun uses all cores. unitrain sets the
        # same number of threads under every launcher except srun, where the number depends on the cores per task.
        threads = max(1, count_usable_cores() // self.processes_on_fullest_host)
        if "OMP_NUM_THREADS" not in os.environ:
            variables.setdefault("OMP_NUM_THREADS", str(threads))
        return variables

    def check_no_controller(self, launcher: str) -> None:
        """Raise LaunchError if a controller is set, because `launcher` is not horovodrun."""
        if self.controller is not None:
            raise LaunchError(
                f"--{self.controller} chooses horovodrun's controller, but the launcher is {launcher}. "
                "Leave it out, or use: --backend horovod --launcher horovodrun"
            )


@dataclass(frozen=True)
class Command:
    """A program with its arguments, and variables to add to the inherited environment.

    For launchers that must be started on each host, `per_host` contains one command per host, and `argv` starts all of
    them. `private_names` are variables whose values `shell` does not show.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    per_host: tuple[tuple[str, Command], ...] = ()
    private_names: frozenset[str] = frozenset()

    def shell(self) -> str:
        """Return the command as a line for a shell, or one line per host."""
        if self.per_host:
            return "\n".join(f"on {host}: {command.shell()}" for host, command in self.per_host)
        variables = [
            f"{name}={'...' if name in self.private_names else shlex.quote(value)}"
            for name, value in self.environment.items()
        ]
        return " ".join([*variables, shlex.join(self.argv)])

    def without_values_of(self, names: Iterable[str]) -> Command:
        """Return this command with `names` as additional private names, also in the commands of the hosts."""
        hidden = frozenset(names)
        return replace(
            self,
            per_host=tuple((host, command.without_values_of(hidden)) for host, command in self.per_host),
            private_names=self.private_names | hidden,
        )


def after_options(program: Sequence[str]) -> tuple[str, ...]:
    """Return `program` with "--" before it if one of its words looks like an option.

    The parsers of torchrun and horovodrun read all words of the command line as options, for example an argument --log
    of the script as an ambiguous abbreviation of their own options, except after "--".
    """
    return (*(("--",) if any(word.startswith("-") for word in program) else ()), *program)


def count_usable_cores() -> int:
    """Return the number of CPU cores that this process may use. A scheduler or a container may limit it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_program(name: str, python: str, fix: str, *, is_dry_run: bool = False) -> str:
    """Return the path of `name` in the folder of `python` or on PATH.

    If it is not found, return `name` itself for a dry run, otherwise raise MissingLauncherError, whose message ends
    with `fix`.
    """
    program = shutil.which(name, path=str(Path(python).parent)) or shutil.which(name)
    if program is None and not is_dry_run:
        raise MissingLauncherError(f"Launcher {name!r} is not installed. {fix}")
    return program or name


def launcher_module_command(
    module: str, package: str, python: str, fix: str, *, is_dry_run: bool = False
) -> tuple[str, ...]:
    """Return the command that runs `module`, a launcher that needs `package`, with the interpreter `python`.

    The launcher's program on PATH is not used, because it may belong to a different environment and start the ranks
    with a different Python. Raises MissingLauncherError, whose message ends with `fix`, if `python` is this interpreter
    and lacks the package, except for a dry run.
    """
    if not is_dry_run and python == sys.executable and importlib.util.find_spec(package) is None:
        name = module.rpartition(".")[2]
        raise MissingLauncherError(f"Launcher {name!r} is not installed for {python}. {fix}")
    return python_command(python, module=module)


def python_command(python: str, *, module: str = "", code: str = "") -> tuple[str, ...]:
    """Return the command that runs `module` or `code`, and does not import files of the current folder."""
    if sys.version_info >= (3, 11):
        return (python, "-P", *(("-m", module) if module else ("-c", code)))
    if module:
        code = f"import runpy;runpy.run_module({module!r},run_name='__main__',alter_sys=True)"
    return (python, "-c", f"import sys;sys.path[:]=filter(None,sys.path);{code}")  # '' is the current folder


def find_module(name: str) -> Path | None:
    """Return the file that `python -m name` would run in the current folder, or None. Nothing is imported."""
    folders: list[str] | None = [str(Path.cwd()), *sys.path]
    module_spec = None
    for part in [name.rsplit(".", depth)[0] for depth in range(name.count("."), -1, -1)]:
        module_spec = PathFinder.find_spec(part, folders)
        if module_spec is None:
            return None
        folders = list(module_spec.submodule_search_locations or ())
    if module_spec is not None and module_spec.submodule_search_locations is not None:
        # A package: python -m runs its __main__.
        module_spec = PathFinder.find_spec(f"{name}.__main__", list(module_spec.submodule_search_locations))
    return None if module_spec is None or module_spec.origin is None else Path(module_spec.origin)
