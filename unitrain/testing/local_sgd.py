"""Contract tests of `LocalSGD`: low-communication training, compared with a simulation of all ranks in plain torch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from unitrain.backends.base import Backend, Communicator, ReduceOp
from unitrain.backends.capabilities import SupportsAllToAll
from unitrain.backends.local_sgd_config import LocalSGDConfig
from unitrain.errors import CheckpointError, CollectiveMismatchError, ConfigError, ModelError, TensorError
from unitrain.optim.local_sgd import LocalSGD
from unitrain.optim.outer_gradient import OuterMean
from unitrain.optim.outer_groups import OuterGroups
from unitrain.testing.cases import assert_same_on_every_rank, contract, raises
from unitrain.testing.fake_backend import FakeBackend
from unitrain.testing.local_sgd_simulation import (
    adamw,
    compare_with_simulation,
    create_local_sgd,
    parameter_vector,
    sgd,
    train,
)
from unitrain.testing.models import batch, build, compute_loss, seeded_generator
from unitrain.testing.parameters import TwoHeads

DILOCO = LocalSGDConfig(steps=3, outer_lr=0.7, outer_momentum=0.9)


@contract
def local_sgd_averages_weights_after_each_interval(backend: Backend) -> None:
    compare_with_simulation(backend, LocalSGDConfig(steps=3), sgd, steps=7)
    compare_with_simulation(backend, LocalSGDConfig(steps=2), adamw, steps=5)


@contract
def local_sgd_starts_after_a_synchronous_warm_up(backend: Backend) -> None:
    compare_with_simulation(backend, LocalSGDConfig(steps=2, warmup_steps=3), sgd, steps=6)
    compare_with_simulation(
        backend, LocalSGDConfig(steps=2, warmup_steps=2, outer_lr=0.7, outer_momentum=0.9), adamw, steps=6
    )


@contract
def outer_optimizer_equals_nesterov_sgd_of_torch(backend: Backend) -> None:
    compare_with_simulation(backend, DILOCO, adamw, steps=13)
    compare_with_simulation(backend, LocalSGDConfig(steps=2, outer_lr=0.5), sgd, steps=5)


@contract
def outer_gradients_are_compressed_with_error_feedback(backend: Backend) -> None:
    for compression in ("bf16", "int8"):
        settings = LocalSGDConfig(steps=2, outer_lr=0.7, outer_momentum=0.9, compression=compression)
        compare_with_simulation(backend, settings, adamw, steps=9)


@contract
def error_feedback_communicates_small_differences(backend: Backend) -> None:
    """A constant difference that int8 would always round to 0 is communicated after several synchronizations."""
    settings = LocalSGDConfig(steps=1, compression="int8")
    model = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    local_sgd = LocalSGD(model, optimizer, backend, settings)
    for _ in range(200):
        model.weight.grad = torch.tensor([[1.0, 0.001, -0.001, 0.0]])
        optimizer.step()
        local_sgd.step()
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[-200.0, -0.2, 0.2, 0.0]]), rtol=0, atol=0.02)


@contract
def one_local_step_equals_synchronous_training(backend: Backend) -> None:
    local_sgd, model, optimizer = create_local_sgd(backend, 1)
    twin = build()
    wrapped = backend.distributed_model(twin)
    synchronous = backend.distributed_optimizer(sgd(twin.parameters()), wrapped)
    for step in range(6):
        train(backend, local_sgd, model, optimizer, range(step, step + 1))
        compute_loss(wrapped(batch(backend.rank, step))).backward()
        synchronous.step()
        synchronous.zero_grad()
        torch.testing.assert_close(parameter_vector(model), parameter_vector(twin), rtol=0, atol=1e-12)


@contract
def local_training_starts_from_rank_0(backend: Backend) -> None:
    local_sgd, model, optimizer = create_local_sgd(backend, DILOCO, adamw, seed=backend.rank)
    assert torch.equal(parameter_vector(model), parameter_vector(build(0)))
    optimizer.param_groups[0]["lr"] = 0.5  # the optimizer remains the user's object
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.5
    assert local_sgd.settings == DILOCO


@contract
def resumed_local_training_is_bit_identical(backend: Backend) -> None:
    for settings in (
        LocalSGDConfig(steps=3),
        LocalSGDConfig(steps=3, outer_lr=0.7, outer_momentum=0.9, compression="int8"),
    ):
        expected, uninterrupted, optimizer = create_local_sgd(backend, settings, adamw)
        train(backend, expected, uninterrupted, optimizer, range(11))
        local_sgd, model, optimizer = create_local_sgd(backend, settings, adamw)
        for first, after in ((0, 3), (3, 4), (4, 8), (8, 11)):
            train(backend, local_sgd, model, optimizer, range(first, after))
            with local_sgd.averaged_weights():
                state, weights = local_sgd.state_dict(), copy.deepcopy(model.state_dict())
            local_sgd, model, optimizer = create_local_sgd(backend, settings, adamw, seed=7)
            model.load_state_dict(weights)
            local_sgd.load_state_dict(state if backend.rank == 0 else {})
        assert torch.equal(parameter_vector(model), parameter_vector(uninterrupted))
        assert_same_on_every_rank(backend, local_sgd.is_warming_up)


@contract
def resumed_local_training_keeps_the_dtypes_of_the_optimizer_state(backend: Backend) -> None:
    """`mu_product` of NAdam is in float32, and the parameters are in float64."""
    settings = LocalSGDConfig(steps=3)

    def nadam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.NAdam(parameters, lr=0.02)

    local_sgd, model, optimizer = create_local_sgd(backend, settings, nadam)
    train(backend, local_sgd, model, optimizer, range(4))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), local_sgd.state_dict()))
    resumed, resumed_model, resumed_optimizer = create_local_sgd(backend, settings, nadam, seed=9)
    resumed_model.load_state_dict(saved[0])
    resumed_optimizer.load_state_dict(saved[1])
    resumed.load_state_dict(saved[2])
    assert {state["mu_product"].dtype for state in resumed_optimizer.state.values()} == {torch.float32}
    for trained in ((local_sgd, model, optimizer), (resumed, resumed_model, resumed_optimizer)):
        train(backend, *trained, range(4, 8))
    assert torch.equal(parameter_vector(model), parameter_vector(resumed_model))


@contract
def checkpoint_of_another_number_of_ranks_loads_mean_weights(backend: Backend) -> None:
    settings = LocalSGDConfig(steps=3, outer_lr=0.7, outer_momentum=0.9, compression="bf16")
    local_sgd, model, optimizer = create_local_sgd(backend, settings, adamw)
    train(backend, local_sgd, model, optimizer, range(4))
    with local_sgd.averaged_weights():
        state, weights = local_sgd.state_dict(), copy.deepcopy(model.state_dict())
    mean = torch.cat([value.reshape(-1) for value in weights.values()])
    if backend.rank == 0:
        state["ranks"] = [*state["ranks"], *state["ranks"]]
    local_sgd, model, optimizer = create_local_sgd(backend, settings, adamw, seed=7)
    local_sgd.load_state_dict(state)
    torch.testing.assert_close(parameter_vector(model), mean, rtol=0, atol=1e-12)
    train(backend, local_sgd, model, optimizer, range(4, 6))
    assert_same_on_every_rank(backend, parameter_vector(model).tolist())


@contract
def settings_of_local_sgd_may_change_at_a_resume(backend: Backend) -> None:
    local_sgd, model, optimizer = create_local_sgd(backend, LocalSGDConfig(steps=3), adamw)
    train(backend, local_sgd, model, optimizer, range(4))
    state = local_sgd.state_dict()
    for changed in (DILOCO, LocalSGDConfig(steps=2, compression="int8"), LocalSGDConfig(steps=5)):
        other, model, optimizer = create_local_sgd(backend, changed, adamw, seed=7)
        other.load_state_dict(state)
        train(backend, other, model, optimizer, range(4, 12))
        other.synchronize()
        assert_same_on_every_rank(backend, parameter_vector(model).tolist())


class _Normalized(nn.Module):
    """A network with BatchNorm statistics, and another buffer that forward passes read and write."""

    input_sum: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 4).double(), nn.BatchNorm1d(4).double()
        self.register_buffer("input_sum", torch.zeros(1, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.input_sum = self.input_sum + inputs[0, 0].detach()
        result: Tensor = self.norm(self.inner(inputs)) * (1 + 0 * self.input_sum)
        return result


@contract
def buffers_are_synchronized_with_the_weights(backend: Backend) -> None:
    torch.manual_seed(0)
    model = _Normalized()
    twins = [copy.deepcopy(model) for _ in range(backend.size)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local_sgd = LocalSGD(model, optimizer, backend, 2)

    def check_means() -> None:
        assert model.norm.running_mean is not None
        expected = torch.stack([twin.norm.running_mean for twin in twins if twin.norm.running_mean is not None]).mean(0)
        torch.testing.assert_close(model.norm.running_mean, expected, rtol=0, atol=1e-12)
        assert torch.equal(model.input_sum, twins[0].input_sum)

    for step in range(3):
        compute_loss(model(batch(backend.rank, step))).backward()
        optimizer.step()
        optimizer.zero_grad()
        local_sgd.step()
        if step == 0:
            for rank, twin in enumerate(twins):
                twin(batch(rank, 0))
            with local_sgd.averaged_weights():
                check_means()
            assert torch.equal(model.input_sum, twins[backend.rank].input_sum)
    assert_same_on_every_rank(backend, int(model.norm.num_batches_tracked or 0))
    local_sgd.synchronize()
    for name, buffer in model.named_buffers():
        assert_same_on_every_rank(backend, (name, buffer.tolist()))


@contract
def parameters_unused_on_every_rank_have_no_gradient_in_the_warm_up(backend: Backend) -> None:
    model = TwoHeads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    local_sgd = LocalSGD(model, optimizer, backend, LocalSGDConfig(steps=2, warmup_steps=1))
    heads = "left" if backend.rank == 0 else "left right"
    compute_loss(model(batch(backend.rank), heads)).backward()
    local_sgd.reduce_gradients()
    has_gradient = {name: parameter.grad is not None for name, parameter in model.named_parameters()}
    assert_same_on_every_rank(backend, has_gradient)
    assert all(used == (backend.size > 1 or not name.startswith("right")) for name, used in has_gradient.items()), (
        has_gradient
    )


@contract
def half_precision_weights_are_synchronized_in_float32(backend: Backend) -> None:
    for settings in (LocalSGDConfig(steps=2), DILOCO, LocalSGDConfig(steps=1, outer_lr=0.7, compression="int8")):
        model = build().bfloat16()
        bias = model.get_parameter("0.bias")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        local_sgd = LocalSGD(model, optimizer, backend, settings)
        before = parameter_vector(model)
        for _ in range(settings.steps):  # without weight changes, synchronization must not change the weights
            local_sgd.step()
        assert torch.equal(parameter_vector(model), before)
        with torch.no_grad():
            for _ in range(settings.steps):
                bias.add_(1 + backend.rank)
                local_sgd.step()
        mean = settings.steps * (backend.size + 1) / 2
        change = (bias - before[48:56]).float()
        expected = torch.full_like(change, mean * settings.outer_lr * (1 + settings.outer_momentum))
        torch.testing.assert_close(change, expected, rtol=0.02, atol=0)


@contract
def views_with_conjugate_and_negative_bits_equal_materialized_tensors(backend: Backend) -> None:
    """Gradients and weights may be lazy views: `x.conj()` has the conjugate bit, and `x.conj().imag` the negative
    bit."""
    generator = seeded_generator(backend.rank)
    gradients = [torch.randn(4, 3, dtype=torch.complex128, generator=generator) for _ in range(6)]

    def weights_after_training(settings: LocalSGDConfig, *, is_lazy: bool) -> Tensor:
        def materialize(tensor: Tensor) -> Tensor:
            return tensor if is_lazy else tensor.resolve_conj().resolve_neg().clone()

        start = torch.randn(4, 3, dtype=torch.complex128, generator=seeded_generator(7))
        model = nn.ParameterList([materialize(start.conj()), materialize(start.clone().conj().imag)])
        # On GPUs, torch's foreach operations reject tensors with the negative bit.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        local_sgd = LocalSGD(model, optimizer, backend, settings)
        for gradient in gradients:
            model[0].grad, model[1].grad = materialize(gradient.conj()), materialize(gradient.conj().imag)
            assert (model[0].grad.is_conj(), model[1].grad.is_neg()) == (is_lazy, is_lazy)
            local_sgd.reduce_gradients()
            if local_sgd.is_warming_up and backend.size > 1:  # clipping and AdamW reject lazy views
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            local_sgd.step()
            with local_sgd.averaged_weights():
                pass
            local_sgd.load_state_dict(local_sgd.state_dict())
        local_sgd.synchronize()
        assert (model[0].is_conj(), model[1].is_neg()) == (is_lazy, is_lazy)
        return torch.cat([model[0].detach().imag, model[0].detach().real, model[1].detach()]).resolve_neg()

    streaming = LocalSGDConfig(steps=2, overlap_steps=1, fragments=2, compression="int8")
    for settings in (LocalSGDConfig(steps=2, warmup_steps=3), DILOCO, streaming):
        lazy = weights_after_training(settings, is_lazy=True)
        assert_same_on_every_rank(backend, lazy.tolist())
        materialized = weights_after_training(settings, is_lazy=False)
        torch.testing.assert_close(lazy, materialized, rtol=1e-12, atol=1e-12)


@contract
def invalid_local_sgd_arguments_raise_on_every_rank(backend: Backend) -> None:
    model = build()
    optimizer = sgd(list(model.parameters()))
    cases: tuple[tuple[Any, type[BaseException], str], ...] = (
        ((model, optimizer, backend, 0), ConfigError, "LocalSGD(local_sgd) must be at least 1, got 0"),
        ((model, optimizer, backend, "25"), ConfigError, "Use a number of steps, or unitrain.LocalSGDConfig(steps=25"),
        ((model, optimizer, None, 2), ConfigError, "LocalSGD(backend) must be a backend, got None"),
        ((model, sgd(list(build().parameters())), backend, 2), ModelError, "do not belong to Sequential"),
        ((optimizer, model, backend, 2), ModelError, "Pass the model first and the optimizer second"),
    )
    for arguments, error_class, message in cases:
        raises(error_class, message, lambda arguments=arguments: LocalSGD(*arguments))
    if backend.size > 1:
        steps = 2 + (backend.rank > 0)
        raises(
            ConfigError,
            "LocalSGD was called with local_sgd=LocalSGDConfig(steps=2",
            lambda: LocalSGD(model, optimizer, backend, steps),
        )


@contract
def parameters_that_are_unfrozen_later_raise(backend: Backend) -> None:
    model = build()
    frozen = next(model.parameters()).requires_grad_(False)
    before = frozen.clone()
    optimizer = sgd(list(model.parameters()))
    local_sgd = LocalSGD(model, optimizer, backend, 2)
    train(backend, local_sgd, model, optimizer, range(2))
    assert torch.equal(frozen, before)
    assert_same_on_every_rank(backend, parameter_vector(model).tolist())
    frozen.requires_grad_(True)
    raises(ModelError, "Parameter '0.weight' was unfrozen", local_sgd.step)


@contract
def state_of_another_model_raises(backend: Backend) -> None:
    local_sgd, model, optimizer = create_local_sgd(backend, DILOCO)
    train(backend, local_sgd, model, optimizer, range(2))
    state = local_sgd.state_dict()
    wide = nn.Sequential(nn.Linear(7, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)).double()
    other = LocalSGD(wide, sgd(list(wide.parameters())), backend, DILOCO)
    raises(CheckpointError, "'0.weight' with shape [8, 6]", lambda: other.load_state_dict(state))
    small = nn.Sequential(nn.Linear(6, 8)).double()
    other = LocalSGD(small, sgd(list(small.parameters())), backend, DILOCO)
    raises(CheckpointError, "Train the same parameters", lambda: other.load_state_dict(state))


@contract
def invalid_state_raises_on_every_rank(backend: Backend) -> None:
    """Only rank 0 needs the state. The other ranks may pass anything."""
    local_sgd, model, optimizer = create_local_sgd(backend, DILOCO)
    train(backend, local_sgd, model, optimizer, range(2))
    state = local_sgd.state_dict()
    invalid: list[tuple[str, Any]] = [
        ("got None", None),
        ("got steps=None", {"other": 1}),
        ("got steps_since_synchronization=-1", {**state, "steps_since_synchronization": -1}),
        ("got synchronized_at=-1", {**state, "synchronized_at": -1}),
        ("got a mapping without the states of the ranks", {**state, "ranks": []}),
        ("got a mapping without the states of the ranks", {**state, "ranks": [{}]}),
        ("got a mapping without the state of the outer optimizer", {**state, "outer": {}}),
    ]
    for problem, own in invalid:
        passed = own if backend.rank == 0 else None
        text = raises(CheckpointError, problem, lambda passed=passed: local_sgd.load_state_dict(passed))
        assert_same_on_every_rank(backend, text)
    before = parameter_vector(model).clone()
    local_sgd.load_state_dict(state if backend.rank == 0 else None)  # type: ignore[arg-type]
    assert torch.equal(parameter_vector(model), before)


@contract
def steps_since_the_synchronization_are_counted_after_a_resume_with_fewer_local_steps(backend: Backend) -> None:
    local_sgd, model, optimizer = create_local_sgd(backend, 5)
    train(backend, local_sgd, model, optimizer, range(4))
    state = local_sgd.state_dict()
    resumed, *_ = create_local_sgd(backend, 2)
    resumed.load_state_dict(state)
    assert [resumed.step() for _ in range(4)] == [5, 0, 2, 0]


class _WithoutAllToAll(Communicator):
    """A communicator with only the collectives that every backend supports."""

    def __init__(self, backend: Backend) -> None:
        self.rank, self.size, self.device = backend.rank, backend.size, backend.device
        self._backend = backend

    def allreduce(self, tensor: Tensor, op: ReduceOp = "mean") -> Tensor:
        return self._backend.allreduce(tensor, op)

    def allgather(self, tensor: Tensor) -> Tensor:
        return self._backend.allgather(tensor)

    def reducescatter(self, tensor: Tensor, op: ReduceOp = "mean") -> Tensor:
        return self._backend.reducescatter(tensor, op)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        return self._backend.broadcast(tensor, root)

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        return self._backend.broadcast_object(obj, root)

    def allgather_object(self, obj: Any) -> list[Any]:
        return self._backend.allgather_object(obj)

    def barrier(self) -> None:
        self._backend.barrier()


@contract
def compressed_mean_is_equal_without_alltoall(backend: Backend) -> None:
    for compression, elements in (("bf16", 5000), ("int8", 5000), ("int8", 7), ("bf16", 1024 * backend.size)):
        communicators = (backend, _WithoutAllToAll(backend))
        groups = [OuterGroups(communicator, LocalSGDConfig(steps=1)) for communicator in communicators]  # type: ignore[arg-type]
        means = [OuterMean(group, compression, elements) for group in groups]  # type: ignore[arg-type]
        for step in range(3):
            values = torch.randn(elements, generator=seeded_generator(10 * step + backend.rank))
            first, second = (mean(values) for mean in means)
            assert torch.equal(first, second)
            assert_same_on_every_rank(backend, first.tolist())


@contract
def values_that_are_not_finite_remain_so_on_every_rank(backend: Backend) -> None:
    for compression in ("none", "bf16", "int8"):
        for value in (float("inf"), float("nan")):
            values = torch.ones(3000)
            if backend.rank == backend.size - 1:
                values[2500] = value
            mean = OuterMean(OuterGroups(backend, LocalSGDConfig(steps=1)), compression, 3000)(values)
            assert not mean[2500].isfinite()
            assert mean[:1024].isfinite().all()


@contract
def alltoall_returns_the_slices_from_all_ranks(backend: Backend) -> None:
    if not isinstance(backend, SupportsAllToAll):
        return
    size, rank = backend.size, backend.rank
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        for columns in (1, 3, 30_000):
            own = (torch.arange(2 * size * columns).view(2 * size, columns) * (rank + 1) % 251).to(dtype)
            inputs = [
                (torch.arange(2 * size * columns).view(2 * size, columns) * (peer + 1) % 251).to(dtype)
                for peer in range(size)
            ]
            before = own.clone()
            fake = FakeBackend(rank, size, peers=lambda operation, value, peer, inputs=inputs: inputs[peer])
            assert torch.equal(fake.alltoall(own), torch.cat([peer_input.chunk(size)[rank] for peer_input in inputs]))
            result = backend.alltoall(own)
            assert torch.equal(result, torch.cat([peer_input.chunk(size)[rank] for peer_input in inputs]))
            assert torch.equal(own, before)
    assert backend.alltoall(torch.ones(size, 0)).shape == (size, 0)
    raises(TensorError, "alltoall divides dim 0", lambda: backend.alltoall(torch.ones(())))
    if size > 1:
        raises(
            CollectiveMismatchError,
            "alltoall",
            lambda: backend.alltoall(torch.ones(size, 2 + (rank > 0))),
        )
