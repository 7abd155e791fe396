"""Loss functions that refer to trainable parameters outside of the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unitrain
from unitrain.backends.local import LocalBackend
from unitrain.errors import ModelError


class Scaled(nn.Module):
    """A loss with a trainable factor."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (self.factor * output - target).square().mean()


GLOBAL_LOSS = Scaled()


class Holder:
    """A function object with a loss module as attribute."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = {"main": [module]}

    def __call__(self, output: Tensor, target: Tensor) -> Any:
        return self.modules["main"][0](output, target)

    def compute(self, output: Tensor, target: Tensor) -> Any:
        return self(output, target)


def _closure(module: nn.Module) -> Callable[..., Any]:
    def inner(output: Tensor, target: Tensor) -> Any:
        return module(output, target)

    return lambda output, target: inner(output, target)


def _of_parameter(module: Any) -> Callable[..., Any]:
    factor = module.factor
    return lambda output, target: (factor * output - target).square().mean()


def _default(module: nn.Module) -> Callable[..., Any]:
    return lambda output, target, criterion=module: criterion(output, target)


FORMS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "closure": _closure,
    "parameter": _of_parameter,
    "default": _default,
    "object": Holder,
    "method": lambda module: Holder(module).compute,
    "partial": lambda module: partial(lambda criterion, output, target: criterion(output, target), module),
    "global": lambda module: lambda output, target: GLOBAL_LOSS(output, target),
}


def _fit(loss_fn: Any, *, model: nn.Module | None = None) -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 1) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = unitrain.TrainConfig(max_epochs=1, progress="off")
    trainer = unitrain.Trainer(model, optimizer, loss_fn, backend=LocalBackend(torch.device("cpu")), config=config)
    trainer.fit(torch.utils.data.DataLoader(TensorDataset(torch.ones(4, 2), torch.ones(4, 1)), batch_size=2))


@pytest.mark.parametrize("form", FORMS)
def test_untrained_parameters_of_the_loss_function_raise(form: str) -> None:
    with pytest.raises(ModelError, match=r"factor.* which the Trainer does not train"):
        _fit(FORMS[form](Scaled()))


@pytest.mark.parametrize("form", [form for form in FORMS if form != "global"])
def test_frozen_parameters_of_the_loss_function_are_accepted(form: str) -> None:
    _fit(FORMS[form](Scaled().requires_grad_(False)))


def test_trainable_teacher_without_gradients_is_accepted() -> None:
    teacher, student = nn.Linear(1, 1), nn.Linear(2, 1)
    teacher(torch.ones(1, 1)).sum().backward()  # a gradient of its own training

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            expected = teacher(target)
        return (output - expected).square().mean() + 0 * student.weight.sum()

    _fit(loss_fn, model=student)


def test_loss_parameters_of_the_model_are_trained() -> None:
    loss, model = Scaled(), nn.Sequential(nn.Linear(2, 1))
    model.loss = loss
    model.forward = lambda inputs: model[0](inputs)  # type: ignore[method-assign, assignment]
    _fit(_closure(loss), model=model)
    assert loss.factor.item() != 1


class Detector(nn.Module):
    """Returns losses in training mode, and detections in eval mode, as the detectors of torchvision do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Any:
        output = self.layer(x)
        return {"box": output.square().mean()} if self.training else [output]


def test_error_of_a_loss_function_in_eval_mode_states_the_mode() -> None:
    model, data = Detector(), TensorDataset(torch.ones(4, 1), torch.ones(4, 1))
    config = unitrain.TrainConfig(max_epochs=1, batch_size=2, progress="off")
    backend, optimizer = LocalBackend(torch.device("cpu")), torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unitrain.Trainer(model, optimizer, lambda losses, _: losses["box"], backend=backend, config=config)
    trainer.fit(data)
    with pytest.raises(TypeError) as caught:
        trainer.evaluate(data)
    assert "the output of the model in eval mode, of class list" in "".join(caught.value.__notes__)
