"""The user's side of a case, in plain torch: model, loss, data, optimizer, scheduler and metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from .user_objects import OPTIMIZERS, OwnGenerator, TwinGenerators, set_mode

Case = dict[str, Any]
MASKED = -100
BRANCH_ABOVE = 1.0  # samples whose second input is larger use the branch


class Output:
    """A model output of a type that torch does not recognize as a container."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def tensor_of(output: Any) -> Tensor:
    return output.value if isinstance(output, Output) else output


class Network(nn.Module):
    """A small float64 network with the features of a case. Column 0 of the inputs is the index of the sample."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(case["seed"])
        features = case["features"]
        self.features = frozenset(features)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        for name, module in {
            "tied": nn.Linear(6, 6),
            "frozen": nn.Linear(6, 6),
            "unused": nn.Linear(6, 6),
            "branch": nn.Linear(6, 6),
            "late": nn.Linear(6, 6),
            "norm": nn.BatchNorm1d(2),
            "sync_norm": nn.BatchNorm1d(2),
            "embedding": nn.Embedding(7, 4),
            "max_norm": nn.Embedding(7, 4, max_norm=1.0),
            "dropout": nn.Dropout(0.0),
        }.items():
            if name in features:
                setattr(self, name + "_part", module)
        if "frozen" in features:
            self.frozen_part.requires_grad_(False)
        if "complex" in features:
            self.complex_part = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128) * 0.3)
        if "buffer" in features:
            self.register_buffer("scale", torch.ones(()))
        self.double()
        if "alias" in features:  # two Parameters that share memory
            self.alias_part, self.alias_twin = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
            self.alias_twin.weight.data = self.alias_part.weight.data

    def forward(self, x: Tensor) -> Any:
        number, h = x[:, 0].long(), x[:, 1:]
        features = self.features
        for name in ("embedding", "max_norm"):
            if name in features:
                h = h + getattr(self, name + "_part")(number % 7)
        if "complex" in features:
            z = h.to(torch.complex128) @ self.complex_part
            h = h + z.real + 0.3 * z.imag.square()
        h = torch.tanh(self.first(h))
        for name in ("norm", "sync_norm"):
            if name in features:  # with three values per sample and channel, one sample has a variance
                h = getattr(self, name + "_part")(h.view(-1, 2, 3)).view(-1, 6)
        if "tied" in features:
            h = torch.tanh(self.tied_part(torch.tanh(self.tied_part(h))))
        if "alias" in features:
            h = torch.tanh(self.alias_twin(torch.tanh(self.alias_part(h))))
        for name in ("frozen", "late"):
            if name in features:
                h = h + torch.tanh(getattr(self, name + "_part")(h))
        chosen = x[:, 1] > BRANCH_ABOVE
        if "branch" in features and chosen.any():
            h = h.masked_scatter(chosen[:, None], h[chosen] + self.branch_part(h[chosen]))
        if "buffer" in features:
            if self.training:
                self.scale.mul_(0.8).add_(0.2 * h.detach().abs().mean())
            h = h / (0.5 + self.scale)
        if "dropout" in features:
            h = self.dropout_part(h)
        out = self.last(h)
        return Output(out) if "object" in features else out


class Forward:
    """Calls the model on a batch, which is a pair or a dictionary. The feature "penalty" adds a term to the
    output: the squared gradient with respect to the inputs."""

    def __init__(self, case: Case) -> None:
        self.penalty = "penalty" in case["features"]

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Any, Tensor]:
        inputs, target = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        if not self.penalty:
            return model(inputs), target
        with torch.enable_grad():
            inputs = inputs.detach().requires_grad_()
            output = model(inputs)
            (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=torch.is_grad_enabled())
        return output + 0.1 * slope[:, 1:].square().sum(1, keepdim=True), target


def loss_function(case: Case) -> Callable[[Any, Tensor], Any]:
    """Return the user's loss function, which returns the mean or, with "tokens", the pair (sum, count). With
    "accuracy", it returns the mean and the accuracy, which unitrain must not take for a count."""

    def tokens(output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        total = nn.functional.cross_entropy(tensor_of(output), target, ignore_index=MASKED, reduction="sum")
        return total, (target != MASKED).sum()

    def mean(output: Any, target: Tensor) -> Tensor:
        function = nn.functional.mse_loss if case["loss"] == "mse" else nn.functional.cross_entropy
        return function(tensor_of(output), target)

    def with_accuracy(output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        value = tensor_of(output)
        return nn.functional.cross_entropy(value, target), (value.argmax(1) == target).double().mean()

    return {"tokens": tokens, "accuracy": with_accuracy}.get(case["loss"], mean)


def samples(case: Case, *, offset: int = 0, count: int | None = None) -> tuple[Tensor, Tensor]:
    """Return float64 inputs of shape [count, 5], and targets. `offset` selects other samples, for example for
    validation."""
    count = count or case["samples"]
    generator = torch.Generator().manual_seed(case["seed"] + 1000 * offset + 1)
    inputs = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    inputs[:, 0] = torch.arange(count)
    if case["loss"] == "mse":
        return inputs, torch.randn(count, 3, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 3, (count,), generator=generator)
    if case["loss"] == "tokens":
        targets[torch.rand(count, generator=generator) < 0.4] = MASKED
    return inputs, targets


VERSION = 100  # added to the index of a sample when its values are replaced
GROWTH = 4  # samples that a growing dataset gains at a time


def training_samples(case: Case) -> tuple[Tensor, Tensor]:
    """Return the samples of a training dataset. `case["version"]` counts the changes of the data."""
    count, version, change = case["samples"], case.get("version", 0), case.get("data_change")
    if case["sampler"] == "twins":
        return samples(case, count=count * count)
    if change == "grow":
        return tuple(part[: count + GROWTH * version] for part in samples(case, count=count + 12 * GROWTH))  # type: ignore
    if change != "tensors" or not version:
        return samples(case)
    inputs, targets = samples(case, offset=10 + version)
    inputs[:, 0] += VERSION * version
    return inputs, targets


def is_bad(sample: int) -> bool:
    """Return whether the collate function "skip" drops the sample with this index."""
    return sample % 5 == 3


# Data


class MapDataset(Dataset[Any]):
    """A dataset that is not a TensorDataset, so unitrain reads its samples one by one. A test may set `on_read`."""

    on_read: Callable[[], None] | None = None

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.on_read is not None:
            self.on_read()
        return self.inputs[index].clone(), self.targets[index].clone()


class MapBatchDataset(MapDataset):
    """A map-style dataset whose items are batches."""

    def __init__(self, inputs: Tensor, targets: Tensor, case: Case) -> None:
        super().__init__(inputs, targets)
        self.batches = split_into_batches(case, len(inputs))

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        chosen = self.batches[index]
        return self.inputs[chosen], self.targets[chosen]


class ItemStream(IterableDataset[Any]):
    """Yields samples in order. With `rank` and `size`, the dataset shards itself over ranks and workers."""

    def __init__(self, inputs: Tensor, targets: Tensor, rank: int = 0, size: int | None = None) -> None:
        self.inputs, self.targets, self.rank, self.size = inputs, targets, rank, size or 1
        self.shards_itself = size is not None

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if self.shards_itself and info is not None else (0, 1)
        # The last rank has the most samples, so rank 0 runs out of samples first.
        first = self.size - 1 - self.rank
        for index in range(first + self.size * worker, len(self.inputs), self.size * workers):
            yield self.inputs[index].clone(), self.targets[index].clone()


class BatchStream(IterableDataset[Any]):
    """Yields batches in order. With `reuse`, each batch overwrites the memory of the previous batch."""

    def __init__(self, inputs: Tensor, targets: Tensor, case: Case) -> None:
        self.inputs, self.targets = inputs, targets
        self.batches, self.reuse = split_into_batches(case, len(inputs)), case["reuse"]

    def __iter__(self) -> Iterator[Any]:
        room = torch.empty_like(self.inputs), torch.empty_like(self.targets)
        for chosen in self.batches:
            batch = self.inputs[chosen], self.targets[chosen]
            if self.reuse:
                for into, part in zip(room, batch, strict=True):
                    into[: len(part)] = part
                batch = room[0][: len(chosen)], room[1][: len(chosen)]
            yield batch


class CustomSampler(Sampler[int]):
    """A custom sampler whose order depends on the epoch passed to `set_epoch`."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(custom_order(self.count, self.epoch))


