"""A Slurm job that `following.follow` can follow: its state and log."""

from __future__ import annotations

import os
import re
import stat
import sys
from pathlib import Path

import click

from unitrain.launchers import LaunchError
from unitrain.supervisor.following import FollowedJob, JobGoneError, JobStatus, UnreachableError, run_client

_SUBMITTED_PATTERN = re.compile(r"^Submitted batch job (\d+)(?: on cluster (\S+))?", re.MULTILINE)
_FINAL_STATES = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
}  # fmt: skip
# In the output of scontrol, most values end at a space; paths extend to the end of the line.
_WORD_PATTERN = r"(?:^|\s){}=(\S*)"
_LINE_PATTERN = r"^\s*{}=(.*)$"
# The name of the job may contain any characters. It is removed before the other fields are searched.
_NAME_PATTERN = re.compile(r" JobName=.*$", re.MULTILINE)
_CLUSTER_PATTERN = re.compile(r"\w[\w.-]*", re.ASCII)
_CHUNK_BYTES = 1 << 16


class SlurmJob(FollowedJob):
    """A batch job. `cluster` is its cluster (option -M of Slurm's commands), or None for the cluster of this host."""

    def __init__(self, job_id: str, cluster: str | None = None) -> None:
        if not re.fullmatch(r"\d+", job_id, re.ASCII):
            raise LaunchError(
                f"JOB must be the number of a Slurm job, got {job_id!r}. Use the number that sbatch printed"
            )
        self.name = f"job {job_id}"
        self.follow_command = f"unitrain follow --to slurm {job_id}"
        self.cancel_command = f"scancel {job_id}"
        self._id = job_id
        self._clusters: tuple[str, ...] = ()
        if cluster is not None:
            if not _CLUSTER_PATTERN.fullmatch(cluster):
                raise LaunchError(
                    f"--cluster must be the name of a Slurm cluster, got {cluster!r}. List them with: "
                    "sacctmgr show cluster"
                )
            self._clusters = ("-M", cluster)
            self.follow_command = f"unitrain follow --to slurm --cluster {cluster} {job_id}"
            self.cancel_command = f"scancel -M {cluster} {job_id}"
        self._log: _GrowingFile | None = None

    @staticmethod
    def from_output(text: str) -> SlurmJob:
        """Return the job whose number is in the output `text` of sbatch. Raises LaunchError if it contains none."""
        match = _SUBMITTED_PATTERN.search(text)
        if match is None:
            raise LaunchError("sbatch printed no job number, so the job cannot be followed. Use: squeue --me")
        return SlurmJob(match[1], match[2])

    def read_status(self) -> JobStatus:
        process = run_client(["scontrol", *self._clusters, "show", "job", self._id])
        if process.returncode != 0:
            if "Invalid job id" in process.stderr:
                return self._read_accounting()
            raise UnreachableError(process.stderr.strip() or f"scontrol exited with {process.returncode}")
        text = _NAME_PATTERN.sub("", process.stdout, count=1)
        state = _find_field(_WORD_PATTERN, "JobState", text)
        path = _find_field(_LINE_PATTERN, "StdOut", text)
        if path and (self._log is None or self._log.path != Path(path)):
            self._log = _GrowingFile(Path(path))
        if not state:
            raise UnreachableError(f"scontrol printed no state of {self.name}")
        if state in _FINAL_STATES:
            return _final_status(state, _find_field(_WORD_PATTERN, "ExitCode", text))
        restarts = int(_find_field(_WORD_PATTERN, "Restarts", text) or 0)
        attempt = f", requeued {restarts} times" if restarts > 1 else ", requeued once" if restarts else ""
        hosts = _find_field(_WORD_PATTERN, "NodeList", text)
        if state == "PENDING":
            reason = _find_field(_WORD_PATTERN, "Reason", text)
            return JobStatus(f"is pending{f' ({reason})' if reason not in ('', 'None') else ''}{attempt}")
        if hosts in ("", "(null)"):
            return JobStatus(f"is {state.lower()}{attempt}")
        return JobStatus(f"is {state.lower()} on {hosts}{attempt}")

    def copy_log(self) -> bool:
        return self._log is not None and self._log.copy()

    def _read_accounting(self) -> JobStatus:
        """Return the state of a job that the controller has removed, from the accounting database.

        Raises UnreachableError if sacct fails or times out, for example because the database is being restarted, and
        JobGoneError if accounting is disabled, or if it has no final state of the job.
        """
        gone = f"Slurm has no record of {self.name}, so its exit code is unknown"
        try:
            process = run_client(["sacct", *self._clusters, "-XnP", "-o", "State,ExitCode", "-j", self._id])
        except LaunchError:
            raise JobGoneError(gone) from None
        if process.returncode != 0 and "accounting storage is disabled" not in process.stderr:
            raise UnreachableError(process.stderr.strip() or f"sacct exited with {process.returncode}")
        state, _, code = process.stdout.strip().partition("\n")[0].partition("|")
        state = state.partition(" ")[0]  # CANCELLED by 1000
        if state not in _FINAL_STATES:
            raise JobGoneError(gone)
        return _final_status(state, code)


