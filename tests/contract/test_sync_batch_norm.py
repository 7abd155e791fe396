"""With synchronized BatchNorm, N ranks have the results of one process with plain BatchNorm on the global batch."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from groups import GROUPS
from one_rank import simulate_rank
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import unitrain
from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.errors import CollectiveMismatchError, ModelError
from unitrain.modules.sync_batch_norm import exclude_from_statistics
from unitrain.testing import RankGroup

LOCAL = LocalBackend(torch.device("cpu"))
CHANNELS = 3
COUNTS = {1: [7], 2: [4, 3], 3: [4, 0, 3]}  # samples per rank, by number of ranks
FORMATS = [(torch.float64, None, 1e-11), (torch.float32, None, 3e-5), (torch.float64, torch.channels_last, 1e-11)]

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.BatchNorm2d(CHANNELS),
    "cumulative": lambda: nn.BatchNorm2d(CHANNELS, momentum=None),
    "not affine": lambda: nn.BatchNorm2d(CHANNELS, affine=False),
    "untracked": lambda: nn.BatchNorm2d(CHANNELS, track_running_stats=False),
    "1d": lambda: nn.BatchNorm1d(CHANNELS, eps=0.1),
    "1d flat": lambda: nn.BatchNorm1d(CHANNELS),
    "3d": lambda: nn.BatchNorm3d(CHANNELS),
    "torch's": lambda: nn.SyncBatchNorm(CHANNELS),
}
SHAPES = {"1d": (5,), "1d flat": (), "3d": (2, 3, 2)}


def create_layer(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    made = LAYERS[name]()
    for parameter in made.parameters():
        nn.init.uniform_(parameter, 0.5, 2.0)
    return made.to(dtype)


def create_samples(name: str, step: int, count: int = 7, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return samples far from zero, which reveal a numerically unstable variance."""
    generator = torch.Generator().manual_seed(step)
    shape = (count, CHANNELS, *SHAPES.get(name, (4, 3)))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5 + 20).to(dtype)


def loss_weights(x: Tensor) -> Tensor:
    return torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape).sin()


def run_layer(
    module: nn.Module, name: str, part: slice, *, dtype: torch.dtype = torch.float64, memory_format: Any = None
) -> list[Tensor]:
    """Return the outputs and input gradients of three training steps, and the output of an evaluation, on `part` of the
    samples."""
    found = []
    for step in range(3):
        global_batch = create_samples(name, step, dtype=dtype)
        x = global_batch[part].clone(memory_format=memory_format or torch.preserve_format).requires_grad_()
        y = module(x)
        (y * loss_weights(global_batch)[part]).sum().backward()
        assert x.grad is not None
        assert y.dtype == x.dtype
        found += [y.detach(), x.grad]
    module.eval()
    found.append(module(create_samples(name, 9, dtype=dtype)[part]).detach())
    module.train()
    return found


