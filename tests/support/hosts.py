"""Several hosts on one machine, each with a separate network, name, process namespace and sshd.

A host is a set of Linux namespaces. The first process is sshd. When sshd exits, the kernel kills all processes of the
host. All hosts share the files of this machine at the same paths, as on a shared file system, except /etc/hosts,
/dev/shm, /run and root's home, which contains the ssh keys. Hosts can reach only each other. The name hN resolves to
10.77.0.N. The network, files and processes of this machine do not change.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import network_delay
from launches import kill_until_none_is_left
from preload import preloaded

SSHD = "/usr/sbin/sshd"  # absolute path, because sshd re-executes itself for each connection
PROGRAMS = ("unshare", "nsenter", "ip", SSHD, "ssh", "ssh-keygen")
SECONDS = 100
_UP_SECONDS = 60
_NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc")


def can_create_namespaces() -> bool:
    """Return whether this process may create namespaces, which some containers do not permit."""
    tried = subprocess.run(["unshare", *_NAMESPACES, "true"], capture_output=True, timeout=_UP_SECONDS, check=False)
    return tried.returncode == 0


@dataclass(frozen=True)
class Host:
    """One host. `first` is the process ID of its sshd on this machine, and `home` is the home folder of root."""

    name: str
    address: str
    home: Path
    first: int

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command that runs `argv` on this host, in the current folder and with the environment of this
        process."""
        enter = ["nsenter", "-t", str(self.first), "--net", "--uts", "--ipc", "--mount", "--pid"]
        return [*enter, f"--wd={Path.cwd()}", "--", "env", f"HOME={self.home}", *argv]

    def start(
        self, argv: Sequence[str], variables: Mapping[str, str] | None = None, *, fresh: bool = False, **options: int
    ) -> subprocess.Popen[str]:
        """Start a program on this host. `stdout` contains both output streams. Terminate the program with `kill_all`,
        because a signal to the returned process does not reach it.

        Unless `fresh` is true, Python processes of the program are forked from a preloaded interpreter (`preload.py`).
        """
        environ = {**os.environ, **(variables or {})}
        return subprocess.Popen(
            self.command(argv),
            env=environ if fresh else preloaded(environ),
            stdin=subprocess.DEVNULL,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options},  # type: ignore[call-overload]
            text=True,
        )

    def run(
        self,
        argv: Sequence[str],
        variables: Mapping[str, str] | None = None,
        seconds: float = SECONDS,
        *,
        fresh: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on this host and wait until it exits. `stdout` contains both output streams.

        After `seconds`, kill all processes on this host and raise TimeoutError.
        """
        process = self.start(argv, variables, fresh=fresh)
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.kill_all()
            output, _ = process.communicate(timeout=SECONDS)
            message = f"{list(argv)} on {self.name} was killed after {seconds} s. Output:\n{output}"
            raise TimeoutError(message) from None
        return subprocess.CompletedProcess(list(argv), process.returncode, output)

    def find_processes(self) -> dict[int, str]:
        """Return the commands of the processes on this host by process ID, except the listening sshd."""
        found: dict[int, str] = {}
        try:
            own = _namespace(self.first)
        except OSError:
            return found  # the host was killed
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if int(folder.name) != self.first and _namespace(int(folder.name)) == own:
                    state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                    command = (folder / "cmdline").read_text().replace("\0", " ").strip()
                    if state != "Z" and command:  # the command of an exiting process is empty
                        found[int(folder.name)] = command
        return found

    def wait_until_all_exited(self, seconds: float) -> None:
        """Wait until all processes have exited. After `seconds`, raise TimeoutError, which names the remaining
        processes."""
        deadline = time.monotonic() + seconds
        while processes := self.find_processes():
            if time.monotonic() > deadline:
                raise TimeoutError(f"still on {self.name} after {seconds} s: {processes}")
            time.sleep(0.1)

    def kill_all(self) -> None:
        """Kill all processes on this host except the listening sshd."""
        kill_until_none_is_left(self.find_processes, _UP_SECONDS)

    def signal(self, pid: int, signal_number: signal.Signals) -> None:
        """Send a signal to a process of this host, given its process ID on this machine."""
        assert pid in self.find_processes()
        os.kill(pid, signal_number)

    def disconnect_network(self) -> None:
        """Disconnect the network of this host. Packets are lost without an error."""
        self._set_link_state("down")

    def reconnect_network(self) -> None:
        """Reconnect the network of this host."""
        self._set_link_state("up")

    def kill(self) -> None:
        """Kill all processes of this host and disconnect it permanently."""
        self.disconnect_network()  # disconnect first, because the kernel would otherwise close the connections
        with contextlib.suppress(OSError):
            os.kill(self.first, signal.SIGKILL)

    def _set_link_state(self, state: str) -> None:
        _run_checked("nsenter", "-t", str(self.first), "--net", "ip", "link", "set", "eth0", state)


@contextlib.contextmanager
def hosts(
    count: int, folder: Path, *, hostname_is_loopback: bool = False, network: tuple[float, float] | None = None
) -> Iterator[list[Host]]:
    """Context manager that creates `count` hosts named h1, h2, ... with their files in the empty `folder`. Each host
    accepts the ssh keys of the other hosts. With `hostname_is_loopback`, each host resolves its own name to 127.0.1.1,
    like a host configured by Debian's installer. `network` contains the delay between two hosts, in seconds, and
    the bandwidth of each host, in bits per second.
    """
    key = folder / "key"
    _run_checked("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
    found: list[Host] = []
    with contextlib.ExitStack() as cleanup:
        switch = cleanup.enter_context(
            _run_in_background(["unshare", "--net", "sh", "-c", "echo up; exec sleep 86400"])
        )
        _run_checked("nsenter", "-t", str(switch.pid), "--net", "ip", "link", "add", "bridge", "type", "bridge")
        _run_checked("nsenter", "-t", str(switch.pid), "--net", "ip", "link", "set", "bridge", "up")
        for number in range(1, count + 1):
            own = folder / f"h{number}"
            _write_files(own, number, count, key, hostname_is_loopback)
            holder = cleanup.enter_context(
                _run_in_background(["unshare", *_NAMESPACES, "--kill-child", "sh", str(own / "begin")])
            )
            first = _find_only_child(holder.pid)
            _run_checked(
                *("ip", "link", "add", f"host{number}", "netns", str(switch.pid)),
                *("type", "veth", "peer", "name", "eth0", "netns", str(first)),
            )
            inside = ("nsenter", "-t", str(first), "--net", "ip")
            _run_checked(*inside, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            _run_checked(*inside, "link", "set", "eth0", "up")
            if network is not None:
                _run_checked(*inside[:-1], sys.executable, network_delay.__file__, "--compute-checksums", "eth0")
            master = () if network is not None else ("master", "bridge")
            _run_checked(
                *("nsenter", "-t", str(switch.pid), "--net"),
                *("ip", "link", "set", f"host{number}", *master, "up"),
            )
            found.append(Host(f"h{number}", f"10.77.0.{number}", own / "home", first))
        if network is not None:
            interfaces = [f"host{number}" for number in range(1, count + 1)]
            command = ["nsenter", "-t", str(switch.pid), "--net", sys.executable, network_delay.__file__]
            cleanup.enter_context(_run_in_background([*command, *map(str, network), *interfaces]))
        keys = [(host, (host.home.parent / "host_key.pub").read_text()) for host in found]
        known = "".join(f"{host.name},{host.address} {key}" for host, key in keys)
        for host in found:
            (host.home / ".ssh" / "known_hosts").write_text(known)
            _wait_for_sshd(host.home.parent / "sshd.log")
        yield found


def _write_files(own: Path, number: int, count: int, key: Path, hostname_is_loopback: bool) -> None:
    ssh = own / "home" / ".ssh"
    ssh.mkdir(parents=True, mode=0o700)
    (ssh / "id_ed25519").touch(mode=0o600)
    (ssh / "id_ed25519").write_bytes(key.read_bytes())
    (ssh / "authorized_keys").write_bytes(key.with_suffix(".pub").read_bytes())
    _run_checked("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(own / "host_key"))
    names = [
        f"127.0.1.1 h{other}" if hostname_is_loopback and other == number else f"10.77.0.{other} h{other}"
        for other in range(1, count + 1)
    ]
    (own / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
    # ssh and sshd read root's home from this file and ignore HOME.
    users = [line.split(":") for line in Path("/etc/passwd").read_text().splitlines()]
    for user in users:
        if user[0] == "root":
            user[5] = str(own / "home")
    (own / "passwd").write_text("\n".join([":".join(user) for user in users] + [""]))
    (own / "sshd_config").write_text(
        f"HostKey {own}/host_key\nPidFile none\nUsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
        "PermitRootLogin prohibit-password\nMaxStartups 100:30:200\nStrictModes no\n"
    )
    (own / "begin").write_text(
        f"""set -e
hostname h{number}
mount --bind {own}/hosts /etc/hosts
mount --bind {own}/passwd /etc/passwd
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir /run/sshd
ip link set lo up
echo up
exec {SSHD} -D -E {own}/sshd.log -f {own}/sshd_config
"""
    )


@contextlib.contextmanager
def _run_in_background(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Context manager that starts a command, waits until it prints "up", and kills it at the end."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        first_line = process.stdout.readline()
        if first_line != "up\n":
            raise RuntimeError(f"{command} printed: {first_line}{process.stdout.read()}")
        yield process
    finally:
        process.kill()
        process.communicate(timeout=_UP_SECONDS)


def _find_only_child(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def _wait_for_sshd(log: Path) -> None:
    deadline = time.monotonic() + _UP_SECONDS
    while not log.exists() or "listening" not in log.read_text():
        if time.monotonic() > deadline:
            raise RuntimeError(f"sshd does not listen: {log.read_text() if log.exists() else 'it printed nothing'}")
        time.sleep(0.02)


def _namespace(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/pid").readlink())


def _run_checked(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_UP_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
