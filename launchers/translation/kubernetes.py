"""Manifests for Kubernetes: Kubeflow's PyTorchJob and TrainJob, and the MPI operator's MPIJob."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from unitrain.launchers import mpirun
from unitrain.launchers.arguments import looks_secret, merge_options
from unitrain.launchers.errors import LaunchError
from unitrain.launchers.rendezvous import DEFAULT_PORT
from unitrain.launchers.translation import torchrun
from unitrain.launchers.translation.job import Job
from unitrain.launchers.translation.sbatch import name_of
from unitrain.launchers.translation.words import expands, join, shown
from unitrain.launchers.translation.writing import Written, options_of, variables_of
from unitrain.launchers.translation.yaml import dump

LAUNCHER = "kubernetes"
KINDS = ("PyTorchJob", "TrainJob", "MPIJob")
# The operators also make services, whose names are DNS labels as in RFC 1035.
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL_CHARACTERS = 63
_GRACE_SECONDS = 120


@dataclass(frozen=True, kw_only=True)
class Pods:
    """What a manifest says beyond the job: `kind` of KINDS, or None for the backend's, and what each pod has.

    `cpus` and `memory` are quantities as Kubernetes writes them, `seconds` is how long the job may take.
    """

    kind: str | None = None
    name: str | None = None
    namespace: str | None = None
    image: str = "IMAGE"
    gpus: int | None = None
    cpus: str | None = None
    memory: str | None = None
    seconds: int | None = None


def write(job: Job, pods: Pods | None = None) -> Written:
    """Return the manifest, for `kubectl apply -f`: a pod for each host, which gets SIGTERM two minutes before its end.

    DDP has a PyTorchJob, in whose pods torchrun starts the ranks, and Horovod an MPIJob, in which mpirun does, unless
    `pods` says otherwise. Raises LaunchError for what they cannot have.
    """
    pods = pods or Pods()
    kind = pods.kind or ("MPIJob" if job.backend == "horovod" else "PyTorchJob")
    if kind not in KINDS:
        raise LaunchError(f"--kind must be one of {', '.join(KINDS)}, got {kind!r}. Use: --kind {KINDS[0]}")
    job.check_even(kind)
    options = [word for one in job.others for word in one.words]
    for word in (*job.program, *job.environment.values(), job.directory or "", *options):
        if expands(word):
            raise LaunchError(
                f"{shown(word)!r} is for a shell to expand, and a container's command has none. Write its value in its "
                "place, or start a script of your own: bash -c '...'"
            )
    name = _name(job, pods.name, kind)
    # Options of what starts the ranks in the pods stay with it.
    runner = "mpirun" if kind == "MPIJob" else "torchrun"
    kept = [one for one in job.others if one.launcher == runner or runner in one.passes]
    given, _ = options_of(replace(job, others=tuple(kept)), runner)
    left = replace(job, others=tuple(one for one in job.others if one not in kept))
    if runner == "mpirun":
        left = replace(left, environment={})
    said = [*job.remarks, *options_of(left, LAUNCHER)[1]]
    if job.hosts:
        said.append(f"Kubernetes chooses the hosts: the names {', '.join(job.hosts)} are left out.")
    if pods.image == "IMAGE":
        said.append("Put the name of your image in the place of IMAGE, or give it: unitrain submit --image NAME.")
    metadata: dict[str, Any] = {"name": name}
    if pods.namespace is not None:
        metadata["namespace"] = pods.namespace
    build = {"PyTorchJob": _pytorchjob, "TrainJob": _trainjob, "MPIJob": _mpijob}[kind]
    version, spec = build(job, pods, name, given, said)
    manifest = {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}
    return Written(text=dump(manifest), remarks=said)


def _name(job: Job, given: str | None, kind: str) -> str:
    """Return the name that was given, or else one after the script, which the operator takes. Raises LaunchError."""
    last = len(job.counts) - 1
    # The longest name that the operator makes of it: of a pod, of the launcher's job, or of a pod of a JobSet.
    suffix = {
        "PyTorchJob": f"-worker-{max(0, last - 1)}", "MPIJob": f"-worker-{last}", "TrainJob": f"-node-0-{last}-abcde"
    }[kind]  # fmt: skip
    most = _LABEL_CHARACTERS - len(suffix)
    wanted = given if given is not None else name_of(job)
    plain = re.sub(r"[^a-z0-9]+", "-", wanted.lower()).strip("-") or "job"
    fitting = (plain if plain[0].isalpha() else f"job-{plain}")[:most].rstrip("-")
    if given is not None and (len(given) > most or not _NAME.fullmatch(given)):
        raise LaunchError(
            f"The name of a {kind} must have at most {most} small letters, digits and dashes and begin with a letter, "
            f"because pods are named after it ({suffix}), got {given!r}. Use: --job-name {fitting}"
        )
    return given or fitting


def _pytorchjob(job: Job, pods: Pods, name: str, given: list[str], said: list[str]) -> tuple[str, dict[str, Any]]:
    container = {
        # The operator looks for a container of this name.
        "name": "pytorch", "image": pods.image, "command": _torchrun(job, given), **_common(job, pods, name, said),
    }  # fmt: skip
    template = _template(container)
    # A rank that was told to go ends with 75, and its pod is to be started again.
    replica = {"restartPolicy": "OnFailure", "template": template}
    replicas: dict[str, Any] = {"Master": {"replicas": 1, **replica}}
    if len(job.counts) > 1:
        replicas["Worker"] = {"replicas": len(job.counts) - 1, **replica}
    policy: dict[str, Any] = {"cleanPodPolicy": "None", "backoffLimit": job.max_restarts or 3}
    if pods.seconds is not None:
        policy["activeDeadlineSeconds"] = pods.seconds
    spec = {"nprocPerNode": str(job.counts[0]), "runPolicy": policy, "pytorchReplicaSpecs": replicas}
    return "kubeflow.org/v1", spec


def _trainjob(job: Job, pods: Pods, name: str, given: list[str], said: list[str]) -> tuple[str, dict[str, Any]]:
    common = _common(job, pods, name, said)
    if "workingDir" in common:
        raise LaunchError(
            f"A TrainJob has no working directory of its own, and the job is in {job.directory}. Set it in the image, "
            "or use: --kind PyTorchJob"
        )
    trainer: dict[str, Any] = {
        "image": pods.image,
        "command": _torchrun(job, given),
        "numNodes": len(job.counts),
        "numProcPerNode": job.counts[0],
    }
    if "env" in common:
        trainer["env"] = common["env"]
    if "resources" in common:
        trainer["resourcesPerNode"] = common["resources"]
    said.append("The TrainJob needs the ClusterTrainingRuntime 'torch-distributed', which Kubeflow Trainer brings.")
    spec: dict[str, Any] = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}
    if pods.seconds is not None:
        spec["activeDeadlineSeconds"] = pods.seconds
    return "trainer.kubeflow.org/v1alpha1", spec


def _mpijob(job: Job, pods: Pods, name: str, given: list[str], said: list[str]) -> tuple[str, dict[str, Any]]:
    variables = variables_of(job, "mpirun") | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    # sshd in the workers gives the ranks neither of the last two, which images set; mpirun warns if one is not set.
    names = [*variables_of(job, "mpirun"), *job.forwarded, "PATH", "LD_LIBRARY_PATH"]
    if job.backend != "horovod":
        variables |= {"MASTER_PORT": str(job.port or DEFAULT_PORT)}
        names = [*names, "MASTER_ADDR", "MASTER_PORT"]
    command = ["mpirun", "-np", str(job.size)]  # the operator tells it the hosts and their slots
    command += [word for one in dict.fromkeys(names) for word in ("-x", one)]
    command += merge_options(mpirun.DEFAULT_OPTIONS, given)
    common = _common(replace(job, environment=variables, backend=None, others=()), pods, name, said, "mpirun")
    resources = {"resources": common.pop("resources")} if "resources" in common else {}
    if "workingDir" in common:
        command += ["-wdir", common["workingDir"]]
    command += job.program
    if job.backend != "horovod":
        # The operator's versions name the workers differently, and all write their names into this file.
        first = 'export MASTER_ADDR="$(head -n 1 "$OMPI_MCA_orte_default_hostfile" | cut -d " " -f 1)"'
        command = ["bash", "-c", f"{first} && exec {join(command)}"]
    launcher = {"name": "launcher", "image": pods.image, "command": command, **common}
    worker = {"name": "worker", "image": pods.image, "command": ["/usr/sbin/sshd", "-De"], **resources}
    policy: dict[str, Any] = {"cleanPodPolicy": "Running", "backoffLimit": job.max_restarts or 3}
    if pods.seconds is not None:
        policy["activeDeadlineSeconds"] = pods.seconds
    said.append("The image needs Open MPI and an sshd, as those made from mpioperator/openmpi have them.")
    spec = {
        "slotsPerWorker": job.counts[0],
        "runPolicy": policy,
        "mpiReplicaSpecs": {
            "Launcher": {
                "replicas": 1,
                "restartPolicy": "OnFailure",
                "template": _template(launcher),
            },
            "Worker": {
                "replicas": len(job.counts),
                "restartPolicy": "OnFailure",
                "template": _template(worker),
            },
        },
    }
    return "kubeflow.org/v2beta1", spec


def _template(container: dict[str, Any]) -> dict[str, Any]:
    """Return a pod of one container. The workers of a DataLoader need more shared memory than the usual 64 MB."""
    shared = {"name": "shared-memory", "mountPath": "/dev/shm"}
    return {
        "spec": {
            "terminationGracePeriodSeconds": _GRACE_SECONDS,
            "containers": [{**container, "volumeMounts": [shared]}],
            "volumes": [{"name": shared["name"], "emptyDir": {"medium": "Memory"}}],
        }
    }


def _torchrun(job: Job, given: list[str]) -> list[str]:
    """Return torchrun's command, which reads all else from the variables that the pod is told."""
    launcher, program = torchrun.started(job)
    return [*launcher, *given, *program]


