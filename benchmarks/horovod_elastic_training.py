"""The training run of `recovered_training.py` with Horovod's elastic API, for `recovery.py`.

python horovod_elastic_training.py FOLDER. After a failure, the remaining ranks keep running and restore the state of
the latest step from memory.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from recovered_training import BATCH, StepFile, build
from torch import nn


def main(folder: Path) -> None:
    """Train until the process is killed."""
    hvd.init()
    model, local_optimizer, data = build()
    optimizer = hvd.DistributedOptimizer(local_optimizer, named_parameters=model.named_parameters())
    attempts = itertools.count()

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(state: Any) -> None:
        file = StepFile(folder, hvd.rank(), hvd.size(), next(attempts))
        while True:
            first = (state.step * hvd.size() + hvd.rank()) * BATCH
            indices = torch.arange(first, first + BATCH) % len(data)
            inputs, targets = (tensor[indices] for tensor in data.tensors)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            state.step += 1
            file.add(state.step)
            state.commit()

    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
