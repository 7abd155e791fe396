"""MNIST as a Flyte workflow: hyperparameters in, accuracies and the model out.
This example requires flytekit: pip install '.[flyte]'

python examples/flyte_mnist.py                                   # on this machine, with scikit-learn's digits
pyflyte run examples/flyte_mnist.py train_mnist --ranks 4 --data data
pyflyte run --remote --image IMAGE examples/flyte_mnist.py train_mnist --hyperparameters '{"epochs": 5}'
"""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import unitrain

try:
    from flytekit import Resources, current_context, task, workflow
    from flytekit.types.directory import FlyteDirectory
    from flytekit.types.file import FlyteFile
except ModuleNotFoundError as error:
    sys.exit(f"{error}. Install it, in the source folder of unitrain, with: pip install '.[flyte]'")


@dataclass
class Hyperparameters:
    """The settings of a run. W&B records them."""

    epochs: int = 3
    batch_size: int = 32  # per rank
    learning_rate: float = 1e-3
    seed: int = 0
    backend: str = "ddp"


DEFAULTS = Hyperparameters()


class Outputs(NamedTuple):
    """`model` is a file with a state dict for torch.load, and `run` is the folder with the checkpoints and the logs."""

    accuracies: list[float]
    accuracy: float
    model: FlyteFile
    run: FlyteDirectory


def load(folder: Path | None) -> tuple[Dataset[Any], Dataset[Any]]:
    """Return training and test images [1, 28, 28] with labels: of MNIST in `folder`, or else of scikit-learn's
    digits."""
    if folder is not None:
        from torchvision.datasets import MNIST
        from torchvision.transforms import v2

        transform = v2.Compose([v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)])
        return MNIST(folder, train=True, transform=transform), MNIST(folder, train=False, transform=transform)
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    images = nn.functional.pad(nn.functional.interpolate(images, scale_factor=3), (2, 2, 2, 2))
    labels = torch.from_numpy(digits.target).long()
    return TensorDataset(images[:1400], labels[:1400]), TensorDataset(images[1400:], labels[1400:])


def correct(output: Tensor, target: Tensor) -> Tensor:
    """Return, for each sample, whether the prediction is correct."""
    return output.argmax(dim=1) == target


class Accuracies(unitrain.Callback):
    """Records the test accuracy of each epoch. A resumed run has the accuracies of all epochs."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_epoch_end(self, trainer: unitrain.Trainer, results: dict[str, float]) -> None:
        self.values.append(results["val_accuracy"])

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = list(state["values"])


def train(hyperparameters: Hyperparameters, data: Path | None, run: Path, wandb: bool) -> list[float]:
    """Train on this rank, and return the accuracies. Rank 0 writes the model to `run`."""
    with unitrain.init() as backend:
        torch.manual_seed(hyperparameters.seed)  # the same initial weights in every run
        model = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters(), lr=hyperparameters.learning_rate)
        config = unitrain.TrainConfig(
            max_epochs=hyperparameters.epochs, batch_size=hyperparameters.batch_size, seed=hyperparameters.seed,
            output_dir=run, resume="auto",
        )  # fmt: skip
        accuracies = Accuracies()
        settings = asdict(hyperparameters)
        loggers = [unitrain.WandbLogger("flyte-mnist", mode="offline", config=settings)] if wandb else []
        trainer = unitrain.Trainer(
            model, optimizer, nn.CrossEntropyLoss(), backend=backend, config=config, metrics={"accuracy": correct},
            callbacks=[accuracies], loggers=loggers,
        )  # fmt: skip
        trainer.fit(*load(data))
        if backend.rank == 0:
            torch.save(model.state_dict(), run / "model.pt")
    return accuracies.values


@task(requests=Resources(cpu="2", mem="4Gi"), limits=Resources(cpu="2", mem="4Gi"))
def mnist_task(
    hyperparameters: Hyperparameters, ranks: int, data: FlyteDirectory | None, run_folder: str | None, wandb: bool
) -> Outputs:
    """Train on `ranks` ranks in this container.

    The files of the run are written to `run_folder`. If this is a shared file system, a retried task resumes there.
    """
    run = Path(run_folder or current_context().working_directory, "run")
    folder = None if data is None else Path(data.download())
    accuracies, *_ = unitrain.run(
        train, (hyperparameters, folder, run, wandb), np=ranks, backend=hyperparameters.backend
    )
    return Outputs(accuracies, accuracies[-1], FlyteFile(str(run / "model.pt")), FlyteDirectory(str(run)))


@workflow
def train_mnist(
    hyperparameters: Hyperparameters = DEFAULTS,
    ranks: int = 2,
    data: FlyteDirectory | None = None,
    run_folder: str | None = None,
    wandb: bool = False,
) -> Outputs:
    """Train a small network on MNIST. `data` contains MNIST/raw, as torchvision downloads it."""
    return mnist_task(hyperparameters=hyperparameters, ranks=ranks, data=data, run_folder=run_folder, wandb=wandb)


if __name__ == "__main__":
    outputs = train_mnist()
    print("accuracies " + " ".join(f"{accuracy:.4f}" for accuracy in outputs.accuracies))
    print(f"model {outputs.model}")
