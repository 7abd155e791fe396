"""MNIST from a local folder, with augmentation, on any backend.

python examples/mnist.py --data data --download
torchrun --nproc-per-node 4 examples/mnist.py --data data --model resnet18
"""

from __future__ import annotations

from pathlib import Path

import click
import torch
from torch import Tensor, nn
from torchvision.datasets import MNIST
from torchvision.models import resnet18
from torchvision.transforms import v2

import unitrain


def build(name: str) -> nn.Module:
    """Map images [n, 1, 28, 28] to scores [n, 10]."""
    if name == "resnet18":
        model = resnet18(num_classes=10)
        model.conv1 = nn.Conv2d(1, 64, kernel_size=3, padding=1, bias=False)  # one channel, and small images
        return model
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def load(folder: Path, ranks: unitrain.Backend, download: bool) -> tuple[MNIST, MNIST]:
    """Return the training and the test images; with `download`, one rank of each host fetches them first."""
    if download and ranks.local_rank == 0:
        MNIST(folder, download=True)
    ranks.barrier()
    plain = v2.Compose([v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.1307], [0.3081])])
    shifted = v2.Compose([v2.RandomAffine(degrees=5, translate=(0.05, 0.05)), plain])
    return MNIST(folder, train=True, transform=shifted), MNIST(folder, train=False, transform=plain)


def correct(output: Tensor, target: Tensor) -> Tensor:
    """Say for each sample whether the highest score is at its target."""
    return output.argmax(dim=1) == target


@click.command()
@click.option("--data", type=click.Path(path_type=Path), required=True, help="Folder with MNIST/raw in it.")
@click.option("--download", is_flag=True, help="Fetch MNIST into --data where it is missing.")
@click.option("--model", "model_name", type=click.Choice(["cnn", "resnet18"]), default="cnn", show_default=True)
@click.option("--backend", help="ddp, horovod or local; what the launcher implies when left out.")
@click.option("--device", help="cpu or cuda; a GPU for each rank where there are GPUs when left out.")
@click.option("--epochs", default=3, show_default=True)
@click.option("--batch-size", default=64, show_default=True, help="Samples per rank and micro-step.")
@click.option("--workers", default=0, show_default=True, help="Processes per rank that load data.")
@click.option("--output", help="Folder for checkpoints and history.")
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint in --output.")
def main(
    data: Path,
    download: bool,
    model_name: str,
    backend: str | None,
    device: str | None,
    epochs: int,
    batch_size: int,
    workers: int,
    output: str | None,
    resume: bool,
) -> None:
    """Train on MNIST."""
    if not download and not (data / "MNIST" / "raw").is_dir():
        raise click.ClickException(f"There is no MNIST in '{data}'. Fetch it with: --data {data} --download")
    with unitrain.init(backend, device=device) as ranks:
        train, test = load(data, ranks, download)
        torch.manual_seed(0)  # the same first weights in every run
        model = build(model_name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        config = unitrain.TrainConfig(
            epochs=epochs, batch_size=batch_size, num_workers=workers, output_dir=output, resume=resume
        )
        trainer = unitrain.Trainer(
            model, optimizer, nn.CrossEntropyLoss(), backend=ranks, config=config, metrics={"accuracy": correct}
        )
        results = trainer.fit(train, test)
        if ranks.rank == 0:
            print(f"final val_accuracy={results['val_accuracy']:.4f} val_loss={results['val_loss']:.4f}")


if __name__ == "__main__":
    main()
