"""Contract tests of compression: a backend raises UnsupportedError, or satisfies rule 7 in `backends/base.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unitrain.backends.base import Backend
from unitrain.backends.compression_setting import Compression, PowerSGD
from unitrain.errors import ConfigError, ModelError
from unitrain.testing.cases import assert_same_on_every_rank, contract, may_raise_unsupported_error, raises
from unitrain.testing.models import (
    FEATURES,
    assert_gradients,
    backward,
    batch,
    build,
    compute_loss,
    gradients,
    mean_gradients,
    seeded_generator,
)
from unitrain.testing.parameters import TwoHeads

HALF_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def gradients_of_steps(
    backend: Backend, model: nn.Module, wrapped: nn.Module, num_steps: int
) -> Iterator[dict[str, Tensor]]:
    """Yield the gradients of each step. Each step uses different data."""
    for step in range(num_steps):
        model.zero_grad()
        backward(wrapped, backend.rank, step)
        yield {name: gradient for name, gradient in gradients(model).items() if gradient is not None}


def are_equal_up_to_rounding(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Return whether both contain the same tensors, up to rounding, because a sum over three or more ranks depends on
    the order of summation."""
    return left.keys() == right.keys() and all(torch.allclose(left[n], right[n], rtol=0, atol=1e-12) for n in left)


@contract
def unknown_compression_raises(backend: Backend) -> None:
    for wrong in ("fp61", None, 16):
        unknown: Any = wrong
        message = raises(
            ConfigError, "none, fp16, bf16", lambda u=unknown: backend.distributed_model(build(), compression=u)
        )
        assert repr(wrong) in message


@contract
@may_raise_unsupported_error
def compression_that_differs_between_ranks_raises(backend: Backend) -> None:
    choice: Literal["fp16", "bf16"] = "fp16" if backend.rank == 0 else "bf16"
    if backend.size > 1:
        raises(ConfigError, "bf16", lambda: backend.distributed_model(build(), compression=choice))


@contract
def compression_none_is_bit_identical(backend: Backend) -> None:
    model, twin = build(), build()
    wrapped, plain_twin = backend.distributed_model(model, compression="none"), backend.distributed_model(twin)
    for step_gradients, twin_gradients in zip(
        gradients_of_steps(backend, model, wrapped, 3), gradients_of_steps(backend, twin, plain_twin, 3), strict=True
    ):
        assert all(torch.equal(step_gradients[name], twin_gradients[name]) for name in step_gradients)


@contract
@may_raise_unsupported_error
def half_precision_rounds_each_gradient_and_the_sum(backend: Backend) -> None:
    def run(model: nn.Module, rank: int) -> None:
        compute_loss(model(batch(rank).float()).double()).backward()

    for compression, dtype in HALF_DTYPES.items():
        name: Any = compression
        model, twin = build().float(), build().float()
        run(backend.distributed_model(model, compression=name), backend.rank)
        totals = [torch.zeros_like(parameter) for parameter in twin.parameters()]
        for rank in range(backend.size):
            twin.zero_grad()
            run(twin, rank)
            for total, parameter in zip(totals, twin.parameters(), strict=True):
                assert parameter.grad is not None
                total += (parameter.grad / backend.size).to(dtype).float()
        for total, parameter in zip(totals, model.parameters(), strict=True):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, parameter.grad.to(dtype).float()), f"not rounded to {compression}"
            tolerance = torch.finfo(dtype).eps  # one unit in the last place
            torch.testing.assert_close(parameter.grad, total.to(dtype).float(), rtol=tolerance, atol=0)
        assert_same_on_every_rank(backend, [p.grad.tolist() for p in model.parameters() if p.grad is not None])


