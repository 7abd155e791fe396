"""The changes that Horovod 0.28.1's sources need, as data, and their strict application.

`build` changes make it compile with today's torch, CMake, Python and machines without a CUDA toolkit; `mend` changes
repair behaviour at run time, and `unitrain horovod check` reports whether the installed Horovod has them.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unitrain.errors import HorovodBuildError


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One replacement in one file of the sources; `before` must occur exactly once."""

    file: str
    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class Change:
    """One reason to touch the sources, with every edit it takes."""

    name: str
    kind: Literal["build", "mend"]
    reason: str
    edits: tuple[Edit, ...]


_CXX_STANDARD = ("set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)")
_IF_ASKED = "if(DEFINED HOROVOD_GPU_OPERATIONS)\n    check_language(CUDA)\nendif()\n"

CHANGES: tuple[Change, ...] = (
    Change(
        name="cxx20",
        kind="build",
        reason="torch's headers refuse a compiler below C++17, newer ones below C++20; Horovod asks for C++14.",
        edits=(
            Edit(file="CMakeLists.txt", before=_CXX_STANDARD[0], after=_CXX_STANDARD[1]),
            Edit(file="horovod/torch/CMakeLists.txt", before=_CXX_STANDARD[0], after=_CXX_STANDARD[1]),
        ),
    ),
    Change(
        name="no-toolkit",
        kind="build",
        reason="With a CUDA torch, CMake uses a CUDA toolkit (any it finds, fitting or not) even for CPU operations.",
        edits=(
            Edit(
                file="CMakeLists.txt",
                before="check_language(CUDA)\nif(NOT CMAKE_CUDA_COMPILER)\n",
                after=_IF_ASKED + "if(NOT CMAKE_CUDA_COMPILER AND DEFINED HOROVOD_GPU_OPERATIONS)\n",
            ),
            Edit(
                file="cmake/Modules/FindPytorch.cmake",
                before='string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)\n',
                after='string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)\n'
                'if("$ENV{HOROVOD_GPU_OPERATIONS}" STREQUAL "")\n    set(Pytorch_CUDA FALSE)\nendif()\n',
            ),
        ),
    ),
    Change(
        name="no-distutils",
        kind="build",
        reason="Python 3.12 has no distutils: without it Python.h is not found, and horovodrun does not start.",
        edits=(
            Edit(
                file="horovod/torch/CMakeLists.txt",
                before="from distutils.sysconfig import get_python_inc; print(get_python_inc())",
                after="import sysconfig; print(sysconfig.get_path('include'))",
            ),
            Edit(
                file="horovod/runner/js_run.py",
                before="from distutils.spawn import find_executable\n",
                after="from shutil import which as find_executable\n",
            ),
        ),
    ),
    Change(
        name="any-path",
        kind="build",
        reason="The build folder's path is read as a regular expression: a '+' in it, and the wheel lacks its library.",
        edits=(
            Edit(
                file="cmake/Utilities.cmake",
                before='string(REGEX REPLACE "${PROJECT_SOURCE_DIR}(/)?" "" SUB_FOLDER "${CMAKE_CURRENT_SOURCE_DIR}")',
                after='file(RELATIVE_PATH SUB_FOLDER "${PROJECT_SOURCE_DIR}" "${CMAKE_CURRENT_SOURCE_DIR}")',
            ),
        ),
    ),
    Change(
        name="build-record",
        kind="build",
        reason="The wheel carries what it was built from, so that `unitrain horovod check` can tell later.",
        edits=(
            Edit(
                file="setup.py",
                before="      packages=find_packages(),\n",
                after="      packages=find_packages(),\n      package_data={'horovod': ['unitrain_build.json']},\n",
            ),
        ),
    ),
    Change(
        name="gloo-interface",
        kind="mend",
        reason="Process sets, the one of all ranks too, ignore HOROVOD_GLOO_IFACE and advertise what the own host name "
        "resolves to: several hosts cannot connect where that is 127.0.1.1, Debian's default, or another useless one.",
        edits=(
            Edit(
                file="horovod/common/gloo/gloo_context.cc",
                before="  attr device_attr;\n  device_attr.iface = gloo_iface_;\n  device_attr.ai_family = AF_UNSPEC;\n"
                "  auto dev = CreateDevice(device_attr);\n\n  global_ctx = global_context.ctx;\n",
                after="  gloo_iface_ = global_context.gloo_iface_;\n"
                "  attr device_attr;\n  device_attr.iface = gloo_iface_;\n  device_attr.ai_family = AF_UNSPEC;\n"
                "  auto dev = CreateDevice(device_attr);\n\n  global_ctx = global_context.ctx;\n",
            ),
        ),
    ),
    Change(
        name="gloo-stall",
        kind="mend",
        reason="Under the Gloo controller the list of ranks stays empty (reserve instead of resize), so the stall "
        "inspector sees nobody missing: HOROVOD_STALL_SHUTDOWN_TIME_SECONDS does nothing and the job hangs for ever.",
        edits=(
            Edit(
                file="horovod/common/gloo/gloo_controller.cc",
                before="global_ranks_.reserve(size_);",
                after="global_ranks_.resize(size_);",
            ),
        ),
    ),
    Change(
        name="gloo-send-buffer",
        kind="mend",
        reason="A reducescatter sets the send buffer of its connections to the size of its message, for good: after a "
        "small one, a broadcast of 16 MB takes 400 times as long as before. Left alone, the kernel sizes it.",
        edits=(
            Edit(
                file="third_party/gloo/gloo/transport/tcp/pair.cc",
                before="      sendBufferSize_(0),",
                after="      sendBufferSize_(kMaxSendBufferSize),",
            ),
        ),
    ),
    Change(
        name="mpi-signals",
        kind="mend",
        reason="horovodrun --mpi becomes a shell that waits for mpirun: the SIGTERM that a scheduler sends ends the "
        "shell alone, and mpirun and all ranks stay behind.",
        edits=(
            Edit(
                file="horovod/runner/mpi_run.py",
                before="['/bin/sh', '-c', mpirun_command]",
                after="['/bin/sh', '-c', 'exec ' + mpirun_command]",
            ),
        ),
    ),
)


