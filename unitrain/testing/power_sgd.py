"""Contract tests of PowerSGD: communicated gradients, error feedback, and resuming from a checkpoint."""

from __future__ import annotations

import io
import warnings
from typing import Any, cast

import torch
from torch import Tensor, nn

from unitrain.backends.base import Backend
from unitrain.backends.capabilities import CompressionState, SupportsPowerSGD, require_capability
from unitrain.backends.compression_setting import Compression, PowerSGD
from unitrain.errors import CheckpointError, ModelError
from unitrain.testing.cases import assert_same_on_every_rank, contract, may_raise_unsupported_error, raises
from unitrain.testing.compression import are_equal_up_to_rounding, gradients_of_steps
from unitrain.testing.models import (
    FEATURES,
    assert_gradients,
    backward,
    batch,
    build,
    compute_loss,
    gradients,
    mean_gradients,
)

LOW_RANK = PowerSGD(rank=1, start_step=0, min_compression_rate=1)
STATELESS_SETTINGS: tuple[Compression, ...] = ("none", "fp16")
# The matrices of the model that `build` returns, which LOW_RANK compresses. Its other parameters are vectors.
MATRICES = ("0.weight", "3.weight")


def distribute_with_compression_state(
    backend: Backend, model: nn.Module, settings: Compression
) -> tuple[nn.Module, CompressionState]:
    """Return the distributed model and its compression state."""
    wrapped = backend.distributed_model(model, compression=settings)
    return wrapped, require_capability(backend, SupportsPowerSGD, "PowerSGD").compression_state(wrapped)


def gather_mean_errors(backend: Backend, compression_state: CompressionState) -> dict[str, Tensor]:
    """Return, on every rank, the mean over ranks of the errors (gradients that have not been communicated yet)."""
    state = backend.broadcast_object(compression_state.state_dict())
    return {name: of_all_ranks.mean(0).to(backend.device) for name, of_all_ranks in state["errors"].items()}


def save_and_load(compression_state: CompressionState) -> dict[str, Any]:
    """Return the state after a round trip through a checkpoint file. All ranks must call this function."""
    file = io.BytesIO()
    torch.save(compression_state.state_dict(), file)
    file.seek(0)
    state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


@contract
@may_raise_unsupported_error
def powersgd_gradient_has_low_rank_and_is_equal_on_every_rank(backend: Backend) -> None:
    model, twin = build(), build()
    wrapped, _ = distribute_with_compression_state(backend, model, LOW_RANK)
    for step, sent in enumerate(gradients_of_steps(backend, model, wrapped, 4)):
        assert_same_on_every_rank(backend, {name: gradient.tolist() for name, gradient in sent.items()})
        expected = mean_gradients(backend, twin, lambda m, rank, step=step: backward(m, rank, step))
        for name, gradient in sent.items():
            expected_gradient = expected[name]
            assert expected_gradient is not None
            if name in MATRICES:
                assert torch.linalg.matrix_rank(gradient) == 1
                assert not torch.allclose(gradient, expected_gradient, rtol=1e-3)
            else:
                torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-12)


@contract
@may_raise_unsupported_error
def powersgd_error_is_the_unsent_gradient(backend: Backend) -> None:
    """Also tests accumulation, and two backward passes per step: the second pass reduces the gradients of the first
    pass again."""
    model, twin = build(), build()
    wrapped, compression_state = distribute_with_compression_state(backend, model, LOW_RANK)
    sent = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    true = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}

    def run_window(m: nn.Module, rank: int, step: int) -> None:
        for micro_step in range(3):
            backward(m, rank, 3 * step + micro_step)

    for step in range(5):
        model.zero_grad()
        with backend.no_sync(wrapped):
            backward(wrapped, backend.rank, 3 * step)
        backward(wrapped, backend.rank, 3 * step + 1)
        backward(wrapped, backend.rank, 3 * step + 2)
        expected = mean_gradients(backend, twin, lambda m, rank, step=step: run_window(m, rank, step))
        for name, gradient in gradients(model).items():
            expected_gradient = expected[name]
            assert gradient is not None
            assert expected_gradient is not None
            sent[name] += gradient
            true[name] += expected_gradient
    unsent_errors = gather_mean_errors(backend, compression_state)
    assert sorted(unsent_errors) == sorted(MATRICES)
    for name, total in true.items():
        assert name not in unsent_errors or unsent_errors[name].abs().max() > 1e-3
        torch.testing.assert_close(sent[name] + unsent_errors.get(name, 0), total, rtol=0, atol=1e-12)


