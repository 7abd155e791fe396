"""Selection of a rank's device, and errors on machines with too few GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import unitrain
from unitrain.backends.base import Backend
from unitrain.bootstrap.devices import check_gpus_differ, choose_device
from unitrain.errors import ConfigError, UnitrainError
from unitrain.testing import RankGroup


def machine_with(gpus: int) -> mock._patch_dict:
    """Return a patch that makes torch report this number of GPUs, with the UUIDs GPU-<index>."""
    return mock.patch.multiple(
        "torch.cuda",
        is_available=lambda: gpus > 0,
        device_count=lambda: gpus,
        set_device=lambda device: None,
        get_device_properties=lambda device: SimpleNamespace(uuid=f"GPU-{device.index}"),
    )


@pytest.mark.parametrize(
    ("gpus", "requested", "local_rank", "expected"),
    [
        (0, None, 3, "cpu"),
        (4, None, 3, "cuda:3"),
        (4, "cuda", 2, "cuda:2"),
        (4, "cuda:1", 2, "cuda:1"),
        (4, "cpu", 2, "cpu"),
        (1, None, 3, "cuda:0"),  # CUDA_VISIBLE_DEVICES may select a different GPU for each process
    ],
)
def test_each_rank_uses_the_gpu_of_its_local_rank(
    gpus: int, requested: str | None, local_rank: int, expected: str
) -> None:
    with machine_with(gpus):
        assert choose_device(requested, local_rank) == torch.device(expected)


def test_a_missing_gpu_raises() -> None:
    with machine_with(0), pytest.raises(ConfigError) as caught:
        choose_device("cuda", 0)
    assert str(caught.value) == "Device 'cuda' was requested, but torch sees no GPU here. Use device='cpu'."
    with machine_with(2), pytest.raises(ConfigError) as caught:
        choose_device(None, 2)
    assert str(caught.value) == (
        "local_rank 2 needs GPU 2, but this host has 2. Start 2 ranks per host, or use device='cpu'."
    )
    with machine_with(2), pytest.raises(ConfigError) as caught:
        choose_device("cuda:5", 0)
    assert str(caught.value) == (
        "Device 'cuda:5' was requested, but torch sees 2 GPUs here. Use device='cuda' for the GPU of the local rank."
    )


def request_device(backend: Backend, device: str) -> str:
    backend.shutdown()
    try:
        unitrain.init(backend.name, device=device)
    except ConfigError as error:
        return str(error)
    raise AssertionError("no error was raised")


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_devices_without_transport_support_are_rejected(backend: str) -> None:
    """Gloo's allreduce does not reject tensors of torch_xla, but returns this rank's tensor unchanged."""
    with RankGroup(backend, 2) as group:
        messages = group.run(request_device, "xla:0")
    message = (
        "Device 'xla:0' was requested, but tensors are transferred between CPUs or CUDA GPUs only. Use device='cpu', "
        "or train in one process with backend 'local'."
    )
    assert messages == [message] * 2
    assert choose_device("xla:0", 0, communicates=False) == torch.device("xla:0")


def test_ranks_that_share_a_gpu_raise() -> None:
    check_gpus_differ([("a", "GPU-0"), ("a", "GPU-1"), ("b", "GPU-2"), ("b", None), ("b", None)])
    with pytest.raises(ConfigError) as caught:  # hosts b and c are containers on one machine
        check_gpus_differ([("a", "GPU-0"), ("b", "GPU-1"), ("b", None), ("b", "GPU-1"), ("c", "GPU-1")])
    assert str(caught.value) == (
        "Ranks 1, 3, 4 on host 'b' use the same GPU, GPU-1. Start one rank per GPU, or use device='cpu'."
    )


def request_gpu(backend: Backend, gpus: int, horovod_has_gpu_operations: bool) -> str:
    backend.shutdown()
    built = {"nccl_built": lambda: horovod_has_gpu_operations, "cuda_built": lambda: False}
    with machine_with(gpus), mock.patch.multiple("horovod.torch", **built):
        try:
            unitrain.init(backend.name)
        except UnitrainError as error:
            return f"{type(error).__name__}: {error}"
    raise AssertionError("no error was raised")


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_two_ranks_on_one_gpu_raise_on_both_ranks(backend: str) -> None:
    with RankGroup(backend, 2) as group:
        rank_results = group.run(request_gpu, 1, True)
    assert rank_results[0] == rank_results[1]
    assert rank_results[0].startswith("ConfigError: Ranks 0, 1 on host '")
    assert rank_results[0].endswith("' use the same GPU, GPU-0. Start one rank per GPU, or use device='cpu'.")


def test_cpu_only_horovod_raises_on_a_gpu() -> None:
    with RankGroup("horovod", 2) as group:
        rank_results = group.run(request_gpu, 2, False)
    assert rank_results == [
        f"BackendUnavailableError: This rank computes on cuda:{rank}, but Horovod was built without GPU operations. "
        "Build it with: unitrain horovod build --with-cuda, or use device='cpu'."
        for rank in (0, 1)
    ]
