"""Common models train the same with sharded state, gradients or parameters as with replication, in every precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from groups import ci, nightly
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from unitrain import GradientWatch, Histograms, Logger, TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.backends.sharding.partition import MIN_DIVIDED_ELEMENTS
from unitrain.backends.sharding.state_format import gather_complete_tensor
from unitrain.testing import RankGroup

WIDTH, CLASSES, TOKENS, SAMPLES = 8, 4, 6, 36
WORDS = 2 * MIN_DIVIDED_ELEMENTS // WIDTH  # large enough to be sharded


class TiedTransformer(nn.Module):
    """Language model with tied input and output layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        output: Tensor = self.head(self.block(self.embedding(words)).mean(1))
        return output


class ConvNet(nn.Module):
    """Convolutional network with batch normalization that the Trainer synchronizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 70, 3), nn.BatchNorm2d(70), nn.Flatten(),
            nn.Linear(70 * 16, CLASSES * 4),
        )  # fmt: skip

    def forward(self, words: Tensor) -> Tensor:
        pixels = torch.stack([words.float().sin() * scale for scale in range(1, 9)], 1)
        pixels = nn.functional.pad(pixels, (0, 2)).unsqueeze(1).to(self.layers[0].weight.dtype)  # type: ignore[arg-type]
        output: Tensor = self.layers(pixels)
        return output


class WordClassifier(nn.Module):
    """Model with a frozen layer and a large embedding. A batch uses only a few rows of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(WORDS, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        output: Tensor = self.head(self.frozen(self.embedding(words)).tanh())
        return output


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randint(WORDS, (SAMPLES, TOKENS), generator=generator),
        torch.randint(CLASSES, (SAMPLES,), generator=generator),
    )


class HistogramRangeLogger(Logger):
    """Records the range of each histogram."""

    def __init__(self) -> None:
        self.ranges: dict[str, list[float]] = {}

    def histogram(self, name: str, counts: Any, edges: Any, step: int) -> None:
        self.ranges[name] = [float(edges[0]), float(edges[-1]), float(counts.sum())]


def train(
    backend: Backend, model_class: type[nn.Module], precision: str, shard: Any
) -> tuple[list[Tensor], float, float, dict[str, list[float]]]:
    """Train, and return the parameters, the last gradient norm, the final loss scale, and the ranges of rank 0's
    gradient histograms."""
    torch.manual_seed(0)
    model = model_class().double() if precision == "fp64" else model_class()
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.002, eps=1e-3
    )
    # In fp16, the first scaled gradients overflow.
    factor = 8.0 if precision == "fp16" else 1.0
    trainer = Trainer(
        model,
        optimizer,
        lambda output, target: factor * nn.functional.cross_entropy(output, target),
        backend=backend,
        callbacks=[GradientWatch(), Histograms(every=2, parameters=False)],
        loggers=[edges := HistogramRangeLogger()],
        config=TrainConfig(
            global_batch_size=12, gradient_accumulation_steps=2, sync_batch_norm=True, max_grad_norm=0.5,
            precision=precision if precision in ("bf16", "fp16") else "fp32",  # type: ignore[arg-type]
            shard=shard, max_steps=8 if precision == "fp16" else 4, progress="off",
        ),
    )  # fmt: skip
    trainer.fit(data())
    scale = trainer.loss_scale
    return (
        [gather_complete_tensor(parameter.detach(), backend) for parameter in model.parameters()],
        trainer._update.gradient_norm()["gradient_norm"],
        1.0 if scale is None else scale.item(),
        edges.ranges,
    )


MODELS: tuple[type[nn.Module], ...] = (TiedTransformer, ConvNet, WordClassifier)
# Precisions and tolerances for parameters. A difference in the last bit of a weight can change its half-precision
# rounding.
PRECISIONS = (("fp64", 1e-12), ("fp32", 1e-6), ("bf16", 1e-5), ("fp16", 1e-5))


def compare_with_replicated_training(backend: Backend, models_in_every_precision: tuple[type[nn.Module], ...]) -> None:
    """Compare sharded with replicated training: the given models in every precision, other models only in float64."""
    for model_class in MODELS:
        for precision, tolerance in PRECISIONS if model_class in models_in_every_precision else PRECISIONS[:1]:
            expected, norm, scale, ranges = train(backend, model_class, precision, "none")
            for shard in ("state", "gradients", "parameters"):
                found, found_norm, found_scale, found_ranges = train(backend, model_class, precision, shard)
                where = f"{model_class.__name__}, {precision}, {shard}"
                torch.testing.assert_close(
                    found, expected, rtol=0, atol=tolerance, msg=lambda text, where=where: f"{where}: {text}"
                )
                # Half precision has 8 or 11 significant bits, and the kernels depend on the CPU.
                norm_tolerance = tolerance if tolerance < 1e-5 else 1e-3
                assert found_norm == pytest.approx(norm, rel=norm_tolerance), where
                assert found_scale == scale, where
                assert found_ranges.keys() == ranges.keys(), where
                # The gradient of a bias before a BatchNorm is zero except for rounding.
                rounding = 1e-6 if tolerance < 1e-5 else 1e-3
                assert all(
                    one == pytest.approx(ranges[name], rel=0.01, abs=rounding) for name, one in found_ranges.items()
                ), where
            assert precision != "fp16" or scale < 65536, "a gradient must overflow"


@pytest.mark.parametrize("ranks", [("ddp", 2), *ci(("horovod", 2)), *nightly(("ddp", 3), ("horovod", 3))])
def test_sharded_training_of_common_models_equals_replicated_training(ranks: tuple[str, int]) -> None:
    models_in_every_precision = MODELS[:1] if ranks == ("ddp", 2) else MODELS
    with RankGroup(*ranks) as group:
        group.run(compare_with_replicated_training, models_in_every_precision, timeout_seconds=300)
