"""Contract tests of `shard="gradients"` (ZeRO-2): each rank stores a shard of the gradients, and the results are the
same as with complete gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unitrain.backends.base import Backend
from unitrain.backends.sharding.gradient import ShardedGradient
from unitrain.backends.sharding.partition import MIN_DIVIDED_ELEMENTS
from unitrain.errors import ConfigError, ModelError
from unitrain.testing import gradients, local_gradients, parameters, sharding
from unitrain.testing.cases import (
    CASES,
    Case,
    assert_same_on_every_rank,
    contract,
    may_raise_unsupported_error,
    raises,
)
from unitrain.testing.models import (
    FEATURES,
    assert_gradients,
    batch,
    compute_loss,
    gather_complete_gradient,
    mean_gradients,
)
from unitrain.testing.models import gradients as gradients_of
from unitrain.torch_compat import foreach_add_, foreach_mul_


class _GradientShardingBackend:
    """Proxy of a backend that shards the gradients of every model."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def distributed_model(self, model: nn.Module, **settings: Any) -> nn.Module:
        return self._backend.distributed_model(model, shard="gradients", **settings)

    def distributed_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
        return self._backend.distributed_optimizer(optimizer, model, shard="gradients")


def _add_case_with_sharded_gradients(
    case: Case, proxy_class: type[_GradientShardingBackend] = _GradientShardingBackend
) -> None:
    """Add `case` to the suite again. The new case passes `proxy_class(backend)` to `case`."""
    name = f"{case.__name__}_with_sharded_gradients"
    assert name not in CASES, f"duplicate case {name}"
    CASES[name] = partial(_run_case, case, proxy_class)


def _run_case(case: Case, proxy_class: type[_GradientShardingBackend], backend: Backend) -> None:
    case(proxy_class(backend))  # type: ignore[arg-type]


# Cases of complete gradients that also apply to sharded gradients.
for _case in (
    gradients.gradients_are_the_mean_over_ranks_after_backward,
    gradients.distributed_model_broadcasts_parameters_and_buffers_of_rank_0,
    gradients.wrapping_changes_no_parameter_or_learning_rate,
    gradients.backward_after_no_sync_reduces_accumulated_gradients,
    gradients.clipping_uses_global_gradients,
    gradients.two_backward_passes_accumulate,
    gradients.one_backward_through_two_forwards_reduces_both,
    gradients.retained_graph_is_reduced_in_every_backward,
    gradients.activation_checkpointing_gives_global_gradients,
    gradients.collectives_may_run_inside_backward,
    gradients.zero_grad_supports_both_values_of_set_to_none,
    gradients.evaluation_forward_does_not_communicate,
    gradients.unwrap_returns_the_users_model,
    gradients.compiled_models_are_reduced,
    parameters.unused_parameters_have_zero_or_no_gradient,
    parameters.unused_parameters_raise_on_every_rank,
    parameters.one_backward_after_forwards_of_different_heads_reduces_both,
    parameters.retained_graph_may_skip_parameters,
    parameters.parameters_may_be_frozen_later_with_find_unused_parameters,
    parameters.parameters_may_be_frozen_and_unfrozen_at_any_time,
    parameters.freezing_different_parameters_per_rank_raises,
    parameters.gradient_penalty_is_reduced,
    parameters.backward_through_a_frozen_model_is_not_counted,
    parameters.loss_on_one_of_two_outputs_raises,
    parameters.parameters_used_in_any_micro_batch_are_reduced,
    parameters.parameters_unused_in_the_last_micro_batch_raise,
    parameters.frozen_parameters_are_not_reduced,
    parameters.shared_parameters_are_reduced_once,
    local_gradients.discarded_local_gradients_are_ignored,
    local_gradients.manually_assigned_gradients_are_accepted,
    local_gradients.backward_of_a_weight_penalty_may_come_first,
    local_gradients.one_of_several_optimizers_steps_on_global_gradients,
    local_gradients.parameters_unfrozen_later_are_tracked,
    local_gradients.deleted_model_is_released,
):
    _add_case_with_sharded_gradients(_case)


