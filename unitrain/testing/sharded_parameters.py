"""Contract tests of `shard="parameters"` (ZeRO-3): training equals training with replicated parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unitrain.backends.base import Backend
from unitrain.backends.sharding.checks import choose_blocks
from unitrain.backends.sharding.forward_passes import align_forward_passes
from unitrain.backends.sharding.fsdp_compat import fsdp_parameter_records, unsharded_parameter
from unitrain.backends.sharding.state_format import gather_complete_tensor
from unitrain.data.batch import BatchInfo
from unitrain.modules.activation_checkpointing import checkpoint_activations
from unitrain.modules.buffers import broadcast_buffers
from unitrain.modules.sync_batch_norm import sync_batch_norm
from unitrain.testing.cases import assert_same_on_every_rank, contract
from unitrain.testing.models import WORDS, ConvNet, Transformer, TransformerLayer, seeded_generator
from unitrain.torch_compat import local_shard

MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]


def build_model(model_class: type[nn.Module] = Transformer, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a model with the same weights on every rank."""
    torch.manual_seed(0)
    return model_class().to(dtype)


def model_loss(model: nn.Module, ranks: Iterable[int], step: int) -> Tensor:
    """Return the loss of `model` on the samples of `ranks`. Each rank has the same number of samples."""
    parts = []
    for rank in ranks:
        generator = seeded_generator(100 * step + rank)
        # A rank uses at most 3 of the 11 words.
        parts.append(
            torch.randint(0, WORDS, (3,), generator=generator)[torch.randint(0, 3, (4, 5), generator=generator)]
        )
    words = torch.cat(parts)
    is_language = any(isinstance(module, nn.Embedding) for module in model.modules())
    dtype = next(model.parameters()).dtype
    inputs = words if is_language else words.reshape(-1, 1, 4, 5).expand(-1, 3, -1, -1).to(dtype)
    output = model(inputs)
    loss: Tensor = (output.sin() * torch.linspace(1, 2, output.shape[-1], dtype=output.dtype)).sum(-1).mean()
    return loss


def adamw(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """Return AdamW, with a large eps, so that rounding errors of small gradients are not amplified."""
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, eps=1e-3)


