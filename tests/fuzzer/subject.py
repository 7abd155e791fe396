"""Runs a case with the Trainer on real ranks, like a user's script. A segment is a run between two interruptions."""

from __future__ import annotations

import copy
import random
import traceback
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import unitrain
from unitrain.backends.base import Backend
from unitrain.errors import CallbackError

from . import parts

Case = dict[str, Any]


class InterruptionError(Exception):
    """The exception that a case raises during a run."""


class Recorder(unitrain.Callback):
    """Records the samples and learning rates of each step and the results of each epoch. Applies the changes and
    interruptions of the case."""

    def __init__(self, case: Case, end: list[Any] | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.case, self.end, self.model, self.optimizer = case, end, model, optimizer
        self.steps: dict[int, dict[str, Any]] = {}
        self.epochs: list[tuple[int, bool, dict[str, float]]] = []
        self.micro_steps: list[tuple[list[int], bool]] = []
        self.again: list[Any] | None = case["again"]

    def on_fit_start(self, trainer: Any) -> None:
        self.micro_steps = []

    def interrupt_if_due(self, callback: str, step: int) -> None:
        """Raise InterruptionError once, in the callback and the step in which the case interrupts `fit`."""
        if self.again == [callback, step]:
            self.again = None
            raise InterruptionError

    def on_micro_batch_end(self, trainer: Any, batch: Any, micro_batch: Any, loss: Any) -> None:
        inputs = batch["x"] if isinstance(batch, dict) else batch[0]
        self.micro_steps.append((inputs[:, 0].long().tolist(), micro_batch.samples > 0))
        self.interrupt_if_due("on_micro_batch_end", trainer.progress.step + 1)

    def on_before_optimizer_step(self, trainer: Any) -> None:
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        progress = trainer.progress
        self.steps[progress.step] = {"epoch": progress.epoch, "micro_steps": self.micro_steps, "rates": rates}
        self.micro_steps = []
        self.interrupt_if_due("on_before_optimizer_step", progress.step + 1)

    def on_step_end(self, trainer: Any) -> None:
        step, change = trainer.progress.step, self.case["change"]
        if change and step == change[1]:
            parts.apply_change(self.case, self.model, self.optimizer)
        if self.end and step == self.end[1] and self.end[0] == "stop":
            trainer.stop("requested by the case")
        if self.end and step == self.end[1] and self.end[0] == "raise":
            raise InterruptionError
        self.interrupt_if_due("on_step_end", step)

    def on_epoch_end(self, trainer: Any, results: dict[str, float]) -> None:
        if self.end and trainer.progress.step >= self.end[1] and self.end[0] == "raise after epoch":
            raise InterruptionError
        self.epochs.append((trainer.progress.epoch, trainer.progress.sample == 0, dict(results)))


class StepCounter(unitrain.Callback):
    """Counts steps in a container of the type that the case specifies, and saves the container in checkpoints."""

    def __init__(self, container: str) -> None:
        self.seen: Any = {"Counter": Counter, "defaultdict": lambda: defaultdict(int)}.get(container, OrderedDict)()
        if container == "dict":
            self.seen = {}

    def on_step_end(self, trainer: Any) -> None:
        self.seen["steps"] = self.seen.get("steps", 0) + 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "list": [1, (2, 3)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["list"] == [1, (2, 3)], state
        assert type(state["seen"]) is type(self.seen), f"a {type(self.seen).__name__} became {type(state['seen'])}"
        self.seen = state["seen"]


def run(backend: Backend, case: Case, segment_index: int, folder: str) -> dict[str, Any]:
    """Run segment `segment_index` of a case, and return its results or the exception that it raised."""
    try:
        return _run(backend, case, segment_index, folder)
    except Exception as error:
        return {"error": (type(error).__name__, str(error)), "traceback": traceback.format_exc()}


def _run(backend: Backend, case: Case, segment_index: int, folder: str) -> dict[str, Any]:
    segment = case["segments"][segment_index]
    end, start = segment["end"], case["_starts"][segment_index]
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    model = parts.Network(case)
    change = case["change"]
    changed = bool(change) and start >= change[1]
    optimizer = parts.create_optimizer(case, model, late=changed and change[0] == "add")
    if change and change[0] in ("freeze", "unfreeze"):
        model.first.requires_grad_((change[0] == "unfreeze") == changed)
    scheduler = parts.create_scheduler(case, optimizer)
    recorder = Recorder(case, end, model, optimizer)
    callbacks: list[unitrain.Callback] = [recorder]
    counting = StepCounter(case["counting"]) if case["counting"] else None
    if counting:
        callbacks.insert(0, counting)  # before the callbacks that interrupt
    if case["early_stopping"]:
        monitor, patience = case["early_stopping"]
        callbacks.append(unitrain.EarlyStopping(monitor, patience=patience))
    forward = parts.Forward(case) if case["collate"] == "dict" or "penalty" in case["features"] else None
    trainer = unitrain.Trainer(
        model,
        optimizer,
        parts.loss_function(case),
        backend=backend,
        config=create_config(case, segment, folder),
        scheduler=scheduler,
        metrics=parts.create_metrics(case),
        forward=forward,
        callbacks=callbacks,
    )
    train = parts.training_data(case, batch_size_of(case, segment), backend.rank, backend.size)
    validation = parts.validation_data(case, backend.rank, backend.size)
    results: dict[str, float] = {}
    interrupted = False
    while True:
        try:
            results = trainer.fit(train, validation)
        except CallbackError as error:
            if not isinstance(error.__cause__, InterruptionError):
                raise
            if case["again"] and recorder.again is None:
                recorder.again = []  # only once
                continue
            interrupted = True
        break
    outcome: dict[str, Any] = {
        "steps": recorder.steps,
        "epochs": recorder.epochs,
        "results": results,
        "done": trainer.progress.step,
        "epochs_done": trainer.progress.epoch,
        "parameters": copy_tensors(model.named_parameters()),
        "buffers": copy_tensors(model.named_buffers()),
        "average": None if trainer.averaged_model is None else copy_tensors(trainer.averaged_model.named_parameters()),
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "counting": None if counting is None else counting.seen.get("steps", 0),
        "error": None,
    }
    if end is None and not interrupted and case["extra_call"] is not None:
        outcome[case["extra_call"]] = getattr(trainer, case["extra_call"])(
            parts.validation_data(case, backend.rank, backend.size)
        )
    return outcome


def create_config(case: Case, segment: Case, folder: str) -> unitrain.TrainConfig:
    """Return the settings of one segment of a case."""
    end = segment["end"]
    stops = end is not None and end[0] == "steps"
    settings: dict[str, Any] = {"max_steps": end[1]} if stops else {"max_epochs": case["epochs"]}
    if not case["loader"]:
        settings["batch_size"] = batch_size_of(case, segment)
    if case["validation"] == "tensors":
        settings["eval_batch_size"] = 3
    if case["lr_scaling"] != "none":
        settings |= {"lr_scaling": case["lr_scaling"], "reference_batch_size": 4, "warmup_steps": case["warmup"]}
    if case["output"]:
        settings |= {
            "output_dir": folder,
            "resume": True,
            "checkpoint_every_epochs": case["checkpoint_every"],
            "checkpoint_every_steps": case["checkpoint_every_steps"],
            "async_checkpoints": case["asynchronous"],
        }
    settings |= {name: case[name] for name in ("shard", "keep_best", "keep_last", "max_seconds") if name in case}
    if not case["output"]:
        settings.pop("keep_last", None)
    compression: Any = case["compression"]
    if compression.startswith("powersgd"):
        lossless = compression == "powersgd_full"
        compression = unitrain.PowerSGD(
            rank=8 if lossless else 1, start_step=0, min_compression_rate=1e-3 if lossless else 1.2
        )
    return unitrain.TrainConfig(
        gradient_accumulation_steps=segment["accumulate"],
        seed=case["seed"],
        shuffle=case["shuffle"],
        uneven=case["uneven"],
        stream="own" if case["source"] == "own" else "shared",
        find_unused_parameters=bool({"unused", "branch", "late", "embedding"} & set(case["features"])),
        sync_batch_norm="sync_norm" in case["features"],
        max_grad_norm=case["clip"],
        ema_decay=case["ema"],
        precision=case["precision"],
        compression=compression,
        scheduler_interval=case["scheduler_every"],
        log_every_n_steps=case["show_every"],
        progress="off",
        **settings,
    )


def batch_size_of(case: Case, segment: Case) -> int:
    """Return the number of samples per rank and micro-batch."""
    return max(1, case["global_batch"] // segment["size"] // segment["accumulate"])


def copy_tensors(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named}
