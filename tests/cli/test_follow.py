"""`unitrain submit --follow` and `unitrain follow` with fake clients of Slurm and Kubernetes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fake_programs import write_program

from unitrain.cli import unitrain
from unitrain.supervisor import following, kubernetes_job
from unitrain.supervisor.slurm_job import SlurmJob

# A fake kubectl that prints the files NUMBER.TYPE.json in its folder. Each `get` of the job increments the number.
# `logs --follow` prints at most three lines of the file `log`, starting at --since-time.
KUBECTL = f"""exec {sys.executable} -I -S - "$@" <<'END'
import os, pathlib, sys

folder = pathlib.Path(os.environ["FAKE_CLUSTER"])
words = sys.argv[1:]
with (folder / "calls").open("a") as calls:
    calls.write(" ".join(words) + chr(10))
if words[0] == "apply":
    print("trainjob.trainer.kubeflow.org/train created")
elif words[0] == "logs":
    since = words[words.index("--since-time") + 1] if "--since-time" in words else ""
    lines = [line for line in (folder / "log").read_text().splitlines() if line.split()[0] >= since]
    print("".join(line + chr(10) for line in lines[:3]), end="")
else:
    kind = "pods" if words[1] == "pods" else "job"
    number = int((folder / "number").read_text())
    if kind == "job":
        number += 1
        (folder / "number").write_text(str(number))
    answer = folder / f"{{number}}.{{kind}}.json"
    if not answer.exists():
        sys.exit("Error from server (NotFound): not found")
    text = answer.read_text()
    if text.startswith("error"):
        sys.exit(text)
    print(text)
END"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("_LOG_SECONDS", "_FIRST_STATE_SECONDS", "_MAX_STATE_SECONDS", "_LAST_LOG_SECONDS"):
        monkeypatch.setattr(following, name, 0.01)
    folder = tmp_path / "cluster"
    folder.mkdir()
    (folder / "number").write_text("0")
    (folder / "log").write_text("")
    write_program(folder, "kubectl", KUBECTL)
    monkeypatch.setenv("FAKE_CLUSTER", str(folder))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    print_new_lines = kubernetes_job._PodLog.print_new_lines

    def print_after_kubectl_exits(log: kubernetes_job._PodLog, pod: Mapping[str, Any] | None) -> bool:
        """Wait until kubectl exits, and print its complete output."""
        is_new = print_new_lines(log, pod)
        if log._process is not None:
            os.waitid(os.P_PID, log._process.pid, os.WEXITED | os.WNOWAIT)
            is_new |= print_new_lines(log, pod)
        return is_new

    monkeypatch.setattr(kubernetes_job._PodLog, "print_new_lines", print_after_kubectl_exits)
    return folder


def pod(index: int, phase: str, **status: Any) -> dict[str, Any]:
    labels = {
        "jobset.sigs.k8s.io/replicatedjob-name": "node",
        "batch.kubernetes.io/job-completion-index": str(index),
    }
    metadata = {"name": f"train-node-0-{index}", "labels": labels, "creationTimestamp": "2026-01-01T00:00:00Z"}
    spec = {} if phase == "Pending" else {"nodeName": f"host{index}"}
    return {"metadata": metadata, "spec": spec, "status": {"phase": phase, **status}}


def container(state: str, **fields: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"state": {state: fields}, "restartCount": 0}]}


def set_responses(cluster: Path, *polls: tuple[dict[str, Any] | str, list[dict[str, Any]]]) -> None:
    """Set the responses to successive queries of the job and of its pods."""
    for number, (job, pods) in enumerate(polls, start=1):
        text = job if isinstance(job, str) else json.dumps(job)
        (cluster / f"{number}.job.json").write_text(text)
        (cluster / f"{number}.pods.json").write_text(json.dumps({"items": pods}))


def conditions(**types: str) -> dict[str, Any]:
    found = [{"type": name, "status": "True", "reason": reason} for name, reason in types.items()]
    return {"status": {"conditions": found}}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(unitrain, arguments)


