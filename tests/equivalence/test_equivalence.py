"""A run has the same parameters on ddp, on horovod and in one process with the global batch.

Every run consists of 15 optimizer steps of `Trainer` on the same samples per step. SGD is compared in float32 with a
tolerance of 1e-6. AdamW divides by the root of its second moment, which magnifies rounding differences in small
gradients. Therefore, AdamW is compared in float64 with a tolerance of 1e-9.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from groups import nightly
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from unitrain import TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.data.order import epoch_order
from unitrain.testing import RankGroup

GLOBAL_BATCH = 12
STEPS = 15
IGNORED = -100
OPTIMIZERS = {"sgd": (torch.float32, 1e-6), "adamw": (torch.float64, 1e-9)}
VARIANTS = (
    "plain", "accumulate", "clip", "uneven", "tokens", "tokens accumulated", "learning rate", "batch norm", "average",
)  # fmt: skip
CASES = list(itertools.product(OPTIMIZERS, VARIANTS))
GROUPS = [("ddp", 1), ("ddp", 3), ("horovod", 1), ("horovod", 2), *nightly(("ddp", 2), ("horovod", 3))]
Run = tuple[list[Tensor], float]


def masked_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of unmasked elements, and the number of these elements."""
    total = nn.functional.cross_entropy(output, target, ignore_index=IGNORED, reduction="sum")
    return total, (target != IGNORED).sum()


def train(backend: Backend, optimizer_name: str, variant: str) -> Run:
    """Train a small network. Return its parameters, in some variants also buffers or averages, and the last training
    loss."""
    dtype, _ = OPTIMIZERS[optimizer_name]
    torch.manual_seed(1)
    normalise: list[nn.Module] = [nn.LayerNorm(16)]
    if variant == "batch norm":  # over 4 values per sample, because a batch of 2 values would amplify rounding errors
        normalise = [nn.Unflatten(1, (4, 4)), nn.BatchNorm1d(4), nn.Flatten()]
    model = nn.Sequential(nn.Linear(10, 16), *normalise, nn.ReLU(), nn.Linear(16, 4)).to(dtype)
    generator = torch.Generator().manual_seed(2)
    # With 62 samples, the last batch has 2 samples, so one of three ranks has no data.
    count = 62 if variant in ("uneven", "batch norm") or "tokens" in variant else 60
    inputs = torch.randn(count, 10, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, 4, (count,), generator=generator)
    if optimizer_name == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # A third of the samples is masked. The number differs between ranks and steps. In one step, all samples are masked.
    masked = torch.rand(count, generator=generator) < 0.33
    masked[epoch_order(count, seed=3, epoch=1, shuffle=True)[:GLOBAL_BATCH]] = True
    if "tokens" in variant:
        targets[masked] = IGNORED
    accumulate = 2 if variant in ("accumulate", "tokens accumulated") and backend.size > 1 else 1
    scaling: dict[str, Any] = {"lr_scaling": "linear", "reference_batch_size": 8, "warmup_steps": 12}
    config = TrainConfig(
        max_steps=STEPS,
        batch_size=GLOBAL_BATCH // (backend.size * accumulate),
        gradient_accumulation_steps=accumulate,
        max_grad_norm=0.5 if variant == "clip" else None,
        sync_batch_norm=variant == "batch norm",
        ema_decay=0.9 if variant == "average" else None,
        seed=3,
        progress="off",
        **(scaling if variant == "learning rate" else {}),
    )
    loss_fn = masked_loss if "tokens" in variant else nn.functional.cross_entropy
    trainer = Trainer(model, optimizer, loss_fn, backend=backend, config=config)
    results = trainer.fit(TensorDataset(inputs, targets))
    tensors = [*model.parameters(), *model.buffers()]
    if trainer.averaged_model is not None:
        tensors += trainer.averaged_model.parameters()
    return [tensor.detach().clone() for tensor in tensors], results["train_loss"]


def train_all(backend: Backend, cases: list[tuple[str, str]] = CASES) -> dict[tuple[str, str], Run]:
    return {case: train(backend, *case) for case in cases}


def largest_difference(one: Run, other: Run) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one[0], other[0], strict=True))


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, str], Run]:
    with RankGroup("local", 1) as group:
        (runs,) = group.run(train_all, timeout_seconds=120)
    return runs


@pytest.fixture(scope="module", params=GROUPS, ids=lambda group: f"{group[0]}-{group[1]}")
def runs(request: pytest.FixtureRequest) -> Iterator[tuple[list[dict], list[dict]]]:
    """Run every case on every rank, and repeat the variants that reduce gradients or statistics differently."""
    again = [("sgd", variant) for variant in ("plain", "tokens accumulated", "batch norm", "average")]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("UNITRAIN_POLLING", "1")
        with RankGroup(*request.param) as group:
            yield group.run(train_all, timeout_seconds=240), group.run(train_all, again, timeout_seconds=240)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_training_equals_one_process_with_the_global_batch(alone, runs, case) -> None:
    _, tolerance = OPTIMIZERS[case[0]]
    first, _ = runs
    assert largest_difference(first[0][case], alone[case]) <= tolerance
    assert abs(first[0][case][1] - alone[case][1]) <= 1e-5


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_ranks_and_reruns_are_bit_equal(runs, case) -> None:
    first, second = runs
    for run in (*first, *second):
        if case in run:
            assert largest_difference(run[case], first[0][case]) == 0.0


def test_compared_variants_are_different_runs(alone) -> None:
    """Every variant must have an effect. Otherwise, the tests above would compare identical runs."""
    for optimizer in OPTIMIZERS:
        plain = alone[optimizer, "plain"]
        assert largest_difference(alone[optimizer, "clip"], plain) > 1e-4
        assert largest_difference(alone[optimizer, "uneven"], plain) > 1e-4
        assert largest_difference(alone[optimizer, "tokens"], alone[optimizer, "uneven"]) > 1e-4
        assert largest_difference(alone[optimizer, "learning rate"], plain) > 1e-4
        average, half = alone[optimizer, "average"][0], len(plain[0])
        assert largest_difference((average[half:], 0.0), plain) > 1e-4
        assert largest_difference((average[:half], 0.0), plain) == 0.0
        assert largest_difference(alone[optimizer, "accumulate"], plain) == 0.0  # one process does not accumulate