def _common(job: Job, pods: Pods, name: str, said: list[str], launcher: str = LAUNCHER) -> dict[str, Any]:
    """Return what a container has of a job: its directory, variables and resources."""
    found: dict[str, Any] = {}
    if job.directory is not None:
        found["workingDir"] = job.directory
    variables: list[dict[str, Any]] = []
    secrets: list[str] = []
    values = variables_of(job, launcher)
    for one in dict.fromkeys([*values, *job.forwarded]):
        if one in values and not looks_secret(one, values[one]):
            variables.append({"name": one, "value": values[one]})
        else:
            secrets.append(one)
            variables.append({"name": one, "valueFrom": {"secretKeyRef": {"name": f"{name}-env", "key": one}}})
    if secrets:
        # --from-literal would show the values to everybody who lists the processes of this host.
        create = f"kubectl create secret generic {name}-env --from-env-file=/dev/stdin"
        said.append(
            f"The values of {', '.join(secrets)} come from a secret: env | grep -E '^({'|'.join(secrets)})=' | {create}"
        )
    if variables:
        found["env"] = variables
    limits: dict[str, Any] = {}
    if pods.gpus:
        limits["nvidia.com/gpu"] = pods.gpus
    if pods.cpus is not None:
        limits["cpu"] = pods.cpus
    if pods.memory is not None:
        limits["memory"] = pods.memory
    if limits:
        found["resources"] = {"limits": limits}
    return found
