"""A trainer class with snapshots, as in PyTorch's torchrun tutorial, which resumes after a restart.

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


class SnapshotTrainer:
    """Trains a model epoch by epoch, and resumes from the last snapshot if there is one."""

    def __init__(
        self, backend: unitrain.Backend, model: nn.Module, optimizer: torch.optim.Optimizer, snapshot: Path
    ) -> None:
        self.backend, self.snapshot = backend, snapshot
        # Only rank 0 reads the file. The two calls below broadcast its model and optimizer state to the other ranks.
        self.epoch = backend.broadcast_object(self.load(model, optimizer) if backend.rank == 0 else None)
        self.restarted = self.epoch > 0
        self.model = backend.distributed_model(model)
        self.optimizer = backend.distributed_optimizer(optimizer, self.model)

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Load the snapshot, if there is one, and return its number of completed epochs."""
        if not self.snapshot.exists():
            return 0
        snapshot = torch.load(self.snapshot, map_location="cpu", weights_only=True)
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        print(f"resuming from '{self.snapshot}' after epoch {snapshot['epoch']}")
        return int(snapshot["epoch"])

    def save(self) -> None:
        """Write a snapshot atomically."""
        if self.backend.rank == 0:
            self.snapshot.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self.snapshot.with_suffix(".unfinished")
            model = self.backend.unwrap(self.model).state_dict()  # names without the prefix "module."
            torch.save({"model": model, "optimizer": self.optimizer.state_dict(), "epoch": self.epoch}, unfinished)
            unfinished.replace(self.snapshot)

    def train(self, loader: unitrain.ShardedLoader, epochs: int, save_every: int, fail_in_epoch: int | None) -> None:
        """Train until `epochs` epochs are complete."""
        loader.epoch = self.epoch  # each epoch has a different sample order
        while self.epoch < epochs:
            if self.epoch + 1 == fail_in_epoch and not self.restarted:
                self.backend.barrier()  # the snapshot of the previous epoch is complete
                raise RuntimeError(f"rank {self.backend.rank} fails in epoch {fail_in_epoch}, as requested")
            for inputs, targets in loader:
                loss = mse_loss(self.model(inputs), targets) * loader.loss_weight
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.epoch += 1
            mean = self.backend.allreduce(loss.detach()).item()  # of the last step, over all ranks
            if self.backend.rank == 0:
                print(f"epoch {self.epoch}/{epochs}  steps {len(loader)}  loss {mean:.6f}")
            if self.epoch % save_every == 0:
                self.save()


def noisy_plane() -> tuple[Tensor, Tensor]:
    """Return points [2048, 20] and their heights [2048, 1]."""
    generator = torch.Generator().manual_seed(0)
    points, slopes = (torch.randn(*shape, generator=generator) for shape in ((2048, 20), (20, 1)))
    return points, points @ slopes + 0.1 * torch.randn(2048, 1, generator=generator)


@click.command()
@click.option("--backend", "backend_name", help="ddp, horovod or local. [default: implied by the launcher]")
@click.option("--device", help="cpu or cuda. [default: a GPU per rank, if there are GPUs]")
@click.option("--epochs", default=10, show_default=True)
@click.option("--save-every", default=1, show_default=True, help="Epochs between two snapshots.")
@click.option("--batch-size", default=32, show_default=True, help="Samples per rank.")
@click.option("--snapshot", type=click.Path(path_type=Path), default=Path("runs/snapshot.pt"), show_default=True)
@click.option("--fail-in-epoch", type=int, help="Fail in this epoch, unless the run resumed from a snapshot.")
def main(backend_name: str | None, device: str | None, snapshot: Path, batch_size: int, **training: int) -> None:
    """Fit a plane through points in 20 dimensions."""
    with unitrain.init(backend_name, device=device) as backend:
        torch.manual_seed(0)  # the same initial weights in every run
        model = nn.Linear(20, 1).to(backend.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        trainer = SnapshotTrainer(backend, model, optimizer, snapshot)
        points, heights = noisy_plane()
        loader = unitrain.ShardedLoader(TensorDataset(points, heights), backend, batch_size=batch_size)
        trainer.train(loader, **training)
        if backend.rank == 0:
            print(f"final loss={mse_loss(model(points.to(backend.device)), heights.to(backend.device)).item():.6f}")


if __name__ == "__main__":
    main()
