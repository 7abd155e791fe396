"""MNIST from a local folder, with augmentation, on any backend.

python examples/mnist.py --data data --download
torchrun --nproc-per-node 4 examples/mnist.py --data data --model resnet18
horovodrun -np 4 python examples/mnist.py --data data --output runs/mnist --wandb
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.utils.data import Subset
from torchvision.datasets import MNIST
from torchvision.models import resnet18
from torchvision.transforms import v2

import unitrain

MEAN, STANDARD_DEVIATION = 0.1307, 0.3081  # of the training images
LAST_FILE = "t10k-labels-idx1-ubyte"  # that torchvision downloads


@dataclass(frozen=True)
class Hyperparameters:
    """The settings that are logged."""

    model: str = "cnn"
    epochs: int = 3
    batch_size: int = 64
    learning_rate: float = 1e-3


def build(name: str) -> nn.Module:
    """Return a network that maps images [n, 1, 28, 28] to logits [n, 10]."""
    if name == "resnet18":
        model = resnet18(num_classes=10)
        model.conv1 = nn.Conv2d(1, 64, kernel_size=3, padding=1, bias=False)  # one channel, small images
        return model
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def load(folder: Path, backend: unitrain.Backend, download: bool) -> tuple[MNIST, MNIST]:
    """Return the training and test data. With `download`, one rank per host downloads them first.

    Raises ClickException on every rank if a download fails, for example without a network.
    """
    problem = None
    if download and backend.local_rank == 0:
        try:
            MNIST(folder, download=True)
        except (OSError, RuntimeError) as error:
            problem = " ".join(str(error).split())
    failed = [found for found in backend.allgather_object(problem) if found is not None]
    if failed:
        raise click.ClickException(
            f"MNIST cannot be downloaded to '{folder}': {failed[0]}. Download it on a machine with a network, and copy "
            f"the folder MNIST to '{folder}'."
        )
    plain = v2.Compose(
        [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([MEAN], [STANDARD_DEVIATION])]
    )
    shifted = v2.Compose([v2.RandomAffine(degrees=5, translate=(0.05, 0.05)), plain])
    return MNIST(folder, train=True, transform=shifted), MNIST(folder, train=False, transform=plain)


def correct(output: Tensor, target: Tensor) -> Tensor:
    """Return, for each sample, whether the prediction is correct."""
    return output.argmax(dim=1) == target


class Accuracies(unitrain.Callback):
    """Records the accuracy of every epoch, and logs the first test images with their predictions.

    Each rank predicts its shard of the images and receives all predictions; the values of rank 0 are logged.
    """

    def __init__(self, test: MNIST) -> None:
        self.images = Subset(test, range(8))
        self.values: list[float] = []

    def on_epoch_end(self, trainer: unitrain.Trainer, results: dict[str, float]) -> None:
        self.values.append(results["val_accuracy"])
        predictions = trainer.predict(self.images).argmax(dim=1)
        for index, (image, label) in enumerate(self.images):
            trainer.log_image(
                f"test/{index}", image * STANDARD_DEVIATION + MEAN, caption=f"a {label}, predicted {predictions[index]}"
            )

    def state_dict(self) -> dict[str, Any]:  # a resumed run has the accuracies of all epochs
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = list(state["values"])


@click.command()
@click.option("--data", type=click.Path(path_type=Path), required=True, help="Folder with MNIST/raw in it.")
@click.option("--download", is_flag=True, help="Download MNIST to --data if it is missing.")
@click.option("--model", type=click.Choice(["cnn", "resnet18"]), default=Hyperparameters.model, show_default=True)
@click.option("--epochs", default=Hyperparameters.epochs, show_default=True)
@click.option("--batch-size", default=Hyperparameters.batch_size, show_default=True, help="Samples per rank.")
@click.option("--learning-rate", default=Hyperparameters.learning_rate, show_default=True)
@click.option("--backend", "backend_name", help="ddp, horovod or local. [default: implied by the launcher]")
@click.option("--device", help="cpu or cuda. [default: a GPU per rank, if there are GPUs]")
@click.option("--workers", default=0, show_default=True, help="Processes per rank that load data.")
@click.option("--output", type=click.Path(path_type=Path), help="Folder for checkpoints, accuracies and the model.")
@click.option("--resume", is_flag=True, help="Resume from the newest checkpoint in --output.")
@click.option("--wandb", is_flag=True, help="Log to Weights & Biases offline; `wandb sync` uploads the log.")
def main(
    data: Path, download: bool, backend_name: str | None, device: str | None, workers: int, output: Path | None,
    resume: bool, wandb: bool, **chosen: Any,
) -> None:  # fmt: skip
    """Train on MNIST."""
    if not download and not (data / "MNIST" / "raw" / LAST_FILE).is_file():
        raise click.ClickException(f"MNIST was not found in '{data}'. Download it with: --data {data} --download")
    hyper = Hyperparameters(**chosen)
    with unitrain.init(backend_name, device=device) as backend:
        train, test = load(data, backend, download)
        torch.manual_seed(0)  # the same initial weights in every run
        model = build(hyper.model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=hyper.learning_rate)
        config = unitrain.TrainConfig(
            max_epochs=hyper.epochs, batch_size=hyper.batch_size, num_workers=workers, output_dir=output, resume=resume
        )
        accuracies = Accuracies(test)
        loggers = [unitrain.WandbLogger("mnist", mode="offline", config=asdict(hyper))] if wandb else []
        trainer = unitrain.Trainer(
            model, optimizer, nn.CrossEntropyLoss(), backend=backend, config=config, metrics={"accuracy": correct},
            callbacks=[accuracies], loggers=loggers,
        )  # fmt: skip
        results = trainer.fit(train, test)
        if backend.rank == 0:
            print(f"final val_accuracy={results['val_accuracy']:.4f} val_loss={results['val_loss']:.4f}")
        if backend.rank == 0 and output is not None:
            (output / "accuracies.json").write_text(json.dumps(accuracies.values))
            torch.save(model.state_dict(), output / "model.pt")


if __name__ == "__main__":
    main()