def printed_states(result: Result) -> list[str]:
    return [line.removeprefix("unitrain: ") for line in result.stderr.splitlines() if line.startswith("unitrain: ")]


def test_submit_follows_a_trainjob_until_it_fails(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "_LAST_LOG_SECONDS", 3.0)
    unschedulable = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPUs"}]
    running = [pod(index, "Running", **container("running")) for index in (0, 1)]
    failed = [pod(rank, "Failed", **container("terminated", exitCode=code)) for rank, code in ((0, 1), (1, 3))]
    (cluster / "log").write_text("".join(f"2026-01-01T00:00:0{second}Z line {second}\n" for second in range(6)))
    set_responses(
        cluster,
        ({}, []),
        ({}, [pod(0, "Pending", conditions=unschedulable), running[1]]),
        ("error: connection refused", []),
        ({}, [pod(0, "Pending", **container("waiting", reason="ImagePullBackOff")), running[1]]),
        *[({}, running)] * 3,
        *[(conditions(Failed="JobFailed"), failed)] * 2,
    )
    result = run("submit", "--to", "kubernetes", "--follow", "--namespace", "team", "--image", "a", "train.py")
    assert result.exit_code == 1, result.output
    assert printed_states(result) == [
        "TrainJob train is pending (no pods yet)",
        "TrainJob train is pending (train-node-0-0: Unschedulable: no GPUs)",
        "the scheduler does not respond, retrying: error: connection refused",
        "the scheduler responds again",
        "TrainJob train is pending (train-node-0-0: ImagePullBackOff)",
        "TrainJob train is running on host0, host1",
        "TrainJob train has failed (JobFailed), with exit code 1",
    ]
    # kubectl exits after three lines, and its next call repeats the last of these lines.
    log = [line for line in result.stdout.splitlines() if line.startswith("line ")]
    assert log == [f"line {second}" for second in range(6)]
    calls = (cluster / "calls").read_text().splitlines()
    assert calls[0] == "apply -f -"
    assert "get trainjobs.trainer.kubeflow.org train --namespace team --output json" in calls
    assert "get pods --selector jobset.sigs.k8s.io/jobset-name=train --namespace team --output json" in calls
    assert "logs --follow --timestamps --namespace team train-node-0-0" in calls


@pytest.mark.parametrize("cut", ["T00:00:01Z line 1", "T00:00:01Z li", "T00:00:01Z", "T00:00:01Z line 1.\n2026"])
def test_lines_truncated_by_a_lost_connection_are_printed_once(
    cut: str, cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_LAST_LOG_SECONDS", 1.0)
    log = "".join(f"2026-01-01T00:00:0{second}Z line {second}.\n" for second in range(4))
    (cluster / "log").write_text(log)
    first = log[: log.index(cut) + len(cut)]
    kubectl = KUBECTL.replace(
        "    since = words[",
        f"""
    if not (folder / "cut").exists():
        (folder / "cut").touch()
        print({first!r}, end="")
        sys.exit()
    since = words[""",
    )
    write_program(cluster, "kubectl", kubectl)
    running = [pod(0, "Running", **container("running"))]
    set_responses(cluster, ({}, running), (conditions(Complete="Done"), running))
    result = run("follow", "--to", "kubernetes", "train")
    assert result.exit_code == 0, result.output
    assert [line for line in result.stdout.splitlines() if not line.startswith("unitrain: ")] == [
        f"line {second}." for second in range(4)
    ]


def test_incomplete_last_line_is_printed_once(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "_LAST_LOG_SECONDS", 1.0)
    kubectl = 'print("".join(line + chr(10) for line in lines[:3]), end="")'
    assert kubectl in KUBECTL
    write_program(cluster, "kubectl", KUBECTL.replace(kubectl, 'print(chr(10).join(lines), end="")'))
    (cluster / "log").write_text("2026-01-01T00:00:00Z line 0\n2026-01-01T00:00:01Z line 1")
    running = [pod(0, "Running", **container("running"))]
    set_responses(cluster, ({}, running), (conditions(Complete="Done"), running))
    result = run("follow", "--to", "kubernetes", "train")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-2:] == ["line 0", "line 1"]
    assert result.stdout.count("line") == 2