def run_plain_batch_norm(
    name: str, dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Return the results of plain BatchNorm in one process: the results of `run_layer`, the gradients of the
    parameters, and the state."""
    module: Any = create_layer(name, dtype)
    if isinstance(module, nn.SyncBatchNorm):
        plain = nn.BatchNorm2d(CHANNELS).to(dtype)
        plain.load_state_dict(module.state_dict())
        module = plain
    found = run_layer(module, name, slice(None), dtype=dtype)
    return found, [parameter.grad for parameter in module.parameters()], module.state_dict()


def assert_near(found: Tensor, wanted: Tensor, tolerance: float, *what: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance, msg=lambda text: f"{what}: {text}")


def own_slice(backend: Backend) -> slice:
    """Return the slice of the samples that belong to this rank. With three ranks, one rank has no samples."""
    counts = COUNTS[backend.size]
    start = sum(counts[: backend.rank])
    return slice(start, start + counts[backend.rank])


def check_layers(backend: Backend) -> None:
    part = own_slice(backend)
    for name, (dtype, memory_format, tolerance) in itertools.product(LAYERS, FORMATS):
        if memory_format is not None and name in SHAPES:
            continue
        what = (name, dtype, memory_format)
        module = create_layer(name, dtype)
        tensors = [*module.parameters(), *module.buffers()]
        assert unitrain.sync_batch_norm(module, backend) is module
        assert all(a is b for a, b in zip(tensors, [*module.parameters(), *module.buffers()], strict=True))
        expected, gradients, state = run_plain_batch_norm(name, dtype)
        found = run_layer(module, name, part, dtype=dtype, memory_format=memory_format)
        if name == "untracked":  # in eval mode, uses local statistics without communication
            expected.pop()
            found.pop()
        for one, other in zip(found, expected, strict=True):
            assert_near(one, other[part], tolerance, what)
        for parameter, wanted in zip(module.parameters(), gradients, strict=True):
            assert_near(backend.allreduce(parameter.grad, "sum"), wanted, 10 * tolerance, what)
        assert list(module.state_dict()) == list(state), what
        for key, value in module.state_dict().items():
            assert_near(value, state[key], tolerance, what, key)


def check_autocast(backend: Backend) -> None:
    """In half precision, the results equal those of one process up to the precision of the format."""
    for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        found = []
        for device, part in ((backend, own_slice(backend)), (LOCAL, slice(None))):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Conv2d(CHANNELS, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
            unitrain.sync_batch_norm(model, device)
            global_batch = create_samples("plain", 0, dtype=torch.float32) - 20
            with torch.autocast("cpu", dtype):
                y = model(global_batch[part])
            (y.float() * loss_weights(global_batch[:, :2])[part]).sum().backward()
            found.append([y.float().detach(), *model[1].buffers(), *[p.grad for p in model.parameters()]])
        mine, alone = found
        assert_near(mine[0], alone[0][own_slice(backend)], 10 * tolerance, dtype)
        for one, other in zip(mine[1:4], alone[1:4], strict=True):
            assert_near(one, other, tolerance, dtype)
        for one, other in zip(mine[4:], alone[4:], strict=True):
            scale = float(other.abs().max()) + 1.0
            assert_near(backend.allreduce(one, "sum"), other, 10 * tolerance * scale, dtype)
    half = create_layer("plain").bfloat16()
    unitrain.sync_batch_norm(half, backend)
    y = half(create_samples("plain", 0).bfloat16()[own_slice(backend)])
    y.float().square().sum().backward()
    assert y.dtype == half.weight.grad.dtype == torch.bfloat16  # type: ignore[union-attr]


class Block(nn.Module):
    """Calls one BatchNorm layer twice. With `recomputed`, the backward pass recomputes both calls."""

    def __init__(self, *, recomputed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.norm = nn.Conv2d(CHANNELS, CHANNELS, 1).double(), nn.BatchNorm2d(CHANNELS).double()
        self.recomputed = recomputed

    def forward(self, x: Tensor) -> Tensor:
        def twice(x: Tensor) -> Tensor:
            result: Tensor = self.norm(self.mix(self.norm(x).sin()))
            return result

        result: Tensor = checkpoint(twice, x, use_reentrant=False) if self.recomputed else twice(x)
        return result


def check_uses(backend: Backend) -> None:
    """Test two calls per forward pass, recomputation in the backward pass, a copied model and a compiled model."""
    part = own_slice(backend)
    for recomputed, use in itertools.product((False, True), ("as it is", "copied", "compiled")):
        if use == "compiled" and backend.size == 1:
            continue  # compiled plain torch does not update running statistics again in the recomputation
        found = []
        for device, samples in ((backend, part), (LOCAL, slice(None))):
            model: Any = unitrain.sync_batch_norm(Block(recomputed=recomputed), device)
            if use == "copied":
                model = copy.deepcopy(model)
            called = torch.compile(model, backend="aot_eager") if use == "compiled" and device is backend else model
            global_batch = create_samples("plain", 0)
            x = global_batch[samples].clone().requires_grad_()
            y = called(x)
            (y * loss_weights(global_batch)[samples]).sum().backward()
            found.append([y.detach(), x.grad, *model.buffers(), *[p.grad for p in model.parameters()]])
        mine, alone = found
        for one, other in zip(mine[:2], alone[:2], strict=True):
            assert_near(one, other[part], 1e-10, recomputed, use)
        for one, other in zip(mine[2:5], alone[2:5], strict=True):
            assert_near(one, other, 1e-10, recomputed, use)
        for one, other in zip(mine[5:], alone[5:], strict=True):
            assert_near(backend.allreduce(one, "sum"), other, 1e-9, recomputed, use)


class Deep(nn.Module):
    """A model with many layers. The forward pass skips selected linear layers, but calls every BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.ModuleList(nn.Linear(160, 160).double() for _ in range(40))
        self.norm = nn.ModuleList(nn.BatchNorm1d(160).double() for _ in range(40))

    def forward(self, x: Tensor, skipped_layers: set[int]) -> Tensor:
        for number, (linear, norm) in enumerate(zip(self.linear, self.norm, strict=True)):
            x = norm(x if number in skipped_layers else x + linear(x).tanh())
        return x


def skipped_layers(rank: int, step: int, unused: bool) -> set[int]:
    return {(7 * rank + step) % 40, (3 * rank + 11 * step) % 40, 39 - rank} if unused else set()


def check_deep(backend: Backend) -> None:
    """Many BatchNorm collectives and gradient buckets in one step neither interfere nor deadlock."""
    for unused in (False, True):
        model, twin = Deep(), Deep()
        model.norm[5] = nn.SyncBatchNorm(160).double()
        unitrain.sync_batch_norm(model, backend)
        wrapped = backend.distributed_model(model, find_unused_parameters=unused)
        for step in range(5):
            parts = [
                torch.randn(6, 160, generator=torch.Generator().manual_seed(10 * step + rank)).double()
                for rank in range(backend.size)
            ]
            model.zero_grad()
            wrapped(parts[backend.rank], skipped_layers(backend.rank, step, unused)).sin().sum().backward()
            if unused:  # one process cannot skip different layers for each rank
                continue
            twin.zero_grad()
            (twin(torch.cat(parts), set()).sin().sum() / backend.size).backward()
            for one, other in zip(model.parameters(), twin.parameters(), strict=True):
                assert_near(one.grad, other.grad, 1e-9, step)
        everywhere = backend.allgather_object([float(p.grad.sum()) for p in model.parameters() if p.grad is not None])
        assert all(other == everywhere[0] for other in everywhere)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.BatchNorm1d(4) for _ in range(2))

    def forward(self, x: Tensor, branch: int) -> Tensor:
        result: Tensor = self.branches[branch](x)
        return result


