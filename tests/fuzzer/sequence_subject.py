"""Runs the sections of a random program on real ranks, like a user's script, and records what each call did."""

from __future__ import annotations

import random
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unitrain
from unitrain.backends.base import Backend

from . import parts, sequence_loops, subject
from .cases import equalize_step_sizes, has_predefined_batches
from .oracle import steps_in_epoch
from .subject import InterruptionError, copy_tensors
from .user_objects import set_mode

Case = dict[str, Any]


def run_section(backend: Backend, case: Case, number: int, folder: str) -> list[dict[str, Any]]:
    """Run a section of a program. Return a record of each call, up to the first call that raised an error of unitrain.

    A record has the events of the call, its value or its error, and the state of the object after the call.
    """
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    section = case["sections"][number]
    objects: dict[str, Any] = {}
    records: list[dict[str, Any]] = []
    for place, (name, verb, argument) in enumerate(section["calls"]):
        events: list[dict[str, Any]] = []
        record: dict[str, Any] = {"events": events, "value": None, "error": None, "state": None, "fired": None}
        records.append(record)
        try:
            if name not in objects:
                definition = {**case["objects"][name], **settings_of(case, name, number)}
                version = count_data_changes(case, name, number, place)
                kind = TrainerOfProgram if definition["kind"] == "trainer" else LoopOfProgram
                objects[name] = kind(backend, definition, section, Path(folder) / name, version, events)
            own = objects[name]
            own.events = events
            record["value"] = getattr(own, verb)(argument)
            record["state"] = own.state()
            record["fired"] = own.fired()
        except Exception as error:
            record["error"] = (type(error).__name__, str(error), traceback.format_exc())
            return records
    return records


def settings_of(case: Case, name: str, number: int) -> Case:
    """Return the settings of an object that sections up to `number` have changed."""
    changed: Case = {}
    for section in case["sections"][: number + 1]:
        changed |= section["settings"].get(name, {})
    return changed


def count_data_changes(case: Case, name: str, number: int, place: int) -> int:
    """Return how many calls before call `place` of section `number` change the data of an object."""
    before = [call for section in case["sections"][:number] for call in section["calls"]]
    before += case["sections"][number]["calls"][:place]
    return sum(call == [name, "change", "data"] for call in before)


class Interruption:
    """Raises an exception at the requested place, once, in or after the requested step, on every rank."""

    def __init__(self) -> None:
        self.place, self.step, self.fired = "", 0, False
        self.get_step: Any = None

    def arm(self, end: list[Any] | None) -> None:
        self.place, self.step = end or ("", 0)
        self.fired = False

    def check(self, place: str, step: int | None = None) -> None:
        step = self.get_step() if step is None else step
        if place == self.place and not self.fired and step >= self.step:
            self.fired = True
            raise KeyboardInterrupt if place == "interrupt" else InterruptionError


class EventRecorder(unitrain.Callback):
    """Records the steps and the epochs of a run, changes the data, and stops or interrupts the run."""

    def __init__(self, own: TrainerOfProgram) -> None:
        self.own = own
        self.micro_steps: list[tuple[list[int], bool]] = []
        self.rates: list[float] = []

    def on_fit_start(self, trainer: Any) -> None:
        self.micro_steps = []

    def on_micro_batch_end(self, trainer: Any, batch: Any, micro_batch: Any, loss: Any) -> None:
        self.micro_steps.append((batch[0][:, 0].long().tolist(), micro_batch.samples > 0))
        self.own.interruption.check("on_micro_batch_end", trainer.progress.step + 1)

    def on_before_optimizer_step(self, trainer: Any) -> None:
        self.rates = [float(group["lr"]) for group in self.own.optimizer.param_groups]
        self.own.interruption.check("on_before_optimizer_step", trainer.progress.step + 1)

    def on_step_end(self, trainer: Any) -> None:
        case, progress, step = self.own.case, trainer.progress, trainer.progress.step
        event = {"kind": "step", "step": step, "epoch": progress.epoch, "rates": self.rates}
        self.own.events.append({**event, "micro_steps": self.micro_steps})
        self.micro_steps = []
        if case["change"] and step == case["change"][1]:
            parts.apply_change(case, self.own.model, self.own.optimizer)
        interruption = self.own.interruption
        if interruption.place == "stop" and step >= interruption.step:
            interruption.fired = True
            trainer.stop("requested by the program")
        interruption.check("on_step_end", step)

    def on_epoch_end(self, trainer: Any, results: dict[str, float]) -> None:
        progress, case = trainer.progress, self.own.case
        event = {"kind": "epoch", "step": progress.step, "epoch": progress.epoch, "results": dict(results)}
        self.own.events.append({**event, "complete": progress.sample == 0})
        if case["data_change"] and case["data_change_at"] == "epoch":
            self.own.change_data(progress.epoch)
        self.own.interruption.check("on_epoch_end", progress.step)