class _StateAsGradientsBackend(_GradientShardingBackend):
    """Proxy for the test cases of shard="state" that replaces "state" with "gradients"."""

    def distributed_optimizer(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, *, shard: str = "state"
    ) -> torch.optim.Optimizer:
        return self._backend.distributed_optimizer(optimizer, model, shard="gradients")


for _case in (
    sharding.sharded_state_trains_as_plain_torch,
    sharding.sharded_state_is_divided_evenly,
    sharding.state_dict_of_sharded_state_is_that_of_plain_torch,
    sharding.sharded_state_trains_with_groups_freezing_and_schedulers,
    sharding.sharded_state_trains_with_loss_scaling,
    sharding.sharded_state_trains_with_two_optimizers_and_a_closure,
    sharding.sharded_state_trains_one_small_parameter,
    sharding.sharded_state_survives_a_failing_step,
    sharding.sharded_state_trains_with_user_defined_optimizers,
    sharding.sharded_state_updates_parameters_without_gradients,
    sharding.sharded_state_supports_step_hooks_and_repeated_setup,
    sharding.sharded_state_follows_replaced_parameters,
):
    _add_case_with_sharded_gradients(_case, _StateAsGradientsBackend)


_WIDTH = 4 * MIN_DIVIDED_ELEMENTS // FEATURES


def _build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, FEATURES)).double()


