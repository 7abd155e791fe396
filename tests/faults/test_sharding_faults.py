"""Faults in runs with sharded gradients or parameters end all ranks, and the report names the faulty rank. A rank
raises an exception, is killed, is stopped or calls another collective."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import pytest
from launches import running_ranks

PROGRAM = """\
import os, sys, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
import unitrain

FAULT, LOOP, SHARD, TIMEOUT = sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])
STEP = 8

def print_fault_time():
    print("fault", time.time(), flush=True)

class Block(nn.Module):
    forwards = 0

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, inputs):
        Block.forwards += torch.is_grad_enabled()
        if Block.forwards == 2 * STEP and os.environ["RANK"] == "1":
            if FAULT == "raises":
                print_fault_time()
                raise ValueError("the second block is broken")
            if FAULT == "is killed":
                print_fault_time()
                os.kill(os.getpid(), 9)
            if FAULT == "is stopped":
                print_fault_time()
                os.kill(os.getpid(), 19)
        return inputs + self.layer(inputs).relu()

def after_step(step, rank, optimizer):
    if FAULT == "calls state_dict" and step == STEP and rank == 1:
        print_fault_time()
        optimizer.state_dict()

class AfterStep(unitrain.Callback):
    def on_step_end(self, trainer):
        after_step(trainer.progress.step, trainer.backend.rank, trainer.optimizer)

with unitrain.init(device="cpu", timeout_seconds=TIMEOUT) as backend:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), Block(), Block(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, targets = torch.ones(8, 3), torch.zeros(8, dtype=torch.long)
    if LOOP == "Trainer":
        config = unitrain.TrainConfig(max_steps=2000, batch_size=4, shard=SHARD, max_grad_norm=1.0, progress="off")
        trainer = unitrain.Trainer(
            model, optimizer, nn.functional.cross_entropy, backend=backend, config=config, callbacks=[AfterStep()]
        )
        trainer.fit(TensorDataset(inputs, targets))
    else:
        distributed = backend.distributed_model(model, shard=SHARD)
        optimizer = backend.distributed_optimizer(optimizer, distributed, shard=SHARD)
        for step in range(1, 2000):
            nn.functional.cross_entropy(distributed(inputs), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            after_step(step, backend.rank, optimizer)
"""

# The pattern of the report, and the timeout of collectives in seconds. The collectives of the Trainer detect
# immediately that a rank called another collective.
FAULTS = {
    "raises": ("unitrain: rank 1 failed first: ValueError: the second block is broken", 60.0),
    "is killed": ("unitrain: rank 1 failed first: its process was killed or crashed", 60.0),
    "is stopped": ("unitrain: rank 1 failed first: it did not join ", 8.0),
    "calls state_dict": (
        r"rank 1: .* at train.py:37: optimizer.state_dict\(\)|CollectiveMismatchError: .* rank 1 (called|in) ",
        8.0,
    ),
}
CASES = [
    ("gradients", "horovod", "own loop"),
    *(
        pytest.param(*case, marks=pytest.mark.nightly)
        for case in product(("gradients", "parameters"), ("ddp", "horovod"), ("own loop", "Trainer"))
        if case != ("gradients", "horovod", "own loop")
    ),
]


@pytest.mark.parametrize(("shard", "backend", "loop"), CASES, ids=lambda value: value)
def test_a_fault_ends_sharded_training_and_the_report_names_the_rank(
    shard: str, backend: str, loop: str, tmp_path: Path
) -> None:
    """The jobs for all faults run concurrently."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    with ExitStack() as stack:
        jobs = {
            fault: stack.enter_context(running_ranks(script, backend, 2, fault, loop, shard, str(timeout)))
            for fault, (_, timeout) in FAULTS.items()
        }
        for fault, processes in jobs.items():
            report, _ = FAULTS[fault]
            together = "\n".join(process.communicate(timeout=100)[0] for process in processes)
            ended = time.time()
            assert all(process.returncode for process in processes), f"{fault}:\n{together}"
            assert re.search(report, together), f"{fault}:\n{together}"
            if fault != "calls state_dict":  # with this fault, both ranks wait for each other
                assert "rank 0 failed first" not in together, f"{fault}:\n{together}"
            (began,) = re.findall(r"fault (\S+)", together)
            # The time also includes waiting for the ranks of earlier jobs.
            limit = max(limit for _, limit in FAULTS.values() if limit < 60)
            assert ended - float(began) < limit + 40, f"{fault}:\n{together}"