@pytest.mark.parametrize(
    ("kind", "resource", "succeeded"),
    [
        ("TrainJob", "trainjobs.trainer.kubeflow.org", "Complete"),
        ("PyTorchJob", "pytorchjobs.kubeflow.org", "Succeeded"),
        ("MPIJob", "mpijobs.kubeflow.org", "Succeeded"),
    ],
)
def test_follow_of_a_completed_job_exits_with_0(kind: str, resource: str, succeeded: str, cluster: Path) -> None:
    set_responses(cluster, (conditions(Created="JobCreated", **{succeeded: "Done"}), []))
    result = run("follow", "--to", "kubernetes", "--kind", kind, "train")
    assert (result.exit_code, printed_states(result)) == (0, [f"{kind} train has completed"])
    assert f"get {resource} train --output json" in (cluster / "calls").read_text()


def test_follow_reports_a_deleted_job(cluster: Path) -> None:
    set_responses(cluster, ({}, []))
    result = run("follow", "--to", "kubernetes", "train")
    assert result.exit_code == 1
    assert printed_states(result)[-1] == "TrainJob train was deleted, so its exit code is unknown"


def test_follow_stops_if_the_scheduler_does_not_respond(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "_UNREACHABLE_LIMIT_SECONDS", 0.2)
    set_responses(cluster, *[("error: connection refused", [])] * 200)
    result = run("follow", "--to", "kubernetes", "train")
    assert result.exit_code == 1
    assert printed_states(result) == [
        "the scheduler does not respond, retrying: error: connection refused",
        "TrainJob train is no longer followed. Follow it again with: unitrain follow --to kubernetes train",
    ]


