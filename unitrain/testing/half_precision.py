"""Contract tests of gradients in half precision: each is the mean over ranks, rounded once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unitrain.backends.base import Backend
from unitrain.testing.cases import contract, may_raise_unsupported_error
from unitrain.testing.models import gather_complete_gradient, seeded_generator

HALF_DTYPES = (torch.bfloat16, torch.float16)
_FEATURES = 500


class Product(nn.Module):
    """The sum of the products of the weights and the inputs, whose gradients are the inputs. `wide` is float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.zeros(_FEATURES, dtype=dtype))
        self.wide = nn.Parameter(torch.zeros(_FEATURES))

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.narrow * inputs).float().sum() + (self.wide * inputs.float()).sum()


def _inputs_by_rank(backend: Backend, dtype: torch.dtype, step: int) -> Tensor:
    """Return the inputs of all ranks, [ranks, features]. The sum of the last ones over ranks exceeds float16."""
    inputs = torch.randn(backend.size, _FEATURES, generator=seeded_generator(step))
    inputs[:, -9:] = 60000
    return inputs.to(dtype)


def _check_means(backend: Backend, dtype: torch.dtype, **settings: Any) -> None:
    inner = Product(dtype)
    if settings.get("shard") == "parameters":  # fully_shard requires one dtype per block
        inner.wide.requires_grad_(False).data = inner.wide.data.to(dtype)
    model = backend.distributed_model(inner, **settings)
    for step in range(3):
        inputs = _inputs_by_rank(backend, dtype, step)
        model.zero_grad()
        model(inputs[backend.rank]).backward()
        mean = inputs.double().mean(0)
        parameters = dict(inner.named_parameters())
        grad: Any = parameters["narrow"].grad
        gradient = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        # PowerSGD divides before the sum, which may round ties differently. A sum in half precision would round
        # differently in a third of the elements.
        limit = 15 if settings.get("compression") == "powersgd" else 2
        num_wrong = int((gradient != mean.to(dtype)).sum())
        assert num_wrong <= limit, (
            f"{settings}: {num_wrong} of {_FEATURES} gradients in {dtype} are not the rounded mean"
        )
        if parameters["wide"].grad is not None and not settings.get("compression"):
            single = gather_complete_gradient(parameters["wide"].grad)
            torch.testing.assert_close(single.double(), mean, rtol=1e-6, atol=1e-7)


@contract
def gradients_in_half_precision_are_rounded_means(backend: Backend) -> None:
    for dtype in HALF_DTYPES:
        for find_unused in (False, True):
            for shard in ("none", "state", "gradients"):
                _check_means(backend, dtype, shard=shard, find_unused_parameters=find_unused)


@contract
def compressed_gradients_in_half_precision_are_rounded_means(backend: Backend) -> None:
    """Compression in half precision does not round gradients that are already in half precision."""
    for dtype in HALF_DTYPES:
        for compression in ("bf16", "fp16", "powersgd"):
            for shard in ("none", "gradients") if compression != "powersgd" else ("none",):
                _check_means(backend, dtype, shard=shard, compression=compression)


@contract
@may_raise_unsupported_error
def gradients_of_sharded_parameters_in_half_precision_are_rounded_means(backend: Backend) -> None:
    for dtype in HALF_DTYPES:
        _check_means(backend, dtype, shard="parameters")


@contract
def models_in_half_precision_accept_a_communication_hook(backend: Backend) -> None:
    """The hook of the user replaces the reduction in float32."""
    if not hasattr(backend.distributed_model(Product(torch.bfloat16)), "register_comm_hook"):
        return
    inner = Product(torch.bfloat16)
    model: Any = backend.distributed_model(inner)

    def hook(state: list[int], bucket: Any) -> Any:
        state.append(bucket.index())
        buffer = bucket.buffer()
        future: Any = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        future.set_result(buffer)
        return future

    calls: list[int] = []
    model.register_comm_hook(calls, hook)
    inputs = _inputs_by_rank(backend, torch.bfloat16, 0)[backend.rank]
    for _ in range(2):
        model.zero_grad()
        model(inputs).backward()
        assert inner.narrow.grad is not None
        torch.testing.assert_close(inner.narrow.grad, inputs, rtol=0, atol=0)
    assert calls
