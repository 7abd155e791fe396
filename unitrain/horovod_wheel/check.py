"""Report the capabilities of the installed Horovod. A subprocess imports it, because a mismatched build may crash."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from unitrain.horovod_wheel.patches import RUNTIME_FIXES

# File next to horovod/__init__.py in the wheels that unitrain builds.
RECORD_FILE = "unitrain_build.json"
BUILD_COMMAND = "unitrain horovod build"

# This program prints a JSON line before the imports, in case they crash, and another one after them. An exception in
# one check does not affect the other checks.
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
    attempt("record", lambda: json.loads((folder / "RECORD_FILE").read_text()))
print("\\n" + json.dumps({**found, "crashed": True}), flush=True)
attempt("torch", torch)
if "folder" in found:
    attempt("built", horovod)
    attempt("launcher", launcher)
print("\\n" + json.dumps(found), flush=True)
""".replace("RECORD_FILE", RECORD_FILE)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A missing or broken component, and the command to fix it. `fatal` problems make Horovod unusable."""

    what: str
    fix: str
    fatal: bool = False


@dataclass(frozen=True, kw_only=True)
class Report:
    """The capabilities of the installed Horovod. Unknown values are None or (). If Horovod is missing, only `python`,
    `torch` and `problems` are known.
    """

    python: str
    version: str | None
    folder: str | None
    torch: str | None
    built_for_torch: str | None
    controllers: tuple[str, ...]
    cpu_operations: tuple[str, ...]
    gpu_operations: tuple[str, ...]
    runtime_fixes: tuple[str, ...] | None
    built_by_unitrain: bool
    key: str | None
    problems: tuple[Problem, ...]

    @property
    def is_usable(self) -> bool:
        """Whether `import horovod.torch` works with the installed torch."""
        return not any(problem.fatal for problem in self.problems)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for `--json`."""
        return {**dataclasses.asdict(self), "usable": self.is_usable}


def inspect(
    python: str | None = None, environment: Mapping[str, str] | None = None, timeout_seconds: float = 120
) -> Report:
    """Return a report on the Horovod that is installed for the interpreter `python`, by default this interpreter.
    Problems are reported, not raised.

    `environment` is the environment of the probe, by default that of this process.
    """
    # A folder named horovod in the working directory, '' in sys.path, is not imported.
    command = (python or sys.executable, "-c", f"import sys\nsys.path[:] = filter(None, sys.path)\n{_PROBE}")
    env = dict(environment) if environment is not None else None
    failure = ""
    try:
        process = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_seconds
        )
        output = process.stdout
        if process.returncode:
            failure = f"failed with exit status {process.returncode}"
    except subprocess.TimeoutExpired as expired:
        output = (expired.stdout or b"").decode(errors="replace")
        failure = f"did not finish within {timeout_seconds:g} s"
    lines = [line for line in output.splitlines() if line.startswith('{"python"')]
    if not lines:
        return create_report({"python": command[0], "probe_error": failure or "printed nothing"})
    return create_report(json.loads(lines[-1]), failure)


def create_report(facts: Mapping[str, Any], failure: str = "") -> Report:
    """Convert the output of the probe to a report. `failure` describes how the probe ended if the imports crashed or
    hung, such as "failed with exit status -11".
    """
    built: Mapping[str, int] = facts.get("built") or {}
    record: Mapping[str, Any] = facts.get("record") or {}
    gpu = ("nccl", "cuda", "rocm", "ddl")
    return Report(
        python=facts["python"],
        version=facts.get("version"),
        folder=facts.get("folder"),
        torch=facts.get("torch"),
        built_for_torch=_torch_version_of_build(facts),
        controllers=tuple(name for name in ("gloo", "mpi") if built.get(name)),
        cpu_operations=tuple(name for name in ("gloo", "mpi", "ccl") if built.get(name)),
        gpu_operations=tuple(name for name in gpu if built.get(name)),
        runtime_fixes=tuple(record["runtime_fixes"]) if "runtime_fixes" in record else None,
        built_by_unitrain=bool(record),
        key=record.get("key"),
        problems=tuple(_find_problems(facts, record, built, failure)),
    )


