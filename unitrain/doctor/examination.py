"""Collect the reports of all ranks of a job, and evaluate them."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import unitrain
from unitrain.bootstrap import environment
from unitrain.errors import LauncherMismatchError, UnitrainError
from unitrain.processes import parent_death_signal_setter, terminate_processes

# Marks the report of rank 0 in the output of a launcher. The launcher may prefix each line.
MARKER = "unitrain doctor report: "
_LAUNCH_ID_VARIABLE = "UNITRAIN_DOCTOR"  # identifies the processes of a launch
_LAUNCH_SECONDS = 60.0
_MAX_OUTPUT_LINES = 15


class ExaminationError(UnitrainError):
    """The ranks failed to start or to connect to each other, or the variables of the launcher are invalid."""


def examine(timeout_seconds: float) -> dict[str, Any] | None:
    """Examine this rank and its job. Return the report as plain data on rank 0, and None on other ranks.

    All ranks of a job must call this function. Raises ExaminationError if the ranks cannot connect within
    `timeout_seconds`, or if the variables of the launcher are invalid.
    """
    from unitrain.bootstrap.rendezvous import connect_ranks
    from unitrain.doctor.facts import Facts, collect_facts
    from unitrain.doctor.findings import RankReport, find_problems
    from unitrain.doctor.peers import PeerCheckResults, check_peers

    try:
        rank_info = environment.detect()
        # The rendezvous comes first, so that missing ranks are reported before the slow checks.
        rendezvous = connect_ranks(rank_info, timedelta(seconds=timeout_seconds))
        facts = collect_facts(rank_info)
        checks = check_peers(rendezvous) if rank_info.size > 1 else None
        gathered = rendezvous.allgather("doctor/report", [facts.as_dict(), checks and checks.as_dict()])
    except LauncherMismatchError as error:
        raise ExaminationError(f"{error}\nAlternatively, start the ranks with: unitrain doctor --launch ...") from error
    except UnitrainError as error:
        raise ExaminationError(str(error)) from error
    if rank_info.rank != 0:
        return None
    reports = [
        RankReport(Facts.from_dict(facts), PeerCheckResults(**peer_checks) if peer_checks else None)
        for facts, peer_checks in gathered
    ]
    findings = find_problems(reports)
    return {
        "ok": not any(finding.level == "error" for finding in findings),
        "findings": [vars(finding) for finding in findings],
        "ranks": [{"facts": facts, "peer_checks": peer_checks} for facts, peer_checks in gathered],
    }


def examine_launch(options: Sequence[str], timeout_seconds: float) -> dict[str, Any]:
    """Launch ranks with these options of `unitrain launch`, and return the report.

    All processes of the launch are terminated before the function returns or raises. Raises ExaminationError if the
    launch fails.
    """
    program = str(Path(unitrain.__file__).with_name("__main__.py"))
    command = [
        sys.executable, program, "launch", *options,
        program, "doctor", "--marked-json", "--timeout-seconds", f"{timeout_seconds:g}",
    ]  # fmt: skip
    # The default backend is ddp, because with horovod, the launcher would not provide a rendezvous address.
    variables = {
        "UNITRAIN_BACKEND": environment.get_variable("UNITRAIN_BACKEND") or "ddp",
        _LAUNCH_ID_VARIABLE: secrets.token_hex(8),
    }
    launch_timeout_seconds = timeout_seconds + _LAUNCH_SECONDS
    # The output is written to files, because processes that outlive the launcher would keep a pipe open.
    with (
        tempfile.TemporaryFile("w+", errors="replace") as stdout,
        tempfile.TemporaryFile("w+", errors="replace") as stderr,
    ):
        process = subprocess.Popen(
            command,
            env=environment.copy() | variables,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=parent_death_signal_setter(signal.SIGTERM),  # if this process is killed
        )
        try:
            exit_code = process.wait(launch_timeout_seconds)
        except subprocess.TimeoutExpired as expired:
            raise ExaminationError(
                f"The launch did not finish within {launch_timeout_seconds:g} s. "
                "Allow more time with --timeout-seconds."
            ) from expired
        finally:
            terminate_processes(process, f"{_LAUNCH_ID_VARIABLE}={variables[_LAUNCH_ID_VARIABLE]}".encode())
        stdout.seek(0)
        stderr.seek(0)
        done = subprocess.CompletedProcess(command, exit_code, stdout.read(), stderr.read())
    for line in done.stdout.splitlines():
        _, has_marker, report = line.partition(MARKER)
        if has_marker:
            result: dict[str, Any] = json.loads(report)
            return result
    raise ExaminationError(_describe_failed_launch(done))


def _describe_failed_launch(process: subprocess.CompletedProcess[str]) -> str:
    # If `unitrain launch` rejects its options or cannot start the launcher, click prints the usage and then the error,
    # and exits with code 2.
    _, is_launch_error, message = process.stderr.partition("\nError: ")
    if process.returncode == 2 and is_launch_error:
        return f"unitrain launch cannot start the ranks: {message.strip()}"
    lines = "\n".join((process.stderr + process.stdout).strip().splitlines()[-_MAX_OUTPUT_LINES:])
    return f"The ranks could not be started (exit code {process.returncode}):\n{lines}"
