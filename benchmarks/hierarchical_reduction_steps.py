"""Measure step times with a plain and a hierarchical allreduce, in turns. See hierarchical_reduction.py."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

import torch
from loops import BATCH, CLASSES, FEATURES, network, sgd
from slow_network_training import HIDDEN
from torch import nn
from torch.nn.functional import cross_entropy

import unitrain

PLAIN, HIERARCHICAL = "allreduce over all ranks", "hierarchical allreduce"


def sent_bytes() -> int:
    """Return the number of bytes that this host has sent over eth0."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "eth0":
            return int(counters.split()[8])
    raise RuntimeError("this host has no network interface eth0")


def main(rounds: int, steps: int) -> None:
    """Print the seconds per step and the megabytes that the first host sends per step, by reduction and round."""
    with unitrain.init(device="cpu") as backend:
        models: dict[str, nn.Module] = {}
        optimizers = {}
        for reduction in (PLAIN, HIERARCHICAL):
            torch.manual_seed(1)
            model = network(HIDDEN)
            os.environ["UNITRAIN_HIERARCHICAL_ALLREDUCE"] = str(int(reduction == HIERARCHICAL))
            models[reduction] = distributed = backend.distributed_model(model)
            optimizers[reduction] = backend.distributed_optimizer(sgd(model), distributed)
        inputs, targets = torch.randn(BATCH, FEATURES), torch.randint(0, CLASSES, (BATCH,))

        def train(reduction: str, count: int) -> None:
            for _ in range(count):
                cross_entropy(models[reduction](inputs), targets).backward()
                optimizers[reduction].step()
                optimizers[reduction].zero_grad()

        seconds: dict[str, list[float]] = {reduction: [] for reduction in models}
        megabytes: dict[str, list[float]] = {reduction: [] for reduction in models}
        order = random.Random(0)
        for round_number in range(rounds + 1):  # the first round warms up
            for reduction in order.sample(list(models), len(models)):
                backend.barrier()
                sent, start = sent_bytes(), time.perf_counter()
                train(reduction, steps)
                backend.barrier()
                if round_number:
                    seconds[reduction].append((time.perf_counter() - start) / steps)
                    megabytes[reduction].append((sent_bytes() - sent) / steps / 1e6)
        weights = [next(iter(backend.unwrap(model).parameters())).detach() for model in models.values()]
        torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)
        if backend.rank == 0:
            print(json.dumps({"seconds": seconds, "megabytes": megabytes}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
