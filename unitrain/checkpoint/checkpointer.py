"""Checkpoints that any backend and any number of ranks can go on from: rank 0 has the files, all ranks the outcome."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from unitrain.backends.base import Communicator
from unitrain.backends.objects import broadcast_tensors
from unitrain.backends.synchronized_errors import raise_on_all_ranks
from unitrain.checkpoint import files, job
from unitrain.checkpoint.folder_lock import FolderLock
from unitrain.data.batch_size import ElasticBatchSize
from unitrain.errors import CheckpointError

GRADIENTS = "gradients"
# How long the other ranks are left waiting in one collective while rank 0 waits for something else.
PATIENCE_SECONDS = 1.0
WRITABLE = "Check that the folder is writable and has room, or choose another output_dir."
_DAMAGED = "A file in the folder may be damaged: restore or remove it, or choose another output_dir."

_ResultT = TypeVar("_ResultT")


def on_rank_zero(communicator: Communicator, task: str, fix: str, action: Callable[[], _ResultT]) -> _ResultT | None:
    """Run `action` on rank 0 and return its result there, None elsewhere. All ranks call it, and learn of a failure.

    Raises CheckpointError on every rank when `action` fails: "Cannot `task`: ... `fix`".
    """
    result: _ResultT | None = None
    error: CheckpointError | None = None
    if communicator.rank == 0:
        try:
            result = action()
        except CheckpointError as caught:
            error = caught
        except Exception as caught:  # whatever it is, the other ranks would wait for ever if it left on this one alone
            remedy = fix if fix != WRITABLE or isinstance(caught, OSError) else _DAMAGED
            error = CheckpointError(f"Cannot {task}: {type(caught).__name__}: {caught}. {remedy}")
            error.__cause__ = caught
    raise_on_all_ranks(communicator, error)
    return result


def prepare_folder(folder: Path, communicator: Communicator, *, resume: bool) -> tuple[bool, list[ElasticBatchSize]]:
    """Make `folder` and prove that it can be written to, before training begins; tell whether to go on from there.

    That is so with `resume`, and where an earlier attempt of the same job has been there. Return also what is kept of
    the batches of each call of `fit`, see `job`. Nothing in the folder is changed, because another job may be writing
    to it: `take_folder` finds that out. All ranks call it. Raises CheckpointError on every rank when the folder cannot
    be written to, or when it holds another run's checkpoints.
    """

    def prepare() -> tuple[bool, list[ElasticBatchSize]]:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}.unfinished"
        probe.mkdir()
        probe.rmdir()
        found, goes_on = files.candidates(folder), resume or job.is_own(folder)
        if found and not goes_on:
            raise CheckpointError(
                f"Output folder '{folder}' already holds a run, up to {found[0].name}. "
                "Use TrainConfig(resume=True) to go on from there, or another output_dir."
            )
        return goes_on, job.kept_batches(folder)

    prepared = on_rank_zero(communicator, f"write to output folder '{folder}'", WRITABLE, prepare)
    answer: tuple[bool, list[ElasticBatchSize]] = communicator.broadcast_object(prepared)
    return answer


def load_weights(path: Path, model: nn.Module, average: nn.Module | None, communicator: Communicator) -> None:
    """Load the weights of the checkpoint `path`, or of the newest in the run `path`, into `model` on every rank.

    The averaged weights are loaded into `average`, if there is one. Rank 0 reads the files. All ranks call it. Raises
    CheckpointError on every rank if there is no sound checkpoint or if it does not fit.
    """

    def load() -> None:
        found = files.newest_valid(path, required=True)
        assert found is not None
        files.load_weights(found, model, average)

    on_rank_zero(communicator, f"load the weights of '{path}'", "Build the model that wrote it.", load)
    with torch.no_grad():
        for module in [model] if average is None else [model, average]:
            for tensor in (*module.parameters(), *module.buffers()):
                broadcast_tensors(communicator, [tensor])  # one by one, to hold no second copy of the model


def take_folder(folder: Path, lock: FolderLock, communicator: Communicator) -> None:
    """Lock `folder` for this process, mark it as this job's, and remove what a killed run has left unfinished there.

    All ranks call it. Raises CheckpointError on every rank where another job holds the lock.
    """

    def take() -> bool:
        if not lock.take(PATIENCE_SECONDS):
            return False
        files.remove_unfinished(folder)
        job.mark(folder)
        return True

    # The other ranks hear now and then that rank 0 still waits, which may take longer than a collective may.
    while not communicator.broadcast_object(
        on_rank_zero(communicator, f"write to output folder '{folder}'", WRITABLE, take)
    ):
        pass


def restore(
    where: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    communicator: Communicator,
    *,
    required: bool,
) -> dict[str, Any] | None:
    """Load the newest sound checkpoint in `where`, or the one that `where` is, and return its `training` part.

    All ranks call it and get the same answer, None where there is no checkpoint and none is `required`. Only rank 0
    reads files, and only its `model` and `optimizer` are loaded: `distributed_model` and `distributed_optimizer` pass
    them on; so is the state of gradients, which may be many times as large as the model, and is in rank 0's answer
    only. Every rank's `scheduler` is loaded. Raises CheckpointError on every rank when nothing sound is found, or
    when it does not fit.
    """

    def load() -> dict[str, Any] | None:
        path = files.newest_valid(where, required=required)
        return None if path is None else files.load(path, model, optimizer, scheduler)

    fix = "Read it with the versions of torch and unitrain that wrote it."
    training: dict[str, Any] | None = on_rank_zero(communicator, f"restore from '{where}'", fix, load)
    gradients = None if training is None else training.pop(GRADIENTS, None)
    training = communicator.broadcast_object(training)
    if training is not None and gradients is not None:
        training[GRADIENTS] = gradients
    if training is not None:
        problem: CheckpointError | None = None
        if "scheduler" in training and scheduler is not None and communicator.rank != 0:
            try:
                scheduler.load_state_dict(copy.deepcopy(training["scheduler"]))
            except Exception as error:  # otherwise this rank alone would raise it, and the others would wait
                name, found = type(scheduler).__name__, f"{type(error).__name__}: {error}"
                problem = CheckpointError(
                    f"Cannot restore from '{where}': {name}.load_state_dict raised {found} on rank "
                    f"{communicator.rank}. Build the scheduler that wrote it on every rank."
                )
                problem.__cause__ = error
        raise_on_all_ranks(communicator, problem)
    return training
