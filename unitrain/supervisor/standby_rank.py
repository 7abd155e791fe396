"""A standby rank of the next attempt, for `unitrain launch --standby`.

The launcher runs `python standby_rank.py SCRIPT ARGS...`, or `python standby_rank.py -m MODULE ARGS...`, on each rank.
This program imports torch, unitrain and the backend, and waits. If the running attempt fails, the supervisor starts the
standby ranks, which then execute the script in the same process. The launcher has already set their environment. A
standby rank exits when it is not needed, or when the supervisor exits for any reason. While it waits, it does not use a
GPU.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":
    # Python prepends the folder of a script to sys.path; this folder contains modules with common names.
    sys.path[0] = str(Path(__file__).parents[2])

from unitrain.backends import registry
from unitrain.bootstrap import environment
from unitrain.errors import UnitrainError
from unitrain.monitoring import supervisor_client
from unitrain.processes import run_at_low_priority

# torch._dynamo is imported by every optimizer. Modules that are not installed are skipped.
_MODULES = ("torch", "torch._dynamo", "unitrain.trainer")


def wrapper_arguments() -> tuple[str, ...]:
    """Return the command-line arguments to insert before the script."""
    return (str(Path(__file__)),)


def main(program: list[str]) -> None:
    """Wait until the supervisor starts this rank, then execute `program`: a script, or -m and a module, with arguments.

    Exits with code 1 if the supervisor cannot be reached.
    """
    supervisor_client.connect(environment.detect().rank, is_standby=True)
    # The modules are imported at low priority, because the running attempt uses the same cores. numpy is imported
    # first: its libraries start threads, which the script uses later and which would otherwise keep the low priority.
    with suppress(ImportError):
        importlib.import_module("numpy")
    run_at_low_priority(_import_modules)
    if not supervisor_client.wait_for_start():
        sys.exit(1)
    if program[0] == "-m":
        sys.path[0] = str(Path.cwd())
        sys.argv[:] = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(program[0]).resolve().parent)
        sys.argv[:] = program
        runpy.run_path(program[0], run_name="__main__")


def _import_modules() -> None:
    """Import the modules that a training script probably imports. If an import fails, the script reports the error."""
    for name in _MODULES:
        with suppress(ImportError):
            importlib.import_module(name)
    with suppress(UnitrainError):
        registry.load(environment.get_variable("UNITRAIN_BACKEND") or "ddp")


if __name__ == "__main__":
    main(sys.argv[1:])
