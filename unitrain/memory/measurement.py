"""Run a script with the recorder, and read the records of its ranks."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import unitrain
from unitrain.bootstrap import environment
from unitrain.bootstrap.overrides import OVERRIDES_VARIABLE, overrides_setting
from unitrain.errors import ConfigError
from unitrain.memory.record import RECORDER, MemoryRequest, RankMemory, read_records
from unitrain.verify.commands import last_lines, run_command

_PROGRAM = Path(__file__).with_name("run_script.py")


def measure(
    script: str, args: Sequence[str], *, launch_options: Sequence[str], request: MemoryRequest, timeout_seconds: float
) -> list[RankMemory]:
    """Run `script` with `args` under `unitrain launch` on this host, and return the record of each rank.

    The run ends after the requested steps, and is terminated after `timeout_seconds`. Raises ConfigError with the last
    lines of the output if the run fails, or if the record of any rank is missing.
    """
    with tempfile.TemporaryDirectory(prefix="unitrain-memory-") as name:
        folder = Path(name)
        request.write(folder)
        overrides = {OVERRIDES_VARIABLE: overrides_setting(RECORDER, name)}
        exports = [word for variable in overrides.items() for word in ("-x", "=".join(variable))]
        program = str(Path(unitrain.__file__).with_name("__main__.py"))
        command = [
            sys.executable, program, "launch", "--untuned", *launch_options, *exports, str(_PROGRAM), name, script,
            *args,
        ]  # fmt: skip
        ended = run_command(
            command,
            environment.without_launcher_variables() | overrides,
            marker_variable=OVERRIDES_VARIABLE,
            script=str(_PROGRAM),
            output=folder / "output.txt",
            timeout_seconds=timeout_seconds,
        )
        records = read_records(folder)
        if ended.exit_code == 0 and records is not None:
            return records
        steps = request.warmup_steps + 1
        if ended.exit_code is None:
            end = f"did not finish within {timeout_seconds:g} s and was terminated. Increase --timeout-seconds"
        elif ended.exit_code:
            end = f"ended with exit code {ended.exit_code}"
        else:
            end = f"ended before {steps} optimizer steps of torch.optim. Train longer"
        lines = "\n".join(last_lines(ended.output))
        raise ConfigError(f"The run of {script} {end}. Its last lines:\n{lines}")