def check_errors(backend: Backend) -> None:
    """Invalid calls raise the same error on every rank, and the ranks can continue afterwards."""
    model = unitrain.sync_batch_norm(Branches(), backend)
    with pytest.raises(
        CollectiveMismatchError, match=rf"This rank calls BatchNorm 'branches\.{backend.rank % 2}' while"
    ):
        model(torch.randn(5, 4), backend.rank % 2)
    with pytest.raises(ModelError, match=r"BatchNorm 'branches\.0' got 1 values per channel over all ranks, but a var"):
        model(torch.randn(1 if backend.rank == 0 else 0, 4), 0)
    model.eval()
    if backend.rank == 0:  # does not communicate
        model(torch.randn(1, 4), 0)
    x = torch.randn(3, 4, requires_grad=True)
    (slope,) = torch.autograd.grad(model.train()(x, 0).sin().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


def check_excluded_rank(backend: Backend) -> None:
    """A rank that is excluded from the statistics does not affect the forward pass or the backward pass."""
    if backend.size == 1:
        return
    is_excluded = backend.rank == backend.size - 1
    model = unitrain.sync_batch_norm(nn.BatchNorm1d(4).double(), backend)
    x = (torch.randn(3, 4).double() + 100 * backend.rank).requires_grad_()
    with exclude_from_statistics(model) if is_excluded else nullcontext():
        (model(x).sin().sum() * (0.0 if is_excluded else 1.0)).backward()
    global_batch = backend.allgather(x.detach())[:-3].clone().requires_grad_()
    twin = nn.BatchNorm1d(4).double()
    twin(global_batch).sin().sum().backward()
    assert global_batch.grad is not None
    wanted = torch.cat([global_batch.grad, torch.zeros(3, 4).double()])[3 * backend.rank :][:3]
    assert_near(x.grad, wanted, 1e-9)
    for one, other in zip(model.buffers(), twin.buffers(), strict=True):
        assert_near(one, other, 1e-9)


def check_dummy_batches(backend: Backend) -> None:
    """With ShardedLoader, a rank without samples in the last step does not affect statistics or gradients."""
    for length, recomputed in itertools.product((3, 7), (False, True)):
        found = []
        for device, batch_size in ((backend, 2), (LOCAL, 2 * backend.size)):
            model = unitrain.sync_batch_norm(Block(recomputed=recomputed), device)
            wrapped = device.distributed_model(model)
            optimizer = device.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), wrapped)
            samples = create_samples("plain", 0, length)
            loader = unitrain.ShardedLoader(torch.utils.data.TensorDataset(samples), device, batch_size=batch_size)
            for _ in range(2):
                for (x,) in loader:
                    (wrapped(x).sin().mean() * loader.loss_weight).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            found.append([*model.parameters(), *model.buffers()])
        for one, other in zip(*found, strict=True):
            assert_near(one.detach(), other.detach(), 1e-10, length, recomputed)
        # After the end of the iteration, the next forward pass includes the samples of every rank again.
        model = unitrain.sync_batch_norm(nn.BatchNorm1d(4).double(), backend)
        model(torch.full((2, 4), backend.rank, dtype=torch.float64))
        assert_near(model.running_mean, torch.full((4,), 0.05 * (backend.size - 1), dtype=torch.float64), 1e-12)


