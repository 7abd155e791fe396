"""Runs cases on ranks that stay alive between cases, compares the results with the oracle, and shrinks failing
cases."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from unitrain.testing import RankError, RankGroup
from unitrain.testing.ranks import import_before_fork

from . import cases, collectives, loops, sequence_oracle, sequence_subject, sequences, subject
from .oracle import Oracle, Piece, Step, check_samples
from .sequence_oracle import WrongError

Case = dict[str, Any]
CASE_SECONDS = 60.0
BACKEND_SECONDS = 12.0
TOLERANCE = 1e-9
LOOSE = 1e-5  # for torchmetrics, which sums in float32, and for comparisons with another layout


class Pool:
    """Ranks of every requested backend and size. The ranks of a failed case are replaced."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, int], RankGroup] = {}
        self.refusals: Counter[str] = Counter()  # calls that unitrain refused, as it may, by reason

    def run(self, layout: tuple[str, int], function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(backend, *args)` on every rank. Raise RankError after CASE_SECONDS."""
        group = self._groups.get(layout)
        if group is None:
            import_before_fork("torchmetrics")
            group = self._groups[layout] = RankGroup(*layout, backend_timeout_seconds=BACKEND_SECONDS)
        return group.run(function, *args, timeout_seconds=CASE_SECONDS)

    def replace(self, layout: tuple[str, int]) -> None:
        """Terminate the ranks of `layout`. The next case starts new ranks."""
        group = self._groups.pop(layout, None)
        if group is not None:
            group._kill_processes()

    def close(self) -> None:
        for group in self._groups.values():
            group.stop()
        self._groups.clear()


@contextmanager
def pool() -> Iterator[Pool]:
    """Yield a Pool, and terminate its ranks at the end."""
    made = Pool()
    try:
        yield made
    finally:
        made.close()


def find_failures(case: Case, ranks: Pool) -> list[str]:
    """Run one case and return the differences from the expected results, or an empty list."""
    try:
        if case["kind"] == "loop":
            return loops.check(case, ranks.run)
        if case["kind"] == "collective":
            return collectives.check(case, ranks.run)
        if case["kind"] == "sequence":
            return _check_sequence(case, ranks)
        return _check_trainer(case, ranks)
    except RankError as error:
        kind = "hang" if error.kind in ("Timeout", "CollectiveTimeoutError") else f"died: {error.kind}"
        return [f"{kind}: {error}"]


class _FailedError(Exception):
    """A segment of a case failed."""


class _RejectedError(Exception):
    """All ranks have raised an error that the contract permits."""


def _is_allowed_rejection(case: Case, errors: list[tuple[str, str]], size: int) -> bool:
    """Return whether all ranks have rejected an unsupported case: a defaultdict in a checkpoint, which torch cannot
    load without executing code, or an embedding whose forward pass changes different weights on each rank."""
    kinds = {kind for kind, _ in errors}
    if len(errors) < size:
        return False
    if case["counting"] == "defaultdict" and kinds == {"CheckpointError"}:
        return all("defaultdict" in text for _, text in errors)
    return "max_norm" in case["features"] and kinds == {"ModelError"} and all("max_norm" in text for _, text in errors)


def _check_trainer(case: Case, ranks: Pool) -> list[str]:
    try:
        found = _run_segments(case, ranks)
        trace = [
            Step(
                step["epoch"],
                [[Piece(rank, *shard) for rank, shard in enumerate(shards)] for shards in step["micro_steps"]],
            )
            for step in found["trace"]
        ]
        case = {**case, "_ended": found["ended"]}
        if wrong := check_samples(case, trace) + _check_end(case, found):
            return wrong
        if other := _choose_reference_segment(case):
            # Run the same number of steps, which may exceed the steps of the case's epochs.
            reference = cases.make_valid({**case, "segments": [{**other, "end": ["steps", found["done"]]}, other]})
            expected = _run_segments(reference, ranks)
            return [f"{text} (compared with one uninterrupted run)" for text in _compare(case, found, expected, LOOSE)]
        # PowerSGD of full rank is exact except for rounding.
        rounds = case["compression"] == "powersgd_full"
        return _compare(case, found, Oracle(case).train(trace), LOOSE if rounds else TOLERANCE)
    except _FailedError as error:
        return [str(error)]
    except _RejectedError:
        return []


def _check_sequence(case: Case, ranks: Pool) -> list[str]:
    """Run a program, section by section, and compare each call with the oracle."""
    folder = tempfile.mkdtemp(prefix="unitrain-fuzz-")
    kinds = {"trainer": sequence_oracle.TrainerOracle, "loop": sequence_oracle.LoopOracle}
    oracles = {name: kinds[own["kind"]](own, find_differences) for name, own in case["objects"].items()}
    layout = ("", 0)
    try:
        for number, section in enumerate(case["sections"]):
            layout = section["backend"], section["size"]
            rank_records = ranks.run(layout, sequence_subject.run_section, case, number, folder)
            created: set[str] = set()
            for place, (name, verb, argument) in enumerate(section["calls"]):
                where = f"section {number + 1}, call {place + 1}, {name}.{verb}"
                own, oracle = [records[place : place + 1] for records in rank_records], oracles[name]
                settings = sequence_subject.settings_of(case, name, number)
                if name not in created:
                    oracle.enter(settings)
                try:
                    reason = _find_refusal(case["objects"][name], oracle, own)
                    if reason is not None:
                        ranks.refusals[reason] += 1
                        ranks.replace(layout)
                        return []
                    records = [one for (one,) in own]
                    events = _merge_events(records)
                    if name not in created:
                        created.add(name)
                        oracle.create(events.pop(0), settings)
                    _check_equal_on_ranks(records)
                    oracle.call(verb, argument, records[0], events)
                except (WrongError, _FailedError) as error:
                    ranks.replace(layout)
                    kind, _, text = str(error).partition(" ")
                    return [f"{kind} {text} ({where})"]
    except RankError:
        ranks.replace(layout)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return []


def _find_refusal(definition: Case, oracle: Any, own: list[list[Any]]) -> str | None:
    """Return why unitrain may refuse a call, None if it did not refuse it. Raise _FailedError for another error."""
    errors = [records[0]["error"] if records else ("NotReached", "an earlier call failed", "") for records in own]
    if not any(errors):
        return None
    kinds = {None if error is None else error[0] for error in errors}
    # A rank that waited for a failed rank reports a timeout.
    first = min(
        (error for error in errors if error is not None), key=lambda error: error[0] == "CollectiveTimeoutError"
    )
    if len(kinds) == 1:
        for reason, classes in sequence_oracle.allowed_refusals(definition, oracle, own[0][0]["events"]).items():
            if kinds <= classes:
                return reason
    where = "" if len(kinds) == 1 else f" on some ranks only: {kinds}"
    raise _FailedError(f"error {first[0]}: {first[1]}{where}\n{first[2]}")


def _merge_events(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events of a call with the samples of all ranks."""
    counts = [[event["kind"] for event in record["events"]] for record in records]
    if any(kinds != counts[0] for kinds in counts):
        raise WrongError(f"steps: the ranks had different events: {counts}")
    merged = []
    for events in zip(*(record["events"] for record in records), strict=True):
        event = dict(events[0])
        for name in ("micro_steps", "batches"):
            if name in event:
                if len({len(one[name]) for one in events}) > 1:
                    raise WrongError("steps: the ranks had different numbers of micro-batches")
                event[name] = [
                    [Piece(rank, *one[name][at]) for rank, one in enumerate(events)] for at in range(len(event[name]))
                ]
        for rank, one in enumerate(events):
            for name in ("rates", "results", "parameters"):
                if worst := next(find_differences(one.get(name), event.get(name), 0.0, name), None):
                    raise WrongError(f"replicas: rank {rank} and rank 0: {worst}")
        merged.append(event)
    return merged


def _check_equal_on_ranks(records: list[dict[str, Any]]) -> None:
    """Raise WrongError unless the values and the states of all ranks are equal, except for buffers."""
    for rank, record in enumerate(records):
        for name in ("value", "state"):
            found, first = (
                {**one[name], "buffers": None} if isinstance(one[name], dict) else one[name]
                for one in (record, records[0])
            )
            if worst := next(find_differences(found, first, 0.0, name), None):
                raise WrongError(f"replicas: rank {rank} and rank 0: {worst}")


def _choose_reference_segment(case: Case) -> Case | None:
    """Return the segment of a reference run if the oracle cannot compute the result, otherwise None.

    Random numbers in a collate function must equal those of an uninterrupted run on the same ranks. PowerSGD starts
    from random matrices, and must produce the same results on other numbers of ranks.
    """
    last: Case = case["segments"][-1]
    if case["collate"] == "noise":
        return last
    if case["compression"] == "powersgd":
        alone = {"backend": "local", "size": 1, "accumulate": 1, "end": None}
        return alone if last["size"] > 1 else {"backend": "ddp", "size": 2, "accumulate": 1, "end": None}
    return None


def _run_segments(case: Case, ranks: Pool) -> dict[str, Any]:
    """Run all segments in order in one folder. Return the results of the last segment, with the trace, the epochs and
    the learning rates of the complete run."""
    folder = tempfile.mkdtemp(prefix="unitrain-fuzz-")
    try:
        steps: dict[int, dict[str, Any]] = {}
        epochs: dict[int, dict[str, float]] = {}
        starts = [0]
        for number, segment in enumerate(case["segments"]):
            layout = segment["backend"], segment["size"]
            rank_results = ranks.run(layout, subject.run, {**case, "_starts": starts}, number, folder)
            errors = [one["error"] for one in rank_results if one["error"] is not None]
            if errors:
                ranks.replace(layout)
                if _is_allowed_rejection(case, errors, len(rank_results)):
                    raise _RejectedError
                is_same = len(errors) == len(rank_results) and len({kind for kind, _ in errors}) == 1
                where = "" if is_same else f" on {len(errors)} of {len(rank_results)} ranks only: {errors}"
                trace = next(one["traceback"] for one in rank_results if one["error"] is not None)
                raise _FailedError(f"error {errors[0][0]}: {errors[0][1]}{where}\n{trace}")
            _check_replicas(case, rank_results)
            for step, own in rank_results[0]["steps"].items():
                shards = [
                    [one["steps"][step]["micro_steps"][at] for one in rank_results]
                    for at in range(len(own["micro_steps"]))
                ]
                taken = sorted(n for micro_step in shards for numbers, live in micro_step if live for n in numbers)
                if step in steps and steps[step]["taken"] != taken and case["collate"] != "skip":
                    raise _FailedError(f"samples: step {step + 1} was repeated with other samples")
                steps[step] = {**own, "micro_steps": shards, "taken": taken}
            for epoch, is_complete, results in rank_results[0]["epochs"]:
                if is_complete:
                    epochs[epoch - 1] = results
            starts.append(rank_results[0]["done"])
        if sorted(steps) != list(range(len(steps))) or len(steps) != rank_results[0]["done"]:
            raise _FailedError(f"steps: {sorted(steps)} were run, but the progress is {rank_results[0]['done']}")
        trace = [steps[number] for number in range(len(steps))]
        return {
            **rank_results[0],
            "trace": trace,
            "epochs": epochs,
            "rates": [step["rates"] for step in trace],
            "ended": rank_results[0]["epochs_done"] > trace[-1]["epoch"],
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_replicas(case: Case, rank_results: list[dict[str, Any]]) -> None:
    """Raise _FailedError unless all ranks end with the same parameters, optimizer state and results."""
    for rank, other in enumerate(rank_results):
        for name in ("parameters", "average", "optimizer", "results"):
            if worst := list(find_differences(other[name], rank_results[0][name], 0.0, name)):
                raise _FailedError(f"replicas: rank {rank} and rank 0: {worst[0]}")


def _check_end(case: Case, found: dict[str, Any]) -> list[str]:
    epochs = 1 + max(step["epoch"] for step in found["trace"])
    most = max([s["end"][1] for s in case["segments"] if s["end"] and s["end"][0] == "steps"], default=0)
    done, early = len(found["trace"]), case["early_stopping"] and found["ended"]
    if epochs >= case["epochs"] and (done == most or (done < most and early)):
        return []
    if epochs > case["epochs"] or (epochs < case["epochs"] and not case["early_stopping"]) or not found["ended"]:
        return [f"end: {epochs} epochs in {len(found['trace'])} steps, not {case['epochs']} (ended: {found['ended']})"]
    return []


def _compare(case: Case, found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> list[str]:
    wrong: list[str] = []
    for name in ("rates", "epochs", "parameters", "buffers", "average", "optimizer", "evaluate", "predict"):
        if name == "buffers" and "max_norm" in case["features"]:
            continue
        wrong += list(find_differences(found.get(name), expected.get(name), tolerance, name))[:2]
    shared = found["results"].keys() & expected["results"].keys()  # without remaining steps, there is no loss
    found_results, expected_results = ({name: one["results"][name] for name in shared} for one in (found, expected))
    wrong += list(find_differences(found_results, expected_results, tolerance, "results"))[:2]
    if case["counting"]:
        wrong += list(find_differences(found["counting"], expected["counting"], 0.0, "counting"))
    return wrong


def find_differences(found: Any, expected: Any, tolerance: float, path: str) -> Iterator[str]:
    """Yield the locations at which two nested values differ by more than `tolerance`, relative to 1 + the expected
    value."""
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        if found.shape != expected.shape:
            yield f"{path} has shape {list(found.shape)}, not {list(expected.shape)}"
            return
        if not found.numel():
            return
        found, expected = found.detach(), expected.detach()
        if found.dtype != expected.dtype:
            if not path.startswith("optimizer"):
                yield f"{path} is {found.dtype}, not {expected.dtype}"
                return
            found, expected = found.double(), expected.double()
        same = torch.isclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
        if not same.all():
            yield f"{path} differs by {float((found - expected).abs().max()):.3g}"
    elif isinstance(found, dict) and isinstance(expected, dict):
        if set(found) != set(expected):
            added, missing = set(found) - set(expected), set(expected) - set(found)
            yield f"{path} has {_abbreviate_names(added)} and lacks {_abbreviate_names(missing)}"
        for key in [key for key in found if key in expected]:
            loose = LOOSE if any(name in str(key) for name in cases.TORCHMETRICS) else tolerance
            yield from find_differences(found[key], expected[key], max(loose, tolerance), f"{path}.{key}")
    elif isinstance(found, (list, tuple)) and isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            yield f"{path} has {len(found)} entries, not {len(expected)}"
        for index, (one, other) in enumerate(zip(found, expected, strict=False)):
            yield from find_differences(one, other, tolerance, f"{path}[{index}]")
    elif isinstance(found, (int, float)) and isinstance(expected, (int, float)):
        if found != found and expected != expected:
            return
        if not abs(found - expected) <= tolerance * (1.0 + abs(expected)):
            yield f"{path} is {found!r}, not {expected!r}"
    elif type(found) is not type(expected) or (found is not None and found != expected):
        yield f"{path} is {_abbreviate_value(found)}, not {_abbreviate_value(expected)}"


def _abbreviate_names(names: set[Any]) -> str:
    return ", ".join(sorted(map(str, names))[:3]) or "nothing more"


def _abbreviate_value(value: Any) -> str:
    return repr(value)[:60]


def describe(case: Case) -> str:
    """Return a sequence of calls as a short program, and an empty text for another case."""
    return sequences.describe(case) if case["kind"] == "sequence" else ""


def failure_kind(failed: list[str]) -> str:
    """Return the kind of a failure, which shrinking preserves: the first word and, for an error, the class."""
    return " ".join(failed[0].replace(":", " ").split()[: 2 if failed[0].startswith("error") else 1])


def shrink(case: Case, failed: list[str], ranks: Pool, *, seconds: float = 60.0) -> tuple[Case, list[str]]:
    """Return the simplest case found within `seconds` that fails in the same way, and its failures."""
    deadline, kind = time.monotonic() + seconds, failure_kind(failed)
    tried = {cases.to_json(case)}
    progress = True
    while progress:
        progress = False
        for smaller in cases.simpler_cases(case):
            smaller = cases.make_valid(smaller)
            if cases.to_json(smaller) in tried:
                continue
            if time.monotonic() > deadline:
                return case, failed
            tried.add(cases.to_json(smaller))
            if (found := find_failures(smaller, ranks)) and failure_kind(found) == kind:
                case, failed, progress = smaller, found, True
                break
    return case, failed