def custom_order(count: int, epoch: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(70 + epoch)).tolist()


class CustomBatchSampler(Sampler[list[int]]):
    """A custom batch sampler with batches of unequal sizes."""

    def __init__(self, case: Case) -> None:
        self.batches = split_into_batches(case, case["samples"])

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


def split_into_batches(case: Case, count: int) -> list[list[int]]:
    """Return the samples of each batch that the dataset or the batch sampler creates.

    Batches have two samples, or one to three samples if they are uneven.
    """
    batches, first = [], 0
    while first < count:
        length = 1 + (first + case["seed"]) % 3 if case["sampler"] == "batches" or case["uneven_batches"] else 2
        batches.append(list(range(first, min(first + length, count))))
        first += length
    return batches


def collate_pairs(batch: list[Any]) -> list[Tensor]:
    return [torch.stack([x for x, _ in batch]), torch.stack([y for _, y in batch])]


def collate_dict(batch: list[Any]) -> dict[str, Tensor]:
    inputs, targets = collate_pairs(batch)
    return {"x": inputs, "y": targets}


def collate_skip(batch: list[Any]) -> list[Tensor]:
    return collate_pairs([pair for pair in batch if not is_bad(int(pair[0][0]))] or batch[:1])


def collate_skip_all(batch: list[Any]) -> list[Tensor]:
    """Drop bad samples. The batch is empty if all samples are bad."""
    inputs, targets = collate_pairs(batch)
    kept = [not is_bad(int(number)) for number in inputs[:, 0]]
    return [inputs[kept], targets[kept]]