def _distribute_model_and_optimizer(
    backend: Backend, **settings: Any
) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """Return a new model, its distributed model, and the distributed optimizer."""
    model = _build()
    wrapped = backend.distributed_model(model, shard="gradients", **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, wrapped, backend.distributed_optimizer(optimizer, wrapped, shard="gradients")


def _backward(model: nn.Module, rank: int, step: int = 0) -> None:
    compute_loss(model(batch(rank, step))).backward()


class _SkippableLayer(nn.Module):
    """A layer whose output does not depend on its parameters if it is skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES).double()

    def forward(self, inputs: Tensor, skips: bool) -> Tensor:
        output: Tensor = 2 * inputs if skips else self.linear(inputs)
        return output


@contract
def a_rank_may_use_no_parameter_with_sharded_gradients(backend: Backend) -> None:
    if backend.size == 1:
        return
    model, twin = _SkippableLayer(), _SkippableLayer()
    wrapped = backend.distributed_model(model, shard="gradients", find_unused_parameters=True)
    twin.load_state_dict(model.state_dict())
    for step, skipping in enumerate(([0], [1], range(backend.size), [1])):

        def run(module: nn.Module, rank: int, step: int = step, skipping: Any = skipping) -> None:
            inputs = batch(rank, step).requires_grad_()
            output = module(inputs, rank in skipping)
            if step == 3:  # gradients of the inputs only, which are not reduced
                torch.autograd.grad(compute_loss(output), inputs, retain_graph=True)
            compute_loss(output).backward()
            assert inputs.grad is not None

        model.zero_grad()
        run(wrapped, backend.rank)
        assert_gradients(model, mean_gradients(backend, twin, run))


@contract
def each_element_of_sharded_gradients_is_stored_on_one_rank(backend: Backend) -> None:
    model, wrapped, optimizer = _distribute_model_and_optimizer(backend)
    total = sum(parameter.numel() for parameter in model.parameters())
    for step in range(3):
        with backend.no_sync(wrapped):
            _backward(wrapped, backend.rank, step)
        if backend.size > 1:
            assert all(isinstance(parameter.grad, ShardedGradient) for parameter in model.parameters())
        _backward(wrapped, backend.rank, step + 7)
        if backend.size > 1:
            stored = [parameter.grad.local.numel() for parameter in model.parameters()]  # type: ignore[union-attr]
            elements_by_rank = backend.allgather_object(sum(stored))
            assert sum(elements_by_rank) == total
            assert max(elements_by_rank) - total / backend.size <= MIN_DIVIDED_ELEMENTS
        optimizer.step()
        optimizer.zero_grad()


@contract
def norms_of_sharded_gradients_are_those_of_complete_gradients(backend: Backend) -> None:
    model, wrapped, _ = _distribute_model_and_optimizer(backend)
    twin = _build()
    expected = mean_gradients(backend, twin, _backward)

    def reset() -> None:
        model.zero_grad()
        _backward(wrapped, backend.rank)
        for name, parameter in twin.named_parameters():
            gradient = expected[name]
            parameter.grad = None if gradient is None else gradient.clone()

    def scale(values: list[nn.Parameter]) -> None:
        foreach_mul_([value.grad for value in values if value.grad is not None], torch.tensor(0.3).double())

    def assert_same_on_both(use: Callable[[list[nn.Parameter]], Any]) -> None:
        result, expected_result = use([*model.parameters()]), use([*twin.parameters()])
        torch.testing.assert_close(result, expected_result, rtol=1e-12, atol=0)
        assert_gradients(model, gradients_of(twin))

    reset()
    for order in (2.0, 1.0, 3.0, float("inf")):
        assert_same_on_both(
            lambda values, order=order: nn.utils.get_total_norm([value.grad for value in values], order)
        )
        assert_same_on_both(lambda values, order=order: nn.utils.clip_grad_norm_(values, 0.01, order))
        assert_same_on_both(lambda values, order=order: nn.utils.clip_grad_norm_(values, 0.005, order, foreach=True))
    reset()
    assert_same_on_both(lambda values: nn.utils.clip_grad_value_(values, 1e-3))
    assert_same_on_both(lambda values: [value.grad.mul_(0.5).norm() for value in values[:2]])  # type: ignore[union-attr]
    assert_same_on_both(scale)
    reset()
    model[0].weight.grad.mul_(float("nan"))  # type: ignore[index]
    raises(
        RuntimeError,
        "non-finite",
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True),
    )


@contract
def operations_on_incomplete_gradients_raise(backend: Backend) -> None:
    model, wrapped, optimizer = _distribute_model_and_optimizer(backend)
    if backend.size == 1:
        return
    _backward(wrapped, backend.rank)
    gradient: Any = model[0].weight.grad  # type: ignore[index]
    uses: list[Callable[[], object]] = [
        gradient.sum,
        gradient.clone,
        lambda: gradient + 1,
        lambda: gradient.add_(1.0),
        lambda: gradient[0],
        lambda: gradient.norm(dim=0),
        lambda: gradient.mul_(gradient),
        lambda: copy.deepcopy(gradient),
        lambda: torch.cat([gradient.view(-1)]),
        lambda: foreach_add_([gradient], 1.0),
        torch.optim.SGD(model.parameters(), lr=0.1).step,
        torch.optim.Adam(model.parameters(), foreach=True).step,
    ]
    for use in uses:
        text = raises(ModelError, "on a gradient that is sharded over ranks", use)
        assert "full_tensor()" in text
    assert "elements=" in repr(gradient)
    _backward(wrapped, backend.rank, 1)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    sum(parameter.pow(2).sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
    scaler = torch.amp.GradScaler(backend.device.type, init_scale=8.0)
    scaler.scale(torch.ones((), device=backend.device))  # creates its state
    local = gradient.local.clone()
    for use in (
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: gradient.mul_(2.0),
        lambda: scaler.unscale_(optimizer),
        gradient.full_tensor,
    ):
        raises(ModelError, "was called on a gradient that is not reduced over ranks", use)
    assert torch.equal(gradient.local, local)


@contract
def sharded_gradients_of_complex_parameters_are_the_mean_over_ranks(backend: Backend) -> None:
    def loss(weight: Tensor, rank: int) -> Tensor:
        return (weight * torch.view_as_complex(torch.tensor([rank + 1.0, 2.0]))).abs().sum()

    class Weight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.view_as_complex(torch.arange(1.0, 15.0).view(7, 2)))

        def forward(self, rank: int) -> Tensor:
            return loss(self.weight, rank)

    model, twin = Weight(), Weight()
    wrapped = backend.distributed_model(model, shard="gradients")
    backend.distributed_optimizer(torch.optim.Adam(model.parameters()), wrapped, shard="gradients")
    wrapped(backend.rank).backward()
    (sum(twin(rank) for rank in range(backend.size)) / backend.size).backward()
    gradient: Any = model.weight.grad
    complete_gradient = gradient.full_tensor() if isinstance(gradient, ShardedGradient) else gradient
    torch.testing.assert_close(complete_gradient, twin.weight.grad)


@contract
@may_raise_unsupported_error
def steps_on_accumulated_gradients_raise_inside_no_sync(backend: Backend) -> None:
    for settings in ({}, {"compression": "bf16"}):
        model, wrapped, optimizer = _distribute_model_and_optimizer(backend, **settings)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with backend.no_sync(wrapped):
            _backward(wrapped, backend.rank)
            raises(ModelError, "not reduced over ranks", optimizer.step)
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
        _backward(wrapped, backend.rank, 1)
        optimizer.step()
        assert_same_on_every_rank(backend, [parameter.sum().item() for parameter in model.parameters()])


@contract
@may_raise_unsupported_error
def compressed_sharded_gradients_equal_compressed_gradients(backend: Backend) -> None:
    for name in ("fp16", "bf16"):
        model, wrapped, _ = _distribute_model_and_optimizer(backend, compression=name)
        twin = _build()
        twin_wrapped = backend.distributed_model(twin, compression=name)
        for step in range(2):
            for distributed_model in (wrapped, twin_wrapped):
                distributed_model.zero_grad()
                with backend.no_sync(distributed_model):
                    _backward(distributed_model, backend.rank, step)
                _backward(distributed_model, backend.rank, step + 7)
            assert_gradients(model, gradients_of(twin), 0)


@contract
@may_raise_unsupported_error
def an_interrupted_backward_pass_does_not_affect_accumulated_gradients(backend: Backend) -> None:
    if backend.size == 1:  # a single rank does not shard gradients
        return
    gradients_of_runs = []
    for is_interrupted in (False, True):
        model, wrapped, _ = _distribute_model_and_optimizer(backend, compression="bf16")
        if is_interrupted:
            _interrupt_backward(wrapped, backend.rank)
        wrapped.zero_grad()
        with backend.no_sync(wrapped):
            _backward(wrapped, backend.rank, 1)
        _backward(wrapped, backend.rank, 2)
        gradients_of_runs.append(gradients_of(model))
    expected, found = gradients_of_runs
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _interrupt_backward(model: nn.Module, rank: int) -> None:
    """Run a backward pass that raises an exception after it has reached the output of `model`."""

    def fail(_: Tensor) -> None:
        raise ZeroDivisionError("interrupted")

    output = model(batch(rank))
    output.register_hook(fail)
    raises(ZeroDivisionError, "interrupted", compute_loss(output).backward)


@contract
def half_precision_gradients_are_summed_in_float32(backend: Backend) -> None:
    model, twin = (nn.Linear(FEATURES, 3).bfloat16() for _ in range(2))
    wrapped = backend.distributed_model(model, shard="gradients")
    twin.load_state_dict(model.state_dict())
    sums = [torch.zeros(parameter.shape) for parameter in model.parameters()]
    for rank in range(backend.size):
        twin.zero_grad()
        twin(batch(rank).bfloat16()).sum().backward()
        for total, parameter in zip(sums, twin.parameters(), strict=True):
            assert parameter.grad is not None
            total += parameter.grad
    wrapped(batch(backend.rank).bfloat16()).sum().backward()
    for parameter, expected in zip(model.parameters(), sums, strict=True):
        assert parameter.grad is not None
        assert torch.equal(gather_complete_gradient(parameter.grad), (expected / backend.size).bfloat16())


@contract
def sharding_of_gradients_needs_the_model_and_the_optimizer(backend: Backend) -> None:
    for model_shard, optimizer_shard in (("none", "gradients"), ("gradients", "none"), ("gradients", "state")):
        model = _build()
        wrapped = backend.distributed_model(model, shard=model_shard)  # type: ignore[arg-type]
        optimizer = torch.optim.Adam(model.parameters())
        text = raises(
            ModelError,
            f"shard={optimizer_shard!r} and a model with shard={model_shard!r}",
            lambda optimizer=optimizer, wrapped=wrapped, shard=optimizer_shard: backend.distributed_optimizer(
                optimizer, wrapped, shard=shard
            ),
        )
        assert "backend.distributed_model(model, shard='gradients')" in text
        assert_same_on_every_rank(backend, text)
    model = _build()
    optimizer = torch.optim.Adam(model.parameters())
    raises(
        ModelError,
        "a model that is not distributed",
        lambda: backend.distributed_optimizer(optimizer, model, shard="gradients"),
    )


@contract
def sharding_of_gradients_that_is_not_possible_raises(backend: Backend) -> None:
    text = raises(
        ModelError,
        "PowerSGD compresses complete gradients",
        lambda: backend.distributed_model(_build(), shard="gradients", compression="powersgd"),
    )
    assert_same_on_every_rank(backend, text)
    model, _wrapped, optimizer = _distribute_model_and_optimizer(backend)
    if backend.size == 1:
        return
    text = raises(
        ModelError,
        "Parameter '0.weight' belongs to another distributed model with sharded gradients",
        lambda: backend.distributed_model(nn.Sequential(model[0]), shard="gradients"),  # type: ignore[index]
    )
    assert_same_on_every_rank(backend, text)
    shard = "gradients" if backend.rank == 0 else "none"
    text = raises(
        ConfigError,
        "shard='gradients' on rank 0 and shard='none' on rank 1",
        lambda: backend.distributed_model(_build(), shard=shard),  # type: ignore[arg-type]
    )
    assert_same_on_every_rank(backend, text)
    raises(
        ModelError,
        'already sharded over ranks. Pass the same setting again, shard="gradients"',
        lambda: backend.distributed_optimizer(optimizer, model, shard="state"),
    )


@contract
def parameters_added_after_backward_are_updated(backend: Backend) -> None:
    """A parameter group is added between backward and step, and one optimizer replaces another."""
    model, twin = _build(), _build()
    wrapped = backend.distributed_model(model, shard="gradients")
    optimizers = [torch.optim.Adam(replica[0].parameters(), lr=0.01) for replica in (model, twin)]  # type: ignore[index]
    backend.distributed_optimizer(optimizers[0], wrapped, shard="gradients")
    for step in range(3):
        expected = mean_gradients(backend, twin, lambda m, rank, step=step: _backward(m, rank, step))
        wrapped.zero_grad()
        _backward(wrapped, backend.rank, step)
        for name, parameter in twin.named_parameters():
            parameter.grad = expected[name]
        for replica, optimizer in zip((model, twin), optimizers, strict=True):
            if step == 1:
                optimizer.add_param_group({"params": [*replica[2].parameters()], "lr": 0.02})  # type: ignore[index]
            optimizer.step()
    wrapped.zero_grad()
    replacements: list[torch.optim.Optimizer] = [
        torch.optim.Adafactor(replica.parameters(), lr=0.01) for replica in (model, twin)
    ]
    backend.distributed_optimizer(replacements[0], wrapped, shard="gradients")
    expected = mean_gradients(backend, twin, _backward)
    _backward(wrapped, backend.rank)
    for name, parameter in twin.named_parameters():
        parameter.grad = expected[name]
    for replacement in replacements:
        replacement.step()
    for parameter, expected_parameter in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected_parameter, rtol=0, atol=1e-12)


@contract
def missing_gradients_raise_before_the_step(backend: Backend) -> None:
    model = parameters.TwoHeads()
    wrapped = backend.distributed_model(model, shard="gradients")
    optimizer = backend.distributed_optimizer(torch.optim.Adam(model.parameters()), wrapped, shard="gradients")
    compute_loss(wrapped(batch(backend.rank), "left right")).backward()
    optimizer.step()
    optimizer.zero_grad()
    compute_loss(wrapped(batch(backend.rank), "left")).backward()
    if backend.size > 1:
        raises(ModelError, "2 parameters received no gradient on this rank in the last backward pass", optimizer.step)
