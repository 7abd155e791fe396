"""Run a `BuildPlan`: its steps in order, with progress, one log, and the wheel cached under the plan's key."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Protocol

from unitrain.errors import HorovodBuildError
from unitrain.horovod_wheel import check, patches
from unitrain.horovod_wheel.plan import HOROVOD, SDIST_SHA256, BuildPlan, Step

_PERCENT = re.compile(r"^\s*\[\s*(\d+)%\]")
_ERROR = re.compile(r"\b(fatal )?error\b[: ]|^E: |\bKilled\b|No space left", re.IGNORECASE)
# What a line of the log means, and what to do about it; the first that matches is told.
_HINTS: tuple[tuple[str, str], ...] = (
    (r"No space left on device", "The disk of the cache is full. Name another: unitrain horovod build --cache-dir DIR"),
    (
        r"Killed|cannot allocate memory|virtual memory exhausted",
        "Memory ran out. Retry: unitrain horovod build --jobs 1",
    ),
    (
        r"No matching distribution|Temporary failure in name resolution|Connection refused|ConnectTimeout|ProxyError",
        "pip cannot fetch it from here. Set pip's index (PIP_INDEX_URL) or put the sdist here: {sdist}",
    ),
    (
        r"externally-managed-environment",
        "This Python takes no packages. Use a virtual environment: python3 -m venv .venv && . .venv/bin/activate",
    ),
    (r"Could NOT find MPI|mpi\.h: No such file", "MPI is incomplete here. Retry: unitrain horovod build --without-mpi"),
    (r"unsupported GNU version", "nvcc refuses this g++. Name an older one: CXX=g++-12 unitrain horovod build"),
)


class Reporter(Protocol):
    """Where progress goes."""

    def step(self, step: Step, *, skipped: bool) -> None:
        """A step begins, or is not needed."""

    def percent(self, done: int) -> None:
        """How far the compilation is."""


def cached(plan: BuildPlan) -> Path | None:
    """The finished wheel of this plan, if an earlier build left it."""
    return plan.wheel if plan.wheel.is_file() else None


def installed(plan: BuildPlan) -> bool:
    """Whether this very build is installed and works; putting it in again would pull it from under running jobs."""
    report = check.inspect()
    return report.usable and report.key == plan.key


def run(plan: BuildPlan, inherited: Mapping[str, str], reporter: Reporter, *, force: bool = False) -> Path:
    """Build what the cache lacks (everything with `force`), run the install steps, and return the wheel's path.

    Raises HorovodBuildError naming the step, the line of the log that says why, and the log.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    plan.sdist.parent.mkdir(parents=True, exist_ok=True)
    environment = plan.environment(inherited)
    # One build of one wheel at a time: a second waits, and then finds the wheel in the cache.
    with contextlib.ExitStack() as held, plan.log.open("a") as log:
        _lock(plan.folder / "lock", held)
        if force or cached(plan) is None:
            log.truncate(0)
            shutil.rmtree(plan.work, ignore_errors=True)
            plan.work.mkdir()
            for step in plan.build_steps:
                if step.fills is None:
                    _run_step(step, plan, environment, log.write, reporter)
                else:
                    _fill(step, step.fills, plan, environment, log.write, reporter, held, force=force)
            shutil.rmtree(plan.work, ignore_errors=True)
        for step in plan.install_steps:
            _run_step(step, plan, environment, log.write, reporter)
    return plan.wheel


def _lock(file: Path, held: contextlib.ExitStack, mode: int = fcntl.LOCK_EX) -> IO[str]:
    """Lock a file until `held` closes, and return it, so that another mode can be set on it."""
    lock = held.enter_context(file.open("w"))
    _set_lock(lock, mode)
    return lock


def _set_lock(lock: IO[str], mode: int) -> None:
    with contextlib.suppress(OSError):  # some network file systems have no locks
        fcntl.flock(lock, mode)


