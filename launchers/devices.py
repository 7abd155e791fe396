"""Selection of devices for `unitrain launch --devices` and `unitrain.run(devices=...)`.

Except for 0, which Lightning rejects, the values have the same meaning as in Lightning's `Trainer(devices=...)`:

    "3", 3                three devices: the first three GPUs, or three processes on a host without GPUs
    "-1", -1              all GPUs
    "0", 0                no GPU: the ranks compute on the CPU
    "[0]", "0,", [0]      GPU 0
    "1,3", [1, 3]         GPUs 1 and 3

Index N is the N-th GPU (from 0) that is listed in CUDA_VISIBLE_DEVICES or, without this variable, the N-th GPU of the
host.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from unitrain.launchers import slurm
from unitrain.launchers.errors import LaunchError
from unitrain.launchers.hosts import Host, format_hosts, is_this_host

CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")
_ALL = -1
_INDEX = re.compile("[0-9]{1,4}")
_NVIDIA_SMI_TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class Devices:
    """The devices of the ranks on each host: `count` devices, or the GPUs with these `indices`.

    With `indices`, `count` is their number. Otherwise, a `count` of -1 selects all GPUs, and 0 selects the CPU.
    `from_python` is True for an argument of `unitrain.run`, and False for an option of `unitrain launch`.
    """

    count: int
    indices: tuple[int, ...] | None = None
    from_python: bool = False

    def __str__(self) -> str:
        """Return the selection in the user's notation."""
        if self.indices is None:
            return self.format_option(str(self.count))
        if self.from_python:
            return self.format_option(str(list(self.indices)))
        return self.format_option(",".join(map(str, self.indices)) + ("," if self.count == 1 else ""))

    def format_option(self, value: str) -> str:
        """Return `value` as an option or argument, for a message."""
        return _format_option(value, from_python=self.from_python)

    def format_processes(self, num_processes: int) -> str:
        """Return a number of processes as an option or argument, for a message."""
        return f"np={num_processes}" if self.from_python else f"-np {num_processes}"