class _GrowingFile:
    """A file that another process writes. It may appear later, be truncated, or be replaced by another file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._has_warned = False

    def copy(self) -> bool:
        """Write new content to standard output, and return whether there was any."""
        is_new = self._copy_open_file()
        try:
            status = self.path.stat()
        except OSError:  # it does not exist yet, or is being replaced
            return is_new
        if not stat.S_ISREG(status.st_mode):
            if not self._has_warned:
                click.echo(f"unitrain: {self.path} is not a regular file, so its content is not shown", err=True)
            self._has_warned = True
            return is_new
        if self._descriptor is not None:
            try:
                open_status = os.fstat(self._descriptor)
            except OSError:  # a network file system reports that the open file was replaced
                open_status = None
            if open_status is None or (open_status.st_dev, open_status.st_ino) != (status.st_dev, status.st_ino):
                os.close(self._descriptor)
                self._descriptor = None
            elif open_status.st_size < os.lseek(self._descriptor, 0, os.SEEK_CUR):
                os.lseek(self._descriptor, 0, os.SEEK_SET)
        if self._descriptor is None:
            try:
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError:
                return is_new
        return self._copy_open_file() or is_new

    def _copy_open_file(self) -> bool:
        """Write the content that the file has now. Later content is left for the next call, so that the call ends."""
        is_new = False
        if self._descriptor is None:
            return is_new
        try:
            remaining_bytes = os.fstat(self._descriptor).st_size - os.lseek(self._descriptor, 0, os.SEEK_CUR)
        except OSError:
            return is_new
        while remaining_bytes > 0:
            try:
                chunk = os.read(self._descriptor, min(_CHUNK_BYTES, remaining_bytes))
            except OSError:  # the next call tries again
                break
            if not chunk:
                break
            remaining_bytes -= len(chunk)
            sys.stdout.flush()
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
            is_new = True
        return is_new


def _find_field(pattern: str, name: str, text: str) -> str:
    match = re.search(pattern.format(name), text, re.MULTILINE)
    return match[1] if match else ""


def _final_status(state: str, code_and_signal: str) -> JobStatus:
    """Return the status for a final state and Slurm's exit code, such as 3:0, or 0:9 after a signal."""
    code, _, signal_number = code_and_signal.partition(":")
    exit_code = int(code or 0) or (128 + int(signal_number) if int(signal_number or 0) else 0)
    if state == "COMPLETED":
        return JobStatus("has completed", 0)
    exit_code = exit_code or 1
    names = {"FAILED": "has failed", "TIMEOUT": "has reached its time limit", "CANCELLED": "was cancelled"}
    return JobStatus(f"{names.get(state, f'has ended as {state}')}, with exit code {exit_code}", exit_code)
