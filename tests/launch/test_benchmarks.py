"""The benchmarks run and write their tables. Measured times are not tested, except for a few upper limits."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import Host
from requirements import needs_hosts

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RATIO = r"\*\*\d+\.\d{3}\*\* \[\d+\.\d{3}, \d+\.\d{3}\]"


def run(script: str, *arguments: str | Path, seconds: float = 280) -> str:
    command = [sys.executable, BENCHMARKS / script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly
def test_step_overhead_benchmark_writes_its_table(tmp_path: Path) -> None:
    shown = run("step_overhead.py", "--model", "trial", "--rounds", "2", "--output", tmp_path)
    table = (tmp_path / "step_overhead.md").read_text()
    assert table.strip() in shown
    for backend, against in (("ddp", "DistributedDataParallel"), ("horovod", "hvd.DistributedOptimizer")):
        row = rf"^\| {backend} \| trial \| {re.escape(against)} \| {RATIO} \| {RATIO} \| "
        assert re.search(row, table, re.M)
    kept = json.loads((tmp_path / "step_overhead.json").read_text())
    for models in kept["seconds_per_step"].values():
        assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in models["trial"].values())


@pytest.mark.nightly
def test_versions_benchmark_writes_its_table(tmp_path: Path) -> None:
    arguments = ["--backend", "ddp", "--model", "trial", "--rounds", "2", "--output", tmp_path]
    shown = run("versions.py", BENCHMARKS.parent, *arguments)
    table = (tmp_path / "versions.md").read_text()
    assert table.strip() in shown
    assert re.search(rf"^\| ddp \| trial \| {RATIO} \| {RATIO} \| ", table, re.M)
    kept = json.loads((tmp_path / "versions.json").read_text())["seconds"]["ddp"]["trial"]
    assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in kept.values())


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_peers_benchmark_writes_a_table_of_installed_and_missing_peers(tmp_path: Path) -> None:
    """Peers that are not installed are listed as "not installed"."""
    options = ["--backend", "ddp", "--model", "trial", "--rounds", "2"]
    shown = run("peers.py", *options, "--output", tmp_path, seconds=850)
    table = (tmp_path / "peers.md").read_text()
    assert table.strip() in shown
    rows = {row[1]: row[2:] for row in re.findall(r"^\| (ddp) \| (.*?) \| (.*?) \| (.*?) \|$", table, re.M)}
    packages = {"Lightning Fabric": "lightning", "Lightning Trainer": "lightning", "Accelerate": "accelerate"}
    always_installed = {"DistributedDataParallel": "sys", "unitrain, own loop": "sys", "unitrain, Trainer": "sys"}
    packages |= {"ignite": "ignite", **always_installed}
    assert set(rows) == set(packages)
    for peer, (milliseconds, against) in rows.items():
        if importlib.util.find_spec(packages[peer]) is None:
            assert (milliseconds, against) == ("not installed", "")
        else:
            assert float(milliseconds) > 0
            assert re.fullmatch(RATIO if peer != "unitrain, Trainer" else "1", against)


@pytest.mark.nightly
def test_device_check_runs_without_a_gpu(tmp_path: Path) -> None:
    small = ["--model", "resnet18", "--batch-size", "2", "--steps", "1", "--rounds", "1"]
    run("gpu_check.py", "--device", "cpu", *small, "--output", tmp_path)
    table = (tmp_path / "gpu_check.md").read_text()
    for backend in ("local", "ddp", "horovod"):
        assert f"| {backend} | collectives equal to their definition | 126 | ok |" in table
        assert f"| {backend} | prefetched batches equal to the loader's | 200 | ok |" in table
        assert f"| {backend} | with and without prefetch, largest difference | 0.0e+00 | ok |" in table
        for precision in ("fp32", "bf16", "fp16"):
            assert re.search(rf"^\| {backend} \| {precision}, 20 steps, .* \| ok \|$", table, re.M)


@pytest.mark.nightly
def test_control_plane_benchmark_writes_its_table(tmp_path: Path) -> None:
    shown = run("control_plane.py", "--repeats", "2", "--size", "2", "--size", "128", "--output", tmp_path)
    table = (tmp_path / "control_plane.md").read_text()
    assert table.strip() in shown
    assert table.count(", unitrain | ") == table.count(", baseline | ") == 4
    costs = json.loads((tmp_path / "control_plane.json").read_text())["seconds_and_bytes"]["128"]
    assert costs["check, baseline"][1] == 128 * 1160
    assert costs["check"][1] == 7 * 1160
    assert costs["model"][1] < costs["model, baseline"][1] / 10


@pytest.mark.nightly
def test_simulated_scale_benchmark_writes_its_table(tmp_path: Path) -> None:
    shown = run("simulated_scale.py", "--rounds", "1", "--size", "64", "--output", tmp_path)
    assert (tmp_path / "simulated_scale.md").read_text().strip() in shown
    (costs,) = json.loads((tmp_path / "simulated_scale.json").read_text())["64"]
    assert costs["failure_seconds_median"] <= costs["failure_seconds_last"] < 5
    # Each rank has three connections to the store and one for the liveness check. In a real job, torch's process group
    # has another one.
    assert 4 * 63 <= costs["descriptors_of_rank_0"] < 5 * 63 + 64


@pytest.mark.nightly
def test_compression_benchmark_writes_its_table(tmp_path: Path) -> None:
    chosen = ["--backend", "horovod", "--model", "trial", "--compression", "PowerSGD, rank 1"]
    shown = run("compression.py", *chosen, "--rounds", "2", "--output", tmp_path)
    table = (tmp_path / "compression.md").read_text()
    assert table.strip() in shown
    assert re.search(rf"^\| PowerSGD, rank 1 \| {RATIO} \|$", table, re.M)


@pytest.mark.nightly
def test_allreduce_benchmark_writes_its_table(tmp_path: Path) -> None:
    shown = run("allreduce.py", "--size", "1 KB", "--size", "4 x 25 MB", "--rounds", "2", "--output", tmp_path)
    table = (tmp_path / "allreduce.md").read_text()
    assert table.strip() in shown
    for method in ("torch.distributed", "horovod.torch", "unitrain, ddp", "unitrain, horovod"):
        assert re.search(rf"^\| {method} \| {RATIO} \| {RATIO} \|$", table, re.M)


@pytest.mark.nightly
def test_overlap_benchmark_writes_its_table(tmp_path: Path) -> None:
    shown = run("overlap.py", "--model", "trial", "--rounds", "3", "--output", tmp_path)
    table = (tmp_path / "overlap.md").read_text()
    assert table.strip() in shown
    for backend in ("ddp", "horovod"):
        assert re.search(rf"^\| {backend} \| 1 \| \*\*\d+%\*\* \[.*\] \| {RATIO} \| ", table, re.M)
        events = json.loads((tmp_path / f"overlap_{backend}.trace.json").read_text())["traceEvents"]
        assert {(event["pid"], event["tid"]) for event in events} == {
            (f"rank {rank}", row) for rank in (0, 1) for row in ("compute", "bucket 0")
        }
        assert all(event["dur"] > 0 for event in events)


@pytest.mark.nightly
def test_feature_costs_benchmark_writes_its_table(tmp_path: Path) -> None:
    features = [
        "ema_decay",
        "compression PowerSGD",
        "sync_batch_norm",
        "channels_last",
        "accumulate",
        "accumulate, communication after each micro-batch",
    ]
    chosen = ["--backend", "ddp", "--model", "trial", *(word for name in features for word in ("--feature", name))]
    shown = run("feature_costs.py", *chosen, "--rounds", "2", "--output", tmp_path)
    table = (tmp_path / "feature_costs.md").read_text()
    assert table.strip() in shown
    for feature in features:
        assert re.search(rf"^\| {feature} \| {RATIO} \|$", table, re.M)
    for model in ("baseline", "baseline with BatchNorm", "baseline with convolutions"):
        assert re.search(rf"^\| {model} \| \d+\.\d\d ms \|$", table, re.M)
    assert re.search(rf"^- ddp, trial: {RATIO}$", table, re.M)


@pytest.mark.nightly
def test_watch_cost_benchmark_writes_its_table(tmp_path: Path) -> None:
    shown = run("watch_cost.py", "--backend", "ddp", "--rounds", "2", "--output", tmp_path)
    table = (tmp_path / "watch_cost.md").read_text()
    assert table.strip() in shown
    microseconds = r"-?\d+\.\d\d \[-?\d+\.\d\d, -?\d+\.\d\d\]"
    assert re.search(rf"^\| ddp (\| {microseconds} ){{4}}\| \*\*-?\d+\.\d\d%\*\* \|$", table, re.M), table
    assert re.search(rf"^Time until `save` of 100 MB returns, divided by .*: {RATIO} \(", table, re.M)


@needs_hosts
def test_slow_network_has_the_requested_bandwidth(two_hosts: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    slow_down = importlib.import_module("slow_network").slow_down
    slow_down(two_hosts[0], "1gbit")
    shown = two_hosts[0].run(["tc", "qdisc", "show", "dev", "eth0"]).stdout
    assert re.search(r"qdisc tbf .* rate 1Gbit ", shown), shown


@needs_hosts
@pytest.mark.nightly
def test_hierarchical_reduction_sends_less_between_the_hosts(tmp_path: Path) -> None:
    """On 2 hosts with 2 ranks each, a ring allreduce sends 1.5 times as many bytes as a hierarchical allreduce."""
    options = ["--rate", "1gbit", "--backend", "ddp", "--rounds", "2", "--steps", "2"]
    shown = run("hierarchical_reduction.py", *options, "--output", tmp_path)
    table = (tmp_path / "hierarchical_reduction.md").read_text()
    assert table.strip() in shown
    assert re.search(
        rf"^\| 1gbit \| ddp \| hierarchical allreduce \| \d+\.\d \| \d+\.\d ms \| {RATIO} \|$", table, re.M
    )
    sent = json.loads((tmp_path / "hierarchical_reduction.json").read_text())["1gbit, ddp"]["megabytes"]
    plain, hierarchical = (min(rounds) for rounds in sent.values())
    assert plain / hierarchical == pytest.approx(1.5, rel=0.1)


@needs_hosts
@pytest.mark.nightly
def test_low_communication_sends_the_expected_bytes(tmp_path: Path) -> None:
    both = ["--method", "DiLoCo", "--method", "DiLoCo, int8", "--local-steps", "6", "--output", tmp_path]
    short = ["--steps", "12", "--evaluate-every", "6", "--seeds", "1", "--peak-lr", "1e-3"]
    run("low_communication.py", "losses", *both, *short)
    options = ["--rate", "1gbit", "--backend", "ddp", "--seconds", "0.5", "--rounds", "1"]
    shown = run("low_communication.py", "speeds", *both, *options)
    table = (tmp_path / "low_communication.md").read_text()
    assert table.strip() in shown
    assert re.search(r"^\| DiLoCo \| 0.001 \| \d\.\d+ \| -?\d+\.\d % \|", table, re.M), table
    # Headers and acknowledgements are a larger part of few bytes.
    for method, tolerance in (("synchronous", 0.02), ("DiLoCo", 0.02), ("DiLoCo, int8", 0.04)):
        row = re.search(rf"^\| 1gbit \| ddp \| {method} \| [\d,.]+ \| [\d,.]+ \| (\d\.\d+) \|", table, re.M)
        assert row is not None, table
        assert float(row[1]) == pytest.approx(1, abs=tolerance)


@pytest.mark.nightly
def test_sharding_benchmark_writes_its_tables_and_keeps_earlier_rows(tmp_path: Path) -> None:
    options = ["--backend", "ddp", "--model", "trial", "--rounds", "2", "--ranks", "2", "--output", tmp_path]
    run("sharding.py", "--method", "state", *options)
    shown = run("sharding.py", "--method", "parameters", *options)
    table = (tmp_path / "sharding.md").read_text()
    assert table.strip() in shown
    for shard in ("state", "parameters"):
        assert re.search(rf'^\| shard="{shard}" \| {RATIO} \| 2 \|', table, re.M)
        assert re.search(rf'^\| shard="{shard}" \| \d+\.\d{{3}} \(', table, re.M)


@pytest.mark.nightly
def test_sharded_checkpoints_benchmark_writes_its_table(tmp_path: Path) -> None:
    shown = run("sharded_checkpoints.py", "--size", "0.1 GB", "--rounds", "2", "--output", tmp_path)
    table = (tmp_path / "sharded_checkpoints.md").read_text()
    assert table.strip() in shown
    for backend in ("ddp", "horovod"):
        assert re.search(rf"^\| {backend}, 0\.1 GB \| .* \| {RATIO} \|$", table, re.M)


@pytest.mark.nightly
def test_collectives_benchmark_writes_its_table(tmp_path: Path) -> None:
    shown = run("collectives.py", "--size", "1 MB", "--ranks", "2", "--rounds", "2", "--output", tmp_path)
    table = (tmp_path / "collectives.md").read_text()
    assert table.strip() in shown
    assert re.search(rf"the library's all_gather \| {RATIO} \|$", table, re.M)


@pytest.mark.nightly
def test_memory_limits_benchmark_finds_larger_batches_with_checkpointed_activations(tmp_path: Path) -> None:
    """Without checkpointed activations, the largest batch that fits in the limit is smaller."""
    shown = run("memory_limits.py", "--limit", "100", "--shard", "none", "--output", tmp_path)
    table = (tmp_path / "memory_limits.md").read_text()
    assert table.strip() in shown
    plain, checkpointed = json.loads((tmp_path / "memory_limits.json").read_text())["rows"]
    assert 0 < plain["batch"] < checkpointed["batch"]
    # The search stops close to the limit, so the sizes of the largest models vary by a few percent.
    assert 0 < plain["parameters"] < 1.1 * checkpointed["parameters"]


@pytest.mark.nightly
def test_logical_ranks_benchmark_writes_its_table(tmp_path: Path) -> None:
    shown = run("logical_ranks.py", "--model", "trial", "--rounds", "2", "--output", tmp_path)
    table = (tmp_path / "logical_ranks.md").read_text()
    assert table.strip() in shown
    for distribution in ("a logical rank per process", "2 logical ranks per process"):
        assert re.search(rf"^\| {distribution} \| {RATIO} \| {RATIO} \|$", table, re.M)
    kept = json.loads((tmp_path / "logical_ranks.json").read_text())["seconds_per_step"]
    assert all(len(rounds) == 2 for models in kept.values() for rounds in models["trial"].values())


@pytest.mark.nightly
def test_groups_benchmark_writes_its_table(tmp_path: Path) -> None:
    shown = run("groups.py", "--ranks", "3", "--rounds", "2", "--output", tmp_path)
    table = (tmp_path / "groups.md").read_text()
    assert table.strip() in shown
    assert re.search(r"^Creating a group of 2 of 3 ranks takes \d+\.\d ms", table, re.M)
    assert len(re.findall(rf"^\| .* \| {RATIO} \| {RATIO} \| {RATIO} \|$", table, re.M)) == 5


@needs_hosts
@pytest.mark.nightly
def test_recovery_benchmark_measures_every_kill_on_two_hosts(tmp_path: Path) -> None:
    """Each kill on two hosts loses at most one step, and the table contains all kills."""
    options = ["--hosts", "2", "--backend", "ddp", "--method", "standby and memory", "--rounds", "1"]
    shown = run("recovery.py", *options, "--output", tmp_path)
    table = (tmp_path / "recovery.md").read_text()
    assert table.strip() in shown
    seconds = r"\*\*\d+\.\d\*\* s \[\d+\.\d, \d+\.\d\]"
    assert re.search(rf"^\| 2 \| ddp \| standby and memory \| {seconds} \| {seconds} \| {seconds} \| ", table, re.M)
    (row,) = json.loads((tmp_path / "recovery.json").read_text())["recoveries"]
    assert [kill for kill, _, _ in row["recoveries"]] == ["a rank", "rank 0", "a host's ranks"]
    assert all(lost <= 1 for _, _, lost in row["recoveries"])


@needs_hosts
@pytest.mark.nightly
def test_goodput_benchmark_kills_a_rank_and_counts_steps_once(tmp_path: Path) -> None:
    shown = run("goodput.py", "--backend", "ddp", "--method", "standby", "--minutes", "1", "--output", tmp_path)
    assert (tmp_path / "goodput.md").read_text().strip() in shown
    rows = json.loads((tmp_path / "goodput.json").read_text())["rows"]
    ((undisturbed, disturbed, recoveries),) = rows["ddp | standby | 0 ms | 40 steps"]
    ((kill, _, lost_steps),) = recoveries
    assert kill == "a rank"
    assert 0 <= lost_steps <= 2 * 40
    assert min(undisturbed, disturbed) > 0


@needs_hosts
@pytest.mark.nightly
def test_slow_ranks_benchmark_finds_the_injected_causes(tmp_path: Path) -> None:
    """The causes are a slow dataset and a slow forward pass, which are found on a busy machine too."""
    kinds = ["--kind", "data", "--kind", "forward"]
    shown = run("slow_ranks.py", *kinds, "--slowdowns", "2", "--runs", "1", "--output", tmp_path)
    table = (tmp_path / "slow_ranks.md").read_text()
    assert table.strip() in shown
    for kind in ("slow `__getitem__`", "slow forward pass"):
        assert f"| {kind} | 1 | 1 |  |" in table
    kept = json.loads((tmp_path / "slow_ranks.json").read_text())
    assert kept["cost_microseconds"] < 20  # less than 0.1 % of a step of 20 ms