@dataclass(frozen=True)
class SelectedDevices:
    """The result of a selection: the number of ranks, the hosts with their slots, and variables for every rank.

    `num_processes` is None if the selection is the CPU and the user did not request a number of ranks.
    """

    num_processes: int | None
    hosts: tuple[Host, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


def parse_devices(value: str | int | Sequence[int], *, from_python: bool = False) -> Devices:
    """Parse the value of `--devices` or, with `from_python`, of `unitrain.run(devices=...)`. Raises LaunchError."""
    indices: tuple[int, ...] | None = None
    count: int | None = None
    if isinstance(value, str):
        text = value.strip()
        if text == str(_ALL) or _INDEX.fullmatch(text):
            count = int(text)
        else:
            indices = _parse_indices(text)
    elif isinstance(value, int):
        count = value if _is_index(value) or value == _ALL else None
    elif isinstance(value, Sequence) and not isinstance(value, bytes) and value and all(map(_is_index, value)):
        indices = tuple(value)  # type: ignore[arg-type]  # not a string
    if indices is not None:
        devices = Devices(len(indices), indices, from_python)
        distinct_indices = tuple(dict.fromkeys(indices))
        if len(distinct_indices) < len(indices):
            repeated = next(index for index in indices if indices.count(index) > 1)
            distinct = Devices(len(distinct_indices), distinct_indices, from_python)
            raise LaunchError(
                f"{devices} selects GPU {repeated} twice, but two ranks cannot use the same GPU. Use {distinct}"
            )
        return devices
    if count is not None:
        return Devices(count, None, from_python)
    two_devices = _format_option("2", from_python=from_python)
    gpus_1_and_3 = _format_option("[1, 3]" if from_python else "1,3", from_python=from_python)
    name = "unitrain.run(devices=...)" if from_python else "--devices"
    raise LaunchError(
        f"{name} takes a number of devices, -1 for all GPUs, 0 for the CPU, or the indices of GPUs, got {value!r}. "
        f"Use {two_devices} for two devices, or {gpus_1_and_3} for GPUs 1 and 3."
    )


def select_devices(
    devices: Devices, launcher: str, num_processes: int | None, hosts: tuple[Host, ...] = ()
) -> SelectedDevices:
    """Return the ranks and variables for `devices` on each of `hosts`, or on this host if `hosts` is empty.

    `num_processes` is the number of ranks that the user requested, or None. Raises LaunchError if `num_processes`
    contradicts the selection, if this host lacks slots or a selected GPU, and if Slurm selects the hosts. If `hosts`
    contains another host, no GPUs are queried, and `unitrain.init()` reports a missing GPU. In this case, LaunchError
    is also raised for the reasons listed in `select_devices_without_query`, and if CUDA_VISIBLE_DEVICES is set, unless
    the selection is the CPU.
    """
    _check_slurm_does_not_select_hosts(devices, launcher, hosts)
    if len(hosts) > 1 or not all(map(is_this_host, hosts)):
        if CUDA_VISIBLE_DEVICES in os.environ and devices.count:
            names = ", ".join(host.name for host in hosts)
            raise LaunchError(
                f"{devices} selects GPUs of {names}, but {CUDA_VISIBLE_DEVICES}={os.environ[CUDA_VISIBLE_DEVICES]} "
                f"refers to the GPUs of this host. Clear it with: unset {CUDA_VISIBLE_DEVICES}"
            )
        return select_devices_without_query(devices, num_processes, hosts)
    if devices.count == 0:
        return SelectedDevices(num_processes, hosts, {CUDA_VISIBLE_DEVICES: ""})
    gpus = visible_gpus()
    count = len(gpus) if devices.count == _ALL else devices.count
    variables = {}
    if gpus or devices.indices is not None or devices.count == _ALL:
        _check_gpus_exist(devices, len(gpus))
        indices = devices.indices if devices.indices is not None else range(count)
        variables = {CUDA_VISIBLE_DEVICES: ",".join(gpus[index] for index in indices)}
    _check_num_processes(devices, num_processes, count, count)
    _check_slots(devices, count, hosts)
    return SelectedDevices(count, hosts, variables)


def select_devices_without_query(
    devices: Devices, num_processes: int | None, hosts: tuple[Host, ...] = ()
) -> SelectedDevices:
    """Return the ranks and variables for `devices` on each of `hosts`, whose GPUs cannot be queried.

    An empty `hosts` stands for one unnamed host. Raises LaunchError for -1, which requires the number of GPUs, for a
    host with too few slots, and if `num_processes` contradicts the selection.
    """
    if devices.count == 0:
        return SelectedDevices(num_processes, hosts, {CUDA_VISIBLE_DEVICES: ""})
    if devices.count == _ALL:
        raise LaunchError(
            f"{devices} selects all GPUs, but unitrain counts the GPUs of this host only. Use the number of GPUs of "
            f"each host, as in {devices.format_option('8')}"
        )
    _check_slots(devices, devices.count, hosts)
    expected = devices.count * max(1, len(hosts))
    _check_num_processes(devices, num_processes, expected, devices.count)
    indices = devices.indices if devices.indices is not None else range(devices.count)
    hosts = tuple(replace(host, slots=devices.count) for host in hosts)
    return SelectedDevices(expected, hosts, {CUDA_VISIBLE_DEVICES: ",".join(map(str, indices))})


def visible_gpus() -> list[str]:
    """Return this host's GPUs that are visible to CUDA, as entries of CUDA_VISIBLE_DEVICES, in index order.

    CUDA ignores an invalid entry of the variable and all entries after it, and hides all GPUs if an entry is repeated.
    """
    num_gpus = count_gpus()
    setting = os.environ.get(CUDA_VISIBLE_DEVICES)
    if setting is None or not num_gpus:
        return [str(index) for index in range(num_gpus)]
    visible: list[str] = []
    for entry in map(str.strip, setting.split(",")):
        is_index = entry.isascii() and entry.isdecimal() and int(entry) < num_gpus
        if not is_index and not entry.startswith(("GPU-", "MIG-")):
            break
        visible.append(entry)
    return visible if len(set(visible)) == len(visible) else []


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs that this process can access, from `nvidia-smi -L`, else from the driver.

    The number is 0 on a host without a driver. torch is not imported, so that a command can be displayed quickly.
    """
    program = shutil.which("nvidia-smi")
    if program is not None:
        try:
            result = subprocess.run(
                [program, "-L"], capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            pass
        else:
            if result.returncode == 0:
                return sum(line.startswith("GPU ") for line in result.stdout.splitlines())
    return len(list(DRIVER_FOLDER.glob("*/information")))


def _parse_indices(text: str) -> tuple[int, ...] | None:
    """Return the indices in "1,3", "1," or "[1, 3]", or None if `text` is not such a list."""
    is_list = text.startswith("[") and text.endswith("]")
    parts = [part.strip() for part in text.strip("[]" if is_list else "").split(",")]
    if not is_list and len(parts) == 1:
        return None
    if not parts[-1]:
        del parts[-1]
    is_valid = bool(parts) and all(map(_INDEX.fullmatch, parts))
    return tuple(map(int, parts)) if is_valid else None


def _check_slots(devices: Devices, ranks_per_host: int, hosts: tuple[Host, ...]) -> None:
    """Raise LaunchError if one of `hosts` has fewer slots than `ranks_per_host`."""
    for host in hosts:
        if host.slots < ranks_per_host:
            enough = format_hosts(replace(entry, slots=max(entry.slots, ranks_per_host)) for entry in hosts)
            raise LaunchError(
                f"{devices} starts {ranks_per_host} ranks on each host, but host {host.name!r} has {host.slots} "
                f"{'slot' if host.slots == 1 else 'slots'}. Use: -H {enough}"
            )


def _check_slurm_does_not_select_hosts(devices: Devices, launcher: str, hosts: tuple[Host, ...]) -> None:
    """Raise LaunchError if Slurm selects the hosts of the ranks, because Slurm then also sets CUDA_VISIBLE_DEVICES.

    An allocation that contains only this host is permitted, except with srun.
    """
    if launcher == "srun":
        where = "the hosts of the allocation"
    else:
        allocated = () if hosts else slurm.allocated_hosts(launcher)
        if len(allocated) < 2 and all(map(is_this_host, allocated)):
            return
        where = ", ".join(host.name for host in allocated)
    raise LaunchError(
        f"{devices} selects devices, but {launcher} starts ranks on {where}, where Slurm assigns the GPUs. Leave "
        f"{devices} out, and request GPUs from Slurm: salloc --gpus-per-node 2"
    )


def _check_gpus_exist(devices: Devices, num_gpus: int) -> None:
    """Raise LaunchError if `num_gpus`, the number of visible GPUs of this host, is too small for `devices`."""
    largest = max(devices.indices) if devices.indices is not None else devices.count - 1
    if num_gpus and largest < num_gpus:
        return
    setting = os.environ.get(CUDA_VISIBLE_DEVICES)
    restriction = f" listed in {CUDA_VISIBLE_DEVICES}={setting}" if setting is not None else ""
    available = f"this host has {num_gpus} {'GPU' if num_gpus == 1 else 'GPUs'}{restriction}"
    if not num_gpus:
        raise LaunchError(
            f"{devices} selects GPUs, but {available}. To run processes on the CPU, pass their number: "
            f"{devices.format_option('2')}"
        )
    selected = f"GPU {largest}" if devices.indices is not None else f"{devices.count} GPUs"
    indices = "index 0" if num_gpus == 1 else f"indices 0 to {num_gpus - 1}"
    raise LaunchError(
        f"{devices} selects {selected}, but {available}, with {indices}. "
        f"Use {devices.format_option(str(_ALL))} for all of them"
    )


def _check_num_processes(devices: Devices, num_processes: int | None, expected: int, ranks_per_host: int) -> None:
    """Raise LaunchError if `num_processes` is not the `expected` number of ranks on all hosts."""
    if num_processes is not None and num_processes != expected:
        num_ranks = f"{ranks_per_host} on each host, {expected} in all" if expected != ranks_per_host else str(expected)
        requested, correct = devices.format_processes(num_processes), devices.format_processes(expected)
        raise LaunchError(
            f"{devices} starts one rank per device ({num_ranks}), but {requested} requests {num_processes}. "
            f"Use {correct}, or leave it out"
        )


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10_000


def _format_option(value: str, *, from_python: bool) -> str:
    return f"devices={value}" if from_python else f"--devices {value}"
