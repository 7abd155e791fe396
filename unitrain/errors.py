"""The errors that unitrain raises intentionally, except those of `unitrain.launchers`, which has its own classes. A few
other modules define subclasses for their own use.

The first sentence of a message states what was requested and found; the second suggests a fix that can be pasted. Each
class also subclasses a builtin exception, so that `except ValueError` in a user's script catches it.

    UnitrainError
    ├── ConfigError                 (ValueError)    invalid setting or argument, or invalid combination
    │   ├── UnknownBackendError     (LookupError)   unknown name of a backend
    │   ├── EnvironmentVariableError                invalid environment variable of the launcher or user
    │   └── LauncherMismatchError                   backend and launcher contradict each other
    ├── BackendUnavailableError     (ImportError)   library of a backend is missing or unusable
    ├── MissingDependencyError      (ImportError)   optional package is missing
    ├── HorovodBuildError           (RuntimeError)  Horovod could not be built
    ├── UnsupportedError            (NotImplementedError)  feature that is not supported
    │   └── MissingFeatureError                     feature that the installed torch or Horovod lacks
    ├── TensorError                 (ValueError)    tensor that the operation does not accept
    ├── CollectiveArgumentError     (RuntimeError, ValueError)  arguments that a torch.distributed group does not accept
    ├── CollectiveMismatchError     (RuntimeError)  ranks called different collectives, or passed different arguments
    ├── CollectiveTimeoutError      (TimeoutError)  some ranks did not participate before the timeout
    ├── ModelError                  (ValueError)    model, optimizer or loss that cannot be trained
    │   ├── NonFiniteLossError      (ArithmeticError)
    │   └── NonFiniteGradientError  (ArithmeticError)
    ├── CallbackError               (RuntimeError)  a callback failed
    ├── AuthenticationError         (RuntimeError)  a message does not come from a process of this job
    ├── LoggerError                 (RuntimeError)  a logger cannot be used
    ├── MetricError                 (RuntimeError)  a torchmetrics object failed, or its result is not numeric
    ├── DataError                   (ValueError)    invalid or failing dataset, or predictions that cannot be written
    ├── CheckpointError             (OSError)       checkpoint that cannot be written or restored
    ├── ReportError                 (ValueError)    folder without the record of a run, or with a corrupt one
    ├── FunctionError               (ValueError)    function or argument that cannot be sent to ranks
    └── RankFailedError             (RuntimeError)  a rank of `unitrain.run` failed
"""

from __future__ import annotations

import difflib
import logging
import sys
from collections.abc import Iterable

_logger = logging.getLogger(__name__)

# Exit code of preempted ranks after a checkpoint: EX_TEMPFAIL of sysexits.h. `unitrain.launchers.errors` has a copy,
# because it imports nothing from the other packages.
PREEMPTED_EXIT_CODE = 75


def add_note(error: BaseException, note: str) -> None:
    """Append a line to the traceback of `error`. Python 3.10, whose tracebacks have no notes, logs the line."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        _logger.warning("%s: %s", type(error).__name__, note)


class UnitrainError(Exception):
    """Base of the errors in this module, except Preempted.

    Attributes:
        failed_rank: The rank that caused the error, if this rank raises the error because of another rank; otherwise
            None.
    """

    failed_rank: int | None = None


class ConfigError(UnitrainError, ValueError):
    """A setting, an argument, or a combination of them is invalid."""


class UnknownBackendError(ConfigError, LookupError):
    """No backend has that name."""


class EnvironmentVariableError(ConfigError):
    """The value of an environment variable is invalid."""


class LauncherMismatchError(ConfigError):
    """The requested backend does not match the launcher that started this process."""


class BackendUnavailableError(UnitrainError, ImportError):
    """The library of a backend is missing or cannot be used on this machine."""


class MissingDependencyError(UnitrainError, ImportError):
    """An optional package is missing."""


class HorovodBuildError(UnitrainError, RuntimeError):
    """Horovod could not be built for the installed torch."""


class UnsupportedError(UnitrainError, NotImplementedError):
    """The backend, the device or the Trainer does not support the requested feature."""


class MissingFeatureError(UnsupportedError):
    """The installed torch or Horovod lacks an API or a patch that the requested feature requires. Raised on every rank,
    before communication."""


class TensorError(UnitrainError, ValueError):
    """A tensor has a dtype, shape or layout that the operation does not accept."""


class CollectiveArgumentError(UnitrainError, RuntimeError, ValueError):
    """A method of a torch.distributed group got lists, tensors or a root that it does not accept.

    This error is a RuntimeError, like the errors of torch's own process groups.
    """


class CollectiveMismatchError(UnitrainError, RuntimeError):
    """The ranks called different collectives, or passed different arguments. Raised on every rank."""


class CollectiveTimeoutError(UnitrainError, TimeoutError):
    """Some ranks did not join a collective, a backward pass or the rendezvous within the timeout, or exited before they
    joined it."""


class ModelError(UnitrainError, ValueError):
    """A model, an optimizer or a loss cannot be trained."""


class NonFiniteLossError(ModelError, ArithmeticError):
    """The loss became NaN or infinite."""


class NonFiniteGradientError(ModelError, ArithmeticError):
    """A gradient became NaN or infinite."""


class CallbackError(UnitrainError, RuntimeError):
    """A callback raised an exception, which is the `__cause__` of this error."""


class AuthenticationError(UnitrainError, RuntimeError):
    """A message was not sent by a process of this job."""


class LoggerError(UnitrainError, RuntimeError):
    """A logger cannot be used."""


class MetricError(UnitrainError, RuntimeError):
    """A torchmetrics object failed, or its result is not a number, a vector or a dictionary of these."""


class DataError(UnitrainError, ValueError):
    """A dataset is invalid, raises an error, or cannot be sharded; or predictions cannot be written."""


class CheckpointError(UnitrainError, OSError):
    """A checkpoint cannot be written or read, or does not match the objects into which it is loaded."""


class ReportError(UnitrainError, ValueError):
    """A folder has no record of a run, or the record is corrupt."""


class FunctionError(UnitrainError, ValueError):
    """A function, its arguments or its result cannot be transferred between processes."""


class RankFailedError(UnitrainError, RuntimeError):
    """A rank of `unitrain.run` failed. `rank` is the first rank that failed; its exception is the `__cause__` of this
    error.

    Also raised if a function of the user, such as a metric, raised an exception on rank `rank` that cannot be pickled.
    `rank` is None if no rank raised an exception, for example because a process was killed.
    """

    def __init__(self, text: str, rank: int | None = None) -> None:
        super().__init__(text)
        self.rank = rank


class Preempted(SystemExit):
    """A signal stopped the run, which has saved a checkpoint. The exit code is PREEMPTED_EXIT_CODE, 75.

    It is not a UnitrainError, because preemption is not a failure.
    """

    def __init__(self, reason: str | None) -> None:
        super().__init__(PREEMPTED_EXIT_CODE)
        self.reason = reason


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return "Did you mean ...? " with the choice closest to `name`, or an empty string if none is close."""
    close_matches = difflib.get_close_matches(name, list(choices), n=1)
    return f"Did you mean {close_matches[0]!r}? " if close_matches else ""
