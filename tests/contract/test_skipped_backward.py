"""If one rank skips a backward pass or steps with local gradients, all ranks raise ModelError within seconds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launches import running_ranks
from torch.distributed import HashStore

from unitrain.monitoring.loop_counters import LoopCounters

PROGRAM = """\
import sys, time
import torch
from torch import nn
import unitrain
from unitrain.errors import ModelError

FAULT = sys.argv[1]

def own_loop(backend):
    torch.manual_seed(0)
    inner = nn.Linear(3, 1)
    model = backend.distributed_model(inner)
    optimizer = backend.distributed_optimizer(torch.optim.SGD(inner.parameters(), lr=0.1), model)
    for number in range(400):
        time.sleep(0.01)
        fails = number == 50 and backend.rank == 1
        if fails:
            print("fault", time.time(), flush=True)
        optimizer.zero_grad()
        if backend.rank == 0:  # ranks may run different forward passes
            with torch.no_grad():
                model(torch.ones(2, 3))
            loss = model(torch.ones(2, 3)).sum() + model(torch.zeros(2, 3)).sum()
        else:
            loss = model(torch.ones(2, 3)).sum()
        if fails and FAULT == "continues":
            continue
        if not (fails and FAULT == "skips"):
            loss.backward()
        if fails and FAULT == "adds":
            inner(torch.ones(2, 3)).sum().backward()
        optimizer.step()

with unitrain.init(device="cpu", timeout_seconds=60) as backend:
    try:
        own_loop(backend)
    except ModelError:
        print("raised", time.time(), flush=True)
        raise
"""


ERROR_PATTERNS = {
    "skips": r"before the end of backward #\d+, rank 0 had run \d+ optimizer steps and rank 1 had run \d+\. One",
    "continues": r"rank 0 had run 0 forward passes without a backward pass and rank 1 had run 1\. One",
    "adds": r"gradients that are not reduced over ranks: 2 parameters, weight, bias\. Call",
}


@pytest.mark.parametrize("fault", ERROR_PATTERNS)
@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_skipped_backward_on_one_rank_raises_on_all_ranks(backend: str, fault: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    with running_ranks(script, backend, 2, fault) as processes:
        outputs = [process.communicate(timeout=100)[0] for process in processes]
    together = "\n".join(outputs)
    assert all(process.returncode for process in processes), together
    (began,) = re.findall(r"fault (\S+)", together)
    for output in outputs:
        raised = re.findall(r"raised (\S+)", output)
        assert len(raised) == 1, together
        assert float(raised[0]) - float(began) < 20, together  # about 2 s, longer on a busy machine
        assert re.search(ERROR_PATTERNS[fault], output), together


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_ranks_may_run_different_forward_passes(backend: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    with running_ranks(script, backend, 2, "none") as processes:
        outputs = [process.communicate(timeout=100)[0] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(outputs)


def _count(counters: LoopCounters, times: int) -> None:
    for _ in range(times):
        counters.count_forward(is_training=True).mark_used()
        counters.count_backward()
        counters.count_step()


def test_counters_are_compared_at_the_same_backward_pass() -> None:
    store = HashStore()
    first, other = LoopCounters(), LoopCounters()
    assert other.compare(store, 3) is None
    _count(first, 5000)
    first.publish(store)
    _count(other, 4990)
    assert other.compare(store, 3) is None  # has not reached backward #4999
    _count(first, 1)
    other.count_step()
    _count(other, 10)
    found = other.compare(store, 3)
    assert found is not None
    assert "before the end of backward #4999, rank 0 had run 4999 optimizer steps and rank 3 had run 5000" in found


def test_a_forward_pass_is_reported_only_if_it_is_additional_and_unused() -> None:
    for other_forwards, other_unused, differs in ((3, 0, False), (2, 1, False), (3, 1, True)):
        store = HashStore()
        first, other = LoopCounters(), LoopCounters()
        _count(first, 1)
        _count(other, 1)
        for counters, num_forwards, num_unused in ((first, 2, 0), (other, other_forwards, other_unused)):
            passes = [counters.count_forward(is_training=True) for _ in range(num_forwards)]
            for forward in passes[num_unused:]:
                forward.mark_used()
                forward.mark_used()
            counters.count_backward()
        first.publish(store)
        assert (other.compare(store, 1) is not None) == differs


def test_forward_passes_before_the_first_backward_pass_are_not_compared() -> None:
    """For example, one rank may summarize the model before training."""
    store = HashStore()
    first, other = LoopCounters(), LoopCounters()
    other.count_forward(is_training=True)
    for counters in (first, other):
        counters.count_forward(is_training=True).mark_used()
        counters.count_backward()
    first.publish(store)
    assert other.compare(store, 1) is None
