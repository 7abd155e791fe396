"""FLOPs, the Prometheus endpoint, and its options."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import re
import socket
import sys
import threading
import time
import urllib.request
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor, nn

from unitrain import checkpoint_activations
from unitrain.bootstrap.network import find_free_port
from unitrain.cli import unitrain as command_line
from unitrain.config import TrainConfig
from unitrain.data.order import MicroBatch
from unitrain.errors import ConfigError
from unitrain.optim.loss_weighting import Loss
from unitrain.progress import metrics_server, prometheus
from unitrain.progress.flops import FlopsMeasurement, device_peak_flops, peak_flops
from unitrain.progress.goodput import AttemptRecord, GoodputSummary
from unitrain.progress.prometheus import MetricsEndpoint, RunValues, exported_names
from unitrain.supervisor import launch_plan

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "unitrain.json"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(inputs)))


def count_flops(model: nn.Module, inputs: Tensor, tokens: Tensor | None = None) -> FlopsMeasurement:
    measurement = FlopsMeasurement(is_enabled=True)

    def forward_backward(batch: Tensor, micro_batch: MicroBatch) -> Loss:
        loss = model(batch).sum()
        loss.backward()
        return Loss(loss, tokens)

    samples = len(inputs)
    measurement.with_counting(forward_backward)(inputs, MicroBatch(slice(0, samples), samples, samples, samples, True))
    assert not measurement.is_due
    assert measurement.with_counting(forward_backward) is forward_backward
    return measurement


@pytest.mark.parametrize("checkpointing", [False, True])
def test_flops_count_matrix_products_but_not_recomputation(checkpointing: bool) -> None:
    model = nn.Sequential(Block(), Block())
    if checkpointing:
        checkpoint_activations(model, Block)
    found = count_flops(model, torch.randn(4, 10, 16), torch.tensor(20.0))
    products = 2 * 2 * 10 * (16 * 32 + 32 * 16)  # forward pass of a sample with 10 positions
    # The gradients of the weights need as many FLOPs as the forward pass, and so do the gradients of the inputs, which
    # are not computed for the first layer.
    assert found.flops_per_sample == 3 * products - 2 * 10 * 16 * 32
    assert found.flops_per_token == 4 * found.flops_per_sample / 20


def test_flops_of_attention_are_counted() -> None:
    """The forward pass has two matrix products. The backward pass has four, or five if it recomputes the scores."""

    def attend(inputs: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(inputs, inputs, inputs)

    model = nn.Module()
    model.forward = attend  # type: ignore[method-assign]
    found = count_flops(model, torch.randn(3, 2, 10, 8, requires_grad=True))
    product = 2 * 2 * 10 * 10 * 8
    assert found.flops_per_sample in (6 * product, 7 * product)


def test_formula_that_raises_does_not_end_the_training(caplog: pytest.LogCaptureFixture) -> None:
    measurement = FlopsMeasurement(is_enabled=True)

    def fails(*shapes: Any) -> int:
        raise AssertionError

    assert measurement._wrap_formula("aten.new", fails)() == 0
    assert measurement._uncounted_operations == {"aten.new"}


@pytest.mark.parametrize(
    ("name", "half", "tf32", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", True, False, 989.5e12),
        ("NVIDIA H100 PCIe", True, False, 756.5e12),
        ("NVIDIA H200", True, False, 989.5e12),
        ("NVIDIA H200 NVL", True, False, 835.5e12),
        ("NVIDIA A100-SXM4-80GB", False, True, 156e12),
        ("NVIDIA A100-SXM4-80GB", False, False, 19.5e12),
        ("NVIDIA A10G", True, False, 70e12),
        ("Tesla V100-SXM2-16GB", False, True, 15.7e12),
        ("NVIDIA L4", True, False, 121e12),
        ("NVIDIA L40S", True, False, 362e12),
        ("NVIDIA A100-PCIE-40GB", True, False, 312e12),
        ("NVIDIA A100 80GB PCIe", True, False, 312e12),
        ("A100-SXM4-40GB", True, False, 312e12),  # older drivers do not report the brand
        ("NVIDIA GH200 480GB", True, False, 989.5e12),
        ("NVIDIA GH200 144G HBM3e", True, False, 989.5e12),
        ("Tesla V100-PCIE-32GB", True, False, 112e12),
        ("Tesla T4", True, False, 65e12),
        ("NVIDIA GeForce RTX 4090", True, False, 165.2e12),
        ("GeForce RTX 3090", True, False, 71e12),
        ("NVIDIA RTX A6000", True, False, 154.8e12),
        ("AMD Instinct MI300X", True, False, 1307.4e12),
    ],
)
def test_peak_flops_of_known_gpus(name: str, half: bool, tf32: bool, expected: float | None) -> None:
    assert peak_flops(name, half=half, tf32=tf32) == expected


@pytest.mark.parametrize(
    "name",
    [
        "Quadro P400",
        "",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "NVIDIA A30 MIG 2g.12gb",
        "NVIDIA A100-SXM-64GB",  # a custom model with more multiprocessors
        "GRID A100-10C",
        "NVIDIA A40-8Q",
        "NVIDIA A10-24C",
        "NVIDIA L4-12Q",
        "NVIDIA RTX A6000-24Q",
        "GRID T4-16Q",
        "Tesla V100-FHHL-16GB",
        "Tesla V100-SXM3-32GB",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA A800 40GB Active",
        "AMD Instinct MI300X VF",
    ],
)
def test_peak_flops_of_unknown_and_partial_gpus_are_unknown(name: str) -> None:
    assert {peak_flops(name, half=half, tf32=tf32) for half in (True, False) for tf32 in (True, False)} == {None}


def test_peak_flops_of_a_compute_partition_are_unknown() -> None:
    assert peak_flops("AMD Instinct MI300X", half=True, tf32=False, compute_units=304) == 1307.4e12
    assert peak_flops("AMD Instinct MI300X", half=True, tf32=False, compute_units=38) is None


@pytest.mark.parametrize(("tf32", "expected"), [(True, 156e12), (False, 19.5e12)])
def test_peak_flops_depend_on_the_tf32_setting(tf32: bool, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    properties = SimpleNamespace(multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    config = TrainConfig(max_epochs=1, tf32=tf32)
    assert device_peak_flops(torch.device("cuda"), nn.Linear(1, 1), config) == expected


@pytest.fixture
def values() -> RunValues:
    attempts = [
        AttemptRecord(started=0, ended=8, first_step=0, last_step=4, ranks=2, seconds={"training": 6, "startup": 2}),
        AttemptRecord(
            started=9, ended=12, first_step=2, last_step=9, ranks=2, replayed_steps=2, seconds={"training": 3}
        ),
    ]
    gauges = {"step": 9, "loss": 0.5, "max_memory_bytes": 3.0}
    found = RunValues(gauges=gauges, results={"val_loss": 0.7}, memory=[10.0, 20.0], slow_ranks=frozenset({1}))
    found.goodput = lambda: GoodputSummary.of(attempts)
    found.recorded_goodput = GoodputSummary.of(attempts)
    found.checkpoint_count_and_seconds = (2, 3.5)
    found.add_phase_seconds([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    found.add_phase_seconds([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    return found


def scrape(port: int) -> dict[tuple[str, tuple[str, ...]], float]:
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20).read().decode()
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_endpoint_serves_the_metrics(values: RunValues) -> None:
    port = find_free_port()
    endpoint = MetricsEndpoint("127.0.0.1", port, keep_trying=False)
    try:
        assert scrape(port)["unitrain_checkpoint_write_seconds_count", ()] == 0
        endpoint.set_values(values)
        found = scrape(port)
    finally:
        endpoint.close()
    expected = {
        ("unitrain_step", ()): 9, ("unitrain_result", ("val_loss",)): 0.7, ("unitrain_memory_bytes", ("1",)): 20,
        ("unitrain_slow_rank", ("0",)): 0, ("unitrain_slow_rank", ("1",)): 1, ("unitrain_restarts_total", ()): 1,
        ("unitrain_replayed_steps_total", ()): 2, ("unitrain_goodput_ratio", ()): 9 / 11,
        ("unitrain_goodput_seconds_total", ("startup",)): 2, ("unitrain_checkpoint_write_seconds_sum", ()): 3.5,
    }  # fmt: skip
    assert found.items() >= expected.items()
    phases = {labels: value for (name, labels), value in found.items() if name == "unitrain_phase_seconds_total"}
    assert sorted(phases.values()) == [2, 3, 4, 5, 6, 7, 8, 9]
    assert {name for name, _ in found} <= exported_names()
    with pytest.raises(OSError, match="refused"):
        scrape(port)


def test_port_in_use_is_an_error_or_is_retried(values: RunValues, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: Address already in use. Use another port"):
            MetricsEndpoint("127.0.0.1", port, keep_trying=False)
        endpoint = MetricsEndpoint("127.0.0.1", port, keep_trying=True)
        assert "cannot listen" in caplog.text
    try:
        endpoint.set_values(values)
        for _ in range(50):
            try:
                assert scrape(port)["unitrain_step", ()] == 9
                break
            except OSError:
                endpoint._closed_event.wait(0.2)
        else:
            pytest.fail("the endpoint was not opened")
    finally:
        endpoint.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--metrics-port", "0"], "1<=x<=65535"),
        (["--metrics-address", "0.0.0.0"], "--metrics-port 9400"),
        (["--metrics-port", "9400", "--metrics-address", "192.0.2.1"], "is not available on 192.0.2.1"),
        (["--metrics-port", "9400", "--metrics-address", "127.0.0..1"], "is not available on 127.0.0..1"),
    ],
)
def test_launch_rejects_invalid_metrics_options(options: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    result = CliRunner().invoke(command_line, ["launch", *options, str(tmp_path / "train.py")])
    assert result.exit_code == 2
    assert message in re.sub(r"\s+", " ", result.output)


def test_launch_does_not_start_ranks_if_prometheus_client_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setattr("os.execvpe", lambda *arguments: pytest.fail("the launcher was started"))
    (tmp_path / "train.py").write_text("print('started')")
    for options in ([], ["-np", "2"]):
        result = CliRunner().invoke(
            command_line, ["launch", *options, "--metrics-port", "9400", str(tmp_path / "train.py")]
        )
        assert result.exit_code == 2
        assert "--metrics-port 9400 needs the package prometheus_client, which is not installed." in result.stderr
        assert 'with: pip install ".[prometheus]"' in result.stderr


@pytest.mark.parametrize(
    ("port", "code", "fix"),
    [
        (80, errno.EACCES, "--metrics-port 1024"),
        (9400, errno.EADDRINUSE, "--metrics-port 9401"),
        (9400, errno.EADDRNOTAVAIL, "--metrics-address 127.0.0.1"),
    ],
)
def test_launch_suggests_another_port_or_address(
    port: int, code: int, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The error is simulated, because root may listen on every port.
    def cannot_listen(address: str, port: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(launch_plan, "check_can_listen", cannot_listen)
    (tmp_path / "train.py").touch()
    result = CliRunner().invoke(command_line, ["launch", "--metrics-port", str(port), str(tmp_path / "train.py")])
    assert result.exit_code == 2
    assert f"--metrics-port {port} is not available on 127.0.0.1: {os.strerror(code)}. Use " in result.output
    assert result.output.rstrip().endswith(fix)


def test_launch_rejects_a_port_in_use(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = CliRunner().invoke(command_line, ["launch", "--metrics-port", str(port), str(tmp_path / "train.py")])
    assert result.exit_code == 2
    assert f"--metrics-port {port} is not available on 127.0.0.1: Address already in use" in result.output


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"metrics_port": 0}, "metrics_port must be"),
        ({"metrics_port": 65536}, "at most 65535"),
        ({"metrics_port": "9400"}, "metrics_port must be"),
        ({"metrics_address": ""}, "metrics_address must be a non-empty string"),
        ({"peak_flops": 0}, "peak_flops must be a number above 0"),
    ],
)
def test_invalid_settings_are_rejected(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(max_epochs=1, **given)


def test_incomplete_requests_do_not_exhaust_the_connections_of_the_endpoint(
    values: RunValues, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics_server._Handler, "timeout", 1.0)
    port, before = find_free_port(), threading.active_count()
    endpoint = MetricsEndpoint("127.0.0.1", port, keep_trying=False)
    endpoint.set_values(values)
    connections: list[socket.socket] = []
    try:
        for _ in range(metrics_server._MAX_CONNECTIONS + 8):  # incomplete requests
            connections.append(socket.create_connection(("127.0.0.1", port), timeout=10))
            with contextlib.suppress(OSError):
                connections[-1].sendall(b"GET /metr")
            assert threading.active_count() - before <= metrics_server._MAX_CONNECTIONS + 2
        deadline = time.monotonic() + 30
        while True:  # the endpoint responds again after its timeout
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
                    assert b"unitrain_step" in response.read()
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
    finally:
        for connection in connections:
            connection.close()
        endpoint.close()
    assert "Traceback" not in capfd.readouterr().err


def test_request_that_is_sent_slowly_is_ended(values: RunValues, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte restarts the timeout of the socket."""
    monkeypatch.setattr(metrics_server, "_REQUEST_SECONDS", 0.5)
    port = find_free_port()
    endpoint = MetricsEndpoint("127.0.0.1", port, keep_trying=False)
    endpoint.set_values(values)
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=0.05) as client:
            deadline = time.monotonic() + 30
            with contextlib.suppress(ConnectionError):
                while time.monotonic() < deadline:
                    client.sendall(b"G")
                    with contextlib.suppress(TimeoutError):
                        assert not client.recv(100)
                        break
        assert time.monotonic() < deadline
    finally:
        endpoint.close()


