"""Fine-tuning: train the head of a network first, then all layers, with a callback that works on any backend.

python examples/freezing.py
torchrun --nproc-per-node 2 examples/freezing.py --backend ddp
horovodrun -np 2 python examples/freezing.py --backend horovod
"""

from __future__ import annotations

from collections.abc import Sequence

import click
import torch
from digits import correct, digits_data, digits_network
from torch import nn

import unitrain


class Freeze(unitrain.Callback):
    """Freezes `modules` for the first `epochs` epochs: their parameters and running statistics do not change.

    The parameters keep `requires_grad`, so the reduction of gradients does not change during the run. Instead, the
    reduced gradients are removed before each optimizer step, so that the optimizer skips the parameters, even with
    weight decay and momentum. Frozen modules are in eval mode. Only the number of completed epochs determines
    whether they are frozen, so the callback needs no state to resume.
    """

    def __init__(self, modules: Sequence[nn.Module], epochs: int) -> None:
        self.modules, self.epochs = modules, epochs

    def on_fit_start(self, trainer: unitrain.Trainer) -> None:
        self._set_mode(trainer)

    def on_before_optimizer_step(self, trainer: unitrain.Trainer) -> None:
        if trainer.progress.epoch < self.epochs:
            for module in self.modules:
                for parameter in module.parameters():
                    parameter.grad = None

    def on_epoch_end(self, trainer: unitrain.Trainer, results: dict[str, float]) -> None:
        self._set_mode(trainer)

    def _set_mode(self, trainer: unitrain.Trainer) -> None:
        for module in self.modules:
            module.train(trainer.progress.epoch >= self.epochs)


@click.command()
@click.option("--backend", "backend_name", help="ddp, horovod or local. [default: implied by the launcher]")
@click.option("--device", help="cpu or cuda. [default: a GPU per rank, if there are GPUs]")
@click.option("--epochs", default=6, show_default=True)
@click.option("--frozen-epochs", default=3, show_default=True, help="Epochs in which only the head is trained.")
@click.option("--output", help="Folder for checkpoints and history.")
@click.option("--resume", is_flag=True, help="Resume from the newest checkpoint in --output.")
def main(
    backend_name: str | None, device: str | None, epochs: int, frozen_epochs: int, output: str | None, resume: bool
) -> None:
    """Fine-tune a network whose first layers are frozen at the beginning."""
    with unitrain.init(backend_name, device=device) as backend:
        torch.manual_seed(0)
        network = digits_network()  # load your pretrained weights here
        assert isinstance(network, nn.Sequential)
        train_data, validation_data = digits_data(seed=0)
        trainer = unitrain.Trainer(
            network,
            torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4),
            nn.CrossEntropyLoss(),
            backend=backend,
            config=unitrain.TrainConfig(max_epochs=epochs, global_batch_size=64, output_dir=output, resume=resume),
            metrics={"accuracy": correct},
            callbacks=[Freeze(list(network[:-2]), frozen_epochs)],
        )
        results = trainer.fit(train_data, validation_data)
        if backend.rank == 0:
            print(f"final val_accuracy={results['val_accuracy']:.4f} val_loss={results['val_loss']:.4f}")


if __name__ == "__main__":
    main()
