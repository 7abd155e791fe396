"""Predicted step times and transferred bytes with gradient compression and with low-communication training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from unitrain import LocalSGDConfig
from unitrain.bench.cost_model import Network, ring_allreduce
from unitrain.bench.cost_prediction import HostLayout, Model, predict_step
from unitrain.bench.method_prediction import METHODS, method_settings, predict_method
from unitrain.cli import unitrain as command
from unitrain.config import TrainConfig

# 1 million parameters, 0.1 s per step, and a network of 100 Mbit/s with 1 ms per message.
MODEL = Model(parameters=1e6, bytes_per_parameter=4, step_seconds=0.1, backward_share=2 / 3)
NETWORK = Network(alpha=1e-3, beta=8 / 100e6)


def predict(name: str, ranks: int = 4, **options: Any) -> tuple[float, float]:
    found = predict_method(name, MODEL, ranks, NETWORK, **{"local_steps": 25, **options})
    return found.seconds, found.sent_bytes


def test_prediction_of_synchronous_training_equals_predict_step() -> None:
    step = predict_step(MODEL.work(), lambda size: ring_allreduce(4, size, NETWORK))
    assert predict("synchronous") == pytest.approx((step.seconds, 2 * 3 / 4 * 4e6))


def test_bf16_exchanges_buckets_during_the_backward_pass_and_gathers_them_afterwards() -> None:
    """On a fast network, only the exchange of the last bucket and the allgathers of all buckets are exposed. The other
    exchanges overlap with the backward pass. Each collective sends 3 messages per bucket."""
    network = Network(alpha=1e-6, beta=1e-9)
    buckets: list[float] = []

    def exchange(size: float) -> float:
        if size:  # the latency is that of an empty tensor
            buckets.append(size)
        return 3 * (network.alpha + size / 8 * network.beta)

    step = predict_step(MODEL.work(), exchange)
    assert len(buckets) == 2
    found = predict_method("bf16", MODEL, 4, network, local_steps=25)
    assert found.sent_bytes == pytest.approx(2 * 3 / 4 * 2e6)
    assert found.seconds == pytest.approx(step.seconds + 6 * network.alpha + 3 / 8 * 4e6 * network.beta)


def test_bf16_on_two_ranks_takes_one_allgather_per_bucket() -> None:
    step = predict_step(MODEL.work(), lambda size: 1e-3 + size / 2 * NETWORK.beta)
    assert predict("bf16", 2) == pytest.approx((step.seconds, 2e6))


def test_bf16_does_not_reduce_the_bytes_of_bf16_gradients() -> None:
    model = replace(MODEL, bytes_per_parameter=2)
    found, synchronous = (predict_method(name, model, 4, NETWORK, local_steps=25) for name in ("bf16", "synchronous"))
    assert found.sent_bytes == synchronous.sent_bytes == pytest.approx(2 * 3 / 4 * 2e6)


def test_synchronization_is_divided_by_the_number_of_local_steps() -> None:
    # A synchronization sends 6 messages of 1 MB, each of which takes 80 ms at 100 Mbit/s.
    assert predict("local-sgd") == pytest.approx((0.1 + 6 * (1e-3 + 0.08) / 25, 6e6 / 25))
    assert predict("local-sgd", local_steps=1) == pytest.approx((0.1 + 6 * (1e-3 + 0.08), 6e6))


@pytest.mark.parametrize(
    ("name", "ranks", "operations"),
    [
        ("synchronous", 4, 2),  # an allreduce for each of two buckets
        ("bf16", 4, 4),  # an all-to-all and an allgather for each
        ("bf16", 2, 2),
        ("local-sgd", 4, 1 / 25),
        ("local-sgd-int8", 4, 2 / 25),
        ("streaming", 4, 5 / 25 * 0.5),  # each of five transfers overlaps with five steps of 0.1 s
    ],
)
def test_each_operation_has_an_overhead(name: str, ranks: int, operations: float) -> None:
    """On a network that is so fast that only the overhead matters, and with an instantaneous backward pass."""
    model = replace(MODEL, backward_share=1e-9)
    network = Network(alpha=1e-9, beta=1e-15, overhead_seconds=1.0)
    found = predict_method(name, model, ranks, network, local_steps=25)
    assert found.exposed_seconds == pytest.approx(operations * network.overhead_seconds, abs=1e-6)


@pytest.mark.parametrize(("bytes_per_parameter", "sent"), [(2, 6e6), (4, 6e6), (8, 12e6)])
def test_weights_are_communicated_in_the_dtype_of_the_computation(bytes_per_parameter: int, sent: float) -> None:
    """For weights in half precision, local SGD computes and communicates in float32."""
    model = replace(MODEL, bytes_per_parameter=bytes_per_parameter)
    found = predict_method("local-sgd", model, 4, NETWORK, local_steps=1)
    assert found.sent_bytes == pytest.approx(sent)
    assert found.exposed_seconds == pytest.approx(6 * 1e-3 + sent * NETWORK.beta)
    hosts = HostLayout(ranks_per_host=2, network=Network(alpha=0, beta=1e-9))
    found = predict_method("local-sgd-hosts", model, 2, NETWORK, local_steps=1, hosts=hosts)
    size = sent / 1.5
    assert found.exposed_seconds == pytest.approx(2 * size * 1e-9)  # an allreduce of the gradients, and a broadcast


def test_each_bucket_of_a_large_model_takes_messages() -> None:
    found = predict_method("local-sgd", replace(MODEL, parameters=20e6), 4, NETWORK, local_steps=1)  # 3 buckets
    assert found.exposed_seconds == pytest.approx(3 * 6 * 1e-3 + 120e6 * NETWORK.beta)


@pytest.mark.parametrize(("name", "ratio"), [("local-sgd-bf16", 1 / 2), ("local-sgd-int8", 1 / 4)])
def test_compression_divides_the_bytes_of_a_synchronization(name: str, ratio: float) -> None:
    seconds, sent = predict(name)
    assert sent == pytest.approx(ratio * 6e6 / 25, rel=0.02)  # int8 also sends a scale per block
    assert seconds == pytest.approx(0.1 + 6 * (1e-3 + ratio * 0.08) / 25, rel=0.01)


def test_streaming_has_no_cost_if_the_steps_take_longer_than_the_transfer() -> None:
    # A fragment of 200,000 parameters needs 6 messages of 17 ms, which 5 steps of 100 ms hide.
    assert predict("streaming") == pytest.approx((0.1, 6e6 / 25))
    slow = Network(alpha=1e-3, beta=8 / 10e6)
    found = predict_method("streaming", MODEL, 4, slow, local_steps=25)
    assert found.exposed_seconds == pytest.approx(5 * (6 * (1e-3 + 0.16) - 0.5) / 25)
    assert found.seconds == pytest.approx(0.1 + found.exposed_seconds)


@pytest.mark.parametrize(("local_steps", "fragments"), [(4, 4), (10, 5), (24, 5)])
def test_streaming_with_few_local_steps_waits_for_transfers_in_progress(local_steps: int, fragments: int) -> None:
    """All transfers of an interval together overlap with at most the steps of one interval, although each of them alone
    could overlap with 5 steps."""
    slow = Network(alpha=1e-3, beta=8 / 30e6)
    transfer_seconds = 6 * (1e-3 + 1e6 / fragments * slow.beta)
    expected = max(0.0, fragments * transfer_seconds - local_steps * 0.1)
    found = predict_method("streaming", MODEL, 4, slow, local_steps=local_steps)
    assert found.exposed_seconds == pytest.approx(expected / local_steps)
    assert (expected > 0) == (local_steps < 24)


def test_one_rank_per_host_synchronizes_with_other_hosts() -> None:
    hosts = HostLayout(ranks_per_host=2, network=Network(alpha=1e-5, beta=1e-9))
    within = 2 * (1e-5 + 2e6 * 1e-9)  # an allreduce of 4 MB over 2 ranks
    between = 2 * (1e-3 + 2e6 * 8 / 100e6) + 1e-5 + 4e6 * 1e-9  # between 2 hosts, then a broadcast
    assert predict("local-sgd-hosts", hosts=hosts) == pytest.approx((0.1 + within + between / 25, 4e6 / 25))
    broadcast = 1e-5 + 4e6 * 1e-9  # also on one host
    assert predict("local-sgd-hosts", 2, hosts=hosts) == pytest.approx((0.1 + within + broadcast / 25, 0))


@pytest.mark.parametrize("name", [name for name in METHODS if name != "local-sgd-hosts"])
def test_one_rank_does_not_communicate(name: str) -> None:
    assert predict(name, 1) == pytest.approx((0.1, 0))


@pytest.mark.parametrize("local_steps", [1, 2, 25])
def test_displayed_settings_are_valid(local_steps: int) -> None:
    for setting in method_settings(local_steps).values():
        config = eval(
            f"TrainConfig(max_epochs=1, {setting})", {"TrainConfig": TrainConfig, "LocalSGDConfig": LocalSGDConfig}
        )
        assert isinstance(config, TrainConfig)


def run_predict_command(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(command, ["bench", "predict", *arguments])
    return result.exit_code, " ".join(result.output.split())


GIVEN = ("--latency", "1e-3", "--bandwidth", "0.0125", "--parameters", "1e6", "--step-seconds", "0.1")


def test_the_command_lists_methods_with_their_settings(tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    code, output = run_predict_command(
        *GIVEN, "--methods", "local-sgd, streaming", "--ranks", "4", "--json", str(saved)
    )
    assert code == 0, output
    first, second = json.loads(saved.read_text())["rows"]
    assert (first["method"], second["method"]) == ("local-sgd", "streaming")
    assert first["step_seconds"] == pytest.approx(predict("local-sgd")[0])
    assert second["speedup"] == pytest.approx(predict("synchronous")[0] / 0.1)
    assert "local-sgd: TrainConfig(local_sgd=25)" in output
    assert "synchronous" not in output
    code, output = run_predict_command(*GIVEN, "--methods", "all")
    assert code == 0, output
    for name in METHODS:
        assert (f" {name} 8 " in output) == (name != "local-sgd-hosts")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--methods diloko", "Unknown method 'diloko'. Available: synchronous, bf16, local-sgd"),
        ("--methods local-sgd-int4", "Did you mean 'local-sgd-int8'?"),
        ("--methods local-sgd-hosts", "The method local-sgd-hosts needs a description of the hosts."),
        (
            "--methods local-sgd-hosts --ranks 6 --ranks-per-host 4 --host-latency 1 --host-bandwidth 1",
            "6 ranks are not a multiple of 4 ranks per host.",
        ),
        ("--methods all --algorithms ring", "Leave --algorithms out"),
        ("--methods all --output chart.png", "Leave --output out"),
        ("--methods all --local-steps 0", "Invalid value for '--local-steps'"),
    ],
)
def test_invalid_arguments_are_refused(arguments: str, message: str) -> None:
    code, output = run_predict_command(*GIVEN, *arguments.split())
    assert code == 2
    assert message in output
