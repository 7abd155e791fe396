"""Script of the ranks in `test_launcher_matrix.py`: reports the position of the rank, runs an allreduce, and trains on
the digits dataset.

python short_digits.py FOLDER BACKEND
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import unitrain
from unitrain.bootstrap import environment

SEED = 5
STEPS = 8
GLOBAL_BATCH = 24
LEARNING_RATE = 0.2


def digits() -> TensorDataset:
    """Return the first 100 samples of scikit-learn's digits. The last batch of an epoch has four samples, so some tests
    have more ranks than samples in this batch."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.from_numpy(found.data[:100]).float() / 16
    return TensorDataset(images, torch.from_numpy(found.target[:100]).long())


def network() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))


def flatten_parameters(model: nn.Module) -> list[float]:
    """Return all parameters in one list."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def main(folder: Path, backend_name: str) -> None:
    with unitrain.init(backend_name, device="cpu", timeout_seconds=60) as backend:
        total = backend.allreduce(torch.tensor([backend.rank + 1.0, 10.0]), op="sum")
        model = network()
        config = unitrain.TrainConfig(
            max_steps=STEPS, batch_size=GLOBAL_BATCH // backend.size, seed=SEED, progress="off", output_dir=None
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
        trainer = unitrain.Trainer(model, optimizer, nn.functional.cross_entropy, backend=backend, config=config)
        trainer.fit(digits())
        rank_results = {
            "rank": backend.rank, "size": backend.size, "local_rank": backend.local_rank,
            "local_size": backend.local_size, "node_rank": backend.node_rank, "num_nodes": backend.num_nodes,
            "host": socket.gethostname(), "launcher": environment.detect().launcher, "backend": backend.name,
            "hierarchical": any("hierarchical" in thread.name for thread in threading.enumerate()),
            "total": total.tolist(), "numbers": flatten_parameters(model), "transport": backend.transport,
        }  # fmt: skip
        (folder / f"{backend.rank}.part").write_text(json.dumps(rank_results))
        os.rename(folder / f"{backend.rank}.part", folder / f"{backend.rank}.json")  # noqa: PTH104


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
