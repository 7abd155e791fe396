"""Run a training script, and record its steps: python recorded_script.py FOLDER SCRIPT [ARGUMENT ...]

`migrated_runs.py` starts this program on each rank. The program seeds all generators with 0 and runs the script. Then
it writes the loss of each backward pass, the norm of all gradients at each optimizer step, and the final parameters to
FOLDER/rank-RANK.pt. It does not import the libraries of the script, so it can record both original and converted
scripts.
"""

from __future__ import annotations

import random
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from unitrain.bootstrap import environment


class Recorder:
    """Collects losses, gradient norms and parameters of the script in this process."""

    def __init__(self) -> None:
        self.losses = list[float]()
        self.parameters = list[Tensor]()
        self._norms = dict[int, float]()  # by the number of previous backward passes

    def record_losses(self, backward: Callable[..., None]) -> Callable[..., None]:
        """Return a replacement for `Tensor.backward` that records the loss."""

        def recorded(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            self.losses.append(loss.item())
            backward(loss, *args, **kwargs)

        return recorded

    def record_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Record the parameters and the norm of their gradients after a step. The norm is not recorded before the first
        backward pass, for example in `hvd.broadcast_optimizer_state`. Horovod's optimizer calls the hook twice per
        step."""
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad.double().norm() for parameter in self.parameters if parameter.grad is not None]
        if self.losses and gradients:
            self._norms[len(self.losses)] = torch.stack(gradients).norm().item()

    def save(self, file: Path) -> None:
        """Write the records to `file`."""
        parameters = [parameter.detach().clone() for parameter in self.parameters]
        torch.save({"losses": self.losses, "norms": [*self._norms.values()], "parameters": parameters}, file)


def main() -> None:
    """Run the script given on the command line."""
    folder, script, *_ = sys.argv[1:]
    rank = environment.detect().rank
    file = Path(folder).resolve() / f"rank-{rank}.pt"
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(script).resolve().parent)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    recorder = Recorder()
    torch.Tensor.backward = recorder.record_losses(torch.Tensor.backward)  # type: ignore[method-assign]
    register_optimizer_step_post_hook(recorder.record_step)
    runpy.run_path(script, run_name="__main__")
    recorder.save(file)


if __name__ == "__main__":
    main()
