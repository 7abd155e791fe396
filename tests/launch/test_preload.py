"""Processes forked from the preloaded interpreter (`tests/support/preload.py`) behave like normal processes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hosts import Host
from preload import preloaded
from requirements import needs_hosts

PROGRAM = """
import json, os, signal, sys, threading, time

case = sys.argv[1]
if case == "facts":
    here = sys.path[0], sys.argv, __name__, __file__, __package__, os.getcwd(), os.environ["ADDED"], os.umask(0o22)
    shown = open("/proc/self/cmdline").read().rstrip(chr(0)), "ADDED=value" in open("/proc/self/environ").read()
    handlers = [str(signal.getsignal(number)) for number in range(1, 32)]
    streams = [(s.name, s.encoding, s.errors, s.line_buffering, s.write_through) for s in (sys.stdout, sys.stderr)]
    print(json.dumps([here, shown, handlers, streams, sys.orig_argv, sys.stdin.read(), os.getppid()]))
if case == "raises":
    print("before")
    raise ValueError("wrong")
if case == "interrupts":
    raise KeyboardInterrupt
if case == "exits":
    sys.exit({"3": 3, "text": "text", "none": None}[sys.argv[2]])
if case == "kills":
    os.kill(os.getpid(), int(sys.argv[2]))
if case == "threads":
    import atexit
    atexit.register(print, "at exit")
    threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
if case == "writes":
    os.write(int(sys.argv[2]), b"through a pipe")
if case == "closes":
    os.close(int(sys.argv[2]))
    time.sleep(60)
if case == "waits":
    if "traps" in sys.argv:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
    print(os.getpid(), flush=True)
    time.sleep(60)
if case == "is preloaded":
    print("torch" in sys.modules)
"""
VARIABLES = {"ADDED": "value"}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "package" / "program.py"
    path.parent.mkdir()
    path.write_text(PROGRAM)
    return path


def run(command: list[str], folder: Path, *, preload: bool) -> tuple[int, str, str]:
    """Run `command`, and return its exit code, its standard output and its standard error."""
    variables = os.environ | VARIABLES
    done = subprocess.run(
        command, env=preloaded(variables) if preload else variables, cwd=folder, input="typed", capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_scripts_are_preloaded(script: Path, tmp_path: Path) -> None:
    import torch._dynamo  # noqa: F401 - sets an environment variable

    command = [sys.executable, str(script), "is preloaded"]
    assert run(command, tmp_path, preload=True) == (0, "True\n", "")
    assert run(command, tmp_path, preload=False) == (0, "False\n", "")


def test_process_is_preloaded_only_if_it_has_the_library_settings_of_the_server(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = os.environ.get("OPENBLAS_NUM_THREADS", "1")
    for value, output in ((settings, "True\n"), (f"{settings}0", "False\n")):
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", value)
        assert run([sys.executable, str(script), "is preloaded"], tmp_path, preload=True) == (0, output, "")


@pytest.mark.parametrize("options", [[], ["-u"], ["-P"], ["-u", "-P"]], ids=" ".join)
@pytest.mark.parametrize("name", ["package/program.py", "absolute"])
def test_preloaded_process_has_the_same_environment_as_a_normal_process(
    options: list[str], name: str, script: Path, tmp_path: Path
) -> None:
    command = [sys.executable, *options, str(script) if name == "absolute" else name, "facts", "an argument"]
    code, output, errors = run(command, tmp_path, preload=True)
    assert (code, errors) == (0, "")
    facts, expected = json.loads(output), json.loads(run(command, tmp_path, preload=False)[1])
    if "-P" in options:  # the first entry of sys.path is then from PYTHONPATH
        facts[0][0] = expected[0][0] = ""
    assert facts == expected
    assert facts[-1] == os.getpid()


@pytest.mark.parametrize(
    "arguments",
    [
        ["raises"], ["interrupts"], ["exits", "3"], ["exits", "text"], ["exits", "none"], ["kills", "9"],
        ["kills", "15"], ["kills", "6"], ["threads"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_preloaded_process_ends_like_a_normal_process(arguments: list[str], script: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(script), *arguments]
    assert run(command, tmp_path, preload=True) == run(command, tmp_path, preload=False)


def test_missing_script_is_reported_as_in_a_normal_process(tmp_path: Path) -> None:
    command = [sys.executable, "absent.py"]
    assert run(command, tmp_path, preload=True) == run(command, tmp_path, preload=False)


def test_preloaded_module_runs_as_in_a_normal_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--version-that-does-not-exist"]
    code, output, errors = run(command, tmp_path, preload=True)
    assert (code, output) == (2, "")
    assert errors == run(command, tmp_path, preload=False)[2]


def test_inherited_descriptors_keep_their_numbers(script: Path) -> None:
    reading, writing = os.pipe()
    subprocess.run(
        [sys.executable, str(script), "writes", str(writing)],
        env=preloaded(os.environ), pass_fds=[writing], check=True, timeout=60,
    )  # fmt: skip
    os.close(writing)
    with os.fdopen(reading) as file:
        assert file.read() == "through a pipe"


def test_closed_descriptor_closes_the_pipe_while_the_process_runs(script: Path) -> None:
    reading, writing = os.pipe()
    with subprocess.Popen(
        [sys.executable, str(script), "closes", str(writing)], env=preloaded(os.environ), pass_fds=[writing]
    ) as process:
        os.close(writing)
        ready, _, _ = select.select([reading], [], [], 20)
        assert ready, "the pipe must be closed within 20 s"
        assert os.read(reading, 1) == b""
        assert process.poll() is None
        process.kill()
    os.close(reading)


@pytest.mark.parametrize(
    ("signum", "arguments", "code"),
    [(signal.SIGTERM, [], -15), (signal.SIGTERM, ["traps"], 9), (signal.SIGKILL, [], -9), (signal.SIGUSR1, [], -10)],
)
def test_signals_are_forwarded_to_the_forked_process(
    signum: int, arguments: list[str], code: int, script: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, str(script), "waits", *arguments],
        env=preloaded(os.environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        forked = int(process.stdout.readline())
        assert forked != process.pid
        process.send_signal(signum)
        assert process.wait(30) == code
    deadline = time.monotonic() + 30
    while is_alive(forked) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(forked)


@needs_hosts
def test_forked_process_runs_on_the_simulated_host_of_its_stub(
    script: Path, tmp_path: Path, two_hosts: list[Host]
) -> None:
    command = [sys.executable, str(script), "facts"]
    (tmp_path / "where.py").write_text(
        "import os, socket, sys\n"
        "print('torch' in sys.modules, socket.gethostname(), socket.gethostbyname('h2'), *sorted(os.listdir('/run')))\n"
    )
    for host in two_hosts:
        command = [sys.executable, str(tmp_path / "where.py")]
        expected = host.run(command, fresh=True).stdout
        assert host.run(command).stdout == expected.replace("False", "True")
        assert expected.split()[:3] == ["False", host.name, "10.77.0.2"]


def test_process_that_writes_to_a_terminal_is_preloaded(script: Path) -> None:
    """Ranks of mpirun write to a terminal."""
    controller, terminal = os.openpty()
    subprocess.run(
        [sys.executable, str(script), "is preloaded"],
        env=preloaded(os.environ), stdin=subprocess.DEVNULL, stdout=terminal, check=True, timeout=60,
    )  # fmt: skip
    os.close(terminal)
    with os.fdopen(controller, "rb") as file:
        assert file.readline() == b"True\r\n"