@contract
@may_raise_unsupported_error
def error_feedback_converges_to_the_gradient(backend: Backend) -> None:
    def relative_error(error_feedback: bool) -> float:
        """Return the relative error of the mean transferred gradient if the true gradient is constant."""
        settings = PowerSGD(rank=1, start_step=0, min_compression_rate=1, error_feedback=error_feedback)
        model, twin = build(), build()
        wrapped, _ = distribute_with_compression_state(backend, model, settings)
        weight = model.get_parameter("0.weight")
        total = torch.zeros_like(weight)
        for _ in range(40):
            model.zero_grad()
            backward(wrapped, backend.rank)
            assert weight.grad is not None
            total += weight.grad
        expected_gradient = mean_gradients(backend, twin, backward)["0.weight"]
        assert expected_gradient is not None
        return float((total / 40 - expected_gradient).norm() / expected_gradient.norm())

    with_feedback, without = relative_error(True), relative_error(False)
    assert with_feedback < without / 5, (with_feedback, without)


@contract
@may_raise_unsupported_error
def powersgd_sends_uncompressed_gradients_before_start_step(backend: Backend) -> None:
    model, twin = build(), build()
    wrapped, compression_state = distribute_with_compression_state(
        backend, model, PowerSGD(rank=1, start_step=3, min_compression_rate=1)
    )
    plain_twin = backend.distributed_model(twin)
    pairs = zip(
        gradients_of_steps(backend, model, wrapped, 4), gradients_of_steps(backend, twin, plain_twin, 4), strict=True
    )
    for step, (step_gradients, plain_gradients) in enumerate(pairs):
        assert are_equal_up_to_rounding(step_gradients, plain_gradients) == (step < 3), step
    assert compression_state.state_dict()["steps"] == 4


@contract
@may_raise_unsupported_error
def powersgd_below_min_compression_rate_sends_uncompressed_gradients(backend: Backend) -> None:
    model, twin = build(), build()
    wrapped, compression_state = distribute_with_compression_state(
        backend, model, PowerSGD(rank=1, start_step=0, min_compression_rate=4)
    )
    for step, sent in enumerate(gradients_of_steps(backend, model, wrapped, 2)):
        expected = mean_gradients(backend, twin, lambda m, rank, step=step: backward(m, rank, step))
        assert are_equal_up_to_rounding(
            sent,
            {name: expected_gradient for name, expected_gradient in expected.items() if expected_gradient is not None},
        )
    assert not compression_state.state_dict()["errors"]