def test_endpoint_starts_without_a_dns_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A DNS request can take seconds if the DNS server does not respond."""
    lookups: list[str] = []
    monkeypatch.setattr(socket, "getfqdn", lookups.append)
    server = metrics_server.MetricsServer("127.0.0.1", 0, lambda environ, start_response: [])
    server.server_close()
    assert lookups == []
    assert (server.server_name, server.server_port) == server.server_address


def test_address_of_another_host_is_reported_with_a_fix() -> None:
    with pytest.raises(ConfigError, match=r'Use an address of the host of rank 0: .*metrics_address="127.0.0.1"'):
        MetricsEndpoint("192.0.2.1", find_free_port(), keep_trying=False)


def test_endpoint_that_is_closed_while_it_starts_does_not_keep_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    starts, start = threading.Event(), metrics_server.MetricsServer.start

    def start_slowly(server: metrics_server.MetricsServer) -> None:
        starts.set()
        time.sleep(0.3)
        start(server)

    monkeypatch.setattr(prometheus, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(metrics_server.MetricsServer, "start", start_slowly)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        endpoint = MetricsEndpoint("127.0.0.1", port, keep_trying=True)
    assert starts.wait(20)
    endpoint.close()
    time.sleep(0.5)
    with pytest.raises(OSError, match="refused"):
        scrape(port)


def test_forked_processes_do_not_keep_the_port_and_closed_endpoints_are_freed() -> None:
    endpoint = MetricsEndpoint("127.0.0.1", find_free_port(), keep_trying=False)
    if (pid := os.fork()) == 0:
        os._exit(0 if endpoint._server is None else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert endpoint._server is not None
    endpoint.close()
    freed = weakref.ref(endpoint)
    del endpoint
    gc.collect()
    assert freed() is None


def test_another_port_is_suggested_if_the_port_is_privileged(monkeypatch: pytest.MonkeyPatch) -> None:
    def deny_listening(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(metrics_server.MetricsServer, "__init__", deny_listening)
    with pytest.raises(ConfigError, match=r":80: Permission denied\. Use another port: .*--metrics-port 9400,"):
        MetricsEndpoint("127.0.0.1", 80, keep_trying=False)


def test_each_query_of_the_dashboard_uses_an_exported_metric() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [entry["query"] for entry in dashboard["templating"]["list"] if entry["type"] == "query"]
    names = [re.findall(r"unitrain_\w+", query) for query in queries]
    assert len(queries) >= 20
    assert all(names)
    assert {name for found in names for name in found} <= exported_names()
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
