"""What can be wrong with the hosts of a launch, found in about a second, before anything is started there."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unitrain.launchers import host_probe
from unitrain.launchers.addresses import master_port
from unitrain.launchers.agents import SSH
from unitrain.launchers.discovery import NO_SSH
from unitrain.launchers.errors import LaunchError
from unitrain.launchers.hosts import Host, is_here, shares
from unitrain.launchers.programs import find_module
from unitrain.launchers.spec import LaunchSpec

_SECONDS = 40
_MARK = "unitrain looks: "


@dataclass(frozen=True)
class _Answer:
    host: Host
    told: dict[str, Any]


def check_hosts(spec: LaunchSpec) -> int:
    """Ask all hosts at once, over ssh, and return the port of the first at which the ranks can meet.

    Raises LaunchError for the first host that cannot be reached, lacks the script, its folder, Python or the interface,
    or has other versions than the first, and for a MASTER_PORT that is taken.
    """
    hosts = spec.hosts[: len(shares(spec.num_processes, spec.hosts))]
    port = master_port(spec.environment) or 0
    packages = ["torch", "unitrain", *(["horovod"] if spec.backend == "horovod" else [])]
    with ThreadPoolExecutor(min(len(hosts), 64)) as pool:
        answers = list(pool.map(lambda host: _ask(host, spec, packages, port if host is hosts[0] else 0), hosts))
    first = answers[0]
    for answer in answers:
        _check(answer, first, spec)
    if first.told["port"] is None:
        raise LaunchError(
            f"MASTER_PORT is {port}, but on {first.host.name} another program listens there. Clear it, and a free one "
            "is taken: unset MASTER_PORT"
        )
    found: int = first.told["port"]
    return found


def _ask(host: Host, spec: LaunchSpec, packages: Sequence[str], port: int) -> _Answer:
    name = host.name.strip("[]")
    question = f"look({_file(spec)!r}, {str(Path.cwd())!r}, {list(packages)!r}, {port})\n"
    remote = [*SSH, "--", name, f"exec {shlex.quote(spec.python)} -P -"]
    start = [spec.python, "-P", "-"] if is_here(host) else remote
    try:
        done = subprocess.run(
            start,
            input=Path(host_probe.__file__).read_text() + question,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise LaunchError(NO_SSH) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"Host {name!r} did not answer within {_SECONDS} s. Look at it with: ssh {name} hostname"
        ) from None
    for line in done.stdout.splitlines():
        _, found, told = line.partition(_MARK)
        if found:
            return _Answer(host, json.loads(told))
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    raise LaunchError(_refusal(name, done.returncode, said, spec.python))


def _file(spec: LaunchSpec) -> str:
    """Return the file that every host needs, relative to the current folder if it is below."""
    if not spec.module:
        return str(Path(spec.script))
    found = find_module(spec.script)
    if found is None:
        raise LaunchError(f"Module {spec.script!r} is not found. Start from the folder that contains its package")
    return str(found.relative_to(Path.cwd()) if found.is_relative_to(Path.cwd()) else found)


def _refusal(name: str, code: int, said: list[str], python: str) -> str:
    last = said[-1] if said else f"exit code {code}"
    text = "\n".join(said)
    if code == 255:
        if "IDENTIFICATION HAS CHANGED" in text or "Host key verification failed" in text:
            return (
                f"Host {name!r} shows another ssh key than the one that is known here, and ssh refuses it. "
                f"Where it was installed anew, forget the old one: ssh-keygen -R {name}"
            )
        if "Permission denied" in text:
            return f"Host {name!r} does not let you in without a password: {last} Give it your key: ssh-copy-id {name}"
        if "resolve hostname" in text:
            return f"Host {name!r} is not known here: {last}. Write it as ssh takes it, and try: ssh {name} hostname"
        return f"Host {name!r} cannot be reached: {last}. Leave it out of the hosts, or try: ssh {name} hostname"
    return (
        f"{python!r} does not run on {name}: {last}. Install the environment there at the same path, or start from one "
        "that all hosts share"
    )


def _check(answer: _Answer, first: _Answer, spec: LaunchSpec) -> None:
    name, told = answer.host.name, answer.told
    folder, file = Path.cwd(), _file(spec)
    if not told["folder"] and not Path(file).is_absolute():
        raise LaunchError(
            f"The folder {str(folder)!r}, from which you start, is not on {name}. Start from a folder that all hosts "
            f"share, or copy it: ssh {name} mkdir -p {folder} && scp -r {folder}/. {name}:{folder}"
        )
    if not told["script"]:
        path = folder / file
        raise LaunchError(
            f"{'Module' if spec.module else 'Script'} {spec.script!r} is not on {name}. Start from a folder that all "
            f"hosts share, or copy it: scp {path} {name}:{path}"
        )
    for package, version in first.told["versions"].items():
        own = told["versions"][package]
        if own != version:
            raise LaunchError(
                f"{package} is {version or 'missing'} on {first.host.name}, but {own or 'missing'} on {name}. "
                + (
                    "Start from an environment that all hosts share"
                    if package == "Python" or not version
                    else f"Install the same there: ssh {name} {spec.python} -m pip install {package}=={version}"
                )
            )
    if spec.interface is not None and spec.interface not in told["interfaces"]:
        has = ", ".join(one for one in told["interfaces"] if one != "lo") or "none"
        raise LaunchError(
            f"--interface {spec.interface}: {name} has no such interface, but {has}. Leave it out, and the one that "
            "leads to the other hosts is taken, or name one that all have"
        )
