"""Create a `BuildPlan` for a request and a machine: plain data for `--dry-run` and for execution by `build`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unitrain.errors import HorovodBuildError
from unitrain.horovod_wheel import requirements
from unitrain.horovod_wheel.machine import Machine, Tool
from unitrain.horovod_wheel.patches import PATCHES, RUNTIME_FIXES, patch_digest

HOROVOD = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
# The upper bounds follow the newest tested versions. Versions between the bounds work.
BUILD_REQUIREMENTS = {"setuptools": "setuptools>=64,<85", "wheel": "wheel", "packaging": "packaging"}
CMAKE = "cmake>=3.26,<5"
# With N jobs, a build takes about PARALLEL_SECONDS / N + SERIAL_SECONDS seconds, as measured on 2 cores (238 s of CPU
# time; 3% more with NCCL).
PARALLEL_SECONDS, SERIAL_SECONDS = 220.0, 25.0


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """The user's request. None selects the default for the machine."""

    cache: Path
    mpi: bool | None = None
    cuda: bool | None = None
    jobs: int | None = None
    install: bool = True


@dataclass(frozen=True, kw_only=True)
class BuildStep:
    """A step of a build: the command `argv` or, if `argv` is empty, the function for `name` in `build._ACTIONS`. The
    step is skipped if the file `completion_marker` exists.

    `shared_folder` is the folder to which the step writes, if builds with other keys share it. This folder is locked,
    and emptied before the step unless the step is skipped. After the step, the file `completion_marker` is created in
    the folder and marks the step as complete.
    """

    name: str
    description: str
    argv: tuple[str, ...] = ()
    completion_marker: str | None = None
    shared_folder: Path | None = None


@dataclass(frozen=True, kw_only=True)
class BuildPlan:
    """The steps and settings of a build. `facts` describe the environment of the wheel and determine its cache key."""

    key: str
    facts: Mapping[str, Any]
    settings: Mapping[str, str]
    path_prefix: tuple[str, ...]
    python_path_prefix: tuple[str, ...]
    folder: Path
    wheel: Path
    sdist: Path
    toolkit: str | None
    nccl: str | None
    build_steps: tuple[BuildStep, ...]
    install_steps: tuple[BuildStep, ...]
    notes: tuple[str, ...]
    typical_seconds: float

    @property
    def work(self) -> Path:
        """The working folder of this build. It is removed after a successful build."""
        return self.folder / "work"

    @property
    def source(self) -> Path:
        """The folder of the unpacked sdist."""
        return self.work / f"horovod-{HOROVOD}"

    @property
    def log(self) -> Path:
        """The log file of the latest build of this wheel."""
        return self.folder / "build.log"

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the environment for all commands: `inherited`, minus variables that contradict the plan, plus the
        settings."""
        variables = {name: value for name, value in inherited.items() if name[:8] != "HOROVOD_" and name != "CCL_ROOT"}
        for name, prefix in (("PATH", self.path_prefix), ("PYTHONPATH", self.python_path_prefix)):
            if prefix:
                variables[name] = os.pathsep.join([*prefix, *filter(None, [variables.get(name)])])
        return {**variables, **self.settings}


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder `horovod` in UNITRAIN_CACHE, XDG_CACHE_HOME/unitrain or ~/.cache/unitrain."""
    if root := environment.get("UNITRAIN_CACHE"):
        return Path(root).expanduser() / "horovod"
    return Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "unitrain" / "horovod"


