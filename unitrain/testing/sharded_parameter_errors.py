"""Contract tests of `shard="parameters"` (ZeRO-3): exceptions, unused parameters, and models that cannot be sharded."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from unitrain.backends.base import Backend
from unitrain.errors import ConfigError, ModelError
from unitrain.testing.cases import assert_same_on_every_rank, contract, raises
from unitrain.testing.sharded_parameters import adamw, build_model, distribute, gather_complete_state, model_loss


class _Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.fails = self.skips = False

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.first(inputs)
        if self.fails:
            raise RuntimeError("failed")
        output: Tensor = features if self.skips else self.second(features)
        return output


@contract
def sharded_parameters_continue_after_an_exception(backend: Backend) -> None:
    model = _Failing()
    wrapped, optimizer = distribute(backend, model, blocks=(nn.Linear,))
    model.fails = True
    raises(RuntimeError, "failed", lambda: wrapped(torch.ones(2, 3)))
    model.fails = False
    wrapped(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if backend.size > 1 or backend.name != "local":
        model.skips = True
        wrapped(torch.ones(2, 3)).sum().backward()
        optimizer.step()


@contract
def sharded_parameters_that_are_unused_raise(backend: Backend) -> None:
    model = _Failing()
    wrapped, _ = distribute(backend, model, blocks=())
    model.skips = backend.rank == 0
    text = raises(ModelError, "2 parameters received no gradient", lambda: wrapped(torch.ones(2, 3)).sum().backward())
    assert "second.weight, second.bias" in text
    assert_same_on_every_rank(backend, text)


@contract
def sharded_parameters_reject_a_step_on_local_gradients(backend: Backend) -> None:
    model = build_model()
    wrapped, optimizer = distribute(backend, model)
    before = gather_complete_state(backend, wrapped)
    with backend.no_sync(wrapped):
        model_loss(wrapped, [backend.rank], 0).backward()
    text = raises(ModelError, "not reduced over ranks", optimizer.step)
    assert_same_on_every_rank(backend, text)
    torch.testing.assert_close(gather_complete_state(backend, wrapped), before)
    optimizer.zero_grad()
    model_loss(wrapped, [backend.rank], 0).backward()
    optimizer.step()


class _Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))


@contract
def parameters_that_cannot_be_sharded_raise(backend: Backend) -> None:
    def assert_raises(error_class: type[Exception], text: str, model: nn.Module, **arguments: Any) -> None:
        arguments = {"shard": "parameters", **arguments}
        message = raises(error_class, text, lambda: backend.distributed_model(model, **arguments))
        assert_same_on_every_rank(backend, message)

    model = build_model()
    assert_raises(ConfigError, "does not compress gradients, got compression='fp16'", model, compression="fp16")
    assert_raises(ConfigError, "does not support find_unused_parameters=True", model, find_unused_parameters=True)
    assert_raises(ConfigError, "shard is 'state'", model, shard="state", shard_blocks=("TransformerLayer",))
    assert_raises(ConfigError, "must be a tuple of classes", model, shard_blocks="TransformerLayer")
    assert_raises(ConfigError, "or a positive number of parameters, got 0", model, shard_blocks=0)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert_raises(ModelError, f"but {type(model).__name__} has only {total}", model, shard_blocks=total + 1)
    assert_raises(ModelError, "has no module of class 'Layer'", model, shard_blocks=("Layer",))
    assert_raises(ModelError, "'embedding.weight' is shared by", model, shard_blocks=("Embedding",))
    assert_raises(ModelError, "'factor' has 0 dimensions", _Scalar())
    empty = nn.Linear(2, 2)
    empty.extra = nn.Parameter(torch.zeros(0, 3))
    assert_raises(ModelError, "'extra' of shape [0, 3] has no elements", empty)
    assert_raises(ModelError, "is not contiguous", nn.Conv2d(3, 3, 3).to(memory_format=torch.channels_last))
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    assert_raises(ModelError, "have different dtypes", mixed)
    hooked = nn.Linear(2, 2)
    hooked.weight.register_hook(lambda gradient: gradient)
    assert_raises(ModelError, "has a gradient hook", hooked)

    wrapped = backend.distributed_model(model, shard="parameters")
    for optimizer in (torch.optim.LBFGS(model.parameters()), torch.optim.Adafactor(model.parameters())):
        text = raises(
            ModelError,
            f"elementwise optimizer of torch.optim, got {type(optimizer).__name__}",
            lambda optimizer=optimizer: backend.distributed_optimizer(optimizer, wrapped, shard="parameters"),
        )
        assert_same_on_every_rank(backend, text)
    for shard in ("none", "state"):
        text = raises(
            ModelError,
            f"was called with shard={shard!r} and a model with shard='parameters'",
            lambda shard=shard: backend.distributed_optimizer(adamw(model.parameters()), wrapped, shard=shard),
        )
        assert_same_on_every_rank(backend, text)
    if backend.name != "local":
        assert_raises(ModelError, "is already sharded", model)
        raises(ModelError, "cannot be copied", lambda: copy.deepcopy(wrapped))