class Encoder(nn.Module):
    """A model that transforms its inputs before the synchronized layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2, momentum=1.0).double()

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        result: Tensor = self.norm(inputs["x"] * 2 + 1)
        return result


def check_several_loaders(backend: Backend) -> None:
    """A dummy batch of one loader does not affect the statistics of the samples of other loaders."""
    lengths = [2 * backend.size, 1, 2 * backend.size]  # only rank 0 has a sample of the second loader
    samples = [
        torch.randn(length, 2, 3, generator=torch.Generator().manual_seed(length)).double() for length in lengths
    ]
    samples[2] += 50
    model: Any = unitrain.sync_batch_norm(Encoder(), backend)
    orders: list[list[int]] = [list(order) for order in itertools.permutations(range(3))]
    for order in orders:
        loaders = [
            unitrain.ShardedLoader(torch.utils.data.TensorDataset(samples[index]), backend, batch_size=2)
            for index in order
        ]
        for step, batches in enumerate(zip(*loaders, strict=True)):
            assert step == 0
            for index, (x,) in zip(order, batches, strict=True):
                model({"x": x[:]})  # a view has the same memory
                wanted = (samples[index] * 2 + 1).mean((0, 2))
                assert_near(model.norm.running_mean, wanted, 1e-12, order, index)
                model(inputs={"x": x})
                assert_near(model.norm.running_mean, wanted, 1e-12, order, index)
            # On other ranks than 0, one batch is a dummy batch, and these inputs belong to no batch, or to all batches.
            for inputs in (batches[0][0] + 1, [b for (b,) in batches]):
                if backend.size > 1:
                    found = r"current batches are .*a dummy batch.*drop_last=True" if backend.rank else "Another rank"
                    with pytest.raises(ModelError, match=found):
                        model({"x": inputs} if isinstance(inputs, Tensor) else {"x": inputs[0], "others": inputs})
    # The batches of one loader determine whether a rank counts, also for inputs that the rank has generated.
    loader = unitrain.ShardedLoader(torch.utils.data.TensorDataset(samples[1]), backend, batch_size=2)
    for (x,) in loader:
        model({"x": torch.full_like(x, 1.0 + backend.rank)})
        assert_near(model.norm.running_mean, torch.full((2,), 3.0, dtype=torch.float64), 1e-12)


def check_losses_of_several_loaders(backend: Backend) -> None:
    """Training with the sum of the losses of two loaders, one of which has a dummy batch, equals one process."""
    data = [create_samples("plain", seed, length) for seed, length in ((0, 2 * backend.size), (1, 1))]
    found = []
    for device, batch_size in ((backend, 2), (LOCAL, 2 * backend.size)):
        model = unitrain.sync_batch_norm(Block(recomputed=False), device)
        wrapped = device.distributed_model(model)
        optimizer = device.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), wrapped)
        loaders = [
            unitrain.ShardedLoader(torch.utils.data.TensorDataset(samples), device, batch_size=batch_size)
            for samples in data
        ]
        for _ in range(2):
            for batches in zip(*loaders, strict=True):
                losses = [
                    wrapped(x).sin().mean() * loader.loss_weight for loader, (x,) in zip(loaders, batches, strict=True)
                ]
                torch.stack(losses).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append([*model.parameters(), *model.buffers()])
    for one, other in zip(*found, strict=True):
        assert_near(one.detach(), other.detach(), 1e-10)


def check_large_means(backend: Backend) -> None:
    """The statistics of float64 inputs keep their precision if the mean is much larger than the standard deviation."""
    part = own_slice(backend)
    for mean, (name, count) in itertools.product((1e8, -1e12), (("plain", 7), ("1d", 3000), ("1d flat", 7))):
        end = count if backend.rank == backend.size - 1 else 50 * backend.rank + 50
        counts = part if count == 7 else slice(50 * backend.rank, end)
        centered = (create_samples(name, 0, count) * 1024).round() / 1024
        expected: Any = create_layer(name)
        mine: Any = unitrain.sync_batch_norm(copy.deepcopy(expected), backend)
        found = []
        for layer, shift, samples in ((mine, mean, counts), (expected, 0.0, slice(None))):
            x = (centered + shift)[samples].requires_grad_()
            y = layer(x)
            (y * loss_weights(centered)[samples]).sum().backward()
            found.append((y.detach(), x.grad, layer.running_var, layer.running_mean - 0.1 * shift))
        tolerance = 1e-14 * abs(mean)
        for one, other in zip(found[0][:2], found[1][:2], strict=True):
            assert_near(one, other[counts], 20 * tolerance, mean, name)
        for one, other in zip(found[0][2:], found[1][2:], strict=True):
            assert_near(one, other, 20 * tolerance, mean, name)


@pytest.fixture(scope="module", params=GROUPS, ids=lambda group: f"{group[0]}-{group[1]}")
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(*request.param) as ranks:
        yield ranks


@pytest.mark.parametrize(
    "check",
    [
        check_layers,
        check_autocast,
        check_uses,
        check_deep,
        check_excluded_rank,
        check_dummy_batches,
        check_several_loaders,
        check_losses_of_several_loaders,
        check_large_means,
    ],
    ids=lambda check: check.__name__,
)
def test_sync_batch_norm_equals_batch_norm_of_the_global_batch(
    group: RankGroup, check: Callable[[Backend], None]
) -> None:
    group.run(check, timeout_seconds=120)


def test_invalid_use_raises_the_same_error_on_every_rank(group: RankGroup) -> None:
    if group.size > 1:
        group.run(check_errors)


def test_state_dict_is_compatible_with_a_plain_model() -> None:
    model, plain = (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)) for _ in range(2))
    names = list(model.state_dict())
    unitrain.sync_batch_norm(model, LOCAL)
    model(torch.randn(5, 3))
    assert list(model.state_dict()) == names
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())
    assert isinstance(model[1], nn.BatchNorm1d)


def test_unpickled_model_normalizes_over_local_samples() -> None:
    model: Any = unitrain.sync_batch_norm(nn.Sequential(nn.BatchNorm1d(4)), simulate_rank(0, 2))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded[0], nn.BatchNorm1d)
    x = torch.randn(5, 4)
    torch.testing.assert_close(loaded(x), nn.BatchNorm1d(4)(x))
    assert copy.deepcopy(model)[0].shared_statistics is model[0].shared_statistics


class WithActivation(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            WithActivation(3),
            r"^norm is of class WithActivation, which overrides forward, .*BatchNorm1d, 2d or 3d there",
        ),
        (
            nn.LazyBatchNorm2d(),
            r"^norm is of class LazyBatchNorm2d, which has no channels before its first forward\. Call the model once",
        ),
    ],
)
def test_unsupported_layers_are_rejected(module: nn.Module, message: str) -> None:
    model = nn.Sequential()
    model.add_module("norm", module)
    with pytest.raises(ModelError, match=message):
        unitrain.sync_batch_norm(model, LOCAL)
    with_process_group = nn.SyncBatchNorm(3)
    with_process_group.process_group = "some"
    with pytest.raises(ModelError, match=r"^the model itself is a SyncBatchNorm with a process_group"):
        unitrain.sync_batch_norm(with_process_group, LOCAL)
