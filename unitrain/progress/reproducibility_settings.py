"""Properties that must be equal in all processes, so that a run with logical ranks gives bit-identical results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from unitrain.backends.base import Communicator
from unitrain.output import get_logger
from unitrain.processes import cpu_model_name

_log = get_logger(__name__)
_FIXES = {
    "torch": "Install the same version",
    "threads": "Set OMP_NUM_THREADS, or call torch.set_num_threads",
    "deterministic_algorithms": "Use the same setting of torch.use_deterministic_algorithms",
    "tf32": "Use the same TrainConfig.tf32",
    "cudnn_tf32": "Use the same TrainConfig.tf32",
    "cudnn_benchmark": "Use the same setting of torch.backends.cudnn.benchmark",
}
_FIX = "Use the same type of hardware"


def reproducibility_settings(device: torch.device) -> dict[str, Any]:
    """Return the properties of this process that must be equal in all processes, and in a resumed run, for
    bit-identical results.
    """
    on_gpu = device.type == "cuda"
    return {
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name(device) if on_gpu else cpu_model_name(),
        "cpu_instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "tf32": on_gpu and torch.backends.cuda.matmul.allow_tf32,
        "cudnn_tf32": on_gpu and torch.backends.cudnn.allow_tf32,
        "cudnn_benchmark": on_gpu and torch.backends.cudnn.benchmark,
    }


def warn_of_differences(saved: Mapping[str, Any], communicator: Communicator, source: str) -> None:
    """Log a warning on rank 0 for each difference between the settings `saved` in a checkpoint and those of this
    process. `source` is the path of the checkpoint or of its folder, for the message."""
    if communicator.rank == 0:
        for name, value in reproducibility_settings(communicator.device).items():
            if name in saved and saved[name] != value:
                _log.warning(
                    "The checkpoint in '%s' was written with %s=%s, but this process has %s=%s: the results may differ "
                    "in the last bits from those of an uninterrupted run. %s.",
                    source, name, saved[name], name, value, _FIXES.get(name, _FIX),
                )  # fmt: skip


def warn_of_different_processes(communicator: Communicator) -> None:
    """Log a warning on rank 0 for each reproducibility setting that differs between processes. All ranks must call this
    function."""
    processes: list[dict[str, Any]] = communicator.allgather_object(reproducibility_settings(communicator.device))
    if communicator.rank == 0:
        for name, value in processes[0].items():
            values = [process[name] for process in processes]
            if any(process_value != value for process_value in values):
                _log.warning(
                    "With logical_ranks, results depend on the assignment of logical ranks to processes, because %s "
                    "differs between processes: %s. %s.",
                    name, values, _FIXES.get(name, _FIX),
                )  # fmt: skip
