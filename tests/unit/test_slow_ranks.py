"""Slow ranks: causes that are derived from measured figures, and the measurement of these figures."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from unitrain.backends.local import LocalBackend
from unitrain.progress import cpu_evidence, network_evidence, rank_evidence
from unitrain.progress.cpu_evidence import CpuReader, CpuSeconds, ProcessTimes, find_cpu_stat_files
from unitrain.progress.network_evidence import ConnectionCounters, ConnectionReader
from unitrain.progress.rank_evidence import RankEvidence
from unitrain.progress.slow_causes import CAUSES, RankFigures, describe_figures, find_cause
from unitrain.progress.stopping import RankSynchronizer, StopCoordinator
from unitrain.progress.stragglers import EVIDENCE, TRAINING, RankBaseline, Straggler, StragglerDetector
from unitrain.progress.timing import LoopTimer

STEPS = 100
NORMAL = RankFigures(
    data=0.002, compute=0.012, wait=0.004, update=0.002, forward=0.004, copy=0.001, cpu=0.01, network=0.001
)
# Each slowdown adds 20 ms to a step.
SLOW = {
    "data_loading": NORMAL._replace(data=0.022, wait=0.001),
    "copy": NORMAL._replace(data=0.022, wait=0.001, copy=0.019),
    "forward": NORMAL._replace(compute=0.032, wait=0.001, forward=0.024),
    "backward": NORMAL._replace(compute=0.032, wait=0.001),
    "update": NORMAL._replace(update=0.022, wait=0.001),
    "cpu_quota": NORMAL._replace(compute=0.032, wait=0.001, forward=0.024, throttled=0.018),
    "other_processes": NORMAL._replace(compute=0.032, wait=0.001, forward=0.012, cpu_wait=0.019),
    "own_threads": NORMAL._replace(compute=0.032, wait=0.001, forward=0.012, cpu_wait=0.019, cpu=0.035),
}
WAITING = NORMAL._replace(wait=0.024)
SLOW_LINK = NORMAL._replace(wait=0.034, network=0.028)
UNKNOWN = RankFigures()


def add_observations(
    detector: StragglerDetector, ranks: list[RankFigures], earlier: list[RankFigures], times: int = 2
) -> list[Straggler]:
    """Add `times` observations with the figures of all ranks, and return the detected slow ranks."""
    for _ in range(times):
        rows = [[STEPS * value for value in figures] for figures in ranks]
        evidence = [[*row[len(TRAINING) :], *before] for row, before in zip(rows, earlier, strict=True)]
        assert detector.add([row[: len(TRAINING)] for row in rows], STEPS, evidence) == STEPS
    return detector.stragglers


@pytest.mark.parametrize("cause", SLOW)
def test_cause_of_a_slow_rank_is_found_by_comparison_with_other_ranks(cause: str) -> None:
    (slow,) = add_observations(StragglerDetector(), [WAITING, SLOW[cause], WAITING], [UNKNOWN] * 3)
    assert (slow.rank, slow.cause, slow.earlier) == (1, cause, None)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("cause", SLOW)
def test_cause_of_a_slowdown_of_all_ranks_is_found_by_comparison_with_earlier_steps(cause: str, size: int) -> None:
    slow = add_observations(StragglerDetector(), [SLOW[cause]] * size, [NORMAL] * size)
    assert [(straggler.rank, straggler.cause) for straggler in slow] == [(rank, cause) for rank in range(size)]
    assert all(straggler.earlier is not None and straggler.earlier < straggler.seconds for straggler in slow)


def test_only_causes_that_are_new_since_earlier_steps_are_reported() -> None:
    """Rank 0 has always loaded data slowly. Now, rank 1 has a slow forward pass."""
    always = NORMAL._replace(data=0.012, wait=0.001)
    slow = add_observations(StragglerDetector(), [always._replace(wait=0.011), SLOW["forward"]], [always, NORMAL])
    assert [(straggler.rank, straggler.cause) for straggler in slow] == [(1, "forward")]


def test_rank_that_slows_down_but_still_waits_for_others_is_not_reported() -> None:
    """Rank 1 takes longer than before, but still waits for ranks 2 and 3, which have larger batches."""
    large = NORMAL._replace(compute=0.040, wait=0.0)
    before = [NORMAL._replace(wait=0.032), NORMAL._replace(wait=0.032), large, large]
    now = [before[0], NORMAL._replace(compute=0.026, wait=0.018), large, large]
    assert [straggler.rank for straggler in add_observations(StragglerDetector(), now, before)] == [2, 3]


def test_slow_data_workers_are_attributed_to_other_processes_on_their_cores() -> None:
    slow = SLOW["data_loading"]._replace(worker_wait=0.018)
    (straggler,) = add_observations(StragglerDetector(), [WAITING, slow], [UNKNOWN] * 2)
    assert straggler.cause == "other_processes"
    # Workers that wait for a core do not explain a slow forward pass.
    assert find_cause(SLOW["forward"]._replace(worker_wait=0.018), NORMAL, "compute") == "forward"


@pytest.mark.parametrize(
    ("waited", "cause"), [(0.019, "other_processes"), (0.016, "other_processes"), (0.014, "forward")]
)
def test_part_that_mostly_waits_for_a_core_is_not_named(waited: float, cause: str) -> None:
    """The forward pass takes 30 ms longer and the backward pass 20 ms."""
    slow = NORMAL._replace(compute=NORMAL.compute + 0.05, forward=NORMAL.forward + 0.03, cpu_wait=waited)
    assert find_cause(slow, NORMAL._replace(cpu_wait=0.0), "compute") == cause
    assert "core" not in describe_figures("forward", slow, 0.1)


@pytest.mark.parametrize("earlier", [UNKNOWN, NORMAL])
def test_slow_link_is_attributed_to_the_sending_rank(earlier: RankFigures) -> None:
    """A slow link delays the gradients on all ranks, because each rank in a ring waits for its predecessor."""
    waiting = NORMAL._replace(wait=0.034, network=0.002)
    for ranks, named in (([waiting, SLOW_LINK, waiting], 1), ([SLOW_LINK, waiting], 0)):
        (slow,) = add_observations(StragglerDetector(), ranks, [earlier] * len(ranks))
        assert (slow.rank, slow.phase, slow.cause) == (named, "network", "network")
        assert str(slow).startswith(f"rank {named} is slow: network 28 ms a step, others 2 ms")


def test_equal_links_are_reported_only_if_they_became_slower() -> None:
    assert not add_observations(StragglerDetector(), [SLOW_LINK] * 3, [SLOW_LINK] * 3)
    assert not add_observations(StragglerDetector(), [SLOW_LINK] * 3, [UNKNOWN] * 3)
    both = add_observations(StragglerDetector(), [SLOW_LINK] * 2, [NORMAL] * 2)
    assert [straggler.rank for straggler in both] == [0, 1]


def test_rank_that_waits_for_a_core_is_not_reported_as_a_slow_link() -> None:
    starved = SLOW["other_processes"]._replace(wait=0.02, network=0.02)
    waiting = NORMAL._replace(wait=0.04)
    (slow,) = add_observations(StragglerDetector(), [waiting, starved], [NORMAL] * 2)
    assert (slow.rank, slow.cause) == (1, "other_processes")


def test_equal_ranks_are_not_reported_if_earlier_figures_are_unknown() -> None:
    """At the start of a run, there are no earlier figures."""
    assert not add_observations(StragglerDetector(), [SLOW["forward"]] * 4, [UNKNOWN] * 4)


def test_single_slow_observation_is_not_reported() -> None:
    detector = StragglerDetector()
    assert not add_observations(detector, [WAITING, SLOW["forward"]], [NORMAL] * 2, times=1)
    assert detector.suspected_ranks == {1}
    assert not add_observations(detector, [NORMAL] * 2, [NORMAL] * 2, times=1)
    assert detector.suspected_ranks == set()


def test_baseline_excludes_slow_observations_until_there_are_60() -> None:
    earlier = RankBaseline()
    for number in range(3):
        assert earlier.median() == UNKNOWN
        earlier.add(NORMAL._replace(data=0.001 * number), is_any_rank_slow=False)
    assert earlier.median() == NORMAL._replace(data=0.001)
    for _ in range(59):
        earlier.add(SLOW["forward"], is_any_rank_slow=True)
    assert earlier.median() == NORMAL._replace(data=0.001)
    earlier.add(SLOW["forward"], is_any_rank_slow=True)
    assert earlier.median() == SLOW["forward"]


def test_report_states_rank_host_cause_figures_and_suggestion() -> None:
    detector = StragglerDetector()
    (slow,) = add_observations(detector, [WAITING, SLOW["cpu_quota"]], [NORMAL] * 2)
    assert slow.figures is not None
    evidence = describe_figures("cpu_quota", RankFigures(**slow.figures), 0.036)
    slow = detector.set_details(slow, "n3", evidence)
    assert str(detector) == "rank 1 is slow: compute 32 ms a step, others 12 ms, earlier 12 ms (CPU quota)"
    assert slow.explanation == (
        "Cause: CPU quota on host n3 (stopped for 18 ms a step, 50% of the time). "
        "Raise the CPU limit of the container or cgroup, or start fewer threads and workers."
    )
    row = slow.to_row()
    assert (row["cause"], row["host"], row["figures"]["throttled"]) == ("cpu_quota", "n3", 0.018)
    assert row["suggestion"] in slow.explanation
    assert Straggler.from_row({**row, "unknown": 1}) == slow


def test_every_cause_has_a_description() -> None:
    assert {*SLOW, "network"} == set(CAUSES)
    for cause, figures in SLOW.items():
        described = describe_figures(cause, figures, 0.036)
        assert described.endswith((" a step", "time", "core")) or cause in ("data_loading", "update")


def test_rows_of_earlier_versions_without_a_cause_are_read() -> None:
    straggler = Straggler.from_row({"rank": 1, "phase": "data", "seconds": 0.041, "others": 0.006})
    assert str(straggler) == "rank 1 is slow: data 41 ms a step, others 6 ms"
    assert straggler.explanation == ""
    assert straggler.to_row() == {"rank": 1, "phase": "data", "seconds": 0.041, "others": 0.006}


def test_description_omits_other_ranks_if_there_is_one_rank() -> None:
    own = SLOW["forward"]
    (slow,) = add_observations(StragglerDetector(), [own], [NORMAL])
    assert str(slow) == "rank 0 is slow: compute 32 ms a step, earlier 12 ms (forward pass)"
    assert "others" not in slow.to_row()
    assert Straggler.from_row(slow.to_row()).others is None


@pytest.mark.parametrize("version", [1, 2])
def test_cpu_stat_files_of_both_cgroup_versions_are_found(version: int, tmp_path: Path) -> None:
    """The quota may be set in a parent cgroup. The mount contains only the cgroups below /docker/c1."""
    mount, pod = tmp_path / "cgroup", tmp_path / "cgroup" / "pod"
    (pod / "rank").mkdir(parents=True)
    for folder in (pod, pod / "rank"):
        (folder / "cpu.stat").write_text("nr_periods 1\nnr_throttled 0\nthrottled_usec 0\n")
    if version == 1:
        membership = "5:memory:/docker/c1\n2:cpu,cpuacct:/docker/c1/pod/rank\n0::/\n"
        mounts = f"31 23 0:27 /docker/c1 {mount} rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
    else:
        membership = "0::/docker/c1/pod/rank\n"
        # The source of a mount may be empty.
        mounts = f"29 1 0:5 / / rw - tmpfs  rw\n30 23 0:26 /docker/c1 {mount} rw - cgroup2 none rw\n"
    files = find_cpu_stat_files(membership, mounts)
    assert files == [str(pod / "rank" / "cpu.stat"), str(pod / "cpu.stat")]


@pytest.mark.parametrize(
    ("files", "stat", "cores"),
    [
        ({"cpu.max": "50000 100000\n"}, "nr_throttled 3\nthrottled_usec 1500000\n", 0.5),
        ({"cpu.max": "max 100000\n"}, "nr_throttled 3\nthrottled_usec 1500000\n", None),
        (
            {"cpu.cfs_quota_us": "150000\n", "cpu.cfs_period_us": "100000\n"},
            "nr_throttled 3\nthrottled_time 1500000000\n",
            1.5,
        ),
        (
            {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"},
            "nr_throttled 3\nthrottled_time 1500000000\n",
            None,
        ),
    ],
)
def test_throttled_time_and_quota_are_read(
    files: dict[str, str], stat: str, cores: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cpu.stat"
    path.write_text("nr_throttled 0\n")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(cpu_evidence, "find_cpu_stat_files", lambda *_: [str(path)])
    monkeypatch.setattr(cpu_evidence, "_list_thread_schedstat_files", list)  # as on a kernel without schedstat
    reader = CpuReader()
    assert reader.read().throttled == 0
    path.write_text(stat)
    assert reader.read().throttled == pytest.approx(1.5)
    assert reader.read().throttled == 0
    assert reader.quota_cores() == cores


def test_files_in_proc_are_read_completely_if_several_reads_are_needed() -> None:
    """On a host with many containers, the list of mounts exceeds 4 KiB, like this list of memory mappings."""
    text = cpu_evidence._read_all("/proc/self/maps")
    assert text.find("[stack]") > 4096
    assert cpu_evidence._read_all("/proc/missing") == ""


def spin(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def test_time_that_a_thread_waits_for_a_core_is_measured() -> None:
    """Two processes share a core, which may be used by further processes on a busy machine.

    The measured interval includes the loop and a part of both readings, so two intervals bound the expected time.
    """

    def seconds_without_core(began: tuple[float, float]) -> float:
        return (time.perf_counter() - began[0]) - (time.thread_time() - began[1])

    allowed = os.sched_getaffinity(0)
    core = min(allowed)
    try:
        os.sched_setaffinity(0, {core})
        program = "print(flush=True)\nwhile True: pass"
        neighbor = subprocess.Popen([sys.executable, "-S", "-c", program], stdout=subprocess.PIPE)  # on the same core
        assert neighbor.stdout is not None
        neighbor.stdout.readline()
        reader = CpuReader()
        before_reading = time.perf_counter(), time.thread_time()
        reader.read()
        after_reading = time.perf_counter(), time.thread_time()
        spin(0.4)
        least = seconds_without_core(after_reading)
        found = reader.read()
        most, used = seconds_without_core(before_reading), time.thread_time() - before_reading[1]
    finally:
        os.sched_setaffinity(0, allowed)
        neighbor.kill()
        neighbor.communicate()
    assert 0.75 * least <= found.run_queue <= 1.25 * most
    assert found.run_queue > 0.04
    assert found.used <= used + 0.1


def test_busy_processes_are_described_with_their_use_of_a_core() -> None:
    before = ProcessTimes(10.0, {7: (1.0, "python3"), 8: (2.0, "sshd"), 9: (0.0, "make")})
    after = ProcessTimes(12.0, {7: (2.9, "python3"), 8: (2.01, "sshd"), 9: (1.0, "make"), 10: (5.0, "new")})
    assert after.describe_since(before) == (
        "python3 (process 7) used 95% of a core, make (process 9) used 50% of a core"
    )
    read = ProcessTimes.read()
    assert os.getpid() not in read.seconds_and_names
    assert os.getppid() in read.seconds_and_names or len(os.sched_getaffinity(0)) < (os.cpu_count() or 1)


def test_connection_counters_are_read_without_changing_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_evidence, "_find_remote_peer", lambda _: "10.0.0.2")
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    reader = ConnectionReader()
    reader._find_connections()
    client.setblocking(True)
    reader.read()
    received = threading.Thread(target=lambda: accepted.recv(1 << 20, socket.MSG_WAITALL))
    received.start()
    client.sendall(bytes(1 << 20))
    received.join()
    deadline = time.monotonic() + 10
    counters = None
    while time.monotonic() < deadline:  # wait until the data is acknowledged
        counters = network_evidence.read_connection(client.fileno())
        if counters is not None and counters.sent_bytes >= 1 << 20:
            break
    assert counters is not None
    assert (counters.peer, counters.sent_bytes) == ("10.0.0.2", (1 << 20) + 1)  # TCP counts the SYN
    assert client.getblocking()
    assert reader.read() is not None
    client.close()
    accepted.close()
    assert network_evidence.read_connection(server.fileno()) is None


def test_connections_within_the_host_are_ignored() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
    with client:
        assert network_evidence.read_connection(client.fileno()) is None


def test_connection_is_described_with_rate_and_round_trip() -> None:
    change = ConnectionCounters("10.0.0.2", 3.0, 40_000_000, 7, 0.041).since(
        ConnectionCounters("10.0.0.2", 1.0, 20_000_000, 4, 0.001)
    )
    assert str(change) == "to 10.0.0.2: 10 MB/s while sending, round trip 41 ms, 3 retransmissions"


def test_stall_outside_measured_steps_is_added_to_the_phase_that_explains_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU quota stops a rank for 30 ms in every third step of 20 ms, but not in the steps with measured phases."""
    timer = LoopTimer(LocalBackend(torch.device("cpu")))
    clock = [0.0]
    monkeypatch.setattr("unitrain.progress.timing.time.perf_counter", lambda: clock[0])
    timer.start()
    evidence = RankEvidence(timer)
    evidence.take_recent_measurements()
    monkeypatch.setattr(evidence._cpu, "read", lambda: CpuSeconds(run_queue=1.0, throttled=0.9))
    for number in range(STEPS):
        clock[0] += 0.02 + (0.03 if number % 3 == 0 else 0.0)
        timer.end_step(1)
    timer._recent_steps.clear()
    timer._recent_steps.append({"compute": 0.018, "forward": 0.01, "wait": 0.001, "update": 0.001})
    evidence._last_reading_time = -1e9
    seconds, steps, row = evidence.take_recent_measurements()
    assert steps == STEPS
    assert seconds[TRAINING.index("compute")] == pytest.approx(1.8 + 0.9)  # throttling explains 0.9 of 1.02 s of stalls
    found = dict(zip(EVIDENCE, row, strict=False))
    assert found["throttled"] == 0.9
    assert found["cpu_wait"] == pytest.approx(0.1)
    assert found["forward"] == pytest.approx(1.0)


