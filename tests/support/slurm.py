"""Runs a real Slurm cluster on the hosts of `hosts.py`. The controller runs on the first host, and each host is a
node."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hosts import Host

PROGRAMS = ("/usr/sbin/munged", "/usr/sbin/slurmctld", "/usr/sbin/slurmd", "srun", "sbatch", "sinfo")
CPUS = 4  # per node in Slurm's configuration, independent of the machine
_UP_SECONDS = 60
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={first}({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
KillWait=5
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


@contextlib.contextmanager
def slurm(hosts: list[Host], folder: Path) -> Iterator[dict[str, str]]:
    """Context manager that runs Slurm in the empty `folder`, and yields the environment variables for Slurm
    commands."""
    first = hosts[0]
    nodes = "\n".join(
        f"NodeName={host.name} NodeAddr={host.address} CPUs={CPUS} RealMemory=1000 State=UNKNOWN" for host in hosts
    )
    configuration = folder / "slurm.conf"
    configuration.write_text(_CONFIGURATION.format(first=first.name, address=first.address, folder=folder, nodes=nodes))
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    variables = {"SLURM_CONF": str(configuration)}
    munge = {"socket": "socket", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
    files = [f"--{option}={folder}/munge.{ending}" for option, ending in munge.items()]
    with contextlib.ExitStack() as cleanup:

        def start(host: Host, *command: str) -> subprocess.Popen[str]:
            with (folder / f"{Path(command[0]).name}.{host.name}.said").open("w") as output:
                process = host.start(command, variables, stdout=output.fileno())
            cleanup.callback(process.wait, timeout=_UP_SECONDS)
            return process

        daemons = [start(first, PROGRAMS[0], "--foreground", "--force", f"--key-file={key}", *files)]
        _wait_until((folder / "munge.socket").exists, "munged", daemons, folder)
        daemons.append(start(first, PROGRAMS[1], "-D"))
        daemons += [start(host, PROGRAMS[2], "-D", "-N", host.name) for host in hosts]
        for host in hosts:  # an ExitStack calls callbacks in reverse order, so terminate all daemons before waiting
            cleanup.callback(host.kill_all)

        def is_up() -> bool:
            states = first.run(["sinfo", "-h", "-o", "%T %D"], variables).stdout
            return states.split() == ["idle", str(len(hosts))]

        _wait_until(is_up, "Slurm", daemons, folder)
        yield variables


def _wait_until(is_up: Callable[[], bool], service: str, daemons: list[subprocess.Popen[str]], folder: Path) -> None:
    deadline = time.monotonic() + _UP_SECONDS
    while not is_up():
        if time.monotonic() > deadline or any(process.poll() is not None for process in daemons):
            logs = "\n".join(
                f"{path.name}: {path.read_text(errors='replace')[-1000:]}" for path in folder.glob("*[.]*d*")
            )
            raise RuntimeError(f"{service} did not start:\n{logs}")
        time.sleep(0.2)
