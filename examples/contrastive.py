"""A contrastive loss over the samples of all ranks: images of digits become vectors, without any label.

Every image is compared with those of all ranks, so that N ranks train as one process does with the whole batch:

python examples/contrastive.py --batch-size 128
torchrun --nproc-per-node 2 examples/contrastive.py --backend ddp --batch-size 64
horovodrun -np 2 python examples/contrastive.py --backend horovod --batch-size 64
"""

from __future__ import annotations

import click
import torch
from digits import digits_data
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import Dataset

import unitrain
from unitrain.data.sharding import TrainingShard

TEMPERATURE = 0.2


class TwoViews(Dataset[tuple[Tensor, Tensor]]):
    """Two noisy, shifted versions of each image: the same ones for an index in every run, on any number of ranks."""

    def __init__(self, images: Dataset[tuple[Tensor, ...]], count: int) -> None:
        self.images, self.count = images, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        image = self.images[index][0]
        one, two = (
            image.roll(torch.randint(-1, 2, (2,), generator=generator).tolist(), (1, 2))
            + 0.1 * torch.randn(image.shape, generator=generator)
            for _ in range(2)
        )
        return one, two


def encoder() -> nn.Module:
    """Map images [n, 1, 8, 8] to vectors [n, 32]."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 32))


def contrast(one: Tensor, two: Tensor, ranks: unitrain.Backend) -> Tensor:
    """Return the loss of all ranks' images, the same on every rank: which of all second views is that of a first?"""
    one, two = (normalize(unitrain.differentiable_allgather(view, ranks)) for view in (one, two))
    return cross_entropy(one @ two.t() / TEMPERATURE, torch.arange(len(one), device=one.device))


@click.command()
@click.option("--backend", help="ddp, horovod or local; what the launcher implies when left out.")
@click.option("--device", help="cpu or cuda; a GPU for each rank where there are GPUs when left out.")
@click.option("--epochs", default=10, show_default=True)
@click.option("--batch-size", default=64, show_default=True, help="Images per rank.")
@click.option("--seed", default=0, show_default=True)
def main(backend: str | None, device: str | None, epochs: int, batch_size: int, seed: int) -> None:
    """Train an encoder of scikit-learn's digits, and classify each validation image as its nearest training image."""
    with unitrain.init(backend, device=device) as ranks:
        torch.manual_seed(seed)
        model = encoder().to(ranks.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        model = ranks.distributed_model(model)
        optimizer = ranks.distributed_optimizer(optimizer, model)

        train, validation = digits_data(seed)
        share = TrainingShard(TwoViews(train, len(train)), ranks, batch_size=batch_size, seed=seed)
        for epoch in range(epochs):
            for views, part in share.micro_batches(epoch):
                # A rank for which there is no sample left gets a batch of others, which must not be gathered.
                one, two = (model(view.to(ranks.device))[: part.samples] for view in views)
                loss = contrast(one, two, ranks)  # of the whole batch on every rank, so it is not weighted
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        network = ranks.unwrap(model)
        (known, labels), (images, targets) = (
            tuple(torch.stack(column).to(ranks.device) for column in zip(*part, strict=True))
            for part in (train, validation)
        )
        with torch.no_grad():
            nearest = (normalize(network(images)) @ normalize(network(known)).t()).argmax(1)
        accuracy = (labels[nearest] == targets).double().mean()
        if ranks.rank == 0:
            print(f"final val_accuracy={accuracy:.4f} val_loss={loss.item():.4f}")


if __name__ == "__main__":
    main()
