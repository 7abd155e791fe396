"""Gradient compression in complete runs, both in training loops and with the Trainer. The runs are compared with plain
torch in one process that computes the gradients of all ranks, and with torch's PowerSGD hook. The contract suite tests
single reductions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from unitrain import Callback, PowerSGD, TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.backends.compression_setting import Compression
from unitrain.backends.local import LocalBackend
from unitrain.errors import ConfigError, UnsupportedError
from unitrain.testing import RankGroup

LOCAL = LocalBackend(torch.device("cpu"))
LOOP_STEPS, STEPS = 4, 12
LOW_RANK = PowerSGD(rank=2, start_step=2)
LOOPS: dict[str, tuple[torch.dtype, Compression]] = {
    "fp16": (torch.float32, "fp16"),
    "bf16": (torch.float32, "bf16"),
    "low rank": (torch.float32, LOW_RANK),
    "low rank, double": (torch.float64, LOW_RANK),
    "at once": (torch.float64, PowerSGD(rank=3, start_step=0, seed=7)),
    "cold start": (torch.float64, PowerSGD(rank=2, start_step=1, warm_start=False)),
    "no feedback": (torch.float64, PowerSGD(rank=1, start_step=0, error_feedback=False)),
}
TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-9}
# Backends and numbers of ranks, in the order of their launches. "local" runs in this process.
LAUNCHES = [("local", 1), ("ddp", 2), ("horovod", 3), ("ddp", 3), ("horovod", 2), ("local", 1)]
# Interrupted and uninterrupted runs: the variant, and for each launch, by its index, the step at which the run ends.
ROUTES: dict[str, tuple[str, dict[int, int]]] = {
    "whole": ("loss scaling", {1: 12}),
    "ddp to horovod": ("loss scaling", {1: 7, 4: 12}),
    "one rank": ("accumulated", {0: 12}),
    "2 to 3 ranks to one": ("accumulated", {1: 4, 2: 8, 5: 12}),
    "one to 3 ranks to 2": ("accumulated", {0: 4, 3: 8, 4: 12}),
    "horovod to ddp": ("accumulated", {2: 7, 3: 12}),
}


# --- training loops without the Trainer ---


def network(dtype: torch.dtype) -> nn.Sequential:
    """Return a model that DDP reduces in several buckets."""
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(10, 530), nn.Tanh(), nn.Linear(530, 530), nn.Tanh(), nn.Linear(530, 12)).to(dtype)


def micro_batch_loss(model: nn.Module, rank: int, index: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * index + rank)
    inputs = torch.randn(8, 10, generator=generator, dtype=torch.float64).to(dtype)
    return (model(inputs).sin() * torch.linspace(1, 2, 12, dtype=dtype)).sum(-1).mean()


def flat_parameters(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train_loop(backend: Backend, dtype: torch.dtype, compression: Compression) -> tuple[Tensor, int]:
    """Train with two micro-batches per step and clipping. Return the parameters and the number of DDP buckets."""
    model = network(dtype)
    wrapped = backend.distributed_model(model, compression=compression)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for step in range(LOOP_STEPS):
        optimizer.zero_grad()
        with backend.no_sync(wrapped):
            micro_batch_loss(wrapped, backend.rank, 2 * step, dtype).backward()
        micro_batch_loss(wrapped, backend.rank, 2 * step + 1, dtype).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
    buckets = wrapped._get_ddp_logging_data()["rebuilt_bucket_sizes"] if backend.size > 1 else "1"
    return flat_parameters(model), len(buckets.split(","))


def train_all_loops(backend: Backend) -> dict[str, tuple[Tensor, int]]:
    return {name: train_loop(backend, *case) for name, case in LOOPS.items()}


class Reference:
    """The same training as `train_loop`, computed for all ranks in one process with plain torch."""

    def __init__(self, ranks: int, dtype: torch.dtype, compression: Compression) -> None:
        self.ranks, self.compression, self.step = ranks, compression, 0
        self.model = network(dtype)
        self.errors = [[torch.zeros_like(p) for p in self.model.parameters()] for _ in range(ranks)]
        self.q_matrices: dict[int, Tensor] = {}
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        for self.step in range(LOOP_STEPS):
            gradients_by_rank = []
            for rank in range(ranks):
                optimizer.zero_grad()
                for number in (2 * self.step, 2 * self.step + 1):
                    micro_batch_loss(self.model, rank, number, dtype).backward()
                gradients_by_rank.append([p.grad.clone() for p in self.model.parameters()])
            for place, parameter in enumerate(self.model.parameters()):
                parameter.grad = self.reduce(place, [gradients[place] for gradients in gradients_by_rank])
            nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
            optimizer.step()

    def reduce(self, place: int, gradients: list[Tensor]) -> Tensor:
        if isinstance(self.compression, str):
            dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[self.compression]
            return sum((g / self.ranks).to(dtype).float() for g in gradients).to(dtype).float()
        settings = self.compression
        rows, columns = gradients[0].shape if gradients[0].dim() == 2 else (1, gradients[0].numel())
        rank = min(rows, columns, settings.rank)
        if self.step < settings.start_step or (rows + columns) * rank * 2 >= rows * columns:
            return torch.stack(gradients).mean(0)
        matrices = [gradient + self.errors[r][place] for r, gradient in enumerate(gradients)]
        if place not in self.q_matrices or not settings.warm_start:
            seed = np.random.SeedSequence([settings.seed, place, self.step]).generate_state(1, np.uint64)[0] >> 1
            generator = torch.Generator().manual_seed(int(seed))
            self.q_matrices[place] = torch.randn(columns, rank, generator=generator, dtype=gradients[0].dtype)
        # Algorithm 1 of the PowerSGD paper.
        p = torch.linalg.qr(torch.stack([m @ torch.linalg.qr(self.q_matrices[place]).Q for m in matrices]).mean(0)).Q
        q = torch.stack([m.T @ p for m in matrices]).mean(0)
        self.q_matrices[place] = q
        if settings.error_feedback:
            for r, matrix in enumerate(matrices):
                self.errors[r][place] = matrix - p @ q.T
        return p @ q.T


@pytest.mark.parametrize("case", LOOPS)
def test_compressed_loops_equal_one_process_with_all_gradients(launch_results: LaunchResults, case: str) -> None:
    dtype, compression = LOOPS[case]
    untrained = flat_parameters(network(dtype))
    for size in (1, 2, 3):
        expected = flat_parameters(Reference(size, dtype, compression).model)
        assert (expected - untrained).abs().max() > 0.01
        for _, results in launches_of_size(launch_results, size):
            for parameters, _ in (result["loops"][case] for result in results):
                assert (parameters - expected).abs().max() <= TOLERANCES[dtype]


@pytest.mark.parametrize("case", LOOPS)
def test_backends_and_ranks_are_bit_equal(launch_results: LaunchResults, case: str) -> None:
    """Half-precision compression is bit-equal for every number of ranks. Other sums over three ranks depend on the
    order of the ring allreduce, so they are compared with a tolerance."""
    dtype, compression = LOOPS[case]
    for size in (2, 3):
        exact = size == 2 or isinstance(compression, str)
        ends = [result["loops"][case][0] for _, results in launches_of_size(launch_results, size) for result in results]
        for parameters in ends:
            assert (parameters - ends[0]).abs().max() <= (0.0 if exact else TOLERANCES[dtype])
    for results in launch_results[:-1]:
        assert all(torch.equal(result["loops"][case][0], results[0]["loops"][case][0]) for result in results)


def test_compared_loops_differ_and_use_several_buckets(launch_results: LaunchResults) -> None:
    runs = launch_results[1][0]["loops"]
    assert all(buckets > 1 for _, buckets in runs.values())
    for one, other in itertools.combinations(LOOPS, 2):
        if LOOPS[one][1] != LOOPS[other][1]:
            assert (runs[one][0] - runs[other][0]).abs().max() > 1e-5


def gradients_of_both_hooks(backend: Backend) -> tuple[Tensor, Tensor]:
    """Return the gradients of several steps with unitrain's PowerSGD and with torch's hook, from the same random
    start."""
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    settings, place = PowerSGD(rank=3, start_step=2), 0
    seed = np.random.SeedSequence([settings.seed, place, settings.start_step]).generate_state(1, np.uint64)[0] >> 1
    start = torch.randn(30, 3, generator=torch.Generator().manual_seed(int(seed)), dtype=torch.float64)
    ends = []
    for own in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(30, 20, bias=False).double()
        if own:
            wrapped = backend.distributed_model(model, compression=settings)
        else:
            wrapped = DistributedDataParallel(model)
            state = PowerSGDState(dist.group.WORLD, matrix_approximation_rank=3, start_powerSGD_iter=2)
            state.p_memory_dict[0] = torch.empty(20 * 3, dtype=torch.float64)
            state.q_memory_dict[0] = start.flatten().clone()
            wrapped.register_comm_hook(state, powerSGD_hook)
        found = []
        for step in range(8):
            model.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + backend.rank)
            wrapped(torch.randn(9, 30, generator=generator).double()).sin().sum().backward()
            found.append(model.weight.grad.clone())
        ends.append(torch.stack(found))
    return ends[0], ends[1]


def test_powersgd_equals_the_comm_hook_of_torch(launch_results: LaunchResults) -> None:
    for (backend, _), results in launches_of_size(launch_results, 2):
        for own, theirs in (result["both hooks"] for result in results):
            torch.testing.assert_close(own, theirs, rtol=0, atol=1e-9, msg=backend)


# --- the Trainer ---

ROWS = 24  # samples per step on all ranks together
IGNORED = -100


def make_trainer(
    backend: Backend, compression: Compression, dtype: torch.dtype = torch.float64, **settings: Any
) -> Trainer:
    torch.manual_seed(4)
    layers = (nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 4))
    model = settings.pop("model_class", nn.Sequential)(*layers).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.pop("lr", 0.1), momentum=0.9)
    loss_fn = settings.pop("loss_fn", nn.functional.cross_entropy)
    callbacks = settings.pop("callbacks", ())
    batch_size = ROWS // backend.size // settings.get("gradient_accumulation_steps", 1)
    defaults = {"max_steps": STEPS, "batch_size": batch_size, "seed": 6, "progress": "off", "compression": compression}
    config = TrainConfig(**{**defaults, **settings})
    return Trainer(model, optimizer, loss_fn, backend=backend, config=config, callbacks=callbacks)


def data(dtype: torch.dtype = torch.float64, count: int = 4 * ROWS) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(count, 12, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(inputs, torch.randint(0, 4, (count,), generator=generator))


def summed_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed loss and the number of tokens, which differs between steps and ranks."""
    tokens = 4 ** (target * (target > 1))
    return (nn.functional.cross_entropy(output, target, reduction="none") * tokens).sum(), tokens.sum()


