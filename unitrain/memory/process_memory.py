"""Current and peak memory of this process, or of its GPU."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Protocol

import torch

from unitrain.errors import UnsupportedError

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # see proc(5)


class ProcessMemory(Protocol):
    """Measures memory in bytes. `peak` returns the maximum since the last call of `reset_peak`."""

    def current(self) -> int: ...

    def peak(self) -> int: ...

    def reset_peak(self) -> None: ...


def process_memory(device: torch.device) -> ProcessMemory:
    """Return the object that measures the memory of this process or of the GPU `device`.

    Raises UnsupportedError for other devices, and if the system cannot measure the peak.
    """
    if device.type == "cuda":
        return CudaMemory(device)
    if device.type != "cpu":
        raise UnsupportedError(
            f"Memory can be measured on CPUs and NVIDIA GPUs only, got the device {device.type!r}. "
            'Use unitrain.init(device="cpu").'
        )
    return HostMemory()


class HostMemory:
    """Resident memory of this process (RSS), from Linux's /proc."""

    def __init__(self) -> None:
        check_host_memory()
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only in glibc

    def current(self) -> int:
        return _read_status_bytes("VmRSS")

    def peak(self) -> int:
        return _read_status_bytes("VmHWM")

    def reset_peak(self) -> None:
        """Reset the peak. First, return free memory of the C allocator to the system, so that the new peak counts only
        memory in use.
        """
        if self._trim is not None:
            self._trim(0)
        _CLEAR_REFS.write_text(_RESET_PEAK)


class CudaMemory:
    """Memory of the tensors on a GPU, from the statistics of torch's allocator.

    It excludes cached free blocks and the memory of the CUDA context, NCCL and other libraries.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


def check_host_memory() -> None:
    """Raise UnsupportedError if the peak memory of this process cannot be measured."""
    try:
        _read_status_bytes("VmHWM")
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except (OSError, LookupError) as error:
        raise UnsupportedError(
            f"The peak memory of a process is measured with {_CLEAR_REFS}, which failed: {error}. "
            "Run the program on Linux, in a container with a writable /proc."
        ) from error


def _read_status_bytes(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    if match is None:
        raise LookupError(f"{_STATUS} has no {name}")
    return int(match[1]) * 1024
