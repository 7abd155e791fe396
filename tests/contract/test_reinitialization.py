"""After `shutdown`, and not before, a process can start the same or another backend."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from preload import preloaded
from requirements import needs_mpi
from torch import Tensor, nn

import unitrain
from unitrain.backends.base import Backend, ShardingMode
from unitrain.bootstrap import environment
from unitrain.errors import ConfigError, Preempted
from unitrain.testing import RankGroup
from unitrain.testing.models import batch, build, compute_loss

BIN = Path(sys.executable).parent
TORCHRUN = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "--no-python"]
HOROVODRUN = [str(BIN / "horovodrun"), "-np", "2", "--gloo"]
MPIRUN = ["mpirun", "-np", "2", "--oversubscribe"]


def reduce_gradients_and_ranks(backend: Backend) -> float:
    """Reduce gradients and run a collective. Return the sum of all ranks."""
    model = build()
    compute_loss(backend.distributed_model(model)(batch(backend.rank))).backward()
    return float(backend.allreduce(torch.tensor(float(backend.rank)), "sum"))


def start_second_backend(backend: Backend) -> str:
    try:
        unitrain.init(backend.name, device="cpu")
    except ConfigError as error:
        backend.barrier()  # the first backend is still usable
        return str(error)
    raise AssertionError("two backends were started")


def start_repeatedly(backend: Backend, names: Sequence[str]) -> list[float]:
    backend.shutdown()
    found = []
    for name in names:
        with unitrain.init(name, device="cpu", timeout_seconds=30) as later:
            backend.shutdown()  # a second call must not shut down the later backend
            found.append(reduce_gradients_and_ranks(later))
    return found


def start_after_failure(backend: Backend) -> float:
    """Start a backend whose first start fails after it has created the default process group."""
    backend.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "new_group", lambda **_: (_ for _ in ()).throw(OSError("no file descriptors")))
        with pytest.raises(OSError, match="no file descriptors"):
            unitrain.init(backend.name, device="cpu", timeout_seconds=30)
    with unitrain.init(backend.name, device="cpu", timeout_seconds=30) as later:
        return reduce_gradients_and_ranks(later)


@pytest.mark.parametrize(
    ("backend", "command"),
    [
        ("ddp", []),
        ("ddp", TORCHRUN),
        pytest.param("ddp", HOROVODRUN, marks=pytest.mark.nightly),
        pytest.param("horovod", TORCHRUN, marks=pytest.mark.nightly),
        ("horovod", HOROVODRUN),
        pytest.param("horovod", MPIRUN, marks=needs_mpi),
    ],
    ids=["ddp", "ddp-torchrun", "ddp-horovodrun", "horovod-torchrun", "horovod-horovodrun", "horovod-mpirun"],
)
def test_ranks_can_start_a_backend_again_after_shutdown(backend: str, command: list[str]) -> None:
    environment.export_defaults({"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})
    names = (
        [backend] * 3 if command == MPIRUN else ["horovod", "ddp", backend]
    )  # mpirun does not set a rendezvous address for ddp
    with RankGroup(backend, 2, command=command, variables=preloaded({}) if command else {}) as group:
        for rank_results in group.run(start_second_backend):
            assert rank_results == (
                "This process already has a process group, from an earlier unitrain.init() or init_process_group(). "
                "Use that group, or shut it down first: backend.shutdown() or "
                "torch.distributed.destroy_process_group()"
            )
        assert group.run(reduce_gradients_and_ranks) == [1.0, 1.0]
        assert group.run(start_repeatedly, names) == [[1.0] * 3] * 2
        assert group.run(start_after_failure) == [1.0, 1.0]


def train_after_shutdown(backend: Backend, shard: ShardingMode) -> bool:
    """Run backward passes on rank 0 after the shutdown. Return whether the gradients equal local gradients.

    The forward pass of the first backward pass runs before the shutdown, and the second forward pass runs after it.
    """
    model = build()
    distributed = backend.distributed_model(model, shard=shard)
    loss = compute_loss(distributed(batch(0)))
    backend.shutdown()
    if backend.rank > 0:
        return True
    twin = build()
    compute_loss(twin(batch(0))).backward()
    expected: Any = [parameter.grad for parameter in twin.parameters()]
    for run_backward in (loss.backward, lambda: compute_loss(distributed(batch(0))).backward()):
        model.zero_grad()
        run_backward()
        found: Any = [parameter.grad for parameter in model.parameters()]
        if not all(torch.equal(*pair) for pair in zip(found, expected, strict=True)):
            return False
    return True


@pytest.mark.parametrize("shard", ["none", "gradients"])
def test_models_do_not_wait_for_other_ranks_after_the_shutdown(shard: ShardingMode) -> None:
    with RankGroup("ddp", 2) as group:
        assert group.run(train_after_shutdown, shard) == [True, True]


def fail() -> None:
    raise OSError("disk full")


def test_a_failing_exit_function_ends_the_local_backend() -> None:
    with pytest.raises(OSError, match="disk full"), unitrain.init("local") as backend:
        backend.call_before_exit(fail)
    unitrain.init("local").shutdown()


@pytest.mark.parametrize(
    ("error", "is_called"),
    [(SystemExit(), True), (SystemExit(0), True), (SystemExit(1), False), (Preempted("SIGTERM"), False)],
    ids=repr,
)
def test_exit_functions_are_called_if_the_block_exits_successfully(error: BaseException, is_called: bool) -> None:
    called: list[Tensor] = []
    backend = unitrain.init("local")
    backend.call_before_exit(lambda: called.append(backend.allreduce(torch.ones(()))))
    with pytest.raises(type(error)), backend:
        raise error
    assert called == [torch.ones(())] * is_called


def failures_reported_by_exit_function(backend: Backend) -> list[str]:
    """Return the failures that a failing exit function reports to the other ranks, for several ways to exit the
    block."""
    reported = list[str]()
    backend.report_failure = lambda error: reported.append(str(error))  # type: ignore[method-assign]
    backend.call_before_exit(fail)
    for error in (None, SystemExit(), SystemExit(0)):
        with suppress(OSError):
            backend.__exit__(None if error is None else SystemExit, error, None)
            raise AssertionError(f"the exit function was not called after {error!r}")
    return reported


def test_a_failing_exit_function_is_reported_to_the_other_ranks() -> None:
    with RankGroup("ddp", 2) as group:
        assert group.run(failures_reported_by_exit_function) == [["disk full"] * 3] * 2


def test_local_models_can_be_trained_after_the_shutdown() -> None:
    backend = unitrain.init("local")
    model = nn.Linear(2, 1)
    backend.distributed_model(model, compression="bf16")
    backend.shutdown()
    inputs = torch.tensor([[0.1234567, 0.7654321]])
    (model(inputs).sum() + model.bias.sum() * 0).backward()
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, inputs)  # bf16 would round the gradient


def test_distributing_a_local_model_again_replaces_its_compression() -> None:
    with unitrain.init("local") as backend:
        model = nn.Linear(2, 1)
        backend.distributed_model(model, compression="bf16")
        backend.distributed_model(model, compression="none")
        inputs = torch.tensor([[0.1234567, 0.7654321]])
        model(inputs).sum().backward()
        assert model.weight.grad is not None
        assert torch.equal(model.weight.grad, inputs)


def test_local_backend_can_be_started_again_after_shutdown() -> None:
    with unitrain.init("local") as backend:
        assert start_second_backend(backend) == (
            "This process already has a backend, from an earlier unitrain.init(). "
            "Use that backend, or shut it down first: backend.shutdown()"
        )
    with unitrain.init("local") as backend:
        assert reduce_gradients_and_ranks(backend) == 0.0
    deleted = unitrain.init("local")
    del deleted
    unitrain.init("local").shutdown()
