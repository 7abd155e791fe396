"""Kill runs with SIGKILL, and resume them with another number of ranks until they are complete.

Each rank is forked from a process that has already imported torch, so it starts in a fraction of a second. A rank kills
itself at a point that depends on the seed: inside a step, or at a file operation in the folder of the run.
Alternatively, the parent kills it after some time. The other ranks are killed at the same time, or have a short time to
raise errors.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from training import OPTIMIZERS, STEPS, SampleLog, Settings, audit, create_trainer, data, difference, final_weights

import unitrain
import unitrain.backends.horovod.backend
from unitrain import Callback, Trainer
from unitrain.bootstrap import environment
from unitrain.bootstrap.network import reserve_port
from unitrain.checkpoint import files

# Triggers of kills. The most frequent trigger is a file operation of a checkpoint.
TRIGGERS = ("step", "file", "file", "time")
BACKENDS_AND_SIZES = [
    ("local", 1),
    ("ddp", 1),
    ("horovod", 1),
    *((name, size) for name in ("ddp", "horovod") for size in (2, 3)),
]
HOOKS = ("on_micro_batch_end", "on_before_optimizer_step", "on_step_end")
# Approximate number of audited file operations for saving a checkpoint and its history row, and removing an older one.
_OPERATIONS = 24
_TIMEOUT_SECONDS = 90.0
_POLL_SECONDS = 0.001
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Kill:
    """The trigger, the time and the target of a kill. `moment` is a fraction of the remaining work of the attempt, from
    0 to 1. `victim` is a rank, or None for all ranks."""

    trigger: str
    moment: float
    victim: int | None
    hook: str
    grace_seconds: float

    @classmethod
    def draw(cls, rng: random.Random, size: int) -> Kill:
        """Return a random kill for an attempt with `size` ranks."""
        trigger = rng.choice(TRIGGERS)
        # Rank 0 writes the files.
        victim = rng.choice([None, 0 if trigger == "file" else rng.randrange(size)])
        return cls(trigger, rng.random(), victim, rng.choice(HOOKS), rng.choice([0.0, 0.05, 0.5]))


@dataclass
class Tally:
    """Counts of events for the tables."""

    starts: dict[str, int] = field(default_factory=dict)
    kills: dict[str, int] = field(default_factory=dict)
    ways: dict[str, int] = field(default_factory=dict)
    runs: int = 0
    resumed: int = 0
    lost: int = 0
    repeated: int = 0
    difference: float = 0.0
    failures: list[str] = field(default_factory=list)


class KillAtStep(Callback):
    """Kills this process in the hook given by `kill`, after the fraction `kill.moment` of the remaining steps."""

    def __init__(self, kill: Kill, remaining_steps: int) -> None:
        self._hook, self._countdown = kill.hook, int(kill.moment * remaining_steps)

    def on_micro_batch_end(self, trainer: Trainer, batch: Any, part: Any, loss: Any) -> None:
        if self._countdown == 0 and self._hook == "on_micro_batch_end":
            kill_this_process()

    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        if self._countdown == 0 and self._hook == "on_before_optimizer_step":
            kill_this_process()

    def on_step_end(self, trainer: Trainer) -> None:
        if self._countdown == 0:
            kill_this_process()
        self._countdown -= 1


def kill_this_process() -> NoReturn:
    """Kill this process with SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("the process survived SIGKILL")


def kill_at_file_operation(folder: Path, countdown: int) -> None:
    """Kill this process immediately before its `countdown`-th file operation in `folder`, counted from 0 over all
    threads."""
    path, remaining = str(folder), [countdown]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree") and path in str(
            arguments[0]
        ):
            if remaining[0] == 0:
                kill_this_process()
            remaining[0] -= 1

    sys.addaudithook(hook)


@dataclass(frozen=True)
class Attempt:
    """One start of a run with a number of ranks."""

    run: Path
    number: int
    backend: str
    size: int
    settings: Settings
    port: int
    kill: Kill | None
    remaining_steps: int


