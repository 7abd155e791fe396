"""Time and memory of training with sharded parameters, compared with replicated parameters and torch's `fully_shard`.

Loops with Adam take turns on the same ranks, in a new order in every round. The blocks are the linear layers of the
model. The first table shows the step time relative to replicated parameters in the same round. The second table shows
the memory of weights, gradients and optimizer state in bytes per parameter, on the rank with the highest value.

    python benchmarks/sharded_parameters.py       # starts its own ranks; writes benchmarks/results/sharded_parameters.*
"""

from __future__ import annotations

import time
from pathlib import Path

import click
import torch
from loops import BATCH, CLASSES, FEATURES, MODELS, network
from tables import Results, columns, frame, keep, options, rows
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from turns import measure

from unitrain.backends.base import Backend
from unitrain.testing import RankGroup

REPLICATED, SHARDED, TORCH = "replicated", 'shard="parameters"', "torch's fully_shard"
WAYS = (REPLICATED, SHARDED, TORCH)
SIZES = (2, 3, 4)

_prepared: dict[tuple[str, str], tuple[nn.Module, torch.optim.Optimizer]] = {}


def take_turn(backend: Backend, way: str, model: str, number: int) -> float:
    """Train some steps in one of WAYS and return seconds per step, from barrier to barrier. All ranks call it."""
    distributed, optimizer = _prepare(backend, way, model)
    generator = torch.Generator().manual_seed(number * backend.size + backend.rank)
    inputs = torch.randn(BATCH, FEATURES, generator=generator)
    targets = torch.randint(CLASSES, (BATCH,), generator=generator)
    steps = MODELS[model][1]
    backend.barrier()
    started = time.perf_counter()
    for _ in range(steps):
        cross_entropy(distributed(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    backend.barrier()
    return (time.perf_counter() - started) / steps


def persistent_bytes(backend: Backend, way: str, model: str) -> tuple[float, float]:
    """Return the bytes per parameter of weights, gradients and optimizer state on this rank, and those of the formula.

    Adam in float32 takes 16 bytes per parameter, and 16 / size with sharded parameters (ZeRO, section 3). It trains one
    step and keeps its gradients.
    """
    distributed, optimizer = _prepare(backend, way, model)
    count = sum(parameter.numel() for parameter in distributed.parameters())
    distributed(torch.randn(BATCH, FEATURES)).sum().backward()
    optimizer.step()
    tensors = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    for parameter in distributed.parameters():
        assert parameter.grad is not None
        tensors += [parameter.detach(), parameter.grad]
    storages = [getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in tensors]
    total = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    optimizer.zero_grad()
    return total / count, 16.0 if way == REPLICATED else 16 / backend.size


def _prepare(backend: Backend, way: str, model: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    if (way, model) not in _prepared:
        torch.manual_seed(1)
        own = network(MODELS[model][0])
        if way == TORCH:
            from torch.distributed.fsdp import fully_shard

            for module in [*own.modules()][::-1]:
                if isinstance(module, nn.Linear) or module is own:
                    fully_shard(module)
                    module.set_force_sum_reduction_for_comms(True)  # Gloo has no average
            _prepared[way, model] = own, torch.optim.Adam(own.parameters(), lr=1e-4)
        else:
            blocks = (nn.Linear,) if way == SHARDED else ()
            shard = "parameters" if way == SHARDED else "none"
            distributed = backend.distributed_model(own, shard=shard, shard_blocks=blocks)
            optimizer = torch.optim.Adam(own.parameters(), lr=1e-4)
            _prepared[way, model] = distributed, backend.distributed_optimizer(optimizer, distributed, shard=shard)
    return _prepared[way, model]


def count_bytes(backend: str, model: str) -> dict[str, dict[int, tuple[float, float]]]:
    """Return, by way and number of ranks, the bytes per parameter on the rank with the most, and by the formula."""
    found: dict[str, dict[int, tuple[float, float]]] = {way: {} for way in WAYS}
    for size in SIZES:
        with RankGroup(backend, size) as group:
            for way in WAYS:
                found[way][size] = max(group.run(persistent_bytes, way, model, timeout_seconds=200))
    return found


def table(results: Results, memory: dict[str, dict[int, tuple[float, float]]], ranks: int) -> list[str]:
    quoted = "Time of a step / time with replicated parameters in the same round; below 1, it is faster."
    header = ["parameters", *columns(results)]
    lines = frame("Sharded parameters", quoted, "python benchmarks/sharded_parameters.py", ranks, header, "Adam")
    lines += rows(results, dict.fromkeys(WAYS, REPLICATED))
    lines += ["", "Bytes per parameter on the rank with the most (formula: 16, or 16 / ranks):", ""]
    lines += [f"| parameters | {' | '.join(f'{size} ranks' for size in SIZES)} |", "|---" * (1 + len(SIZES)) + "|"]
    for way, by_size in memory.items():
        shown = [f"{measured:.3f} ({measured / formula - 1:+.2%})" for measured, formula in by_size.values()]
        lines.append(f"| {way} | {' | '.join(shown)} |")
    return lines


@click.command()
@options(rounds=12, models=("25M",))
def main(backends: list[str], models: list[str], rounds: int, ranks: int, output: Path) -> None:
    """Measure, print the tables and save them."""
    results = {backend: measure(backend, models, WAYS, take_turn, rounds, ranks) for backend in backends}
    memory = count_bytes(backends[0], models[-1])
    keep(
        table(results, memory, ranks), "sharded_parameters", output, ranks=ranks, seconds_per_step=results, bytes=memory
    )


if __name__ == "__main__":
    main()
