"""The training script of chaos tests: `python training.py FOLDER`.

FOLDER/trial.json contains the trial. FOLDER/disk/run is the output folder. The script writes

    samples/HOST-PID.jsonl  the attempt and the step from which it starts; then, for each step, its samples
    ranks/N                 host name and process ID of rank N, and the number of ranks
    incidents/N             created when incident N happens
    result.json             digests of the final state and of the history, and the number of ranks

If FOLDER/slow exists, steps take longer, so that a change of the slots is detected during training.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import unitrain

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.chaos.trials import CHECKPOINT_EVERY, EPOCHS, LOGICAL_RANKS, STEPS, STEPS_PER_EPOCH, Trial, parse_trial

GLOBAL_BATCH = 12
SAMPLES, VALIDATION_SAMPLES = GLOBAL_BATCH * STEPS_PER_EPOCH, 24
_STEP_SECONDS, _SLOW_STEP_SECONDS = 0.05, 0.4
_FILE_EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")


class Incidents:
    """Starts the incidents of this rank when the rank reaches their phases, and injects the faults inside the rank."""

    def __init__(self, folder: Path, trial: Trial) -> None:
        self._folder, self._trial = folder, trial
        variables = [os.environ.get(name) for name in ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")]
        self.rank = int(next(filter(None, variables), "0"))
        self.size = max(self.rank + 1, 3)  # unknown before `unitrain.init`
        self._lock = threading.Lock()
        self._num_operations = 0

    def reach(self, phase: str, number: int) -> None:
        """Start the incidents of this rank in `phase` whose number is at most `number`."""
        for index, incident in enumerate(self._trial.incidents):
            is_due = number >= incident.number or phase == "fit end"
            if incident.phase != phase or not is_due or incident.rank % self.size != self.rank % self.size:
                continue
            try:
                file = os.open(self._folder / "incidents" / str(index), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                continue
            os.write(file, json.dumps([socket.gethostname(), os.getpid()]).encode() + b"\n")
            os.close(file)
            if incident.own == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif incident.own == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif incident.own == "exception":
                raise RuntimeError(f"incident {index} of this trial")

    def watch_files(self, output_folder: Path) -> None:
        """Count the file operations in the output folder, which trigger the incidents in the phase "checkpoint"."""
        name = str(output_folder)

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event in _FILE_EVENTS and name in str(arguments[0]):
                with self._lock:
                    self._num_operations += 1
                    number = self._num_operations
                self.reach("checkpoint", number)

        sys.addaudithook(hook)


class Recorder(unitrain.Callback):
    """Records the samples of each step before its gradients are reduced, and reports the phases."""

    def __init__(self, folder: Path, incidents: Incidents) -> None:
        self._folder, self._incidents = folder, incidents
        self._log = folder / "samples" / f"{socket.gethostname()}-{os.getpid()}.jsonl"
        self._step = 0

    def on_fit_start(self, trainer: unitrain.Trainer) -> None:
        self._step = trainer.progress.step + 1
        attempt = trainer.backend.broadcast_object(time.monotonic_ns())
        self._write({"attempt": attempt, "start": trainer.progress.step})
        if self._step > 1:
            self._incidents.reach("resume", sys.maxsize)

    def forward(self, model: nn.Module, batch: Any) -> tuple[Any, Tensor]:
        if model.training:
            self._write({"step": self._step, "samples": batch[2].tolist()})
            self._incidents.reach("forward", self._step)
        else:
            self._incidents.reach("validation", self._step // STEPS_PER_EPOCH)
        return model(batch[0]), batch[1]

    def on_before_optimizer_step(self, trainer: unitrain.Trainer) -> None:
        self._incidents.reach("optimizer step", self._step)

    def on_step_end(self, trainer: unitrain.Trainer) -> None:
        self._step = trainer.progress.step + 1
        time.sleep(_SLOW_STEP_SECONDS if (self._folder / "slow").exists() else _STEP_SECONDS)

    def on_epoch_end(self, trainer: unitrain.Trainer, results: dict[str, float]) -> None:
        self._incidents.reach("epoch end", trainer.progress.step // STEPS_PER_EPOCH)

    def on_fit_end(self, trainer: unitrain.Trainer) -> None:
        if sys.exc_info()[0] is None:
            self._incidents.reach("fit end", 0)

    def _write(self, row: dict[str, Any]) -> None:
        file = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(file, json.dumps(row).encode() + b"\n")
        os.close(file)


def create_data(count: int, seed: int) -> TensorDataset:
    """Return samples with their index as the third element."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 6, generator=generator)
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True), torch.arange(count))


