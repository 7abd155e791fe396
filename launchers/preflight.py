"""Preflight checks of all hosts before a launch. They take about one second."""

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
from unitrain.launchers.agents import SSH
from unitrain.launchers.elastic import SSH_MISSING
from unitrain.launchers.errors import LaunchError
from unitrain.launchers.hosts import Host, is_this_host, processes_per_host
from unitrain.launchers.rendezvous import master_port_fix, parse_master_port
from unitrain.launchers.spec import CONFIG_SUFFIXES, LaunchSpec, find_module, python_command

_TIMEOUT_SECONDS = 40
_OUTPUT_PREFIX = "unitrain host probe: "


@dataclass(frozen=True)
class _ProbeResult:
    """The facts that `host_probe.probe_host` printed on one host."""

    host: Host
    facts: dict[str, Any]


def check_hosts(spec: LaunchSpec) -> int:
    """Probe all hosts with ranks concurrently, over ssh except for this host. Return the port of the rendezvous on the
    first host: MASTER_PORT if it is set, else a free port.

    Raises LaunchError if MASTER_PORT is in use, if a host is unreachable or lacks the script, Python or the interface,
    and if the package versions of a host differ from those of the first host. A host must also have the current folder
    if the path of the script is relative.
    """
    hosts = spec.hosts[: len(processes_per_host(spec.num_processes, spec.hosts))]
    port = parse_master_port(spec.environment) or 0
    packages = ["torch", "unitrain", *(["horovod"] if spec.backend == "horovod" else [])]
    with ThreadPoolExecutor(min(len(hosts), 64)) as pool:
        results = list(pool.map(lambda host: _probe(host, spec, packages, port if host is hosts[0] else 0), hosts))
    first = results[0]
    for result in results:
        _check_probe_result(result, first, spec)
    if first.facts["port"] is None:
        raise LaunchError(
            f"MASTER_PORT is {port}, but this port is not available on {first.host.name}. To let unitrain choose a "
            f"free port, {master_port_fix(spec.environment)}"
        )
    free_port: int = first.facts["port"]
    return free_port


def _probe(host: Host, spec: LaunchSpec, packages: Sequence[str], port: int) -> _ProbeResult:
    name = host.name.strip("[]")
    call = f"probe_host({_required_file(spec)!r}, {str(Path.cwd())!r}, {list(packages)!r}, {port})\n"
    is_local = is_this_host(host)
    command = python_command(spec.python, code="import sys;exec(sys.stdin.read())")
    if not is_local:
        command = (*SSH, "--", name, f"exec {shlex.join(command)}")
    try:
        process = subprocess.run(
            command,
            input=Path(host_probe.__file__).read_text() + call,
            capture_output=True,
            text=True,
            errors="replace",  # a login banner may have any encoding
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except OSError as error:
        if is_local:
            raise LaunchError(_describe_probe_failure(name, 127, [str(error.strerror)], spec.python)) from None
        raise LaunchError(SSH_MISSING) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"Host {name!r} did not answer within {_TIMEOUT_SECONDS} s. Check it with: ssh {name} hostname"
        ) from None
    for line in process.stdout.splitlines():
        _, has_prefix, facts = line.partition(_OUTPUT_PREFIX)  # a shell's startup file may print text before the JSON
        if has_prefix:
            return _ProbeResult(host, json.loads(facts))
    errors = [line.strip() for line in process.stderr.splitlines() if line.strip()]
    raise LaunchError(_describe_probe_failure(name, process.returncode, errors, spec.python))


def _required_file(spec: LaunchSpec) -> str:
    """Return the file that every host needs: the script or configuration file as given, or the file of a module.

    The path of a module is relative to the current folder if the module is in this folder. Raises LaunchError.
    """
    if (config := _config_file(spec)) is not None:
        return str(Path(config))
    if not spec.module:
        return str(Path(spec.script))
    module_path = find_module(spec.script)
    if module_path is None:
        raise LaunchError(f"Module {spec.script!r} is not found. Start from the folder that contains its package")
    return str(module_path.relative_to(Path.cwd()) if module_path.is_relative_to(Path.cwd()) else module_path)


def _config_file(spec: LaunchSpec) -> str | None:
    """Return the configuration file if the program is `python -m unitrain train FILE`, otherwise None."""
    is_train = spec.module and spec.script == "unitrain" and spec.args[:1] == ("train",)
    if is_train and spec.args[1:] and Path(spec.args[1]).suffix in CONFIG_SUFFIXES:
        return spec.args[1]
    return None


def _describe_probe_failure(host: str, exit_code: int, error_lines: list[str], python: str) -> str:
    """Return the error message for a probe that has printed no result."""
    last_line = error_lines[-1] if error_lines else f"exit code {exit_code}"
    text = "\n".join(error_lines)
    if exit_code == 255:
        if "IDENTIFICATION HAS CHANGED" in text or "Host key verification failed" in text:
            return (
                f"ssh rejects host {host!r} because its key has changed. If the host was reinstalled, remove the old "
                f"key: ssh-keygen -R {host}"
            )
        if "Permission denied" in text:
            return (
                f"Host {host!r} does not accept a login without a password: {last_line} Install your key there: "
                f"ssh-copy-id {host}"
            )
        if "resolve hostname" in text:
            return (
                f"Host {host!r} cannot be resolved on this host: {last_line}. Use a name that ssh accepts, and try: "
                f"ssh {host} hostname"
            )
        return f"Host {host!r} cannot be reached: {last_line}. Leave it out of the hosts, or try: ssh {host} hostname"
    return (
        f"{python!r} does not run on {host}: {last_line}. Install the environment there at the same path, or use one "
        "on a file system that all hosts share"
    )


def _check_probe_result(result: _ProbeResult, first: _ProbeResult, spec: LaunchSpec) -> None:
    name, facts = result.host.name, result.facts
    folder, file = Path.cwd(), _required_file(spec)
    if not facts["folder"] and not Path(file).is_absolute():
        raise LaunchError(
            f"The current folder {str(folder)!r} does not exist on {name}. Start from a folder that all hosts "
            f"share, or copy it: ssh {name} mkdir -p {folder} && scp -r {folder}/. {name}:{folder}"
        )
    if not facts["script"]:
        path = folder / file
        program = f"{'Module' if spec.module else 'Script'} {spec.script!r}"
        if (config := _config_file(spec)) is not None:
            program = f"Configuration file {config!r}"
        raise LaunchError(
            f"{program} is not on {name}. Start from a folder that all hosts share, or copy it: "
            f"scp {path} {name}:{path}"
        )
    for package, version in first.facts["versions"].items():
        other_version = facts["versions"][package]
        if other_version != version:
            raise LaunchError(
                f"{package} is {version or 'missing'} on {first.host.name}, but {other_version or 'missing'} on "
                f"{name}. "
                + (
                    "Start from an environment that all hosts share"
                    # The package index has neither unitrain nor local versions such as 2.6.0+cu124.
                    if package in ("Python", "unitrain") or not version or "+" in version
                    else f"Install the same version there: ssh {name} {spec.python} -m pip install {package}=={version}"
                )
            )
    if spec.interface is not None and spec.interface not in facts["interfaces"]:
        interfaces = ", ".join(interface for interface in facts["interfaces"] if interface != "lo") or "none"
        raise LaunchError(
            f"--interface {spec.interface} does not exist on {name}, which has: {interfaces}. Leave --interface out to "
            "use the interface with the route to the other hosts, or name an interface that all hosts have"
        )