def run_rank(attempt: Attempt, rank: int) -> None:
    """Train as `rank` of the attempt, in a separate process."""
    log = os.open(attempt.run / f"log-{attempt.number:03d}-{rank}.txt", os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if attempt.backend != "local":
        rank_variables = {
            "RANK": rank,
            "WORLD_SIZE": attempt.size,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": attempt.size,
        }
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(attempt.port)}
        environment.export({name: str(value) for name, value in rank_variables.items()} | rendezvous)
    kill, folder = attempt.kill, attempt.run / "output"
    callbacks: list[Callback] = [SampleLog(attempt.run / "notes", attempt.number, rank, attempt.size)]
    # To kill all ranks, rank 0 kills itself, and the parent immediately kills the other ranks.
    if kill is not None and rank == (kill.victim or 0):
        if kill.trigger == "step":
            callbacks.append(KillAtStep(kill, attempt.remaining_steps))
        elif kill.trigger == "file":
            checkpoints = attempt.remaining_steps / attempt.settings.checkpoint_every_steps
            kill_at_file_operation(folder, int(kill.moment * checkpoints * _OPERATIONS))
    with unitrain.init(attempt.backend, device="cpu", timeout_seconds=60) as backend:
        create_trainer(backend, folder, attempt.settings, *callbacks).fit(data())


