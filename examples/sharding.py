"""Who sees what: prints which samples each rank gets in each epoch, and an average that all of them agree on.

torchrun --nproc-per-node 3 examples/sharding.py --samples 11
horovodrun -np 2 python examples/sharding.py --backend horovod
"""

from __future__ import annotations

import click
import torch
from torch.utils.data import TensorDataset

import unitrain
from unitrain.data.sharding import EvaluationShard, TrainingShard
from unitrain.metrics.means import Means


@click.command()
@click.option("--backend", help="ddp, horovod or local; what the launcher implies when left out.")
@click.option("--samples", default=11, show_default=True, help="Numbers from 0 on to share out.")
@click.option("--batch-size", default=2, show_default=True, help="Samples per rank and step.")
@click.option("--epochs", default=2, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(backend: str | None, samples: int, batch_size: int, epochs: int, seed: int) -> None:
    """Share out the numbers 0, 1, 2, ..."""
    with unitrain.init(backend) as ranks:
        numbers = TensorDataset(torch.arange(samples))

        def tell(title: str, own: list[list[int]]) -> None:
            """Print what every rank has, in the order of the ranks."""
            everyones = ranks.allgather_object(own)  # all ranks call it, and only rank 0 prints
            if ranks.rank == 0:
                print(title)
                for rank, batches in enumerate(everyones):
                    print(f"  rank {rank}: {'  '.join(map(str, batches)) or 'nothing'}")
                seen = sorted(number for batches in everyones for batch in batches for number in batch)
                print(f"  each exactly once: {'yes' if seen == list(range(samples)) else 'NO'}")

        training = TrainingShard(numbers, ranks, batch_size=batch_size, seed=seed)
        for epoch in range(epochs):
            # A rank that has no samples in the last step borrows some that count for nothing: part.samples is 0 there.
            own = [batch[0].tolist()[: part.samples] for batch, part in training.micro_batches(epoch)]
            tell(f"training, epoch {epoch + 1}: another order every time", [batch for batch in own if batch])

        evaluation = EvaluationShard(numbers, ranks, batch_size=batch_size)
        tell("evaluation: in order, nothing twice", [batch[0].tolist() for batch, _ in evaluation])

        mean = Means(("number",), ranks.device)
        for batch, count in evaluation:
            mean.add((batch[0].double(),), count)
        agreed = mean.reduce(ranks)["number"]  # sums and counts travel, so uneven shares do no harm
        own_mean = [sum(batch[0].tolist()) / count for batch, count in evaluation]
        means_of_batches = [mean for one in ranks.allgather_object(own_mean) for mean in one]
        if ranks.rank == 0:
            print(f"mean of all numbers {agreed:.4f}; the mean of batch means would be ", end="")
            print(f"{sum(means_of_batches) / len(means_of_batches):.4f}")


if __name__ == "__main__":
    main()
