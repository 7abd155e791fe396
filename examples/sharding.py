"""Print the samples that each rank reads in each epoch, and a mean over the samples of all ranks.

torchrun --nproc-per-node 3 examples/sharding.py --samples 11
horovodrun -np 2 python examples/sharding.py --backend horovod
"""

from __future__ import annotations

import click
import torch
from torch.utils.data import TensorDataset

import unitrain


@click.command()
@click.option("--backend", "backend_name", help="ddp, horovod or local. [default: implied by the launcher]")
@click.option("--samples", default=11, show_default=True, help="Length of the dataset 0, 1, 2, ...")
@click.option("--batch-size", default=2, show_default=True, help="Samples per rank and step.")
@click.option("--epochs", default=2, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(backend_name: str | None, samples: int, batch_size: int, epochs: int, seed: int) -> None:
    """Shard the numbers 0, 1, 2, ..."""
    with unitrain.init(backend_name) as backend:
        numbers = TensorDataset(torch.arange(samples))

        def print_shards(title: str, batches: list[list[int]]) -> None:
            """Print the batches of every rank, in rank order. All ranks must call this function."""
            batches_of_ranks = backend.allgather_object(batches)
            if backend.rank == 0:
                print(title)
                for rank, shard in enumerate(batches_of_ranks):
                    print(f"  rank {rank}: {'  '.join(map(str, shard)) or 'no samples'}")
                numbers_read = sorted(number for shard in batches_of_ranks for batch in shard for number in batch)
                print(f"  each exactly once: {'yes' if numbers_read == list(range(samples)) else 'NO'}")

        loader = unitrain.ShardedLoader(numbers, backend, batch_size=batch_size, seed=seed)
        for epoch in range(epochs):
            # A rank without samples in the last step receives a dummy batch, in which num_samples is 0.
            batches = [batch.tolist()[: loader.num_samples] for (batch,) in loader]
            print_shards(f"training, epoch {epoch + 1}: another order in each epoch", [b for b in batches if b])

        evaluation = unitrain.ShardedLoader(numbers, backend, batch_size=batch_size, shuffle=False)
        print_shards("evaluation: in order, without repetition", [batch.tolist() for (batch,) in evaluation])

        mean = unitrain.MeanMetric(backend)
        for (batch,) in evaluation:
            mean.update(batch.double(), len(batch))
        mean_of_numbers = mean.compute()  # exact even with uneven shards, because sums and counts are reduced
        batch_means = [batch.double().mean().item() for (batch,) in evaluation]
        batch_means = [value for shard in backend.allgather_object(batch_means) for value in shard]
        if backend.rank == 0:
            print(f"mean of all numbers {mean_of_numbers:.4f}; the mean of batch means would be ", end="")
            print(f"{sum(batch_means) / len(batch_means):.4f}")


if __name__ == "__main__":
    main()
