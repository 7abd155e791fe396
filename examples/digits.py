"""Tutorial: train a small network on scikit-learn's handwritten digits, on any backend.

python examples/digits.py
torchrun --nproc-per-node 2 examples/digits.py --backend ddp
horovodrun -np 2 python examples/digits.py --backend horovod
"""

from __future__ import annotations

import click
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset, random_split

import unitrain


def digits_network() -> nn.Module:
    """Return a network that maps images [n, 1, 8, 8] to logits [n, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def digits_data(seed: int) -> tuple[Subset[tuple[Tensor, ...]], Subset[tuple[Tensor, ...]]]:
    """Return 80% of the 1797 images for training and 20% for validation. The split depends only on `seed`."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    dataset = TensorDataset(images, torch.from_numpy(digits.target).long())
    train, validation = random_split(dataset, [0.8, 0.2], generator=torch.Generator().manual_seed(seed))
    return train, validation


def correct(output: Tensor, target: Tensor) -> Tensor:
    """Return, for each sample, whether the prediction is correct."""
    return output.argmax(dim=1) == target


@click.command()
@click.option("--backend", "backend_name", help="ddp, horovod or local. [default: implied by the launcher]")
@click.option("--device", help="cpu or cuda. [default: a GPU per rank, if there are GPUs]")
@click.option("--epochs", default=15, show_default=True)
@click.option("--batch-size", default=32, show_default=True, help="Samples per rank and micro-batch.")
@click.option("--accumulate", default=1, show_default=True, help="Micro-batches per optimizer step.")
@click.option("--seed", default=0, show_default=True)
@click.option("--output", help="Folder for checkpoints and history.")
@click.option("--resume", is_flag=True, help="Resume from the newest checkpoint in --output.")
def main(
    backend_name: str | None,
    device: str | None,
    epochs: int,
    batch_size: int,
    accumulate: int,
    seed: int,
    output: str | None,
    resume: bool,
) -> None:
    """Train on scikit-learn's digits."""
    with unitrain.init(backend_name, device=device) as backend:
        torch.manual_seed(seed)  # the same initial weights in every run
        model = digits_network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        config = unitrain.TrainConfig(
            max_epochs=epochs,
            batch_size=batch_size,
            gradient_accumulation_steps=accumulate,
            seed=seed,
            output_dir=output,
            resume=resume,
        )
        trainer = unitrain.Trainer(
            model, optimizer, nn.CrossEntropyLoss(), backend=backend, config=config, metrics={"accuracy": correct}
        )
        results = trainer.fit(*digits_data(seed))
        if backend.rank == 0:
            print(f"final val_accuracy={results['val_accuracy']:.4f} val_loss={results['val_loss']:.4f}")


if __name__ == "__main__":
    main()
