"""Every error unitrain raises on purpose, as one tree.

The first sentence of a message says what was asked and what was found; the second can be pasted. Each class is also the
builtin it is, so that `except ValueError` in a user's script keeps working. Anything else that escapes is our own
mistake.

    UnitrainError
    ├── ConfigError                 (ValueError)    a setting, argument or combination of them
    │   ├── UnknownBackendError     (LookupError)   no backend of that name
    │   ├── EnvironmentVariableError                a variable that a launcher or the user set
    │   └── LauncherMismatchError                   backend and launcher contradict each other
    ├── BackendUnavailableError     (ImportError)   a backend's library is missing or unusable here
    ├── MissingDependencyError      (ImportError)   an optional package is missing
    ├── HorovodBuildError           (RuntimeError)  Horovod could not be built
    ├── UnsupportedError            (NotImplementedError)  this backend cannot do that
    ├── TensorError                 (ValueError)    a tensor that an operation cannot take
    ├── CollectiveMismatchError     (RuntimeError)  the ranks did not call the same collective alike
    ├── CollectiveTimeoutError      (TimeoutError)  ranks that did not come in time
    ├── ModelError                  (ValueError)    a model, optimizer or loss that cannot be trained as given
    │   ├── NonFiniteLossError      (ArithmeticError)
    │   └── NonFiniteGradientError  (ArithmeticError)
    ├── CallbackError               (RuntimeError)  a callback failed
    ├── LoggerError                 (RuntimeError)  a logger cannot be started
    ├── MetricError                 (RuntimeError)  a torchmetrics object failed, or gave no numbers
    ├── DataError                   (ValueError)    a dataset that cannot be shared out
    ├── CheckpointError             (OSError)       a checkpoint that cannot be written or restored
    └── ReportError                 (ValueError)    a folder without the record of a run, or with a damaged one
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UnitrainError(Exception):
    """Base of every error unitrain raises on purpose."""


class ConfigError(UnitrainError, ValueError):
    """A setting, an argument, or a combination of them is wrong."""


class UnknownBackendError(ConfigError, LookupError):
    """No backend of that name is known."""


class EnvironmentVariableError(ConfigError):
    """An environment variable holds something unusable."""


class LauncherMismatchError(ConfigError):
    """The backend that was asked for contradicts the launcher that started this process."""


class BackendUnavailableError(UnitrainError, ImportError):
    """The library behind a backend is missing, or cannot run here."""


class MissingDependencyError(UnitrainError, ImportError):
    """An optional package is missing."""


class HorovodBuildError(UnitrainError, RuntimeError):
    """Horovod could not be built for the installed torch."""


class UnsupportedError(UnitrainError, NotImplementedError):
    """The backend in use cannot do what was asked."""


class TensorError(UnitrainError, ValueError):
    """A tensor has a dtype, shape or layout that the operation cannot take."""


class CollectiveMismatchError(UnitrainError, RuntimeError):
    """The ranks did not call the same collective with matching arguments; raised on every rank."""


class CollectiveTimeoutError(UnitrainError, TimeoutError):
    """Some ranks did not reach a meeting point within the stated time."""


class ModelError(UnitrainError, ValueError):
    """A model, an optimizer or a loss cannot be trained as it was given."""


class NonFiniteLossError(ModelError, ArithmeticError):
    """The loss became NaN or infinite."""


class NonFiniteGradientError(ModelError, ArithmeticError):
    """A gradient became NaN or infinite."""


class CallbackError(UnitrainError, RuntimeError):
    """A callback raised an error, which is its cause."""


class AuthenticationError(UnitrainError, RuntimeError):
    """A message does not come from a process of this job."""


class LoggerError(UnitrainError, RuntimeError):
    """A logger cannot be started."""


class MetricError(UnitrainError, RuntimeError):
    """A torchmetrics object failed, or its result is not made of numbers."""


class DataError(UnitrainError, ValueError):
    """A dataset cannot be shared out as it was given."""


class CheckpointError(UnitrainError, OSError):
    """A checkpoint cannot be written, or does not fit what it is loaded into."""


class ReportError(UnitrainError, ValueError):
    """A folder holds no run to report on, or a record that is damaged."""


class FunctionError(UnitrainError, ValueError):
    """A function, or what is to be given to it, cannot be sent to the ranks."""


class RankFailedError(UnitrainError, RuntimeError):
    """A rank of `unitrain.run` failed; `rank` is the one that failed first, and its exception the cause of this one.

    `rank` is None where no rank has told of an exception, as where a process was killed.
    """

    def __init__(self, text: str, rank: int | None = None) -> None:
        super().__init__(text)
        self.rank = rank


class Preempted(SystemExit):
    """A run was stopped by a signal and has left a checkpoint; the program ends with 75, "try again later".

    It is EX_TEMPFAIL of sysexits.h, and no UnitrainError: nothing went wrong.
    """

    def __init__(self, reason: str | None) -> None:
        super().__init__(75)
        self.reason = reason


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """The sentence part that suggests the nearest of `choices`, or an empty string; ends in a space when not empty."""
    near = difflib.get_close_matches(name, list(choices), n=1)
    return f"Did you mean {near[0]!r}? " if near else ""
