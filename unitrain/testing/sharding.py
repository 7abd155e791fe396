"""Contract tests of `distributed_optimizer(shard="state")` (ZeRO-1): sharded training equals unsharded training."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from unitrain.backends.base import Backend, Communicator
from unitrain.backends.sharding.optimizer_state import shard_optimizer_state
from unitrain.backends.sharding.partition import MIN_DIVIDED_ELEMENTS
from unitrain.errors import ConfigError, ModelError
from unitrain.testing.cases import assert_same_on_every_rank, contract, raises
from unitrain.testing.models import FEATURES, batch, compute_loss, mean_gradients

_WIDTH = MIN_DIVIDED_ELEMENTS // FEATURES + 1  # large enough that weights are split between ranks
MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]


class _Scale(nn.Module):
    """A module with a 0-dimensional parameter and a transposed (non-contiguous) parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.matrix = nn.Parameter((torch.eye(FEATURES) + 0.1 * torch.randn(FEATURES, FEATURES)).T)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.factor * inputs @ self.matrix


def _build() -> nn.Module:
    torch.manual_seed(0)
    layers = (_Scale(), nn.Linear(FEATURES, _WIDTH), nn.LayerNorm(_WIDTH), nn.Tanh(), nn.Linear(_WIDTH, FEATURES))
    return nn.Sequential(*layers).double()


def _distribute_model_and_optimizer(
    backend: Backend, make_optimizer: MakeOptimizer
) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """Return a new model, its distributed model, and the distributed optimizer."""
    model = _build()
    wrapped = backend.distributed_model(model)
    return model, wrapped, backend.distributed_optimizer(make_optimizer(model.parameters()), wrapped, shard="state")


def _run_step(
    backend: Backend, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, max_norm: float | None = None
) -> None:
    optimizer.zero_grad()
    compute_loss(model(batch(backend.rank, step))).backward()
    if max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()


def _run_reference_step(
    backend: Backend, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, max_norm: float | None = None
) -> None:
    """Run the same step without the backend: one process, with the samples of all ranks."""
    expected = mean_gradients(backend, model, lambda m, rank: compute_loss(m(batch(rank, step))).backward())
    for name, parameter in model.named_parameters():
        parameter.grad = expected[name]
    if max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()


def _assert_same(backend: Backend, model: nn.Module, twin: nn.Module) -> None:
    for (name, value), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
        assert_same_on_every_rank(backend, value.double().sum().item())


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [value for entry in optimizer.state.values() for key, value in entry.items() if key != "step"]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@contract
def sharded_state_trains_as_plain_torch(backend: Backend) -> None:
    optimizers: list[tuple[MakeOptimizer, float | None]] = [
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1), None),
        (lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1), 0.05),
        (lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True, foreach=False), None),
        (lambda parameters: torch.optim.Adagrad(parameters, lr=0.1), None),
        (lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5, centered=True), None),
        (lambda parameters: torch.optim.NAdam(parameters, lr=0.01), None),
        (lambda parameters: torch.optim.Adafactor(parameters, lr=0.01), None),  # its state cannot be split
    ]
    for make_optimizer, max_norm in optimizers:
        model, wrapped, optimizer = _distribute_model_and_optimizer(backend, make_optimizer)
        twin = _build()
        twin_optimizer = make_optimizer(twin.parameters())
        for step in range(3):
            _run_step(backend, wrapped, optimizer, step, max_norm)
            _run_reference_step(backend, twin, twin_optimizer, step, max_norm)
        _assert_same(backend, model, twin)
        assert [id(parameter) for group in optimizer.param_groups for parameter in group["params"]] == [
            *map(id, model.parameters())
        ]


@contract
def sharded_state_is_divided_evenly(backend: Backend) -> None:
    model, wrapped, optimizer = _distribute_model_and_optimizer(
        backend, lambda parameters: torch.optim.Adam(parameters)
    )
    _run_step(backend, wrapped, optimizer, 0)
    complete = 2 * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    sizes = backend.allgather_object(_state_bytes(optimizer))
    assert sum(sizes) == complete, (sizes, complete)
    # Small tensors are not split, so a shard may exceed the mean size by the state of one such tensor.
    assert max(sizes) - complete / backend.size <= 2 * 8 * MIN_DIVIDED_ELEMENTS, (sizes, complete)