class TrainerOfProgram:
    """A Trainer with its model, optimizer and data, which live until the end of the section."""

    def __init__(
        self, backend: Backend, case: Case, section: Case, folder: Path, version: int, events: list[dict[str, Any]]
    ) -> None:
        self.case, self.backend, self.folder, self.events = case, backend, folder, events
        self.interruption = Interruption()
        self.has_other_weights = False  # weights of a checkpoint, which the optimizer must not convert
        self.model = parts.Network(case)
        self.optimizer = parts.create_optimizer(case, self.model, late=False)
        scheduler_steps = None
        if (case["scheduler"] or "").startswith("sized"):
            scheduler_steps = steps_of_run({**case, "version": version})
        scheduler = parts.create_scheduler(case, self.optimizer, scheduler_steps)
        change = case["change"]
        segment = {"size": section["size"], "backend": section["backend"], "end": None}
        segment["accumulate"] = accumulation(case, section["size"])
        if case["max_steps"]:
            segment["end"] = ["steps", case["max_steps"]]
        if change and change[0] == "unfreeze":
            self.model.first.requires_grad_(False)
        loss_fn = parts.loss_function(case)

        def loss(output: Any, target: Tensor) -> Any:
            if self.model.training:
                self.interruption.check("loss", self.trainer.progress.step + 1)
            return loss_fn(output, target)

        self.interruption.get_step = lambda: self.trainer.progress.step
        self.trainer = unitrain.Trainer(
            self.model,
            self.optimizer,
            loss,
            backend=backend,
            config=subject.create_config(case, segment, str(folder)),
            scheduler=scheduler,
            metrics=self._metrics(),
            callbacks=[EventRecorder(self)],
            forward=parts.Forward(case) if "penalty" in case["features"] else None,
        )
        progress = self.trainer.progress
        if change and change[0] in ("freeze", "unfreeze") and progress.step >= change[1]:
            self.model.first.requires_grad_(change[0] == "unfreeze")
        events.append({"kind": "created", "step": progress.step, "epoch": progress.epoch})
        at_epoch = case["data_change"] and case["data_change_at"] == "epoch"
        self.version = progress.epoch if at_epoch else version
        batch_size = subject.batch_size_of(case, segment)
        self.data = parts.training_data({**case, "version": self.version}, batch_size, backend.rank, backend.size)
        self.validation = parts.validation_data(case, backend.rank, backend.size)
        if case["source"] == "map" and not case["workers"]:
            dataset = self.data.dataset if case["loader"] else self.data
            dataset.on_read = lambda: self.interruption.check("dataset", self.trainer.progress.step + 1)

    def _metrics(self) -> dict[str, Any]:
        metrics = parts.create_metrics(self.case)
        if self.case["validation"] is None:
            return metrics

        def interrupted(output: Any, target: Tensor) -> Tensor:
            self.interruption.check("metric")
            self.interruption.check("interrupt")
            return parts.square_sums(output, target)

        return {**metrics, "interrupted": interrupted}

    def fit(self, end: list[Any] | None) -> dict[str, Any]:
        self.interruption.arm(end)
        try:
            return {"returned": self.trainer.fit(self.data, self.validation), "reason": self.trainer.stop_reason}
        except (Exception, KeyboardInterrupt) as error:
            found: BaseException | None = error
            while found is not None:
                # A rank may receive the error of another rank without its cause.
                if isinstance(found, InterruptionError | KeyboardInterrupt) or "InterruptionError" in str(found):
                    return {"interrupted": self.interruption.place}
                found = found.__cause__ or found.__context__
            raise

    def evaluate(self, _: Any) -> dict[str, float]:
        self.interruption.arm(None)
        return self.trainer.evaluate(parts.validation_data(self.case, self.backend.rank, self.backend.size))

    def predict(self, _: Any) -> Tensor:
        self.interruption.arm(None)
        return self.trainer.predict(parts.validation_data(self.case, self.backend.rank, self.backend.size))

    def best(self, _: Any) -> str:
        self.trainer.checkpointer.wait()
        try:
            self.trainer.load_weights("best")
        except unitrain.CheckpointError as error:
            return str(error)
        self.has_other_weights = True
        return "loaded"

    def save(self, _: Any) -> None:
        save_by_hand(self.backend, self.folder, {"models": [self.model.state_dict()],
                                                 "optimizers": [self.optimizer.state_dict()]})  # fmt: skip

    def load(self, _: Any) -> None:
        saved = load_by_hand(self.folder)
        self.model.load_state_dict(saved["models"][0])
        self.optimizer.load_state_dict(saved["optimizers"][0])

    def change(self, what: str) -> None:
        if what == "data":
            self.change_data(self.version + 1)
        else:
            parts.apply_change({**self.case, "change": [what]}, self.model, self.optimizer)

    def change_data(self, version: int) -> None:
        """Change the training dataset in place."""
        self.version = version
        parts.change_data({**self.case, "version": version}, self.data)

    def state(self) -> dict[str, Any]:
        """Return the state after a call. Optimizers with modes have the parameters of the evaluation mode."""
        group: Any = self.optimizer.param_groups[0]
        was_training = group.get("train_mode", False) and not self.has_other_weights
        if was_training:
            set_mode(self.optimizer, train=False)
        average, sharded = self.trainer.averaged_model, self.case["shard"] != "none"
        optimizer = None if sharded else self.optimizer.state_dict()
        state = {
            "parameters": copy_tensors(self.model.named_parameters()),
            "buffers": copy_tensors(self.model.named_buffers()),
            "average": None if average is None else copy_tensors(average.named_parameters()),
            "optimizer": None if optimizer is None else _copy(optimizer),
            "rates": [float(group["lr"]) for group in self.optimizer.param_groups],
            "progress": (self.trainer.progress.epoch, self.trainer.progress.step, self.trainer.progress.sample),
        }
        if was_training:
            set_mode(self.optimizer, train=True)
        return state

    def fired(self) -> bool:
        return self.interruption.fired