def distribute(
    backend: Backend, model: nn.Module, make_optimizer: MakeOptimizer = adamw, blocks: tuple[Any, ...] | int = ()
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Shard the parameters of `model`, and return the distributed model and the optimizer that `make_optimizer`
    builds."""
    optimizer = make_optimizer(model.parameters())
    wrapped = backend.distributed_model(model, shard="parameters", shard_blocks=blocks)
    return wrapped, backend.distributed_optimizer(optimizer, wrapped, shard="parameters")


def gather_complete_state(backend: Backend, model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the complete state of the distributed `model`. All ranks must call this function."""
    return {name: value.clone() for name, value in backend.unwrap(model).state_dict().items()}


def _assert_same(backend: Backend, model: nn.Module, twin: nn.Module) -> None:
    broadcast_buffers(model, backend)
    state, expected = gather_complete_state(backend, model), twin.state_dict()
    assert list(state) == list(expected)
    for name, value in state.items():
        torch.testing.assert_close(
            value, expected[name], rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )
        assert_same_on_every_rank(backend, value.double().sum().item())


def _all_ranks(backend: Backend) -> range:
    return range(backend.size)


class _Run(NamedTuple):
    """A model that `optimizer` trains on the samples of `ranks`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    ranks: Iterable[int]


def _create_runs(
    backend: Backend,
    wrapped: nn.Module,
    optimizer: torch.optim.Optimizer,
    twin: nn.Module,
    twin_optimizer: torch.optim.Optimizer,
) -> tuple[_Run, _Run]:
    """Return two runs: a distributed model on the samples of this rank, and its replicated twin on the samples of all
    ranks."""
    return _Run(wrapped, optimizer, [backend.rank]), _Run(twin, twin_optimizer, _all_ranks(backend))


@contract
def sharded_parameters_train_as_plain_torch(backend: Backend) -> None:
    """Train with several optimizers, clipping, and accumulation inside and outside `no_sync`."""
    optimizers: list[tuple[MakeOptimizer, float | None]] = [
        (adamw, 0.05),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=0.1), None),
        (lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5, eps=0.01, foreach=True), 1e9),
    ]
    for make_optimizer, max_norm in optimizers:
        model, twin = build_model(), build_model()
        wrapped, optimizer = distribute(backend, model, make_optimizer)
        twin_optimizer = make_optimizer(twin.parameters())
        for step in range(3):
            optimizer.zero_grad()
            twin_optimizer.zero_grad()
            with backend.no_sync(wrapped):
                model_loss(wrapped, [backend.rank], 10 + step).backward()
            for micro_step in (0, 20):
                model_loss(wrapped, [backend.rank], micro_step + step).backward()
            for micro_step in (10, 0, 20):
                model_loss(twin, _all_ranks(backend), micro_step + step).backward()
            if max_norm is not None:
                norms = [nn.utils.clip_grad_norm_(replica.parameters(), max_norm) for replica in (model, twin)]
                assert abs(norms[0].item() - norms[1].item()) < 1e-12, norms
            optimizer.step()
            twin_optimizer.step()
        _assert_same(backend, wrapped, twin)
        assert [id(parameter) for group in optimizer.param_groups for parameter in group["params"]] == [
            *map(id, model.parameters())
        ]


def _train_and_compare(backend: Backend, wrapped: nn.Module, optimizer: Any, twin: nn.Module) -> None:
    """Train `wrapped`, and `twin` with the samples of all ranks, for two steps, and compare their weights."""
    twin_optimizer = adamw(twin.parameters())
    for step in range(2):
        for run in _create_runs(backend, wrapped, optimizer, twin, twin_optimizer):
            run.optimizer.zero_grad()
            model_loss(run.model, run.ranks, step).backward()
            run.optimizer.step()
    _assert_same(backend, wrapped, twin)


@contract
def blocks_with_a_minimum_number_of_parameters_train_as_plain_torch(backend: Backend) -> None:
    """A layer has 271 parameters and its attention 168. The modules that share a weight are not blocks."""
    layers = [f"layers.{layer}" for layer in range(2)]
    total = sum(parameter.numel() for parameter in build_model().parameters())
    # With `total`, no submodule is large enough, so the complete model is the only block.
    for minimum, expected in ((200, layers), (50, [f"{layer}.attention" for layer in layers]), (total, [])):
        model, twin = build_model(), build_model()
        assert list(choose_blocks(model, minimum)) == expected, minimum
        wrapped, optimizer = distribute(backend, model, blocks=minimum)
        _train_and_compare(backend, wrapped, optimizer, twin)


@contract
def blocks_that_share_modules_train_as_plain_torch(backend: Backend) -> None:
    """Use one submodule in two layers, which then cannot be blocks, and use one layer twice."""

    def build(shared_submodule: str) -> nn.Module:
        model = build_model()
        layers: Any = model.layers
        if shared_submodule:
            setattr(layers[1], shared_submodule, getattr(layers[0], shared_submodule))
        else:
            layers[1] = layers[0]
        return model

    for shared_submodule, blocks, expected in (
        ("up", (), []),
        ("up", 50, ["layers.0.attention", "layers.1.attention"]),
        ("attention", 50, ["layers.0.attention"]),
        ("", ("TransformerLayer",), ["layers.0"]),
    ):
        model, twin = build(shared_submodule), build(shared_submodule)
        assert list(choose_blocks(model, blocks)) == expected, (shared_submodule, blocks)
        wrapped, optimizer = distribute(backend, model, blocks=blocks)
        _train_and_compare(backend, wrapped, optimizer, twin)


@contract
def gradient_norms_of_sharded_parameters_equal_those_of_complete_gradients(backend: Backend) -> None:
    """Compute norms of several orders, and clip gradients with them. Only rank 0 holds rows of the second layer."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 2 * backend.size), nn.Linear(2 * backend.size, 1)).double()

    def gradients(model: nn.Module) -> list[Tensor]:
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    rows = torch.randn(4 * backend.size, 3, generator=seeded_generator(1)).double()
    for order in (2.0, 1.0, 3.0, torch.inf, -torch.inf):
        for foreach in (None, False):
            model, twin = build(), build()
            wrapped, _ = distribute(backend, model)
            wrapped(rows[backend.rank :: backend.size]).sin().mean().backward()
            twin(rows).sin().mean().backward()
            norms = [nn.utils.get_total_norm(gradients(replica), order).item() for replica in (model, twin)]
            norms += [
                nn.utils.clip_grad_norm_(replica.parameters(), 0.01, order, foreach=foreach).item()
                for replica in (model, twin)
            ]
            assert max(norms) - min(norms) < 1e-12, (order, norms)
            for gradient, expected in zip(gradients(model), gradients(twin), strict=True):
                torch.testing.assert_close(gather_complete_tensor(gradient, backend), expected, rtol=0, atol=1e-12)


@contract
def sharded_parameters_divide_memory_by_the_number_of_ranks(backend: Backend) -> None:
    width = 6 * backend.size  # divisible by the number of ranks
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)) for _ in range(3))
    )
    wrapped, optimizer = distribute(backend, model, torch.optim.Adam, (nn.Linear,))
    complete = sum(parameter.numel() for parameter in model.parameters())
    wrapped(torch.ones(2, width)).sum().backward()
    optimizer.step()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def count_local_elements(tensor: Tensor | None) -> int:
        assert tensor is not None
        return local_shard(tensor).numel()

    stored_elements = [
        sum(map(count_local_elements, parameters)),
        sum(count_local_elements(parameter.grad) for parameter in parameters),
        sum(count_local_elements(entry["exp_avg"]) for entry in optimizer.state.values()),
    ]
    assert stored_elements == [complete // backend.size] * 3, (stored_elements, complete)
    sharded_parameters: Any = getattr(wrapped, "sharded_parameters", None)  # None on backend local
    for block in () if sharded_parameters is None else sharded_parameters.blocks:
        for record in fsdp_parameter_records(block):
            complete_parameter = unsharded_parameter(record)
            assert complete_parameter is not None
            assert not complete_parameter.untyped_storage().nbytes(), "the complete parameter is still in memory"


@contract
def sharded_parameters_train_with_large_blocks(backend: Backend) -> None:
    """Blocks of more than 64 KB are gathered by different collectives than smaller blocks."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 2001), nn.Tanh(), nn.Linear(2001, 5)).double()

    def loss(model: nn.Module, ranks: Iterable[int], step: int) -> Tensor:
        inputs = [torch.randn(4, 6, generator=seeded_generator(10 * step + rank)) for rank in ranks]
        output: Tensor = model(torch.cat(inputs).double()).sin().mean()
        return output

    model, twin = build(), build()
    wrapped, optimizer = distribute(backend, model, blocks=(nn.Linear,))
    twin_optimizer = adamw(twin.parameters())
    for step in range(3):
        for run in _create_runs(backend, wrapped, optimizer, twin, twin_optimizer):
            run.optimizer.zero_grad()
            loss(run.model, run.ranks, step).backward()
            run.optimizer.step()
    _assert_same(backend, wrapped, twin)


@contract
def sharded_parameters_train_a_conv_net_with_synchronized_batch_norm(backend: Backend) -> None:
    model, twin = build_model(ConvNet), build_model(ConvNet)
    sync_batch_norm(model, backend)
    wrapped, optimizer = distribute(backend, model)
    twin_optimizer = adamw(twin.parameters())
    for step in range(3):
        for run in _create_runs(backend, wrapped, optimizer, twin, twin_optimizer):
            run.optimizer.zero_grad()
            model_loss(run.model, run.ranks, step).backward()
            run.optimizer.step()
    _assert_same(backend, wrapped, twin)
    for evaluated_model in (wrapped, twin):
        evaluated_model.eval()
    with torch.no_grad():
        values = [model_loss(wrapped, [0], 7).item(), model_loss(twin, [0], 7).item()]
    assert abs(values[0] - values[1]) < 1e-12, values
    model_loss(wrapped.train(), [backend.rank], 8).backward()


@contract
def state_dicts_of_sharded_parameters_are_those_of_plain_torch(backend: Backend) -> None:
    """Compare state dicts with those of plain torch, and load state dicts of plain torch."""
    model, twin = build_model(), build_model()
    wrapped, optimizer = distribute(backend, model)
    twin_optimizer = adamw(twin.parameters())
    assert optimizer.state_dict() == twin_optimizer.state_dict()

    def train(step: int, *pairs: tuple[nn.Module, torch.optim.Optimizer]) -> None:
        for trained_model, its_optimizer in pairs:
            its_optimizer.zero_grad()
            ranks = _all_ranks(backend) if trained_model is twin else [backend.rank]
            model_loss(trained_model, ranks, step).backward()
            its_optimizer.step()

    for step in range(2):
        train(step, (wrapped, optimizer), (twin, twin_optimizer))
    saved, expected = optimizer.state_dict(), twin_optimizer.state_dict()
    assert saved["param_groups"] == expected["param_groups"]
    torch.testing.assert_close(saved["state"], expected["state"], rtol=0, atol=1e-12)
    assert {type(value) for value in model.state_dict().values()} == {Tensor}
    assert list(model.get_submodule("layers.0").state_dict()) == list(twin.get_submodule("layers.0").state_dict())

    # After a further step of the sharded model, load the state of plain torch into it and its optimizer. On rank 0,
    # also load this state into a new model and optimizer before they are sharded.
    train(5, (wrapped, optimizer))
    model.load_state_dict(copy.deepcopy(twin.state_dict()))
    optimizer.load_state_dict(copy.deepcopy(expected))
    fresh = build_model()
    fresh_optimizer = adamw(fresh.parameters())
    if backend.rank == 0:
        fresh.load_state_dict(twin.state_dict())
        fresh_optimizer.load_state_dict(copy.deepcopy(expected))
        fresh_optimizer.param_groups[0]["lr"] = 0.02
    fresh_wrapped = backend.distributed_model(fresh, shard="parameters")
    for _ in range(2):
        backend.distributed_optimizer(fresh_optimizer, fresh_wrapped, shard="parameters")
    assert fresh_optimizer.param_groups[0]["lr"] == 0.02
    fresh_optimizer.param_groups[0]["lr"] = 0.01
    for step in (2, 3):
        train(step, (wrapped, optimizer), (fresh_wrapped, fresh_optimizer), (twin, twin_optimizer))
    _assert_same(backend, wrapped, twin)
    _assert_same(backend, fresh_wrapped, twin)


@contract
def optimizer_state_created_from_sharded_parameters_is_kept(backend: Backend) -> None:
    """Adagrad creates its state when it is built; Adam has state if it was used before `distributed_optimizer`."""
    factories: list[MakeOptimizer] = [lambda parameters: torch.optim.Adagrad(parameters, 0.01, 0, 0, 0.1), adamw]
    for make_optimizer in factories:
        model, twin = build_model(), build_model()
        wrapped = backend.distributed_model(model, shard="parameters")
        optimizer, twin_optimizer = make_optimizer(model.parameters()), make_optimizer(twin.parameters())
        for step in range(3):
            if step == (0 if make_optimizer is not adamw else 1):
                backend.distributed_optimizer(optimizer, wrapped, shard="parameters")
            for run in _create_runs(backend, wrapped, optimizer, twin, twin_optimizer):
                run.optimizer.zero_grad()
                model_loss(run.model, run.ranks, step).backward()
                run.optimizer.step()
        _assert_same(backend, wrapped, twin)
        state, expected = optimizer.state_dict()["state"], twin_optimizer.state_dict()["state"]
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)


@contract
def sharded_parameters_support_groups_freezing_and_schedulers(backend: Backend) -> None:
    """Test parameter groups, a scheduler, `add_param_group`, and parameters that are frozen and unfrozen."""

    def make_optimizer_and_scheduler(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        layers = list(model.get_submodule("layers").children())
        groups: list[dict[str, Any]] = [
            {"params": [*layers[0].parameters()], "lr": 0.05},
            {"params": [*model.get_submodule("embedding").parameters()]},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-3)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    model, twin = build_model(), build_model()
    for replica in (model, twin):
        replica.get_submodule("layers.1").requires_grad_(False)
    pairs = [make_optimizer_and_scheduler(model), make_optimizer_and_scheduler(twin)]
    wrapped = backend.distributed_model(model, shard="parameters", shard_blocks=("TransformerLayer",))
    backend.distributed_optimizer(pairs[0][0], wrapped, shard="parameters")
    for step in range(5):
        for original, distributed, ranks, (optimizer, scheduler) in (
            (model, wrapped, [backend.rank], pairs[0]),
            (twin, twin, _all_ranks(backend), pairs[1]),
        ):
            if step == 1:
                optimizer.add_param_group({"params": [*original.get_submodule("layers.1").parameters()], "lr": 0.02})
            if step in (2, 4):
                original.get_submodule("layers.1").requires_grad_(step == 2)
                original.get_parameter("layers.0.up.bias").requires_grad_(step == 4)
            optimizer.zero_grad()
            model_loss(distributed, ranks, step).backward()
            optimizer.step()
            scheduler.step()
    _assert_same(backend, wrapped, twin)


@contract
def sharded_parameters_train_with_loss_scaling_and_autocast(backend: Backend) -> None:
    """Train in fp16 with an overflow on one rank, and in bf16."""
    for dtype, overflow_step in ((torch.float16, 1), (torch.bfloat16, -1)):
        results = []
        for shard in ("none", "parameters"):
            model = build_model(dtype=torch.float32)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            wrapped = backend.distributed_model(model, shard=shard)
            backend.distributed_optimizer(optimizer, wrapped, shard=shard)
            scaler = torch.amp.GradScaler(backend.device.type, init_scale=256.0, enabled=dtype == torch.float16)
            for step in range(4):
                optimizer.zero_grad()
                with torch.autocast(backend.device.type, dtype):
                    loss = model_loss(wrapped, [backend.rank], step)
                if step == overflow_step and backend.rank == backend.size - 1:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                scaler.step(optimizer)
                scaler.update()
            results.append((gather_complete_state(backend, wrapped), scaler.get_scale()))
        torch.testing.assert_close(results[1][0], results[0][0], rtol=0, atol=1e-6)
        assert results[0][1] == results[1][1]


@contract
def sharded_parameters_train_with_activation_checkpointing(backend: Backend) -> None:
    choices: list[tuple[Any, tuple[str, ...]]] = [(TransformerLayer, ()), ("TransformerLayer", ("MultiheadAttention",))]
    for checkpointed, blocks in choices:
        model, twin = build_model(), build_model()
        checkpoint_activations(model, checkpointed)
        wrapped, optimizer = distribute(backend, model, blocks=blocks)
        twin_optimizer = adamw(twin.parameters())
        for step in range(2):
            for run in _create_runs(backend, wrapped, optimizer, twin, twin_optimizer):
                run.optimizer.zero_grad()
                model_loss(run.model, run.ranks, step).backward()
                run.optimizer.step()
        _assert_same(backend, wrapped, twin)


@contract
def sharded_parameters_train_after_forwards_without_backward(backend: Backend) -> None:
    """A forward pass with gradients before the step must not leave outdated parameters in memory."""
    model, twin = build_model(), build_model()
    wrapped, optimizer = distribute(backend, model)
    twin_optimizer = adamw(twin.parameters())
    for step in range(2):
        for run in _create_runs(backend, wrapped, optimizer, twin, twin_optimizer):
            run.optimizer.zero_grad()
            loss = model_loss(run.model, run.ranks, step)
            loss.backward(retain_graph=True)
            loss.backward()
            model_loss(run.model, run.ranks, 9)
            run.optimizer.step()
    _assert_same(backend, wrapped, twin)


@contract
def sharded_parameters_train_after_an_evaluation_on_rank_0(backend: Backend) -> None:
    """Only rank 0 has batches for evaluation. All parameters of the model are in its blocks."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))).double()

    model, twin = build(), build()
    wrapped, optimizer = distribute(backend, model, blocks=(nn.Linear,))
    rows = torch.randn(4 * backend.size, 3, generator=seeded_generator(1)).double()
    own, batches = rows[backend.rank :: backend.size], [(rows, BatchInfo(4, 0))] * 2 if backend.rank == 0 else []
    runs = [(wrapped, optimizer, own), (twin, adamw(twin.parameters()), rows)]
    for _ in range(2):
        with torch.no_grad():
            for batch, _ in align_forward_passes(model, batches, backend):
                torch.testing.assert_close(model(batch), twin(batch), rtol=0, atol=1e-12)
        for trained_model, its_optimizer, inputs in runs:
            its_optimizer.zero_grad()
            trained_model(inputs).sin().mean().backward()
            its_optimizer.step()
    _assert_same(backend, wrapped, twin)


class _InPlace(nn.Sequential):
    def forward(self, words: Tensor) -> Tensor:
        output: Tensor = super().forward(words)  # type: ignore[no-untyped-call]
        return output.mul_(2)


@contract
def gradients_of_sharded_parameters_remain_correct_after_another_forward(backend: Backend) -> None:
    """Clip after the backward pass and a further forward pass with grad mode enabled, call `model.zero_grad` between
    the forward and the backward pass, and accumulate the gradients of an output that was changed in place."""
    model, twin = build_model(), build_model()
    wrapped, optimizer = distribute(backend, model)
    twin_optimizer = adamw(twin.parameters())
    for step in range(3):
        norms = []
        for run in _create_runs(backend, wrapped, optimizer, twin, twin_optimizer):
            loss = model_loss(run.model, run.ranks, step)
            run.model.zero_grad()
            loss.backward()
            model_loss(_InPlace(run.model), run.ranks, 9).backward()
            model_loss(run.model, run.ranks, 9)
            norms.append(nn.utils.clip_grad_norm_(run.model.parameters(), 0.05).item())
            run.optimizer.step()
        assert abs(norms[0] - norms[1]) < 1e-12, norms
    _assert_same(backend, wrapped, twin)
