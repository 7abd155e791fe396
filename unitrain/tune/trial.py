"""What is asked of a run that is timed, in a variable of its environment, and what it tells, in a line that it
prints."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

# The function that the ranks of a timed run call, see `trainer_overrides`.
TIMER = "unitrain.tune.timer:create_timer"
# Before what a run tells; a launcher may put its own before that.
_MARK = "unitrain tune: "


@dataclass(frozen=True, kw_only=True)
class Request:
    """Train `warmup` steps, then time steps for about `seconds`, and end. `compression` replaces the script's own, and
    `name` is that of this run alone."""

    name: str
    warmup: int
    seconds: float
    compression: str | None = None

    def text(self) -> str:
        """Return it as the value of a variable."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Request:
        """Return what the value of a variable says."""
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class Result:
    """Seconds of a step on the slowest rank, over `steps` steps, and what it ran on; `threads` of a rank, None on a
    GPU."""

    seconds_per_step: float
    steps: int
    backend: str
    transport: str
    size: int
    num_nodes: int
    threads: int | None
    cores_per_rank: int

    def text(self) -> str:
        """Return it as a line to print."""
        return _MARK + json.dumps(asdict(self))

    @classmethod
    def find(cls, output: str) -> Result | None:
        """Return what a run has printed, None where it has not come that far."""
        for line in output.splitlines():
            _, found, text = line.partition(_MARK)
            if found:
                return cls(**json.loads(text))
        return None