def mending(changes: tuple[Change, ...] = CHANGES) -> tuple[str, ...]:
    """The names of the changes that repair run-time behaviour."""
    return tuple(change.name for change in changes if change.kind == "mend")


def digest(changes: tuple[Change, ...] = CHANGES) -> str:
    """A short fingerprint of all edits; another patch set is another wheel."""
    parts = (part for change in changes for edit in change.edits for part in (edit.file, edit.before, edit.after))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def apply(source: Path, changes: tuple[Change, ...] = CHANGES) -> tuple[str, ...]:
    """Change the sources under `source` in place and return the names of the changes that were not in yet.

    All or nothing: every edit is tried in memory before the first file is written.
    """
    texts: dict[str, str] = {}
    applied: list[str] = []
    for change in changes:
        fresh = [_edited(source, texts, change, edit) for edit in change.edits]
        if any(fresh):
            applied.append(change.name)
    for file, text in texts.items():
        (source / file).write_text(text)
    return tuple(applied)


def _edited(source: Path, texts: dict[str, str], change: Change, edit: Edit) -> bool:
    """Put the edited text of one file into `texts`; False when the edit was in the sources already."""
    path = source / edit.file
    if edit.file not in texts and not path.is_file():
        raise HorovodBuildError(
            f"Change {change.name!r} is for {edit.file}, which the sources in {source} do not have. "
            "Give it the unpacked sdist of Horovod 0.28.1."
        )
    text = texts.get(edit.file) or path.read_text()
    # Some `after` texts contain their `before`, so what is in already is taken out before counting.
    untouched = text.replace(edit.after, "").count(edit.before)
    if edit.after in text and untouched == 0:
        return False
    if untouched != 1:
        raise HorovodBuildError(
            f"Change {change.name!r} expects this text once in {edit.file}, and found it {untouched} times: "
            f"{edit.before.strip()!r}. Build from the unchanged sdist of Horovod 0.28.1."
        )
    texts[edit.file] = text.replace(edit.before, edit.after)
    return True


def shown(change: Change) -> Iterator[str]:
    """The lines of one change, as a short diff for `--dry-run`."""
    for edit in change.edits:
        yield f"{edit.file}"
        for line in difflib.ndiff(edit.before.splitlines(), edit.after.splitlines()):
            if line[0] in "+-":
                yield f"  {line}"
