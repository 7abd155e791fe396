"""Executes random programs in plain torch, in one process and in float64, and compares every call.

Like `oracle.py`, this module does not use unitrain. From the run under test it takes the samples of each step, the step
from which a run resumes, and where a time limit ended it. It checks these against the rules of the data and of the
checkpoints, and computes everything else: weights, learning rates, statistics, results and the best checkpoint.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from . import parts, sequence_loops
from .oracle import Oracle, Piece, Step, check_epoch, steps_in_epoch
from .user_objects import set_mode

Case = dict[str, Any]
Events = list[dict[str, Any]]
Key = tuple[int, int]  # (epoch, step)
TOLERANCE = 1e-9


class WrongError(Exception):
    """The run under test differs from the expected program."""


def check_equal(compare: Callable[..., Iterator[str]], found: Any, expected: Any, name: str) -> None:
    if wrong := next(compare(found, expected, TOLERANCE, name), None):
        raise WrongError(wrong)


class TrainerOracle(Oracle):
    """The state of a Trainer over all sections of a program."""

    def __init__(self, case: Case, compare: Callable[..., Iterator[str]]) -> None:
        self.compare = compare
        self.rules = case
        self.data_changes = 0
        self.by_hand: Case | None = None
        super().__init__({**case, "_ended": False, "total_steps": None})
        self._start(case)

    def _start(self, case: Case) -> None:
        """Reset the state to that of a new run."""
        version = self.data_changes
        self.case = {**case, "version": version}
        if (case["scheduler"] or "").startswith(("planned", "sized")):
            self.case["total_steps"] = self._steps_of_run()
        Oracle.__init__(self, self.case)
        self.epoch, self.losses, self.counted = 0, 0.0, 0.0
        self.done: list[tuple[int, list[int], int]] = []  # epoch, samples and version of the data of each step
        self.snapshots: dict[Key, Case] = {}
        self.saved: dict[Key, tuple[float, Case]] = {}
        self.durable: Key = (0, 0)
        self.has_other_length = self.has_other_weights = self.has_pending_end = False
        self.ended: set[Key] = set()  # ends of epochs that are not known to be saved completely
        self.last_results: dict[str, float] = {}
        self._take_snapshot()

    # State

    @property
    def key(self) -> Key:
        return self.epoch, self.steps

    def _copy_weights(self) -> Case:
        modes = set_mode(self.optimizer, train=False)
        found = {
            "model": copy.deepcopy(self.model.state_dict()),
            "average": None if self.average is None else copy.deepcopy(self.average.state_dict()),
        }
        if modes:
            set_mode(self.optimizer, train=True)
        return found

    def _load_weights(self, weights: Case) -> None:
        self.model.load_state_dict(weights["model"])
        if self.average is not None:
            self.average.load_state_dict(weights["average"])

    def _take_snapshot(self) -> None:
        self.snapshots[self.key] = {
            "model": copy.deepcopy(self.model.state_dict()),
            "average": None if self.average is None else copy.deepcopy(self.average.state_dict()),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "scheduler": None if self.scheduler is None else copy.deepcopy(self.scheduler.state_dict()),
            "values": (self.steps, self.epoch, self.losses, self.counted, len(self.done)),
        }

    def _restore(self, key: Key) -> None:
        snapshot = copy.deepcopy(self.snapshots[key])
        self._load_weights(snapshot)
        self.optimizer.load_state_dict(snapshot["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(snapshot["scheduler"])
        self.steps, self.epoch, self.losses, self.counted, steps = snapshot["values"]
        self.done = self.done[:steps]

    # The data

    def _version(self, epoch: int) -> int:
        at_epoch = self.case["data_change"] and self.case["data_change_at"] == "epoch"
        return epoch if at_epoch else self.data_changes

    def _steps_of_run(self) -> int:
        case = self.case
        steps = steps_in_epoch(case)
        if case["scheduler_every"] == "epoch":
            return int(-(-case["max_steps"] // steps) if case["max_steps"] else case["epochs"])
        return int(case["max_steps"] or case["epochs"] * steps)

    def _batch(self, numbers: list[int]) -> tuple[Tensor, Tensor]:
        versions = {number // parts.VERSION for number in numbers} if self.case["data_change"] == "tensors" else {0}
        inputs, targets = parts.training_samples({**self.case, "version": max(versions | {self.case["version"]})})
        if versions != {0} or self.case["data_change"] == "tensors":
            (version,) = versions
            inputs, targets = parts.training_samples({**self.case, "version": version})
            numbers = [number % parts.VERSION for number in numbers]
        return inputs[numbers].clone(), targets[numbers]

    def check_samples(self) -> None:
        """Raise WrongError unless the steps of each epoch used the samples of the data in their order."""
        for epoch in sorted({epoch for epoch, _, _ in self.done}):
            steps = [(samples, version) for number, samples, version in self.done if number == epoch]
            plain = []
            for samples, version in steps:
                if self.case["data_change"] == "tensors":
                    found = {number // parts.VERSION for number in samples}
                    if found != {version}:
                        raise WrongError(f"samples: epoch {epoch + 1} used version {found} of the data, not {version}")
                    samples = [number % parts.VERSION for number in samples]
                plain.append(samples)
            case = {**self.case, "version": steps[-1][1]}
            if self.case["sampler"] == "twins":
                self._check_pairs(epoch, plain, epoch < self.epoch)
                continue
            for text in check_epoch(case, epoch, plain, epoch < self.epoch):
                raise WrongError(f"samples: epoch {epoch + 1}: {text}")

    def _check_pairs(self, epoch: int, steps: list[list[int]], is_complete: bool) -> None:
        count = self.case["samples"]
        pairs = [divmod(number, count) for step in steps for number in step]
        for side in (0, 1):
            found = sorted(pair[side] for pair in pairs)
            if len(set(found)) != len(found) or (is_complete and found != list(range(count))):
                raise WrongError(f"samples: epoch {epoch + 1} used {found} on side {side} of the pairs")
        if is_complete and all(i == j for i, j in pairs):
            raise WrongError(f"samples: epoch {epoch + 1}: the orders of two generators are equal")

    # Calls

    def enter(self, settings: Case) -> None:
        """Note, before the object is created in a new process, whether its schedule was planned for another length."""
        if self.case.get("total_steps") and self.case["output"] and self.durable != (0, 0):
            lengths = [(case["epochs"], case["max_steps"]) for case in (self.case, {**self.case, **settings})]
            self.has_other_length |= lengths[0] != lengths[1]

    def create(self, event: dict[str, Any], settings: Case) -> None:
        """Resume from the checkpoint that the run under test resumed from, in a new process."""
        key = (event["epoch"], event["step"])
        if not self.case["output"] or key == (0, 0) == self.durable:
            if key != (0, 0):
                raise WrongError(f"resume: a new run started at epoch {key[0]} and step {key[1]}")
            self._start({**self.rules, **settings})
            return
        if key == (self.epoch + 1, self.steps) and key not in self.snapshots:
            self.last_results = self._results()
            self._end_epoch(self.last_results)
        if key not in self.snapshots or key[1] < self.durable[1] or key < self.durable:
            raise WrongError(f"resume: the run resumed at (epoch, step) {key}, but {self.durable} was saved")
        self._restore(key)
        self.has_pending_end = key in self.ended  # the next fit completes it
        self.case = {**self.case, **settings, "version": self._version(self.epoch)}
        self.durable, self.has_other_weights = key, False
        change = self.case["change"]
        self.model.first.requires_grad_(not change or change[0] != "unfreeze")
        if change and change[0] in ("freeze", "unfreeze") and self.steps >= change[1]:
            self.model.first.requires_grad_(change[0] == "unfreeze")

    def fit(self, argument: Any, record: dict[str, Any], events: Events) -> None:
        outcome = record["value"]
        trained = any(event["kind"] == "epoch" for event in events)
        for event in events:
            if event["kind"] == "step":
                raised = event is events[-1] and outcome.get("interrupted") == "on_step_end"
                self._check_step(event, is_saved=not raised)
            elif event["kind"] == "epoch":
                is_last = event is events[-1]
                raises = is_last and outcome.get("interrupted") == "on_epoch_end"
                self._check_epoch_end({**event, "last": is_last and "returned" in outcome, "raises": raises})
        self.check_samples()
        if "returned" in outcome:
            if not self._is_at_end() and not trained and self._is_epoch_trained():
                self._end_epoch(self._results())  # the end of the last epoch was interrupted before
            if record["fired"] and argument[0] != "stop":
                raise WrongError(f"end: fit returned although {argument[0]} raised an exception")
            reached = self._is_at_end() or (argument and argument[0] == "stop" and self.steps >= argument[1])
            if not reached and not self.case["max_seconds"]:
                raise WrongError(f"end: fit returned at epoch {self.epoch}, step {self.steps}: {outcome['reason']}")
            expected = (
                self.last_results if trained else {f"val_{k}": v for k, v in self._evaluate_if_possible().items()}
            )
            check_equal(self.compare, _without(outcome["returned"]), expected, "results")
            self.durable = self.key if trained else self.durable
        elif not record["fired"]:
            raise WrongError("end: fit raised an interruption that was not requested")
        elif outcome["interrupted"] in ("metric", "interrupt") and self._is_epoch_trained() and self.case["output"]:
            # A trained epoch is saved before its validation.
            self.durable = self.key if self._is_save_due(self.epoch + 1) else self.durable
        if self._is_at_end() and "returned" in outcome and self.has_other_length:
            self._check_end_of_schedule(record, events)

    def _is_at_end(self) -> bool:
        most = self.case["max_steps"]
        return self.steps >= most if most else self.epoch >= self.case["epochs"]

    def _check_step(self, event: dict[str, Any], *, is_saved: bool) -> None:
        if event["epoch"] == self.epoch + 1:  # the end of the epoch was interrupted
            self._end_epoch(self._results())
        if self._is_at_end():
            raise WrongError(f"end: step {event['step']} of epoch {event['epoch']} after the end of the run")
        if (event["epoch"], event["step"]) != (self.epoch, self.steps + 1):
            raise WrongError(f"steps: step {event['step']} of epoch {event['epoch']} after {self.key}")
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        if self.has_other_length:
            for group, rate in zip(self.optimizer.param_groups, event["rates"], strict=True):
                group["lr"] = rate
        else:
            check_equal(self.compare, event["rates"], rates, f"rates of step {event['step']}")
        step = Step(self.epoch, event["micro_steps"])
        self.case["version"] = self._version(self.epoch)
        self.done.append((self.epoch, step.samples, self.case["version"]))
        self._check_numbers(step.samples)
        self._step(step)
        self._take_snapshot()
        every = self.case["checkpoint_every_steps"]
        if self.case["output"] and every and self.steps % every == 0 and is_saved:
            self.durable = self.key

    def _check_numbers(self, samples: list[int]) -> None:
        """Raise WrongError for samples of which the oracle has no data, before they are used."""
        versions = {number // parts.VERSION for number in samples}
        if self.case["data_change"] == "tensors" and len(versions) > 1:
            raise WrongError(f"samples: a step used the versions {versions} of the data")
        count = len(parts.training_samples(self.case)[0])
        if self.case["data_change"] != "tensors" and samples and max(samples) >= count:
            raise WrongError(f"samples: {samples} of a dataset of {count} samples")

    def _check_epoch_end(self, event: dict[str, Any]) -> None:
        is_repeated = event["complete"] and event["epoch"] == self.epoch  # the end was interrupted before
        results = self.last_results if is_repeated else self._results()
        check_equal(self.compare, _without(event["results"]), results, f"results of epoch {event['epoch']}")
        self.last_results = results
        if event["complete"] and not is_repeated:
            if event["epoch"] != self.epoch + 1:
                raise WrongError(f"steps: epoch {event['epoch']} ended after {self.key}")
            self._end_epoch(results)
        is_saved = self._is_at_end() or not event["complete"] or event["last"] or self._is_save_due(self.epoch)
        if self.case["output"] and is_saved and not event["raises"]:
            self.durable = self.key
            self.ended.discard(self.key)
            if self.case["keep_best"]:
                self.saved[self.key] = (results[self.case["keep_best"]], self._copy_weights())

    def _is_save_due(self, epochs: int) -> bool:
        """Return whether the settings request a checkpoint at this step, after `epochs` epochs."""
        every = self.case["checkpoint_every_steps"]
        return epochs % self.case["checkpoint_every"] == 0 or bool(every and self.steps % every == 0)

    def _is_epoch_trained(self) -> bool:
        return [epoch for epoch, _, _ in self.done].count(self.epoch) == steps_in_epoch(self.case)

    def _results(self) -> dict[str, float]:
        loss = {"train_loss": self.losses / self.counted if self.counted else 0.0} if self.counted or self.done else {}
        return {**loss, **{f"val_{name}": value for name, value in self._evaluate_if_possible().items()}}

    def _evaluate_if_possible(self) -> dict[str, float]:
        return {} if self.case["validation"] is None else Oracle.evaluate(self)

    def _end_epoch(self, results: dict[str, float]) -> None:
        if not self.has_other_length:
            self._step_epoch_scheduler(results)
        self.epoch += 1
        self.losses = self.counted = 0.0
        self.ended.add(self.key)
        self._take_snapshot()

    def _check_end_of_schedule(self, record: dict[str, Any], events: Events) -> None:
        name, initial = self.case["scheduler"].partition("_")[2], self.case["optimizer_settings"]["lr"]
        found = record["state"]["rates"][0]
        if name == "one_cycle":  # the last step has the smallest rate
            found = [event for event in events if event["kind"] == "step"][-1]["rates"][0]
        last = {"cosine": 0.0, "linear": 0.1 * initial, "one_cycle": 0.1 / 25e4}[name]
        check_equal(self.compare, found, last, "rates at the end of a schedule of another length")

    def _step(self, step: Step) -> None:
        scheduler = self.scheduler
        if self.has_other_length:
            self.scheduler = None
        super()._step(step)
        self.scheduler = scheduler

    def _outputs(self) -> tuple[Any, Tensor]:
        modes = not self.has_other_weights and set_mode(self.optimizer, train=False)
        found = super()._outputs()
        if modes:
            set_mode(self.optimizer, train=True)
        return found

    def call(self, verb: str, argument: Any, record: dict[str, Any], events: Events) -> None:
        """Execute a call and compare its record. Raise WrongError for a difference."""
        value = record["value"]
        if self.case["loss"] == "accuracy" and (verb == "evaluate" or any(e["kind"] == "step" for e in events)):
            raise WrongError("loss: unitrain took the accuracy that loss_fn returns for a count")
        if verb == "fit":
            self.has_pending_end = False
            self.fit(argument, record, events)
        elif verb == "evaluate":
            check_equal(self.compare, _without(value), Oracle.evaluate(self), "evaluate")
        elif verb == "predict":
            check_equal(self.compare, value, parts.tensor_of(self._outputs()[0]).detach(), "predict")
        elif verb == "best":
            self._load_best(record)
        elif verb == "save":
            self.by_hand = copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})
        elif verb == "load":
            assert self.by_hand is not None
            saved = copy.deepcopy(self.by_hand)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
        elif argument == "data":
            self.data_changes += 1
            if self.case["data_change"] == "grow" and self.case.get("total_steps") and not self.case["max_steps"]:
                self.case["version"] = self.data_changes
                self.has_other_length |= self._steps_of_run() != self.case["total_steps"]
        else:
            parts.apply_change({**self.case, "change": [argument]}, self.model, self.optimizer)
        self.case["version"] = self._version(self.epoch)
        self._check_state(record["state"])

    def _load_best(self, record: dict[str, Any]) -> None:
        values = {key: value for key, (value, _) in self.saved.items() if math.isfinite(value)}
        if not values:
            if record["value"] == "loaded":
                raise WrongError("best: a checkpoint was loaded although none has a result")
            return
        if record["value"] != "loaded":
            raise WrongError(f"best: {record['value']}")
        least = min(values.values())
        names = []
        for key in [key for key, value in values.items() if value <= least + 1e-9 * (1 + abs(least))]:
            weights = self.saved[key][1]
            found = {name: weights["model"][name] for name in record["state"]["parameters"]}
            if not (wrong := list(self.compare(record["state"]["parameters"], found, TOLERANCE, "best"))):
                self.has_other_weights = set_mode(self.optimizer, train=False)
                self._load_weights(weights)
                return
            names += wrong
        raise WrongError(f"best: the weights are not those of {min(values, key=values.__getitem__)}: {names[0]}")

    def _check_state(self, state: dict[str, Any]) -> None:
        modes = not self.has_other_weights and set_mode(self.optimizer, train=False)
        expected: Case = {
            "parameters": dict(self.model.named_parameters()),
            "buffers": dict(self.model.named_buffers()),
            "average": None if self.average is None else dict(self.average.named_parameters()),
            "optimizer": None if self.case["shard"] != "none" else self.optimizer.state_dict(),
        }
        for name, value in expected.items():
            is_planned = (self.case["scheduler"] or "").startswith("planned") and not self.steps
            is_other = self.has_other_length or self.has_pending_end or modes or self.has_other_weights or is_planned
            if name == "optimizer" and is_other:
                continue
            check_equal(self.compare, state[name], value, name)
        if modes:
            set_mode(self.optimizer, train=True)


class LoopOracle(sequence_loops.Loop):
    """A loop over all sections of a program, on the global batches."""

    def __init__(self, case: Case, compare: Callable[..., Iterator[str]]) -> None:
        self.compare, self.by_hand = compare, None
        super().__init__(case, 0)
        self.positions: list[list[int]] = [[] for _ in case["loaders"]]
        self.data = [sequence_loops.samples(case, number) for number in range(len(case["loaders"]))]

    def enter(self, settings: Case) -> None:
        pass

    def create(self, event: dict[str, Any], settings: Case) -> None:
        saved = self.by_hand
        self.__init__(self.case, self.compare)  # type: ignore[misc]
        self.by_hand = saved

    def call(self, verb: str, argument: Any, record: dict[str, Any], events: Events) -> None:
        if verb == "run":
            for number, event in enumerate(event for event in events if event["kind"] == "step"):
                self._check_batches(event["batches"])
                self.step(lambda event=event: self._loss(event["batches"]))  # type: ignore[misc]
                check_equal(self.compare, event["parameters"], self.parameters(), f"parameters after step {number + 1}")
        elif verb == "evaluate":
            check_equal(self.compare, record["value"], self.evaluate(None), "evaluate")
        elif verb == "save":
            self.by_hand = copy.deepcopy(
                ([own.state_dict() for own in [*self.models, *self.optimizers]], self.positions)
            )
        elif verb == "load":
            states, self.positions = copy.deepcopy(self.by_hand)
            for own, state in zip([*self.models, *self.optimizers], states, strict=True):
                own.load_state_dict(state)
        elif verb != "rewrap":
            getattr(self, verb)(argument)
        check_equal(self.compare, record["state"]["parameters"], self.parameters(), "parameters")
        buffers = [dict(model.named_buffers()) for model in self.models]
        check_equal(self.compare, record["state"]["buffers"], buffers, "buffers")

    def _check_batches(self, batches: list[list[Piece]]) -> None:
        """Raise WrongError unless each epoch of a loader uses every sample once, 6 samples per step."""
        for number, pieces in enumerate(batches):
            count, used = self.case["loaders"][number], self.positions[number]
            if len(used) == count:
                used = self.positions[number] = []
            found = [sample for piece in pieces if piece.live for sample in piece.numbers]
            used += found
            if len(set(used)) != len(used) or len(found) != min(6, count - len(used) + len(found)):
                raise WrongError(f"samples: loader {number} used {found} after {used[: -len(found)]} of {count}")

    def _loss(self, batches: list[list[Piece]]) -> Tensor:
        """Return the sum over loaders of the mean losses of their global batches."""
        total = torch.zeros((), dtype=torch.float64)
        per_rank = self.case["swap"] or self.case["compose"] == "sandwich"
        for (inputs, targets), pieces in zip(self.data, batches, strict=True):
            live = [piece for piece in pieces if piece.live]
            count = sum(len(piece.numbers) for piece in live)
            merged = [(piece.rank, piece.numbers) for piece in live]
            if not per_rank:
                merged = [(0, [number for piece in live for number in piece.numbers])]
            for self.rank, numbers in merged:
                loss = nn.functional.mse_loss(self.output(inputs[numbers]), targets[numbers])
                total = total + loss * len(numbers) / count
        self.rank = 0
        return total


def _without(results: dict[str, float]) -> dict[str, float]:
    """Return results without the metric that interrupts a validation."""
    return {name: value for name, value in results.items() if not name.endswith("interrupted")}


# Refusals


def allowed_refusals(case: Case, oracle: Any, events: Events) -> dict[str, set[str]]:
    """Return the errors with which unitrain may refuse a call, by reason. Every rank must raise the same error, before
    it trains a step, if `events` has one, except for batches that are ambiguous in later steps only."""
    found: dict[str, set[str]] = {}
    synchronized = any("sync_norm" in features for features in case.get("models", ()))
    if synchronized and len(case["loaders"]) > 1 and case["compose"] == "chain":
        found["a synchronized layer whose inputs may belong to a dummy batch of any loader"] = {"ModelError"}
    if any(event["kind"] == "step" for event in events):
        return found
    errors = {"ConfigError", "ModelError", "UnsupportedError", "DataError"}
    if case["kind"] == "loop":
        if case["shard"] != "none":
            if any("alias" in features for features in case["models"]):
                found["sharding of parameters that share memory"] = errors
            if {"GlobalScale", "ScheduleFree"} & set(case["optimizers"]):
                found["sharding of an optimizer that may not be elementwise"] = errors
        if case["swap"]:
            found["models called in different orders on the ranks"] = errors | {"CollectiveMismatchError"}
        return found
    if case["loss"] == "accuracy":
        found["a loss function that returns the accuracy"] = errors
    if case["shard"] != "none" and "alias" in case["features"]:
        found["sharding of parameters that share memory"] = errors
    if case["shard"] != "none" and case["optimizer"] in ("GlobalScale", "ScheduleFree"):
        found["sharding of an optimizer that may not be elementwise"] = errors
    if case["sampler"] in parts.OWN_GENERATORS and oracle.done and oracle.done[-1][0] == oracle.epoch:
        found["a resume within an epoch whose sampler draws from its own generator"] = {"DataError", "CheckpointError"}
    if case["data_change"] == "grow" and oracle.done and oracle.done[-1][0] == oracle.epoch:
        found["data that grows within an epoch"] = {"DataError", "CheckpointError"}
    if oracle.has_other_length:
        found["a schedule that was planned for another number of steps"] = {"CheckpointError", "ConfigError"}
    return found
