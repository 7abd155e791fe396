"""What this machine has to build Horovod with: a look around, and the plain data it comes back with."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from unitrain.errors import MissingDependencyError

# One compiler process with torch's headers peaks a little below this.
BYTES_PER_JOB = 2 * 1024**3
BUILD_MODULES = ("pip", "setuptools", "wheel", "packaging")
PACKAGE_MANAGERS = ("apt-get", "dnf", "yum", "conda")
# Variables with which CMake, g++ and nvcc compile something else.
FLAGS = (
    *("CC", "CFLAGS", "CPPFLAGS", "CXXFLAGS", "LDFLAGS", "CUDAFLAGS", "CUDAHOSTCXX", "CMAKE_BUILD_TYPE"),
    *("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH"),
)


@dataclass(frozen=True, kw_only=True)
class Torch:
    """The installed torch; `cuda` is the version it was built for, `architectures` what its kernels run on ('9.0')."""

    version: str
    cuda: str | None
    cxx11_abi: bool
    architectures: tuple[str, ...] = ()
    visible_gpus: int = 0


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A program or library on disk and the version it reports."""

    path: str
    version: str


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Everything the plan depends on; None is 'not found here'.

    `flags` are the variables of FLAGS that are set. `cpu` describes the processor where they name the native one.
    """

    torch: Torch
    python: str
    python_tag: str
    platform: str
    libc: str
    jobs: int
    modules: frozenset[str]
    python_headers: bool
    make: str | None
    compiler: Tool | None
    cmake: Tool | None
    mpi: Tool | None
    toolkits: tuple[Tool, ...] = ()
    nccl: Tool | None = None
    flags: Mapping[str, str] = field(default_factory=dict)
    cpu: str | None = None
    package_manager: str | None = None
    root: bool = False


def detect(environment: Mapping[str, str]) -> Machine:
    """Look at this Python, its torch, and the compilers and libraries that `environment` leads to."""
    searched = environment.get("PATH", os.defpath)
    flags = {name: value for name in FLAGS if (value := environment.get(name))}
    return Machine(
        torch=_torch(),
        python=sys.executable,
        python_tag=_python_tag(),
        platform=sysconfig.get_platform().replace("-", "_"),
        libc=" ".join(platform.libc_ver()),
        jobs=_jobs(),
        modules=frozenset(name for name in BUILD_MODULES if importlib.util.find_spec(name) is not None),
        python_headers=Path(sysconfig.get_path("include"), "Python.h").is_file(),
        make=shutil.which("make", path=searched) or shutil.which("gmake", path=searched),
        compiler=_compiler(environment.get("CXX"), searched),
        cmake=_cmake(environment.get("HOROVOD_CMAKE"), searched),
        mpi=_mpi(searched),
        toolkits=tuple(_toolkits(environment, searched)),
        nccl=_nccl(environment.get("HOROVOD_NCCL_HOME")),
        flags=flags,
        cpu=_cpu() if any("=native" in value for value in flags.values()) else None,
        package_manager=next((name for name in PACKAGE_MANAGERS if shutil.which(name, path=searched)), None),
        root=os.geteuid() == 0,
    )


def _python_tag() -> str:
    """As wheels are named, `cp311-cp311`; the second half tells debug and free-threaded builds apart."""
    abi = str(sysconfig.get_config_var("SOABI")).split("-")[1]
    return f"cp{sys.version_info.major}{sys.version_info.minor}-cp{abi}"


def _torch() -> Torch:
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError(
            f"Horovod is built for the torch that is installed, and torch cannot be imported: {error}. "
            "Install it first with: pip install torch"
        ) from error
    return Torch(
        version=str(torch.__version__),
        cuda=torch.version.cuda,
        cxx11_abi=bool(torch.compiled_with_cxx11_abi()),
        architectures=tuple(_architectures(torch._C._cuda_getArchFlags() if torch.version.cuda else "")),
        visible_gpus=torch.cuda.device_count() if torch.version.cuda else 0,
    )


def _architectures(flags: str | None) -> Iterator[str]:
    """`sm_75 sm_90 compute_120` -> 7.5, 9.0; taken from torch itself because its public list is empty without a GPU."""
    for digits in re.findall(r"\bsm_(\d+)\b", flags or ""):
        yield f"{digits[:-1]}.{digits[-1]}"


def _jobs() -> int:
    """As many compilers as there are cores for this process, fewer where memory would not hold them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    meminfo = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text() if meminfo.is_file() else "")
    return max(1, min(cores, int(found.group(1)) * 1024 // BYTES_PER_JOB)) if found else cores


def _cpu() -> str:
    """Return the architecture and a digest of what the processor can do, for wheels that run on such a one only."""
    file = Path("/proc/cpuinfo")
    text = file.read_text() if file.is_file() else platform.processor()
    features = sorted(set(re.findall(r"^(?:model name|flags|Features|CPU part)\s*:.*$", text, re.MULTILINE))) or [text]
    return f"{platform.machine()} {hashlib.sha256(''.join(features).encode()).hexdigest()[:12]}"


def _said(*command: str) -> str:
    """What a program prints about itself, '' when it cannot be run."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _compiler(named: str | None, searched: str) -> Tool | None:
    """CXX when it is set, else what CMake would take."""
    for name in (named,) if named else ("c++", "g++", "clang++"):
        path = shutil.which(name, path=searched)
        first_line = _said(path, "--version").partition("\n")[0] if path else ""
        if path and first_line:
            return Tool(path=path, version=first_line)
    return None


def _cmake(named: str | None, searched: str) -> Tool | None:
    """The environment's own cmake (pip's package) before the system's, which is often old."""
    beside_python = str(Path(sys.executable).parent)
    path = named or shutil.which("cmake", path=beside_python + os.pathsep + searched)
    found = re.search(r"cmake version (\S+)", _said(path, "--version")) if path else None
    return Tool(path=path, version=found.group(1)) if path and found else None


def _mpi(searched: str) -> Tool | None:
    path = next((path for name in ("mpicxx", "mpic++") if (path := shutil.which(name, path=searched))), None)
    if path is None:
        return None
    # Open MPI's wrapper knows --showme; MPICH and its descendants (Intel, Cray) name themselves through -v.
    said = _said(path, "--showme:version") or _said(path, "-v")
    found = re.search(r"(Open MPI|MPICH|MVAPICH2?|Intel\S* MPI)\D*?(\d+(?:\.\d+)+)", said)
    return Tool(path=path, version=" ".join(found.groups()) if found else "unknown MPI")


def _toolkits(environment: Mapping[str, str], searched: str) -> Iterator[Tool]:
    """Every CUDA toolkit that is really there, the named ones first.

    A folder counts only with its own nvcc and headers: an nvcc on PATH can be a wrapper far from its toolkit.
    """
    nvcc = shutil.which("nvcc", path=searched)
    folders = [environment.get(name) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")]
    folders += [str(Path(nvcc).resolve().parent.parent)] if nvcc else []
    folders += ["/usr/local/cuda", *sorted(map(str, Path("/usr/local").glob("cuda-*")), reverse=True)]
    seen: set[Path] = set()
    for folder in filter(None, folders):
        root = Path(folder).resolve()
        headers = (root / "include", *root.glob("targets/*/include"))
        if root in seen or not any((header / "cuda_runtime.h").is_file() for header in headers):
            continue
        seen.add(root)
        found = re.search(r"release (\d+\.\d+)", _said(str(root / "bin" / "nvcc"), "--version"))
        if found:
            yield Tool(path=str(root), version=found.group(1))


def _nccl(named: str | None) -> Tool | None:
    """The NCCL that torch itself loads (pip's package), so that one process never holds two of them."""
    folders = [named] if named else []
    spec = importlib.util.find_spec("nvidia")
    folders += [f"{entry}/nccl" for entry in (spec.submodule_search_locations or ())] if spec else []
    folders += ["/usr"]
    for folder in map(Path, folders):
        header = folder / "include" / "nccl.h"
        if header.is_file():
            numbers = re.findall(r"#define NCCL_(?:MAJOR|MINOR|PATCH)\s+(\d+)", header.read_text(errors="replace"))
            return Tool(path=str(folder), version=".".join(numbers[:3]))
    return None
