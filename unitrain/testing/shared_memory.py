"""Contract tests of models with different parameters in the same memory, as after an assignment to `.data`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unitrain.backends.base import Backend
from unitrain.backends.local_sgd_config import LocalSGDConfig
from unitrain.errors import ModelError
from unitrain.optim.local_sgd import LocalSGD
from unitrain.testing.cases import assert_same_on_every_rank, contract, raises
from unitrain.testing.models import FEATURES, batch, compute_loss


class _TwoLayers(nn.Module):
    """Two layers whose weights may share memory."""

    def __init__(self, set_weights: Callable[[nn.Linear, nn.Linear], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(2))
        set_weights(self.first, self.second)
        self.double()  # replaces the parameters' memory
        set_weights(self.first, self.second)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.second(torch.tanh(self.first(inputs)))
        return output


def _assign_data(first: nn.Linear, second: nn.Linear) -> None:
    second.weight.data = first.weight.data


def _transpose(first: nn.Linear, second: nn.Linear) -> None:
    second.weight = nn.Parameter(first.weight.data.t())


def _overlap_rows(first: nn.Linear, second: nn.Linear) -> None:
    rows = torch.linspace(-1, 1, (FEATURES + 1) * FEATURES, dtype=first.weight.dtype).view(FEATURES + 1, FEATURES)
    first.weight, second.weight = nn.Parameter(rows[:-1]), nn.Parameter(rows[1:])


def _divide_columns(first: nn.Linear, second: nn.Linear) -> None:
    columns = torch.linspace(-1, 1, 2 * FEATURES * FEATURES, dtype=first.weight.dtype).view(FEATURES, 2 * FEATURES)
    first.weight, second.weight = (nn.Parameter(half) for half in columns.chunk(2, dim=1))


def _divide_rows(first: nn.Linear, second: nn.Linear) -> None:
    rows = torch.linspace(-1, 1, 2 * FEATURES * FEATURES, dtype=first.weight.dtype).view(2 * FEATURES, FEATURES)
    first.weight, second.weight = (nn.Parameter(half) for half in rows.chunk(2))


def _register_buffer(first: nn.Linear, second: nn.Linear) -> None:
    first.register_buffer("row", first.weight.data[0])


@contract
def parameters_in_shared_memory_train_as_in_one_process(backend: Backend) -> None:
    for set_weights in (_assign_data, _transpose, _overlap_rows, _divide_columns, _divide_rows):
        model, twin = _TwoLayers(set_weights), _TwoLayers(set_weights)
        wrapped = backend.distributed_model(model)
        optimizer = backend.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01), wrapped)
        reference = torch.optim.Adam(twin.parameters(), lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            compute_loss(wrapped(batch(backend.rank, step))).backward()
            optimizer.step()
            reference.zero_grad()
            compute_loss(twin(torch.cat([batch(rank, step) for rank in range(backend.size)]))).backward()
            reference.step()
        torch.testing.assert_close([*model.parameters()], [*twin.parameters()], rtol=0, atol=1e-10)


@contract
def parameters_in_shared_memory_cannot_be_sharded(backend: Backend) -> None:
    def assert_raises(names: str, call: Callable[[], object]) -> None:
        assert_same_on_every_rank(backend, raises(ModelError, f"{names} are different tensors that share memory", call))

    def shard(model: nn.Module, **arguments: Any) -> None:
        wrapped = backend.distributed_model(model, **({} if arguments["shard"] == "state" else arguments))
        backend.distributed_optimizer(torch.optim.Adam(model.parameters()), wrapped, **arguments)

    names = "'first.weight' and 'second.weight'"
    for set_weights in (_assign_data, _transpose, _overlap_rows):
        for mode in ("state", "gradients", "parameters"):
            if (set_weights, mode) != (_transpose, "parameters"):  # rejected because it is not contiguous
                assert_raises(names, partial(shard, _TwoLayers(set_weights), shard=mode))
        model = _TwoLayers(set_weights)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert_raises(
            names, lambda model=model, optimizer=optimizer: LocalSGD(model, optimizer, backend, LocalSGDConfig(steps=2))
        )
    assert_raises("'first.row' and 'first.weight'", lambda: shard(_TwoLayers(_register_buffer), shard="parameters"))
    for mode in ("state", "gradients", "parameters"):
        shard(_TwoLayers(_divide_rows), shard=mode)
    shard(_TwoLayers(_register_buffer), shard="state")
