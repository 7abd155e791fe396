"""Contract tests of `optimizer.step`, which raises ModelError before any update if a gradient is not reduced."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from unitrain.backends.base import Backend
from unitrain.errors import ModelError
from unitrain.testing.cases import assert_same_on_every_rank, contract, may_raise_unsupported_error, raises
from unitrain.testing.models import (
    FEATURES,
    assert_gradients,
    assert_reduced,
    backward,
    batch,
    build,
    compute_loss,
    gradients,
    mean_gradients,
)
from unitrain.testing.parameters import TwoHeads

_LOCAL_GRADIENTS_TEXT = "gradients that are not reduced over ranks"


def _distribute_model_and_optimizer(
    backend: Backend, **settings: Any
) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """Return a new model, its distributed model, and the distributed optimizer."""
    model = build()
    wrapped = backend.distributed_model(model, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    return model, wrapped, backend.distributed_optimizer(optimizer, wrapped)


def _assert_step_raises(backend: Backend, model: nn.Module, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    """Assert that a step raises the same ModelError on every rank and changes neither parameters nor state."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    text = raises(ModelError, _LOCAL_GRADIENTS_TEXT, lambda: optimizer.step(*arguments))
    assert_same_on_every_rank(backend, text)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
    assert not optimizer.state


@contract
@may_raise_unsupported_error
def step_after_backward_inside_no_sync_raises(backend: Backend) -> None:
    for settings in ({}, {"find_unused_parameters": True}, {"compression": "fp16"}):
        model, wrapped, optimizer = _distribute_model_and_optimizer(backend, **settings)
        backward(wrapped, backend.rank, 0)
        with backend.no_sync(wrapped):
            backward(wrapped, backend.rank, 1)
        _assert_step_raises(backend, model, optimizer)
        backward(wrapped, backend.rank, 2)  # this backward pass reduces all accumulated gradients
        optimizer.step()
        assert_same_on_every_rank(backend, [parameter.tolist() for parameter in model.parameters()])


@contract
@may_raise_unsupported_error
def no_sync_applies_to_its_model_only(backend: Backend) -> None:
    """Two models are trained in the same loop, like those of a GAN."""
    model, wrapped, optimizer = _distribute_model_and_optimizer(backend)
    other, other_wrapped, other_optimizer = _distribute_model_and_optimizer(backend, compression="fp16")
    expected = build()
    backward(backend.distributed_model(expected, compression="fp16"), backend.rank)
    with backend.no_sync(wrapped):
        with backend.no_sync(other_wrapped):
            pass
        backward(wrapped, backend.rank)
        backward(other_wrapped, backend.rank)
    assert_gradients(other, gradients(expected), tolerance=0)
    other_optimizer.step()
    _assert_step_raises(backend, model, optimizer)

    two_heads = TwoHeads()
    with backend.no_sync(wrapped):
        loss = compute_loss(backend.distributed_model(two_heads)(batch(backend.rank), "left"))
        raises(ModelError, "received no gradient on every rank", loss.backward)


@contract
def grad_scaler_step_on_local_gradients_raises(backend: Backend) -> None:
    model, wrapped, optimizer = _distribute_model_and_optimizer(backend)
    scaler = torch.amp.GradScaler(backend.device.type, init_scale=8.0)
    with backend.no_sync(wrapped):
        scaler.scale(compute_loss(wrapped(batch(backend.rank)))).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    raises(ModelError, _LOCAL_GRADIENTS_TEXT, lambda: scaler.step(optimizer))
    assert not optimizer.state


@contract
def backward_outside_no_sync_reduces_after_forward_inside(backend: Backend) -> None:
    for find_unused_parameters in (False, True):
        model, twin = build(), build()
        wrapped = backend.distributed_model(model, find_unused_parameters=find_unused_parameters)

        def run(m: nn.Module, rank: int, wrapped: nn.Module = wrapped) -> None:
            backward(m, rank, 3)
            if m is wrapped:
                with backend.no_sync(wrapped):
                    loss = compute_loss(m(batch(rank, 4)))
            else:
                loss = compute_loss(m(batch(rank, 4)))
            loss.backward()

        assert_reduced(backend, wrapped, model, twin, run)


