"""Detect the compilers and libraries for a Horovod build on this machine."""

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

# Peak memory of one compiler process with torch's headers.
BYTES_PER_JOB = 2 * 1024**3
BUILD_MODULES = ("pip", "setuptools", "wheel", "packaging")
PACKAGE_MANAGERS = ("apt-get", "dnf", "yum", "conda")
# Environment variables that change the output of CMake, g++ and nvcc.
FLAGS = (
    *("CC", "CFLAGS", "CPPFLAGS", "CXXFLAGS", "LDFLAGS", "CUDAFLAGS", "CUDAHOSTCXX", "CMAKE_BUILD_TYPE"),
    *("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH"),
)


@dataclass(frozen=True, kw_only=True)
class TorchInstallation:
    """The installed torch. `cuda` is its CUDA version, and `architectures` are the GPU architectures of its kernels,
    such as '9.0'.
    """

    version: str
    cuda: str | None
    cxx11_abi: bool
    architectures: tuple[str, ...] = ()
    visible_gpus: int = 0


@dataclass(frozen=True, kw_only=True)
class Tool:
    """The path and the version of a program or library."""

    path: str
    version: str


@dataclass(frozen=True, kw_only=True)
class Machine:
    """All inputs of the build plan. None means that a component was not found.

    `named_compiler` is the value of CXX, or None if CXX is not set. If CXX does not name an existing program,
    `compiler` is None. `flags` are the variables of FLAGS that are set. `cpu` describes the processor if these flags
    select the native architecture.
    """

    torch: TorchInstallation
    python: str
    python_tag: str
    platform: str
    libc: str
    jobs: int
    modules: frozenset[str]
    has_python_headers: bool
    make: str | None
    compiler: Tool | None
    cmake: Tool | None
    mpi: Tool | None
    named_compiler: str | None = None
    toolkits: tuple[Tool, ...] = ()
    nccl: Tool | None = None
    flags: Mapping[str, str] = field(default_factory=dict)
    cpu: str | None = None
    package_manager: str | None = None
    is_root: bool = False


def detect(environment: Mapping[str, str]) -> Machine:
    """Detect this Python, its torch, and the compilers and libraries selected by `environment`."""
    search_path = environment.get("PATH", os.defpath)
    flags = {name: value for name in FLAGS if (value := environment.get(name))}
    return Machine(
        torch=_detect_torch(),
        python=sys.executable,
        python_tag=_read_python_tag(),
        platform=sysconfig.get_platform().replace("-", "_"),
        libc=" ".join(platform.libc_ver()),
        jobs=_choose_num_jobs(),
        modules=frozenset(name for name in BUILD_MODULES if importlib.util.find_spec(name) is not None),
        has_python_headers=Path(sysconfig.get_path("include"), "Python.h").is_file(),
        make=shutil.which("make", path=search_path) or shutil.which("gmake", path=search_path),
        compiler=_detect_compiler(environment.get("CXX"), search_path),
        cmake=_detect_cmake(environment.get("HOROVOD_CMAKE"), search_path),
        mpi=_detect_mpi(search_path),
        named_compiler=environment.get("CXX") or None,
        toolkits=tuple(_detect_toolkits(environment, search_path)),
        nccl=_detect_nccl(environment.get("HOROVOD_NCCL_HOME")),
        flags=flags,
        cpu=_detect_cpu() if any("=native" in value for value in flags.values()) else None,
        package_manager=next((name for name in PACKAGE_MANAGERS if shutil.which(name, path=search_path)), None),
        is_root=os.geteuid() == 0,
    )


def _read_python_tag() -> str:
    """Return the tag in wheel names, such as cp311-cp311. The second half identifies debug and free-threaded builds."""
    abi = str(sysconfig.get_config_var("SOABI")).split("-")[1]
    return f"cp{sys.version_info.major}{sys.version_info.minor}-cp{abi}"


def _detect_torch() -> TorchInstallation:
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError(
            f"Horovod is built for the installed torch, but torch cannot be imported: {error}. "
            "Install it first with: pip install torch"
        ) from error
    return TorchInstallation(
        version=str(torch.__version__),
        cuda=torch.version.cuda,
        cxx11_abi=bool(torch.compiled_with_cxx11_abi()),
        architectures=tuple(_parse_architectures(torch._C._cuda_getArchFlags() if torch.version.cuda else "")),
        visible_gpus=torch.cuda.device_count() if torch.version.cuda else 0,
    )


