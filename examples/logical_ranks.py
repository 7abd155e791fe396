"""The digits tutorial with logical ranks: bit-identical results on any number of processes.

python examples/logical_ranks.py
unitrain launch -np 2 examples/logical_ranks.py
unitrain launch --backend horovod -np 3 examples/logical_ranks.py
"""

from __future__ import annotations

import hashlib
from contextlib import nullcontext

import click
import torch
from digits import correct, digits_data, digits_network
from torch.nn.functional import cross_entropy

import unitrain


@click.command()
@click.option("--backend", "backend_name", help="ddp, horovod or local. [default: implied by the launcher]")
@click.option("--logical-ranks", default=4, show_default=True, help="Maximum number of processes.")
@click.option("--epochs", default=3, show_default=True)
@click.option("--batch-size", default=16, show_default=True, help="Samples per logical rank.")
@click.option("--seed", default=0, show_default=True)
def main(backend_name: str | None, logical_ranks: int, epochs: int, batch_size: int, seed: int) -> None:
    """Train on scikit-learn's digits on the CPU, and print a hash of the parameters."""
    torch.set_num_threads(1)  # the number of threads affects the rounding of sums within an operation
    with unitrain.init(backend_name, device="cpu") as backend:
        torch.manual_seed(seed)
        network = digits_network()
        optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
        model = backend.distributed_model(network, logical_ranks=logical_ranks)
        optimizer = backend.distributed_optimizer(optimizer, model)

        train, validation = digits_data(seed)
        loader = unitrain.ShardedLoader(train, backend, batch_size=batch_size, seed=seed, logical_ranks=logical_ranks)
        for _ in range(epochs):
            model.train()
            for images, targets in loader:  # micro-batches of this process's logical ranks, in turn
                with nullcontext() if loader.ends_step else backend.no_sync(model):
                    (cross_entropy(model(images), targets) * loader.loss_weight).backward()
                if loader.ends_step:
                    optimizer.step()  # the gradients are the mean over all logical ranks
                    optimizer.zero_grad()

        unitrain.broadcast_buffers(model, backend)
        network.eval()
        accuracy = unitrain.MeanMetric(backend, exact=True)
        with torch.no_grad():
            evaluation = unitrain.ShardedLoader(
                validation, backend, batch_size=batch_size, shuffle=False, logical_ranks=logical_ranks
            )
            for images, targets in evaluation:
                accuracy.update(correct(network(images), targets), len(targets))
        val_accuracy = accuracy.compute()
        content = b"".join(value.numpy().tobytes() for value in network.state_dict().values())
        if backend.rank == 0:
            print(f"final val_accuracy={val_accuracy:.4f} sha256={hashlib.sha256(content).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
