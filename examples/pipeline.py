"""The digits tutorial with pipeline parallelism: the stages of the network are on different ranks, with the same
results.

python examples/pipeline.py --stages 1
torchrun --nproc-per-node 2 examples/pipeline.py --stages 2
torchrun --nproc-per-node 4 examples/pipeline.py --stages 2 --batch-size 16       # two replicas of two stages
"""

from __future__ import annotations

import click
import torch
from digits import correct, digits_data, digits_network
from torch.nn.functional import cross_entropy

import unitrain


@click.command()
@click.option(
    "--backend", "backend_name", help="ddp or horovod; also local with --stages 1. [default: implied by the launcher]"
)
@click.option("--stages", default=2, show_default=True, help="Ranks among which the network is divided.")
@click.option("--micro-batches", default=4, show_default=True, help="Micro-batches per batch.")
@click.option("--schedule", default="1f1b", show_default=True, help="1f1b or gpipe.")
@click.option("--balance", default="time", show_default=True, help="What to balance between stages: time or memory.")
@click.option("--epochs", default=15, show_default=True)
@click.option("--batch-size", default=32, show_default=True, help="Samples per replica.")
@click.option("--seed", default=0, show_default=True)
def main(
    backend_name: str | None,
    stages: int,
    micro_batches: int,
    schedule: str,
    balance: str,
    epochs: int,
    batch_size: int,
    seed: int,
) -> None:
    """Train on scikit-learn's digits."""
    with unitrain.init(backend_name, device="cpu") as backend:
        torch.manual_seed(seed)
        train, validation = digits_data(seed)
        pipeline = unitrain.Pipeline(
            digits_network(),
            backend,
            cross_entropy,
            stages=stages,
            micro_batches=micro_batches,
            schedule=schedule,
            balance=balance,
            example_inputs=torch.stack([train[index][0] for index in range(batch_size)]),
        )
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=2e-3)  # the parameters of this rank's stage
        loader = unitrain.ShardedLoader(train, pipeline.replicas, batch_size=batch_size, seed=seed)
        for _ in range(epochs):
            pipeline.train()
            for images, targets in loader:
                pipeline.forward_backward(images, targets, loss_weight=loader.loss_weight)
                optimizer.step()
                optimizer.zero_grad()

        pipeline.eval()
        accuracy, mean_loss = unitrain.MeanMetric(pipeline.replicas), unitrain.MeanMetric(pipeline.replicas)
        for images, targets in unitrain.ShardedLoader(
            validation, pipeline.replicas, batch_size=batch_size, shuffle=False
        ):
            output = pipeline.forward(images)  # on all ranks of the replica
            accuracy.update(correct(output, targets), len(targets))
            mean_loss.update(cross_entropy(output, targets), len(targets))
        val_accuracy, val_loss = accuracy.compute(), mean_loss.compute()  # all ranks call compute
        if backend.rank == 0:
            print(f"final val_accuracy={val_accuracy:.4f} val_loss={val_loss:.4f}")


if __name__ == "__main__":
    main()
