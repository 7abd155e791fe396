"""Run a script repeatedly with different settings, and report the fastest settings."""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import unitrain
from unitrain.backends import registry
from unitrain.bootstrap import environment
from unitrain.bootstrap.overrides import OVERRIDES_VARIABLE, overrides_setting
from unitrain.errors import ConfigError
from unitrain.tune.search import PAIRS, Gain, SearchResult, list_tunables, measure_ratio, search
from unitrain.tune.trial import TIMER, TrialRequest, TrialResult
from unitrain.tune.tuned_settings import TUNED_FILE, TunedEntry, TunedRun, check_file, format_settings, remove_tuned
from unitrain.verify.commands import last_lines, run_command

_WARMUP_STEPS = 10
_DILOCO = {"steps": 25, "outer_lr": 0.7, "outer_momentum": 0.9}
# Changes of TrainConfig that are timed on request, because they affect the results of training.
COMPRESSION_CHANGES: Sequence[Mapping[str, Any]] = ({"compression": "fp16"}, {"compression": "bf16"})
LOCAL_SGD_CHANGES: Sequence[Mapping[str, Any]] = (
    {"local_sgd": _DILOCO},
    {"local_sgd": {**_DILOCO, "compression": "int8"}},
    {"local_sgd": {**_DILOCO, "fragments": 5, "overlap_steps": 5}},
)


@dataclass
class Tuner:
    """Tunes one script. `launch_options` are options of `unitrain launch`.

    Each run times steps for `step_seconds` and is terminated after `timeout_seconds`. Temporary files are written to
    `folder`.
    """

    launch_options: tuple[str, ...]
    script: str
    args: tuple[str, ...]
    step_seconds: float
    timeout_seconds: float
    folder: Path
    runs: int = 0

    def tune(
        self,
        search_seconds: float,
        *,
        with_compression: bool = False,
        with_local_sgd: bool = False,
        report: Callable[[str], None],
        report_run: Callable[[str], None],
    ) -> None:
        """Search for about `search_seconds`, save the settings if their gain is significant, and report the result.

        Afterwards, also time gradient compression if `with_compression` is True, and low-communication training if
        `with_local_sgd` is True. Both take additional time. `report` receives results, and `report_run` receives a line
        per run of the search. Raises ConfigError if a run fails, or if the file of tuned settings cannot be read or
        written. If a run with compression or low-communication training fails, for example because the script shards
        the model, `tune` reports the failure and continues.
        """
        check_file()  # before the runs, whose results would be lost
        start_time = time.monotonic()
        default_result = self.run({})
        run_seconds = time.monotonic() - start_time
        ranks = "1 rank" if default_result.size == 1 else f"{default_result.size} ranks"
        report(
            f"{self.script} on {ranks} of {default_result.backend} over {default_result.transport}: "
            f"{default_result.seconds_per_step * 1e3:.2f} ms per step with the default settings"
        )

        def measure(settings: Mapping[str, str]) -> float:
            result = self.run(settings)
            report_run(f"  {result.seconds_per_step * 1e3:9.2f} ms  {format_settings(settings)}")
            return result.seconds_per_step

        # The tunables of a backend affect communication only, and a single rank does not communicate.
        backend_tunables = registry.load(default_result.backend).tunables if default_result.size > 1 else ()
        tunables = list_tunables(
            backend_tunables,
            default_result.threads,
            default_result.cores_per_rank,
            shares_hosts=1 < default_result.num_nodes < default_result.size,
        )
        search_result = search(measure, tunables, search_seconds, run_seconds=run_seconds)
        report(
            save_and_describe(
                search_result,
                TunedRun.on_this_machine(
                    self.script, self.args, default_result.backend, default_result.size, default_result.num_nodes
                ),
            )
        )
        candidates: list[Mapping[str, Any]] = []
        if with_compression:
            candidates += COMPRESSION_CHANGES
        if with_local_sgd and default_result.size == 1:
            report("Low-communication training was not timed, because a single rank does not communicate.")
        elif with_local_sgd:
            candidates += LOCAL_SGD_CHANGES
        for changes in candidates:
            try:
                report(describe_changes(changes, self._measure_gain(changes)))
            except ConfigError as error:  # for example, if the script shards the parameters
                report(f"{_format_changes(changes)}: not timed. {error}")

    def run(self, variables: Mapping[str, str], changes: Mapping[str, Any] | None = None) -> TrialResult:
        """Run the script with `variables`, and with `changes` to its TrainConfig, and return the timing.

        Raises ConfigError with the last lines of the output if the run ends without a timing.
        """
        self.runs += 1
        name = f"{self.folder}/{self.runs}"
        request = TrialRequest(
            name=name, warmup_steps=_WARMUP_STEPS, seconds=self.step_seconds, changes=changes or {}
        ).serialize()
        overrides = {OVERRIDES_VARIABLE: overrides_setting(TIMER, request)}
        settings = [word for variable in (overrides | dict(variables)).items() for word in ("-x", "=".join(variable))]
        program = str(Path(unitrain.__file__).with_name("__main__.py"))
        command = [
            sys.executable, program, "launch", "--untuned", *self.launch_options, *settings, self.script, *self.args
        ]  # fmt: skip
        ended = run_command(
            command,
            environment.without_launcher_variables() | overrides,
            marker_variable=OVERRIDES_VARIABLE,
            script=self.script,
            output=Path(f"{name}.txt"),
            timeout_seconds=self.timeout_seconds,
        )
        result = TrialResult.parse_output(ended.output)
        if result is None:
            end = f"ended with exit code {ended.exit_code}" if ended.exit_code is not None else "timed out"
            lines = "\n".join(last_lines(ended.output))
            raise ConfigError(
                f"With {format_settings(variables)}, the run {end} before enough steps were timed. Its last lines:"
                f"\n{lines}"
            )
        return result

    def _measure_gain(self, changes: Mapping[str, Any]) -> Gain:
        generator = random.Random()
        plain, changed = partial(self._seconds_per_step, {}), partial(self._seconds_per_step, changes)
        return Gain([measure_ratio(plain, changed, generator) for _ in range(PAIRS)])

    def _seconds_per_step(self, changes: Mapping[str, Any]) -> float:
        return self.run({}, changes).seconds_per_step


