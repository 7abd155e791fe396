"""What passes between `unitrain.run` and its ranks: a call on the way there, an outcome on the way back.

Functions go by value where no other process could import them, as those of a notebook or of the program itself.
"""

from __future__ import annotations

import linecache
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle

from unitrain.errors import FunctionError

_CALL = "call"
_OUTCOME = "outcome"


@dataclass(frozen=True)
class Call:
    """A function with its arguments, as `load` finds it."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        """Leave the call in `folder` for the ranks. Raises FunctionError for what cannot be sent to them."""
        try:
            content = cloudpickle.dumps(self)
        except Exception as error:
            name = getattr(self.function, "__name__", repr(self.function))
            raise FunctionError(
                f"{name} or its arguments cannot be sent to the ranks: {type(error).__name__}: {error}. "
                f"Make inside of {name} what belongs to one process: files, locks, connections, loaders at work."
            ) from error
        # What a rank needs before it can read the rest: where this process imports from, and the text of the cells of a
        # notebook, which no file has, for tracebacks.
        cells = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and not Path(name).exists()}
        (folder / _CALL).write_bytes(pickle.dumps((sys.path, cells, content)))

    @staticmethod
    def load(folder: Path) -> Call:
        """Return the call that was left in `folder`, and let this process import from where its writer did."""
        paths, cells, content = pickle.loads((folder / _CALL).read_bytes())
        sys.path[:] = paths
        linecache.cache.update(cells)
        call: Call = pickle.loads(content)
        return call


@dataclass(frozen=True)
class Outcome:
    """What became of the call on one rank: its `result`, or the `error` with its `trace` as text, and when."""

    result: Any = None
    error: BaseException | None = None
    trace: str = ""
    time: float = field(default_factory=time.time)

    @classmethod
    def of(cls, error: BaseException) -> Outcome:
        """Return the outcome of a call that raised `error`, without the frames of what made the call."""
        own = error.__traceback__
        while own is not None and own.tb_frame.f_code.co_filename.startswith(str(Path(__file__).parent)):
            own = own.tb_next
        return cls(error=error, trace="".join(traceback.format_exception(type(error), error, own)))

    def write(self, folder: Path, rank: int) -> None:
        """Leave the outcome of `rank` in `folder`. Raises FunctionError for a result that cannot be sent back."""
        try:
            content = cloudpickle.dumps(self)
        except Exception as error:
            if self.error is None:
                raise FunctionError(
                    f"What rank {rank} returned cannot be sent back: {type(error).__name__}: {error}. "
                    "Return numbers, tensors or state dicts, not what belongs to the process."
                ) from error
            content = cloudpickle.dumps(Outcome(error=RuntimeError(repr(self.error)), trace=self.trace, time=self.time))
        unfinished = folder / f"unfinished-{rank}"
        unfinished.write_bytes(content)
        unfinished.rename(folder / f"{_OUTCOME}-{rank}")

    @staticmethod
    def load_all(folder: Path, size: int) -> dict[int, Outcome]:
        """Return the outcomes in `folder` by rank, of as many of `size` ranks as have left one."""
        found: dict[int, Outcome] = {}
        for rank in range(size):
            path = folder / f"{_OUTCOME}-{rank}"
            if path.exists():
                found[rank] = _read(path)
        return found


def _read(path: Path) -> Outcome:
    try:
        outcome: Outcome = pickle.loads(path.read_bytes())
    except Exception as error:  # such as an exception whose class wants more arguments than it keeps
        return Outcome(error=error, trace=f"what {path.name} says cannot be read here: {type(error).__name__}: {error}")
    return outcome