@contract
def one_backward_after_forwards_inside_and_outside_no_sync_reduces_both(backend: Backend) -> None:
    model, twin = TwoHeads(), TwoHeads()
    wrapped = backend.distributed_model(model, find_unused_parameters=True)

    def run(m: nn.Module, rank: int) -> None:
        if m is wrapped:
            with backend.no_sync(wrapped):
                first = m(batch(rank, 0), "left")
        else:
            first = m(batch(rank, 0), "left")
        (compute_loss(first) + compute_loss(m(batch(rank, 1), "right"))).backward()

    assert_reduced(backend, wrapped, model, twin, run)


@contract
def step_after_backward_of_the_unwrapped_model_raises(backend: Backend) -> None:
    model, wrapped, optimizer = _distribute_model_and_optimizer(backend)
    if wrapped is model:
        return  # a single process, whose gradients are global
    backward(model, backend.rank)
    _assert_step_raises(backend, model, optimizer)
    optimizer.zero_grad()
    backward(wrapped, backend.rank)
    backward(model, backend.rank)
    _assert_step_raises(backend, model, optimizer)


class _Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


class _Output:
    """Output type that DDP does not search for tensors."""

    def __init__(self, value: Tensor) -> None:
        self.parts = {"logits": _Slotted(value)}
        self.itself = self


class _ObjectOutputModel(nn.Module):
    def __init__(self, make_output: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.make_output = build(), make_output

    def forward(self, x: Tensor) -> Any:
        return self.make_output(self.inner(x))


def _hide_in_function(value: Tensor) -> Callable[[], Tensor]:
    return lambda: value


@contract
def retained_graph_is_reduced_for_any_output_type(backend: Backend) -> None:
    for find_unused_parameters in (False, True):
        model, twin = _ObjectOutputModel(_Output), _ObjectOutputModel(_Output)
        wrapped = backend.distributed_model(model, find_unused_parameters=find_unused_parameters)

        def run(m: nn.Module, rank: int) -> None:
            loss = compute_loss(m(batch(rank)).parts["logits"].value)
            loss.backward(retain_graph=True)
            loss.backward()

        assert_reduced(backend, wrapped, model, twin, run)


@contract
def retained_graph_of_an_undetected_output_raises(backend: Backend) -> None:
    model = _ObjectOutputModel(_hide_in_function)
    wrapped = backend.distributed_model(model)
    optimizer = backend.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), wrapped)
    for _ in range(2):
        optimizer.zero_grad()
        loss = compute_loss(wrapped(batch(backend.rank))())
        loss.backward(retain_graph=True)
        optimizer.step()
    assert_same_on_every_rank(backend, [parameter.tolist() for parameter in model.parameters()])
    if wrapped is model:
        return
    optimizer.zero_grad()
    loss = compute_loss(wrapped(batch(backend.rank))())
    loss.backward(retain_graph=True)
    loss.backward()
    _assert_step_raises(backend, model, optimizer)


@contract
def discarded_local_gradients_are_ignored(backend: Backend) -> None:
    model, wrapped, optimizer = _distribute_model_and_optimizer(backend)
    for set_to_none in (True, False):
        with backend.no_sync(wrapped):
            backward(wrapped, backend.rank)
        optimizer.zero_grad(set_to_none=set_to_none)
        optimizer.step()
    assert_same_on_every_rank(backend, [parameter.tolist() for parameter in model.parameters()])


@contract
def manually_assigned_gradients_are_accepted(backend: Backend) -> None:
    model, wrapped, optimizer = _distribute_model_and_optimizer(backend)
    wrapped(batch(backend.rank))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    computed_gradients = torch.autograd.grad(compute_loss(model(batch(0))), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), computed_gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    assert_same_on_every_rank(backend, [parameter.tolist() for parameter in model.parameters()])


def _weight_penalty(model: nn.Module) -> Tensor:
    return torch.stack([parameter.pow(2).sum() for parameter in model.parameters()]).sum()


