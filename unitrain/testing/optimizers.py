"""Contract tests of `distributed_optimizer`: it returns the user's object, and its state loads on any other backend."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from unitrain.backends.base import Backend, ShardingMode
from unitrain.errors import ModelError
from unitrain.testing.cases import assert_same_on_every_rank, contract, raises
from unitrain.testing.models import FEATURES, batch, build, compute_loss, mean_gradients

_SHARDING_MODES: tuple[ShardingMode, ...] = ("none", "state")


def _train(backend: Backend, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        compute_loss(model(batch(backend.rank, step))).backward()
        optimizer.step()


def _train_in_one_process(
    backend: Backend,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    clip_norm: float | None = None,
) -> None:
    """Run the same training as `_train` in this process, on the samples of all ranks and without communication."""
    for step in steps:
        expected = mean_gradients(
            backend, model, lambda m, rank, step=step: compute_loss(m(batch(rank, step))).backward()
        )
        for name, parameter in model.named_parameters():
            parameter.grad = expected[name]
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()


def _assert_same_parameters(model: nn.Module, twin: nn.Module) -> None:
    for (name, value), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


@contract
def distributed_optimizer_returns_the_same_object(backend: Backend) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    wrapped = backend.distributed_model(model)
    assert backend.distributed_optimizer(optimizer, wrapped) is optimizer
    assert type(optimizer) is torch.optim.AdamW


@contract
def training_equals_plain_torch(backend: Backend) -> None:
    for make_optimizer in (
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    ):
        model, twin = build(), build()
        wrapped = backend.distributed_model(model)
        optimizer = backend.distributed_optimizer(make_optimizer(model.parameters()), wrapped)
        _train(backend, wrapped, optimizer, range(5))
        _train_in_one_process(backend, twin, make_optimizer(twin.parameters()), range(5))
        _assert_same_parameters(model, twin)
        assert_same_on_every_rank(backend, [value.tolist() for value in model.parameters()])


@contract
def overflow_on_one_rank_skips_the_step_on_every_rank(backend: Backend) -> None:
    """Use GradScaler in plain torch code, with and without clipping.

    The steps without overflow equal the steps of one process.
    """
    overflow, steps = 2, range(5)
    for clip_norm in (None, 0.01):
        model, twin = build(), build()
        wrapped = backend.distributed_model(model)
        optimizer = backend.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), wrapped)
        scaler = torch.amp.GradScaler(backend.device.type, init_scale=1024.0)
        for step in steps:
            optimizer.zero_grad()
            loss = compute_loss(wrapped(batch(backend.rank, step)))
            if step == overflow and backend.rank == backend.size - 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if clip_norm is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            before = [value.clone() for value in model.parameters()]
            scaler.step(optimizer)
            scaler.update()
            changed = [not torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True)]
            assert changed == [step != overflow] * len(changed), (step, changed)
            assert scaler.get_scale() == (1024.0 if step < overflow else 512.0), (step, scaler.get_scale())

        twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
        for step in steps:
            if step != overflow:
                _train_in_one_process(backend, twin, twin_optimizer, range(step, step + 1), clip_norm)
        _assert_same_parameters(model, twin)
        assert_same_on_every_rank(backend, [value.tolist() for value in model.parameters()])


@contract
def optimizer_state_has_the_same_dtypes_on_every_rank(backend: Backend) -> None:
    """`Optimizer.load_state_dict` converts `mu_product` of NAdam from float32 to the dtype of the parameters."""
    for dtype in (torch.float64, torch.bfloat16):
        model = build().to(dtype)
        optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)
        for step in range(2):
            _step_with_equal_gradients(model, optimizer, step)
        twin, twin_optimizer = copy.deepcopy((model, optimizer))
        wrapped = backend.distributed_model(model)
        backend.distributed_optimizer(optimizer, wrapped)
        assert {state["mu_product"].dtype for state in optimizer.state.values()} == {torch.float32}
        for step in range(2, 4):
            _step_with_equal_gradients(twin, twin_optimizer, step)
            for parameter in model.parameters():
                parameter.grad = None
            wrapped(batch(0, step).to(dtype)).square().mean().backward()
            optimizer.step()
        for parameter, expected in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(parameter, expected, rtol=1e-12, atol=1e-12)
        assert_same_on_every_rank(backend, [value.tolist() for value in model.parameters()])


def _step_with_equal_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    model(batch(0, step).to(next(model.parameters()).dtype)).square().mean().backward()
    optimizer.step()


@contract
def optimizer_state_is_kept_and_portable(backend: Backend) -> None:
    """Train in one process, resume on the backend, and resume in one process; compare with uninterrupted training."""
    twin = build()
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=0.01)
    _train_in_one_process(backend, twin, twin_optimizer, range(3))
    saved_model, saved = copy.deepcopy(twin.state_dict()), copy.deepcopy(twin_optimizer.state_dict())

    model = build(seed=9)
    model.load_state_dict(saved_model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    optimizer.load_state_dict(saved)
    wrapped = backend.distributed_model(model)
    backend.distributed_optimizer(optimizer, wrapped)
    assert optimizer.param_groups[0]["lr"] == 0.01
    _train(backend, wrapped, optimizer, range(3, 6))
    _train_in_one_process(backend, twin, twin_optimizer, range(3, 6))
    _assert_same_parameters(model, twin)

    file = io.BytesIO()
    torch.save({"model": backend.unwrap(wrapped).state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    single_process_model = build(seed=9)
    single_process_model.load_state_dict(loaded["model"])
    single_process_optimizer = torch.optim.AdamW(single_process_model.parameters(), lr=0.5)
    single_process_optimizer.load_state_dict(loaded["optimizer"])
    _train_in_one_process(backend, single_process_model, single_process_optimizer, range(6, 8))
    _train_in_one_process(backend, twin, twin_optimizer, range(6, 8))
    _assert_same_parameters(single_process_model, twin)


@contract
def optimizer_state_is_broadcast_from_rank_0(backend: Backend) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if backend.rank == 0:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    wrapped = backend.distributed_model(model)
    backend.distributed_optimizer(optimizer, wrapped)
    buffers = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    assert all(torch.equal(buffer, torch.ones_like(buffer)) for buffer in buffers)


@contract
def schedulers_work_as_in_plain_torch(backend: Backend) -> None:
    model, twin = build(), build()
    wrapped = backend.distributed_model(model)
    optimizer = backend.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), wrapped)
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    twin_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(twin_optimizer, T_max=5)
    for step in range(5):
        _train(backend, wrapped, optimizer, range(step, step + 1))
        _train_in_one_process(backend, twin, twin_optimizer, range(step, step + 1))
        scheduler.step()
        twin_scheduler.step()
        assert optimizer.param_groups[0]["lr"] == twin_optimizer.param_groups[0]["lr"]
    _assert_same_parameters(model, twin)


@contract
def one_model_trains_with_two_optimizers(backend: Backend) -> None:
    model, twin = build(), build()
    wrapped = backend.distributed_model(model)

    def create_optimizers(m: nn.Module) -> list[torch.optim.Optimizer]:
        layers = list(m.children())
        first = torch.optim.SGD(layers[0].parameters(), lr=0.1, momentum=0.9)
        return [first, torch.optim.AdamW([*layers[1].parameters(), *layers[3].parameters()], lr=0.01)]

    optimizers = [backend.distributed_optimizer(optimizer, wrapped) for optimizer in create_optimizers(model)]
    twin_optimizers = create_optimizers(twin)
    for step in range(3):
        model.zero_grad()
        compute_loss(wrapped(batch(backend.rank, step))).backward()
        expected = mean_gradients(
            backend, twin, lambda m, rank, step=step: compute_loss(m(batch(rank, step))).backward()
        )
        for name, parameter in twin.named_parameters():
            parameter.grad = expected[name]
        for optimizer in (*optimizers, *twin_optimizers):
            optimizer.step()
    _assert_same_parameters(model, twin)


@contract
def optimizer_of_other_parameters_raises(backend: Backend) -> None:
    wrapped = backend.distributed_model(build())
    unrelated_optimizer = torch.optim.SGD(build().parameters(), lr=0.1)
    text = raises(
        ModelError,
        "6 of the optimizer's 6 parameters do not belong to",
        lambda: backend.distributed_optimizer(unrelated_optimizer, wrapped),
    )
    assert_same_on_every_rank(backend, text)
    if backend.size > 1:
        own = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        mixed = unrelated_optimizer if backend.rank == backend.size - 1 else own
        raises(ModelError, "parameters do not belong to", lambda: backend.distributed_optimizer(mixed, wrapped))


@contract
def sharded_state_of_muon_trains_as_replicated_state(backend: Backend) -> None:
    """Compare with an optimizer on the same backend, because Muon rounds to bfloat16."""
    trained: list[list[nn.Parameter]] = []
    for shard in _SHARDING_MODES:
        torch.manual_seed(0)
        layers = (nn.Linear(FEATURES, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))
        model = nn.Sequential(*layers).double()
        wrapped = backend.distributed_model(model)
        optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
        _train(backend, wrapped, backend.distributed_optimizer(optimizer, wrapped, shard=shard), range(3))
        assert_same_on_every_rank(backend, [value.tolist() for value in model.parameters()])
        trained.append([*model.parameters()])
    torch.testing.assert_close(trained[0], trained[1], rtol=0, atol=0)


@contract
def closure_uses_global_gradients_and_values(backend: Backend) -> None:
    """LBFGS calls its closure several times per step. The values of the closure determine the steps of the line search,
    so LBFGS must receive the mean of the ranks' values, whatever their type."""
    samples = torch.cat([batch(rank) for rank in range(backend.size)])
    for convert in (torch.Tensor.detach, torch.Tensor.item, torch.Tensor.float, lambda loss: loss.reshape(1)):
        model, twin = build(), build()
        wrapped = backend.distributed_model(model)
        settings: dict[str, Any] = {"lr": 1.0, "max_iter": 4, "line_search_fn": "strong_wolfe"}
        optimizer = backend.distributed_optimizer(torch.optim.LBFGS(model.parameters(), **settings), wrapped)
        reference = torch.optim.LBFGS(twin.parameters(), **settings)

        def closure(
            model: nn.Module, optimizer: torch.optim.Optimizer, samples: torch.Tensor, convert: Callable[..., Any]
        ) -> Any:
            optimizer.zero_grad()
            loss = compute_loss(model(samples))
            loss.backward()
            return convert(loss)

        for _ in range(3):
            value = optimizer.step(partial(closure, wrapped, optimizer, batch(backend.rank), convert))
            expected = reference.step(partial(closure, twin, reference, samples, torch.Tensor.detach))
            # The line search amplifies rounding errors, in particular those of a float32 value.
            tolerance = 1e-2 if convert is torch.Tensor.float else 1e-4
            assert abs(float(value) - float(expected)) < tolerance
        assert_same_on_every_rank(backend, [value.tolist() for value in model.parameters()])
        torch.testing.assert_close([*model.parameters()], [*twin.parameters()], rtol=0, atol=tolerance)