@contract
def state_dict_of_sharded_state_is_that_of_plain_torch(backend: Backend) -> None:
    """Resume in one process from a state saved on the backend, and on the backend from a state saved in one process."""

    def make_optimizer(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01)

    model, wrapped, optimizer = _distribute_model_and_optimizer(backend, make_optimizer)
    twin = _build()
    twin_optimizer = make_optimizer(twin.parameters())
    assert optimizer.state_dict() == twin_optimizer.state_dict()
    for step in range(2):
        _run_step(backend, wrapped, optimizer, step)
        _run_reference_step(backend, twin, twin_optimizer, step)
    saved, expected = optimizer.state_dict(), twin_optimizer.state_dict()
    assert saved["param_groups"] == expected["param_groups"]
    torch.testing.assert_close(saved["state"], expected["state"], rtol=0, atol=1e-10)

    single_process_model = _build()
    single_process_model.load_state_dict(backend.unwrap(wrapped).state_dict())
    single_process_optimizer = make_optimizer(single_process_model.parameters())
    single_process_optimizer.load_state_dict(copy.deepcopy(saved))
    _run_reference_step(backend, single_process_model, single_process_optimizer, 2)
    _run_reference_step(backend, twin, twin_optimizer, 2)
    _assert_same(backend, single_process_model, twin)

    # Load the state into an optimizer that is already sharded, and into one that is sharded afterwards.
    _run_step(backend, wrapped, optimizer, 5)
    model.load_state_dict(twin.state_dict())
    optimizer.load_state_dict(copy.deepcopy(twin_optimizer.state_dict()))
    fresh = _build()
    fresh.load_state_dict(twin.state_dict())
    fresh_optimizer = make_optimizer(fresh.parameters())
    if backend.rank == 0:
        fresh_optimizer.load_state_dict(copy.deepcopy(twin_optimizer.state_dict()))
    fresh_wrapped = backend.distributed_model(fresh)
    backend.distributed_optimizer(fresh_optimizer, fresh_wrapped, shard="state")
    for step in (3, 4):
        _run_step(backend, wrapped, optimizer, step)
        _run_step(backend, fresh_wrapped, fresh_optimizer, step)
        _run_reference_step(backend, twin, twin_optimizer, step)
    _assert_same(backend, model, twin)
    _assert_same(backend, fresh, twin)


