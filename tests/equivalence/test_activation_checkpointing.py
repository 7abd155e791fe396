"""On every backend, activation checkpointing does not change the results of a model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import TensorDataset

import unitrain
from unitrain.backends.base import Backend
from unitrain.errors import ConfigError, ModelError
from unitrain.modules.activation_checkpointing import CheckpointedForward
from unitrain.testing import RankGroup


class Block(nn.Module):
    """A residual block with random numbers, running statistics and a keyword argument."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.BatchNorm1d(4 * width), nn.GELU())
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(4 * width, width)

    def forward(self, inputs: Tensor, *, scale: float = 1.0) -> Tensor:
        return inputs + scale * self.last(self.drop(self.layers(inputs)))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs, scale=0.5)
        return self.head(inputs)


def build() -> Network:
    torch.manual_seed(0)
    return Network().double()


def step(model: nn.Module, inputs: Tensor) -> tuple[list[Tensor | None], list[Tensor], int]:
    """Return the gradients, the buffers and the saved bytes of one training step."""
    torch.manual_seed(3)
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(inputs).square().mean()
    loss.backward()
    return [parameter.grad for parameter in model.parameters()], list(model.buffers()), sum(saved.values())


@pytest.mark.parametrize("blocks", [Block, "Block", ["Block", nn.GELU]], ids=["class", "name", "nested"])
def test_checkpointed_blocks_give_the_same_gradients_and_statistics_with_less_memory(blocks: Any) -> None:
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain, checkpointed = build(), build()
    unitrain.checkpoint_activations(checkpointed, blocks)
    unitrain.checkpoint_activations(checkpointed, blocks)  # a second call has no effect
    assert sum(isinstance(module, CheckpointedForward) for module in checkpointed.modules()) == 3
    assert isinstance(checkpointed.blocks[0], Block)
    assert list(checkpointed.state_dict()) == list(plain.state_dict())
    expected, found = step(plain, inputs), step(checkpointed, inputs)
    assert all(torch.equal(*pair) for pair in zip(found[0], expected[0], strict=True))  # type: ignore[arg-type]
    assert all(torch.equal(*pair) for pair in zip(found[1], expected[1], strict=True))
    assert found[2] < 0.3 * expected[2]
    copies = [copy.deepcopy(checkpointed), pickle.loads(pickle.dumps(checkpointed))]
    for copied in copies:
        copied.zero_grad()
        assert copied.blocks[0].last.weight is not checkpointed.blocks[0].last.weight
        assert step(copied, inputs)[2] == found[2]


def test_each_backward_of_a_retained_graph_recomputes_the_forward() -> None:
    plain, checkpointed = build(), build()
    unitrain.checkpoint_activations(checkpointed, Block)
    for model in (plain, checkpointed):
        torch.manual_seed(3)
        loss = model(torch.ones(4, 8, dtype=torch.float64)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    for one, other in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)
    assert all(torch.equal(*pair) for pair in zip(plain.buffers(), checkpointed.buffers(), strict=True))


class CountingBlock(nn.Module):
    """A block whose output depends on two buffers. Each forward pass modifies one in place and assigns the other."""

    count: Tensor
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.spectral_norm(nn.Linear(8, 8))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("average", torch.zeros(8))

    def forward(self, inputs: Tensor, *, offset: Tensor) -> Tensor:
        self.count += 1
        self.average = 0.9 * self.average + 0.1 * inputs.detach().mean(0)
        return (self.layer(inputs - self.average + offset) * self.count.item()).sin()


@pytest.mark.parametrize("calls", [1, 3])
def test_recomputation_uses_the_original_buffers_and_does_not_update_them_again(calls: int) -> None:
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        model = CountingBlock().double()
        if is_checkpointed:
            unitrain.checkpoint_activations(model, CountingBlock)
        for _ in range(2):
            output = inputs
            for _ in range(calls):
                output = model(output, offset=inputs)
            loss = output.square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
        results.append([*(parameter.grad for parameter in model.parameters()), *model.buffers()])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-12)


class KeywordBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, *, inputs: Tensor) -> Tensor:
        return self.layer((inputs + 1).sin())


def test_modifying_a_keyword_argument_in_place_raises_an_error() -> None:
    block = KeywordBlock()
    unitrain.checkpoint_activations(block, KeywordBlock)
    inputs = torch.ones(2, 8) * 1
    inputs += block(inputs=inputs)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        inputs.sum().backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile reads .grad
def test_compiled_model_with_checkpointed_blocks_that_have_buffers() -> None:
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain, checkpointed = build(), build()
    unitrain.checkpoint_activations(checkpointed, Block)
    expected, found = step(plain, inputs), step(torch.compile(checkpointed, backend="eager"), inputs)
    torch.testing.assert_close(found[:2], expected[:2], rtol=0, atol=1e-12)


def train(backend: Backend, checkpointed: bool, settings: dict[str, Any]) -> tuple[list[Tensor], dict[str, float]]:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(50, 8, generator=generator, dtype=torch.float64)
    data = TensorDataset(inputs, torch.randint(3, (50,), generator=generator))
    names = ("Block",) if checkpointed else ()
    config = unitrain.TrainConfig(
        max_epochs=2, global_batch_size=12, sync_batch_norm=True, ema_decay=0.9, progress="off",
        checkpoint_activations=names, **settings,
    )  # fmt: skip
    results = unitrain.Trainer(model, optimizer, nn.CrossEntropyLoss(), backend=backend, config=config).fit(data, data)
    return [value.detach() for value in (*model.parameters(), *model.buffers())], results


@pytest.fixture(scope="module", params=[("local", 1), ("ddp", 2), ("horovod", 2)], ids=lambda group: group[0])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(*request.param) as group:
        yield group


@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2}, {"precision": "bf16"}], ids=str)
def test_trainer_gives_the_same_results_with_checkpointed_blocks(ranks: RankGroup, settings: dict[str, Any]) -> None:
    pairs = zip(ranks.run(train, False, settings), ranks.run(train, True, settings), strict=True)
    for (expected, results), (found, found_results) in pairs:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert found_results == results


def test_unknown_and_unsupported_block_classes_are_rejected() -> None:
    with pytest.raises(ModelError, match=r"Network has no module of class 'Blok', .* Did you mean 'Block'\? Classes"):
        unitrain.checkpoint_activations(build(), "Blok")
    with pytest.raises(ModelError, match="Network has no module of class 'Conv2d'"):
        unitrain.checkpoint_activations(build(), nn.Conv2d)
    with pytest.raises(ModelError, match=r"names ModuleList, a container without a forward method.* in it: 'Block'"):
        unitrain.checkpoint_activations(build(), nn.ModuleList)
    with pytest.raises(ModelError, match=r"without a forward method\. It is empty\. Name the class of the repeated"):
        unitrain.checkpoint_activations(nn.Sequential(nn.ModuleList(), nn.Linear(2, 2)), nn.ModuleList)
    with pytest.raises(ModelError, match="takes module classes or class names, got 3"):
        unitrain.checkpoint_activations(build(), [3])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"checkpoint_activations must be a tuple of class names, got 'Block'\."):
        unitrain.TrainConfig(max_epochs=1, checkpoint_activations="Block")  # type: ignore[arg-type]
