"""Execute a `BuildPlan`: run its steps in order, write a log, and cache the wheel under the key of the plan."""

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
from unitrain.horovod_wheel import check
from unitrain.horovod_wheel.patches import PATCHES, apply_patches
from unitrain.horovod_wheel.plan import HOROVOD, SDIST_SHA256, BuildPlan, BuildStep

_PERCENT = re.compile(r"^\s*\[\s*(\d+)%\]")
_ERROR = re.compile(r"\b(fatal )?error\b[: ]|^E: |\bKilled\b|No space left", re.IGNORECASE)
# (pattern in the log, explanation and fix). The first match is reported.
_HINTS: tuple[tuple[str, str], ...] = (
    (
        r"No space left on device",
        "The disk of the cache is full. Use another disk: unitrain horovod build --cache-dir DIR",
    ),
    (
        r"Killed|cannot allocate memory|virtual memory exhausted",
        "The compilers needed more memory than this host has. Retry: unitrain horovod build --jobs 1",
    ),
    (
        r"No matching distribution|Temporary failure in name resolution|Connection refused|ConnectTimeout|ProxyError",
        "pip cannot download Horovod. Set the index of pip (PIP_INDEX_URL), or store the sdist as {sdist}",
    ),
    (
        r"externally-managed-environment",
        "Packages cannot be installed into this Python. "
        "Use a virtual environment: python3 -m venv .venv && . .venv/bin/activate",
    ),
    (
        r"Could NOT find MPI|mpi\.h: No such file",
        "The MPI installation is incomplete. Retry: unitrain horovod build --without-mpi",
    ),
    (r"unsupported GNU version", "nvcc does not support this g++. Use an older one: CXX=g++-12 unitrain horovod build"),
)


class Reporter(Protocol):
    """Receives the progress of a build."""

    def report_step(self, step: BuildStep, *, is_skipped: bool) -> None:
        """Report that a step starts or is skipped."""

    def report_percent(self, percent: int) -> None:
        """Report the compilation progress in percent."""


def find_cached(plan: BuildPlan) -> Path | None:
    """Return the cached wheel of this plan, or None."""
    return plan.wheel if plan.wheel.is_file() else None


def is_installed(plan: BuildPlan) -> bool:
    """Return whether this build is installed and usable. Such a build must not be reinstalled, because a reinstallation
    would break running jobs."""
    report = check.inspect()
    return report.is_usable and report.key == plan.key


def run(plan: BuildPlan, inherited: Mapping[str, str], reporter: Reporter, *, force: bool = False) -> Path:
    """Build the wheel (unless it is cached and `force` is False), run the install steps, and return the path of the
    wheel. `inherited` are the environment variables that the commands inherit.

    Raises HorovodBuildError. If a command fails, the message contains the failed step, the error in its output, and the
    path of the log.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    plan.sdist.parent.mkdir(parents=True, exist_ok=True)
    environment = plan.environment(inherited)
    # A concurrent build of the same wheel waits here and then uses the cached wheel, unless `force` is true.
    with contextlib.ExitStack() as locks, plan.log.open("a") as log:
        _lock(plan.folder / "lock", locks)
        if force or find_cached(plan) is None:
            log.truncate(0)
            shutil.rmtree(plan.work, ignore_errors=True)
            plan.work.mkdir()
            for step in plan.build_steps:
                if step.shared_folder is None:
                    _run_step(step, plan, environment, log.write, reporter)
                else:
                    _run_in_shared_folder(
                        step, step.shared_folder, plan, environment, log.write, reporter, locks, force=force
                    )
            shutil.rmtree(plan.work, ignore_errors=True)
        for step in plan.install_steps:
            _run_step(step, plan, environment, log.write, reporter)
    return plan.wheel


def _lock(file: Path, locks: contextlib.ExitStack, mode: int = fcntl.LOCK_EX) -> IO[str]:
    """Lock `file` until `locks` closes. Return the open file, with which the caller can change the lock's mode."""
    lock = locks.enter_context(file.open("w"))
    _set_lock(lock, mode)
    return lock


def _set_lock(lock: IO[str], mode: int) -> None:
    with contextlib.suppress(OSError):  # some network file systems do not support locks
        fcntl.flock(lock, mode)


