"""Coordination overhead by the number of ranks: per collective, at start-up, and for the model check.

One process runs one rank on a simulated process group, in which all other ranks immediately send the same values as
this rank. Therefore, the measurement includes the computation of one rank in unitrain's code and the number of bytes
that the rank receives, but not network time. The exchange over the store is real: each rank is a thread with a separate
connection to a TCPStore. Each result is compared with a baseline. In the baseline, each rank gathers a row of 1,160
bytes from all ranks before each collective, reads the keys of all ranks, and receives the tables of the model from all
ranks.

    python benchmarks/control_plane.py            # writes benchmarks/results/control_plane.*
"""

from __future__ import annotations

import os
import pickle
import platform
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from tables import RESULTS, save_results
from torch import Tensor, nn
from typing_extensions import Self

from unitrain.backends.base import StartOptions
from unitrain.backends.checks import check_same_model
from unitrain.backends.consistency import ConsistencyCheck
from unitrain.backends.process_group import ProcessGroupBackend
from unitrain.bootstrap.environment import RankInfo
from unitrain.bootstrap.rendezvous import NodePosition, Rendezvous
from unitrain.monitoring.monitor import FailureMonitor

SIZES = (2, 64, 256, 1024)  # with powers of two, all ranks transfer the same number of bytes in a sum
MAX_READING_RANKS = 256  # limit for reading all keys on all ranks, which takes minutes with 1,024 threads
# The widths of the 53 BatchNorms of a ResNet-50. Each has one collective in the forward pass and one in the backward
# pass.
_STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
WIDTHS = [64, *(width for base, blocks in _STAGES for _ in range(blocks) for width in (base, base, 4 * base))]
WIDTHS += [4 * base for base, _ in _STAGES]
Costs = dict[str, tuple[float, float]]  # (seconds, bytes) by method
ROW_LENGTH = 145  # int64 values per row of the baseline; the last 128 hold small tensors
HEADER_LENGTH = 17


class _Done(dist._Work):
    """A completed operation."""

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class IdenticalRanks(dist.ProcessGroup):
    """Rank 0 of `size` ranks with identical tensors. Counts the bytes received per rank."""

    received_bytes = 0

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        (tensor,) = tensors
        if opts.reduceOp == dist.ReduceOp.SUM:
            tensor.mul_(self.size())
        IdenticalRanks.received_bytes += 2 * tensor.nbytes  # as in a ring allreduce: first partial sums, then the sum
        return _Done()

    def _allgather_base(self, output: Tensor, own: Tensor, opts: Any = None) -> dist.Work:
        output.view(self.size(), -1).copy_(own)
        IdenticalRanks.received_bytes += output.nbytes
        return _Done()

    all_gather_single = _allgather_base

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        IdenticalRanks.received_bytes += tensors[0].nbytes
        return _Done()

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> dist.Work:
        self._sent = tensors[0].clone()
        return _Done()

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> dist.Work:
        tensors[0].copy_(self._sent)
        IdenticalRanks.received_bytes += tensors[0].nbytes
        return _Done()

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "identical"


class SimulatedRendezvous(Rendezvous):
    """The rendezvous of ranks of which each runs on its own host."""

    @property
    def node_positions(self) -> list[NodePosition]:
        return [NodePosition(0, 1, rank, self.rank_info.size) for rank in range(self.rank_info.size)]


class SimulatedBackend(ProcessGroupBackend):
    """Rank 0's collectives and consistency checks on a group of IdenticalRanks."""

    name = "identical"

    @classmethod
    def start(cls, options: StartOptions) -> Self:
        return cls(options.rank_info.size)

    def __init__(self, size: int) -> None:
        self.device, self.rank, self.size, self._pid = torch.device("cpu"), 0, size, os.getpid()
        rank_info = RankInfo("env", 0, size, 0)
        self._rendezvous = SimulatedRendezvous(rank_info, dist.HashStore(), "127.0.0.1", timedelta(seconds=60))
        self._monitor = FailureMonitor(self._rendezvous, polls=True, use_watchdog=False)
        self._check_consistency = ConsistencyCheck(self, self._monitor)
        self._check_consistency._has_point_to_point = True  # as with Gloo


