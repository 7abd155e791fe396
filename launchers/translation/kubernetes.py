"""Manifests for Kubernetes: the TrainJob of Kubeflow Trainer, the older PyTorchJob, and the MPI operator's MPIJob."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml

from unitrain.launchers import mpirun
from unitrain.launchers.arguments import merge_options
from unitrain.launchers.errors import LaunchError
from unitrain.launchers.rendezvous import DEFAULT_PORT
from unitrain.launchers.translation import torchrun
from unitrain.launchers.translation.job import Job
from unitrain.launchers.translation.sbatch import job_name
from unitrain.launchers.translation.words import as_typed, has_expansion, join, quote
from unitrain.launchers.translation.writing import Translation, options_for, variables_for

LAUNCHER = "kubernetes"
KINDS = ("TrainJob", "PyTorchJob", "MPIJob")
# The runtime for PyTorch that Kubeflow Trainer installs.
DEFAULT_RUNTIME = "torch-distributed"
# The name of a job must be a DNS label (RFC 1035), because the operators create services with the same name.
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MAX_LABEL_CHARACTERS = 63
# The name of most objects is a DNS subdomain (RFC 1123).
_OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_MAX_OBJECT_CHARACTERS = 253
_GRACE_SECONDS = 120
_DEFAULT_BACKOFF_LIMIT = 3  # restarts after failures and preemptions


@dataclass(frozen=True, kw_only=True)
class ManifestSettings:
    """The fields of a manifest that are not part of the job.

    `kind` is one of KINDS, or None for a TrainJob. `runtime` is the ClusterTrainingRuntime of a TrainJob in which
    torchrun starts the ranks, or None for DEFAULT_RUNTIME. `mpi_runtime` replaces `runtime` with a
    ClusterTrainingRuntime that has an MPI policy, in which mpirun starts the ranks. `gpus`, `cpus` and `memory` are per
    pod, as Kubernetes quantities. `timeout_seconds` limits the duration of the job.
    """

    kind: str | None = None
    runtime: str | None = None
    mpi_runtime: str | None = None
    name: str | None = None
    namespace: str | None = None
    image: str = "IMAGE"
    gpus: int | None = None
    cpus: str | None = None
    memory: str | None = None
    timeout_seconds: int | None = None


def build(job: Job, settings: ManifestSettings | None = None) -> Translation:
    """Return a manifest for `kubectl apply -f` with one pod per host, and another pod for the mpirun of an MPIJob.

    A pod has two minutes between SIGTERM and SIGKILL, except in a TrainJob with a runtime other than DEFAULT_RUNTIME.

    The default is a TrainJob in which torchrun starts the ranks, for every backend: Horovod then uses Gloo, or NCCL on
    GPUs. mpirun starts the ranks of an MPIJob, and the ranks of a TrainJob in `settings.mpi_runtime`. Raises
    LaunchError for a job that the kind does not support.
    """
    settings = settings or ManifestSettings()
    kind = settings.kind or "TrainJob"
    if kind not in KINDS:
        raise LaunchError(f"--kind must be one of {', '.join(KINDS)}, got {kind!r}. Use: --kind {KINDS[0]}")
    _check_runtime(settings, kind)
    job.check_equal_ranks_per_host(kind)
    options = [word for option in job.launcher_options for word in option.words]
    for word in (*job.program, job.directory or "", *options):
        if has_expansion(word):
            raise LaunchError(
                f"{as_typed(word)!r} needs a shell to expand it, but containers run their command without one. Write "
                "its value instead, or start a shell: bash -c '...'"
            )
    name = _choose_name(job, settings, kind)
    # The launcher that starts the ranks in the pods. It receives its own options.
    runner = "mpirun" if kind == "MPIJob" or settings.mpi_runtime is not None else "torchrun"
    kept_options = [
        option for option in job.launcher_options if option.launcher == runner or runner in option.equivalents
    ]
    launcher_words, _ = options_for(replace(job, launcher_options=tuple(kept_options)), runner)
    dropped_options = tuple(option for option in job.launcher_options if option not in kept_options)
    job_with_other_options = replace(job, launcher_options=dropped_options)
    if runner == "mpirun":
        job_with_other_options = replace(job_with_other_options, environment={})
    remarks = [*job.remarks, *options_for(job_with_other_options, LAUNCHER)[1]]
    if job.hosts:
        remarks.append(f"The hosts {', '.join(job.hosts)} are left out: Kubernetes chooses the hosts.")
    if settings.image == "IMAGE":
        remarks.append("Replace IMAGE with the name of your image, or use: unitrain submit --image NAME.")
    metadata: dict[str, Any] = {"name": name}
    if settings.namespace is not None:
        check_namespace(settings.namespace)
        metadata["namespace"] = settings.namespace
    build_spec = {"PyTorchJob": _build_pytorchjob, "TrainJob": _build_trainjob, "MPIJob": _build_mpijob}[kind]
    version, spec = build_spec(job, settings, name, launcher_words, remarks)
    manifest = {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}
    return Translation(
        text=dump_manifest(manifest),
        remarks=remarks,
        private_values=job.private_values,
        secret=_secret_name(name) if job.private_values or job.forwarded else None,
    )


def build_secret(name: str, namespace: str | None, values: Mapping[str, str]) -> str:
    """Return the manifest of the Kubernetes Secret `name`."""
    metadata = {"name": name, **({} if namespace is None else {"namespace": namespace})}
    return dump_manifest(
        {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "stringData": dict(values)}
    )


def _secret_name(job_name: str) -> str:
    return f"{job_name}-env"


def is_object_name(text: str) -> bool:
    """Return whether `text` is a DNS subdomain, as the name of a Kubernetes object must be."""
    return len(text) <= _MAX_OBJECT_CHARACTERS and _OBJECT_NAME.fullmatch(text) is not None


def check_namespace(name: str) -> None:
    """Raise LaunchError unless `name` is a DNS label (RFC 1123), as the name of a namespace must be."""
    if len(name) > _MAX_LABEL_CHARACTERS or "." in name or not is_object_name(name):
        raise LaunchError(
            f"--namespace must have at most {_MAX_LABEL_CHARACTERS} lowercase letters, digits and dashes, got "
            f"{name!r}. List the names with: kubectl get namespaces"
        )


def _check_runtime(settings: ManifestSettings, kind: str) -> None:
    """Raise LaunchError for an invalid runtime, for two runtimes, and for a runtime if `kind` is not TrainJob."""
    for option, name in (("--runtime", settings.runtime), ("--mpi-runtime", settings.mpi_runtime)):
        if name is None:
            continue
        if kind != "TrainJob":
            raise LaunchError(
                f"{option} {name} is an option for a TrainJob, but --kind is {kind}. Leave {option} or --kind out"
            )
        if not is_object_name(name):
            raise LaunchError(
                f"{option} must be the name of a ClusterTrainingRuntime, got {name!r}. List them with: "
                "kubectl get clustertrainingruntimes"
            )
    if settings.runtime is not None and settings.mpi_runtime is not None:
        raise LaunchError(
            f"A TrainJob has one runtime, but --runtime is {settings.runtime} and --mpi-runtime is "
            f"{settings.mpi_runtime}. Leave one of them out"
        )


def _choose_name(job: Job, settings: ManifestSettings, kind: str) -> str:
    """Return the name in `settings`, else one derived from the script. Raises LaunchError for an invalid name."""
    given_name, last = settings.name, len(job.ranks_per_host) - 1
    # The name of a pod consists of the name of the job and this suffix, and must be a DNS label.
    suffix = {
        "PyTorchJob": f"-worker-{max(0, last - 1)}", "MPIJob": f"-worker-{last}", "TrainJob": f"-node-0-{last}-abcde"
    }[kind]  # fmt: skip
    if settings.mpi_runtime is not None:
        suffix = max(suffix, "-launcher-0-0-abcde", key=len)
    max_characters = _MAX_LABEL_CHARACTERS - len(suffix)
    name = given_name if given_name is not None else job_name(job)
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "job"
    fitting = (label if label[0].isalpha() else f"job-{label}")[:max_characters].rstrip("-")
    if given_name is not None and (len(given_name) > max_characters or not _NAME.fullmatch(given_name)):
        raise LaunchError(
            f"--job-name {given_name!r} is not a valid name for a {kind}: it must begin with a letter, not end with a "
            f"dash, contain only lowercase letters, digits and dashes, and have at most {max_characters} characters, "
            f"because the names of the pods are at most {_MAX_LABEL_CHARACTERS} characters long and end in {suffix}. "
            f"Use: --job-name {fitting}"
        )
    return given_name or fitting


def _build_pytorchjob(
    job: Job, settings: ManifestSettings, name: str, launcher_words: list[str], remarks: list[str]
) -> tuple[str, dict[str, Any]]:
    container = {
        # The operator requires this name.
        "name": "pytorch", "image": settings.image, "command": _torchrun_words(job, launcher_words),
        **_container_fields(job, settings, name, remarks),
    }  # fmt: skip
    template = _pod_template(container)
    # A preempted rank exits with 75, and Kubernetes restarts its pod.
    replica = {"restartPolicy": "OnFailure", "template": template}
    replicas: dict[str, Any] = {"Master": {"replicas": 1, **replica}}
    if len(job.ranks_per_host) > 1:
        replicas["Worker"] = {"replicas": len(job.ranks_per_host) - 1, **replica}
    policy: dict[str, Any] = {"cleanPodPolicy": "None", "backoffLimit": _backoff_limit(job)}
    if settings.timeout_seconds is not None:
        policy["activeDeadlineSeconds"] = settings.timeout_seconds
    spec = {"nprocPerNode": str(job.ranks_per_host[0]), "runPolicy": policy, "pytorchReplicaSpecs": replicas}
    return "kubeflow.org/v1", spec


def _build_trainjob(
    job: Job, settings: ManifestSettings, name: str, launcher_words: list[str], remarks: list[str]
) -> tuple[str, dict[str, Any]]:
    if settings.mpi_runtime is not None:
        runtime = settings.mpi_runtime
        command, common = _mpirun_words(job, settings, name, launcher_words, remarks)
        common.pop("workingDir", None)
        remarks.append(
            f"The TrainJob needs a ClusterTrainingRuntime {runtime!r} with an MPI policy. Kubeflow Trainer starts the "
            f"workers from the image of this runtime, not from {settings.image}: both images need the script, Open MPI "
            "and sshd."
        )
    else:
        runtime = settings.runtime or DEFAULT_RUNTIME
        command, common = _torchrun_words(job, launcher_words), _container_fields(job, settings, name, remarks)
        directory = common.pop("workingDir", None)
        if directory is not None:  # a TrainJob does not have this field
            command = ["bash", "-c", f"cd {quote(directory)} && exec {join(command)}"]
        remarks.append(
            f"The TrainJob needs Kubeflow Trainer 2.2 or later with the ClusterTrainingRuntime {runtime!r}. For the "
            "older training operator, use: unitrain submit --kind PyTorchJob."
        )
        if job.backend == "horovod":
            remarks.append(
                "torchrun starts the ranks, and Horovod uses Gloo, or NCCL on GPUs. For MPI, use: unitrain submit "
                "--mpi-runtime NAME, or --kind MPIJob."
            )
    trainer: dict[str, Any] = {
        "image": settings.image,
        "command": command,
        "numNodes": len(job.ranks_per_host),
        "numProcPerNode": job.ranks_per_host[0],
    }
    if "env" in common:
        trainer["env"] = common["env"]
    if "resources" in common:
        trainer["resourcesPerNode"] = common["resources"]
    if job.max_restarts:
        remarks.append(
            f"--max-restarts {job.max_restarts} is left out: the runtime determines the restarts of a TrainJob, with "
            "failurePolicy and backoffLimit."
        )
    spec: dict[str, Any] = {"runtimeRef": {"name": runtime}, "trainer": trainer}
    if runtime == DEFAULT_RUNTIME and settings.mpi_runtime is None:  # other runtimes define their own volumes
        spec["runtimePatches"] = [_pod_patch()]
    if settings.timeout_seconds is not None:
        spec["activeDeadlineSeconds"] = settings.timeout_seconds
    return "trainer.kubeflow.org/v1alpha1", spec


def _build_mpijob(
    job: Job, settings: ManifestSettings, name: str, launcher_words: list[str], remarks: list[str]
) -> tuple[str, dict[str, Any]]:
    command, common = _mpirun_words(job, settings, name, launcher_words, remarks)
    resources = {"resources": common.pop("resources")} if "resources" in common else {}
    launcher = {"name": "launcher", "image": settings.image, "command": command, **common}
    worker = {"name": "worker", "image": settings.image, "command": ["/usr/sbin/sshd", "-De"], **resources}
    policy: dict[str, Any] = {"cleanPodPolicy": "Running", "backoffLimit": _backoff_limit(job)}
    if settings.timeout_seconds is not None:
        policy["activeDeadlineSeconds"] = settings.timeout_seconds
    remarks.append("The image needs Open MPI and sshd. Images based on mpioperator/openmpi have both.")
    spec = {
        "slotsPerWorker": job.ranks_per_host[0],
        "runPolicy": policy,
        "mpiReplicaSpecs": {
            "Launcher": {
                "replicas": 1,
                "restartPolicy": "OnFailure",
                "template": _pod_template(launcher),
            },
            "Worker": {
                "replicas": len(job.ranks_per_host),
                "restartPolicy": "OnFailure",
                "template": _pod_template(worker),
            },
        },
    }
    return "kubeflow.org/v2beta1", spec


def _backoff_limit(job: Job) -> int:
    return _DEFAULT_BACKOFF_LIMIT if job.max_restarts is None else job.max_restarts


def _mpirun_words(
    job: Job, settings: ManifestSettings, name: str, launcher_words: list[str], remarks: list[str]
) -> tuple[list[str], dict[str, Any]]:
    """Return the mpirun command and the other fields of the container that runs it. The operator sets the hosts."""
    variables = variables_for(job, "mpirun") | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    # Images set PATH and LD_LIBRARY_PATH, but sshd in the workers does not pass them to the ranks. mpirun warns if one
    # of them is unset.
    names = [*variables_for(job, "mpirun"), *job.forwarded, "PATH", "LD_LIBRARY_PATH"]
    if job.backend != "horovod":
        variables |= {"MASTER_PORT": str(job.port or DEFAULT_PORT)}
        names = [*names, "MASTER_ADDR", "MASTER_PORT"]
    command = ["mpirun", "-np", str(job.size)]
    command += [word for variable in dict.fromkeys(names) for word in ("-x", variable)]
    command += merge_options(mpirun.DEFAULT_OPTIONS, launcher_words)
    common = _container_fields(job, settings, name, remarks, variables)
    if "workingDir" in common:
        command += ["-wdir", common["workingDir"]]
    command += job.program
    if job.backend != "horovod":
        # The names of the workers depend on the version of the operator; every version writes them to this file.
        first = 'export MASTER_ADDR="$(head -n 1 "$OMPI_MCA_orte_default_hostfile" | cut -d " " -f 1)"'
        command = ["bash", "-c", f"{first} && exec {join(command)}"]
    return command, common


def _pod_template(container: dict[str, Any]) -> dict[str, Any]:
    """Return a pod template with one container. DataLoader workers need more shared memory than the default 64 MB."""
    shared = {"name": "shared-memory", "mountPath": "/dev/shm"}
    return {
        "spec": {
            "terminationGracePeriodSeconds": _GRACE_SECONDS,
            "containers": [{**container, "volumeMounts": [shared]}],
            "volumes": [{"name": shared["name"], "emptyDir": {"medium": "Memory"}}],
        }
    }


def _pod_patch() -> dict[str, Any]:
    """Return the patch of the runtime's pods with the grace period and the shared memory of `_pod_template`."""
    pod = _pod_template({"name": "node"})["spec"]
    job = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    return {
        "manager": "unitrain/submit",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}},
    }