class Branches(nn.Module):
    """Model with two branches. The caller selects the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([build(seed=1), build(seed=2)])

    def forward(self, x: Tensor, branch: int) -> Tensor:
        result: Tensor = self.branches[branch](x)
        return result


@contract
@may_raise_unsupported_error
def powersgd_skips_parameters_unused_on_every_rank(backend: Backend) -> None:
    model = Branches()
    wrapped = backend.distributed_model(model, find_unused_parameters=True, compression=LOW_RANK)
    compression_state = require_capability(backend, SupportsPowerSGD, "PowerSGD").compression_state(wrapped)

    def step(branch: int, weight: float = 1.0) -> None:
        model.zero_grad()
        (weight * compute_loss(wrapped(batch(backend.rank), branch))).backward()

    for branch in (0, 1, 1 if backend.rank == 0 else 0, 0, 0):
        step(branch)
    before = gather_mean_errors(backend, compression_state)
    assert all(unsent_errors.any() for unsent_errors in before.values())
    step(1)
    assert all(parameter.grad is None for parameter in model.branches[0].parameters())
    after = gather_mean_errors(backend, compression_state)
    for name, unsent_errors in after.items():
        assert torch.equal(unsent_errors, before[name]) == name.startswith("branches.0"), name
    step(0, weight=0.0)
    assert all(not p.grad.any() for p in model.branches[0].parameters() if p.grad is not None)
    assert all(
        torch.equal(unsent_errors, after[name])
        for name, unsent_errors in gather_mean_errors(backend, compression_state).items()
    )


@contract
@may_raise_unsupported_error
def powersgd_first_compression_of_a_matrix_does_not_depend_on_its_step(backend: Backend) -> None:
    """A single rank does not reduce unused parameters, so the number of reductions before a matrix is first used
    depends on the number of ranks. The first compression must not depend on the number of these reductions."""
    sent = []
    for branches in ((0, 0, 0, 1), (1, 1)):
        model = Branches()
        settings = PowerSGD(rank=1, start_step=1, min_compression_rate=1, error_feedback=False)
        wrapped = backend.distributed_model(model, find_unused_parameters=True, compression=settings)
        for step, branch in enumerate(branches):
            model.zero_grad()
            compute_loss(wrapped(batch(backend.rank, 0 if branch else step), branch)).backward()
        sent.append(gradients(model.branches[1]))
    for name, gradient in sent[0].items():
        other = sent[1][name]
        assert gradient is not None
        assert other is not None
        torch.testing.assert_close(gradient, other, rtol=0, atol=1e-12)


@contract
@may_raise_unsupported_error
def powersgd_keeps_the_error_of_frozen_parameters(backend: Backend) -> None:
    model, twin = build(), build()
    for module in (model, twin):
        module.get_submodule("0").requires_grad_(False)
    wrapped, compression_state = distribute_with_compression_state(backend, model, LOW_RANK)
    sent = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    true = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for step, trained in enumerate(("3", "03", "013", "01", "3", "013")):
        for module in (model, twin):
            module.zero_grad()
            for name, layer in module.named_children():
                layer.requires_grad_(name in trained)
        previous_unsent_errors = gather_mean_errors(backend, compression_state)
        backward(wrapped, backend.rank, step)
        expected = mean_gradients(backend, twin, lambda m, rank, step=step: backward(m, rank, step))
        for name, gradient in gradients(model).items():
            expected_gradient = expected[name]
            assert (gradient is None) == (expected_gradient is None) == (name[0] not in trained), name
            if gradient is not None and expected_gradient is not None:
                sent[name] += gradient
                true[name] += expected_gradient
        unsent_errors = gather_mean_errors(backend, compression_state)
        assert all(
            torch.equal(unsent_errors[name], before) == (name[0] not in trained)
            for name, before in previous_unsent_errors.items()
        )
    assert sorted(unsent_errors) == sorted(MATRICES)
    for name, total in true.items():
        torch.testing.assert_close(sent[name] + unsent_errors.get(name, 0), total, rtol=0, atol=1e-12)


@contract
@may_raise_unsupported_error
def powersgd_is_independent_of_rounding(backend: Backend) -> None:
    """The rank of the gradients is lower than the number of columns of Q, so Q could depend on rounding errors, for
    example on the order of summation."""
    settings = PowerSGD(rank=3, start_step=0, min_compression_rate=0.5)
    layers = [nn.Linear(FEATURES, 8, bias=False).double() for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    model, twin = layers
    wrapped, other = (backend.distributed_model(layer, compression=settings) for layer in layers)
    for step in range(6):
        samples = batch(0, step)[:1] if step < 3 else batch(backend.rank, step)
        for layer in layers:
            layer.zero_grad()
        compute_loss(wrapped(samples)).backward()
        with backend.no_sync(other):
            (0.3 * compute_loss(other(samples))).backward()
        (0.7 * compute_loss(other(samples))).backward()
        assert_gradients(model, gradients(twin), 1e-9)


@contract
@may_raise_unsupported_error
def powersgd_discards_the_error_of_an_overflow_step(backend: Backend) -> None:
    for bad in (float("inf"), float("nan")):
        model, twin = build(), build()
        wrapped, compression_state = distribute_with_compression_state(backend, model, LOW_RANK)
        reference_wrapped, other = distribute_with_compression_state(backend, twin, LOW_RANK)
        for step in range(6):
            model.zero_grad()
            if step == 3:
                # The gradients of some layers overflow on one rank; the step's errors of all layers are discarded.
                is_last_rank = backend.rank == backend.size - 1
                handle = model.get_submodule("3").register_full_backward_hook(
                    lambda _m, grads, _o, is_last_rank=is_last_rank, bad=bad: (
                        (grads[0] * bad,) if is_last_rank else None
                    )
                )
                backward(wrapped, backend.rank, 99)
                handle.remove()
                weight = model.get_parameter("0.weight")
                assert weight.grad is not None
                assert not weight.grad.isfinite().all(), "no rank would skip the step"
                model.zero_grad()
            backward(wrapped, backend.rank, step)
            twin.zero_grad()
            backward(reference_wrapped, backend.rank, step)
            assert_gradients(model, gradients(twin), 0)
        actual_errors, expected_errors = (
            gather_mean_errors(backend, compression_state),
            gather_mean_errors(backend, other),
        )
        assert all(torch.equal(actual_errors[name], expected_errors[name]) for name in expected_errors)


@contract
@may_raise_unsupported_error
def powersgd_error_follows_the_loss_scale(backend: Backend) -> None:
    model, twin = build(), build()
    wrapped, compression_state = distribute_with_compression_state(backend, model, LOW_RANK)
    reference_wrapped, _ = distribute_with_compression_state(backend, twin, LOW_RANK)
    for step, scale in enumerate((1.0, 4.0, 1024.0, 2.0)):
        compression_state.get_loss_scale = lambda scale=scale: torch.tensor(scale)
        model.zero_grad()
        (scale * compute_loss(wrapped(batch(backend.rank, step)))).backward()
        twin.zero_grad()
        backward(reference_wrapped, backend.rank, step)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= scale
        assert_gradients(model, gradients(twin), 1e-12)


@contract
@may_raise_unsupported_error
def powersgd_error_follows_a_grad_scaler(backend: Backend) -> None:
    """The scale changes in each step. It does not affect later backward passes without a scale, even if the scaled pass
    raises an exception."""
    model, twin = build(), build()
    wrapped, _ = distribute_with_compression_state(backend, model, LOW_RANK)
    reference_wrapped, _ = distribute_with_compression_state(backend, twin, LOW_RANK)
    for step, scale in enumerate((1.0, 4.0, 1024.0, 2.0)):
        scaler = torch.amp.GradScaler(backend.device.type, init_scale=scale)
        model.zero_grad()
        scaler.scale(compute_loss(wrapped(batch(backend.rank, step)))).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= scale
        raises(ZeroDivisionError, "", scaler.scale(_FailingBackward.apply(torch.ones((), requires_grad=True))).backward)
        twin.zero_grad()
        backward(reference_wrapped, backend.rank, step)
        assert_gradients(model, gradients(twin), 1e-12)


class _FailingBackward(torch.autograd.Function):
    """The identity, with a backward pass that raises ZeroDivisionError."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        raise ZeroDivisionError


