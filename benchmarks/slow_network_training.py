"""A typical training script for `unitrain tune`. See slow_network.py."""

from __future__ import annotations

import torch
from loops import BATCH, CLASSES, FEATURES, network, sgd
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import unitrain

HIDDEN = [1024, 1024, 1024]
PARAMETERS = sum(parameter.numel() for parameter in network(HIDDEN).parameters())


def main() -> None:
    """Train until the run is terminated."""
    with unitrain.init() as backend:
        torch.manual_seed(1)
        data = TensorDataset(torch.randn(20_000, FEATURES), torch.randint(0, CLASSES, (20_000,)))
        model = network(HIDDEN)
        config = unitrain.TrainConfig(max_steps=1_000_000, batch_size=BATCH, progress="off")
        unitrain.Trainer(model, sgd(model), cross_entropy, backend=backend, config=config).fit(data)


if __name__ == "__main__":
    main()
