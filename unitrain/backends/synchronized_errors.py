"""Raise the same error on every rank when an error or a difference occurs only on some ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, TypeVar

import torch

from unitrain.backends.base import Backend, Communicator
from unitrain.errors import UnitrainError, add_note

ResultT = TypeVar("ResultT")


def raise_on_all_ranks(communicator: Communicator, error: UnitrainError | None) -> None:
    """Raise an error on every rank if any rank passes an error. All ranks raise the error of the lowest such rank.

    All ranks must call this function, and pass None if they have no error. Use it for errors that only some ranks can
    detect, such as a missing folder.
    """
    # A sum requires one exchange for any number of ranks.
    if not communicator.allreduce(torch.tensor(float(error is not None), device="cpu"), "sum"):
        return
    errors = communicator.allgather_object(error)
    for rank, rank_error in enumerate(errors):
        if rank_error is not None:
            if error is not None and rank == communicator.rank:
                raise error  # pickling drops the cause and the traceback
            if None in errors:
                add_note(rank_error, f"Rank {rank} raised this error, and all ranks raise it.")
                if isinstance(communicator, Backend):  # another communicator may number its ranks differently
                    rank_error.failed_rank = rank
            raise rank_error


def call_on_all_ranks(communicator: Communicator, function: Callable[[], ResultT]) -> ResultT:
    """Call `function` and return its result. If it raises a UnitrainError on any rank, raise that error on every rank.
    All ranks must call this function."""
    problem: UnitrainError | None = None
    try:
        result = function()
    except UnitrainError as error:
        problem = error
    raise_on_all_ranks(communicator, problem)
    # A rank of a communicator may represent several processes, and the communicator compares only one of them.
    if problem is not None:
        raise problem
    return result


def gather_if_different(communicator: Communicator, value: Any) -> list[Any] | None:
    """Return None if all ranks pass the same picklable `value`, and otherwise every rank's value, in rank order.

    All ranks must call this function. If the values are equal, one small allreduce is needed. Values are compared by
    their pickled bytes, so equal dictionaries in a different order count as different.
    """
    try:
        content = pickle.dumps(value)
    except Exception:  # allgather_object raises the error on every rank
        fingerprint, is_unpicklable = 0, 1
    else:
        fingerprint, is_unpicklable = int.from_bytes(blake2b(content, digest_size=8).digest(), "little") >> 2, 0
    largest, negated_smallest, any_unpicklable = communicator.allreduce(
        torch.tensor([fingerprint, -fingerprint, is_unpicklable], device="cpu"), "max"
    ).tolist()
    if largest == -negated_smallest and not any_unpicklable:
        return None
    return communicator.allgather_object(value)