def collate_noise(batch: list[Any]) -> list[Tensor]:
    inputs, targets = collate_pairs(batch)
    inputs[:, 1:] += torch.randn(len(inputs), 4, dtype=torch.float64)
    return [inputs, targets]


def collate_drawing(batch: list[Any]) -> list[Tensor]:
    """Draw a random number without using it, which must not change the random numbers of training."""
    torch.rand(1)
    return collate_pairs(batch)


COLLATE = {"pairs": collate_pairs, "dict": collate_dict, "skip": collate_skip, "noise": collate_noise}


def training_data(case: Case, batch_size: int, rank: int, size: int) -> Any:
    """Return the Dataset or DataLoader of a case, with `batch_size` samples per rank."""
    inputs, targets = training_samples(case)
    source: Any = case["source"]
    if source == "subset":  # a subset whose first indices are negative
        chosen = subset_indices(case)
        dataset: Any = Subset(TensorDataset(inputs, targets), [chosen[0] - len(inputs) * case["negative"], *chosen[1:]])
    elif source in ("shared", "own"):
        dataset = ItemStream(inputs, targets, *((rank, size) if source == "own" else ()))
    elif source == "batches":
        dataset = BatchStream(inputs, targets, case)
    elif source == "map_batches":
        dataset = MapBatchDataset(inputs, targets, case)
    else:
        dataset = (TensorDataset if source == "tensors" else MapDataset)(inputs, targets)
    if not case["loader"]:
        return dataset
    settings: dict[str, Any] = {"num_workers": case["workers"]}
    if case["persistent"]:
        settings["persistent_workers"] = True
    if case["collate"] is not None:
        settings["collate_fn"] = COLLATE[case["collate"]]
    if source in ("batches", "map_batches"):
        return DataLoader(dataset, batch_size=None, **settings)
    if case["sampler"] == "batches":
        return DataLoader(dataset, batch_sampler=CustomBatchSampler(case), **settings)
    settings |= {"batch_size": batch_size, "drop_last": case["drop_last"]}
    if case["sampler"] == "shuffle":
        return DataLoader(dataset, shuffle=True, **settings)
    return DataLoader(dataset, sampler=create_sampler(case, dataset), **settings)


def change_data(case: Case, data: Any) -> None:
    """Change the dataset of `training_data` in place, to the version of `case`."""
    dataset = data.dataset if isinstance(data, DataLoader) else data
    if isinstance(dataset, Subset) and case["data_change"] == "indices":
        dataset.indices = subset_indices(case)
        return
    if isinstance(dataset, Subset):
        dataset = dataset.dataset
    if isinstance(dataset, TensorDataset):
        dataset.tensors = training_samples(case)
    else:
        dataset.inputs, dataset.targets = training_samples(case)


