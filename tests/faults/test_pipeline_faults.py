"""If a rank of a pipeline raises an exception, is killed or hangs, all ranks end and the report names the rank."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from launches import running_ranks

PROGRAM = """\
import os, sys, time
import torch
from torch import nn
import unitrain

FAULT, TIMEOUT = sys.argv[1], float(sys.argv[2])

class Faulty(nn.Linear):
    calls = 0

    def forward(self, inputs):
        Faulty.calls += torch.is_grad_enabled()
        if Faulty.calls == 30:
            print("fault", time.time(), flush=True)
            if FAULT == "raises":
                raise ValueError("block 1 is broken")
            if FAULT == "is killed":
                os.kill(os.getpid(), 9)
            time.sleep(300)
        return super().forward(inputs)

with unitrain.init(device="cpu", timeout_seconds=TIMEOUT) as backend:
    model = nn.Sequential(nn.Linear(3, 3), Faulty(3, 3), nn.Linear(3, 3))
    pipeline = unitrain.Pipeline(model, backend, nn.CrossEntropyLoss(), stages=3, balance=[1, 1, 1])
    for number in range(20):
        pipeline.forward_backward(torch.ones(8, 3), torch.zeros(8, dtype=torch.long))
"""

# The text of the report, and the timeout of the ranks in seconds.
FAULTS = {
    "raises": ("unitrain: rank 1 failed first: ValueError: block 1 is broken", 60.0),
    "is killed": ("unitrain: rank 1 failed first: its process was killed or crashed", 60.0),
    "hangs": ("unitrain: rank 1 failed first: it did not join pipeline step #", 6.0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_stage_ends_all_ranks_and_is_reported_once(fault: str, tmp_path: Path) -> None:
    report, timeout = FAULTS[fault]
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    with running_ranks(script, "ddp", 3, fault, str(timeout)) as processes:
        outputs = [process.communicate(timeout=100)[0] for process in processes]
        ended = time.time()
    together = "\n".join(outputs)
    assert all(process.returncode for process in processes), together
    assert together.count(report) == 1, together
    assert not re.search(r"rank [02] failed first", together), together
    (began,) = re.findall(r"fault (\S+)", together)
    assert ended - float(began) < (timeout if timeout < 60 else 0) + 40, together