def _parse_architectures(flags: str | None) -> Iterator[str]:
    """Convert "sm_75 sm_90 compute_120" to 7.5 and 9.0. The flags are parsed because torch's public list of
    architectures is empty on a host without a GPU."""
    for digits in re.findall(r"\bsm_(\d+)\b", flags or ""):
        yield f"{digits[:-1]}.{digits[-1]}"


def _choose_num_jobs() -> int:
    """Return the number of compiler processes: one per usable core, limited by the available memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    meminfo = Path("/proc/meminfo")
    match = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text() if meminfo.is_file() else "")
    return max(1, min(cores, int(match.group(1)) * 1024 // BYTES_PER_JOB)) if match else cores


def _detect_cpu() -> str:
    """Return the architecture and a digest of the processor features, for wheels that require the same processor."""
    file = Path("/proc/cpuinfo")
    text = file.read_text() if file.is_file() else platform.processor()
    features = sorted(set(re.findall(r"^(?:model name|flags|Features|CPU part)\s*:.*$", text, re.MULTILINE))) or [text]
    return f"{platform.machine()} {hashlib.sha256(''.join(features).encode()).hexdigest()[:12]}"


def _run_and_read(*command: str) -> str:
    """Return the output of a command, or '' if it fails."""
    try:
        process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout if process.returncode == 0 else ""


def _detect_compiler(requested_path: str | None, search_path: str) -> Tool | None:
    """Return the compiler that CXX names or, if CXX is not set, the compiler that CMake selects by default."""
    for name in (requested_path,) if requested_path else ("c++", "g++", "clang++"):
        path = shutil.which(name, path=search_path)
        first_line = _run_and_read(path, "--version").partition("\n")[0] if path else ""
        if path and first_line:
            return Tool(path=path, version=first_line)
    return None


def _detect_cmake(requested_path: str | None, search_path: str) -> Tool | None:
    """Return the cmake at `requested_path`, or else the cmake next to this Python (from pip), or else the cmake on
    PATH, which is often older."""
    python_folder = str(Path(sys.executable).parent)
    path = requested_path or shutil.which("cmake", path=python_folder + os.pathsep + search_path)
    match = re.search(r"cmake version (\S+)", _run_and_read(path, "--version")) if path else None
    return Tool(path=path, version=match.group(1)) if path and match else None


def _detect_mpi(search_path: str) -> Tool | None:
    path = next((path for name in ("mpicxx", "mpic++") if (path := shutil.which(name, path=search_path))), None)
    if path is None:
        return None
    # The wrapper of Open MPI supports --showme, and MPICH and derived versions (Intel, Cray) support -v.
    output = _run_and_read(path, "--showme:version") or _run_and_read(path, "-v")
    match = re.search(r"(Open MPI|MPICH|MVAPICH2?|Intel\S* MPI)\D*?(\d+(?:\.\d+)+)", output)
    return Tool(path=path, version=" ".join(match.groups()) if match else "unknown MPI")


def _detect_toolkits(environment: Mapping[str, str], search_path: str) -> Iterator[Tool]:
    """Yield the complete CUDA toolkits, first the toolkits that environment variables name.

    A toolkit must contain nvcc and headers, because an nvcc on PATH may be a wrapper outside a toolkit.
    """
    nvcc = shutil.which("nvcc", path=search_path)
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
        match = re.search(r"release (\d+\.\d+)", _run_and_read(str(root / "bin" / "nvcc"), "--version"))
        if match:
            yield Tool(path=str(root), version=match.group(1))


def _detect_nccl(requested_folder: str | None) -> Tool | None:
    """Return the NCCL library in `requested_folder`, or else the library that torch uses (from pip), or else the
    library in /usr.

    The NCCL of torch is preferred, to avoid loading two versions in one process.
    """
    folders = [requested_folder] if requested_folder else []
    spec = importlib.util.find_spec("nvidia")
    folders += [f"{entry}/nccl" for entry in (spec.submodule_search_locations or ())] if spec else []
    folders += ["/usr"]
    for folder in map(Path, folders):
        header = folder / "include" / "nccl.h"
        if header.is_file():
            numbers = re.findall(r"#define NCCL_(?:MAJOR|MINOR|PATCH)\s+(\d+)", header.read_text(errors="replace"))
            return Tool(path=str(folder), version=".".join(numbers[:3]))
    return None
