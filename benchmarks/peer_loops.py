"""The same training steps in comparable libraries, run in turns."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import loops
import torch
from loops import BATCH
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from unitrain.backends.base import Backend


@dataclass(frozen=True)
class EpochResult:
    """The mean loss of an epoch. `seconds` is set if the loop measures the time itself, to exclude the start-up of the
    library."""

    loss: float
    seconds: float | None = None


Turn = Callable[[int], EpochResult]
_prepared: dict[tuple[str, str], Turn] = {}


def take_turn(backend: Backend, loop: str, model: str, round_number: int) -> tuple[float, float]:
    """Train one epoch with `loop`, a key of PEER_LOOPS or `loops.LOOPS`. Return the seconds per step, measured between
    barriers, and the mean loss over all steps and ranks.

    All ranks must call this function. All loops use the same samples in each step, except unitrain's Trainer, which has
    a different sample order.
    """
    if (loop, model) not in _prepared:
        _prepared[loop, model] = _prepare(backend, loop, model)
    backend.barrier()
    started = time.perf_counter()
    result = _prepared[loop, model](round_number)
    backend.barrier()
    seconds = time.perf_counter() - started if result.seconds is None else result.seconds
    return seconds / loops.MODELS[model][1], result.loss


def _prepare(backend: Backend, loop: str, model: str) -> Turn:
    hidden, steps = loops.MODELS[model]
    torch.manual_seed(1)
    samples = steps * BATCH * backend.size
    data = TensorDataset(torch.randn(samples, loops.FEATURES), torch.randint(0, loops.CLASSES, (samples,)))
    if loop in loops.LOOPS:
        own = loops.LOOPS[loop](backend, loops.network(hidden), data)
        num_losses = 1 if loop == "Trainer" else steps  # the Trainer returns the mean, the other loops return a sum
        return lambda round_number: EpochResult(own(round_number) / num_losses)
    return PEER_LOOPS[loop](backend, loops.network(hidden), data)


class Batches:
    """This rank's shard of the data of an epoch, as in `loops`. It is passed to the libraries as a data loader."""

    def __init__(self, backend: Backend, data: TensorDataset) -> None:
        self.epoch = 0
        self._backend, self._data = backend, data

    def __len__(self) -> int:
        return len(self._data) // self._backend.size // BATCH

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        inputs, targets = self._data.tensors
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(self.epoch))
        for chosen in order[self._backend.rank :: self._backend.size].split(BATCH):
            yield inputs.index_select(0, chosen), targets.index_select(0, chosen)


def _loop(batches: Batches, model: Any, optimizer: Any, backward: Callable[[Tensor], Any], mean: Any) -> Turn:
    def turn(round_number: int) -> EpochResult:
        batches.epoch = round_number
        total = torch.zeros(())
        for inputs, targets in batches:
            loss = cross_entropy(model(inputs), targets)
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        return EpochResult(float(mean(total)) / len(batches))

    return turn


def _fabric(backend: Backend, model: nn.Module, data: TensorDataset) -> Turn:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    environment = TorchElasticEnvironment()
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=backend.size, plugins=[environment])
    fabric.launch()
    model, optimizer = fabric.setup(model, loops.sgd(model))
    mean = lambda total: fabric.all_reduce(total, reduce_op="mean")  # noqa: E731
    return _loop(Batches(backend, data), model, optimizer, fabric.backward, mean)


def _lightning(backend: Backend, model: nn.Module, data: TensorDataset) -> Turn:
    import lightning
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.total = torch.zeros(())

        def training_step(self, batch: Any, index: int) -> Tensor:
            inputs, targets = batch
            loss = cross_entropy(self.model(inputs), targets)
            self.total += loss.detach()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

        # The time is measured inside `fit`, because every call of `fit` wraps the model again.
        def on_train_epoch_start(self) -> None:
            self.total.zero_()
            backend.barrier()
            self.started = time.perf_counter()

        def on_train_epoch_end(self) -> None:
            self.mean = float(self.trainer.strategy.reduce(self.total, reduce_op="mean"))
            backend.barrier()
            self.seconds = time.perf_counter() - self.started

    optimizer = loops.sgd(model)
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=backend.size,
        plugins=[TorchElasticEnvironment()],
        max_epochs=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    batches = Batches(backend, data)

    def turn(round_number: int) -> EpochResult:
        batches.epoch = round_number
        trainer.fit_loop.max_epochs += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(module, batches)
        return EpochResult(module.mean / len(batches), module.seconds)

    return turn


def _accelerate(backend: Backend, model: nn.Module, data: TensorDataset) -> Turn:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == backend.size
    model, optimizer = accelerator.prepare(model, loops.sgd(model))
    mean = lambda total: accelerator.reduce(total, "mean")  # noqa: E731
    return _loop(Batches(backend, data), model, optimizer, accelerator.backward, mean)


def _ignite(backend: Backend, model: nn.Module, data: TensorDataset) -> Turn:
    import ignite.distributed as idist
    from ignite.engine import Engine, Events, create_supervised_trainer

    if backend.name == "horovod":
        # By default, Ignite would use the torch.distributed group that unitrain creates on Horovod.
        from ignite.distributed.comp_models.horovod import _HorovodDistModel

        idist.utils._set_model(_HorovodDistModel.create_from_context())
    assert idist.get_world_size() == backend.size
    assert idist.backend() == ("horovod" if backend.name == "horovod" else "gloo")
    optimizer = loops.sgd(model)
    model = idist.auto_model(model)
    optimizer = idist.auto_optim(optimizer)
    trainer = create_supervised_trainer(
        model, optimizer, cross_entropy, device="cpu", output_transform=lambda x, y, output, loss: loss.detach()
    )
    total = torch.zeros(())

    @trainer.on(Events.ITERATION_COMPLETED)
    def add(engine: Engine) -> None:
        total.add_(engine.state.output)

    batches = Batches(backend, data)

    def turn(round_number: int) -> EpochResult:
        batches.epoch = round_number
        total.zero_()
        trainer.run(batches, max_epochs=1)
        return EpochResult(float(idist.all_reduce(total.clone())) / backend.size / len(batches))

    return turn


PEER_LOOPS: dict[str, Callable[[Backend, nn.Module, TensorDataset], Turn]] = {
    "Lightning Fabric": _fabric,
    "Lightning Trainer": _lightning,
    "Accelerate": _accelerate,
    "ignite": _ignite,
}
