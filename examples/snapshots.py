"""A trainer class with snapshots, as in PyTorch's torchrun tutorial, on any backend: started again, it goes on.

torchrun --nproc-per-node 2 --max-restarts 1 examples/snapshots.py --fail-in-epoch 3
horovodrun -np 2 python examples/snapshots.py --backend horovod
"""

from __future__ import annotations

from pathlib import Path

import click
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import unitrain
from unitrain.data.sharding import TrainingShard


class SnapshotTrainer:
    """Trains a model epoch by epoch, and goes on from the last snapshot where there is one."""

    def __init__(
        self, ranks: unitrain.Backend, model: nn.Module, optimizer: torch.optim.Optimizer, snapshot: Path
    ) -> None:
        self.ranks, self.snapshot = ranks, snapshot
        # Rank 0 alone reads the file, before the two calls that pass its model and its optimizer on to the others.
        self.epoch = ranks.broadcast_object(self.load(model, optimizer) if ranks.rank == 0 else None)
        self.restarted = self.epoch > 0
        self.model = ranks.distributed_model(model)
        self.optimizer = ranks.distributed_optimizer(optimizer, self.model)

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Return the number of epochs that the snapshot has behind it."""
        if not self.snapshot.exists():
            return 0
        snapshot = torch.load(self.snapshot, map_location="cpu", weights_only=True)
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        print(f"going on from '{self.snapshot}' after epoch {snapshot['epoch']}")
        return int(snapshot["epoch"])

    def save(self) -> None:
        """Write a snapshot that is whole or not there at all."""
        if self.ranks.rank == 0:
            unfinished = self.snapshot.with_suffix(".unfinished")
            model = self.ranks.unwrap(self.model).state_dict()  # without a prefix, whatever the backend
            torch.save({"model": model, "optimizer": self.optimizer.state_dict(), "epoch": self.epoch}, unfinished)
            unfinished.replace(self.snapshot)

    def train(self, share: TrainingShard, epochs: int, save_every: int, fail_in_epoch: int | None) -> None:
        """Train until `epochs` are done."""
        while self.epoch < epochs:
            if self.epoch + 1 == fail_in_epoch and not self.restarted:
                raise RuntimeError(f"rank {self.ranks.rank} fails in epoch {fail_in_epoch}, as it was told to")
            for batch, part in share.micro_batches(self.epoch):
                inputs, targets = (tensor.to(self.ranks.device) for tensor in batch)
                loss = mse_loss(self.model(inputs), targets) * part.samples * self.ranks.size / part.step_samples
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.epoch += 1
            mean = self.ranks.allreduce(loss.detach()).item()  # of the last step, over all ranks
            if self.ranks.rank == 0:
                print(f"epoch {self.epoch}/{epochs}  steps {share.steps_in_epoch()}  loss {mean:.6f}")
            if self.epoch % save_every == 0:
                self.save()


def noisy_plane() -> tuple[Tensor, Tensor]:
    """Return points [2048, 20] and their heights [2048, 1]."""
    generator = torch.Generator().manual_seed(0)
    points, slopes = (torch.randn(*shape, generator=generator) for shape in ((2048, 20), (20, 1)))
    return points, points @ slopes + 0.1 * torch.randn(2048, 1, generator=generator)


@click.command()
@click.option("--backend", help="ddp, horovod or local; what the launcher implies when left out.")
@click.option("--device", help="cpu or cuda; a GPU for each rank where there are GPUs when left out.")
@click.option("--epochs", default=10, show_default=True)
@click.option("--save-every", default=1, show_default=True, help="Epochs from one snapshot to the next.")
@click.option("--batch-size", default=32, show_default=True, help="Samples per rank.")
@click.option("--snapshot", type=click.Path(path_type=Path), default=Path("snapshot.pt"), show_default=True)
@click.option("--fail-in-epoch", type=int, help="Fail there, unless a snapshot was there at the start.")
def main(backend: str | None, device: str | None, snapshot: Path, batch_size: int, **training: int) -> None:
    """Fit a plane through points in 20 dimensions."""
    with unitrain.init(backend, device=device) as ranks:
        torch.manual_seed(0)  # the same first weights in every run
        model = nn.Linear(20, 1).to(ranks.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        trainer = SnapshotTrainer(ranks, model, optimizer, snapshot)
        points, heights = noisy_plane()
        share = TrainingShard(TensorDataset(points, heights), ranks, batch_size=batch_size)
        trainer.train(share, **training)
        if ranks.rank == 0:
            print(f"final loss={mse_loss(model(points.to(ranks.device)), heights.to(ranks.device)).item():.6f}")


if __name__ == "__main__":
    main()