class LoopOfProgram(sequence_loops.Loop):
    """Training without the Trainer: distributed models, optimizers and sharded loaders."""

    def __init__(
        self, backend: Backend, case: Case, section: Case, folder: Path, version: int, events: list[dict[str, Any]]
    ) -> None:
        self.backend, self.folder, self.events = backend, folder, events
        super().__init__(case, backend.rank)
        for model, features in zip(self.models, case["models"], strict=True):
            if "sync_norm" in features:
                unitrain.sync_batch_norm(model, backend)
        self.rewrap(None)
        self.loaders = [
            unitrain.ShardedLoader(
                TensorDataset(*sequence_loops.samples(case, number)), backend, batch_size=6 // backend.size
            )
            for number in range(len(case["loaders"]))
        ]
        self.iterators: list[Any] = [None] * len(self.loaders)
        events.append({"kind": "created"})

    def rewrap(self, _: Any) -> None:
        settings = {"find_unused_parameters": self.case["unused"]}
        self.called: list[nn.Module] = [self.backend.distributed_model(model, **settings) for model in self.models]
        self.optimizers = [
            self.backend.distributed_optimizer(optimizer, model, shard=self.case["shard"])
            for optimizer, model in zip(self.optimizers, self.called, strict=True)
        ]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            batches = [self._next_batch(number) for number in range(len(self.loaders))]
            weights = [loader.loss_weight for loader in self.loaders]
            live = [loader.num_samples > 0 for loader in self.loaders]

            def compute() -> Tensor:
                losses = [
                    nn.functional.mse_loss(self.output(x), y) * weight
                    for (x, y), weight in zip(batches, weights, strict=True)  # noqa: B023
                ]
                return torch.stack(losses).sum()

            self.step(compute)
            numbers = [(x[:, 0].long().tolist(), own) for (x, _), own in zip(batches, live, strict=True)]
            self.events.append({"kind": "step", "batches": numbers, "parameters": self.parameters()})

    def _next_batch(self, number: int) -> Any:
        """Return the next batch of a loader. A loop may yield nothing if it resumes at the end of an epoch."""
        while True:
            batch = None if self.iterators[number] is None else next(self.iterators[number], None)
            if batch is not None:
                return batch
            self.iterators[number] = iter(self.loaders[number])

    def save(self, _: Any) -> None:
        save_by_hand(self.backend, self.folder, {
            "models": [model.state_dict() for model in self.models],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "loaders": [loader.state_dict() for loader in self.loaders],
        })  # fmt: skip

    def load(self, _: Any) -> None:
        saved = load_by_hand(self.folder)
        for own, state in zip([*self.models, *self.optimizers], saved["models"] + saved["optimizers"], strict=True):
            own.load_state_dict(state)
        for number, loader in enumerate(self.loaders):
            self.iterators[number] = None
            loader.load_state_dict(saved["loaders"][number])

    def state(self) -> dict[str, Any]:
        buffers = [copy_tensors(model.named_buffers()) for model in self.models]
        return {"parameters": self.parameters(), "buffers": buffers}

    def fired(self) -> None:
        return None


def steps_of_run(case: Case) -> int:
    """Return the number of scheduler steps that a script computes for its run."""
    if case["scheduler_every"] == "epoch" and not case["max_steps"]:
        return int(case["epochs"])
    steps = steps_in_epoch(case)
    if case["scheduler_every"] == "epoch":
        return -(-case["max_steps"] // steps)
    return int(case["max_steps"] or case["epochs"] * steps)


def accumulation(case: Case, size: int) -> int:
    """Return the micro-batches per step on `size` ranks."""
    segment = {"backend": "ddp", "size": size, "accumulate": case["accumulate"], "end": None}
    (valid,) = equalize_step_sizes(case, [segment], has_predefined_batches(case))
    return int(valid["accumulate"])


def save_by_hand(backend: Backend, folder: Path, state: dict[str, Any]) -> None:
    """Save a state as a script does: rank 0 writes it, and the other ranks wait."""
    if backend.rank == 0:
        folder.parent.mkdir(exist_ok=True)
        torch.save(state, f"{folder}-by-hand.pt")
    backend.barrier()


def load_by_hand(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(f"{folder}-by-hand.pt", weights_only=True)
    return loaded


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copy(part) for key, part in value.items()}
    return [_copy(part) for part in value] if isinstance(value, list | tuple) else value
