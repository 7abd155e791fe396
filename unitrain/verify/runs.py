"""Execute the runs of a verification sequentially, and compare runs with the same global batch size."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from unitrain.backends import registry
from unitrain.bootstrap import environment
from unitrain.bootstrap.overrides import OVERRIDES_VARIABLE, overrides_setting
from unitrain.errors import ConfigError
from unitrain.verify.commands import last_lines, run_command
from unitrain.verify.record import RECORDER, Record, RecordRequest
from unitrain.verify.verdict import Group, Outcome, RequestedRun, compare_outcomes, resolve_with_float64

FLOAT32_TOLERANCE, FLOAT64_TOLERANCE = 1e-6, 1e-8


class EnvironmentCommand(Protocol):
    """A command line, and variables to add to its environment."""

    @property
    def argv(self) -> Sequence[str]: ...

    @property
    def environment(self) -> Mapping[str, str]: ...


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The settings shared by all runs, whose ranks execute `script`.

    `build_command(run, variables)` returns the launch command of a run with `variables` set on its ranks, and raises
    ConfigError if the run cannot be launched. `report_progress(text)` prints text without a line end. With `bits`, the
    runs record a digest of the bits of each tensor after each step, for `bits.compare_bits`.
    """

    script: str
    steps: int
    tolerance: float
    float64: bool
    timeout_seconds: float
    folder: Path
    build_command: Callable[[RequestedRun, Mapping[str, str]], EnvironmentCommand]
    report_progress: Callable[[str], None]
    bits: bool = False

    def run_all(
        self, sizes: Sequence[int], controllers: Mapping[str, Sequence[str | None]], *, with_local: bool
    ) -> list[Outcome]:
        """Run every backend on each number of ranks in `sizes` with unmodified batch sizes, and return the outcomes.

        For the arguments, see `run_groups`.
        """
        outcomes = [self._run(RequestedRun(backend="local", emulated_ranks=1, processes=1))] if with_local else []
        return [*outcomes, *(outcome for size in sizes for outcome in self._run_backends(controllers, size))]

    def run_groups(
        self, sizes: Sequence[int], controllers: Mapping[str, Sequence[str | None]], *, with_local: bool
    ) -> list[Group]:
        """Run every backend on each number of ranks in `sizes`, and compare the runs per size.

        `controllers` maps each backend to the controllers to launch it with. `with_local` adds a single-process run to
        each group.
        """
        groups = []
        local: Outcome | None = None
        for size in sizes:
            outcomes = list(self._run_backends(controllers, size))
            if with_local:
                if local is None or local.record is None or not local.record.first.has_fixed_global_batch_size:
                    local = self._run_local(size, outcomes)
                outcomes.insert(0, local)
            group = compare_outcomes(size, outcomes, self.tolerance, float64=self.float64)
            groups.append(self._repeat_unclear_runs(group))
        return groups

    def _run_backends(self, controllers: Mapping[str, Sequence[str | None]], size: int) -> Iterator[Outcome]:
        """Run every backend except `local` on `size` ranks, once per controller. On GPUs, also run the backend with
        each of its other transports, if the first run produced a record."""
        for backend, choices in controllers.items():
            for controller in choices if backend != "local" else ():
                run = RequestedRun(backend=backend, emulated_ranks=size, processes=size, controller=controller)
                outcome = self._run(run)
                yield outcome
                if outcome.record is not None and outcome.record.first.device.startswith("cuda"):
                    transports = getattr(registry.load(backend), "transports", ())
                    for transport in transports:
                        if transport != outcome.transport:
                            yield self._run(replace(run, transport=transport))

    def _run_local(self, size: int, other_outcomes: Sequence[Outcome]) -> Outcome:
        """Run one process with the global batch size of `other_outcomes`.

        The batch size of the script is multiplied by `size`. If the script divides its batch size by the number of
        ranks, the global batch size would differ, and the run is repeated with the unmodified batch size. Return the
        repeated run if its global batch size is equal to that of another run, otherwise the first run.
        """
        outcome = self._run(RequestedRun(backend="local", emulated_ranks=size, processes=1))
        batch_sizes = {
            run.record.global_batch_sizes()[0]
            for run in (outcome, *other_outcomes)
            if run.record is not None and run.record.steps
        }
        if size > 1 and len(batch_sizes) > 1:
            unscaled = self._run(RequestedRun(backend="local", emulated_ranks=1, processes=1))
            record = unscaled.record
            if record is not None and record.steps and record.global_batch_sizes()[0] in batch_sizes:
                return unscaled
        return outcome

    def _repeat_unclear_runs(self, group: Group) -> Group:
        """Repeat the runs with possible rounding differences in double precision."""
        unclear = [row for row in group.rows if row.needs_float64]
        if not unclear:
            return group
        self.report_progress(
            f"{len(unclear)} of {len(group.rows)} runs may differ by rounding only. Repeating them in float64:\n"
        )
        float64_verification = replace(self, float64=True, tolerance=FLOAT64_TOLERANCE)
        repeated = [*(row for row in group.rows if row.status == "reference"), *unclear]
        outcomes = [float64_verification._run(row.outcome.run) for row in repeated]
        return resolve_with_float64(group, compare_outcomes(group.ranks, outcomes, FLOAT64_TOLERANCE, float64=True))

    def _run(self, run: RequestedRun) -> Outcome:
        folder = Path(tempfile.mkdtemp(prefix=f"{run.backend}-", dir=self.folder))
        request = RecordRequest(
            steps=self.steps, emulated_ranks=run.emulated_ranks, float64=self.float64, bits=self.bits
        )
        request.write(folder)
        variables = {OVERRIDES_VARIABLE: overrides_setting(RECORDER, str(folder))}
        if run.transport is not None:
            variables["UNITRAIN_TRANSPORT"] = run.transport
        try:
            command = self.build_command(run, variables)
        except ConfigError as error:
            return Outcome(run=run, seconds=0.0, failure=str(error))
        ranks = "1 process" if run.processes == 1 else f"{run.processes} ranks"
        name = f"{run.backend} over {chosen}" if (chosen := run.transport or run.controller) else run.backend
        self.report_progress(f"{name}, {ranks} ... ")
        result = run_command(
            command.argv,
            environment.without_launcher_variables() | dict(command.environment),
            marker_variable=OVERRIDES_VARIABLE,
            script=self.script,
            output=folder / "output.txt",
            timeout_seconds=self.timeout_seconds,
        )
        self.report_progress(f"{result.seconds:.0f} s\n")
        record = Record.read(folder)
        failure = self._find_failure(result.exit_code, run, record)
        if failure is None:
            return Outcome(run=run, seconds=result.seconds, record=record)
        return Outcome(run=run, seconds=result.seconds, failure=failure, last_lines=last_lines(result.output))

    def _find_failure(self, exit_code: int | None, run: RequestedRun, record: Record | None) -> str | None:
        """Return the reason why the run produced no numbers to compare, or None."""
        if exit_code is None:
            return (
                f"it did not finish within {self.timeout_seconds:g} s and was terminated. Allow more: --timeout-seconds"
            )
        if exit_code != 0:
            return (
                f"it ended with exit code {exit_code}" if exit_code > 0 else f"it was terminated by signal {-exit_code}"
            )
        if record is None:
            return (
                "it ended without training. Train with unitrain.Trainer or unitrain.Pipeline: verify compares "
                "their training steps"
            )
        if record.first.backend != run.backend:
            return (
                f"the script used backend {record.first.backend!r} instead. Call unitrain.init() without a backend name"
            )
        if not record.steps:
            return "it ended before its first step"
        return None
