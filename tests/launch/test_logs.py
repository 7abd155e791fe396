"""`unitrain launch --log-dir`: one log file per rank, merged output, and the last lines of a failed rank."""

from __future__ import annotations

import fcntl
import shlex
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from launches import running_launcher
from requirements import needs_open_mpi

from unitrain.bootstrap import environment
from unitrain.supervisor import rank_logs
from unitrain.supervisor.rank_logs import last_lines_of_failed_rank, log_sizes

SCRIPT = """
import os, sys, time
import unitrain

with unitrain.init(device="cpu") as backend:
    for number in range(3):
        print(f"line {number} of", "rank", backend.rank)
    backend.barrier()
    if backend.rank == 1 and sys.argv[1] == "raises":
        raise ValueError("item 31 is broken")
    if backend.rank == 1 and sys.argv[1] == "is killed":
        os.kill(os.getpid(), 9)
    backend.barrier()
"""


def launch(folder: Path, fault: str, *options: str) -> tuple[int, str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "unitrain", "launch", "-np", "2", "--log-dir", str(folder / "logs"), *options]
    with running_launcher([*command, str(script), fault]) as launched:
        output = launched.output()
        launched.wait_until_all_exited(10)
    return launched.process.returncode, output


def test_every_line_is_in_the_log_file_of_its_rank_and_in_the_merged_output(tmp_path: Path) -> None:
    code, output = launch(tmp_path, "nothing", "--backend", "ddp")
    assert code == 0, output
    for rank in (0, 1):
        lines = [f"line {number} of rank {rank}" for number in range(3)]
        assert [
            line for line in (tmp_path / "logs" / f"rank-{rank}.log").read_text().splitlines() if "line" in line
        ] == lines
        assert [line for line in output.splitlines() if line.startswith(f"[{rank}] line")] == [
            f"[{rank}] {line}" for line in lines
        ]


@pytest.mark.parametrize(
    ("fault", "options"), [("raises", ["--backend", "horovod"]), ("is killed", ["--backend", "ddp"])]
)
def test_failed_launch_prints_the_last_lines_of_the_failed_rank(fault: str, options: list[str], tmp_path: Path) -> None:
    code, output = launch(tmp_path, fault, *options)
    assert code != 0
    _, found, last_lines = output.rpartition(f"unitrain: last lines of rank 1, from {tmp_path}/logs/rank-1.log:\n")
    assert found, output
    assert "line 2 of rank 1" in last_lines
    assert ("ValueError: item 31 is broken" in last_lines) is (fault == "raises")


def test_first_failed_rank_is_found_in_the_logs(tmp_path: Path) -> None:
    trace = "Traceback (most recent call last):\nValueError: x\n"
    (tmp_path / "rank-0.log").write_text("fine\n")
    (tmp_path / "rank-10.log").write_text(".\n" * 30 + trace)
    assert (
        last_lines_of_failed_rank(tmp_path, None, {})[0]
        == f"unitrain: last lines of rank 10, from {tmp_path}/rank-10.log:"
    )
    assert len(last_lines_of_failed_rank(tmp_path, None, {})) == 21
    assert last_lines_of_failed_rank(tmp_path, 0, {})[1:] == ["  fine"]
    (tmp_path / "rank-0.log").write_text(f"{trace}unitrain: rank 0 failed first: ValueError: x (of 11 ranks)\n")
    assert last_lines_of_failed_rank(tmp_path, None, {})[0].startswith("unitrain: last lines of rank 0")
    assert last_lines_of_failed_rank(tmp_path, 5, {}) == []


def test_large_log_is_read_only_at_its_end(tmp_path: Path) -> None:
    trace = "Traceback (most recent call last):\nValueError: x\n"
    with (tmp_path / "rank-0.log").open("wb") as file:
        file.truncate(2**40)  # creates a sparse file
        file.seek(2**40)
        file.write(f"\n{trace}".encode())
    assert last_lines_of_failed_rank(tmp_path, None, {"rank-0.log": 5})[-1] == "  ValueError: x"


def test_lines_of_an_earlier_run_in_the_same_folder_are_ignored(tmp_path: Path) -> None:
    """A run appends to the log files of its ranks, and does not change the log files of other ranks."""
    for rank in (0, 7):
        (tmp_path / f"rank-{rank}.log").write_text("unitrain: rank 7 failed first: ValueError: x (of 8 ranks)\n")
    before = log_sizes(tmp_path)
    assert last_lines_of_failed_rank(tmp_path, None, before) == []
    with (tmp_path / "rank-0.log").open("a") as log:
        log.write("line\n")
    (tmp_path / "rank-1.log").write_text("Traceback (most recent call last):\nKeyError: 3\n")
    assert (
        last_lines_of_failed_rank(tmp_path, None, before)[0]
        == f"unitrain: last lines of rank 1, from {tmp_path}/rank-1.log:"
    )
    assert last_lines_of_failed_rank(tmp_path, 0, before)[1:] == ["  line"]


