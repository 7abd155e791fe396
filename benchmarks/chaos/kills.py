"""Runs that are killed with SIGKILL and go on with other ranks, until they are finished.

Each rank is forked from a process that has imported torch already, so that a start takes a fraction of a second. A
rank kills itself at a moment that the seed gives, inside a step or at a file operation in the run's folder; or the
parent kills it after some time. The others die with it, or are left to their errors for a moment.
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

from training import OPTIMIZERS, STEPS, Notes, Settings, audit, data, difference, final_weights, trainer_of

import unitrain
import unitrain.backends.horovod.backend
from unitrain import Callback, Trainer
from unitrain.bootstrap import environment
from unitrain.bootstrap.network import free_port
from unitrain.checkpoint import files

# Where the kill comes from; a checkpoint's files are what it is aimed at most.
WAYS = ("step", "file", "file", "time")
PLACES = [("local", 1), ("ddp", 1), ("horovod", 1), *((name, size) for name in ("ddp", "horovod") for size in (2, 3))]
MOMENTS = ("on_micro_batch_end", "on_before_optimizer_step", "on_step_end")
# How many audited file operations a checkpoint, its history and the removal of an older one take, about.
_OPERATIONS = 24
_PATIENCE_SECONDS = 90.0
_POLL_SECONDS = 0.001
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Kill:
    """When and whom: `moment` from 0 to 1 is a part of what the attempt has left to do, `victim` None all ranks."""

    way: str
    moment: float
    victim: int | None
    hook: str
    grace_seconds: float

    @classmethod
    def draw(cls, chance: random.Random, size: int) -> Kill:
        """Return a random one for an attempt with `size` ranks."""
        way = chance.choice(WAYS)
        # Rank 0 writes the files.
        victim = chance.choice([None, 0 if way == "file" else chance.randrange(size)])
        return cls(way, chance.random(), victim, chance.choice(MOMENTS), chance.choice([0.0, 0.05, 0.5]))


@dataclass
class Tally:
    """What happened, to be printed."""

    starts: dict[str, int] = field(default_factory=dict)
    kills: dict[str, int] = field(default_factory=dict)
    ways: dict[str, int] = field(default_factory=dict)
    runs: int = 0
    resumed: int = 0
    lost: int = 0
    repeated: int = 0
    difference: float = 0.0
    failures: list[str] = field(default_factory=list)


class Executioner(Callback):
    """Kills this process at the given one of a run's moments, after so many steps."""

    def __init__(self, kill: Kill, left: int) -> None:
        self._hook, self._countdown = kill.hook, int(kill.moment * left)

    def on_micro_batch_end(self, trainer: Trainer, batch: Any, part: Any, loss: Any) -> None:
        if self._countdown == 0 and self._hook == "on_micro_batch_end":
            end_abruptly()

    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        if self._countdown == 0 and self._hook == "on_before_optimizer_step":
            end_abruptly()

    def on_step_end(self, trainer: Trainer) -> None:
        if self._countdown == 0:
            end_abruptly()
        self._countdown -= 1


