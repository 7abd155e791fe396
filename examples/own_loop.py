"""Your own loop: the digits tutorial without the Trainer, with the same result to the last digit.

torchrun --nproc-per-node 2 examples/own_loop.py --backend horovod
"""

from __future__ import annotations

import click
import torch
from digits import correct, digits_data, digits_network
from torch.nn.functional import cross_entropy

import unitrain
from unitrain.data.sharding import EvaluationShard, TrainingShard
from unitrain.metrics.means import Means


@click.command()
@click.option("--backend", help="ddp, horovod or local; what the launcher implies when left out.")
@click.option("--device", help="cpu or cuda; a GPU for each rank where there are GPUs when left out.")
@click.option("--epochs", default=15, show_default=True)
@click.option("--batch-size", default=32, show_default=True, help="Samples per rank.")
@click.option("--seed", default=0, show_default=True)
def main(backend: str | None, device: str | None, epochs: int, batch_size: int, seed: int) -> None:
    """Train on scikit-learn's digits, step by step."""
    with unitrain.init(backend, device=device) as ranks:
        torch.manual_seed(seed)
        model = digits_network().to(ranks.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        model = ranks.distributed_model(model)
        optimizer = ranks.distributed_optimizer(optimizer, model)

        train, validation = digits_data(seed)
        share = TrainingShard(train, ranks, batch_size=batch_size, seed=seed)
        for epoch in range(epochs):
            model.train()
            for batch, part in share.micro_batches(epoch):
                images, targets = (tensor.to(ranks.device) for tensor in batch)
                loss = cross_entropy(model(images), targets)
                # The last batch is shared unevenly: what a rank has more of, counts more.
                (loss * (part.samples * ranks.size / part.step_samples)).backward()
                optimizer.step()  # the gradients are already the mean over all ranks
                optimizer.zero_grad()

        unitrain.share_buffers(model, ranks)  # a BatchNorm would have gathered its own on each rank
        network, means = ranks.unwrap(model).eval(), Means(("accuracy", "loss"), ranks.device)
        with torch.no_grad():
            for batch, samples in EvaluationShard(validation, ranks, batch_size=batch_size):
                images, targets = (tensor.to(ranks.device) for tensor in batch)
                output = network(images)
                means.add((correct(output, targets), cross_entropy(output, targets)), samples)
        results = means.reduce(ranks)
        if ranks.rank == 0:
            print(f"final val_accuracy={results['accuracy']:.4f} val_loss={results['loss']:.4f}")


if __name__ == "__main__":
    main()