@contract
@may_raise_unsupported_error
def half_precision_rounds_accumulated_gradients_once(backend: Backend) -> None:
    model, twin = build(), build()
    wrapped = backend.distributed_model(model, compression="bf16")
    with backend.no_sync(wrapped):
        backward(wrapped, backend.rank, 0)
    backward(twin, backend.rank, 0)
    assert_gradients(model, gradients(twin), 0)
    backward(wrapped, backend.rank, 1)

    def backward_twice(m: nn.Module, rank: int) -> None:
        backward(m, rank, 0)
        backward(m, rank, 1)

    expected = mean_gradients(backend, twin, backward_twice)
    for name, gradient in gradients(model).items():
        expected_gradient = expected[name]
        assert gradient is not None
        assert expected_gradient is not None
        assert torch.equal(gradient, gradient.bfloat16().double())
        torch.testing.assert_close(gradient, expected_gradient, rtol=2**-6, atol=2**-7)


@contract
@may_raise_unsupported_error
def unused_parameters_raise_on_every_rank_with_compression(backend: Backend) -> None:
    """Ranks that used all parameters also raise, instead of waiting for a collective that never starts."""
    choices: tuple[Compression, ...] = ("fp16", PowerSGD(start_step=0, min_compression_rate=1))
    for compression in choices:
        wrapped = backend.distributed_model(TwoHeads(), compression=compression)
        heads = "left" if backend.rank == backend.size - 1 else "left right"
        text = raises(
            ModelError,
            "2 parameters received no gradient on",
            lambda wrapped=wrapped, heads=heads: compute_loss(wrapped(batch(backend.rank), heads)).backward(),
        )
        assert_same_on_every_rank(backend, text)


@contract
@may_raise_unsupported_error
def parameters_used_in_an_earlier_micro_batch_are_compressed(backend: Backend) -> None:
    choices: tuple[Compression, ...] = ("bf16", PowerSGD(rank=1, start_step=0, min_compression_rate=1))
    for compression in choices:
        model, twin = TwoHeads(), TwoHeads()
        wrapped = backend.distributed_model(model, find_unused_parameters=True, compression=compression)

        def run_window(m: nn.Module, rank: int, step: int, *, wrapped: nn.Module = wrapped) -> None:
            with backend.no_sync(m) if m is wrapped else nullcontext():
                compute_loss(m(batch(rank, 2 * step), "left")).backward()
            compute_loss(m(batch(rank, 2 * step + 1), "right")).backward()

        for step in range(3):
            model.zero_grad()
            run_window(wrapped, backend.rank, step)
            expected = mean_gradients(backend, twin, lambda m, rank, step=step: run_window(m, rank, step))
            for name, gradient in gradients(model).items():
                expected_gradient = expected[name]
                assert gradient is not None
                assert expected_gradient is not None
                if compression == "bf16":
                    assert torch.equal(gradient, gradient.bfloat16().double()), name
                    torch.testing.assert_close(gradient, expected_gradient, rtol=2**-6, atol=2**-7)
                elif gradient.dim() == 2:
                    assert torch.linalg.matrix_rank(gradient) == 1, name


@contract
@may_raise_unsupported_error
def input_gradient_is_not_counted_as_reduction(backend: Backend) -> None:
    """PowerSGD counts reductions, and half precision rounds only reduced gradients."""
    choices: tuple[Compression, ...] = ("bf16", PowerSGD(rank=1, start_step=2, min_compression_rate=1))
    for compression in choices:
        model, twin = build(), build()
        wrapped = backend.distributed_model(model, compression=compression)
        other = backend.distributed_model(twin, compression=compression)
        for step in range(4):
            inputs = batch(backend.rank, step).requires_grad_()
            for module in (model, twin):
                module.zero_grad()
            loss = compute_loss(wrapped(inputs))
            torch.autograd.grad(loss, inputs, retain_graph=True)
            loss.backward()
            backward(other, backend.rank, step)
            assert_gradients(model, gradients(twin), 0)