def digest(*tensors: Tensor) -> str:
    parts = [tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach() for tensor in tensors]
    content = b"".join(part.double().numpy().tobytes() for part in parts)
    return hashlib.sha256(content).hexdigest()[:16]


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [torch.as_tensor(value) for state in optimizer.state.values() for _, value in sorted(state.items())]


def read_history(folder: Path) -> list[dict[str, Any]]:
    """Return the exact results of each complete epoch.

    The history of a terminated run also has a row for an incomplete epoch, which is excluded.
    """
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return [
        {"epoch": row["epoch"], "step": row["step"], **{
            name: value.hex() for name, value in row.items() if name.endswith("loss") and isinstance(value, float)
        }}
        for row in rows if row["step"] % STEPS_PER_EPOCH == 0
    ]  # fmt: skip


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    trial = parse_trial((folder / "trial.json").read_text())
    incidents = Incidents(folder, trial)
    started = folder / "starts" / str(incidents.rank)
    with started.open("a") as file:
        file.write("x")
    num_starts = started.stat().st_size
    incidents.reach("start", num_starts)
    with unitrain.init(device="cpu", timeout_seconds=trial.timeout_seconds) as backend:
        incidents.rank, incidents.size = backend.rank, backend.size
        (folder / "ranks" / str(backend.rank)).write_text(f"{socket.gethostname()} {os.getpid()} {backend.size}\n")
        incidents.reach("init", num_starts)
        output_folder = folder / "disk" / "run"
        incidents.watch_files(output_folder)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
        batches = {"batch_size": 3, "logical_ranks": LOGICAL_RANKS} if trial.is_logical else {
            "global_batch_size": GLOBAL_BATCH, "shard": trial.shard
        }  # fmt: skip
        config = unitrain.TrainConfig(
            max_epochs=EPOCHS,
            output_dir=output_folder,
            resume=True,
            checkpoint_every_steps=CHECKPOINT_EVERY,
            memory_checkpoint_every_steps=1 if trial.in_memory else None,
            async_checkpoints=trial.is_async,
            log_every_n_steps=2,
            progress="off",
            **batches,
        )
        recorder = Recorder(folder, incidents)
        trainer = unitrain.Trainer(
            model, torch.optim.AdamW(model.parameters(), lr=0.01), nn.functional.mse_loss, backend=backend,
            config=config, forward=recorder.forward, callbacks=[recorder],
        )  # fmt: skip
        trainer.fit(create_data(SAMPLES, 1), create_data(VALIDATION_SAMPLES, 2))
        unitrain.broadcast_buffers(trainer.model, backend)
        own = {
            "step": trainer.progress.step,
            "parameters": digest(*trainer.model.parameters()),
            "buffers": digest(*trainer.model.buffers()),
            "optimizer": digest(*state_tensors(trainer.optimizer)),
        }
        states = backend.allgather_object(own)
        if backend.rank == 0:
            if trial.shard == "none":
                states = [state for index, state in enumerate(states) if state not in states[:index]]
            result = {"states": states, "history": read_history(output_folder)}
            (folder / "result.json").write_text(json.dumps([backend.size, result]))


if __name__ == "__main__":
    assert STEPS > 0
    main(Path(sys.argv[1]))
