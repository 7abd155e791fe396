"""The request to a timed run, passed in an environment variable, and its result, printed as a line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

# Called by the ranks of a timed run, see `bootstrap.overrides`.
TIMER = "unitrain.tune.timer:create_timer"
# Prefix of the result line. A launcher may prepend its own prefix.
_MARKER = "unitrain tune: "


@dataclass(frozen=True, kw_only=True)
class TrialRequest:
    """Request to train `warmup_steps` steps, then measure steps for about `seconds` seconds, and exit.

    `changes` overrides fields of the script's TrainConfig; the value of "local_sgd" contains the fields of a
    LocalSGDConfig. `name` is unique per run.
    """

    name: str
    warmup_steps: int
    seconds: float
    changes: Mapping[str, Any] = field(default_factory=dict)

    def serialize(self) -> str:
        """Serialize the request to a string."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> TrialRequest:
        """Parse a request from a string."""
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """Seconds per step on the slowest rank, over `steps` steps, and the environment of the run.

    `threads` is the number of threads per rank, or None on a GPU.
    """

    seconds_per_step: float
    steps: int
    backend: str
    transport: str
    size: int
    num_nodes: int
    threads: int | None
    cores_per_rank: int

    def format_line(self) -> str:
        """Return the result as a line to print."""
        return _MARKER + json.dumps(asdict(self))

    @classmethod
    def parse_output(cls, output: str) -> TrialResult | None:
        """Find the result in the output of a run. Return None if the output has no result."""
        for line in output.splitlines():
            _, has_marker, text = line.partition(_MARKER)
            if has_marker:
                # The script may print the marker too, and lines of several ranks may be mixed.
                with contextlib.suppress(ValueError, TypeError):
                    return cls(**json.loads(text))
        return None
