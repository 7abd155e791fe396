"""Train with local steps in unitrain, Accelerate and torchft, in turns. See low_communication_peers.py.

low_communication_peers_training.py TURNS LOCAL_STEPS
"""

from __future__ import annotations

import json
import random
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD as AccelerateLocalSGD
from low_communication_training import Method, Training, build
from torch import Tensor
from torchft._torchft import LighthouseServer
from torchft.local_sgd import DiLoCo as TorchftDiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

import unitrain

TIMEOUT = timedelta(seconds=60)
DILOCO: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.9}


class PeerTraining(Training):
    """Training that does not use unitrain's synchronization."""

    def __init__(self, backend: unitrain.Backend, steps: int) -> None:
        super().__init__(backend, Method(communicates=False), steps=steps, peak_lr=1e-3, seed=0)
        self.exits = ExitStack()


class WithAccelerate(PeerTraining):
    """Training with Accelerate's LocalSGD."""

    def __init__(self, backend: unitrain.Backend, steps: int, local_steps: int) -> None:
        super().__init__(backend, steps)
        accelerator = Accelerator(cpu=True)
        self._distributed = accelerator.prepare(self._model)
        self._synchronizer = self.exits.enter_context(
            AccelerateLocalSGD(accelerator=accelerator, model=self._distributed, local_sgd_steps=local_steps)
        )

    def after_step(self) -> None:
        self._synchronizer.step()


class WithTorchft(PeerTraining):
    """Training with torchft's DiLoCo. Each rank is a replica group; `lighthouse` is the address of torchft's server."""

    def __init__(self, backend: unitrain.Backend, steps: int, local_steps: int, lighthouse: str) -> None:
        super().__init__(backend, steps)
        self._store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        manager = Manager(
            pg=ProcessGroupGloo(timeout=TIMEOUT),
            min_replica_size=backend.size,
            use_async_quorum=False,
            load_state_dict=self._model.load_state_dict,
            state_dict=self._model.state_dict,
            replica_id=str(backend.rank),
            store_addr="127.0.0.1",
            store_port=self._store.port,
            rank=0,
            world_size=1,
            lighthouse_addr=lighthouse,
            hostname="127.0.0.1",
            init_sync=False,  # the replicas already have equal weights
            timeout=TIMEOUT,
            quorum_timeout=TIMEOUT,
            connect_timeout=TIMEOUT,
        )
        self.exits.callback(manager.shutdown, wait=False)
        outer = torch.optim.SGD(self._model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self.exits.enter_context(
            TorchftDiLoCo(manager, [self._model], self._optimizer, outer, sync_every=local_steps, pin_memory=False)
        )


def flatten(training: Training) -> Tensor:
    """Return a copy of all weights."""
    return torch.cat([parameter.detach().flatten() for parameter in training._model.parameters()])


def main(turns: int, local_steps: int) -> None:
    """Train with each library, and print the losses, differences and seconds per step."""
    steps = turns * local_steps
    with unitrain.init(device="cpu") as backend:
        server = LighthouseServer(bind="127.0.0.1:0", min_replicas=backend.size) if backend.rank == 0 else None
        lighthouse = backend.broadcast_object(server.address() if server is not None else None)

        def create_training(**settings: Any) -> Training:
            method = Method(local_sgd=unitrain.LocalSGDConfig(steps=local_steps, **settings))
            return Training(backend, method, steps=steps, peak_lr=1e-3, seed=0)

        runs: dict[tuple[str, str], Training] = {
            ("local SGD", "unitrain"): create_training(),
            ("local SGD", "Accelerate"): WithAccelerate(backend, steps, local_steps),
            ("DiLoCo", "unitrain"): create_training(**DILOCO),
            ("DiLoCo", "torchft"): WithTorchft(backend, steps, local_steps, lighthouse),
        }
        seconds: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
        order = random.Random(0)
        for _ in range(turns):
            for key in order.sample(list(runs), len(runs)):
                backend.barrier()
                start = time.perf_counter()
                runs[key].run(local_steps)
                backend.barrier()
                seconds[key].append((time.perf_counter() - start) / local_steps)
        initial = torch.cat([parameter.detach().flatten() for parameter in build().parameters()])
        libraries = []
        for (method, library), training in runs.items():
            expected = flatten(runs[method, "unitrain"])
            libraries.append(
                {
                    "method": method,
                    "library": library,
                    "loss": training.validation_loss(),
                    "difference": float((flatten(training) - expected).abs().max() / (expected - initial).abs().max()),
                    "seconds": seconds[method, library],
                }
            )
        for training in runs.values():
            if isinstance(training, PeerTraining):
                training.exits.close()
        if backend.rank == 0:
            print(json.dumps({"libraries": libraries}))
        backend.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