def test_last_lines_include_lines_that_are_still_being_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_logs, "_COMPLETE_SECONDS", 60.0)
    with (tmp_path / "rank-0.log").open("ab", buffering=0) as log:
        fcntl.flock(log, fcntl.LOCK_SH)  # like the process that copies the output
        log.write(b"first\n")

        def copy_the_rest() -> None:
            time.sleep(0.2)
            log.write(b"Traceback (most recent call last):\nValueError: x\n")
            fcntl.flock(log, fcntl.LOCK_UN)

        thread = threading.Thread(target=copy_the_rest)
        thread.start()
        lines = last_lines_of_failed_rank(tmp_path, None, {})
        thread.join()
    assert lines[-1:] == ["  ValueError: x"]


FAIL_OR_EXIT = """
import sys

if sys.argv[1] == "fails":
    raise ValueError("the earlier run")
sys.exit(3)
"""


def test_launch_does_not_print_lines_of_an_earlier_launch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAIL_OR_EXIT)
    shown = []
    for what in ("fails", "exits"):
        options = ["-np", "1", "--backend", "local", "--log-dir", str(tmp_path / "logs")]
        with running_launcher([sys.executable, "-m", "unitrain", "launch", *options, str(script), what]) as launched:
            shown.append("last lines of rank 0" in launched.output())
            assert launched.process.returncode in (1, 3)
    assert shown == [True, False]


def test_files_with_other_names_in_the_folder_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_text("fine\n")
    (tmp_path / "rank-0-old.log").write_text("unitrain: rank 3 failed first\n")
    (tmp_path / "rank-1.log").mkdir()
    assert last_lines_of_failed_rank(tmp_path, 0, {})[1:] == ["  fine"]


def test_full_disk_ends_the_log_but_not_the_rank(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("for number in range(100):\n    print('line', number, 'x' * 8000)\n")
    (tmp_path / "rank-0.log").symlink_to("/dev/full")
    wrapper = str(Path(rank_logs.__file__))
    ended = subprocess.run(
        [sys.executable, wrapper, str(tmp_path), str(script)],
        env=environment.without_launcher_variables(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("[0] line ") == 100
    assert ended.stderr == (
        f"unitrain: cannot write more to '{tmp_path}/rank-0.log': No space left on device. The output of the rank is "
        "still printed.\n"
    )


LEAVE_A_PROCESS_BEHIND = """
import os, sys

print("first")
if os.fork() == 0:
    sys.stdin.read()  # until the end of the test
"""
WRAPPER = """
import sys
from pathlib import Path
from unitrain.supervisor import rank_logs

rank_logs._REMAINING_OUTPUT_SECONDS = 0.1
rank_logs.main(Path(sys.argv[1]), sys.argv[2:])
"""


def start_with_pipes(*command: str) -> subprocess.Popen[str]:
    variables, pipe = environment.without_launcher_variables(), subprocess.PIPE
    return subprocess.Popen(command, env=variables, stdin=pipe, stdout=pipe, text=True)


def test_copying_process_exits_although_a_process_keeps_the_output_of_its_rank_open(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LEAVE_A_PROCESS_BEHIND)
    with start_with_pipes(sys.executable, "-c", WRAPPER, str(tmp_path), str(script)) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with ThreadPoolExecutor() as pool:
            output = pool.submit(process.stdout.read)  # only the copying process has this pipe open
            try:
                assert process.wait(60) == 0
                assert output.result(60) == "[0] first\n"
            finally:
                process.stdin.close()


def test_log_is_continued_after_the_reader_of_the_output_has_exited(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('first')\ninput()\nfor number in range(100):\n    print('line', number)\n")
    with start_with_pipes(sys.executable, str(Path(rank_logs.__file__)), str(tmp_path), str(script)) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "[0] first\n"
        process.stdout.close()
        process.stdin.write("\n")
        process.stdin.close()
        assert process.wait(60) == 0
    deadline = time.monotonic() + 30
    while "line 99\n" not in (tmp_path / "rank-0.log").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


PRINTING = """
import os, sys
from pathlib import Path
from unitrain.output import guard_standard_streams

guard_standard_streams()  # as in unitrain.init
for number in range(5_000):
    print("standard output", number, flush=True)
    print("standard error", number, file=sys.stderr)
    sys.stdout.buffer.write(b"\\xff is not UTF-8\\n")
rank = next(os.environ[name] for name in ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ)
Path(sys.argv[1], f"finished-{rank}").touch()
"""


@pytest.mark.parametrize("redirection", ["2>&1 | head -1", ">/dev/full 2>&1"])
@pytest.mark.parametrize(
    "options",
    [
        ["--launcher", "torchrun"],
        ["--launcher", "horovodrun"],
        ["--launcher", "horovodrun", "--max-restarts", "1"],
        pytest.param(["--launcher", "mpirun"], marks=needs_open_mpi),
        pytest.param(["--launcher", "mpirun", "--max-restarts", "1"], marks=needs_open_mpi),
    ],
    ids=" ".join,
)
def test_job_succeeds_if_its_output_cannot_be_written(options: list[str], redirection: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PRINTING)
    command = shlex.join([sys.executable, "-m", "unitrain", "launch", "-np", "2", *options, str(script), str(tmp_path)])
    with running_launcher(["bash", "-c", f"{command} {redirection}; exit ${{PIPESTATUS[0]}}"]) as launched:
        output = launched.output()
        launched.wait_until_all_exited(10)
    assert launched.process.returncode == 0, output
    assert sorted(path.name for path in tmp_path.glob("finished-*")) == ["finished-0", "finished-1"]
