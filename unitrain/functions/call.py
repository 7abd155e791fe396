"""Files that transfer the call of `unitrain.run` to the ranks and the outcomes back.

Functions that other processes cannot import, such as functions in a notebook or `__main__`, are pickled by value.
"""

from __future__ import annotations

import linecache
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from traceback import format_exception
from typing import Any

import cloudpickle

from unitrain.errors import FunctionError

_CALL = "call"
_OUTCOME = "outcome"


@dataclass(frozen=True)
class FunctionCall:
    """A function with its arguments."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        """Store the call in `folder`. Raises FunctionError if the function or an argument cannot be pickled."""
        try:
            content = cloudpickle.dumps(self)
        except Exception as error:
            name = getattr(self.function, "__name__", repr(self.function))
            raise FunctionError(
                f"{name} or its arguments cannot be sent to the ranks: {type(error).__name__}: {error}. "
                f"Inside {name}, create the files, locks, connections, iterators and other objects that belong to one "
                "process."
            ) from error
        # A rank needs the import path of this process to unpickle the call. Notebook cells have no source file, so
        # their source is included for tracebacks.
        cells = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and not Path(name).exists()}
        (folder / _CALL).write_bytes(pickle.dumps((sys.path, cells, content)))

    @staticmethod
    def load(folder: Path) -> FunctionCall:
        """Load the call from `folder`, and set `sys.path` to the import path of the calling process."""
        paths, cells, content = pickle.loads((folder / _CALL).read_bytes())
        sys.path[:] = paths
        linecache.cache.update(cells)
        call: FunctionCall = pickle.loads(content)
        return call


@dataclass(frozen=True)
class CallOutcome:
    """Outcome of the call on one rank: the `result`, or the `error` with its traceback as text, and a timestamp."""

    result: Any = None
    error: BaseException | None = None
    traceback: str = ""
    time: float = field(default_factory=time.time)

    @classmethod
    def from_error(cls, error: BaseException) -> CallOutcome:
        """Create the outcome of a call that raised `error`. The traceback starts after the frames of
        `unitrain.functions`."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(str(Path(__file__).parent)):
            trace = trace.tb_next
        return cls(error=error, traceback="".join(format_exception(type(error), error, trace)))

    def write(self, folder: Path, rank: int) -> None:
        """Store the outcome of `rank` in `folder`. Raises FunctionError for a result that cannot be pickled.

        An error that cannot be pickled or unpickled is replaced by a RuntimeError with its representation.
        """
        try:
            content = cloudpickle.dumps(self)
            if self.error is not None:
                pickle.loads(content)  # fails if the error's constructor needs arguments that `args` does not contain
        except Exception as error:
            if self.error is None:
                raise FunctionError(
                    f"The result of rank {rank} cannot be sent back: {type(error).__name__}: {error}. "
                    "Return numbers, tensors or state dicts, not open files, locks or connections."
                ) from error
            substitute = RuntimeError(repr(self.error))
            content = cloudpickle.dumps(CallOutcome(error=substitute, traceback=self.traceback, time=self.time))
        partial_file = folder / f"partial-{rank}"
        partial_file.write_bytes(content)
        partial_file.rename(folder / f"{_OUTCOME}-{rank}")

    @staticmethod
    def load_all(folder: Path, size: int) -> dict[int, CallOutcome]:
        """Return {rank: outcome} for all outcomes stored in `folder`. An outcome that cannot be unpickled is replaced
        by an outcome that contains the unpickling error."""
        outcomes: dict[int, CallOutcome] = {}
        for rank in range(size):
            path = folder / f"{_OUTCOME}-{rank}"
            if path.exists():
                outcomes[rank] = _read_outcome(path)
        return outcomes


def _read_outcome(path: Path) -> CallOutcome:
    try:
        outcome: CallOutcome = pickle.loads(path.read_bytes())
    except Exception as error:  # for example, a class that only the rank can import
        return CallOutcome(error=error, traceback=f"{path.name} cannot be unpickled: {type(error).__name__}: {error}")
    return outcome
