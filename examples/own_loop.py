"""The digits tutorial in a custom loop, without the Trainer, with the same results.

torchrun --nproc-per-node 2 examples/own_loop.py --backend horovod
"""

from __future__ import annotations

import click
import torch
from digits import correct, digits_data, digits_network
from torch.nn.functional import cross_entropy

import unitrain


@click.command()
@click.option("--backend", "backend_name", help="ddp, horovod or local. [default: implied by the launcher]")
@click.option("--device", help="cpu or cuda. [default: a GPU per rank, if there are GPUs]")
@click.option("--epochs", default=15, show_default=True)
@click.option("--batch-size", default=32, show_default=True, help="Samples per rank.")
@click.option("--seed", default=0, show_default=True)
def main(backend_name: str | None, device: str | None, epochs: int, batch_size: int, seed: int) -> None:
    """Train on scikit-learn's digits."""
    with unitrain.init(backend_name, device=device) as backend:
        torch.manual_seed(seed)
        model = digits_network().to(backend.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        model = backend.distributed_model(model)
        optimizer = backend.distributed_optimizer(optimizer, model)

        train, validation = digits_data(seed)
        loader = unitrain.ShardedLoader(train, backend, batch_size=batch_size, seed=seed)
        for _ in range(epochs):
            model.train()
            for images, targets in loader:
                # `loss_weight` gives all samples the same weight, even if the last batch has a different size on each
                # rank.
                loss = cross_entropy(model(images), targets) * loader.loss_weight
                loss.backward()
                optimizer.step()  # the gradients are already the mean over all ranks
                optimizer.zero_grad()

        unitrain.broadcast_buffers(model, backend)  # running statistics of BatchNorm, if the model had any
        network = backend.unwrap(model).eval()
        accuracy, mean_loss = unitrain.MeanMetric(backend), unitrain.MeanMetric(backend)
        with torch.no_grad():
            for images, targets in unitrain.ShardedLoader(validation, backend, batch_size=batch_size, shuffle=False):
                output = network(images)
                accuracy.update(correct(output, targets), len(targets))
                mean_loss.update(cross_entropy(output, targets), len(targets))
        val_accuracy, val_loss = accuracy.compute(), mean_loss.compute()  # all ranks call compute
        if backend.rank == 0:
            print(f"final val_accuracy={val_accuracy:.4f} val_loss={val_loss:.4f}")


if __name__ == "__main__":
    main()
