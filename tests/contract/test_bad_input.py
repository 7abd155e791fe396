"""Invalid input to a training run raises the same error on every rank, without a hang, and the group remains usable."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import unitrain
from unitrain import TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.data.sharding import TrainingShard
from unitrain.data.training_data import ShardSettings
from unitrain.errors import CollectiveMismatchError, UnitrainError
from unitrain.testing import RankGroup


def _data(count: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 3), torch.randn(count, 1))


def _train(
    backend: Backend, data: Any = 8, *, loss_fn: Any = nn.functional.mse_loss, val_data: Any = None, **settings: Any
) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = TrainConfig(**{"max_epochs": 1, "batch_size": 2, "progress": "off", **settings})
    Trainer(model, optimizer, loss_fn, backend=backend, config=config).fit(
        _data(data) if isinstance(data, int) else data, val_data
    )


def _loader(count: int = 8, **settings: Any) -> DataLoader[Any]:
    return DataLoader(_data(count), **{"batch_size": 2, **settings})


def zero_gradient_accumulation_steps(backend: Backend, _: str) -> None:
    _train(backend, gradient_accumulation_steps=0)


def indivisible_global_batch(backend: Backend, _: str) -> None:
    _train(backend, global_batch_size=7)


def empty_dataset(backend: Backend, _: str) -> None:
    _train(backend, 0)


def fewer_samples_than_ranks(backend: Backend, _: str) -> None:
    _train(backend, 1)


def nan_loss(backend: Backend, _: str) -> None:
    _train(backend, loss_fn=lambda output, target: (output - target).mean() * float("nan"))


def nan_loss_on_one_rank(backend: Backend, _: str) -> None:
    factor = float("nan") if backend.rank == 1 else 1.0
    _train(backend, loss_fn=lambda output, target: (output - target).pow(2).mean() * factor)


def output_folder_is_a_file(backend: Backend, folder: str) -> None:
    _train(backend, output_dir=Path(folder) / "file")


def no_trainable_parameters(backend: Backend, _: str) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.requires_grad_(False)
    Trainer(model, optimizer, nn.functional.mse_loss, backend=backend, config=TrainConfig(max_epochs=1, batch_size=2))


def optimizer_of_another_model(backend: Backend, _: str) -> None:
    optimizer = torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=0.1)
    config = TrainConfig(max_epochs=1, batch_size=2)
    Trainer(nn.Linear(3, 1), optimizer, nn.functional.mse_loss, backend=backend, config=config)


def different_settings(backend: Backend, _: str) -> None:
    _train(backend, seed=backend.rank)


def different_batch_sizes(backend: Backend, _: str) -> None:
    _train(backend, _loader(batch_size=2 - backend.rank), batch_size=None)


def shuffled_on_one_rank(backend: Backend, _: str) -> None:
    _train(backend, _loader(shuffle=backend.rank == 1))


def drop_last_on_one_rank(backend: Backend, _: str) -> None:
    _train(backend, _loader(9, drop_last=backend.rank == 0))


def different_lengths(backend: Backend, _: str) -> None:
    _train(backend, 8 + backend.rank)


class OtherLength(TensorDataset):
    def __init__(self, length: Any) -> None:
        super().__init__(torch.randn(8, 3), torch.randn(8, 1))
        self.length = length

    def __len__(self) -> int:
        return self.length  # type: ignore[no-any-return]


def negative_length_on_one_rank(backend: Backend, _: str) -> None:
    _train(backend, OtherLength(-1 if backend.rank else 8))


def fractional_dataset_length_on_one_rank(backend: Backend, _: str) -> None:
    unitrain.ShardedLoader(OtherLength(7.5 if backend.rank else 8), backend, batch_size=2)


def scalar_validation_data_on_one_rank(backend: Backend, _: str) -> None:
    _train(backend, val_data=torch.tensor(1.0) if backend.rank else _data(8))


def different_seeds_of_a_training_shard(backend: Backend, _: str) -> None:
    TrainingShard(_data(8), backend, ShardSettings(batch_size=2, seed=backend.rank))


def a_sampler_on_one_rank(backend: Backend, _: str) -> None:
    sampler = WeightedRandomSampler([1.0] * 8, 8) if backend.rank == 1 else None
    _train(backend, _loader(sampler=sampler))


def _distribute(backend: Backend, model: nn.Module) -> None:
    backend.distributed_model(model)


def frozen_on_one_rank(backend: Backend, _: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].requires_grad_(backend.rank == 0)
    _distribute(backend, model)


def different_stride_on_one_rank(backend: Backend, _: str) -> None:
    model = nn.Linear(3, 2)
    if backend.rank:
        model.weight.data = model.weight.data.t().contiguous().t()
    _distribute(backend, model)


def a_sparse_parameter_on_one_rank(backend: Backend, _: str) -> None:
    model = nn.Linear(3, 2)
    if backend.rank:
        model.weight = nn.Parameter(model.weight.detach().to_sparse())
    _distribute(backend, model)


def _train_model(
    backend: Backend,
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    callbacks: Any = (),
    **settings: Any,
) -> None:
    model = model or nn.Linear(3, 1)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    config = TrainConfig(max_epochs=1, batch_size=2, progress="off", **settings)
    trainer = Trainer(
        model, optimizer, nn.functional.mse_loss, backend=backend, config=config, callbacks=callbacks,
        scheduler=None if scheduler is None else scheduler(optimizer),
    )  # fmt: skip
    trainer.fit(_data(8))


def a_model_on_meta_on_one_rank(backend: Backend, _: str) -> None:
    model = nn.Linear(3, 1, device="meta" if backend.rank else None)
    _train_model(backend, model=model)


def different_parameter_order_in_the_optimizer_of_one_rank(backend: Backend, _: str) -> None:
    model = nn.Linear(3, 1)
    parameters = list(model.parameters())
    _train_model(
        backend, model=model, optimizer=torch.optim.SGD(parameters[::-1] if backend.rank else parameters, lr=0.1)
    )


def no_learning_rate_on_one_rank(backend: Backend, _: str) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if backend.rank:
        optimizer.param_groups[0]["lr"] = None
    _train_model(backend, model=model, optimizer=optimizer)


def no_param_groups_on_one_rank(backend: Backend, _: str) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if backend.rank:
        optimizer.param_groups.clear()
    _train_model(backend, model=model, optimizer=optimizer)


def different_schedule_on_one_rank(backend: Backend, _: str) -> None:
    gamma = 0.9 if backend.rank else 0.5
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=gamma)
    _train_model(backend, scheduler=schedule, scheduler_interval="step")


def a_schedule_on_one_rank(backend: Backend, _: str) -> None:
    schedule = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 1.0 / (1 + epoch))
    _train_model(backend, scheduler=schedule if backend.rank else None)


def a_plateau_scheduler_with_step_interval_on_one_rank(backend: Backend, _: str) -> None:
    schedule = (
        torch.optim.lr_scheduler.ReduceLROnPlateau
        if backend.rank
        else partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    )
    _train_model(backend, scheduler=schedule, scheduler_interval="step")


class ChangesLearningRate(unitrain.Callback):
    def on_step_end(self, trainer: Any) -> None:
        trainer.optimizer.param_groups[0]["lr"] *= 1 + 0.01 * trainer.backend.rank


def a_callback_that_changes_the_learning_rate_on_one_rank(backend: Backend, _: str) -> None:
    _train_model(backend, callbacks=[ChangesLearningRate()])


def different_order_of_metrics_on_one_rank(backend: Backend, _: str) -> None:
    names = ("a", "b") if backend.rank else ("b", "a")
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    metrics = dict.fromkeys(names, nn.functional.l1_loss)
    config = TrainConfig(max_epochs=1, batch_size=2)
    Trainer(model, optimizer, nn.functional.mse_loss, backend=backend, config=config, metrics=metrics)


def no_validation_sets_on_one_rank(backend: Backend, _: str) -> None:
    _train(backend, val_data={} if backend.rank else {"a": _data(8)})


def different_validation_set_name_on_one_rank(backend: Backend, _: str) -> None:
    _train(backend, val_data={"b" if backend.rank else "a": _data(8)})


def no_model_to_broadcast_on_one_rank(backend: Backend, _: str) -> None:
    unitrain.broadcast_buffers(None if backend.rank else nn.BatchNorm1d(3), backend)  # type: ignore[arg-type]


def no_buffers_on_one_rank(backend: Backend, _: str) -> None:
    unitrain.broadcast_buffers(nn.Linear(3, 1) if backend.rank else nn.BatchNorm1d(3), backend)


def buffers_of_different_shape_on_one_rank(backend: Backend, _: str) -> None:
    unitrain.broadcast_buffers(nn.BatchNorm1d(3 + backend.rank), backend)


def no_batch_size_on_one_rank(backend: Backend, _: str) -> None:
    _train(backend, _loader() if backend.rank == 1 else 8, batch_size=None)


def resume_within_an_epoch_with_different_data(backend: Backend, folder: str) -> None:
    _train(backend, 8, max_epochs=None, max_steps=1, output_dir=folder, resume=True)
    _train(backend, 10, max_epochs=None, max_steps=3, output_dir=folder, resume=True)


def unused_parameters(backend: Backend, _: str) -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 1), "spare": nn.Linear(3, 1)})
    model.forward = lambda x: model["used"](x)  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = TrainConfig(max_epochs=1, batch_size=2, progress="off")
    Trainer(model, optimizer, nn.functional.mse_loss, backend=backend, config=config).fit(_data(8))


def parameters_unused_in_the_second_step(backend: Backend, _: str) -> None:
    parts = nn.ModuleDict({"one": nn.Linear(3, 1), "other": nn.Linear(3, 1)})
    parts.forward = lambda x, names: sum(parts[name](x) for name in names)  # type: ignore[method-assign]
    model = backend.distributed_model(parts)
    optimizer = backend.distributed_optimizer(torch.optim.SGD(parts.parameters(), lr=0.1), model)
    for names in (["one", "other"], ["one"]):
        before = parts["one"].weight.detach().clone()
        model(torch.ones(2, 3), names).sum().backward()
        try:
            optimizer.step()
        except UnitrainError:
            assert torch.equal(parts["one"].weight, before)
            raise
        optimizer.zero_grad()


def different_optimizer_on_one_rank(backend: Backend, _: str, shard: Any = "none") -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer_class = torch.optim.SGD if backend.rank else torch.optim.Adam
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    backend.distributed_optimizer(optimizer, backend.distributed_model(model, shard=shard), shard=shard)


def different_optimizer_with_sharded_gradients(backend: Backend, _: str) -> None:
    different_optimizer_on_one_rank(backend, _, "gradients")


def different_param_group_sizes_on_one_rank(backend: Backend, _: str, shard: Any = "none") -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = torch.optim.Adam((model[0] if backend.rank else model).parameters())
    backend.distributed_optimizer(optimizer, backend.distributed_model(model, shard=shard), shard=shard)


def different_param_group_sizes_with_sharded_parameters(backend: Backend, _: str) -> None:
    different_param_group_sizes_on_one_rank(backend, _, "parameters")


def a_foreign_parameter_with_sharded_gradients(backend: Backend, _: str) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters())
    distributed = backend.distributed_model(model, shard="gradients")
    optimizer = backend.distributed_optimizer(optimizer, distributed, shard="gradients")
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    distributed(torch.ones(2, 3)).sum().backward()
    optimizer.step()


class NoSamples(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def _trainer(backend: Backend, metrics: Any = None, callbacks: Any = ()) -> Trainer:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = TrainConfig(max_epochs=1, batch_size=2, progress="off")
    return Trainer(
        model, optimizer, nn.functional.mse_loss, backend=backend, config=config, metrics=metrics, callbacks=callbacks
    )


def evaluation_of_an_empty_stream(backend: Backend, _: str) -> None:
    _trainer(backend).evaluate(NoSamples())


def validation_on_an_empty_stream(backend: Backend, _: str) -> None:
    _trainer(backend).fit(_data(8), NoSamples())


def prediction_of_an_empty_stream(backend: Backend, _: str) -> None:
    _trainer(backend).predict(NoSamples())


def _evaluate_metric_of_one_rank(value: Any, backend: Backend, _: str) -> None:
    _trainer(backend, {"error": lambda output, target: value if backend.rank else 1.0}).evaluate(_data(8))


def a_metric_that_returns_none_on_one_rank(backend: Backend, _: str) -> None:
    _evaluate_metric_of_one_rank(None, backend, _)


def a_metric_that_returns_text_on_one_rank(backend: Backend, _: str) -> None:
    _evaluate_metric_of_one_rank("0.5", backend, _)


def a_metric_that_returns_a_mapping_on_one_rank(backend: Backend, _: str) -> None:
    _evaluate_metric_of_one_rank({"a": 1.0}, backend, _)


def a_metric_on_meta_on_one_rank(backend: Backend, _: str) -> None:
    _evaluate_metric_of_one_rank(torch.ones((), device="meta"), backend, _)


def _train_with_loss(backend: Backend, change: Callable[[torch.Tensor], Any]) -> None:
    _train(backend, loss_fn=lambda output, target: change((output - target).pow(2).mean()))


def a_loss_on_meta(backend: Backend, _: str) -> None:
    _train_with_loss(backend, lambda loss: loss.to("meta"))


def a_count_above_the_range_of_floats(backend: Backend, _: str) -> None:
    _train_with_loss(backend, lambda loss: (loss, 10**400))


def a_loss_sum_after_a_loss_mean_in_training(backend: Backend, _: str) -> None:
    counts = iter([None, *range(1, 100)])
    _train_with_loss(backend, lambda loss: loss if (count := next(counts)) is None else (loss, count))


def _evaluate(backend: Backend, loss_fn: Any) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = TrainConfig(max_epochs=1, batch_size=2, progress="off")
    Trainer(model, optimizer, loss_fn, backend=backend, config=config).evaluate(_data(8))


def a_loss_sum_after_a_loss_mean_in_evaluation_on_one_rank(backend: Backend, _: str) -> None:
    counts = iter([None, *range(1, 100)] if backend.rank else [None] * 100)
    _evaluate(backend, lambda output, _: output.mean() if (count := next(counts)) is None else (output.sum(), count))


def a_loss_sum_in_evaluation_on_one_rank(backend: Backend, _: str) -> None:
    _evaluate(backend, lambda output, _: (output.sum(), 3) if backend.rank else output.mean())


class CallsFit(unitrain.Callback):
    def on_epoch_end(self, trainer: Any, results: dict[str, float]) -> None:
        trainer.fit(_data(8))


def fit_within_a_callback(backend: Backend, _: str) -> None:
    _trainer(backend, callbacks=[CallsFit()]).fit(_data(8))


TWO_LOSSES = "loss_fn returned the mean over the batch for some batches and a pair (sum, number of tokens) for others."
# Each case: the invalid call, and two texts that the message must contain: the invalid value and the fix.
CASES: list[tuple[Callable[[Backend, str], None], str, str]] = [
    (a_loss_sum_after_a_loss_mean_in_training, TWO_LOSSES, "Return the same kind of loss for every batch"),
    (
        a_loss_sum_after_a_loss_mean_in_evaluation_on_one_rank,
        TWO_LOSSES,
        "Return the same kind of loss for every batch, on every rank",
    ),
    (a_loss_sum_in_evaluation_on_one_rank, TWO_LOSSES, "Return the same kind of loss for every batch, on every rank"),
    (
        zero_gradient_accumulation_steps,
        "TrainConfig.gradient_accumulation_steps must be at least 1, got 0.",
        "Use 1 to step after every batch.",
    ),
    (
        indivisible_global_batch,
        "global_batch_size 7 is not divisible by 2 ranks x batch_size 2 = 4",
        "global_batch_size=4 or 8",
    ),
    (empty_dataset, "empty", ""),
    (fewer_samples_than_ranks, "1 sample", ""),
    (nan_loss, "The mean loss became nan on every rank in epoch 1, by step", "max_grad_norm=1.0"),
    (nan_loss_on_one_rank, "The mean loss became nan on rank 1 in epoch 1, by step", "max_grad_norm=1.0"),
    (output_folder_is_a_file, "file", ""),
    (no_trainable_parameters, "has no parameter that requires a gradient", "requires_grad_(True)"),
    (
        optimizer_of_another_model,
        "2 of the optimizer's 2 parameters do not belong to Linear",
        "SGD(model.parameters(), ...)",
    ),
    (different_optimizer_on_one_rank, "optimizer='Adam' on rank 0 and optimizer='SGD' on rank 1", "the same value on"),
    (
        different_optimizer_with_sharded_gradients,
        "optimizer='Adam' on rank 0 and optimizer='SGD' on rank 1",
        "the same",
    ),
    (
        different_param_group_sizes_on_one_rank,
        "parameters_by_group=[4] on rank 0 and parameters_by_group=[2] on",
        "the same value on",
    ),
    (
        different_param_group_sizes_with_sharded_parameters,
        "parameters_by_group=[4] on rank 0 and parameters_by_group=[2] on",
        "same",
    ),
    (
        a_foreign_parameter_with_sharded_gradients,
        "a new parameter of shape [3] that does not belong to the distributed model",
        'optimizer.add_param_group({"params": layer.parameters()})',
    ),
    (different_settings, "TrainConfig.seed differs between ranks: [0, 1]", "same TrainConfig"),
    (
        different_batch_sizes,
        "The training data differs between ranks in batch_size: [2, 1].",
        "Use batch_size=2 on every rank, in the DataLoader",
    ),
    (shuffled_on_one_rank, "differs between ranks in shuffle: [False, True].", "Use shuffle=False on every rank"),
    (drop_last_on_one_rank, "differs between ranks in drop_last: [True, False].", "Use drop_last=True on every rank"),
    (different_lengths, "the same number of samples on every rank: [8, 9]", "Give every rank the complete dataset"),
    (
        negative_length_on_one_rank,
        "len() of an object of class OtherLength failed: ValueError: __len__() should",
        "from __len__",
    ),
    (
        fractional_dataset_length_on_one_rank,
        "len() of an object of class OtherLength failed: TypeError",
        "from __len__",
    ),
    (
        scalar_validation_data_on_one_rank,
        "len() of an object of class Tensor failed: TypeError",
        "from __len__",
    ),
    (
        no_model_to_broadcast_on_one_rank,
        "broadcast_buffers(model) must be a torch.nn.Module, got None",
        "Use broadcast",
    ),
    (no_buffers_on_one_rank, "3 buffers on rank 0 and 0 on rank 1", "Pass the same model on every rank"),
    (
        buffers_of_different_shape_on_one_rank,
        "a buffer of shape [3] and dtype float32 on rank 0 and a buffer of shape [4] and dtype float32 on rank 1",
        "Pass the same model on every rank",
    ),
    (different_seeds_of_a_training_shard, "differs between ranks in seed: [0, 1].", "Use seed=0 on every rank"),
    (a_sampler_on_one_rank, "differs between ranks in sampler: [None, 'WeightedRandomSampler']", "Use sampler=None on"),
    (no_batch_size_on_one_rank, "TensorDataset was given without a batch size", "Use TrainConfig(batch_size=32)"),
    (
        resume_within_an_epoch_with_different_data,
        "4 samples into epoch 1 of training data with length=8, but this data has length=10",
        "Continue with the same data, seed and arguments. Or continue from a checkpoint",
    ),
    (
        unused_parameters,
        "2 parameters received no gradient on every rank: spare.weight, spare.bias",
        "find_unused_parameters=True",
    ),
    (evaluation_of_an_empty_stream, "The data for evaluation contains no samples", "at least one sample"),
    (validation_on_an_empty_stream, "The data for evaluation contains no samples", "at least one sample"),
    (prediction_of_an_empty_stream, "predict got data without samples", "at least one sample"),
    (a_metric_that_returns_none_on_one_rank, "Metric 'error' must return a number or a tensor", "got None. Return the"),
    (a_metric_that_returns_text_on_one_rank, "for a batch, got '0.5'", "Return the mean over the batch"),
    (a_metric_that_returns_a_mapping_on_one_rank, "for a batch, got {'a': 1.0}", "pass one function per result"),
    (a_metric_on_meta_on_one_rank, "got a tensor of shape [] on device meta", "Return the mean over the batch"),
    (a_loss_on_meta, "The loss must be one number, got a tensor on device meta", "return the mean over the batch"),
    (
        a_count_above_the_range_of_floats,
        "must be finite and above 0, or 0 if the sum is 0, got inf",
        "number of tokens",
    ),
    (fit_within_a_callback, "Trainer.fit was called by a callback or metric", "call fit again after fit has returned"),
    (
        frozen_on_one_rank,
        "Parameter '0.weight' is trained on rank 0 and frozen on rank 1",
        "Freeze and unfreeze the same",
    ),
    (
        different_stride_on_one_rank,
        "'weight' has stride [3, 1] on rank 0 and [1, 2] on rank 1",
        "the same memory format",
    ),
    (a_sparse_parameter_on_one_rank, "'weight' of Linear is a tensor of layout torch.sparse_coo", "tensor.to_dense()"),
    (a_model_on_meta_on_one_rank, "Linear has tensors on device meta", "Use model.to_empty(device=backend.device)"),
    (
        different_parameter_order_in_the_optimizer_of_one_rank,
        "Parameter 0 of the optimizer is 'weight' on rank 0 and 'bias' on rank 1",
        "in the same order on every rank",
    ),
    (no_learning_rate_on_one_rank, "lr in parameter group 0 of the Trainer's SGD", "such as lr=0.1"),
    (no_param_groups_on_one_rank, "Trainer(optimizer), of class SGD, has no parameter groups", "such as lr=0.1"),
    (
        different_schedule_on_one_rank,
        "differ after step 1: their weighted sums over the parameter groups are 0.05 and 0.09",
        "Build the same scheduler on every rank",
    ),
    (a_schedule_on_one_rank, "groups are 0.1 and 0.05", "Build the same scheduler on every rank"),
    (
        a_plateau_scheduler_with_step_interval_on_one_rank,
        "ReduceLROnPlateau needs the results of an epoch",
        'scheduler_interval="epoch"',
    ),
    (
        a_callback_that_changes_the_learning_rate_on_one_rank,
        "groups are 0.1 and 0.101",
        "let callbacks change the learning rate on every rank",
    ),
    (
        different_order_of_metrics_on_one_rank,
        "metrics=['b', 'a'] on rank 0 and metrics=['a', 'b'] on rank 1",
        "Pass the same value on every rank",
    ),
    (no_validation_sets_on_one_rank, "val_data takes a dataset, or a mapping", "trainer.fit(train_data, {"),
    (
        different_validation_set_name_on_one_rank,
        "Trainer.fit was called with val_data",
        "Pass the same value on every rank",
    ),
    (
        parameters_unused_in_the_second_step,
        "Some parameters received no gradient on this rank",
        "find_unused_parameters=True",
    ),
]


def raised_message(backend: Backend, case: Callable[[Backend, str], None], folder: str) -> str:
    try:
        case(backend, folder)
    except UnitrainError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def allreduce_ones(backend: Backend) -> float:
    return backend.allreduce(torch.ones(1), "sum").item()


@pytest.fixture(scope="module", params=["ddp", "horovod"])
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(request.param, 2) as ranks:
        yield ranks


@pytest.mark.parametrize(("case", "problem", "fix"), CASES, ids=[case[0].__name__ for case in CASES])
def test_bad_input_raises_the_same_error_on_every_rank(
    group: RankGroup, case, problem: str, fix: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    texts = group.run(raised_message, case, str(tmp_path))
    assert texts[0] == texts[1]
    assert problem in texts[0], texts[0]
    assert fix in texts[0], texts[0]
    sentences = [part for part in texts[0].split(". ") if part]
    assert len(sentences) >= 2, f"the message must state a problem and a fix: {texts[0]}"
    assert group.run(allreduce_ones) == [2.0, 2.0]


def catch_errors_of_an_unfrozen_parameter(backend: Backend) -> list[str]:
    """Unfreeze a parameter on rank 0 only. Return the error of this rank for each sharding mode."""
    messages = []
    for shard in ("none", "gradients", "parameters"):
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        module[0].requires_grad_(False)
        model: Any = backend.distributed_model(module, shard=shard)  # type: ignore[arg-type]
        if backend.rank == 0:
            next(model.parameters()).requires_grad_(True)
        with pytest.raises(CollectiveMismatchError) as caught:
            model(torch.ones(2, 3)) if backend.rank == 0 else backend.barrier()
        messages.append(str(caught.value))
    return messages


def test_the_error_names_the_parameter_that_is_unfrozen_on_one_rank(group: RankGroup) -> None:
    errors = group.run(catch_errors_of_an_unfrozen_parameter)
    assert [len(messages) for messages in errors] == [3, 3]
    for message, other in zip(*errors, strict=True):
        assert "rank 1 called barrier" in message
        assert "Parameter '0.weight' was unfrozen on rank 0, but not on the other ranks. Freeze and" in message
        assert "rank 0 called allreduce(int32 [4], sum)" in other


def test_every_case_of_this_file_is_run() -> None:
    case_names = {
        name
        for name, function in globals().items()
        if inspect.isfunction(function)
        and not name.startswith("_")
        and [*inspect.signature(function).parameters][:2] == ["backend", "_"]
    }
    assert case_names == {case[0].__name__ for case in CASES if "_" in inspect.signature(case[0]).parameters}