class Overflow(Callback):
    """Makes a gradient infinite on the last rank in one step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_fit_start(self, trainer: Trainer) -> None:
        layer = trainer.backend.unwrap(trainer.model)[2]
        last = trainer.backend.rank == trainer.backend.size - 1

        def overflow(_module: nn.Module, gradients: tuple[Tensor], _outputs: Any) -> tuple[Tensor] | None:
            return (gradients[0] * float("inf"),) if last and trainer.progress.step == self.step else None

        layer.register_full_backward_hook(overflow)


class Freezing(Callback):
    """Freezes the first layer until step 3, and the second from step 8."""

    def on_fit_start(self, trainer: Trainer) -> None:
        trainer.backend.unwrap(trainer.model)[0].requires_grad_(False)

    def on_step_end(self, trainer: Trainer) -> None:
        model, step = trainer.backend.unwrap(trainer.model), trainer.progress.step
        model[0].requires_grad_(step >= 3)
        model[2].requires_grad_(step < 8)


class OccasionalLayer(nn.Sequential):
    """A model that uses its second layer for few samples. Some micro-batches, ranks or complete steps do not use this
    layer."""

    def forward(self, inputs: Tensor) -> Tensor:
        first, tanh, second, _, last = self
        hidden, chosen = tanh(first(inputs)), inputs[:, 0] > 1.3
        if chosen.any():
            hidden = hidden.index_add(0, chosen.nonzero()[:, 0], tanh(second(hidden[chosen])))
        return last(hidden)


VARIANTS: dict[str, dict[str, Any]] = {
    "accumulated": {"gradient_accumulation_steps": 2},
    "clipped": {"max_grad_norm": 0.05},
    "tokens": {"loss_fn": summed_loss},
    "uneven": {"count": 4 * ROWS - 7},
    "freezing": {"callbacks": [Freezing()]},
    "occasional layer": {
        "model_class": OccasionalLayer,
        "find_unused_parameters": True,
        "gradient_accumulation_steps": 2,
    },
    "loss scaling": {"precision": "fp16", "gradient_accumulation_steps": 2, "callbacks": [Overflow(4)]},
    "bf16": {"precision": "bf16"},
}
LOOSE = ("loss scaling", "bf16")  # half-precision results depend on the batch sizes


def fit(backend: Backend, variant: str, compression: Compression = LOW_RANK) -> Tensor:
    settings = dict(VARIANTS[variant])
    dtype = torch.float32 if variant in LOOSE else torch.float64
    count = settings.pop("count", 4 * ROWS)
    run = make_trainer(backend, compression, dtype, **settings)
    run.fit(data(dtype, count))
    return flat_parameters(run.backend.unwrap(run.model))


def fit_all(backend: Backend) -> dict[str, Tensor]:
    return {variant: fit(backend, variant) for variant in VARIANTS}


def test_powersgd_equals_one_rank_with_the_global_batch(launch_results: LaunchResults) -> None:
    alone = launch_results[0][0]["fits"]
    for variant, expected in alone.items():
        assert expected.isfinite().all()
        assert (expected - fit(LOCAL, variant, "none")).abs().max() > 1e-3, "nothing was compressed"
        for results in launch_results[:-1]:
            for result in results:
                assert torch.equal(result["fits"][variant], results[0]["fits"][variant])
                assert (result["fits"][variant] - expected).abs().max() <= (2e-2 if variant in LOOSE else 1e-9), variant


class Gradients(Callback):
    """Records the gradient of the first layer in each step."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        self.kept.append(trainer.backend.unwrap(trainer.model)[0].weight.grad.clone())