class Chaos:
    """Starts, kills and resumes runs in `folder`. `tally` contains the results."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._seed = folder, seed
        self.tally = Tally()
        self._seconds_per_step: dict[tuple[str, int], float] = {}
        self._reserved_port = reserve_port()  # of the latest attempt
        self._expected_weights = {name: final_weights(self._run_uninterrupted(name)) for name in OPTIMIZERS}

    def run(self, number: int) -> None:
        """Start run `number`, kill it one to three times, and complete it."""
        rng = random.Random(f"{self._seed}/{number}")
        settings = Settings(
            optimizer=rng.choice(OPTIMIZERS),
            checkpoint_every_steps=rng.choice([1, 2, 3, 5]),
            asynchronous=rng.random() < 0.5,
            keep_last=rng.choice([None, 1, 2]),
        )
        num_kills = rng.choice([1, 1, 2, 3])
        run, kills_done, attempts = self._folder / f"run-{number:05d}", 0, 0
        run.mkdir()
        try:
            while True:
                backend, size = rng.choice(BACKENDS_AND_SIZES)
                kill = Kill.draw(rng, size) if kills_done < num_kills else None
                attempt = self._create_attempt(run, attempts, backend, size, settings, kill)
                attempts += 1
                if self._run_attempt(attempt):
                    break
                kills_done += 1
            self._check(run, settings)
        except AssertionError as error:
            self.tally.failures.append(f"run {number} of seed {self._seed}, attempt {attempts}: {error}")
            return  # keep the folder of a failed run
        shutil.rmtree(run)

    def _check(self, run: Path, settings: Settings) -> None:
        found = audit(run / "notes")
        weight_difference = difference(final_weights(run / "output"), self._expected_weights[settings.optimizer])
        self.tally.runs += 1
        self.tally.resumed += found.resumed
        self.tally.lost += found.lost
        self.tally.repeated += found.repeated
        self.tally.difference = max(self.tally.difference, weight_difference)
        if found.lost or found.repeated or not weight_difference <= 1e-6:
            raise AssertionError(
                f"{found.lost} samples lost, {found.repeated} repeated, the final weights differ by {weight_difference}"
            )

    def _run_uninterrupted(self, optimizer: str) -> Path:
        run = self._folder / f"whole-{optimizer}"
        run.mkdir()
        if not self._run_attempt(self._create_attempt(run, 0, "local", 1, Settings(optimizer), None)):
            raise AssertionError("An uninterrupted run was killed.")
        return run / "output"

    def _create_attempt(
        self, run: Path, number: int, backend: str, size: int, settings: Settings, kill: Kill | None
    ) -> Attempt:
        done = [int(path.name.removeprefix("step-")) for path in files.list_checkpoints(run / "output")]
        remaining_steps = STEPS - max(done, default=0)
        self._reserved_port.close()
        self._reserved_port = reserve_port()
        port = self._reserved_port.getsockname()[1]
        return Attempt(run, number, backend, size, settings, port, kill, remaining_steps)

    def _run_attempt(self, attempt: Attempt) -> bool:
        """Start the attempt and wait until it ends. Return whether it ended without being killed."""
        name, kill = f"{attempt.backend} {attempt.size}", attempt.kill
        self.tally.starts[name] = self.tally.starts.get(name, 0) + 1
        ranks: list[BaseProcess] = [
            _FORK.Process(target=run_rank, args=(attempt, rank)) for rank in range(attempt.size)
        ]
        for rank in ranks:
            rank.start()
        try:
            if kill is not None and kill.trigger == "time":
                self._kill_after_time(attempt, ranks)
            killed = self._await_end(ranks, kill)
        finally:
            for rank in ranks:
                with contextlib.suppress(OSError):
                    rank.kill()
                rank.join()
        if killed:
            assert kill is not None
            self.tally.kills[name] = self.tally.kills.get(name, 0) + 1
            description = f"{kill.trigger}, {'all ranks' if kill.victim is None else 'one rank'}"
            self.tally.ways[description] = self.tally.ways.get(description, 0) + 1
            return False
        wrong = [rank for rank, process in enumerate(ranks) if process.exitcode != 0]
        if wrong:
            last_output = (attempt.run / f"log-{attempt.number:03d}-{wrong[0]}.txt").read_text(errors="replace")[-3000:]
            raise AssertionError(f"{name}: rank {wrong[0]} ended with {ranks[wrong[0]].exitcode}:\n{last_output}")
        return True

    def _await_end(self, ranks: list[BaseProcess], kill: Kill | None) -> bool:
        """Wait until all ranks have ended, or until the grace period after a kill has expired. Return whether a rank
        was killed."""
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        waiting = {rank.sentinel: rank for rank in ranks}
        killed = False
        while waiting and (seconds := deadline - time.monotonic()) > 0:
            for ended in wait(list(waiting), timeout=seconds):
                rank = waiting.pop(ended)  # type: ignore[call-overload]
                rank.join()
                if rank.exitcode == -signal.SIGKILL and not killed:
                    assert kill is not None
                    killed = True
                    deadline = time.monotonic() + (0.0 if kill.victim is None else kill.grace_seconds)
        if waiting and not killed:
            raise AssertionError(f"{len(waiting)} of {len(ranks)} ranks were still busy after {_TIMEOUT_SECONDS:g} s.")
        return killed

    def _kill_after_time(self, attempt: Attempt, ranks: list[BaseProcess]) -> None:
        """Kill a rank some time after it starts to train, and sometimes before."""
        kill, key = attempt.kill, (attempt.backend, attempt.size)
        assert kill is not None
        notes = attempt.run / "notes" / f"{attempt.number:03d}-0-of-{attempt.size}.jsonl"
        deadline = time.monotonic() + (_TIMEOUT_SECONDS if kill.moment > 0.15 else kill.moment * 4)
        while not (notes.exists() and notes.stat().st_size) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        began = time.monotonic()
        seconds_per_step = self._seconds_per_step.get(key, 0.01)
        wait([ranks[0].sentinel], timeout=kill.moment * attempt.remaining_steps * seconds_per_step)
        if ranks[0].is_alive():
            ranks[kill.victim or 0].kill()
            steps = max(1, notes.read_bytes().count(b"\n") if notes.exists() else 1)
            self._seconds_per_step[key] = 0.5 * seconds_per_step + 0.5 * (time.monotonic() - began) / steps