def _fill(
    step: Step,
    folder: Path,
    plan: BuildPlan,
    environment: Mapping[str, str],
    write: Callable[[str], object],
    reporter: Reporter,
    held: contextlib.ExitStack,
    *,
    force: bool,
) -> None:
    """Run a step that fills a folder which builds with other keys use too, unless the folder is complete.

    The folder is emptied first, and `step.unless` is created in it last, so that an interrupted step does not count.
    Until `held` closes, no other build empties the folder, as it would do with `force`.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    in_use = _lock(folder.with_name(f"{folder.name}.lock"), held, fcntl.LOCK_EX if force else fcntl.LOCK_SH)
    with contextlib.ExitStack() as filling:
        _lock(folder.with_name(f"{folder.name}.filling.lock"), filling)
        if force or not _is_done(step):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        _run_step(step, plan, environment, write, reporter)
        Path(str(step.unless)).touch()
    _set_lock(in_use, fcntl.LOCK_SH)


def _is_done(step: Step) -> bool:
    return step.unless is not None and Path(step.unless).exists()


def _run_step(
    step: Step, plan: BuildPlan, environment: Mapping[str, str], write: Callable[[str], object], reporter: Reporter
) -> None:
    skipped = _is_done(step)
    reporter.step(step, skipped=skipped)
    write(f"\n### {step.name}: {step.says}{' (not needed)' if skipped else ''}\n")
    if skipped:
        return
    if not step.argv:
        _ACTIONS[step.name](plan)
        return
    write(" ".join(step.argv) + "\n")
    lines: list[str] = []
    # A folder without a `horovod` of its own: Python would import that one.
    where = plan.work if plan.work.is_dir() else plan.folder
    with _process(step, environment, where) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            write(line)
            if found := _PERCENT.match(line.strip()):
                reporter.percent(int(found.group(1)))
    if process.returncode != 0:
        raise HorovodBuildError(_failure(step, process.returncode, lines, plan))


@contextlib.contextmanager
def _process(step: Step, environment: Mapping[str, str], where: Path) -> Iterator[subprocess.Popen[str]]:
    """The step's command in a session of its own, so that an interrupt ends the compilers under it too."""
    with subprocess.Popen(
        step.argv,
        cwd=where,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            yield process
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise


def _failure(step: Step, returncode: int, lines: list[str], plan: BuildPlan) -> str:
    """One sentence of what failed, the line of the log that says why, and what to do."""
    telling = [line.strip() for line in lines if _ERROR.search(line)] or [line.strip() for line in lines[-1:]]
    text = "".join(lines)
    hint = next((hint for pattern, hint in _HINTS if re.search(pattern, text, re.IGNORECASE)), None)
    advice = (hint or "See the log, and retry with: unitrain horovod build --force").format(sdist=plan.sdist)
    first = telling[0][:400] if telling else "it printed nothing"
    what = f"Step {step.name!r} of the Horovod build failed with exit status {returncode}: {first}"
    return f"{what}. {advice}\nLog: {plan.log}"


def _unpack(plan: BuildPlan) -> None:
    found = hashlib.sha256(plan.sdist.read_bytes()).hexdigest()
    if found != SDIST_SHA256:
        raise HorovodBuildError(
            f"{plan.sdist} is not the sdist of Horovod {HOROVOD}: its sha256 is {found}, expected {SDIST_SHA256}. "
            f"Remove it and build again: rm {plan.sdist}"
        )
    with tarfile.open(plan.sdist) as archive:
        archive.extractall(plan.work, filter="data")


def _patch(plan: BuildPlan) -> None:
    patches.apply(plan.source)
    record = {"key": plan.key, **plan.facts}
    (plan.source / "horovod" / check.RECORD).write_text(json.dumps(record, indent=2) + "\n")


def _link(plan: BuildPlan) -> None:
    """pip's CUDA wheels carry versioned libraries only; the linker looks for libnccl.so, CMake for libcudart.so."""
    assert plan.nccl is not None
    folder = plan.work / "nccl"
    (folder / "lib").mkdir(parents=True)
    (folder / "include").symlink_to(Path(plan.nccl, "include"))
    patterns = ("lib/libnccl.so*", "lib64/libnccl.so*", "lib/*/libnccl.so*")
    library = next((path for pattern in patterns for path in sorted(Path(plan.nccl).glob(pattern))), None)
    if library is None:
        raise HorovodBuildError(
            f"{plan.nccl} has the headers of NCCL and no libnccl.so. "
            "Name a folder with both: HOROVOD_NCCL_HOME=... unitrain horovod build"
        )
    (folder / "lib" / "libnccl.so").symlink_to(library)
    libraries = Path(str(plan.toolkit), "lib")
    if any(step.name == "toolkit" for step in plan.build_steps):
        for runtime in libraries.glob("libcudart.so.*"):
            _link_once(libraries / "libcudart.so", runtime.name)
        _link_once(libraries.with_name("lib64"), "lib")


def _link_once(link: Path, target: str) -> None:
    with contextlib.suppress(FileExistsError):  # another build may have linked it
        link.symlink_to(target)


def _store(plan: BuildPlan) -> None:
    built = next((plan.work / "out").glob("horovod-*.whl"))
    if built.name != plan.wheel.name:
        raise HorovodBuildError(
            f"The build made {built.name} where {plan.wheel.name} was planned. "
            f"Install it by hand: pip install --no-deps --force-reinstall {built}"
        )
    with zipfile.ZipFile(built) as archive:
        if not any(name.startswith("horovod/torch/mpi_lib_v2") for name in archive.namelist()):
            raise HorovodBuildError(
                f"The wheel {built} has no horovod/torch/mpi_lib_v2 library. See what was compiled where: {plan.log}"
            )
    built.replace(plan.wheel)
    (plan.folder / "build.json").write_text(
        json.dumps(
            {"key": plan.key, **plan.facts, "built": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}, indent=2
        )
    )


def _check(plan: BuildPlan) -> None:
    report = check.inspect()
    if not report.usable:
        raise HorovodBuildError("\n".join(f"{problem.what} {problem.fix}" for problem in report.problems))
    if report.key != plan.key:
        raise HorovodBuildError(
            f"The wheel was installed, and Python imports another Horovod from {report.folder}. "
            f"Remove that one, then build again: rm -r {report.folder}"
        )


_ACTIONS: Mapping[str, Callable[[BuildPlan], None]] = {
    "unpack": _unpack,
    "patch": _patch,
    "link": _link,
    "store": _store,
    "check": _check,
}
