"""Compute statistics from the history of a run: results, throughput, and time per phase and rank."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from unitrain.progress.stragglers import TRAINING, Straggler, find_stragglers
from unitrain.report.record import PHASES, Row, RunRecord

_OTHER_COLUMNS = {"epoch", "step", "epochs", "learning_rate", "seconds", "samples_per_second"}
Points = list[tuple[float, float | None]]


@dataclass(frozen=True)
class BestResult:
    """The best value of a result, with its epoch and step. `epochs` is the number of epochs until then, which may be
    fractional."""

    name: str
    value: float
    epoch: int
    step: int
    epochs: float


@dataclass(frozen=True)
class RankTimes:
    """Seconds by phase and rank, summed over `num_epochs` history rows with `num_steps` steps in total."""

    seconds: dict[str, list[float]]
    num_epochs: int
    num_steps: int

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.seconds["compute"])

    def mean(self, phase: str) -> float:
        """Return the seconds of a phase, averaged over ranks."""
        return fmean(self.seconds[phase])

    def time_fraction(self, phase: str) -> float:
        """Return the fraction of the training time of all ranks that is spent in a phase."""
        return self.mean(phase) / (sum(map(self.mean, TRAINING)) or 1.0)

    def work_seconds(self) -> list[float]:
        """Return the working time per rank in seconds, excluding time spent waiting for other ranks."""
        return [
            sum(rank) for rank in zip(*(self.seconds[phase] for phase in ("data", "compute", "update")), strict=True)
        ]

    def stragglers(self) -> list[Straggler]:
        """Return the stragglers over these epochs: ranks that other ranks waited for."""
        ranks = list(zip(*(self.seconds[phase] for phase in TRAINING), strict=True))
        return find_stragglers(ranks, max(1, self.num_steps))


def result_names(record: RunRecord) -> list[str]:
    """Return the names of the per-epoch results, in order of first occurrence."""
    names = dict.fromkeys(name for row in record.epochs for name in row)
    return [name for name in names if name not in _OTHER_COLUMNS and not name.endswith("_seconds")]


def metric_names(records: list[RunRecord]) -> list[str]:
    """Return the names of the charts: "loss" and the metrics, without the prefixes "train" and "val"."""
    names = dict.fromkeys(split_name(name)[1] for record in records for name in result_names(record))
    if any(record.steps for record in records):
        names["loss"] = None
    return sorted(names, key=lambda name: name != "loss")


def split_name(name: str) -> tuple[str, str]:
    """Return ("train" or "val", metric) for the name of a result, or ("", name) for a name without such a prefix."""
    dataset, _, metric = name.partition("_")
    return (dataset, metric) if dataset in ("train", "val") and metric else ("", name)


def has_epoch_axis(records: list[RunRecord]) -> bool:
    """Return whether the x axis shows epochs instead of steps.

    It shows epochs if every run has completed an epoch and the length of its data is known.
    """
    return all(
        record.epochs
        and (record.epochs[-1].get("epochs") or 0) >= 1
        and all(row.get("epochs") is not None for row in record.steps)
        for record in records
    )


def chart_points(rows: list[Row], name: str, in_epochs: bool) -> Points:
    """Return (x, value) per row; x is the epoch or the step. The value is None if it was not a number."""
    position = "epochs" if in_epochs else "step"
    return [(row[position], row.get(name)) for row in rows if row.get(position) is not None]


def last_value(record: RunRecord, name: str) -> float | None:
    """Return the value of a result in the last epoch, or None if it was not a number or no epoch is recorded."""
    return record.epochs[-1].get(name) if record.epochs else None


def best_value(record: RunRecord, name: str, mode: str = "min") -> BestResult | None:
    """Return the best value of a result over the epochs (the first of equal ones), or None if no value was a number."""
    rows = [row for row in record.epochs if row.get(name) is not None]
    if not rows:
        return None
    row = (min if mode == "min" else max)(rows, key=lambda row: row[name])
    return BestResult(name, row[name], row["epoch"], row["step"], row.get("epochs") or row["epoch"])


def monitored_result(record: RunRecord) -> tuple[str, str]:
    """Return the result that selects the best epoch (`keep_best`, by default the loss), and "min" or "max"."""
    config, names = record.start.get("config", {}), result_names(record)
    if config.get("keep_best") in names:
        return config["keep_best"], config.get("keep_best_mode", "min")
    return ("val_loss" if "val_loss" in names else "train_loss"), "min"


def samples_per_second(record: RunRecord) -> float | None:
    """Return the training throughput over all epochs, in samples per second, or None if it is not recorded."""
    rows = [row for row in record.epochs if row.get("samples_per_second") and row.get("seconds")]
    seconds = sum(row["seconds"] for row in rows)
    return sum(row["samples_per_second"] * row["seconds"] for row in rows) / seconds if rows else None


def rank_times(record: RunRecord) -> RankTimes | None:
    """Return the times per rank over the epochs with the final number of ranks, or None if no times are
    recorded."""
    rows = [row for row in record.epochs if row.get("compute_seconds")]
    if not rows:
        return None
    size = len(rows[-1]["compute_seconds"])
    rows = [row for row in rows if len(row["compute_seconds"]) == size]
    first_step = record.starts[0]["step"] if record.starts else 0
    steps_by_end = {
        row["step"]: row["step"] - previous_step
        for row, previous_step in _with_previous_step(record.epochs, first_step)
    }
    seconds = {
        phase: [sum(ranks) for ranks in zip(*(row[f"{phase}_seconds"] for row in rows), strict=True)]
        for phase in PHASES
    }
    return RankTimes(seconds, len(rows), sum(steps_by_end[row["step"]] for row in rows))


def _with_previous_step(rows: list[Row], first_step: int) -> list[tuple[Row, int]]:
    return list(zip(rows, [first_step, *(row["step"] for row in rows[:-1])], strict=True))


@dataclass(frozen=True)
class SlowPeriod:
    """A period in which every row of steps.jsonl reports the same rank as slow. `straggler` is the last report. `steps`
    and `positions` (on the x axis) are the first and the last of the period."""

    straggler: Straggler
    steps: tuple[int, int]
    positions: tuple[float, float]


def slow_periods(record: RunRecord, in_epochs: bool) -> list[SlowPeriod]:
    """Return the periods with slow ranks, in order of their ends."""
    position = "epochs" if in_epochs else "step"
    ended_periods: list[SlowPeriod] = []
    open_periods: dict[int, SlowPeriod] = {}
    for row in [*record.steps, {}]:
        stragglers = {straggler["rank"]: Straggler.from_row(straggler) for straggler in row.get("slow", ())}
        ended_periods += [open_periods.pop(rank) for rank in list(open_periods) if rank not in stragglers]
        for rank, straggler in stragglers.items():
            step, x = row["step"], row[position] or 0.0
            previous = open_periods.get(rank, SlowPeriod(straggler, (step, step), (x, x)))
            open_periods[rank] = SlowPeriod(straggler, (previous.steps[0], step), (previous.positions[0], x))
    return ended_periods


def total_seconds(record: RunRecord) -> float:
    """Return the total seconds of all epochs, including validation and checkpoints."""
    return sum(
        max(map(sum, zip(*(row[f"{phase}_seconds"] for phase in PHASES), strict=True)))
        if row.get("compute_seconds")
        else row.get("seconds") or 0.0
        for row in record.epochs
    )


def last_step(record: RunRecord) -> int:
    """Return the largest recorded number of optimizer steps since the start of the run, or 0."""
    return max((row["step"] for row in [*record.epochs, *record.steps]), default=0)


@dataclass(frozen=True)
class Progress:
    """The progress of a run in its `unit`, "epochs" or "steps". `requested` is None if it is unknown."""

    unit: str
    num_done: float
    requested: int | None

    @property
    def is_finished(self) -> bool:
        """Whether the requested length is reached."""
        return self.requested is not None and self.num_done >= self.requested


def run_progress(record: RunRecord) -> Progress:
    """Return the progress of a run in the unit of its configured length."""
    config, step = record.start.get("config", {}), last_step(record)
    if config.get("max_steps"):
        return Progress("steps", step, config["max_steps"])
    row = record.epochs[-1] if record.epochs else {}
    num_epochs = row.get("epochs") or row.get("epoch") or 0
    if record.steps and record.steps[-1]["step"] >= step:
        num_epochs = max(num_epochs, record.steps[-1].get("epochs") or 0)
    return Progress("epochs", num_epochs, config.get("max_epochs"))