def end_abruptly() -> NoReturn:
    """Let this process be killed."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL was survived")


def watch_files(folder: Path, countdown: int) -> None:
    """Kill this process just before its file operation of that number in `folder`, in whichever thread it is."""
    inside, left = str(folder), [countdown]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree") and inside in str(
            arguments[0]
        ):
            if left[0] == 0:
                end_abruptly()
            left[0] -= 1

    sys.addaudithook(hook)


@dataclass(frozen=True)
class Attempt:
    """One start of a run, with the ranks that it has."""

    run: Path
    number: int
    backend: str
    size: int
    settings: Settings
    port: int
    kill: Kill | None
    left: int


def be_rank(attempt: Attempt, rank: int) -> None:
    """Train as `rank` of the attempt, in a process of its own."""
    log = os.open(attempt.run / f"log-{attempt.number:03d}-{rank}.txt", os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if attempt.backend != "local":
        place = {"RANK": rank, "WORLD_SIZE": attempt.size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": attempt.size}
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(attempt.port)}
        environment.export({name: str(value) for name, value in place.items()} | rendezvous)
    kill, folder = attempt.kill, attempt.run / "output"
    hooks: list[Callback] = [Notes(attempt.run / "notes", attempt.number, rank, attempt.size)]
    # With all ranks as victims, rank 0 is the first to go and the parent kills the rest at once.
    if kill is not None and rank == (kill.victim or 0):
        if kill.way == "step":
            hooks.append(Executioner(kill, attempt.left))
        elif kill.way == "file":
            checkpoints = attempt.left / attempt.settings.checkpoint_every_steps
            watch_files(folder, int(kill.moment * checkpoints * _OPERATIONS))
    with unitrain.init(attempt.backend, device="cpu", timeout_seconds=60) as backend:
        trainer_of(backend, folder, attempt.settings, *hooks).fit(data())


class Chaos:
    """Makes runs, kills them and lets them go on, in `folder`; the `tally` has what came of them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._seed = folder, seed
        self.tally = Tally()
        self._pace: dict[tuple[str, int], float] = {}
        self._wanted = {name: final_weights(self._uninterrupted(name)) for name in OPTIMIZERS}

    def run(self, number: int) -> None:
        """Begin run `number`, kill it once to three times, and let it come to its end."""
        chance = random.Random(f"{self._seed}/{number}")
        settings = Settings(
            optimizer=chance.choice(OPTIMIZERS),
            checkpoint_every_steps=chance.choice([1, 2, 3, 5]),
            asynchronous=chance.random() < 0.5,
            keep_last=chance.choice([None, 1, 2]),
        )
        wanted_kills = chance.choice([1, 1, 2, 3])
        run, made, attempts = self._folder / f"run-{number:05d}", 0, 0
        run.mkdir()
        try:
            while True:
                backend, size = chance.choice(PLACES)
                kill = Kill.draw(chance, size) if made < wanted_kills else None
                attempt = self._attempt(run, attempts, backend, size, settings, kill)
                attempts += 1
                if self._survived(attempt):
                    break
                made += 1
            self._check(run, settings)
        except AssertionError as error:
            self.tally.failures.append(f"run {number} of seed {self._seed}, attempt {attempts}: {error}")
            return  # its folder is left for whoever looks
        shutil.rmtree(run)

    def _check(self, run: Path, settings: Settings) -> None:
        found = audit(run / "notes")
        apart = difference(final_weights(run / "output"), self._wanted[settings.optimizer])
        self.tally.runs += 1
        self.tally.resumed += found.resumed
        self.tally.lost += found.lost
        self.tally.repeated += found.repeated
        self.tally.difference = max(self.tally.difference, apart)
        if found.lost or found.repeated or not apart <= 1e-6:
            raise AssertionError(f"{found.lost} samples lost, {found.repeated} repeated, weights {apart} apart")

    def _uninterrupted(self, optimizer: str) -> Path:
        run = self._folder / f"whole-{optimizer}"
        run.mkdir()
        if not self._survived(self._attempt(run, 0, "local", 1, Settings(optimizer), None)):
            raise AssertionError("An uninterrupted run was killed.")
        return run / "output"

    def _attempt(
        self, run: Path, number: int, backend: str, size: int, settings: Settings, kill: Kill | None
    ) -> Attempt:
        done = [int(path.name.removeprefix("step-")) for path in files.candidates(run / "output")]
        left = STEPS - max(done, default=0)
        return Attempt(run, number, backend, size, settings, free_port(), kill, left)

    def _survived(self, attempt: Attempt) -> bool:
        """Start the attempt and wait for its end; return whether it came to that by itself."""
        place, kill = f"{attempt.backend} {attempt.size}", attempt.kill
        self.tally.starts[place] = self.tally.starts.get(place, 0) + 1
        ranks: list[BaseProcess] = [_FORK.Process(target=be_rank, args=(attempt, rank)) for rank in range(attempt.size)]
        for rank in ranks:
            rank.start()
        try:
            if kill is not None and kill.way == "time":
                self._kill_in_time(attempt, ranks)
            killed = self._await_end(ranks, kill)
        finally:
            for rank in ranks:
                with contextlib.suppress(OSError):
                    rank.kill()
                rank.join()
        if killed:
            assert kill is not None
            self.tally.kills[place] = self.tally.kills.get(place, 0) + 1
            way = f"{kill.way}, {'all ranks' if kill.victim is None else 'one rank'}"
            self.tally.ways[way] = self.tally.ways.get(way, 0) + 1
            return False
        wrong = [rank for rank, process in enumerate(ranks) if process.exitcode != 0]
        if wrong:
            words = (attempt.run / f"log-{attempt.number:03d}-{wrong[0]}.txt").read_text(errors="replace")[-3000:]
            raise AssertionError(f"{place}: rank {wrong[0]} ended with {ranks[wrong[0]].exitcode}:\n{words}")
        return True

    def _await_end(self, ranks: list[BaseProcess], kill: Kill | None) -> bool:
        """Return once no rank is left: whether one was killed, after which the others have their grace."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
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
            raise AssertionError(f"{len(waiting)} of {len(ranks)} ranks were still busy after {_PATIENCE_SECONDS:g} s.")
        return killed

    def _kill_in_time(self, attempt: Attempt, ranks: list[BaseProcess]) -> None:
        """Kill a rank some time after it began to train; now and then before."""
        kill, key = attempt.kill, (attempt.backend, attempt.size)
        assert kill is not None
        notes = attempt.run / "notes" / f"{attempt.number:03d}-0-of-{attempt.size}.jsonl"
        deadline = time.monotonic() + (_PATIENCE_SECONDS if kill.moment > 0.15 else kill.moment * 4)
        while not (notes.exists() and notes.stat().st_size) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        began = time.monotonic()
        pace = self._pace.get(key, 0.01)
        wait([ranks[0].sentinel], timeout=kill.moment * attempt.left * pace)
        if ranks[0].is_alive():
            ranks[kill.victim or 0].kill()
            steps = max(1, notes.read_bytes().count(b"\n") if notes.exists() else 1)
            self._pace[key] = 0.5 * pace + 0.5 * (time.monotonic() - began) / steps