@contract
def backward_of_a_weight_penalty_may_come_first(backend: Backend) -> None:
    model, twin = build(), build()
    wrapped = backend.distributed_model(model)
    optimizer = backend.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), wrapped)

    def run(m: nn.Module, rank: int) -> None:
        _weight_penalty(m).backward()
        backward(m, rank)

    run(wrapped, backend.rank)
    assert_gradients(model, mean_gradients(backend, twin, run))
    optimizer.step()
    if wrapped is not model:
        backward(wrapped, backend.rank)
        _weight_penalty(model).backward()
        raises(ModelError, "another loss, such as a penalty, run its backward pass before", optimizer.step)


@contract
def closure_that_leaves_local_gradients_raises(backend: Backend) -> None:
    model = build()
    wrapped = backend.distributed_model(model)
    optimizer = backend.distributed_optimizer(torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2), wrapped)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = compute_loss(wrapped(batch(backend.rank)))
        loss.backward()
        return backend.allreduce(loss.detach())

    def local_closure() -> Tensor:
        with backend.no_sync(wrapped):
            return closure()

    with backend.no_sync(wrapped):
        backward(wrapped, backend.rank)  # the closure discards these gradients
    before = [parameter.detach().clone() for parameter in model.parameters()]
    raises(ModelError, _LOCAL_GRADIENTS_TEXT, lambda: optimizer.step(local_closure))  # type: ignore[arg-type]
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
    optimizer.step(closure)  # type: ignore[arg-type]
    assert_same_on_every_rank(backend, [parameter.tolist() for parameter in model.parameters()])


@contract
def one_of_several_optimizers_steps_on_global_gradients(backend: Backend) -> None:
    model = TwoHeads()
    wrapped = backend.distributed_model(model, find_unused_parameters=True)
    left_optimizer, right_optimizer = (
        backend.distributed_optimizer(torch.optim.SGD(head.parameters(), lr=0.1), wrapped)
        for head in (model.left, model.right)
    )
    compute_loss(wrapped(batch(backend.rank), "left right")).backward()
    with backend.no_sync(wrapped):
        compute_loss(wrapped(batch(backend.rank), "right")).backward()
    if wrapped is not model:
        left_optimizer.step()
    raises(ModelError, "right.weight, right.bias", right_optimizer.step)


@contract
def freezing_a_parameter_with_a_local_gradient_raises(backend: Backend) -> None:
    model, wrapped, optimizer = _distribute_model_and_optimizer(backend)
    if wrapped is model:
        return
    with backend.no_sync(wrapped):
        backward(wrapped, backend.rank)
    model[0].requires_grad_(False)  # type: ignore[index]
    backward(wrapped, backend.rank)
    raises(ModelError, "2 parameters, 0.weight, 0.bias", optimizer.step)
    model[0].requires_grad_(True)  # type: ignore[index]
    backward(wrapped, backend.rank)
    optimizer.step()
    assert_same_on_every_rank(backend, [parameter.tolist() for parameter in model.parameters()])


@contract
def parameters_unfrozen_later_are_tracked(backend: Backend) -> None:
    model = build()
    model[0].requires_grad_(False)  # type: ignore[index]
    wrapped = backend.distributed_model(model)
    optimizer = backend.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), wrapped)
    backward(wrapped, backend.rank)
    model[0].requires_grad_(True)  # type: ignore[index]
    with backend.no_sync(wrapped):
        backward(wrapped, backend.rank)
    raises(ModelError, "6 parameters, 0.weight", optimizer.step)


@contract
def parameters_used_only_in_no_sync_are_reduced_after_unfreezing(backend: Backend) -> None:
    for user in range(backend.size):  # the only rank whose first micro-batch uses the right head
        model, twin = TwoHeads(), TwoHeads()
        model.left.requires_grad_(False)
        wrapped = backend.distributed_model(model, find_unused_parameters=True)
        optimizer = backend.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), wrapped)
        compute_loss(wrapped(batch(backend.rank), "left right")).backward()
        model.left.requires_grad_(True)
        optimizer.zero_grad()
        calls: list[str] = []
        model.right.weight.register_hook(lambda _, calls=calls: calls.append("hook"))
        model.right.weight.register_post_accumulate_grad_hook(lambda _, calls=calls: calls.append("post hook"))

        def run(m: nn.Module, rank: int, user: int = user, wrapped: nn.Module = wrapped) -> None:
            with backend.no_sync(m) if m is wrapped else nullcontext():
                compute_loss(m(batch(rank, 1), "left right" if rank == user else "left")).backward()
            compute_loss(m(batch(rank, 2), "left")).backward()

        run(wrapped, backend.rank)
        assert calls == (["hook", "post hook"] if backend.rank == user else [])
        assert_gradients(model, mean_gradients(backend, twin, run))
        optimizer.step()
        assert_same_on_every_rank(backend, [parameter.tolist() for parameter in model.parameters()])