def create_plan(machine: Machine, request: BuildRequest) -> BuildPlan:
    """Return the plan of a build. Raises HorovodBuildError with all missing requirements."""
    mpi = machine.mpi is not None if request.mpi is None else request.mpi
    cuda = _uses_cuda_by_default(machine) if request.cuda is None else request.cuda
    if problems := list(requirements.missing_requirements(machine, mpi=mpi, cuda=cuda)):
        raise HorovodBuildError("\n".join(problems))
    toolkit = requirements.find_toolkit(machine) if cuda else None
    facts = _wheel_facts(machine, mpi=mpi, cuda=cuda, toolkit=toolkit)
    key = _format_key(facts)
    folder = request.cache / key
    jobs = request.jobs or machine.jobs
    pip_toolkit = request.cache / f"cuda-{machine.torch.cuda}"
    uses_pip_toolkit = cuda and toolkit is None
    cuda_home = str(pip_toolkit / "nvidia" / f"cu{str(machine.torch.cuda).split('.')[0]}") if uses_pip_toolkit else ""
    cuda_home = toolkit.path if toolkit else cuda_home
    tools = tuple(_missing_tools(machine))
    cmake = str(folder / "work" / "tools" / "cmake" / "data" / "bin" / "cmake")
    wheel = folder / f"horovod-{HOROVOD}-{machine.python_tag}-{machine.platform}.whl"
    sdist = request.cache / "sdist" / f"horovod-{HOROVOD}.tar.gz"
    return BuildPlan(
        key=key,
        facts=facts,
        settings=_build_settings(machine, mpi=mpi, cuda_home=cuda_home, nccl=str(folder / "work" / "nccl"), jobs=jobs)
        | {"HOROVOD_CMAKE": cmake if CMAKE in tools or machine.cmake is None else machine.cmake.path},
        path_prefix=(f"{cuda_home}/bin",) if cuda_home else (),
        python_path_prefix=(str(folder / "work" / "tools"),) if tools else (),
        folder=folder,
        wheel=wheel,
        sdist=sdist,
        toolkit=cuda_home or None,
        nccl=machine.nccl.path if cuda and machine.nccl else None,
        build_steps=tuple(_build_steps(machine, tools, folder, sdist, pip_toolkit if uses_pip_toolkit else None, cuda)),
        install_steps=tuple(_install_steps(machine, wheel)) if request.install else (),
        notes=tuple(_decision_notes(machine, request, mpi=mpi, cuda=cuda, uses_pip_toolkit=uses_pip_toolkit)),
        typical_seconds=SERIAL_SECONDS + PARALLEL_SECONDS / jobs,
    )


def _uses_cuda_by_default(machine: Machine) -> bool:
    """Return whether a GPU is visible and all requirements of GPU operations are met."""
    return machine.torch.visible_gpus > 0 and not list(requirements.missing_cuda_requirements(machine))


def _wheel_facts(machine: Machine, *, mpi: bool, cuda: bool, toolkit: Tool | None) -> dict[str, Any]:
    torch = machine.torch
    return {
        "horovod": HOROVOD,
        "torch": torch.version,
        "cxx11_abi": torch.cxx11_abi,
        "python": machine.python_tag,
        "platform": f"{machine.platform} {machine.libc}",
        "compiler": machine.compiler.version if machine.compiler else "",
        "controllers": ["gloo", "mpi"] if mpi else ["gloo"],
        "mpi": machine.mpi.version if mpi and machine.mpi else None,
        "cuda": (toolkit.version if toolkit else f"{torch.cuda} (pip)") if cuda else None,
        "nccl": machine.nccl.version if cuda and machine.nccl else None,
        "architectures": list(torch.architectures) if cuda else [],
        "runtime_fixes": list(RUNTIME_FIXES),
        "patches": patch_digest(PATCHES),
        # Omitted if no flag is set, so that the keys of existing wheels without flags do not change.
        **({"flags": dict(machine.flags), "cpu": machine.cpu} if machine.flags else {}),
    }


def _format_key(facts: Mapping[str, Any]) -> str:
    """Return a readable name with a digest of all facts."""
    parts = "-".join([*facts["controllers"], *(["nccl"] if facts["nccl"] else [])])
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    return f"torch{facts['torch']}-{facts['python'].split('-')[0]}-{parts}-{digest}"


def _build_settings(machine: Machine, *, mpi: bool, cuda_home: str, nccl: str, jobs: int) -> dict[str, str]:
    settings = {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if mpi else "HOROVOD_WITHOUT_MPI": "1",
        # Only some toolkits contain NVTX, but the same facts must result in the same wheel.
        "HOROVOD_WITHOUT_NVTX": "1",
        # CMake 4 rejects version 2.8.12, which the bundled gloo requires. Older CMake versions ignore the variable.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        # Horovod passes options of make to the generator, so select make.
        "CMAKE_GENERATOR": "Unix Makefiles",
        "CXX": machine.compiler.path if machine.compiler else "",
        "MAKEFLAGS": f"-j{jobs}",
    }
    if cuda_home:
        settings |= {
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_NCCL_HOME": nccl,
            "HOROVOD_NCCL_LINK": "SHARED",
            "HOROVOD_CUDA_HOME": cuda_home,
            "CUDA_HOME": cuda_home,
            "CUDAToolkit_ROOT": cuda_home,
            "HOROVOD_BUILD_CUDA_CC_LIST": ",".join(arch.replace(".", "") for arch in machine.torch.architectures),
        }
    return settings


