"""Reduce gradients first within each host and then between hosts, as in Lightning's DDP2.

A DistributedDataParallel communication hook replaces the allreduce over all ranks. This is useful on CPUs if the
network between the hosts is slow. NCCL selects such algorithms itself.

unitrain launch -H node1:4,node2:4 examples/hierarchical.py
unitrain launch -H node1:4,node2:4 --backend horovod examples/hierarchical.py
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click
import torch
import torch.distributed as dist
from digits import correct, digits_data, digits_network
from torch import Tensor, nn

import unitrain


class HierarchicalReduction:
    """A communication hook for CPU tensors. It sums the gradients on the first rank of each host, sums the results
    over hosts, and broadcasts the mean within each host.

    `host_by_rank` contains the node rank of each rank. All ranks must create the hook. The collectives run in a
    separate thread, in the same order on every rank, while the backward pass continues.
    """

    def __init__(self, backend: unitrain.Backend, host_by_rank: list[int]) -> None:
        ranks_by_host = [
            [rank for rank, host in enumerate(host_by_rank) if host == other] for other in sorted(set(host_by_rank))
        ]
        self._size = backend.size
        # All ranks create all groups, in the same order.
        self._leader_group = dist.new_group([ranks[0] for ranks in ranks_by_host])
        for ranks in ranks_by_host:
            group = dist.new_group(ranks)
            if backend.rank in ranks:
                self._host_group, self._leader, self._is_leader = group, ranks[0], backend.rank == ranks[0]
        self._thread = ThreadPoolExecutor(1)

    def __call__(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start to reduce a bucket. Return a future with the mean gradients."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._thread.submit(self._reduce, bucket.buffer(), future)
        return future

    def _reduce(self, gradients: Tensor, future: Any) -> None:
        try:
            dist.reduce(gradients, self._leader, group=self._host_group)
            if self._is_leader:
                dist.all_reduce(gradients, group=self._leader_group)
                gradients /= self._size
            dist.broadcast(gradients, self._leader, group=self._host_group)
            future.set_result(gradients)
        except Exception as error:
            future.set_exception(error)


@click.command()
@click.option("--backend", "backend_name", help="ddp or horovod. [default: implied by the launcher]")
@click.option("--epochs", default=15, show_default=True)
@click.option("--batch-size", default=32, show_default=True, help="Samples per rank.")
@click.option("--seed", default=0, show_default=True)
def main(backend_name: str | None, epochs: int, batch_size: int, seed: int) -> None:
    """Train on scikit-learn's digits."""
    with unitrain.init(backend_name, device="cpu") as backend:
        torch.manual_seed(seed)
        model = digits_network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        config = unitrain.TrainConfig(max_epochs=epochs, batch_size=batch_size, seed=seed)
        trainer = unitrain.Trainer(
            model, optimizer, nn.CrossEntropyLoss(), backend=backend, config=config, metrics={"accuracy": correct}
        )
        if backend.num_nodes > 1:
            hook = HierarchicalReduction(backend, backend.allgather_object(backend.node_rank))
            trainer.model.register_comm_hook(None, hook)
        results = trainer.fit(*digits_data(seed))
        if backend.rank == 0:
            print(f"final val_accuracy={results['val_accuracy']:.4f} val_loss={results['val_loss']:.4f}")


if __name__ == "__main__":
    main()
