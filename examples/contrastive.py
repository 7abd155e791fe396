"""Contrastive learning of image embeddings, with a loss over the samples of all ranks. Each image is compared with the
images of all ranks, so N ranks compute the same updates as one process with the global batch:

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

TEMPERATURE = 0.2


class TwoViews(Dataset[tuple[Tensor, Tensor]]):
    """Two noisy, shifted versions of each image, which depend only on its index."""

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
    """Return a network that maps images [n, 1, 8, 8] to embeddings [n, 32]."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 32))


def contrast(one: Tensor, two: Tensor, backend: unitrain.Backend) -> Tensor:
    """Return the cross-entropy of identifying the second view of each image among the second views of all ranks."""
    one, two = (normalize(unitrain.differentiable_allgather(view, backend)) for view in (one, two))
    return cross_entropy(one @ two.t() / TEMPERATURE, torch.arange(len(one), device=one.device))


@click.command()
@click.option("--backend", "backend_name", help="ddp, horovod or local. [default: implied by the launcher]")
@click.option("--device", help="cpu or cuda. [default: a GPU per rank, if there are GPUs]")
@click.option("--epochs", default=10, show_default=True)
@click.option("--batch-size", default=64, show_default=True, help="Images per rank.")
@click.option("--seed", default=0, show_default=True)
def main(backend_name: str | None, device: str | None, epochs: int, batch_size: int, seed: int) -> None:
    """Train an encoder on scikit-learn's digits, and classify each validation image by its nearest training image."""
    with unitrain.init(backend_name, device=device) as backend:
        torch.manual_seed(seed)
        model = encoder().to(backend.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        model = backend.distributed_model(model)
        optimizer = backend.distributed_optimizer(optimizer, model)

        train, validation = digits_data(seed)
        loader = unitrain.ShardedLoader(TwoViews(train, len(train)), backend, batch_size=batch_size, seed=seed)
        for _ in range(epochs):
            for views in loader:
                # Do not gather the samples of a dummy batch, for which num_samples is 0.
                one, two = (model(view)[: loader.num_samples] for view in views)
                # Every rank computes the loss of the global batch, so do not weight it.
                loss = contrast(one, two, backend)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        network = backend.unwrap(model)
        (known, labels), (images, targets) = (
            tuple(torch.stack(column).to(backend.device) for column in zip(*part, strict=True))
            for part in (train, validation)
        )
        with torch.no_grad():
            nearest = (normalize(network(images)) @ normalize(network(known)).t()).argmax(1)
        accuracy = (labels[nearest] == targets).double().mean()
        if backend.rank == 0:
            print(f"final val_accuracy={accuracy:.4f} val_loss={loss.item():.4f}")


if __name__ == "__main__":
    main()
