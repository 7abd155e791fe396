"""The figures of a run: what came of it, how fast it was, and where its time went."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from unitrain.progress.stragglers import TRAINING, Straggler, find_stragglers
from unitrain.report.record import Record, Row

PARTS = (*TRAINING, "validation", "checkpoint")
_NO_RESULTS = {"epoch", "step", "epochs", "learning_rate", "seconds", "samples_per_second"}
Points = list[tuple[float, float | None]]


@dataclass(frozen=True)
class Best:
    """The best value that a result had, and the epoch it had it in."""

    name: str
    value: float
    epoch: int
    step: int
    position: float


@dataclass(frozen=True)
class RankTimes:
    """Seconds by part, of each rank, added up over `epochs` rows of the history, and over the `steps` in them."""

    seconds: dict[str, list[float]]
    epochs: int
    steps: int

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.seconds["compute"])

    def mean(self, part: str) -> float:
        """Return the mean of a part's seconds over ranks."""
        return fmean(self.seconds[part])

    def share(self, part: str) -> float:
        """Return which share of training, of all ranks, a part of it took."""
        return self.mean(part) / (sum(map(self.mean, TRAINING)) or 1.0)

    def own_work(self) -> list[float]:
        """Return for each rank the seconds in which others may have waited for it."""
        return [sum(rank) for rank in zip(*(self.seconds[part] for part in ("data", "compute", "update")), strict=True)]

    def stragglers(self) -> list[Straggler]:
        """Return the ranks that the others waited for, all in all."""
        ranks = list(zip(*(self.seconds[part] for part in TRAINING), strict=True))
        return find_stragglers(ranks, max(1, self.steps))


def result_names(record: Record) -> list[str]:
    """Return the names of what was found per epoch, in the order in which they first appear."""
    names = dict.fromkeys(name for row in record.epochs for name in row)
    return [name for name in names if name not in _NO_RESULTS and not name.endswith("_seconds")]


def metrics(records: list[Record]) -> list[str]:
    """Return what there is a chart of: "loss" first, and every metric, without the part of the data it is of."""
    names = dict.fromkeys(split_name(name)[1] for record in records for name in result_names(record))
    if any(record.steps for record in records):
        names["loss"] = None
    return sorted(names, key=lambda name: name != "loss")


def split_name(name: str) -> tuple[str, str]:
    """Return ("train" or "val", metric) for a result's name, and "" for any other."""
    part, _, metric = name.partition("_")
    return (part, metric) if part in ("train", "val") and metric else ("", name)


def counts_epochs(records: list[Record]) -> bool:
    """Whether positions are to be told in passes over the data, rather than in steps: if all have done one, and the
    data has a length.
    """
    return all(
        record.epochs
        and (record.epochs[-1].get("epochs") or 0) >= 1
        and all(row.get("epochs") is not None for row in record.steps)
        for record in records
    )


def points(rows: list[Row], name: str, in_epochs: bool) -> Points:
    """Return (position, value) for every row; what was not a number is None."""
    position = "epochs" if in_epochs else "step"
    return [(row[position], row.get(name)) for row in rows if row.get(position) is not None]


def last(record: Record, name: str) -> float | None:
    """Return the value that a result had last."""
    return record.epochs[-1].get(name) if record.epochs else None


def best(record: Record, name: str, mode: str = "min") -> Best | None:
    """Return the best of a result over the epochs, the first of equals; None where it never was a number."""
    rows = [row for row in record.epochs if row.get(name) is not None]
    if not rows:
        return None
    row = (min if mode == "min" else max)(rows, key=lambda row: row[name])
    return Best(name, row[name], row["epoch"], row["step"], row.get("epochs") or row["epoch"])


def judged_by(record: Record) -> tuple[str, str]:
    """Return the result that tells which epoch was best, and "min" or "max": what `keep_best` names, else the loss."""
    config, names = record.start.get("config", {}), result_names(record)
    if config.get("keep_best") in names:
        return config["keep_best"], config.get("keep_best_mode", "min")
    return ("val_loss" if "val_loss" in names else "train_loss"), "min"


def samples_per_second(record: Record) -> float | None:
    """Return how many samples were trained on in a second, over all epochs."""
    rows = [row for row in record.epochs if row.get("samples_per_second") and row.get("seconds")]
    seconds = sum(row["seconds"] for row in rows)
    return sum(row["samples_per_second"] * row["seconds"] for row in rows) / seconds if rows else None


def rank_times(record: Record) -> RankTimes | None:
    """Return each rank's seconds, of the epochs with as many ranks as there were last; None where they were not
    taken."""
    rows = [row for row in record.epochs if row.get("compute_seconds")]
    if not rows:
        return None
    size = len(rows[-1]["compute_seconds"])
    rows = [row for row in rows if len(row["compute_seconds"]) == size]
    begun = record.starts[0]["step"] if record.starts else 0
    done = {row["step"]: row["step"] - before for row, before in _with_step_before(record.epochs, begun)}
    seconds = {
        part: [sum(ranks) for ranks in zip(*(row[f"{part}_seconds"] for row in rows), strict=True)] for part in PARTS
    }
    return RankTimes(seconds, len(rows), sum(done[row["step"]] for row in rows))


def _with_step_before(rows: list[Row], begun: int) -> list[tuple[Row, int]]:
    return list(zip(rows, [begun, *(row["step"] for row in rows[:-1])], strict=True))


@dataclass(frozen=True)
class Spell:
    """From which step and position to which `straggler` was named at every look; how slow it was at the last."""

    straggler: Straggler
    steps: tuple[int, int]
    positions: tuple[float, float]


def spells(record: Record, in_epochs: bool) -> list[Spell]:
    """Return when which rank was slow, in the order in which that ended."""
    position = "epochs" if in_epochs else "step"
    found: list[Spell] = []
    going: dict[int, Spell] = {}
    for row in [*record.steps, {}]:
        named = {one["rank"]: Straggler(**one) for one in row.get("slow", ())}
        found += [going.pop(rank) for rank in list(going) if rank not in named]
        for rank, straggler in named.items():
            step, place = row["step"], row[position] or 0.0
            begun = going.get(rank, Spell(straggler, (step, step), (place, place)))
            going[rank] = Spell(straggler, (begun.steps[0], step), (begun.positions[0], place))
    return found


def elapsed(record: Record) -> float:
    """Return the seconds that all epochs took, with validation and checkpoints."""
    return sum(
        max(map(sum, zip(*(row[f"{part}_seconds"] for part in PARTS), strict=True)))
        if row.get("compute_seconds")
        else row.get("seconds") or 0.0
        for row in record.epochs
    )


def last_step(record: Record) -> int:
    """Return how many optimizer steps are known to be done."""
    return max((row["step"] for row in [*record.epochs, *record.steps]), default=0)


@dataclass(frozen=True)
class Progress:
    """How far a run has come in its `unit`, "epochs" or "steps"; `asked` is None where that is not known."""

    unit: str
    done: float
    asked: int | None

    @property
    def finished(self) -> bool:
        """Whether all that was asked for is done."""
        return self.asked is not None and self.done >= self.asked


def progress(record: Record) -> Progress:
    """Return how far a run has come, in what its length was given in."""
    config, step = record.start.get("config", {}), last_step(record)
    if config.get("max_steps"):
        return Progress("steps", step, config["max_steps"])
    row = record.epochs[-1] if record.epochs else {}
    done = row.get("epochs") or row.get("epoch") or 0
    if record.steps and record.steps[-1]["step"] >= step:
        done = max(done, record.steps[-1].get("epochs") or 0)
    return Progress("epochs", done, config.get("max_epochs"))
