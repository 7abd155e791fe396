"""`unitrain bench collectives`: measured operations, derived values and errors."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from groups import ci, nightly
from launches import SECONDS, running_launcher
from requirements import needs_mpi
from torch import Tensor

from unitrain.backends.local import LocalBackend
from unitrain.bench import results, tables
from unitrain.bench.collectives import _make_collective, round_up_bytes, take_turn
from unitrain.bench.rank_sets import LaunchedRanks
from unitrain.bench.results import OPERATIONS, bus_factor
from unitrain.cli import unitrain as command
from unitrain.cli.bench_collectives import select_common_backends
from unitrain.errors import ReportError

BENCH = [sys.executable, "-m", "unitrain", "bench"]
SIZES = (1024, 65536)


def error_output(*arguments: str) -> str:
    result = CliRunner().invoke(command, ["bench", *arguments])
    assert result.exit_code in (1, 2), result.output
    return result.output.rpartition("Error: ")[2].strip()


def run(launch: list[str]) -> str:
    """Run a command, and check that it leaves no processes behind."""
    with running_launcher(launch) as job:
        output = job.process.communicate(timeout=2 * SECONDS)[0]
        assert job.process.returncode == 0, output
        assert not job.find_processes(), output
    return output


@pytest.mark.parametrize("signum", [*ci(signal.SIGINT), *nightly(signal.SIGTERM)])
def test_signal_terminates_all_ranks_including_suspended_ranks(signum: signal.Signals, tmp_path: Path) -> None:
    """The signal is sent during the measurement, when the ranks of other backends are suspended."""
    options = ["collectives", "-np", "2", "--seconds", "300", "--json", str(tmp_path / "result.json")]
    with running_launcher([*BENCH, *options], {"TMPDIR": str(tmp_path)}) as job:
        assert job.process.stdout is not None
        lines = []
        while "round 1" not in (line := job.process.stdout.readline()):
            assert line, "".join(lines)
            lines.append(line)
        job.process.send_signal(signum)
        lines.append(job.output())
        job.wait_until_all_exited(30)
    output = "".join(lines)
    assert job.process.returncode == 128 + signum, output
    assert "Traceback" not in output
    assert output.endswith("unitrain: interrupted\n") == (signum == signal.SIGINT), output
    assert not list(tmp_path.iterdir())


def check_rows(result: dict[str, Any], backends: set[tuple[str, str]], operations: tuple[str, ...]) -> None:
    """Check that each backend has three measurements of every operation and size, and that the lower bounds exist."""
    rows = result["rows"]
    expected = {(*one, operation, size) for one in backends for operation in operations for size in SIZES}
    assert {(row["backend"], row["transport"], row["operation"], row["bytes"]) for row in rows} == expected
    assert len(rows) == len(expected)
    assert {(floor["name"], floor["bytes"]) for floor in result["floors"]} == {
        (name, size) for name in ("memory copy", "tcp stream") for size in SIZES
    }
    for row in (*rows, *result["floors"]):
        assert len(row["seconds"]) == 3
        assert all(0 < seconds < 60 for seconds in row["seconds"])


@pytest.mark.nightly
@needs_mpi
def test_collectives_are_measured_on_every_backend_and_transport(tmp_path: Path) -> None:
    saved, page, picture = tmp_path / "here.json", tmp_path / "here.html", tmp_path / "here.png"
    options = ["--sizes", "1KB,64K,1MB", "--max-bytes", "64KB", "--seconds", "0", "--device", "cpu"]
    output = run([*BENCH, "collectives", *options, "--json", str(saved), "--output", str(page)])
    result = results.read(saved, "collectives")
    check_rows(result, {("ddp", "gloo"), ("horovod", "gloo"), ("horovod", "mpi")}, OPERATIONS)
    assert (result["ranks"], result["num_nodes"], result["device"], result["skipped"]) == (2, 1, "cpu", [])
    for heading in ("ddp gloo", "horovod gloo", "horovod mpi", "memory copy GB/s", "tcp stream GB/s"):
        assert heading in output
    # The page contains the cells of the table and two charts per operation.
    text = page.read_text()
    headings, rows = tables.table_texts(tables.collectives(result))
    assert len(rows) == len(OPERATIONS) * len(SIZES)
    assert all(f"<td>{cell}</td>" in text for row in rows for cell in row)
    assert text.count("<svg") == 2 * len(OPERATIONS)
    from unitrain.report.bench_charts import draw

    draw(result, picture, headings, rows)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.ci
def test_ranks_started_by_a_launcher_measure_both_backends(tmp_path: Path) -> None:
    saved = tmp_path / "launched.json"
    launch = [sys.executable, "-m", "unitrain", "launch", "--launcher", "torchrun", "-np", "3"]
    script = str(Path(sys.executable).with_name("unitrain"))
    bench_options = [
        "--backends",
        "ddp,horovod",
        "--operations",
        "allreduce",
        "--sizes",
        "1020,64KB",
        "--seconds",
        "0",
    ]
    output = run([*launch, script, "bench", "collectives", *bench_options, "--device", "cpu", "--json", str(saved)])
    assert output.count("alg GB/s") == 2  # only one rank prints the table, which has two backends
    result = json.loads(saved.read_text())
    assert result["ranks"] == 3
    assert {(row["backend"], row["bytes"]) for row in result["rows"]} == {
        (backend, size) for backend in ("ddp", "horovod") for size in (1020, 65544)
    }
    assert {(row["backend"], row["max_in_flight"]) for row in result["rows"]} == {("ddp", 2), ("horovod", 1)}
    assert {(row["backend"], row["operation"], row["bytes"], len(row["seconds"])) for row in result["gradients"]} == {
        (backend, *case, 3)
        for backend in ("ddp", "horovod")
        for case in (("allreduce", 1020), ("allreduce", 65544), ("allgather", 1020), ("allgather", 65544))
    }
    assert {floor["name"] for floor in result["floors"]} == {"memory copy", "tcp stream"}


def test_ranks_measure_only_backends_that_are_installed_on_all_hosts() -> None:
    complete = (["ddp", "horovod", "extra"], [])
    without_horovod = (["ddp", "extra"], [("horovod", "No module named 'horovod'.")])
    for by_rank in ([complete, complete, without_horovod], [without_horovod, complete]):
        selected, skipped = select_common_backends(by_rank)
        assert selected == ["ddp", "extra"]
        assert [name for name, _ in skipped] == ["horovod"]
        assert "No module named 'horovod'." in skipped[0][1]
    _, skipped = select_common_backends([complete, (["ddp"], []), complete])
    assert skipped == [("horovod", "On rank 1: It was not selected."), ("extra", "On rank 1: It was not selected.")]


def test_size_of_an_operation_is_the_size_of_the_complete_array() -> None:
    """As in nccl-tests, this is the result of an allgather and the input of other operations."""
    given: dict[str, Tensor] = {}

    def record_tensor(operation: str) -> Any:
        return lambda tensor, *_: given.setdefault(operation, tensor)

    for ranks in (2, 3):
        backend = SimpleNamespace(
            size=ranks, device=torch.device("cpu"), **{operation: record_tensor(operation) for operation in OPERATIONS}
        )
        size = round_up_bytes(1000, ranks)
        assert size == {2: 1000, 3: 1008}[ranks]
        for operation in OPERATIONS:
            _make_collective(backend, operation, 1000)()  # type: ignore[arg-type]
        assert {name: tensor.nbytes for name, tensor in given.items()} == {
            "allreduce": size, "allgather": size // ranks, "reducescatter": size, "broadcast": size,
        }  # fmt: skip
        given.clear()


def test_bus_factor_equals_the_bytes_sent_per_byte_of_the_array() -> None:
    """The expected values are the bytes that a rank sends in the optimal algorithm."""
    for ranks in (2, 3, 4, 8):
        part = 1 / ranks
        ring = sum(part for _ in range(ranks - 1))  # a rank sends one part per step of the ring
        counted = {"reducescatter": ring, "allgather": ring, "allreduce": 2 * ring, "broadcast": 1.0}
        assert all(math.isclose(bus_factor(name, ranks), sent) for name, sent in counted.items())


def test_bandwidths_in_the_table_are_bytes_divided_by_the_median_time() -> None:
    row = {"backend": "ddp", "transport": "gloo", "operation": "allreduce", "bytes": 3 << 20}
    result = {
        "ranks": 3, "num_nodes": 1, "device": "cpu", "rows": [{**row, "seconds": [9.0, 0.003, 0.001]}],
        "floors": [{"name": "memory copy", "bytes": 3 << 20, "seconds": [0.0015] * 3}],
    }  # fmt: skip
    ((operation, size, seconds, algorithm, bus, floor),) = tables.table_texts(tables.collectives(result))[1]
    assert (operation, size, seconds) == ("allreduce", "3 MB", "3 ms")
    # 3 * 2^20 bytes / 3 ms, this value * 4 / 3, and 3 * 2^20 bytes / 1.5 ms
    assert (algorithm, bus, floor) == ("1.05", "1.4", "2.1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sizes", "1KB,big"), "--sizes takes sizes such as 1KB, 64MB or 4096, got 'big'. Use --sizes 1MB"),
        (("--sizes", "0"), "--sizes takes sizes such as 1KB, 64MB or 4096, got '0'. Use --sizes 1MB"),
        (("--sizes", "4KB", "--max-bytes", "1KB"), "--max-bytes 1KB excludes all sizes in 4KB. Use --max-bytes 1MB"),
        (("--operations", "allreduced"), "Unknown operation 'allreduced'. Did you mean 'allreduce'? Available: "),
        (("--backends", "hovorod"), "Unknown backend 'hovorod'. Did you mean 'horovod'?"),
        (
            ("--backends", "local"),
            "No backend that supports several ranks is available on this host. Use --backends ddp",
        ),
        (
            ("--json", "setup.py/x.json"),
            "--json 'setup.py/x.json' is not writable. Use another file: --json /tmp/x.json",
        ),
        (("--output", "x.jpg"), "--output takes a .png or .html file, got 'x.jpg'. Use --output x.jpg.png"),
    ],
)
def test_invalid_arguments_are_refused_before_ranks_start(arguments: tuple[str, ...], message: str) -> None:
    assert error_output("collectives", *arguments).startswith(message)


def test_launched_ranks_without_an_available_backend_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    message = "No backend that supports several ranks is available on this host. Use --backends ddp"
    assert error_output("collectives", "--backends", "local") == message


def test_slow_first_operations_of_a_size_are_warm_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = LocalBackend(torch.device("cpu"))
    monkeypatch.setattr(LocalBackend, "num_slow_operations", 16)
    allreduce, sizes = backend.allreduce, []

    def counted_allreduce(tensor: Tensor, op: Any) -> Tensor:
        sizes.append(tensor.numel() * tensor.element_size())
        return allreduce(tensor, op)

    monkeypatch.setattr(backend, "allreduce", counted_allreduce)
    counts = []
    for size in (4096, 4096, 1024, 8 << 20):
        sizes.clear()
        take_turn(backend, "allreduce", size, 2)
        assert set(sizes) == {size}
        counts.append(len(sizes))
    assert counts == [16 + 2, 1 + 2, 16 + 2, 1 + 2]  # large tensors have one warm-up


def test_nested_activations_of_launched_ranks_use_the_same_backend() -> None:
    ranks = LaunchedRanks("local", "cpu")
    with ranks.activate():
        backend = ranks._active_backend
        with ranks.activate():
            assert ranks._active_backend is backend
        assert ranks._active_backend is backend
    with pytest.raises(AssertionError, match="not active"):
        ranks.run(id)
    with ranks.activate():
        assert ranks.run(lambda backend: backend.size) == [1]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 ns"), (9.996e-7, "1 µs"), (0.0012, "1.2 ms"), (0.9994, "999 ms"), (0.9996, "1 s"), (1234.4, "1,234 s")],
)
def test_durations_have_a_suitable_unit(seconds: float, text: str) -> None:
    assert results.format_seconds(seconds) == text


def test_files_without_a_result_are_refused(tmp_path: Path) -> None:
    for name, content in (("absent", None), ("broken", "{"), ("other", '{"kind": "x"}'), ("list", "[]")):
        path = tmp_path / name
        if content is not None:
            path.write_text(content)
        with pytest.raises(ReportError, match=rf"{name}.*unitrain bench train --json"):
            results.read(path)
    path = tmp_path / "train"
    path.write_text('{"kind": "train", "rows": []}')
    with pytest.raises(ReportError, match="is a result of unitrain bench train, not of unitrain bench collectives"):
        results.read(path, "collectives")


COLLECTIVE = {"backend": "ddp", "transport": "gloo", "operation": "allreduce", "bytes": 8, "seconds": [0.1, 0.2]}
TRAINING = {
    "backend": "ddp",
    "transport": "gloo",
    "setting": None,
    "ranks": 1,
    "samples": 4,
    "seconds": [0.1],
    "phases": {phase: [0.02] for phase in results.PHASES},
}


@pytest.mark.parametrize(
    "result",
    [
        {"kind": "train", "parameters": 4, "rows": [{}]},
        {"kind": "train", "parameters": 4, "rows": [{**TRAINING, "seconds": None}]},
        {"kind": "train", "parameters": 4, "rows": [{**TRAINING, "seconds": []}]},
        {"kind": "train", "parameters": 4, "rows": [{**TRAINING, "phases": {"data": [1.0]}}]},
        {"kind": "train", "parameters": "many", "rows": [TRAINING]},
        {"kind": "train", "rows": [TRAINING]},
        {"kind": "collectives", "ranks": 2, "rows": [{**COLLECTIVE, "seconds": [0.0]}]},
        {"kind": "collectives", "ranks": 2, "rows": [{**COLLECTIVE, "bytes": "8"}]},
        {"kind": "collectives", "rows": [COLLECTIVE]},
        {"kind": "collectives", "ranks": 2, "rows": [3]},
        {"kind": "collectives", "ranks": 2, "rows": [{**COLLECTIVE, "max_in_flight": 0}]},
        *(
            {"kind": "collectives", "ranks": 2, "rows": [COLLECTIVE], "gradients": gradients}
            for gradients in (None, 3, {}, [3], [{**COLLECTIVE, "seconds": []}])
        ),
    ],
)
def test_incomplete_results_are_refused(result: dict[str, Any], tmp_path: Path) -> None:
    complete = {"kind": "collectives", "ranks": 2, "rows": [COLLECTIVE]}
    if result["kind"] == "train":
        complete = {"kind": "train", "parameters": 4, "rows": [TRAINING]}
    for name, content in (("complete", complete), ("incomplete", result)):
        (tmp_path / name).write_text(json.dumps(content))
    assert results.read(tmp_path / "complete") == complete
    done = CliRunner().invoke(
        command, ["bench", "compare", *(str(tmp_path / name) for name in ("complete", "incomplete"))]
    )
    assert done.exit_code == 1
    assert f"incomplete' is not a complete result of unitrain bench {result['kind']}: " in " ".join(done.output.split())


def test_deeply_nested_files_and_fifos_are_refused(tmp_path: Path) -> None:
    (tmp_path / "deep").write_text("[" * 100_000)
    os.mkfifo(tmp_path / "fifo")
    for name, reason in (("deep", "it is nested too deeply"), ("fifo", "is not a regular file")):
        with pytest.raises(ReportError, match=f"{name}' cannot be read as JSON: .*{reason}"):
            results.read(tmp_path / name)


def test_missing_package_for_charts_is_reported_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(command, ["bench", "collectives", "--output", "x.png"])
    assert result.exit_code == 1
    assert result.stderr == (
        "Error: --output needs the package matplotlib, which is not installed. Install it, in the source folder of "
        'unitrain, with: pip install ".[report]"\n'
    )