def test_error_feedback_keeps_its_scale_if_the_number_of_tokens_changes() -> None:
    sent = Gradients()
    settings = {"loss_fn": summed_loss, "lr": 0.0, "shuffle": False, "max_steps": 4, "batch_size": ROWS}
    run = make_trainer(LOCAL, PowerSGD(rank=1, start_step=0), callbacks=[sent], **settings)
    samples = data()
    samples.tensors[1][ROWS : 2 * ROWS] = 3  # each target has 64 tokens
    samples.tensors[1][2 * ROWS :] = 0
    run.fit(samples)
    unsent_error = torch.zeros(40, 12, dtype=torch.float64)
    for step, gradient in enumerate(sent.kept):
        inputs, targets = (tensor[step * ROWS : (step + 1) * ROWS] for tensor in samples.tensors)
        model = run.model
        model.zero_grad()
        total, tokens = summed_loss(model(inputs), targets)
        (true,) = torch.autograd.grad(total, model[0].weight)
        unsent_error += (true - gradient * tokens) / ROWS
    found = LOCAL.compression_state(run.model).state_dict()["errors"]["0.weight"][0]
    assert unsent_error.abs().max() > 0.1
    torch.testing.assert_close(found, unsent_error, rtol=1e-9, atol=1e-9)


def test_error_feedback_follows_the_loss_scale() -> None:
    run = make_trainer(LOCAL, LOW_RANK, torch.float32, precision="fp16", callbacks=[Overflow(4)], max_steps=8)
    run.fit(data(torch.float32))
    scale = LOCAL.compression_state(run.model).get_loss_scale()
    assert scale is not None
    assert scale.item() == 2**15, "the scale must be halved once"