@contract
def two_models_with_shared_parameters_are_reduced(backend: Backend) -> None:
    """A classifier and a decoder share an encoder and have one optimizer each."""

    def build_pair() -> list[nn.Module]:
        shared = nn.Linear(FEATURES, 5).double()
        return [nn.Sequential(shared, nn.Linear(5, 2).double()) for _ in range(2)]

    pair, twins = build_pair(), build_pair()
    wrapped = [backend.distributed_model(model) for model in pair]
    optimizers = [
        backend.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), distributed)
        for model, distributed in zip(pair, wrapped, strict=True)
    ]
    for step in range(3):
        for model, distributed, twin, optimizer in zip(pair, wrapped, twins, optimizers, strict=True):
            twin.load_state_dict(model.state_dict())
            optimizer.zero_grad()
            backward(distributed, backend.rank, step)
            assert_gradients(model, mean_gradients(backend, twin, lambda m, rank, step=step: backward(m, rank, step)))
            optimizer.step()
    with backend.no_sync(wrapped[0]):
        backward(wrapped[0], backend.rank)
    raises(ModelError, "0.weight", optimizers[1].step)
    with backend.no_sync(wrapped[0]):
        backward(wrapped[1], backend.rank)
    optimizers[1].step()
    assert_same_on_every_rank(backend, [parameter.tolist() for model in pair for parameter in model.parameters()])


@contract
def model_can_be_distributed_twice(backend: Backend) -> None:
    model, _, optimizer = _distribute_model_and_optimizer(backend)
    again, twin = backend.distributed_model(model), build()
    for step in range(2):
        twin.load_state_dict(model.state_dict())
        optimizer.zero_grad()
        backward(again, backend.rank, step)
        assert_gradients(model, mean_gradients(backend, twin, lambda m, rank, step=step: backward(m, rank, step)))
        optimizer.step()
    assert_same_on_every_rank(backend, [parameter.tolist() for parameter in model.parameters()])


@contract
def model_distributed_again_uses_the_new_arguments(backend: Backend) -> None:
    model, twin = TwoHeads(), TwoHeads()
    backend.distributed_model(model)
    wrapped = backend.distributed_model(model, find_unused_parameters=True)
    assert_reduced(backend, wrapped, model, twin, lambda m, rank: compute_loss(m(batch(rank), "left")).backward())


@contract
def added_parameters_must_belong_to_a_distributed_model(backend: Backend) -> None:
    model = build()
    wrapped = backend.distributed_model(model)
    head = list(model.children())[3]
    optimizer = backend.distributed_optimizer(torch.optim.SGD(head.parameters(), lr=0.1), wrapped)
    optimizer.add_param_group({"params": next(model.children()).parameters()})
    backward(wrapped, backend.rank)
    optimizer.step()

    other = nn.Linear(3, 2).double()
    optimizer.add_param_group({"params": other.parameters()})
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.zero_grad()
    compute_loss(other(wrapped(batch(backend.rank)))).backward()
    expected = "holds 2 parameters outside of all distributed models, with shapes [2, 3], [2]"
    text = raises(ModelError, expected, optimizer.step)
    assert_same_on_every_rank(backend, text)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))

    for parameter in other.parameters():
        parameter.grad = None
    distributed = backend.distributed_model(other)
    compute_loss(distributed(wrapped(batch(backend.rank)))).backward()
    optimizer.step()


@contract
def deleted_model_is_released(backend: Backend) -> None:
    model = build()
    parameter_reference = weakref.ref(next(model.parameters()))
    wrapped = backend.distributed_model(model)
    backward(wrapped, backend.rank)
    with backend.no_sync(wrapped):
        backward(wrapped, backend.rank)
    del model, wrapped
    # A thread of the backend may release the last collective a moment after it has ended.
    deadline = time.monotonic() + 20
    while parameter_reference() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert parameter_reference() is None
