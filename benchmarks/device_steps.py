"""Functions that the ranks of `gpu_check.py` run: collectives, prefetching, training in three precisions, and
throughput."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import unitrain
from unitrain.backends.base import Backend
from unitrain.data.prefetch import Prefetcher

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_prepared: dict[str, Callable[[], Any]] = {}


def describe(backend: Backend) -> dict[str, str]:
    """Return the device and the transport of this rank."""
    name = torch.cuda.get_device_name(backend.device) if backend.device.type == "cuda" else "CPU"
    return {"device": name, "transport": backend.transport}


def check_collectives(backend: Backend) -> int:
    """Check broadcast, allreduce (sum and max), allgather and reducescatter on the device: on one rank, the result must
    equal the input. Return the number of checks."""
    checked = 0
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8):
        for shape in ((), (0,), (5,), (1 << 20,)):
            tensor = torch.arange(1 if shape == () else shape[0], device=backend.device).remainder(7).to(dtype)
            tensor = tensor.reshape(shape)
            results = [backend.broadcast(tensor), backend.allreduce(tensor, "sum"), backend.allreduce(tensor, "max")]
            if shape:
                results += [backend.allgather(tensor), backend.reducescatter(tensor, "sum")]
            for result in results:
                assert result.device == tensor.device, (dtype, shape, result.device)
                assert torch.equal(result, tensor), (dtype, shape)
                checked += 1
    return checked


def check_prefetched_batches(backend: Backend) -> int:
    """Check that prefetched batches have the content produced by the loader; return the number of checks.

    The host is far ahead of the device, so each batch is read long after the host has released it. A copy that
    overwrites the memory of a batch that is still to be read, or a batch that is read before its copy is complete,
    would be detected.
    """
    device, count = backend.device, 200
    on_gpu = device.type == "cuda"
    length = 1 << 20 if on_gpu else 1 << 8
    side = 4096 if on_gpu else 8
    delay = torch.randn(side, side, device=device)

    def batches() -> Iterator[tuple[Any, int]]:
        for number in range(count):
            values, others = torch.full((length,), number), torch.full((length // 3,), float(number))
            yield {"values": values.pin_memory() if on_gpu else values, "others": [others]}, number

    equal = []
    for batch, number in Prefetcher(device)(batches(), ahead=True):
        for _ in range(5):
            delay = torch.tanh(delay @ delay)
        values, (others,) = batch["values"], batch["others"]
        assert values.device == others.device == delay.device
        equal.append((values == number).all() & (others == number).all())  # runs after the delay
        del batch, values, others
    wrong = [number for number, right in enumerate(torch.stack(equal).tolist()) if not right]
    assert not wrong, f"batches {wrong} have the content of other batches"
    return count


class OnDemandPrefetcher(Prefetcher):
    """A Prefetcher that does not prefetch: it loads each batch on demand."""

    def __call__(self, items: Any, *, ahead: bool, overlapped: bool = False) -> Iterator[Any]:
        return super().__call__(items, ahead=False)


def compare_prefetching(backend: Backend) -> float:
    """Return the largest difference in a parameter or prediction between a run with prefetching and a run without."""
    ours, plain = (_train_from_host(backend, make(backend.device)) for make in (Prefetcher, OnDemandPrefetcher))
    return max(float((a - b).abs().max()) for a, b in zip(ours, plain, strict=True))


def _train_from_host(backend: Backend, prefetcher: Prefetcher) -> list[Tensor]:
    torch.manual_seed(6)
    wide = 2048 if backend.device.type == "cuda" else 32
    net = nn.Sequential(nn.Linear(wide, wide), nn.ReLU(), nn.Dropout(0.1), nn.Linear(wide, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    data = TensorDataset(torch.randn(2048, wide), torch.randint(0, 10, (2048,)))
    config = unitrain.TrainConfig(max_epochs=2, batch_size=32, progress="off")
    trainer = unitrain.Trainer(net, optimizer, cross_entropy, backend=backend, config=config)
    trainer._prefetcher = trainer._evaluation._prefetcher = prefetcher
    trainer.fit(data)
    return [*(parameter.detach().cpu() for parameter in net.parameters()), trainer.predict(data)]


def compare_training(backend: Backend, precision: str) -> float:
    """Return the largest difference in a parameter between 20 steps on the backend and the same steps in plain
    torch."""
    ours, plain = (_train_steps(backend, precision, distributed) for distributed in (True, False))
    return max(float((a - b).abs().max()) for a, b in zip(ours, plain, strict=True))


def _train_steps(backend: Backend, precision: str, distributed: bool) -> list[Tensor]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)).to(backend.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model = net
    if distributed:
        model = backend.distributed_model(net)
        optimizer = backend.distributed_optimizer(optimizer, model)
    dtype = PRECISIONS[precision]
    scaler = torch.amp.GradScaler(backend.device.type, enabled=precision == "fp16")
    images = torch.randn(20, 16, 1, 8, 8, generator=torch.Generator().manual_seed(4)).to(backend.device)
    targets = torch.arange(16, device=backend.device).remainder(10)
    for batch in images:
        with nullcontext() if dtype is None else torch.autocast(backend.device.type, dtype):
            loss = cross_entropy(model(batch), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in net.parameters()]


def measure_throughput(backend: Backend, loop: str, model: str, batch_size: int, steps: int) -> dict[str, float]:
    """Train `steps` steps with `loop`, "by hand" (a hand-written loop on the backend's library) or "Trainer". Return
    samples per second and the peak memory in MiB."""
    if loop not in _prepared:
        _prepared[loop] = _prepare(backend, loop, model, batch_size, steps)
        _prepared[loop]()
    on_gpu = backend.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    started = time.perf_counter()
    _prepared[loop]()
    if on_gpu:
        torch.cuda.synchronize()
    speed = steps * batch_size / (time.perf_counter() - started)
    return {"speed": speed, "mebibytes": torch.cuda.max_memory_allocated() / 2**20 if on_gpu else 0.0}


def _prepare(backend: Backend, loop: str, model: str, batch_size: int, steps: int) -> Callable[[], Any]:
    import torchvision

    torch.manual_seed(5)
    net = torchvision.models.get_model(model).to(backend.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    side = 224 if backend.device.type == "cuda" else 64
    samples = steps * batch_size
    data = TensorDataset(
        torch.randn(samples, 3, side, side, device=backend.device),
        torch.randint(0, 1000, (samples,), device=backend.device),
    )
    if loop == "Trainer":
        config = unitrain.TrainConfig(max_epochs=1, batch_size=batch_size, progress="off")
        trainer = unitrain.Trainer(net, optimizer, cross_entropy, backend=backend, config=config)

        def fit() -> None:
            trainer.progress.reset()
            trainer.fit(data)

        return fit
    images, targets = data.tensors
    wrapped: nn.Module = net
    if backend.name == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(net, [backend.device] if backend.device.type == "cuda" else None)
    elif backend.name == "horovod":
        import horovod.torch as hvd

        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())

    def by_hand() -> None:
        for chosen in torch.randperm(samples, device=backend.device).split(batch_size):
            cross_entropy(wrapped(images[chosen]), targets[chosen]).backward()
            optimizer.step()
            optimizer.zero_grad()

    return by_hand
