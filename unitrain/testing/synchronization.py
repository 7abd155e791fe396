"""Contract tests of gradient synchronization: equality with the reference implementation, copies of models, overflow,
and mismatches."""

from __future__ import annotations

import copy

import torch
from torch import nn

from unitrain.backends.base import Backend
from unitrain.backends.gradients.reference import synchronize_gradients
from unitrain.errors import CollectiveMismatchError, ModelError, TensorError
from unitrain.testing.cases import contract, raises
from unitrain.testing.models import backward, build, gradients


@contract
def gradients_equal_those_of_the_reference_implementation(backend: Backend) -> None:
    for find_unused_parameters in (False, True):
        model, plain = build(), build()
        distributed = backend.distributed_model(model, find_unused_parameters=find_unused_parameters)
        for step in range(3):
            model.zero_grad()
            plain.zero_grad()
            backward(distributed, backend.rank, step)
            backward(plain, backend.rank, step)
            synchronize_gradients(plain, backend)
            torch.testing.assert_close(gradients(model), gradients(plain), rtol=1e-12, atol=1e-12)


@contract
def copying_a_distributed_model_raises_and_averaging_its_weights_works(backend: Backend) -> None:
    model = build()
    distributed = backend.distributed_model(model)
    if distributed is not model:
        raises(ModelError, "AveragedModel(backend.unwrap(model))", lambda: copy.deepcopy(distributed))
    average = torch.optim.swa_utils.AveragedModel(backend.unwrap(distributed))
    average.update_parameters(distributed)
    for own, averaged in zip(model.parameters(), average.module.parameters(), strict=True):
        assert torch.equal(own, averaged)


class _Wrapper(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared, self.own = shared, nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.own(self.shared(x))
        return output


@contract
def two_models_that_share_a_parameter_cannot_share_a_backward(backend: Backend) -> None:
    torch.manual_seed(0)
    shared = nn.Linear(2, 2)
    first, second = (backend.distributed_model(_Wrapper(shared)) for _ in range(2))
    x = torch.ones(3, 2)
    for model in (first, second):  # each model may run its own backward pass
        model(x).sum().backward()

    def one_backward() -> None:
        (first(x).sum() + second(x).sum()).backward()

    if backend.unwrap(first) is first:  # one process without a reducer adds both gradients
        one_backward()
    else:
        raises(ModelError, "share the parameter 'shared.weight'", one_backward)


@contract
def mean_overflows_if_and_only_if_the_sum_overflows(backend: Backend) -> None:
    largest = torch.finfo(torch.float32).max
    for elements in (1, 5000):
        mean = backend.allreduce(torch.full((elements,), largest / backend.size), "mean")
        assert mean.isfinite().all()
        mean = backend.allreduce(torch.full((elements,), largest), "mean")
        assert mean.isfinite().all() if backend.size == 1 else mean.isinf().all()


@contract
def collectives_of_large_tensors_work_after_a_mismatch(backend: Backend) -> None:
    """A backend may start a large allreduce before the ranks have compared its arguments."""
    is_last, several = backend.rank == backend.size - 1, backend.size > 1
    ones = torch.ones(100_000)
    mismatches = [
        lambda: backend.allreduce(torch.ones(100_001 if is_last else 100_000), "sum"),
        lambda: backend.allreduce(ones, "product" if is_last else "sum"),
        lambda: backend.allreduce(ones, "mean" if is_last else "sum"),
        lambda: backend.allreduce(ones.double() if is_last else ones, "sum"),
        lambda: backend.broadcast(ones) if is_last else backend.allreduce(ones, "sum"),
        lambda: backend.barrier() if is_last else backend.allreduce(ones, "sum"),
    ]
    for mismatch in mismatches:
        if several:
            raises(CollectiveMismatchError, "called different collectives", mismatch)
        assert torch.equal(backend.allreduce(ones, "sum"), ones * backend.size)
    invalid = torch.ones(100_000, requires_grad=is_last)
    raises(TensorError, "requires grad", lambda: backend.allreduce(invalid, "sum"))
    model = build()
    distributed = backend.distributed_model(model)
    for step in range(3):
        model.zero_grad()
        backward(distributed, backend.rank, step)
        assert torch.equal(backend.allreduce(ones, "mean"), ones)