class ComplexLayers(nn.Module):
    """Complex layer followed by a real network."""

    def __init__(self) -> None:
        super().__init__()
        generator = seeded_generator(7)
        self.phases = nn.Parameter(torch.randn(FEATURES, 5, dtype=torch.complex64, generator=generator))
        self.readout = build(seed=3).float()

    def forward(self, x: Tensor) -> Tensor:
        moved = x.to(torch.complex64) @ self.phases
        result: Tensor = self.readout(torch.cat([moved.real, moved.imag[:, :1]], dim=1))
        return result


@contract
@may_raise_unsupported_error
def complex_gradients_keep_real_and_imaginary_parts(backend: Backend) -> None:
    def run(model: nn.Module, rank: int) -> None:
        compute_loss(model(batch(rank).float()).double()).backward()

    settings: tuple[Compression, ...] = (
        "none",
        "fp16",
        "bf16",
        PowerSGD(rank=1, start_step=0, min_compression_rate=1),
        PowerSGD(rank=1, start_step=100),
    )
    for compression in settings:
        model, twin = ComplexLayers(), ComplexLayers()
        wrapped = backend.distributed_model(model, compression=compression)
        for _ in range(2):
            model.zero_grad()
            run(wrapped, backend.rank)
            expected = mean_gradients(backend, twin, run)["phases"]
            gradient = model.phases.grad
            assert gradient is not None
            assert expected is not None
            parts, expected_parts = torch.view_as_real(gradient), torch.view_as_real(expected)
            half = HALF_DTYPES.get(str(compression))
            if half is not None:
                assert torch.equal(parts, parts.to(half).float()), f"not rounded to {compression}"
            tolerance = 1e-5 if half is None else 2 * torch.finfo(half).eps
            torch.testing.assert_close(parts, expected_parts, rtol=tolerance, atol=tolerance)
            assert_same_on_every_rank(backend, parts.tolist())


@contract
@may_raise_unsupported_error
def gradient_computed_inside_a_loss_is_not_compressed(backend: Backend) -> None:
    """Gradients accumulate over micro-batches whose losses contain a gradient of the inputs."""

    def run_window(model: nn.Module, rank: int, wrapped: nn.Module | None) -> None:
        for micro_step in range(3):
            accumulates = wrapped is not None and micro_step < 2
            with backend.no_sync(model) if accumulates else nullcontext():
                inputs = batch(rank, micro_step).requires_grad_()
                loss = compute_loss(model(inputs))
                (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
                (loss + slope.pow(2).sum()).backward()

    powersgd = PowerSGD(rank=1, start_step=0, min_compression_rate=1)
    for compression in ("fp16", powersgd):
        model, twin, expected_model = build(), build(), build()
        wrapped = backend.distributed_model(model, compression=compression)
        run_window(wrapped, backend.rank, wrapped)
        # A single backward pass over all micro-batches, whose gradients are compressed once.
        plain = backend.distributed_model(expected_model, compression=compression)
        total = torch.zeros((), dtype=torch.float64)
        for micro_step in range(3):
            inputs = batch(backend.rank, micro_step).requires_grad_()
            loss = compute_loss(plain(inputs))
            (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
            total = total + loss + slope.pow(2).sum()
        total.backward()
        for name, gradient in gradients(model).items():
            expected_gradient = gradients(expected_model)[name]
            assert gradient is not None
            assert expected_gradient is not None
            # A sum in a different order may round differently.
            tolerance = 2 * torch.finfo(torch.float16).eps if compression == "fp16" else 1e-9
            torch.testing.assert_close(gradient, expected_gradient, rtol=tolerance, atol=1e-9)
        if compression == "fp16":
            exact = mean_gradients(backend, twin, lambda m, rank: run_window(m, rank, None))
            for name, gradient in gradients(model).items():
                assert gradient is not None
                assert torch.equal(gradient, gradient.half().double()), name
                torch.testing.assert_close(gradient, exact[name], rtol=2**-9, atol=2**-9)