def test_phases_are_not_longer_than_the_steps_after_a_slowdown_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = LoopTimer(LocalBackend(torch.device("cpu")))
    clock = [0.0]
    monkeypatch.setattr("unitrain.progress.timing.time.perf_counter", lambda: clock[0])
    timer.start()
    for _ in range(STEPS):
        clock[0] += 0.02
        timer.end_step(1)
    timer._recent_steps.clear()
    timer._recent_steps.append({"compute": 0.06, "forward": 0.04, "wait": 0.02, "update": 0.02})  # a slow step
    seconds, _ = timer.take_recent_seconds()
    assert seconds == pytest.approx([0.0, 1.2, 0.4, 0.4])
    assert timer.recent.forward == pytest.approx(0.8)
    assert (timer.recent.elapsed, timer.recent.unexplained) == pytest.approx((2.0, 0.0))


def test_evidence_covers_an_observation_that_the_phases_of_another_rank_end(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = LoopTimer(LocalBackend(torch.device("cpu")))
    clock = [0.0]
    for module in ("timing", "rank_evidence"):
        monkeypatch.setattr(f"unitrain.progress.{module}.time.perf_counter", lambda: clock[0])
    timer.start()
    evidence = RankEvidence(timer)
    evidence.take_recent_measurements()
    monkeypatch.setattr(evidence._cpu, "read", lambda: CpuSeconds(run_queue=0.5))
    for _ in range(38):
        clock[0] += 0.025
        timer.end_step(1)
    timer._recent_steps.clear()
    timer._recent_steps.append({"compute": 0.01, "wait": 0.001, "update": 0.001})  # half of the duration of a step
    *_, row = evidence.take_recent_measurements()
    assert dict(zip(EVIDENCE, row, strict=False))["cpu_wait"] == 0.5


class Event:
    """A simulated CUDA event. It is complete if `seconds` is not None."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds

    def query(self) -> bool:
        return self.seconds is not None

    def elapsed_time(self, other: Event) -> float:
        assert self.seconds is not None
        assert other.seconds is not None
        return 1000 * (other.seconds - self.seconds)


def test_only_completed_events_are_used_to_time_copies() -> None:
    timer = LoopTimer(LocalBackend(torch.device("cpu")))
    complete = [(Event(1.0), Event(1.004)), (Event(2.0), Event(2.002))]
    timer._recent_copies.append(complete)  # type: ignore[arg-type]
    timer._recent_copies.append([(Event(3.0), Event(None))])  # type: ignore[list-item]
    timer._steps = 50
    timer.take_recent_seconds()
    assert timer.recent.copy == pytest.approx(50 * 0.006)


def test_copy_that_delays_the_gpu_is_counted_as_data_time(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = LoopTimer(LocalBackend(torch.device("cpu")))
    clock = [0.0]
    monkeypatch.setattr("unitrain.progress.timing.time.perf_counter", lambda: clock[0])
    timer.start()
    evidence = RankEvidence(timer)
    evidence.take_recent_measurements()
    monkeypatch.setattr(evidence._cpu, "read", CpuSeconds)
    for _ in range(STEPS):
        clock[0] += 0.04
        timer.end_step(1)
    timer._recent_steps.clear()
    timer._recent_copies.clear()
    timer._recent_steps.append({"compute": 0.018, "wait": 0.001, "update": 0.001})
    timer._recent_copies.append([(Event(0.0), Event(0.03))])  # type: ignore[list-item]
    evidence._last_reading_time = -1e9
    seconds, *_ = evidence.take_recent_measurements()
    assert seconds[TRAINING.index("data")] == pytest.approx(2.0)  # 20 of 40 ms per step are not measured


@pytest.mark.parametrize(
    ("observed_seconds", "interval"),
    [(0.0, rank_evidence._INTERVAL_SECONDS), (1.0, rank_evidence._INTERVAL_SECONDS_AT_END)],
)
def test_evidence_is_read_more_often_at_the_end_of_an_observation(
    observed_seconds: float, interval: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("unitrain.progress.rank_evidence.time.perf_counter", lambda: clock[0])
    evidence = RankEvidence(LoopTimer(LocalBackend(torch.device("cpu"))))
    reads = 0
    for _ in range(1000):  # 10 s in steps of 10 ms
        if evidence._is_reading_due(observed_seconds):
            evidence._read_counters()
            reads += 1
        clock[0] += 0.01
    assert reads == pytest.approx(10 / interval, rel=0.1)


def test_observations_of_an_earlier_fit_call_are_discarded() -> None:
    backend = LocalBackend(torch.device("cpu"))
    stopping = StopCoordinator(backend, max_seconds=None, signals=())
    synchronizer = RankSynchronizer(backend, stopping, LoopTimer(backend), mock.Mock())
    detectors = []
    for _ in range(2):
        with stopping:
            for _ in range(2):  # epochs
                synchronizer.start_timing(0)
                detectors.append(synchronizer._detector)
    assert detectors[0] is detectors[1] is not detectors[2] is detectors[3]