def _torch_version_of_build(facts: Mapping[str, Any]) -> str | None:
    """Return the torch version for which Horovod was built, from the metadata that every Horovod wheel contains, or
    from unitrain's record."""
    version = (facts.get("metadata") or {}).get("pytorch") or (facts.get("record") or {}).get("torch")
    return str(version) if version else None


def _find_problems(
    facts: Mapping[str, Any], record: Mapping[str, Any], built: Mapping[str, int], failure: str
) -> Iterator[Problem]:
    python, torch, built_for = facts["python"], facts.get("torch"), _torch_version_of_build(facts)
    if "probe_error" in facts:
        what = f"The check of Horovod in {python} {facts['probe_error']}."
        yield Problem(what=what, fix=f"See the error of: {python} -c 'import horovod.torch'", fatal=True)
        return
    if "folder" not in facts:
        yield Problem(
            what=f"Horovod is not installed in {python}.",
            fix=f"Build it for this torch with: {BUILD_COMMAND}",
            fatal=True,
        )
        return
    if "torch_error" in facts:
        what = f"torch cannot be imported in {python}: {facts['torch_error']}."
        yield Problem(
            what=what, fix=f"Install torch, then build Horovod: pip install torch && {BUILD_COMMAND}", fatal=True
        )
        return
    if built_for is None:
        what = f"The Horovod in {facts['folder']} was built without PyTorch."
        yield Problem(what=what, fix=f"Build it for this torch with: {BUILD_COMMAND}", fatal=True)
        return
    if torch is not None and built_for != torch:
        what = f"Horovod was built for torch {built_for}, but torch {torch} is installed."
        yield Problem(what=what, fix=f"Rebuild it for this torch with: {BUILD_COMMAND}", fatal=True)
    elif facts.get("crashed"):
        what = f"`import horovod.torch` {failure or 'crashed'}."
        yield Problem(what=what, fix=f"Rebuild it for this torch with: {BUILD_COMMAND} --force", fatal=True)
    elif not built:
        what = f"`import horovod.torch` fails: {' '.join(facts['built_error'].split())}."
        yield Problem(what=what, fix=f"Rebuild it for this torch with: {BUILD_COMMAND} --force", fatal=True)
    else:
        yield from _find_limitations(facts, record, built)


def _find_limitations(
    facts: Mapping[str, Any], record: Mapping[str, Any], built: Mapping[str, int]
) -> Iterator[Problem]:
    """Yield the limitations of an importable Horovod."""
    missing_fixes = [name for name in RUNTIME_FIXES if name not in record.get("runtime_fixes", ())]
    if missing_fixes:
        what = (
            f"Fixes that may be missing: {', '.join(missing_fixes)} (this Horovod was not built by this version of "
            "unitrain)."
        )
        yield Problem(what=what, fix=f"Build it with the fixes: {BUILD_COMMAND} --force")
    if not built.get("gloo"):
        what = "Horovod was built without the Gloo controller, so it only starts under mpirun."
        yield Problem(what=what, fix=f"Build it with Gloo: {BUILD_COMMAND}")
    if built.get("mpi") and not facts.get("mpirun"):
        what = "Horovod was built with the MPI controller, but mpirun is not on PATH."
        yield Problem(
            what=what, fix="Install Open MPI (sudo apt-get install openmpi-bin) or load it: module load openmpi"
        )
    if facts.get("gpus") and not built.get("nccl"):
        what = f"GPUs are visible ({facts['gpus']}), but Horovod has no GPU operations, so tensors must be on the CPU."
        yield Problem(what=what, fix=f"Build it with NCCL: {BUILD_COMMAND} --with-cuda")
    if "launcher_error" in facts:
        what = f"horovodrun cannot start: {facts['launcher_error']}."
        yield Problem(what=what, fix=f"Build it with the patches for this Python: {BUILD_COMMAND} --force")
