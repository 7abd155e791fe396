"""Resume runs from corrupt checkpoints, as after a disk failure, on a full disk or after a user error.

A run must resume from the newest valid checkpoint with the weights and optimizer state of that step, and finish with
the weights of an undamaged run. Alternatively, it may raise a CheckpointError. Any other outcome is wrong.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from training import Settings, create_trainer, data, difference, final_weights

import unitrain
from unitrain.backends.base import Backend
from unitrain.checkpoint import files
from unitrain.checkpoint.files import MANIFEST, MODEL, TRAINING
from unitrain.errors import CheckpointError

Random = random.Random
_NOBODY = 65534
# Outcomes, in the order of the table's columns.
NEWEST, OLDER, REJECTED, SKIPPED, WRONG = "newest", "older", "rejected", "not possible here", "wrong"
OUTCOMES = (NEWEST, OLDER, REJECTED, SKIPPED, WRONG)


def truncate(folder: Path, checkpoint: Path, rng: Random) -> None:
    path = _choose_file(checkpoint, rng)
    os.truncate(path, rng.randrange(path.stat().st_size))


def flip_bit(folder: Path, checkpoint: Path, rng: Random) -> None:
    path = _choose_file(checkpoint, rng)
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def remove_file(folder: Path, checkpoint: Path, rng: Random) -> None:
    _choose_file(checkpoint, rng).unlink()


def remove_checkpoint(folder: Path, checkpoint: Path, rng: Random) -> None:
    shutil.rmtree(checkpoint)


def add_bytes(folder: Path, checkpoint: Path, rng: Random) -> None:
    with _choose_file(checkpoint, rng).open("ab") as file:
        file.write(rng.randbytes(rng.randint(1, 5000)))


def truncate_manifest(folder: Path, checkpoint: Path, rng: Random) -> None:
    path = checkpoint / MANIFEST
    os.truncate(path, path.stat().st_size // 2)


def empty_file(folder: Path, checkpoint: Path, rng: Random) -> None:
    os.truncate(_choose_file(checkpoint, rng), 0)


def zero_block(folder: Path, checkpoint: Path, rng: Random) -> None:
    path = checkpoint / rng.choice([MODEL, TRAINING])
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content))
    content[start : start + 512] = bytes(len(content[start : start + 512]))
    path.write_bytes(content)


def swap_files(folder: Path, checkpoint: Path, rng: Random) -> None:
    other = rng.choice([path for path in files.list_checkpoints(folder) if path != checkpoint])
    name = rng.choice([MODEL, TRAINING, MANIFEST])
    if (other / name).exists() and (checkpoint / name).exists():
        _swap(checkpoint / name, other / name)


def swap_checkpoints(folder: Path, checkpoint: Path, rng: Random) -> None:
    _swap(checkpoint, rng.choice([path for path in files.list_checkpoints(folder) if path != checkpoint]))


def leave_checkpoint_unfinished(folder: Path, checkpoint: Path, rng: Random) -> None:
    checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.unfinished"))


def truncate_history(folder: Path, checkpoint: Path, rng: Random) -> None:
    path = folder / rng.choice(["history.jsonl", "run.jsonl"])
    text = path.read_text()
    if text.endswith("\n"):  # truncate only the last row, because rows are written one at a time
        last = text.splitlines()[-1]
        path.write_text(text[: -rng.randint(1, len(last) + 1)])


READ_ONLY, FULL = "read-only folder", "full disk"
DAMAGES: dict[str, Callable[[Path, Path, Random], None]] = {
    "a file truncated": truncate,
    "a bit flipped": flip_bit,
    "a file removed": remove_file,
    "a checkpoint removed": remove_checkpoint,
    "bytes added": add_bytes,
    "half a manifest": truncate_manifest,
    "a file emptied": empty_file,
    "512 bytes zeroed": zero_block,
    "files swapped between checkpoints": swap_files,
    "checkpoints swapped": swap_checkpoints,
    "left unfinished": leave_checkpoint_unfinished,
    "the history torn": truncate_history,
}
DAMAGE_NAMES = (*DAMAGES, READ_ONLY, FULL)


class Corruptions:
    """Damages copies of a run in `folder` and resumes them. `outcomes[damage][outcome]` counts the outcomes."""

    def __init__(self, folder: Path, seed: int) -> None:
        logging.getLogger("unitrain").setLevel(logging.ERROR)  # hide messages about skipped checkpoints
        torch.set_num_threads(1)
        self._folder, self._seed = folder, seed
        self._base = folder / "base"
        self.outcomes: dict[str, dict[str, int]] = {}
        self.failures: list[str] = []
        with _backend() as backend:
            create_trainer(backend, self._base, Settings()).fit(data())
        self._content_by_step = {_step(path): _read_files(path) for path in files.list_checkpoints(self._base)}
        self._state_by_step = {_step(path): _read_state(path) for path in files.list_checkpoints(self._base)}
        self._expected_weights = final_weights(self._base)

    def run(self, number: int) -> None:
        """Create, damage and resume copy `number`."""
        rng = random.Random(f"{self._seed}/{number}")
        damage = DAMAGE_NAMES[number % len(DAMAGE_NAMES)]
        case = self._folder / f"case-{number:05d}"
        try:
            outcome = self._damage_and_resume(damage, case, rng)
        except Exception as error:
            outcome = WRONG
            self.failures.append(f"corruption {number} of seed {self._seed}, {damage}: {type(error).__name__}: {error}")
        else:
            shutil.rmtree(case, ignore_errors=True)
        counts = self.outcomes.setdefault(damage, {})
        counts[outcome] = counts.get(outcome, 0) + 1

    def _damage_and_resume(self, damage: str, case: Path, rng: Random) -> str:
        if damage == READ_ONLY:
            return self._resume_in_read_only_folder(case, rng)
        if damage == FULL:
            return self._resume_on_full_disk(case, rng)
        shutil.copytree(self._base, case)
        found = files.list_checkpoints(case)
        # Usually damage a few of the newest checkpoints, sometimes all checkpoints.
        count = rng.choice([1, 1, 2, 3, len(found)])
        for checkpoint in found[:count]:
            if checkpoint.exists():
                DAMAGES[damage](case, checkpoint, rng)
        return self._resume(case, rng, self._undamaged_steps(case))

    def _resume(self, case: Path, rng: Random, valid_steps: list[int]) -> str:
        """Resume a copy whose valid checkpoints are those of `valid_steps`, and return the outcome. Raise
        AssertionError for a wrong outcome."""
        newest = max(valid_steps, default=0)
        settings = Settings(asynchronous=rng.random() < 0.5, keep_last=rng.choice([None, 1, 2]))
        with _backend() as backend:
            try:
                trainer = create_trainer(backend, case, settings)
            except CheckpointError as error:
                _check_message(error)
                # A flipped bit in the manifest may change the format to a newer version. Such checkpoints must not be
                # skipped.
                if newest and os.access(case, os.W_OK, effective_ids=True) and "newer unitrain" not in str(error):
                    raise AssertionError(
                        f"rejected, although the checkpoint of step {newest} is valid: {error}"
                    ) from error
                return REJECTED
            step = trainer.progress.step
            if step < newest:
                raise AssertionError(f"resumed from step {step}, although the checkpoint of step {newest} is valid")
            if step and not _has_state(
                trainer.model.state_dict(), trainer.optimizer.state_dict(), self._state_by_step[step]
            ):
                raise AssertionError(f"resumed from step {step} with a different state")
            if not step and files.list_checkpoints(case):
                raise AssertionError("started from the beginning although damaged checkpoints exist")
            trainer.fit(data())
        weight_difference = difference(final_weights(case), self._expected_weights)
        if weight_difference > 1e-6:
            raise AssertionError(f"resumed from step {step}, and the final weights differ by {weight_difference}")
        return NEWEST if step == max(self._content_by_step) else OLDER

    def _undamaged_steps(self, case: Path) -> list[int]:
        """Return the steps of checkpoints whose files are all byte-identical to the original files."""
        return [
            step for step, content in self._content_by_step.items() if _read_files(case / f"step-{step:09d}") == content
        ]

    def _resume_in_read_only_folder(self, case: Path, rng: Random) -> str:
        shutil.copytree(self._base, case)
        shutil.rmtree(files.list_checkpoints(case)[0])
        valid_steps = self._undamaged_steps(case)
        case.chmod(0o555)
        try:
            with _as_nobody():
                outcome = self._resume(case, rng, valid_steps)
        finally:
            case.chmod(0o755)
        if outcome != REJECTED:
            raise AssertionError("a folder without write permission was accepted")
        if self._resume(case, rng, valid_steps) != OLDER:  # the folder is writable again
            raise AssertionError("the run did not resume from an older checkpoint after the folder was writable again")
        return outcome

    def _resume_on_full_disk(self, case: Path, rng: Random) -> str:
        case.mkdir()
        with _small_file_system(case, "8m") as mounted:
            if not mounted:
                return SKIPPED
            run, ballast = case / "run", case / "ballast"
            shutil.copytree(self._base, run)
            for checkpoint in files.list_checkpoints(run)[: rng.randint(2, 8)]:
                shutil.rmtree(checkpoint)
            free = os.statvfs(case).f_bavail * os.statvfs(case).f_frsize
            ballast.write_bytes(bytes(max(0, free - rng.randrange(0, 60_000))))
            newest = max(self._undamaged_steps(run))
            with _backend() as backend:
                try:
                    create_trainer(backend, run, Settings(asynchronous=rng.random() < 0.5)).fit(data())
                    outcome = OLDER
                except CheckpointError as error:
                    _check_message(error)
                    outcome = REJECTED
            if max(self._valid_steps(run)) < newest:
                raise AssertionError(f"the valid checkpoint of step {newest} was removed")
            ballast.unlink()
            if self._resume(run, rng, self._undamaged_steps(run)) == REJECTED:
                raise AssertionError("the run did not resume after disk space was freed")
        return outcome

    def _valid_steps(self, run: Path) -> list[int]:
        return [_step(path) for path in files.list_checkpoints(run) if files.find_corruption(path) is None]


def _choose_file(checkpoint: Path, rng: Random) -> Path:
    return rng.choice(sorted(path for path in checkpoint.iterdir() if path.stat().st_size))


def _swap(one: Path, other: Path) -> None:
    aside = one.with_name(".aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _read_files(checkpoint: Path) -> dict[str, bytes]:
    if not checkpoint.is_dir():
        return {}
    return {path.name: path.read_bytes() for path in checkpoint.iterdir()}


def _read_state(checkpoint: Path) -> tuple[dict[str, Tensor], Any]:
    """Read the weights and the optimizer state with torch and safetensors only."""
    return load_file(checkpoint / MODEL), torch.load(checkpoint / TRAINING, weights_only=True)["optimizer"]


def _has_state(weights: dict[str, Tensor], optimizer: dict[str, Any], known: tuple[dict[str, Tensor], Any]) -> bool:
    known_weights, known_optimizer = known
    moments = [state["momentum_buffer"] for state in optimizer["state"].values()]
    known_moments = [state["momentum_buffer"] for state in known_optimizer["state"].values()]
    return difference(weights, known_weights) == 0 and all(map(torch.equal, moments, known_moments))


def _check_message(error: CheckpointError) -> None:
    if len(str(error).split(". ")) < 2 or "'" not in str(error):
        raise AssertionError(f"the message does not contain the problem and a fix: {error}") from error


@contextmanager
def _backend() -> Iterator[Backend]:
    with unitrain.init("local", device="cpu") as backend:
        yield backend


@contextmanager
def _as_nobody() -> Iterator[None]:
    """Drop root privileges, because root can write to read-only folders."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def _small_file_system(folder: Path, size: str) -> Iterator[bool]:
    """Mount a file system of this size at `folder`. Yield False if this process does not have permission to mount."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = False
    with contextlib.suppress(OSError):
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)