# --- checkpoints ---


def train_to_step(backend: Backend, folder: Path, steps: int, compression: Compression, variant: str) -> Tensor:
    """Train until `steps` steps are complete, resuming from `folder`. Checkpoints are written in the background."""
    settings = {
        **VARIANTS[variant],
        "async_checkpoints": True,
        "checkpoint_every_steps": 4,
        "keep_last": None,
    }
    dtype = torch.float32 if variant in LOOSE else torch.float64
    run = make_trainer(backend, compression, dtype, max_steps=steps, output_dir=folder, resume=True, **settings)
    run.fit(data(dtype))
    return flat_parameters(run.backend.unwrap(run.model))


def test_resume_on_the_same_number_of_ranks_is_bit_equal(launch_results: LaunchResults) -> None:
    """The loss scale at the checkpoint differs from its initial value."""
    uninterrupted = launch_results[1][0]["routes"]["whole"]
    for result in launch_results[4]:
        assert torch.equal(result["routes"]["ddp to horovod"], uninterrupted)


def test_resume_on_another_number_of_ranks_keeps_the_mean_error(launch_results: LaunchResults, folder: Path) -> None:
    expected = launch_results[0][0]["routes"]["one rank"]
    for name, last in (("2 to 3 ranks to one", 5), ("one to 3 ranks to 2", 4), ("horovod to ddp", 3)):
        for result in launch_results[last]:
            torch.testing.assert_close(result["routes"][name], expected, rtol=0, atol=1e-9)
    checkpoint = folder / "2 to 3 ranks to one" / "step-000000004" / "training.pt"
    memory = torch.load(checkpoint, weights_only=True)["gradients"]
    assert memory["errors"]["0.weight"].shape == (2, 40, 12)
    assert not torch.allclose(*memory["errors"]["0.weight"]), "every rank must have a different error"