def subset_indices(case: Case) -> list[int]:
    count = case["samples"]
    first = case.get("version", 0) if case.get("data_change") == "indices" else 0
    return [(number + first) % count for number in (count - 1, *range(count - 2))]


def create_sampler(case: Case, dataset: Any) -> Any:
    name = case["sampler"]
    if name is None:
        return None
    count = len(dataset)
    part = part_length(count)
    return {
        "sequential_part": lambda: SequentialSampler(range(part)),
        "random_part": lambda: RandomSampler(range(part)),
        "random_few": lambda: RandomSampler(dataset, num_samples=part),
        "replacement": lambda: RandomSampler(dataset, replacement=True, num_samples=part),
        "subset_random": lambda: SubsetRandomSampler(range(1, count)),
        "weighted": lambda: WeightedRandomSampler([1.0 + i % 3 for i in range(count)], count),
        "own": lambda: CustomSampler(count),
        "twins": lambda: TwinGenerators(case["samples"]),
        **{kind: lambda kind=kind: OwnGenerator(count, kind) for kind in OWN_GENERATORS},
    }[name]()


OWN_GENERATORS = ("python", "numpy", "torch")


def part_length(count: int) -> int:
    """Return the number of samples that a sampler over a part of the data yields."""
    return count - count // 3


def validation_data(case: Case, rank: int, size: int) -> Any:
    """Return the validation data of the case, or None if the case has none."""
    kind = case["validation"]
    if kind is None:
        return None
    inputs, targets = samples(case, offset=1, count=count_validation_samples(case))
    if kind == "tensors":
        return TensorDataset(inputs, targets)
    collate = collate_skip_all if kind == "skip" else collate_drawing
    settings: dict[str, Any] = {"batch_size": 3, "collate_fn": collate, "drop_last": case["validation_drop_last"]}
    if kind in ("shared", "own"):
        settings.pop("collate_fn")
        return DataLoader(ItemStream(inputs, targets, *((rank, size) if case["source"] == "own" else ())), **settings)
    dataset = MapDataset(inputs, targets)
    if kind == "part":
        settings["sampler"] = SequentialSampler(range(part_length(len(inputs))))
    return DataLoader(dataset, **settings)


def count_validation_samples(case: Case) -> int:
    return 7 + case["seed"] % 5


def validation_samples(case: Case) -> tuple[Tensor, Tensor]:
    """Return the samples that an evaluation of `validation_data` includes."""
    inputs, targets = samples(case, offset=1, count=count_validation_samples(case))
    keep = list(range(len(inputs)))
    if case["validation"] == "part":
        keep = keep[: part_length(len(inputs))]
    if case["validation"] == "skip":
        keep = [number for number in keep if not is_bad(number)]
    return inputs[keep], targets[keep]


# Optimization


def create_optimizer(case: Case, model: nn.Module, *, late: bool) -> torch.optim.Optimizer:
    """Return the optimizer. If `late`, include the parameter group that the case adds during the run."""
    initial_parameters = [p for name, p in model.named_parameters() if not name.startswith("late_part")]
    name, settings = case["optimizer"], dict(case["optimizer_settings"])
    optimizer: torch.optim.Optimizer = (OPTIMIZERS.get(name) or getattr(torch.optim, name))(
        initial_parameters, **settings
    )
    set_mode(optimizer, train=True)
    if late:
        add_late_group(model, optimizer)
    return optimizer