@contract
@may_raise_unsupported_error
def powersgd_resumes_from_its_state(backend: Backend) -> None:
    for settings in (LOW_RANK, PowerSGD(rank=1, start_step=1, min_compression_rate=1, warm_start=False)):
        model, resumed = build(), build()
        wrapped, compression_state = distribute_with_compression_state(backend, model, settings)
        for _ in gradients_of_steps(backend, model, wrapped, 3):
            pass
        resumed_wrapped, resumed_state = distribute_with_compression_state(backend, resumed, settings)
        state = save_and_load(compression_state)
        resumed_state.load_state_dict(state if backend.rank == 0 else cast(Any, None))
        for expected, resumed_gradients in zip(
            gradients_of_steps(backend, model, wrapped, 3),
            gradients_of_steps(backend, resumed, resumed_wrapped, 3),
            strict=True,
        ):
            assert are_equal_up_to_rounding(resumed_gradients, expected)


@contract
@may_raise_unsupported_error
def powersgd_resumes_on_another_number_of_ranks(backend: Backend) -> None:
    """Each rank resumes with the mean of the saved errors."""
    model, resumed, uniform = build(), build(), build()
    wrapped, compression_state = distribute_with_compression_state(backend, model, LOW_RANK)
    for _ in gradients_of_steps(backend, model, wrapped, 3):
        pass
    state = backend.broadcast_object(save_and_load(compression_state))
    longer_errors = {
        name: torch.cat([unsent_errors, unsent_errors[:1] * 2]) for name, unsent_errors in state["errors"].items()
    }
    means = {
        name: unsent_errors.mean(0, keepdim=True).expand(backend.size, *unsent_errors.shape[1:])
        for name, unsent_errors in longer_errors.items()
    }
    resumed_wrapped, resumed_state = distribute_with_compression_state(backend, resumed, LOW_RANK)
    resumed_state.load_state_dict({**state, "errors": longer_errors})
    uniform_wrapped, uniform_state = distribute_with_compression_state(backend, uniform, LOW_RANK)
    uniform_state.load_state_dict({**state, "errors": {name: mean.contiguous() for name, mean in means.items()}})
    for resumed_gradients, expected in zip(
        gradients_of_steps(backend, resumed, resumed_wrapped, 2),
        gradients_of_steps(backend, uniform, uniform_wrapped, 2),
        strict=True,
    ):
        assert are_equal_up_to_rounding(resumed_gradients, expected)