def _torchrun_words(job: Job, launcher_words: list[str]) -> list[str]:
    """Return the torchrun command. torchrun reads its other settings from the variables of the pod."""
    launcher, program = torchrun.torchrun_and_program(job)
    return [*launcher, *launcher_words, *program]


def _container_fields(
    job: Job, settings: ManifestSettings, name: str, remarks: list[str], values: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the fields of a container that depend on the job: working directory, variables and resources.

    `values` are the variables of the container, by default those of the job. The container reads the values of the
    user's variables from a Kubernetes Secret. A remark explains how to create it.
    """
    fields: dict[str, Any] = {}
    if job.directory is not None:
        fields["workingDir"] = job.directory
    variables: list[dict[str, Any]] = []
    secrets: list[str] = []
    values = variables_for(job, LAUNCHER) if values is None else values
    for variable in dict.fromkeys([*values, *job.forwarded]):
        if variable in values and variable not in job.private_values:
            variables.append({"name": variable, "value": values[variable]})
        else:
            secrets.append(variable)
            variables.append(
                {"name": variable, "valueFrom": {"secretKeyRef": {"name": _secret_name(name), "key": variable}}}
            )
    if secrets:
        # --from-literal would show the values to every user who lists the processes of this host.
        namespace = f" --namespace {settings.namespace}" if settings.namespace else ""
        files = " ".join(f'--from-file={secret}=<(printf %s "${secret}")' for secret in secrets)
        remarks.append(
            f"The values of {', '.join(secrets)} are read from the secret {name}-env, which unitrain submit creates. "
            f"To create it yourself, set them in bash, and run: kubectl create secret generic {name}-env{namespace} "
            f"{files}"
        )
    if variables:
        fields["env"] = variables
    limits: dict[str, Any] = {}
    if settings.gpus:
        limits["nvidia.com/gpu"] = settings.gpus
    if settings.cpus is not None:
        limits["cpu"] = settings.cpus
    if settings.memory is not None:
        limits["memory"] = settings.memory
    if limits:
        fields["resources"] = {"limits": limits}
    return fields


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """PyYAML's dumper with indented lists and quoted strings, and without anchors.

    PyYAML writes strings such as y and 1e3 without quotes; Kubernetes' parser reads them as a boolean and a number.
    """

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: object) -> bool:
        return True


# Text that every version of YAML reads as a string even without quotes.
_PLAIN_STRING = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*(?::[A-Za-z0-9_./-]+)*")
_YAML_KEYWORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}


def _represent_string(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    is_plain = _PLAIN_STRING.fullmatch(value) and value.lower() not in _YAML_KEYWORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if is_plain else '"')


_Dumper.add_representer(str, _represent_string)


def dump_manifest(manifest: dict[str, Any]) -> str:
    """Return a manifest as YAML."""
    text: str = yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=sys.maxsize)
    return text