def _missing_tools(machine: Machine) -> Iterator[str]:
    """Yield the build tools that are missing from this Python, and CMake if it is missing or too old.

    They are installed into the build's working folder.
    """
    for module, requirement in BUILD_REQUIREMENTS.items():
        if module not in machine.modules:
            yield requirement
    if machine.cmake is None or requirements.is_old_cmake(machine.cmake):
        yield CMAKE


def _build_steps(
    machine: Machine, tools: tuple[str, ...], folder: Path, sdist: Path, pip_toolkit: Path | None, cuda: bool
) -> Iterator[BuildStep]:
    work = folder / "work"
    pip = (machine.python, "-m", "pip", "--disable-pip-version-check", "--no-input")
    if tools:
        argv = (*pip, "install", "--target", str(work / "tools"), *tools)
        yield BuildStep(name="tools", description="Download the missing build tools into the build folder", argv=argv)
    download_options = ("--no-deps", "--no-build-isolation", "--no-binary", "horovod")
    argv = (*pip, "download", *download_options, "--dest", str(sdist.parent), f"horovod=={HOROVOD}")
    yield BuildStep(
        name="download", description=f"Download the sdist of Horovod {HOROVOD}", argv=argv, completion_marker=str(sdist)
    )
    yield BuildStep(name="unpack", description=f"Check the sha256 ({SDIST_SHA256[:12]}...) of the sdist and unpack it")
    yield BuildStep(name="patch", description=f"Patch the sources: {', '.join(patch.name for patch in PATCHES)}")
    if pip_toolkit is not None:
        argv = (*pip, "install", "--target", str(pip_toolkit), f"cuda-toolkit[nvcc,cccl]=={machine.torch.cuda}.*")
        description = f"Download NVIDIA's pip wheels of the CUDA {machine.torch.cuda} compiler (about 100 MB)"
        yield BuildStep(
            name="toolkit",
            description=description,
            argv=argv,
            completion_marker=str(pip_toolkit / "complete"),
            shared_folder=pip_toolkit,
        )
    if cuda:
        yield BuildStep(name="link", description="Symlink torch's NCCL library under the names that CMake expects")
    argv = (
        *pip,
        "wheel",
        "-v",
        "--no-deps",
        "--no-build-isolation",
        "--no-cache-dir",
        "--wheel-dir",
        str(work / "out"),
    )
    yield BuildStep(
        name="wheel", description="Compile and package the wheel", argv=(*argv, str(work / f"horovod-{HOROVOD}"))
    )
    yield BuildStep(name="store", description="Store the wheel in the cache")


def _install_steps(machine: Machine, wheel: Path) -> Iterator[BuildStep]:
    install = (machine.python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install")
    argv = (*install, "--no-deps", "--force-reinstall", str(wheel))
    yield BuildStep(name="install", description="Install the wheel, replacing any other Horovod", argv=argv)
    yield BuildStep(name="dependencies", description="Install missing dependencies", argv=(*install, str(wheel)))
    yield BuildStep(name="check", description="Import Horovod and check its capabilities")


def _decision_notes(
    machine: Machine, request: BuildRequest, *, mpi: bool, cuda: bool, uses_pip_toolkit: bool
) -> Iterator[str]:
    """Yield notes on machine-dependent decisions, with the options to change them."""
    if machine.flags:
        names = " ".join(machine.flags)
        portability_note = ""
        if machine.cpu:
            portability_note = " The wheel only runs on processors of the same type as this machine's."
        yield (
            f"The build uses the variables {names} and creates a separate wheel.{portability_note} "
            f"To ignore them: unset {names}"
        )
    if request.mpi is None and not mpi:
        yield f"No MPI controller: mpicxx is not on PATH. To add it: {requirements.install_command(machine, 'mpi')}"
    if uses_pip_toolkit:
        yield f"No CUDA {machine.torch.cuda} toolkit on this machine: the build uses NVIDIA's pip wheels."
    if request.cuda is None and not cuda and machine.torch.cuda:
        if machine.torch.visible_gpus == 0:
            yield "CPU operations only: no GPU is visible on this host. To build for GPU nodes: --with-cuda"
        else:
            yield from (f"CPU operations only. {reason}" for reason in requirements.missing_cuda_requirements(machine))