@dataclass(frozen=True)
class RowCall:
    """The parsed row of one rank in the baseline."""

    number: int
    operation: int
    op: int
    root: int
    dtype: int
    shape: tuple[int, ...]
    content: Tensor


def compare_rows(size: int) -> None:
    """Check, as the baseline does, that the calls of all ranks are equal."""
    row = torch.zeros(ROW_LENGTH, dtype=torch.int64)
    row[:HEADER_LENGTH] = torch.tensor([1, 0, 0, -1, 1, 1, -1, 1000, *[0] * (HEADER_LENGTH - 8)])
    rows = torch.empty(size, ROW_LENGTH, dtype=torch.int64)
    dist.all_gather_single(rows.view(-1), row)
    contents = rows[:, HEADER_LENGTH:].view(torch.uint8)
    calls = []
    for header, content in zip(rows[:, :HEADER_LENGTH].tolist(), contents, strict=True):
        number, operation, op, root, dtype, dims, _, *shape = header
        calls.append(RowCall(number, operation, op, root, dtype, tuple(shape[:dims]), content))
    assert all(call.shape == calls[0].shape and call.number == calls[0].number for call in calls)


def compare_tables(backend: SimulatedBackend, model: nn.Module) -> None:
    """Check, as the baseline does, that the models of all ranks are equal."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    own = {name: (str(value.dtype), list(value.shape)) for name, value in tensors}
    payload = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)
    gathered = torch.empty(backend.size * payload.numel(), dtype=torch.uint8)
    dist.all_gather_single(gathered, payload)
    tables = [pickle.loads(part.numpy().tobytes()) for part in gathered.view(backend.size, -1)]
    assert all(table.get(name) == tables[0][name] for table in tables for name in tables[0])
    assert all(list(table) == list(tables[0]) for table in tables)


def exchange_keys(rendezvous: Rendezvous, key: str) -> list[Any]:
    """Exchange values with the method of the baseline: each rank waits for the keys of all ranks, and reads them."""
    store, size = rendezvous.store, rendezvous.rank_info.size
    store.set(f"{key}/{rendezvous.rank_info.rank}", "1")
    missing = list(range(size))
    while missing := [rank for rank in missing if not store.check([f"{key}/{rank}"])]:
        time.sleep(0.02)
    return [store.get(f"{key}/{rank}") for rank in range(size)]


def measure_cost(function: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Return the median CPU seconds and the received bytes per call."""
    function()
    seconds = []
    IdenticalRanks.received_bytes = 0
    for _ in range(repeats):
        started = time.process_time()
        function()
        seconds.append(time.process_time() - started)
    return statistics.median(seconds), IdenticalRanks.received_bytes / repeats


