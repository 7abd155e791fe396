"""Training script of `slow_ranks.py`: runs one rank of a job whose ranks are slowed down one after another.

The rank runs in its own cgroup on one core. Rank 0 requests each slowdown from `slow_ranks.py` by creating a file. The
script itself implements delays of the data and of the forward pass.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset

import unitrain
from unitrain.progress.stopping import RankSynchronizer

WIDTH, BATCH, DELAY_SECONDS = 400, 16, 0.025
LOG_EVERY_N_STEPS = 10
# Time before the first slowdown, duration of a slowdown, time between slowdowns, duration of a run without slowdowns.
FIRST_SECONDS, SLOW_SECONDS, PAUSE_SECONDS, UNDISTURBED_SECONDS = 6.0, 5.0, 4.0, 6.0


class Samples(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, delay_file: Path) -> None:
        self._delay_file, self._count = delay_file, 0

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self._count += 1
        if self._count % BATCH == 0 and self._delay_file.exists():
            time.sleep(DELAY_SECONDS)
        return torch.ones(WIDTH), torch.ones(WIDTH)


class Model(nn.Module):
    def __init__(self, delay_file: Path) -> None:
        super().__init__()
        self._delay_file = delay_file
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        if self._delay_file.exists():
            time.sleep(DELAY_SECONDS)
        until = time.thread_time() + 0.008  # computation that keeps the core busy
        while time.thread_time() < until:
            self.layers[0].weight.sum()
        time.sleep(0.005)
        outputs: Tensor = self.layers(inputs)
        return outputs


class Schedule(unitrain.Callback):
    """Requests the slowdowns at their times on rank 0, and stops the run after the last slowdown."""

    def __init__(self, folder: Path, names: list[str], seconds: float) -> None:
        self._folder, self._seconds = folder, seconds
        self._times = [
            (name, FIRST_SECONDS + index * (SLOW_SECONDS + PAUSE_SECONDS)) for index, name in enumerate(names)
        ]
        self._started = time.perf_counter()
        self.periods: list[tuple[str, int, int]] = []
        self._current: tuple[str, int] | None = None

    def on_step_end(self, trainer: unitrain.Trainer) -> None:
        if trainer.backend.rank:
            return
        elapsed, step = time.perf_counter() - self._started, trainer.progress.step
        name = next((name for name, start in self._times if start <= elapsed < start + SLOW_SECONDS), None)
        if self._current is not None and name != self._current[0]:
            (self._folder / "request").unlink()
            self.periods.append((*self._current, step))
            self._current = None
        if name is not None and self._current is None:
            _write(self._folder / "request", name)
            self._current = (name, step)
        if elapsed >= self._seconds:
            trainer.stop("all slowdowns are complete")


def run(backend: unitrain.Backend, folder: Path, names: list[str], number: int) -> None:
    """Train with the slowdowns `names`, or without slowdowns if it is empty. Write the result on rank 0."""
    model = Model(folder / f"forward-{backend.rank}")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    output = folder / f"run-{number}"
    config = unitrain.TrainConfig(
        max_epochs=1, batch_size=BATCH, log_every_n_steps=LOG_EVERY_N_STEPS, progress="lines", output_dir=output,
        shuffle=False, checkpoint_every_epochs=1000,
    )  # fmt: skip
    seconds = FIRST_SECONDS + len(names) * (SLOW_SECONDS + PAUSE_SECONDS) if names else UNDISTURBED_SECONDS
    schedule = Schedule(folder, names, seconds)
    trainer = unitrain.Trainer(model, optimizer, mse_loss, backend=backend, config=config, callbacks=[schedule])
    cpu = _machine_cpu_seconds()
    started, steps = time.perf_counter(), trainer.progress.step
    own = time.process_time()
    trainer.fit(Samples(folder / f"data-{backend.rank}"))
    if backend.rank == 0:
        rows = [json.loads(line) for line in (output / "steps.jsonl").read_text().splitlines()]
        result = {
            "periods": schedule.periods,
            "slow": [(row["step"], row["slow"]) for row in rows if "slow" in row],
            "seconds": time.perf_counter() - started,
            "steps": trainer.progress.step - steps,
            "cpu_of_other_processes": _machine_cpu_seconds() - cpu - 2 * (time.process_time() - own),
            "cost_microseconds": measure_cost(trainer._synchronizer),
        }
        _write(folder / f"result-{number}.json", json.dumps(result))


def measure_cost(synchronizer: RankSynchronizer, repetitions: int = 50) -> float:
    """Return the CPU time in microseconds for reading and evaluating the evidence at a sync point."""
    evidence, detector = synchronizer._evidence, synchronizer._detector
    started = time.thread_time()
    for _ in range(repetitions):
        evidence._last_reading_time = -1e9
        *_, row = evidence.take_recent_measurements()
        detector.add([[0.2, 1.0, 0.1, 0.1]] * 2, 100, [row, row])
        evidence.end_observation(100, is_any_suspected=False, is_suspected=False)
    return 1e6 * (time.thread_time() - started) / repetitions


def _machine_cpu_seconds() -> float:
    """Return the CPU time of all processes of this machine."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def _write(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def main() -> None:
    folder, groups = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    backend = unitrain.init()
    os.sched_setaffinity(0, {backend.rank % (os.cpu_count() or 1)})
    for thread in os.listdir("/proc/self/task"):  # noqa: PTH208
        os.sched_setaffinity(int(thread), {backend.rank % (os.cpu_count() or 1)})
    (groups / f"rank{backend.rank}" / "cgroup.procs").write_text("0")
    for number, names in enumerate(json.loads((folder / "plan.json").read_text())):
        run(backend, folder, names, number)
    backend.shutdown()


if __name__ == "__main__":
    main()
