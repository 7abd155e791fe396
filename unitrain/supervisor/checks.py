"""Checks of commands that start ranks: the script exists, and no launcher has started the command itself.

These commands also accept a configuration file instead of a script, and then run `unitrain train`.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

from unitrain import launchers
from unitrain.bootstrap import environment
from unitrain.errors import did_you_mean
from unitrain.launchers.spec import CONFIG_SUFFIXES

_MAIN = Path(__file__).parent.parent / "__main__.py"
_RANK_LAUNCHERS = ("torchrun", "horovodrun", "mpirun", "mpirun_rsh", "mpiexec", "jsrun")


def check_script(script: Path, *, runs_here: bool = True) -> None:
    """Raise LaunchError unless `script` is a file and, with `runs_here`, the packages that read it are installed."""
    if script.is_file():
        if runs_here and is_config_file(script):
            check_config_packages()
        return
    if re.fullmatch(r"python[\d.]*", script.name):
        raise launchers.LaunchError(
            f"'{script}' is the interpreter, which unitrain starts itself. Leave {script.name!r} out: "
            "unitrain launch -np 2 train.py"
        )
    suggestion = did_you_mean(script.name, [path.name for path in script.parent.glob("*.py")])
    problem = "is not a file" if script.exists() else "does not exist"
    raise launchers.LaunchError(f"Script '{script}' {problem}. {suggestion}Options of unitrain go before the script.")


def is_config_file(script: str | Path) -> bool:
    """Return whether `script` is the name of a configuration file, which `unitrain train` runs."""
    return Path(script).suffix in CONFIG_SUFFIXES


def check_config_packages() -> None:
    """Raise LaunchError if the package with which `unitrain train` reads configuration files is missing."""
    if importlib.util.find_spec("jsonargparse") is None:
        raise launchers.LaunchError(
            "Configuration files need the package jsonargparse, which is not installed. Install it, in the source "
            'folder of unitrain, with: pip install ".[config]"'
        )


def check_config_options(file: str | Path, args: Sequence[str]) -> None:
    """Raise ConfigError if `args`, the arguments after a configuration file, contain an option that `unitrain train`
    does not have. Otherwise, the ranks would start and then fail."""
    if any(word.startswith("-") for word in args):
        from unitrain.config_files.parser import check_options  # imports torch

        where = f" after the configuration file '{file}'"
        check_options(args, where, "Options of unitrain go before the file.")


def check_metrics_package(port: int) -> None:
    """Raise LaunchError if the package that serves the metrics endpoint on `port` is missing."""
    if importlib.util.find_spec("prometheus_client") is None:
        raise launchers.LaunchError(
            f"--metrics-port {port} needs the package prometheus_client, which is not installed. Install it, in the "
            'source folder of unitrain, with: pip install ".[prometheus]"'
        )


def executed_script(script: str, args: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return the Python script and the arguments that run `script` with `args`.

    For a configuration file, they are those of `unitrain train`.
    """
    return (str(_MAIN), ("train", script, *args)) if is_config_file(script) else (script, tuple(args))


def check_module(name: str) -> None:
    """Raise LaunchError unless `python -m name` would find a file."""
    if name.endswith(".py"):
        raise launchers.LaunchError(f"-m takes the name of a module, got the file {name!r}. Leave -m out to run a file")
    if launchers.find_module(name) is None:
        raise launchers.LaunchError(
            f"Module {name!r} is not found from {Path.cwd()}. Start from the folder that contains its package, or "
            "install it: pip install -e ."
        )


def check_not_launched(fix: str) -> None:
    """Raise LaunchError if the job has several pods or, with `fix` in the message, if one of _RANK_LAUNCHERS has
    started this process. For srun, see `check_started_once`.
    """
    if (pods := environment.max_pods()) > 1:
        # Each pod would train separately.
        raise launchers.LaunchError(
            f"PET_NNODES={pods} means that this job has {pods} pods, but this command would start ranks in this pod "
            "only. Start the script with torchrun, which reads this variable, as in: torchrun train.py"
        )
    rank_info = environment.detect(environment.without_pod_variables())
    if rank_info.launcher in _RANK_LAUNCHERS:
        raise launchers.LaunchError(
            f"{rank_info.launcher} has started this process already ({', '.join(rank_info.evidence)}). {fix}"
        )


def check_started_once(hint: str = "") -> None:
    """Raise LaunchError with `hint` if srun started this command in several tasks."""
    if launchers.is_one_of_several_tasks():
        raise launchers.LaunchError(
            f"srun has started this command in each of {environment.detect().size} tasks, and each task would start "
            f"all ranks. Start it once: leave srun out, or use: srun --nodes=1 --ntasks=1.{hint}"
        )
