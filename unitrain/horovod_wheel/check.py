"""What the installed Horovod can do, found out in a process of its own: one built for another torch may crash it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from unitrain.horovod_wheel import patches

RECORD = "unitrain_build.json"  # beside horovod/__init__.py, written into the wheels that unitrain builds
BUILD = "unitrain horovod build"

# Prints one JSON line after whatever else the imports print; each part survives the failure of the others.
_PROBE = """
import importlib.metadata, importlib.util, json, pathlib, shutil, sys, warnings
warnings.simplefilter("ignore")
found = {"python": sys.executable, "mpirun": shutil.which("mpirun")}
def attempt(key, function):
    try:
        found[key] = function()
    except BaseException as error:
        found[key + "_error"] = f"{type(error).__name__}: {error}"
def torch():
    import torch
    found["gpus"] = torch.cuda.device_count() if torch.version.cuda else 0
    return torch.__version__
def horovod():
    import horovod.torch as hvd
    from horovod.torch import mpi_lib_v2
    names = ("gloo", "mpi", "nccl", "cuda", "rocm", "ddl", "ccl")
    return {name: int(getattr(hvd, name + "_built")()) for name in names}
def launcher():
    import horovod.runner.launch
    return True
spec = importlib.util.find_spec("horovod")
if spec is not None and spec.origin is not None:
    folder = pathlib.Path(spec.origin).parent
    found["folder"] = str(folder)
    attempt("version", lambda: importlib.metadata.version("horovod"))
    attempt("metadata", lambda: json.loads((folder / "metadata.json").read_text()))
    attempt("record", lambda: json.loads((folder / "RECORD_NAME").read_text()))
print("\\n" + json.dumps({**found, "dying": True}), flush=True)
attempt("torch", torch)
if "folder" in found:
    attempt("built", horovod)
    attempt("launcher", launcher)
print("\\n" + json.dumps(found), flush=True)
""".replace("RECORD_NAME", RECORD)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something that is missing or wrong, and the line that mends it; `fatal` when nothing runs with it."""

    what: str
    fix: str
    fatal: bool = False


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the installed Horovod can do; None and () where it is missing or does not say."""

    python: str
    version: str | None
    folder: str | None
    torch: str | None
    built_for_torch: str | None
    controllers: tuple[str, ...]
    cpu_operations: tuple[str, ...]
    gpu_operations: tuple[str, ...]
    mended: tuple[str, ...] | None
    built_by_unitrain: bool
    key: str | None
    problems: tuple[Problem, ...]

    @property
    def usable(self) -> bool:
        """Whether `import horovod.torch` works with this torch."""
        return not any(problem.fatal for problem in self.problems)

    def as_json(self) -> dict[str, Any]:
        """The report as plain data, for `--json`."""
        return {**dataclasses.asdict(self), "usable": self.usable}


def inspect(
    python: str | None = None, environment: Mapping[str, str] | None = None, timeout_seconds: float = 120
) -> Report:
    """Ask the Horovod of `python` (this one) what it is; never raises for what is wrong with it."""
    # -P: a folder named horovod where the user stands is not the installed one.
    command = (python or sys.executable, "-P", "-c", _PROBE)
    env = dict(environment) if environment is not None else None
    try:
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_seconds
        )
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as expired:
        status, output = -1, (expired.stdout or b"").decode(errors="replace")
    lines = [line for line in output.splitlines() if line.startswith('{"python"')]
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {"python": command[0], "dying": True}
    return judge(found, status)


def judge(found: Mapping[str, Any], status: int = 0) -> Report:
    """Turn what the probe found into a report; pure."""
    built: Mapping[str, int] = found.get("built") or {}
    record: Mapping[str, Any] = found.get("record") or {}
    gpu = ("nccl", "cuda", "rocm", "ddl")
    return Report(
        python=found["python"],
        version=found.get("version"),
        folder=found.get("folder"),
        torch=found.get("torch"),
        built_for_torch=_built_for(found),
        controllers=tuple(name for name in ("gloo", "mpi") if built.get(name)),
        cpu_operations=tuple(name for name in ("gloo", "mpi", "ccl") if built.get(name)),
        gpu_operations=tuple(name for name in gpu if built.get(name)),
        mended=tuple(record["mended"]) if "mended" in record else None,
        built_by_unitrain=bool(record),
        key=record.get("key"),
        problems=tuple(_problems(found, record, built, status)),
    )


def _built_for(found: Mapping[str, Any]) -> str | None:
    """Horovod's own metadata says it for every wheel, ours or not."""
    version = (found.get("metadata") or {}).get("pytorch") or (found.get("record") or {}).get("torch")
    return str(version) if version else None


def _problems(
    found: Mapping[str, Any], record: Mapping[str, Any], built: Mapping[str, int], status: int
) -> Iterator[Problem]:
    python, torch, built_for = found["python"], found.get("torch"), _built_for(found)
    if "folder" not in found:
        yield Problem(
            what=f"Horovod is not installed in {python}.", fix=f"Build it for this torch with: {BUILD}", fatal=True
        )
        return
    if "torch_error" in found:
        what = f"torch cannot be imported in {python}: {found['torch_error']}."
        yield Problem(what=what, fix=f"Install it, then build Horovod for it: pip install torch && {BUILD}", fatal=True)
        return
    if built_for is None:
        what = f"The Horovod in {found['folder']} was built without PyTorch."
        yield Problem(what=what, fix=f"Build it for this torch with: {BUILD}", fatal=True)
        return
    if torch is not None and built_for != torch:
        what = f"Horovod was built for torch {built_for}, and torch {torch} is installed."
        yield Problem(what=what, fix=f"Build it again for this torch with: {BUILD}", fatal=True)
    elif found.get("dying"):
        what = f"`import horovod.torch` ended its process with status {status}."
        yield Problem(what=what, fix=f"Build it again for this torch with: {BUILD} --force", fatal=True)
    elif not built:
        what = f"`import horovod.torch` fails: {' '.join(found['built_error'].split())}."
        yield Problem(what=what, fix=f"Build it again for this torch with: {BUILD} --force", fatal=True)
    else:
        yield from _shortcomings(found, record, built)


def _shortcomings(found: Mapping[str, Any], record: Mapping[str, Any], built: Mapping[str, int]) -> Iterator[Problem]:
    """What a Horovod that loads cannot do."""
    absent = [name for name in patches.mending() if name not in record.get("mended", ())]
    if absent:
        what = (
            f"Not known to be mended: {', '.join(absent)} (unitrain did not build this Horovod, or an older one did)."
        )
        yield Problem(what=what, fix=f"Build it with the changes: {BUILD} --force")
    if not built.get("gloo"):
        what = "There is no Gloo controller: Horovod starts under mpirun only."
        yield Problem(what=what, fix=f"Build it with Gloo: {BUILD}")
    if built.get("mpi") and not found.get("mpirun"):
        what = "The MPI controller is in, and mpirun is not on PATH."
        yield Problem(
            what=what, fix="Install Open MPI (sudo apt-get install openmpi-bin) or load it: module load openmpi"
        )
    if found.get("gpus") and not built.get("nccl"):
        what = f"{found['gpus']} GPUs are visible, and Horovod has no GPU operations: tensors must be on the CPU."
        yield Problem(what=what, fix=f"Build it with NCCL: {BUILD} --with-cuda")
    if "launcher_error" in found:
        what = f"horovodrun cannot start: {found['launcher_error']}."
        yield Problem(what=what, fix=f"Build it with the changes for this Python: {BUILD} --force")
