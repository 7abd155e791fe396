"""The built-in models of `unitrain bench train`, with their optimizers and random data."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

import unitrain
from unitrain.errors import MissingDependencyError

# name -> (function, steps per turn). A turn takes roughly a second.
BUILT_IN_MODELS = {
    "tiny": ("tiny", 300),
    "25M": ("mlp_25m", 10),
    "gpt": ("gpt", 20),
    "resnet18": ("resnet18", 2),
    "resnet50": ("resnet50", 2),
}
_DEFAULT_STEPS = 20
_FEATURES, _CLASSES = 64, 10
_SAMPLES = 1 << 14
_CHARACTERS, _LENGTH = 96, 64


def resolve_target(target: str) -> tuple[str, int]:
    """Return the function of a built-in model, or `target` itself for other targets, and the default steps per turn."""
    if target not in BUILT_IN_MODELS:
        return target, _DEFAULT_STEPS
    function, steps = BUILT_IN_MODELS[target]
    return f"{__name__}:{function}", steps


def tiny() -> dict[str, Any]:
    """Return the Trainer arguments for an MLP with two hidden layers of 64 units, whose step time is dominated by
    overhead."""
    return _mlp_arguments([64, 64])


def mlp_25m() -> dict[str, Any]:
    """Return the Trainer arguments for an MLP with 25 million parameters in four hidden layers, which has a high
    communication volume."""
    return _mlp_arguments([2048, 3072, 3072, 2816])


def resnet18() -> dict[str, Any]:
    """Return the Trainer arguments for torchvision's ResNet-18 with 224 x 224 images."""
    return _resnet_arguments("resnet18", batch_size=16)


def resnet50() -> dict[str, Any]:
    """Return the Trainer arguments for torchvision's ResNet-50 with 224 x 224 images."""
    return _resnet_arguments("resnet50", batch_size=16)


def gpt() -> dict[str, Any]:
    """Return the Trainer arguments for a transformer with two layers and a context of 64 characters, as in
    examples/gpt.py."""
    model = SmallGPT()
    text = torch.randint(_CHARACTERS, (_SAMPLES, _LENGTH + 1))
    data = TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return _trainer_arguments(model, optimizer, data, batch_size=32, loss_fn=_character_loss)


class SmallGPT(nn.Module):
    """A causal transformer: maps characters [n, length] to next-character logits [n, length, characters]."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.characters = nn.Embedding(_CHARACTERS, width)
        self.positions = nn.Embedding(_LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.scores = nn.Linear(width, _CHARACTERS, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits, computed with causal attention."""
        length = text.shape[1]
        hidden = self.characters(text) + self.positions(torch.arange(length, device=text.device))
        causal_mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        scores: Tensor = self.scores(self.layers(hidden, mask=causal_mask, is_causal=True))
        return scores


class Images(Dataset[tuple[Tensor, Tensor]]):
    """A dataset that repeats 32 random images, so that its memory usage and loading time are negligible."""

    def __init__(self, length: int = _SAMPLES) -> None:
        self._images = torch.randn(32, 3, 224, 224)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._images[index % 32], torch.tensor(index % 1000)


def _mlp_arguments(hidden: Sequence[int]) -> dict[str, Any]:
    widths = [_FEATURES, *hidden, _CLASSES]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    data = TensorDataset(torch.randn(_SAMPLES, _FEATURES), torch.randint(_CLASSES, (_SAMPLES,)))
    model = nn.Sequential(*layers[:-1])
    return _trainer_arguments(model, _create_sgd(model), data, batch_size=32)


def _resnet_arguments(name: str, batch_size: int) -> dict[str, Any]:
    try:
        models = importlib.import_module("torchvision.models")
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"Model {name!r} needs a package that is missing: {error}. Install it, in the source folder of unitrain, "
            'with: pip install ".[examples]"'
        ) from error
    model = getattr(models, name)()
    return _trainer_arguments(model, _create_sgd(model), Images(), batch_size=batch_size)


def _create_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _character_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(scores.flatten(0, 1), targets.flatten())


def _trainer_arguments(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Dataset[Any],
    *,
    batch_size: int,
    loss_fn: Callable[..., Tensor] = cross_entropy,
) -> dict[str, Any]:
    return {
        "model": model,
        "optimizer": optimizer,
        "loss_fn": loss_fn,
        "config": unitrain.TrainConfig(max_epochs=1, batch_size=batch_size),
        "train_data": data,
    }
