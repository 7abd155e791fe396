"""Small models and data for the contract suite, and expected gradients that are computed in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from unitrain.backends.base import Backend
from unitrain.backends.sharding.gradient import ShardedGradient

ROWS, FEATURES = 4, 6  # samples per rank, and features per sample
WORDS, _TRANSFORMER_WIDTH = 11, 6  # 11 is not divisible by 2 or 3, nor 6 by 4, so shards are uneven


def build(seed: int = 0) -> nn.Module:
    """Return a small network with a normalization layer, equal on every rank for the same `seed`."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)).double()


def seeded_generator(seed: int) -> torch.Generator:
    """Return a random number generator with this seed on the default device."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def batch(rank: int, step: int = 0) -> Tensor:
    """Return the samples of `rank` for `step`: float64 [ROWS, FEATURES]."""
    return torch.randn(ROWS, FEATURES, generator=seeded_generator(1000 * step + rank)).double()


def compute_loss(output: Tensor) -> Tensor:
    """Return a nonlinear loss of `output`."""
    return (output.sin() * torch.linspace(1, 2, output.shape[-1]).double()).sum(-1).mean()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Return a copy of every parameter's complete gradient by name. All ranks must call this function."""
    return {
        name: None if parameter.grad is None else gather_complete_gradient(parameter.grad).clone()
        for name, parameter in model.named_parameters()
    }


def gather_complete_gradient(gradient: Tensor) -> Tensor:
    """Return the complete `gradient`, even if it is sharded. All ranks must call this function."""
    return gradient.full_tensor() if isinstance(gradient, ShardedGradient) else gradient.detach()


def mean_gradients(
    backend: Backend, model: nn.Module, run: Callable[[nn.Module, int], Any]
) -> dict[str, Tensor | None]:
    """Return the mean over ranks of the gradients that `run(model, rank)` computes, without communication.

    The gradient of a parameter counts as zero on ranks that do not use it, and is None if no rank uses it.
    """
    gradients_by_rank: list[dict[str, Tensor | None]] = []
    for rank in range(backend.size):
        model.zero_grad(set_to_none=True)
        run(model, rank)
        gradients_by_rank.append(gradients(model))
    model.zero_grad(set_to_none=True)
    result: dict[str, Tensor | None] = {}
    for name in gradients_by_rank[0]:
        gradients_of_ranks = [rank_gradients[name] for rank_gradients in gradients_by_rank]
        used_gradients = [gradient for gradient in gradients_of_ranks if gradient is not None]
        result[name] = torch.stack(used_gradients).sum(0) / backend.size if used_gradients else None
    return result


def assert_gradients(model: nn.Module, expected: dict[str, Tensor | None], tolerance: float = 1e-12) -> None:
    """Assert that the gradients of `model` equal `expected`."""
    for name, parameter in model.named_parameters():
        expected_gradient = expected[name]
        if expected_gradient is None or parameter.grad is None:
            assert expected_gradient is None, f"{name} has no gradient"
            assert parameter.grad is None, f"{name} has a gradient, but no rank used it"
            continue
        torch.testing.assert_close(
            gather_complete_gradient(parameter.grad),
            expected_gradient,
            rtol=0,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def assert_reduced(
    backend: Backend, wrapped: nn.Module, model: nn.Module, twin: nn.Module, run: Callable[[nn.Module, int], Any]
) -> None:
    """Assert, for three steps, that `run(wrapped, rank)` computes the mean gradients of `model`.

    `twin` is a copy of the model, with which the expected gradients are computed locally. Three steps are necessary,
    because DDP builds its buckets in the first step and rebuilds them in the second.
    """
    for _ in range(3):
        model.zero_grad()
        run(wrapped, backend.rank)
        assert_gradients(model, mean_gradients(backend, twin, run))


def backward(model: nn.Module, rank: int, step: int = 0) -> None:
    """Run the forward and backward pass on the batch of `rank` and `step`."""
    compute_loss(model(batch(rank, step))).backward()


class TransformerLayer(nn.Module):
    """A layer with attention and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(_TRANSFORMER_WIDTH, 2, dropout=0.0, batch_first=True)
        self.norm = nn.LayerNorm(_TRANSFORMER_WIDTH)
        self.up, self.down = nn.Linear(_TRANSFORMER_WIDTH, 7), nn.Linear(7, _TRANSFORMER_WIDTH, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        attended = inputs + self.attention(inputs, inputs, inputs, need_weights=False)[0]
        output: Tensor = attended + self.down(torch.tanh(self.up(self.norm(attended))))
        return output


class Transformer(nn.Module):
    """A language model whose embedding and output layer share their weights. A batch does not use all rows of the
    embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, _TRANSFORMER_WIDTH)
        self.layers = nn.ModuleList(TransformerLayer() for _ in range(2))
        self.head = nn.Linear(_TRANSFORMER_WIDTH, WORDS)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        features = self.embedding(words)
        for layer in self.layers:
            features = layer(features)
        output: Tensor = self.head(features)
        return output


class ConvBlock(nn.Module):
    """A convolution with BatchNorm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(channels, 5, 3, padding=1), nn.BatchNorm2d(5)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.norm(self.convolution(inputs)).relu()
        return output


class ConvNet(nn.Module):
    """An image classifier with two ConvBlocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(ConvBlock(3), ConvBlock(5)), nn.Linear(5, 3)

    def forward(self, images: Tensor) -> Tensor:
        output: Tensor = self.head(self.blocks(images).mean((2, 3)))
        return output