@contract
@may_raise_unsupported_error
def powersgd_saves_the_mean_of_errors_too_large_to_gather(backend: Backend) -> None:
    model, resumed = build(), build()
    wrapped, compression_state = distribute_with_compression_state(backend, model, LOW_RANK)
    for _ in gradients_of_steps(backend, model, wrapped, 3):
        pass
    gathered_state = backend.broadcast_object(save_and_load(compression_state))
    compression_state.max_gathered_bytes = 0  # type: ignore[attr-defined]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = save_and_load(compression_state)
    issued = [warning for warning in caught if "store their mean over ranks" in str(warning.message)]
    assert len(issued) == (backend.rank == 0)
    _, other = distribute_with_compression_state(backend, resumed, LOW_RANK)
    other.load_state_dict(state if backend.rank == 0 else {})
    kept = backend.broadcast_object(save_and_load(other))
    assert kept["steps"] == gathered_state["steps"]
    for name, of_all_ranks in gathered_state["errors"].items():
        assert len(of_all_ranks) == backend.size
        mean = of_all_ranks.mean(0, keepdim=True)
        torch.testing.assert_close(kept["errors"][name], mean.expand_as(of_all_ranks), rtol=0, atol=1e-12)


@contract
@may_raise_unsupported_error
def powersgd_state_of_another_model_raises(backend: Backend) -> None:
    wrapped, compression_state = distribute_with_compression_state(backend, build(), LOW_RANK)
    for key, name, shape, expected_message in (
        ("errors", "4.weight", (1, 8, 6), "no such parameter"),
        ("errors", "0.weight", (1, 6, 8), "[8, 6]"),
        ("queries", "4.weight", (6, 1), "no such parameter"),
        ("queries", "0.weight", (8, 2), "matrix Q of '0.weight' with shape [8, 2], but this model needs [6, 2]."),
    ):
        state = {"steps": 1, "errors": {}, "queries": {}, key: {name: torch.zeros(shape)}}
        raises(CheckpointError, expected_message, lambda state=state: compression_state.load_state_dict(state))
    backward(wrapped, backend.rank)


@contract
@may_raise_unsupported_error
def only_powersgd_has_compression_state(backend: Backend) -> None:
    capability = require_capability(backend, SupportsPowerSGD, "PowerSGD")
    for compression in STATELESS_SETTINGS:
        model = backend.distributed_model(build(), compression=compression)
        raises(ModelError, "not compressed by PowerSGD", lambda model=model: capability.compression_state(model))
