"""The state and the log of a Kubeflow job (TrainJob, PyTorchJob or MPIJob), for `following.follow`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from unitrain.launchers import LaunchError
from unitrain.launchers.translation.kubernetes import KINDS, check_namespace, is_object_name
from unitrain.processes import parent_death_signal_setter
from unitrain.supervisor.following import FollowedJob, JobGoneError, JobStatus, UnreachableError, run_client

_RESOURCES = {
    "TrainJob": "trainjobs.trainer.kubeflow.org",
    "PyTorchJob": "pytorchjobs.kubeflow.org",
    "MPIJob": "mpijobs.kubeflow.org",
}
# The label of a pod that contains the name of its job. A TrainJob creates a JobSet with the same name.
_JOB_LABELS = {
    "TrainJob": "jobset.sigs.k8s.io/jobset-name",
    "PyTorchJob": "training.kubeflow.org/job-name",
    "MPIJob": "training.kubeflow.org/job-name",
}
# Labels that identify the pod whose log is shown: the pod of the launcher, which prints the output of all ranks, or the
# pod of rank 0.
_LOG_POD_LABELS = (
    {"jobset.sigs.k8s.io/replicatedjob-name": "launcher"},
    {"jobset.sigs.k8s.io/replicatedjob-name": "node", "batch.kubernetes.io/job-completion-index": "0"},
    {"training.kubeflow.org/replica-type": "master"},
    {"training.kubeflow.org/job-role": "launcher"},
)
_SUCCEEDED, _FAILED = ("Complete", "Succeeded"), ("Failed",)
_CHUNK_BYTES = 1 << 16
_SHOWN_CHARACTERS = 100


class KubernetesJob(FollowedJob):
    """A job of one of `kubernetes.KINDS` in a namespace, or in the default namespace of kubectl."""

    def __init__(self, name: str, kind: str = KINDS[0], namespace: str | None = None) -> None:
        if kind not in KINDS:
            raise LaunchError(f"--kind must be one of {', '.join(KINDS)}, got {kind!r}. Use: --kind {KINDS[0]}")
        if not is_object_name(name):
            raise LaunchError(
                f"JOB must be a name of lowercase letters, digits, dashes and dots, got {name!r}. List the names with: "
                f"kubectl get {kind.lower()}s"
            )
        if namespace is not None:
            check_namespace(namespace)
        self.name = f"{kind} {name}"
        self._job_name, self._kind = name, kind
        self._namespace = ("--namespace", namespace) if namespace is not None else ()
        options = "".join(f" {word}" for word in self._namespace)
        kind_option = f" --kind {kind}" if kind != KINDS[0] else ""
        self.follow_command = f"unitrain follow --to kubernetes{kind_option}{options} {name}"
        self.cancel_command = f"kubectl delete {_RESOURCES[kind]} {name}{options}"
        self._pod: Mapping[str, Any] | None = None
        self._log = _PodLog(self._namespace)

    @staticmethod
    def from_manifest(text: str) -> KubernetesJob:
        """Return the job of a manifest that unitrain has written."""
        manifest = yaml.safe_load(text)
        metadata = manifest["metadata"]
        return KubernetesJob(metadata["name"], manifest["kind"], metadata.get("namespace"))

    def read_status(self) -> JobStatus:
        job = self._kubectl_get(_RESOURCES[self._kind], self._job_name)
        if job is None:
            raise JobGoneError(f"{self.name} was deleted, so its exit code is unknown")
        pods = self._kubectl_get("pods", "--selector", f"{_JOB_LABELS[self._kind]}={self._job_name}")
        pods_by_age = sorted((pods or {}).get("items", ()), key=lambda pod: pod["metadata"]["creationTimestamp"])
        log_pods = [pod for pod in pods_by_age if _is_log_pod(pod)]
        self._pod = log_pods[-1] if log_pods else None  # the newest, after a restart
        conditions = {
            condition["type"]: condition
            for condition in job.get("status", {}).get("conditions", ())
            if condition["status"] == "True"
        }
        if any(name in conditions for name in _SUCCEEDED):
            return JobStatus("has completed", 0)
        failed = next((conditions[name] for name in _FAILED if name in conditions), None)
        if failed is not None:
            code = next((code for code in map(_exit_code, [*reversed(log_pods), *pods_by_age]) if code), 1)
            return JobStatus(f"has failed ({_reason(failed)}), with exit code {code}", code)
        if "Suspended" in conditions:
            return JobStatus(f"is suspended ({_reason(conditions['Suspended'])})")
        waiting = [(pod["metadata"]["name"], reason) for pod in pods_by_age if (reason := _waiting_reason(pod))]
        restarts = sum(status.get("restartCount", 0) for pod in pods_by_age for status in _container_statuses(pod))
        restarts_text = f", {restarts} container restart{'s' if restarts > 1 else ''}" if restarts else ""
        if not pods_by_age:
            return JobStatus("is pending (no pods yet)")
        if waiting:
            return JobStatus(f"is pending ({waiting[0][0]}: {waiting[0][1]}){restarts_text}")
        nodes = dict.fromkeys(pod["spec"].get("nodeName", "unknown node") for pod in pods_by_age)
        return JobStatus(f"is running on {', '.join(nodes)}{restarts_text}")

    def copy_log(self) -> bool:
        return self._log.print_new_lines(self._pod)

    def close(self) -> None:
        self._log.close()

    def _kubectl_get(self, *words: str) -> dict[str, Any] | None:
        """Return the JSON output of `kubectl get`, or None if the object does not exist. Raises UnreachableError."""
        process = run_client(["kubectl", "get", *words, *self._namespace, "--output", "json"])
        if process.returncode == 0:
            try:
                response = json.loads(process.stdout)
            except ValueError:
                response = None
            if not isinstance(response, dict):
                raise UnreachableError(f"kubectl printed no JSON object: {process.stdout[:_SHOWN_CHARACTERS]!r}")
            return response
        if "(NotFound)" in process.stderr:
            return None
        raise UnreachableError(process.stderr.strip() or f"kubectl exited with {process.returncode}")


class _PodLog:
    """The log of a pod, which `kubectl logs --follow` writes to a pipe.

    kubectl ends when the container ends, when the log is rotated, and when it loses its connection. It is then started
    again, from the timestamp of the last line. A last line without a newline may be the start of a longer one. It is
    written if kubectl prints it twice in succession, or when the log is closed.
    """

    def __init__(self, namespace: Sequence[str]) -> None:
        self._namespace = namespace
        self._process: subprocess.Popen[bytes] | None = None
        self._buffered_bytes = b""
        self._unwritten = b""  # the last line without a newline that the previous kubectl printed
        self._last_time = b""
        self._lines_at_last_time: set[bytes] = set()

    def print_new_lines(self, pod: Mapping[str, Any] | None) -> bool:
        """Write new lines to standard output, and return whether there were any."""
        if self._process is None:
            if pod is None or not _has_log(pod):
                return False
            since = ["--since-time", self._last_time.decode()] if self._last_time else []
            self._process = subprocess.Popen(
                ["kubectl", "logs", "--follow", "--timestamps", *since, *self._namespace, pod["metadata"]["name"]],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                preexec_fn=parent_death_signal_setter(signal.SIGTERM),
            )  # fmt: skip
            assert self._process.stdout is not None
            os.set_blocking(self._process.stdout.fileno(), False)
        is_new = False
        assert self._process.stdout is not None
        while True:
            try:
                chunk = os.read(self._process.stdout.fileno(), _CHUNK_BYTES)
            except BlockingIOError:
                break
            if not chunk:
                if self._buffered_bytes == self._unwritten:
                    is_new |= self._write_incomplete(self._buffered_bytes)
                self._unwritten = self._buffered_bytes
                self._stop()
                break
            *lines, self._buffered_bytes = (self._buffered_bytes + chunk).split(b"\n")
            for line in lines:
                is_new |= self._write(line)
        return is_new

    def close(self) -> None:
        """Terminate kubectl, and write the last line if it has no newline."""
        self._write_incomplete(self._buffered_bytes or self._unwritten)
        self._stop()

    def _stop(self) -> None:
        self._buffered_bytes = b""
        if self._process is None:
            return
        process, self._process = self._process, None
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        assert process.stdout is not None
        process.stdout.close()
        process.wait()

    def _write_incomplete(self, line: bytes) -> bool:
        """Write a line that kubectl printed without a newline, unless it was cut off within its timestamp or is a
        prefix of a line that has already been written."""
        if b" " not in line or any(written.startswith(line) for written in self._lines_at_last_time):
            return False
        return self._write(line)

    def _write(self, line: bytes) -> bool:
        """Write a line without its timestamp, unless it was written before kubectl was started again."""
        time, _, text = line.partition(b" ")
        if time < self._last_time or (time == self._last_time and line in self._lines_at_last_time):
            return False
        if time != self._last_time:
            self._last_time = time
            self._lines_at_last_time.clear()
        self._lines_at_last_time.add(line)
        sys.stdout.flush()
        sys.stdout.buffer.write(text + b"\n")
        sys.stdout.buffer.flush()
        return True


def _is_log_pod(pod: Mapping[str, Any]) -> bool:
    labels = pod["metadata"].get("labels", {})
    return any(expected.items() <= labels.items() for expected in _LOG_POD_LABELS)


def _container_statuses(pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    statuses: list[dict[str, Any]] = pod.get("status", {}).get("containerStatuses", [])
    return statuses


def _has_log(pod: Mapping[str, Any]) -> bool:
    return any({"running", "terminated"} & status.get("state", {}).keys() for status in _container_statuses(pod))


def _exit_code(pod: Mapping[str, Any]) -> int:
    """Return the exit code of a container that failed, or 0."""
    states = [status.get(key, {}) for status in _container_statuses(pod) for key in ("state", "lastState")]
    return next((code for state in states if (code := state.get("terminated", {}).get("exitCode", 0))), 0)


def _waiting_reason(pod: Mapping[str, Any]) -> str:
    """Return the reason why a pod does not run, such as ImagePullBackOff or Unschedulable, or an empty string."""
    for status in _container_statuses(pod):
        if "waiting" in status.get("state", {}):
            return _reason(status["state"]["waiting"])
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _reason(condition)
    return "Pending" if pod.get("status", {}).get("phase") == "Pending" else ""


def _reason(condition: Mapping[str, Any]) -> str:
    reason, message = condition.get("reason", "unknown reason"), condition.get("message", "")
    return f"{reason}: {message}" if message else reason