def test_resume_without_error_feedback_changes_the_parameters(launch_results: LaunchResults, tmp_path: Path) -> None:
    train_to_step(LOCAL, tmp_path, 7, LOW_RANK, "accumulated")
    resumed = make_trainer(
        LOCAL, LOW_RANK, max_steps=STEPS, output_dir=tmp_path, resume=True, gradient_accumulation_steps=2
    )
    memory = LOCAL.compression_state(resumed.model)
    memory.load_state_dict({**memory.state_dict(), "errors": {}})
    resumed.fit(data())
    assert (flat_parameters(resumed.model) - launch_results[0][0]["routes"]["one rank"]).abs().max() > 1e-4


def test_run_resumes_with_another_compression(tmp_path: Path) -> None:
    choices: list[Compression] = ["none", LOW_RANK, PowerSGD(rank=4, start_step=2), "bf16"]
    for number, compression in enumerate(choices, 1):
        train_to_step(LOCAL, tmp_path, 3 * number, compression, "accumulated")


# --- running all cases in few launches ---


def run_all_cases(backend: Backend, folder: str, launch: int) -> dict[str, Any]:
    routes = {
        name: train_to_step(backend, Path(folder) / name, until[launch], LOW_RANK, variant)
        for name, (variant, until) in ROUTES.items()
        if launch in until
    }
    if launch == len(LAUNCHES) - 1:  # the last launch only completes one of the ROUTES
        return {"routes": routes}
    found: dict[str, Any] = {"loops": train_all_loops(backend), "fits": fit_all(backend), "routes": routes}
    if backend.size == 2:
        found["both hooks"] = gradients_of_both_hooks(backend)
    return found


LaunchResults = list[list[dict[str, Any]]]


def launches_of_size(launch_results: LaunchResults, size: int) -> list[tuple[tuple[str, int], list[dict[str, Any]]]]:
    return [
        (launch, results)
        for launch, results in zip(LAUNCHES[:-1], launch_results[:-1], strict=True)
        if launch[1] == size
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("routes")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread in this process, like the ranks. With two threads, matrix products are summed in another order,
    which can change the half-precision rounding of a gradient."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def launch_results(folder: Path) -> LaunchResults:
    """Return the results of every rank of each launch."""
    found: LaunchResults = []
    for number, (backend, size) in enumerate(LAUNCHES):
        if backend == "local":
            found.append([run_all_cases(LOCAL, str(folder), number)])
        else:
            with RankGroup(backend, size) as group:
                found.append(group.run(run_all_cases, str(folder), number, timeout_seconds=240))
    return found


# --- settings ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, r"PowerSGD\.rank must be an integer of at least 1, got 0\. Use PowerSGD\(rank=2\)\."),
        ({"rank": 1.5}, "got 1.5"),
        ({"start_step": -1}, r"PowerSGD\.start_step .* at least 0, got -1\. Use PowerSGD\(start_step=1000\)\."),
        ({"seed": True}, "got True"),
        ({"min_compression_rate": 0}, "min_compression_rate must be a number above 0, got 0"),
        ({"warm_start": 1}, r"PowerSGD\.warm_start must be True or False, got 1\."),
        ({"error_feedback": None}, "error_feedback must be True or False"),
    ],
)
def test_invalid_compression_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PowerSGD(**settings)


class RaisingBackend(LocalBackend):
    """Simulates a third-party backend that does not support compression."""

    def distributed_model(
        self,
        model: nn.Module,
        *,
        shard: Any = "none",
        shard_blocks: Any = (),
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        compression: Any = "none",
    ) -> Any:
        if compression != "none":
            raise UnsupportedError(f"Backend 'mine' does not compress, got compression {compression!r}.")
        return super().distributed_model(model, shard=shard, find_unused_parameters=find_unused_parameters)


def test_backend_without_compression_raises_unsupported_error() -> None:
    with pytest.raises(UnsupportedError, match="does not compress, got compression 'powersgd'"):
        make_trainer(RaisingBackend(torch.device("cpu")), "powersgd")