def test_log_file_may_be_created_late_truncated_and_replaced(
    cluster: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    log = cluster / "my log.out"
    text = f"JobId=7 JobName=a\n   JobState=RUNNING Reason=None\n   NodeList=n[1-2]\n   StdOut={log}\n"
    (cluster / "show").write_text(text)
    write_program(cluster, "scontrol", f"cat {cluster}/show")
    job = SlurmJob("7")
    assert job.read_status().text == "is running on n[1-2]"
    assert not job.copy_log()

    def copy_and_read_output() -> bytes:
        assert job.copy_log()
        assert not job.copy_log()
        return capfdbinary.readouterr().out

    log.write_bytes(b"one\n\xff")
    assert copy_and_read_output() == b"one\n\xff"
    with log.open("ab") as file:
        file.write(b"two\n")
    assert copy_and_read_output() == b"two\n"
    log.write_bytes(b"3\n")  # truncates the file
    assert copy_and_read_output() == b"3\n"
    with log.open("ab") as file:
        file.write(b"rest\n")
    log.rename(cluster / "rotated")
    log.write_bytes(b"a longer text in a new file\n")
    assert copy_and_read_output() == b"rest\na longer text in a new file\n"


@pytest.mark.parametrize(
    ("state", "code", "expected", "text"),
    [
        ("COMPLETED", "0:0", 0, "has completed"),
        ("FAILED", "75:0", 75, "has failed, with exit code 75"),
        ("CANCELLED", "0:15", 143, "was cancelled, with exit code 143"),
        ("TIMEOUT", "0:0", 1, "has reached its time limit, with exit code 1"),
        ("OUT_OF_MEMORY", "0:125", 253, "has ended as OUT_OF_MEMORY, with exit code 253"),
    ],
)
@pytest.mark.parametrize("is_removed", [False, True], ids=["controller", "accounting"])
def test_follow_returns_the_exit_code_of_a_slurm_job(
    state: str, code: str, expected: int, text: str, is_removed: bool, cluster: Path
) -> None:
    shown = f"echo 'JobId=7 JobState={state} Reason=None ExitCode={code}'"
    gone = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    write_program(cluster, "scontrol", gone if is_removed else shown)
    write_program(cluster, "sacct", f"echo '{state} by 0|{code}'")
    result = run("follow", "--to", "slurm", "7")
    assert (result.exit_code, printed_states(result)) == (expected, [f"job 7 {text}"])


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("sacct: error: Problem talking to the database: Connection refused", "has completed"),
        ("Slurm accounting storage is disabled", "exit code is unknown"),
    ],
)
def test_failed_call_of_sacct_is_retried_unless_accounting_is_disabled(
    error: str, expected: str, cluster: Path
) -> None:
    write_program(cluster, "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    success = f"[ -e {cluster}/called ] && echo 'COMPLETED|0:0' && exit"
    write_program(cluster, "sacct", f"{success}; touch {cluster}/called; echo '{error}' >&2; exit 1")
    result = run("follow", "--to", "slurm", "7")
    is_retried = "disabled" not in error
    assert result.exit_code == (0 if is_retried else 1)
    retries = [f"the scheduler does not respond, retrying: {error}", "the scheduler responds again"]
    found = printed_states(result)
    assert found[:-1] == (retries if is_retried else [])
    assert found[-1].endswith(expected)


@pytest.mark.parametrize("file_type", ["folder", "fifo"])
def test_log_that_is_not_a_regular_file_is_reported(file_type: str, cluster: Path) -> None:
    log = cluster / "log.out"
    if file_type == "folder":
        log.mkdir()
    else:
        os.mkfifo(log)
    write_program(cluster, "scontrol", f"echo 'JobId=7 JobState=COMPLETED ExitCode=0:0'; echo '   StdOut={log}'")
    result = run("follow", "--to", "slurm", "7")
    assert (result.exit_code, result.stdout) == (0, "")
    assert printed_states(result) == [
        f"{log} is not a regular file, so its content is not shown",
        "job 7 has completed",
    ]


def test_job_name_that_looks_like_a_state_is_ignored(cluster: Path) -> None:
    state = "JobState=FAILED Reason=None"
    write_program(cluster, "scontrol", f"echo 'JobId=7 JobName=a JobState=COMPLETED'; echo '   {state} ExitCode=3:0'")
    result = run("follow", "--to", "slurm", "7")
    assert (result.exit_code, printed_states(result)) == (3, ["job 7 has failed, with exit code 3"])


def test_follow_exits_even_if_the_log_of_a_completed_job_grows(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "_MAX_LAST_LOG_SECONDS", 0.2)
    monkeypatch.setattr(following, "_LAST_LOG_SECONDS", 0.1)

    class Growing(SlurmJob):
        def read_status(self) -> following.JobStatus:
            return following.JobStatus("has completed", 0)

        def copy_log(self) -> bool:
            assert time.monotonic() < deadline
            return True

    deadline = time.monotonic() + 30
    assert following.follow(Growing("7")) == 0


def test_query_is_repeated_if_the_output_of_the_client_is_invalid(cluster: Path) -> None:
    (cluster / "1.job.json").write_text("<html>proxy</html>")
    (cluster / "2.job.json").write_text(
        json.dumps({"status": {"conditions": [{"type": "Complete", "status": "True"}]}})
    )
    (cluster / "2.pods.json").write_text(json.dumps({"items": []}))
    result = run("follow", "--to", "kubernetes", "train")
    assert (result.exit_code, printed_states(result)[-1]) == (0, "TrainJob train has completed")
    assert "kubectl printed no JSON object: '<html>proxy" in result.stderr


def test_client_that_cannot_be_started_is_reported(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cluster / "scontrol").mkdir()
    monkeypatch.setenv("PATH", str(cluster))
    result = run("follow", "--to", "slurm", "7")
    assert result.exit_code == 2
    assert "scontrol cannot be started" in result.stderr


@pytest.mark.ci
def test_kubectl_exits_if_follow_is_killed(cluster: Path) -> None:
    running_pod = pod(0, "Running", **container("running"))
    (cluster / "job.json").write_text("{}")
    (cluster / "pods.json").write_text(json.dumps({"items": [running_pod]}))
    pid_file = cluster / "pid"
    write_program(
        cluster, "kubectl",
        f'case "$1 $2" in logs*) echo $$ > {pid_file}; exec sleep 100;; "get pods") cat {cluster}/pods.json;; '
        f"*) cat {cluster}/job.json;; esac",
    )  # fmt: skip
    command = [sys.executable, "-m", "unitrain", "follow", "--to", "kubernetes", "train"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: pid_file.exists() and pid_file.read_text() != "")
    finally:
        process.kill()
        process.wait()
    pid = int(pid_file.read_text())
    try:
        wait_for(lambda: not is_running(pid))
    finally:
        if is_running(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # ProcessLookupError: it exited after `open`
        return False


def test_follow_polls_slurm_rarely(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Polling for a job that is pending for hours must not load the Slurm controller."""
    monkeypatch.undo()
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    times = []

    class Pending(SlurmJob):
        def read_status(self) -> following.JobStatus:
            times.append(clock[0])
            return following.JobStatus("has completed", 0) if clock[0] > 3600 else following.JobStatus("is pending")

    assert following.follow(Pending("7")) == 0
    assert 300 <= len(times) <= 370


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("follow --to slrum 7", "Unknown scheduler 'slrum'. Did you mean 'slurm'? Available: slurm, kubernetes."),
        (
            "follow --to slurm train",
            "JOB must be the number of a Slurm job, got 'train'. Use the number that sbatch printed",
        ),
        (
            "follow --to slurm --kind MPIJob 7",
            "--kind MPIJob is an option for kubernetes, but --to is slurm. Leave --kind out",
        ),
        (
            "follow --to kubernetes --cluster a train",
            "--cluster a is an option for slurm, but --to is kubernetes. Leave --cluster out",
        ),
        (
            "follow --to kubernetes --kind Job train",
            "--kind must be one of TrainJob, PyTorchJob, MPIJob, got 'Job'. Use: --kind TrainJob",
        ),
        (
            "follow --to kubernetes -- --all",
            "JOB must be a name of lowercase letters, digits, dashes and dots, got '--all'. List the names with: "
            "kubectl get trainjobs",
        ),
        (
            "follow --to kubernetes --kind PyTorchJob pod/train",
            "JOB must be a name of lowercase letters, digits, dashes and dots, got 'pod/train'. List the names with: "
            "kubectl get pytorchjobs",
        ),
        (
            "follow --to kubernetes --namespace Team train",
            "--namespace must have at most 63 lowercase letters, digits and dashes, got 'Team'. "
            "List the names with: kubectl get namespaces",
        ),
        (
            "submit --to kubernetes --namespace team.a train.py",
            "--namespace must have at most 63 lowercase letters, digits and dashes, got 'team.a'. "
            "List the names with: kubectl get namespaces",
        ),
        (
            "follow --to slurm --cluster=--local 7",
            "--cluster must be the name of a Slurm cluster, got '--local'. List them with: sacctmgr show cluster",
        ),
        (
            "submit --to slurm --follow --array=1-3 train.py",
            "--follow shows one job, but --array=1-3 submits several. Leave --follow out",
        ),
    ],
    ids=str,
)
def test_invalid_arguments_are_reported_with_a_fix(arguments: str, message: str, cluster: Path) -> None:
    result = run(*arguments.split())
    assert result.exit_code == 2, result.output
    assert result.stderr.rpartition("\nError: ")[2].strip() == message
