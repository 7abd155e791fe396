"""BatchNorm over all ranks: N ranks compute what one process with plain BatchNorm computes on the whole batch."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from one_rank import rank_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import unitrain
from unitrain import TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.errors import ModelError
from unitrain.testing import RankGroup

LOCAL = LocalBackend(torch.device("cpu"))
CHANNELS = 3
GLOBAL_BATCH, SAMPLES, STEPS = 12, 62, 100  # the last batch of an epoch is of 2: with three ranks, one has none
# Samples per rank: of 2, 3 and 1 ranks; a rank may have none.
COUNTS = {1: [7], 2: [4, 3], 3: [4, 0, 3]}

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.BatchNorm2d(CHANNELS),
    "cumulative": lambda: nn.BatchNorm2d(CHANNELS, momentum=None),
    "not affine": lambda: nn.BatchNorm2d(CHANNELS, affine=False),
    "untracked": lambda: nn.BatchNorm2d(CHANNELS, track_running_stats=False),
    "1d": lambda: nn.BatchNorm1d(CHANNELS, eps=0.1),
    "1d flat": lambda: nn.BatchNorm1d(CHANNELS),
    "3d": lambda: nn.BatchNorm3d(CHANNELS),
    "torch's": lambda: nn.SyncBatchNorm(CHANNELS),
}
SHAPES = {"1d": (5,), "1d flat": (), "3d": (2, 3, 2)}


def layer(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    made = LAYERS[name]()
    for parameter in made.parameters():
        nn.init.uniform_(parameter, 0.5, 2.0)
    return made.to(dtype)


def values(name: str, step: int, count: int = 7, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return samples far from zero, so that a variance computed carelessly shows."""
    generator = torch.Generator().manual_seed(step)
    shape = (count, CHANNELS, *SHAPES.get(name, (4, 3)))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5 + 20).to(dtype)


def weights(x: Tensor) -> Tensor:
    return torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape).sin()


def run_layer(
    module: nn.Module, name: str, part: slice, *, dtype: torch.dtype = torch.float64, fmt: Any = None
) -> list[Tensor]:
    """Return outputs, gradients and buffers of two training steps on `part` of the samples, then of an evaluation."""
    found = []
    for step in range(2):
        whole = values(name, step, dtype=dtype)
        x = whole[part].clone(memory_format=fmt or torch.preserve_format).requires_grad_()
        y = module(x)
        (y * weights(whole)[part]).sum().backward()
        assert x.grad is not None
        assert y.dtype == x.dtype
        found += [y.detach(), x.grad]
    module.eval()
    found.append(module(values(name, 9, dtype=dtype)[part]).detach())
    module.train()
    return found


def whole_run(name: str, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Return what plain BatchNorm gives in one process: per sample, its parameters' gradients, and its state."""
    module: Any = layer(name, dtype)
    if isinstance(module, nn.SyncBatchNorm):
        plain = nn.BatchNorm2d(CHANNELS).to(dtype)
        plain.load_state_dict(module.state_dict())
        module = plain
    found = run_layer(module, name, slice(None), dtype=dtype)
    return found, [parameter.grad for parameter in module.parameters()], module.state_dict()


def check_layers(backend: Backend) -> None:
    counts = COUNTS[backend.size]
    start = sum(counts[: backend.rank])
    part = slice(start, start + counts[backend.rank])
    for name in LAYERS:
        for dtype, fmt, tolerance in (
            (torch.float64, None, 1e-11),
            (torch.float32, None, 3e-5),
            (torch.float64, torch.channels_last, 1e-11),
        ):
            if fmt is not None and SHAPES.get(name):
                continue
            if fmt is not None and name == "1d flat":
                continue
            module = layer(name, dtype)
            before = list(module.parameters()), list(module.buffers())
            assert unitrain.sync_batch_norm(module, backend) is module
            assert all(one is two for one, two in zip(before[0], module.parameters(), strict=True))
            assert all(one is two for one, two in zip(before[1], module.buffers(), strict=True))
            expected, gradients, state = whole_run(name, dtype)
            what = (name, dtype, fmt)
            found = run_layer(module, name, part, dtype=dtype, fmt=fmt)
            evaluated = not (name == "untracked")  # which by design is normalised by each rank's own samples
            for one, other in list(zip(found, expected, strict=True))[: None if evaluated else -1]:
                torch.testing.assert_close(one, other[part], rtol=0, atol=tolerance, msg=lambda t: f"{what}: {t}")
            for parameter, wanted in zip(module.parameters(), gradients, strict=True):
                total = backend.allreduce(parameter.grad, "sum")
                torch.testing.assert_close(total, wanted, rtol=0, atol=10 * tolerance, msg=lambda t: f"{what}: {t}")
            assert list(module.state_dict()) == list(state), what
            for key, value in module.state_dict().items():
                torch.testing.assert_close(value, state[key], rtol=0, atol=tolerance, msg=lambda t: f"{what} {key}: {t}")


GROUPS = [("local", 1), ("ddp", 2), ("ddp", 3), ("horovod", 2), ("horovod", 3)]


@pytest.fixture(scope="module", params=GROUPS, ids=lambda group: f"{group[0]}-{group[1]}")
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(*request.param) as ranks:
        yield ranks


def test_a_layer_equals_batch_norm_on_the_whole_batch(group: RankGroup) -> None:
    group.run(check_layers)