def add_late_group(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": list(model.late_part.parameters())})


def create_scheduler(case: Case, optimizer: torch.optim.Optimizer, steps: int | None = None) -> Any:
    """Return the torch scheduler of the case, for a run of `steps` steps if its length depends on the run. Without
    `steps`, such a scheduler is a function that unitrain calls."""
    s: Any = lr_scheduler
    lr = optimizer.param_groups[0]["lr"]
    made: dict[str, Callable[[], Any]] = {
        "LambdaLR": lambda: s.LambdaLR(optimizer, lambda step: 0.9**step),
        "MultiplicativeLR": lambda: s.MultiplicativeLR(optimizer, lambda step: 0.95),
        "StepLR": lambda: s.StepLR(optimizer, 2, 0.5),
        "MultiStepLR": lambda: s.MultiStepLR(optimizer, [1, 2, 5], 0.3),
        "ConstantLR": lambda: s.ConstantLR(optimizer, 0.3, 3),
        "LinearLR": lambda: s.LinearLR(optimizer, 0.2, total_iters=4),
        "ExponentialLR": lambda: s.ExponentialLR(optimizer, 0.8),
        "SequentialLR": lambda: s.SequentialLR(
            optimizer, [s.LinearLR(optimizer, 0.3, total_iters=2), s.MultiStepLR(optimizer, [1, 3], 0.5)], [2]
        ),
        "CosineAnnealingLR": lambda: s.CosineAnnealingLR(optimizer, 7),
        "ChainedScheduler": lambda: s.ChainedScheduler(
            [s.MultiStepLR(optimizer, [2, 4], 0.5), s.ExponentialLR(optimizer, 0.9)]
        ),
        "CyclicLR": lambda: s.CyclicLR(optimizer, lr / 10, lr, 2, cycle_momentum=False),
        "CosineAnnealingWarmRestarts": lambda: s.CosineAnnealingWarmRestarts(optimizer, 3),
        "OneCycleLR": lambda: s.OneCycleLR(optimizer, lr, total_steps=200, cycle_momentum=False),
        "PolynomialLR": lambda: s.PolynomialLR(optimizer, 8, 1.5),
        "ReduceLROnPlateau": lambda: s.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.02),
    }
    name = case["scheduler"]
    if name is not None and name.partition("_")[0] in ("planned", "sized"):
        plan = PLANNED[name.partition("_")[2]]
        return plan(optimizer, steps) if steps else plan
    return None if name is None else made[name]()


# Functions that create a scheduler for a number of steps: "planned" by unitrain, or "sized" by the script.
PLANNED: dict[str, Callable[..., Any]] = {
    "cosine": lambda optimizer, steps: lr_scheduler.CosineAnnealingLR(optimizer, steps),
    "linear": lambda optimizer, steps: lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps),
    "one_cycle": lambda optimizer, steps: lr_scheduler.OneCycleLR(
        optimizer, 0.1, total_steps=steps, cycle_momentum=False
    ),
}
SCHEDULERS = (
    "LambdaLR", "MultiplicativeLR", "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "SequentialLR",
    "CosineAnnealingLR", "ChainedScheduler", "CyclicLR", "CosineAnnealingWarmRestarts", "OneCycleLR", "PolynomialLR",
    "ReduceLROnPlateau",
)  # fmt: skip


def apply_change(case: Case, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Apply the case's change of parameters or groups during the run."""
    what = case["change"][0]
    if what == "add":
        add_late_group(model, optimizer)
    elif what == "lr":
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    else:
        model.first.requires_grad_(what == "unfreeze")


# Metrics


class InPlaceMetric:
    """A metric that always returns the same tensor, which it updates in place."""

    def __init__(self) -> None:
        self.value = torch.zeros((), dtype=torch.float64)

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        return self.value.copy_(tensor_of(output).square().mean())


def square_sums(output: Any, target: Tensor) -> Tensor:
    return tensor_of(output).square().sum(1)


def mean_square(output: Any, target: Tensor) -> Tensor:
    return tensor_of(output).square().mean()


def create_flattened_metric(name: str) -> Any:
    """Return a metric of torchmetrics that compares all numbers of output and target."""
    import torchmetrics

    kind: Any = getattr(torchmetrics, name)

    class Flattened(kind):  # type: ignore[misc]
        def update(self, output: Any, target: Tensor) -> None:
            super().update(tensor_of(output).flatten(), target.flatten())

    return Flattened()


def create_metrics(case: Case) -> dict[str, Any]:
    """Return the metrics of a case by name. Names that start with a capital letter are torchmetrics metrics."""
    made: dict[str, Any] = {"squares": mean_square, "each": square_sums}
    if "in_place" in case["metrics"]:
        made["in_place"] = InPlaceMetric()
    for name in case["metrics"]:
        if name[0].isupper():
            made[name] = create_flattened_metric(name)
    return {name: made[name] for name in case["metrics"]}
