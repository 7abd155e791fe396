"""Raise the same error on every rank when an error or a difference occurs only on some ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, TypeVar

import torch

from unitrain.backends.base import Backend, Communicator
from unitrain.errors import RankFailedError, add_note

ResultT = TypeVar("ResultT")


def raise_on_all_ranks(communicator: Communicator, error: Exception | None) -> None:
    """Raise an error on every rank if any rank passes an error. All ranks raise the error of the lowest such rank.

    All ranks must call this function, and pass None if they have no error. Use it for errors that only some ranks can
    detect, such as a missing folder, and for exceptions of the user's functions. An error that cannot be pickled is
    raised as a RankFailedError on the other ranks.
    """
    # A sum requires one exchange for any number of ranks.
    if not communicator.allreduce(torch.tensor(float(error is not None), device="cpu"), "sum"):
        return
    errors = communicator.allgather_object(None if error is None else _to_picklable(error, communicator.rank))
    for rank, rank_error in enumerate(errors):
        if rank_error is not None:
            if error is not None and rank == communicator.rank:
                rank_error = error  # pickling drops the cause and the traceback
            elif None in errors:
                add_note(rank_error, f"Rank {rank} raised this error, and all ranks raise it.")
                if isinstance(communicator, Backend):  # another communicator may number its ranks differently
                    rank_error.failed_rank = rank
            if error is None or rank_error is error:
                raise rank_error
            # This rank has an error, too, which explains where it failed.
            raise rank_error from error.__cause__ or error


class ErrorOnAllRanks(Exception):  # noqa: N818, not raised to the user
    """Wraps an error of `call_on_all_ranks` inside a function that is itself called by `call_on_all_ranks`, which then
    raises `error` without exchanging it again."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def call_on_all_ranks(communicator: Communicator, function: Callable[[], ResultT]) -> ResultT:
    """Call `function` and return its result. If it raises an exception on any rank, raise that exception on every rank.
    All ranks must call this function.

    Exceptions that are not subclasses of Exception, such as KeyboardInterrupt, are raised on this rank only.
    """
    problem: Exception | None = None
    try:
        result = function()
    except ErrorOnAllRanks as nested:
        problem = nested.error
        raise problem from problem.__cause__
    except Exception as error:
        problem = error
    try:
        raise_on_all_ranks(communicator, problem)
        # A rank of a communicator may represent several processes, and the communicator compares only one of them.
        if problem is not None:
            raise problem
    finally:
        del problem  # the traceback refers to this frame
    return result


def _to_picklable(error: Exception, rank: int) -> Exception:
    """Return `error`, or a RankFailedError with its text if its class cannot be unpickled."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:  # the user's class may raise any exception
        pass
    return RankFailedError(f"Rank {rank} failed: {type(error).__name__}: {error}. Fix the error on that rank.", rank)


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