def describe_changes(changes: Mapping[str, Any], gain: Gain) -> str:
    """Return a summary of the gain with `changes` to TrainConfig, which affect the numerical results."""
    if gain.is_significant:
        verdict = "Use it if the results may change"
    elif Gain([1 / ratio for ratio in gain.ratios]).is_significant:
        verdict = "Training is slower with it"
    else:
        verdict = "The difference is within the noise"
    return f"{_format_changes(changes)}: {_format_gain(gain)}. {verdict}."


def _format_changes(changes: Mapping[str, Any]) -> str:
    return f"TrainConfig({_format_arguments(changes)})"


def _format_arguments(values: Mapping[str, Any]) -> str:
    """Return keyword arguments as Python source, with the fields of a LocalSGDConfig as a call."""
    return ", ".join(
        f"{name}=LocalSGDConfig({_format_arguments(value)})"
        if isinstance(value, Mapping)
        else f"{name}={_quote(value)}"
        for name, value in values.items()
    )


def _quote(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def save_and_describe(search_result: SearchResult, run: TunedRun) -> str:
    """Save the settings for `run` if the gain is significant, otherwise remove the entry of `run`. Return a summary."""
    gain = search_result.gain
    skipped = ""
    if search_result.skipped:
        minutes = math.ceil(search_result.seconds_needed / 60)
        untried = (
            "1 other setting was" if search_result.skipped == 1 else f"{search_result.skipped} other settings were"
        )
        skipped = f" {untried} not tried for lack of time. Allow more: --minutes {minutes}"
    if gain is None or not gain.is_significant:
        best = f" The best gain, {_format_gain(gain)}, is within the noise." if gain is not None else ""
        remove_tuned(run)
        return f"No settings are significantly faster than the default settings.{best}{skipped}"
    TunedEntry(
        **asdict(run),
        variables=search_result.settings,
        gain=round(gain.median, 4),
        spread=(round(gain.spread[0], 4), round(gain.spread[1], 4)),
    ).save()
    return (
        f"Faster by {_format_gain(gain)}: {format_settings(search_result.settings)}.{skipped}\n"
        f"Saved in {TUNED_FILE}. In this folder, unitrain launch uses these settings for the same arguments, hosts, "
        "torch version and hardware, and prints them. Ignore them with: --untuned"
    )


def _format_gain(gain: Gain) -> str:
    low, high = gain.spread
    return f"a factor of {gain.median:.3f} (between {low:.3f} and {high:.3f} in {len(gain.ratios)} pairs)"
