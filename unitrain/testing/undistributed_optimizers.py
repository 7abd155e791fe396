"""Contract tests of optimizers that were not passed to `distributed_optimizer`, and of optimizers that step within a
backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.errors import ModelError
from unitrain.testing.cases import assert_same_on_every_rank, contract, raises
from unitrain.testing.models import backward, batch, build, compute_loss, mean_gradients
from unitrain.torch_compat import DDP_IGNORED_NAMES


@contract
def undistributed_optimizer_raises_on_local_gradients(backend: Backend) -> None:
    model = build()
    wrapped = backend.distributed_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with backend.no_sync(wrapped):
        backward(wrapped, backend.rank)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    assert_same_on_every_rank(backend, raises(ModelError, "that are not reduced over ranks", optimizer.step))
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
    for step in range(3):
        backward(wrapped, backend.rank, step)
        optimizer.step()
    assert_same_on_every_rank(backend, [parameter.tolist() for parameter in model.parameters()])


@contract
def step_within_a_backward_pass_uses_reduced_gradients_or_raises(backend: Backend) -> None:
    """Each parameter has an optimizer, which steps in a hook that is registered before or after the model is
    distributed."""

    def register_hooks(model: nn.Module) -> None:
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def step(parameter: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)

    settings: tuple[dict[str, Any], ...] = ({}, {"find_unused_parameters": True}, {"shard": "gradients"})
    for arguments in settings:
        for is_before in (True, False):
            model = build()
            if is_before:
                register_hooks(model)
            wrapped = backend.distributed_model(model, **arguments)
            if not is_before:
                register_hooks(model)
            if isinstance(backend, LocalBackend) or (backend.size == 1 and arguments.get("shard") == "gradients"):
                continue
            text = raises(ModelError, "was called in a hook during the backward pass", lambda: backward(wrapped, 0))  # noqa: B023
            assert_same_on_every_rank(backend, text)
            torch.testing.assert_close([*model.parameters()], [*build().parameters()], rtol=0, atol=0)
    twin, model = build(), build()
    wrapped = backend.distributed_model(model, shard="parameters")
    register_hooks(model)
    expected = mean_gradients(backend, twin, backward)
    backward(wrapped, backend.rank)
    for name, value in wrapped.state_dict().items():
        gradient = expected[name.removeprefix("module.")]
        assert gradient is not None
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        initial = twin.get_parameter(name.removeprefix("module.")).detach()
        torch.testing.assert_close(full, initial - 0.1 * gradient, rtol=0, atol=1e-12)


class _WeightedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(3).double())

    def forward(self, outputs: Tensor) -> Tensor:
        return compute_loss(outputs * self.weights)


@contract
def training_weights_of_a_loss_that_is_not_distributed_raises(backend: Backend) -> None:
    model, loss, separate = build(), _WeightedLoss(), build()
    wrapped = backend.distributed_model(model)
    optimizer = backend.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), wrapped)
    loss_optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    separate_optimizer = torch.optim.SGD(separate.parameters(), lr=0.1)

    def train() -> None:
        for step in range(3):
            for one in (optimizer, loss_optimizer, separate_optimizer):
                one.zero_grad()
            outputs = wrapped(batch(backend.rank, step))
            loss(outputs).backward()
            optimizer.step()
            backward(separate, backend.rank, step)  # a model that each rank trains separately is accepted
            separate_optimizer.step()
            loss_optimizer.step()

    if isinstance(backend, LocalBackend):
        train()
    else:
        text = raises(
            ModelError, "The optimizer holds 1 parameter outside of all distributed models, with shape [3]", train
        )
        assert_same_on_every_rank(backend, text)
        separate_optimizer.step()


@contract
def names_that_ddp_would_ignore_raise(backend: Backend) -> None:
    model = build()
    setattr(model, DDP_IGNORED_NAMES, {"0.bias"})
    text = raises(ModelError, "excludes 0.bias from DDP", lambda: backend.distributed_model(model))
    assert_same_on_every_rank(backend, text)


@contract
def undistributed_optimizer_of_replaced_parameters_raises(backend: Backend) -> None:
    model = build()
    optimizer, later_optimizer = (torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1) for _ in range(2))
    wrapped = backend.distributed_model(model, shard="parameters", shard_blocks=("Linear",))
    backward(wrapped, backend.rank)
    if isinstance(backend, LocalBackend):  # does not replace parameters
        optimizer.step()
        return
    for _ in range(2):
        text = raises(ModelError, "has replaced, such as '0.weight', so it would not change the model", optimizer.step)
        assert_same_on_every_rank(backend, text)
    backend.distributed_optimizer(later_optimizer, wrapped, shard="parameters").step()