class _ClosureOptimizer(torch.optim.SGD):
    """An optimizer that is not part of torch, and multiplies its step by the value of the closure."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            value = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-group["lr"] * (1.0 if value is None else float(value)))
        return value


@contract
def closure_values_that_are_not_numbers_raise(backend: Backend) -> None:
    model = build()
    wrapped = backend.distributed_model(model)
    optimizer = backend.distributed_optimizer(_ClosureOptimizer(model.parameters(), lr=0.1), wrapped)

    def step(value: Any) -> Any:
        def closure() -> Any:
            optimizer.zero_grad()
            compute_loss(wrapped(batch(backend.rank))).backward()
            return value

        return optimizer.step(closure)

    assert step(None) is None
    assert step(backend.rank) == sum(range(backend.size)) / backend.size
    assert_same_on_every_rank(backend, [value.tolist() for value in model.parameters()])
    for value in ((1.0, 2.0), torch.ones(2), None if backend.rank else "loss"):
        raises(ModelError, "The closure of an optimizer step returned", partial(step, value))


class _NormalizedSGD(torch.optim.SGD):
    """An optimizer that divides the gradients by a norm over all parameters, so that its state cannot be sharded."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([parameter for group in self.param_groups for parameter in group["params"]], 1e-3)
        return super().step(closure)


class _OptimizerWithModes(torch.optim.SGD):
    updates_parameters_independently = True

    def train(self) -> None:
        """Do nothing."""

    def eval(self) -> None:
        """Do nothing."""


@contract
def sharding_the_state_of_an_unknown_optimizer_raises(backend: Backend) -> None:
    model = build()
    for shard in _SHARDING_MODES[1:]:
        wrapped = backend.distributed_model(model)
        for optimizer_class, text in (
            (_NormalizedSGD, "It is unknown whether _NormalizedSGD updates each parameter independently of all others"),
            (_OptimizerWithModes, "_OptimizerWithModes.eval() and _OptimizerWithModes.train() compute"),
        ):
            optimizer = optimizer_class(model.parameters(), lr=0.1)
            call = partial(backend.distributed_optimizer, optimizer, wrapped, shard=shard)
            assert_same_on_every_rank(backend, raises(ModelError, text, call))
            assert backend.distributed_optimizer(optimizer, wrapped) is optimizer