def _run_in_shared_folder(
    step: BuildStep,
    folder: Path,
    plan: BuildPlan,
    environment: Mapping[str, str],
    write: Callable[[str], object],
    reporter: Reporter,
    locks: contextlib.ExitStack,
    *,
    force: bool,
) -> None:
    """Run a step that fills a folder shared with other builds, unless the folder is complete and `force` is False.

    The folder is emptied first, and `step.completion_marker` is created in it last, so an interrupted step is repeated.
    Two locks protect the folder. Each build holds the first lock until `locks` closes: in shared mode, but with `force`
    in exclusive mode until the folder is filled. Therefore, a build with `force` cannot empty the folder while other
    builds use it. The second lock is held while the folder is filled, so only one build at a time fills it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    in_use = _lock(folder.with_name(f"{folder.name}.lock"), locks, fcntl.LOCK_EX if force else fcntl.LOCK_SH)
    with contextlib.ExitStack() as filling:
        _lock(folder.with_name(f"{folder.name}.filling.lock"), filling)
        if force or not _is_done(step):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        _run_step(step, plan, environment, write, reporter)
        Path(str(step.completion_marker)).touch()
    _set_lock(in_use, fcntl.LOCK_SH)  # other builds may now use the folder, also after `force`


def _is_done(step: BuildStep) -> bool:
    return step.completion_marker is not None and Path(step.completion_marker).exists()


def _run_step(
    step: BuildStep, plan: BuildPlan, environment: Mapping[str, str], write: Callable[[str], object], reporter: Reporter
) -> None:
    is_skipped = _is_done(step)
    reporter.report_step(step, is_skipped=is_skipped)
    write(f"\n### {step.name}: {step.description}{' (not needed)' if is_skipped else ''}\n")
    if is_skipped:
        return
    if not step.argv:
        _ACTIONS[step.name](plan)
        return
    write(" ".join(step.argv) + "\n")
    lines: list[str] = []
    # The working directory must not contain a `horovod` folder, because Python would import it.
    cwd = plan.work if plan.work.is_dir() else plan.folder
    with _start_process(step, environment, cwd) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            write(line)
            if match := _PERCENT.match(line.strip()):
                reporter.report_percent(int(match.group(1)))
    if process.returncode != 0:
        raise HorovodBuildError(_describe_failure(step, process.returncode, lines, plan))


@contextlib.contextmanager
def _start_process(step: BuildStep, environment: Mapping[str, str], cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """Context manager that runs the command of a step in a separate session. If the context ends with an exception,
    such as KeyboardInterrupt, the command and its compilers are killed."""
    with subprocess.Popen(
        step.argv,
        cwd=cwd,
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


def _describe_failure(step: BuildStep, returncode: int, lines: list[str], plan: BuildPlan) -> str:
    """Return the failed step, the error in its output, and a fix."""
    error_lines = [line.strip() for line in lines if _ERROR.search(line)] or [line.strip() for line in lines[-1:]]
    text = "".join(lines)
    hint = next((hint for pattern, hint in _HINTS if re.search(pattern, text, re.IGNORECASE)), None)
    advice = (hint or "See the log, and retry with: unitrain horovod build --force").format(sdist=plan.sdist)
    first = error_lines[0][:400] if error_lines else "it printed nothing"
    problem = f"Step {step.name!r} of the Horovod build failed with exit status {returncode}: {first}"
    return f"{problem}. {advice}\nLog: {plan.log}"


def _unpack(plan: BuildPlan) -> None:
    digest = hashlib.sha256(plan.sdist.read_bytes()).hexdigest()
    if digest != SDIST_SHA256:
        raise HorovodBuildError(
            f"{plan.sdist} is not the sdist of Horovod {HOROVOD}: its sha256 is {digest}, expected {SDIST_SHA256}. "
            f"Remove it and build again: rm {plan.sdist}"
        )
    extract(plan.sdist, plan.work)


def extract(path: Path, folder: Path) -> None:
    """Extract the tar archive `path` into `folder`, with the "data" filter if this Python has it (3.11.4 or later)."""
    with tarfile.open(path) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)


def _patch(plan: BuildPlan) -> None:
    apply_patches(plan.source, PATCHES)
    record = {"key": plan.key, **plan.facts}
    (plan.source / "horovod" / check.RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n")


def _link(plan: BuildPlan) -> None:
    """Create symlinks: libnccl.so for the linker and, with a CUDA toolkit from pip, libcudart.so and lib64 for CMake.
    The links are necessary because pip's CUDA wheels contain only libraries with version numbers in their names."""
    assert plan.nccl is not None
    folder = plan.work / "nccl"
    (folder / "lib").mkdir(parents=True)
    (folder / "include").symlink_to(Path(plan.nccl, "include"))
    patterns = ("lib/libnccl.so*", "lib64/libnccl.so*", "lib/*/libnccl.so*")
    library = next((path for pattern in patterns for path in sorted(Path(plan.nccl).glob(pattern))), None)
    if library is None:
        raise HorovodBuildError(
            f"{plan.nccl} has the headers of NCCL but no libnccl.so. "
            "Use a folder with both: HOROVOD_NCCL_HOME=... unitrain horovod build"
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
            f"The build created {built.name} instead of {plan.wheel.name}. "
            f"Install it manually: pip install --no-deps --force-reinstall {built}"
        )
    with zipfile.ZipFile(built) as archive:
        if not any(name.startswith("horovod/torch/mpi_lib_v2") for name in archive.namelist()):
            raise HorovodBuildError(
                f"The wheel {built} has no horovod/torch/mpi_lib_v2 library. See the log of the compilation: {plan.log}"
            )
    built.replace(plan.wheel)
    (plan.folder / "build.json").write_text(
        json.dumps(
            {"key": plan.key, **plan.facts, "built": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}, indent=2
        )
    )


def _check(plan: BuildPlan) -> None:
    report = check.inspect()
    if not report.is_usable:
        raise HorovodBuildError("\n".join(f"{problem.what} {problem.fix}" for problem in report.problems))
    if report.key != plan.key:
        raise HorovodBuildError(
            f"The wheel was installed, but Python imports another Horovod from {report.folder}. "
            f"Remove that installation, then build again: rm -r {report.folder}"
        )


_ACTIONS: Mapping[str, Callable[[BuildPlan], None]] = {
    "unpack": _unpack,
    "patch": _patch,
    "link": _link,
    "store": _store,
    "check": _check,
}