@contract
def sharded_state_trains_with_groups_freezing_and_schedulers(backend: Backend) -> None:
    """Test parameter groups, a scheduler, `add_param_group`, and parameters that are frozen and unfrozen."""

    def make_optimizer_and_scheduler(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        scale, first, _, _, last = model.children()
        last.requires_grad_(False)
        groups: list[dict[str, Any]] = [
            {"params": [*scale.parameters(), *first.parameters()], "lr": 0.05},
            {"params": [*last.parameters()], "weight_decay": 0.1},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    model, twin = _build(), _build()
    pairs = [make_optimizer_and_scheduler(model), make_optimizer_and_scheduler(twin)]
    wrapped = backend.distributed_model(model)
    backend.distributed_optimizer(pairs[0][0], wrapped, shard="state")
    for step in range(6):
        if step == 2:
            for replica, (optimizer, _) in zip((model, twin), pairs, strict=True):
                optimizer.add_param_group({"params": [*replica[2].parameters()], "lr": 0.02})  # type: ignore[index]
        if step in (3, 5):
            for replica in (model, twin):
                replica[4].requires_grad_(step == 3)  # type: ignore[index]
                replica[1].bias.requires_grad_(step == 5)  # type: ignore[index]
        _run_step(backend, wrapped, pairs[0][0], step)
        _run_reference_step(backend, twin, pairs[1][0], step)
        for _, scheduler in pairs:
            scheduler.step()
        assert [group["lr"] for group in pairs[0][0].param_groups] == [
            group["lr"] for group in pairs[1][0].param_groups
        ]
    _assert_same(backend, model, twin)
    saved, expected = (optimizer.state_dict() for optimizer, _ in pairs)
    torch.testing.assert_close(saved["state"], expected["state"], rtol=0, atol=1e-10)


@contract
def sharded_state_trains_with_loss_scaling(backend: Backend) -> None:
    model, wrapped, optimizer = _distribute_model_and_optimizer(
        backend, lambda parameters: torch.optim.Adam(parameters, lr=0.01)
    )
    twin = _build()
    twin_optimizer = torch.optim.Adam(twin.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(backend.device.type, init_scale=256.0)
    for step in range(4):
        optimizer.zero_grad()
        loss = compute_loss(wrapped(batch(backend.rank, step)))
        if step == 1 and backend.rank == backend.size - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step != 1:
            _run_reference_step(backend, twin, twin_optimizer, step)
    _assert_same(backend, model, twin)


@contract
def sharded_state_trains_with_two_optimizers_and_a_closure(backend: Backend) -> None:
    def create_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        scale, first, norm, _, last = model.children()
        return [
            torch.optim.SGD([*scale.parameters(), *first.parameters()], lr=0.1, momentum=0.9),
            torch.optim.AdamW([*norm.parameters(), *last.parameters()], lr=0.01),
        ]

    model, twin = _build(), _build()
    wrapped = backend.distributed_model(model)
    optimizers, twin_optimizers = create_optimizers(model), create_optimizers(twin)
    for optimizer in optimizers:
        backend.distributed_optimizer(optimizer, wrapped, shard="state")
    for step in range(3):

        def closure(step: int = step) -> float:
            model.zero_grad()
            loss = compute_loss(wrapped(batch(backend.rank, step)))
            loss.backward()
            return loss.item()

        assert isinstance(optimizers[0].step(closure), float)
        optimizers[1].step()
        expected = mean_gradients(
            backend, twin, lambda m, rank, step=step: compute_loss(m(batch(rank, step))).backward()
        )
        for name, parameter in twin.named_parameters():
            parameter.grad = expected[name]
        for optimizer in twin_optimizers:
            optimizer.step()
    _assert_same(backend, model, twin)


@contract
def sharded_state_trains_one_small_parameter(backend: Backend) -> None:
    """Ranks that own no elements also participate in every step."""
    model, twin = (nn.Linear(FEATURES, 1, bias=False).double() for _ in range(2))
    twin.load_state_dict(model.state_dict())
    shared = backend.broadcast(model.weight.detach())
    for replica in (model, twin):
        replica.weight.data.copy_(shared)
    wrapped = backend.distributed_model(model)
    optimizer = backend.distributed_optimizer(torch.optim.Adam(model.parameters()), wrapped, shard="state")
    twin_optimizer = torch.optim.Adam(twin.parameters())
    for step in range(3):
        _run_step(backend, wrapped, optimizer, step)
        _run_reference_step(backend, twin, twin_optimizer, step)
    _assert_same(backend, model, twin)
    torch.testing.assert_close(optimizer.state_dict()["state"], twin_optimizer.state_dict()["state"])


@contract
def sharded_state_rejects_a_step_on_local_gradients(backend: Backend) -> None:
    model, wrapped, optimizer = _distribute_model_and_optimizer(
        backend, lambda parameters: torch.optim.Adam(parameters)
    )
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with backend.no_sync(wrapped):
        compute_loss(wrapped(batch(backend.rank))).backward()
        raises(ModelError, "not reduced over ranks", optimizer.step)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
    _run_step(backend, wrapped, optimizer, 0)


@Communicator.register
class _BroadcastOnly:
    """A communicator with only blocking broadcasts, as in a minimal third-party backend."""

    def __init__(self, backend: Backend) -> None:
        self.rank, self.size, self.device = backend.rank, backend.size, backend.device
        self.broadcast, self.broadcast_object = backend.broadcast, backend.broadcast_object


@contract
def sharded_state_needs_only_blocking_broadcasts(backend: Backend) -> None:
    model, twin = _build(), _build()
    wrapped = backend.distributed_model(model)
    optimizer, twin_optimizer = (torch.optim.Adam(replica.parameters()) for replica in (model, twin))
    shard_optimizer_state(optimizer, _BroadcastOnly(backend))  # type: ignore[arg-type]
    for step in range(2):
        _run_step(backend, wrapped, optimizer, step)
        _run_reference_step(backend, twin, twin_optimizer, step)
    _assert_same(backend, model, twin)


class _FailingSGD(torch.optim.SGD):
    fails = updates_parameters_independently = True

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise RuntimeError("failed")
        return super().step(closure)


@contract
def sharded_state_survives_a_failing_step(backend: Backend) -> None:
    model, wrapped, optimizer = _distribute_model_and_optimizer(
        backend, lambda parameters: _FailingSGD(parameters, lr=0.1, momentum=0.5)
    )
    twin = _build()
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.5)
    raises(RuntimeError, "failed", lambda: _run_step(backend, wrapped, optimizer, 0))
    assert len(optimizer.state_dict()["param_groups"][0]["params"]) == len([*model.parameters()])
    optimizer.fails = False  # type: ignore[attr-defined]
    for step in range(2):
        _run_step(backend, wrapped, optimizer, step)
        _run_reference_step(backend, twin, twin_optimizer, step)
    _assert_same(backend, model, twin)


class _DecayingAdam(torch.optim.Adam):
    """Calls `super().step()`, which calls all hooks a second time, and reads the state afterwards."""

    updates_parameters_independently = True

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(self.state[parameter]["exp_avg"], alpha=0.1)
        return loss


class _Decay(torch.optim.Optimizer):
    """Updates all parameters, including those without gradients."""

    updates_parameters_independently = True

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.9)


@contract
def sharded_state_trains_with_user_defined_optimizers(backend: Backend) -> None:
    torch.optim.Adam([nn.Parameter(torch.zeros(1))])  # the constructor wraps Adam.step, which then calls hooks
    for optimizer_class in (_DecayingAdam, _Decay):
        for with_closure in (False, True):
            model, wrapped, optimizer = _distribute_model_and_optimizer(backend, optimizer_class)
            twin = _build()
            twin_optimizer = optimizer_class(twin.parameters())
            for step in range(3):
                if with_closure and optimizer_class is _DecayingAdam:

                    def closure(wrapped: nn.Module = wrapped, step: int = step) -> float:
                        wrapped.zero_grad()
                        loss = compute_loss(wrapped(batch(backend.rank, step)))
                        loss.backward()
                        return loss.item()

                    optimizer.step(closure)
                else:
                    _run_step(backend, wrapped, optimizer, step)
                _run_reference_step(backend, twin, twin_optimizer, step)
            _assert_same(backend, model, twin)


@contract
def sharded_state_updates_parameters_without_gradients(backend: Backend) -> None:
    model = nn.ModuleList(nn.Linear(FEATURES, 1) for _ in range(4)).double()
    wrapped = backend.distributed_model(model, find_unused_parameters=True)
    optimizer = backend.distributed_optimizer(_Decay(model.parameters()), wrapped, shard="state")
    expected = [0.9 * parameter.detach() for parameter in model.parameters()]
    optimizer.step()
    torch.testing.assert_close([*model.parameters()], expected, check_dtype=False)


@contract
def sharded_state_supports_step_hooks_and_repeated_setup(backend: Backend) -> None:
    """Step hooks registered after sharding receive all parameters, and an optimizer may be distributed twice."""

    def clip(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nn.utils.clip_grad_norm_([parameter for group in optimizer.param_groups for parameter in group["params"]], 0.05)

    def shrink(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.99)

    model, twin = _build(), _build()
    optimizer, twin_optimizer = (torch.optim.Adam(replica.parameters(), lr=0.01) for replica in (model, twin))
    for hooked_optimizer in (optimizer, twin_optimizer):
        hooked_optimizer.register_step_post_hook(shrink)
    removed = optimizer.register_step_post_hook(shrink)
    wrapped = backend.distributed_model(model)
    for _ in range(2):
        backend.distributed_optimizer(optimizer, wrapped, shard="state")
    removed.remove()
    for hooked_optimizer in (optimizer, twin_optimizer):
        hooked_optimizer.register_step_pre_hook(clip)
    for step in range(3):
        _run_step(backend, wrapped, optimizer, step)
        _run_reference_step(backend, twin, twin_optimizer, step)
    _assert_same(backend, model, twin)


@contract
def sharded_state_follows_replaced_parameters(backend: Backend) -> None:
    model, twin = _build(), _build()
    wrapped = backend.distributed_model(model)
    optimizers = [torch.optim.Adam([*replica.parameters()][:3], lr=0.01) for replica in (model, twin)]
    backend.distributed_optimizer(optimizers[0], wrapped, shard="state")
    for step in range(3):
        if step == 1:
            for replica, optimizer in zip((model, twin), optimizers, strict=True):
                optimizer.param_groups[0]["params"] = [*replica.parameters()][3:6]
        wrapped.zero_grad()
        _run_step(backend, wrapped, optimizers[0], step)
        _run_reference_step(backend, twin, optimizers[1], step)
    _assert_same(backend, model, twin)


class _OwnStateDict(torch.optim.SGD):
    updates_parameters_independently = True

    def state_dict(self) -> dict[str, Any]:
        return {"state": {}, "param_groups": []}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


@contract
def sharded_state_that_would_be_lost_raises(backend: Backend) -> None:
    _, wrapped, optimizer = _distribute_model_and_optimizer(backend, torch.optim.Adam)
    _run_step(backend, wrapped, optimizer, 0)
    if backend.name != "local":
        for copy_optimizer in (copy.deepcopy, pickle.dumps):
            raises(
                ModelError,
                "cannot be copied or pickled",
                lambda copy_optimizer=copy_optimizer: copy_optimizer(optimizer),
            )
        state = copy.deepcopy(optimizer.state_dict())
        state["state"][2]["exp_avg"] = torch.zeros(7)
        text = raises(ModelError, "'exp_avg' of shape [7]", lambda: optimizer.load_state_dict(state))
        assert_same_on_every_rank(backend, text)
    other = _build()
    wrapped = backend.distributed_model(other)
    text = raises(
        ModelError,
        "_OwnStateDict.state_dict does not call super().state_dict",
        lambda: backend.distributed_optimizer(_OwnStateDict(other.parameters()), wrapped, shard="state"),
    )
    assert_same_on_every_rank(backend, text)


@contract
def sharded_state_rejects_another_memory_format(backend: Backend) -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 3 * _WIDTH), nn.Linear(3 * _WIDTH, 1)).double()
    wrapped = backend.distributed_model(model)
    optimizer = backend.distributed_optimizer(torch.optim.Adam(model.parameters()), wrapped, shard="state")
    _run_step(backend, wrapped, optimizer, 0)
    model[0].weight.data = model[0].weight.data.T.contiguous().T  # type: ignore[operator]
    if backend.size == 1:
        _run_step(backend, wrapped, optimizer, 1)
    else:
        text = "when its optimizer state was sharded"
        raises(ModelError, text, lambda: _run_step(backend, wrapped, optimizer, 1))
        raises(ModelError, text, optimizer.state_dict)


@contract
def sharding_that_is_not_possible_raises(backend: Backend) -> None:
    model = _build()
    wrapped = backend.distributed_model(model)

    def distribute(optimizer: torch.optim.Optimizer, shard: Any) -> Callable[[], object]:
        return lambda: backend.distributed_optimizer(optimizer, wrapped, shard=shard)

    optimizer_lbfgs = torch.optim.LBFGS(model.parameters())
    assert_same_on_every_rank(
        backend, raises(ModelError, "The state of LBFGS cannot be sharded", distribute(optimizer_lbfgs, "state"))
    )
    optimizer = torch.optim.Adam(model.parameters())
    text = raises(ConfigError, "Unknown distributed_optimizer(shard=...) 'stat'", distribute(optimizer, "stat"))
    assert_same_on_every_rank(backend, text)
    if backend.size > 1:
        shard = "state" if backend.rank == 0 else "none"
        text = raises(ConfigError, "shard='state' on rank 0 and shard='none' on rank 1", distribute(optimizer, shard))
        assert_same_on_every_rank(backend, text)
        distribute(optimizer, "state")()
        raises(ModelError, "already sharded over ranks", distribute(optimizer, "none"))
