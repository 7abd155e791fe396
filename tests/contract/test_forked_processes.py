"""A process that is forked from a rank is not a rank: its collectives raise errors, and its exit does not end the
group."""

from __future__ import annotations

import os

import pytest
import torch

from unitrain.backends.base import Backend
from unitrain.errors import ConfigError
from unitrain.testing import RankGroup


def call_collectives_in_forked_process(backend: Backend) -> tuple[list[str], float]:
    """Return the errors in a process that is forked from the last rank, and the result of a later allreduce of the
    ranks."""
    texts = ""
    if backend.rank == backend.size - 1:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                for call in (
                    backend.barrier,
                    lambda: backend.allreduce(torch.ones(3)),
                    lambda: backend.allreduce(torch.ones(100_000)),
                    lambda: backend.distributed_model(torch.nn.Linear(1, 1)),
                ):
                    try:
                        call()
                    except ConfigError as error:
                        os.write(writer, f"{error}\n".encode())
                backend.shutdown()
            finally:
                os._exit(0)
        os.close(writer)
        os.waitpid(child, 0)
        with os.fdopen(reader) as file:
            texts = file.read()
    total = 0.0
    for _ in range(3):
        total += backend.allreduce(torch.ones(100_000), "sum")[0].item() + backend.allgather_object(1)[0]
    return texts.splitlines(), total


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_collectives_of_a_forked_process_are_rejected_and_its_exit_is_ignored(backend: str) -> None:
    with RankGroup(backend, 2) as group:
        (none, first_total), (texts, last_total) = group.run(call_collectives_in_forked_process)
    assert none == []
    assert first_total == last_total == 9.0
    operations = ["barrier", "allreduce", "allreduce", "distributed_model"]
    assert texts == [
        f"{operation} was called in a process that was forked from rank 1 and is not a rank. Call it in the rank's "
        "own process, and end the forked process with os._exit(0)."
        for operation in operations
    ]
