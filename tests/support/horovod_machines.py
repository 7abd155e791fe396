"""Machine descriptions for the tests of `unitrain.horovod_wheel`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from unitrain.horovod_wheel import machine, plan
from unitrain.horovod_wheel.machine import Machine, Tool, TorchInstallation

CUDA_TORCH = TorchInstallation(version="2.14.1+cu130", cuda="13.0", cxx11_abi=True, architectures=("8.0", "9.0"))
CPU_TORCH = TorchInstallation(version="2.14.1+cpu", cuda=None, cxx11_abi=True)
TOOLKIT = Tool(path="/opt/cuda-13.0", version="13.0")
PLAIN = Machine(
    torch=CUDA_TORCH,
    python="/venv/bin/python",
    python_tag="cp311-cp311",
    platform="linux_x86_64",
    libc="glibc 2.36",
    jobs=4,
    modules=frozenset(machine.BUILD_MODULES),
    has_python_headers=True,
    make="/usr/bin/make",
    compiler=Tool(path="/usr/bin/c++", version="c++ (Debian 12.2.0-14) 12.2.0"),
    cmake=Tool(path="/usr/bin/cmake", version="3.25.1"),
    mpi=Tool(path="/usr/bin/mpicxx", version="Open MPI 4.1.4"),
    nccl=Tool(path="/venv/nvidia/nccl", version="2.30.7"),
    package_manager="apt-get",
)
GPU_TORCH = dataclasses.replace(CUDA_TORCH, visible_gpus=8)


def create_plan(found: Machine = PLAIN, cache: Path = Path("/cache"), **request_options: Any) -> plan.BuildPlan:
    return plan.create_plan(found, plan.BuildRequest(cache=cache, **request_options))


def replace_fields(found: Machine = PLAIN, **fields: Any) -> Machine:
    return dataclasses.replace(found, **fields)


def step_names(build_plan: plan.BuildPlan) -> list[str]:
    return [step.name for step in (*build_plan.build_steps, *build_plan.install_steps)]
