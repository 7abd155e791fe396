"""Trains with logical ranks, and computes digests of all results.

python logical_ranks_training.py FOLDER STEPS: train the variant "all" in FOLDER/run, and write the digests to
FOLDER/digests.json. FOLDER/plan.json contains events like those of `elastic_training.py`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchmetrics
from elastic_training import EventCallback
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler, default_collate

import unitrain
from unitrain import TrainConfig, Trainer
from unitrain.backends.base import Backend

LOGICAL_RANKS, BATCH, SAMPLES, STEPS = 4, 3, 62, 9
Digests = dict[str, Any]


class Noisy(Dataset[Any]):
    """A dataset with augmentation by the random generators of torch and numpy."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        self.inputs = torch.randn(SAMPLES, 1, 6, 6, generator=generator)
        self.targets = torch.randint(0, 4, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = 0.1 * torch.randn(1, 6, 6) + float(np.random.rand())
        return self.inputs[index] + noise, self.targets[index]


class Network(nn.Module):
    """A network with BatchNorm, dropout and a buffer that each forward pass reads, and changes in training.

    If `has_branches`, random numbers choose one of two branches.
    """

    def __init__(self, *, has_branches: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.3)
        )
        self.heads = nn.ModuleList(nn.Linear(16, 4) for _ in range(2 if has_branches else 1))
        self.register_buffer("center", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        output: Tensor = self.heads[int(torch.randint(len(self.heads), ()))](hidden - self.center)
        if self.training:
            self.center = 0.9 * self.center + 0.1 * hidden.detach().mean(0)
        return output


def summed_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses for targets other than 3, and the number of these targets."""
    return cross_entropy(output, target, ignore_index=3, reduction="sum"), (target != 3).sum()


def spiked_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss that is 1e12 times larger for some batches."""
    return cross_entropy(output, target) * (1e12 if int(target[0]) == 2 else 1.0)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float()


class Confidence(torchmetrics.Metric):
    """A metric with the mean and the median of the largest output. The states are a float32 sum and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, output: Tensor, target: Tensor) -> None:
        found = output.float().softmax(1).amax(1)
        self.total += found.sum()
        self.values.append(found)

    def compute(self) -> dict[str, Tensor]:
        values = torch.cat(self.values) if isinstance(self.values, list) else self.values
        return {"mean": self.total / len(values), "median": values.median()}


class RandomNumberCallback(unitrain.Callback):
    """Draws a random number after each step."""

    def __init__(self) -> None:
        self.draws: list[float] = []

    def on_step_end(self, trainer: Any) -> None:
        self.draws.append(float(torch.rand(())))


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5},
    "workers": {"num_workers": 2},
    "tokens": {"gradient_accumulation_steps": 2},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "spike": {},
    "unused": {"find_unused_parameters": True},
    "sampler": {"batch_size": None},
    "equal": {"batch_size": None},
    "all": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "precision": "bf16"},
    "synchronized": {"sync_batch_norm": True},  # some logical ranks have no samples in the last step of an epoch
    "synchronized all": {
        "sync_batch_norm": True, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "precision": "bf16",
    },
}  # fmt: skip


def build(variant: str) -> tuple[nn.Module, torch.optim.Optimizer, Any, Any]:
    """Return the model, the optimizer, the loss function and the data of a variant."""
    torch.manual_seed(1)
    model = Network(has_branches=variant == "unused")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data: Any = Noisy()
    if variant == "equal":
        data = DataLoader(data, BATCH, shuffle=True, drop_last=True)
    if variant == "sampler":
        sampler = WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1).tolist(), SAMPLES)
        data = DataLoader(data, BATCH, sampler=sampler, collate_fn=lambda items: default_collate(items))
    return model, optimizer, {"tokens": summed_loss, "spike": spiked_loss}.get(variant, cross_entropy), data


def train(backend: Backend, variant: str, callbacks: Sequence[unitrain.Callback] = (), **settings: Any) -> Digests:
    """Train with the Trainer, and return the digests of all results."""
    model, optimizer, loss_fn, data = build(variant)
    settings = {"max_steps": STEPS, "batch_size": BATCH, **VARIANTS[variant], **settings}
    config = TrainConfig(
        **{"logical_ranks": LOGICAL_RANKS, **settings}, ema_decay=0.9, log_every_n_steps=2, seed=3, progress="off"
    )
    draw = RandomNumberCallback()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    trainer = Trainer(
        model, optimizer, loss_fn, backend=backend, config=config,
        metrics={"accuracy": accuracy, "confidence": Confidence()},
        callbacks=[draw, *callbacks], scheduler=scheduler,
    )  # fmt: skip
    results = trainer.fit(data, TensorDataset(Noisy().inputs, Noisy().targets))
    unitrain.broadcast_buffers(model, backend)
    average = trainer.averaged_model
    assert average is not None
    outputs = trainer.predict(TensorDataset(Noisy().inputs, Noisy().targets))
    return {
        "parameters": digest(*model.parameters()),
        "buffers": digest(*model.buffers()),
        "state": digest(*(value for state in optimizer.state.values() for value in state.values())),
        "average": digest(*average.parameters(), *average.buffers()),
        "outputs": digest(outputs),
        "draws": draw.draws[-1],
        **{name: value.hex() for name, value in results.items()},
    }


def digest(*tensors: Tensor) -> str:
    content = b"".join(tensor.detach().double().numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(content).hexdigest()[:12]


class EventsWithoutSamples(EventCallback):
    """Triggers the planned events, and records the step and the number of ranks, but no samples."""

    def on_micro_batch_end(self, trainer: Trainer, batch: Any, micro_batch: Any, loss: Any) -> None:
        pass


def main(folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    with unitrain.init(device="cpu", timeout_seconds=60) as backend:
        digests = train(
            backend, "all", [EventsWithoutSamples(folder, 1.0)], max_steps=steps, output_dir=folder / "run",
            resume=True, checkpoint_every_steps=4, async_checkpoints=False,
        )  # fmt: skip
        if backend.rank == 0:
            (folder / "digests.json").write_text(json.dumps([backend.size, digests]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