def measure_simulated_rank(size: int, repeats: int) -> Costs:
    """Return the seconds and bytes of one of `size` ranks, for each method."""
    dist.init_process_group("identical", store=dist.HashStore(), rank=0, world_size=size)
    try:
        backend = SimulatedBackend(size)
        with torch.device("meta"):
            model = nn.Transformer(num_encoder_layers=24, num_decoder_layers=24)
        large = torch.ones(1000)

        def check() -> None:
            backend._check_consistency("allreduce", large, op="sum", dtype=torch.float32)

        def check_many(one: Callable[[], object]) -> None:
            for _ in range(2 * len(WIDTHS)):
                one()

        few = max(1, repeats // 10)
        return {
            "check, baseline": measure_cost(lambda: compare_rows(size), repeats),
            "check": measure_cost(check, repeats),
            "SyncBN, baseline": measure_cost(lambda: check_many(lambda: compare_rows(size)), few),
            "SyncBN": measure_cost(lambda: check_many(check), few),
            "model, baseline": measure_cost(lambda: compare_tables(backend, model), few),
            "model": measure_cost(lambda: check_same_model(backend, model), repeats),
        }
    finally:
        dist.destroy_process_group()


def measure_store_exchange(size: int, repeats: int) -> dict[str, float]:
    """For each method, return the seconds from the start of an exchange on the first rank to its end on the last
    rank."""
    served = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    rendezvous_by_rank = [
        Rendezvous(
            RankInfo("env", rank, size, rank),
            dist.TCPStore("127.0.0.1", served.port, size, is_master=False, wait_for_workers=False),
            "127.0.0.1",
            timedelta(seconds=600),
        )
        for rank in range(size)
    ]
    exchanges: dict[str, Callable[[Rendezvous, str], list[Any]]] = {
        "store, baseline": exchange_keys,
        "store": lambda rendezvous, key: rendezvous.allgather(key, 1),
    }
    seconds = {}
    with ThreadPoolExecutor(size) as pool:
        for method, exchange in exchanges.items():
            if exchange is exchange_keys and size > MAX_READING_RANKS:
                continue
            taken = []
            for number in range(repeats):
                started = time.perf_counter()
                for values in pool.map(
                    lambda rendezvous, key=f"{method}/{number}", run_exchange=exchange: run_exchange(rendezvous, key),
                    rendezvous_by_rank,
                ):
                    assert len(values) == size
                taken.append(time.perf_counter() - started)
            seconds[method] = statistics.median(taken)
    return seconds


def table(
    sizes: Sequence[int], costs: dict[int, dict[str, tuple[float, float]]], store_seconds: dict[int, dict[str, float]]
) -> list[str]:
    """Return the lines of the table."""
    lines = [
        "# Cost of coordination per rank, by the number of ranks",
        "",
        "CPU time and received bytes of one rank, in a simulated process group in which all ranks send the same "
        "message, without network latency. The exchanges over the store are real, with one thread and one connection "
        "per rank. Their time is the wall time of all ranks in one Python process, in which each of N ranks verifies "
        "and parses N lines. "
        f"torch {torch.__version__}, Python {platform.python_version()}. "
        "Medians. Command: `python benchmarks/control_plane.py`.",
        "",
        f"| | {' | '.join(f'{size:,} ranks' for size in sizes)} |",
        "|---" * (len(sizes) + 1) + "|",
    ]
    described = {
        "check": "consistency check of one collective",
        "SyncBN": "checks of a step of ResNet-50 with SyncBN (106 collectives)",
        "model": "`check_same_model` of 724 tensors",
    }
    for key, description in described.items():
        for suffix, version in ((", baseline", "baseline"), ("", "unitrain")):
            cells = [f"{_time(costs[size][key + suffix][0])}, {_bytes(costs[size][key + suffix][1])}" for size in sizes]
            lines.append(f"| {description}, {version} | {' | '.join(cells)} |")
    for suffix, version in ((", baseline", "baseline"), ("", "unitrain")):
        found = [store_seconds[size].get("store" + suffix) for size in sizes]
        cells = ["not measured" if seconds is None else _time(seconds) for seconds in found]
        lines.append(f"| an exchange over the store, {version} | {' | '.join(cells)} |")
    return lines


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def _bytes(number: float) -> str:
    return f"{number / 2**20:.1f} MiB" if number >= 2**20 else f"{number / 2**10:.1f} KiB"


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=50, show_default=True)
@click.option("--size", "sizes", type=click.IntRange(min=2), multiple=True, default=SIZES)
def main(sizes: list[int], repeats: int, output: Path) -> None:
    """Measure, print the table and save it."""
    torch.set_num_threads(1)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    dist.Backend.register_backend(
        "identical", lambda _store, rank, size, _timeout: IdenticalRanks(rank, size), devices=["cpu"]
    )
    costs = {size: measure_simulated_rank(size, repeats) for size in sizes}
    store_seconds = {size: measure_store_exchange(size, max(1, repeats // 20)) for size in sizes}
    save_results(
        table(sizes, costs, store_seconds),
        "control_plane",
        output,
        seconds_and_bytes=costs,
        seconds_over_the_store=store_seconds,
    )


if __name__ == "__main__":
    main()
