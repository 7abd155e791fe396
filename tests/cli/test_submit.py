"""Batch scripts and manifests of `unitrain submit`: contents, validity and submission."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner, Result
from fake_programs import write_program
from hypothesis import given
from hypothesis import strategies as st
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

from unitrain.cli import unitrain
from unitrain.launchers.translation.kubernetes import dump_manifest

# Schemas of PyTorchJob (kubeflow.org/v1, training-operator 1.9) and MPIJob (kubeflow.org/v2beta1, mpi-operator 0.4),
# without the pod templates, for which the schema of Kubernetes is used.
_POLICY = {
    "type": "object",
    "properties": {
        "activeDeadlineSeconds": {"type": "integer", "minimum": 1},
        "backoffLimit": {"type": "integer", "minimum": 0},
        "cleanPodPolicy": {"enum": ["All", "Running", "None"]},
    },
    "additionalProperties": False,
}


def create_schema(
    version: str, kind: str, roles: tuple[str, str], replicas: str, own: dict[str, Any]
) -> dict[str, Any]:
    replica = {
        "type": "object",
        "properties": {
            "replicas": {"type": "integer", "minimum": 1},
            "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
            "template": {"type": "object"},
        },
        "required": ["replicas", "restartPolicy", "template"],
        "additionalProperties": False,
    }
    spec = {
        "type": "object",
        "properties": {
            **own,
            "runPolicy": _POLICY,
            replicas: {
                "type": "object",
                "properties": dict.fromkeys(roles, replica),
                "required": [roles[0]],
                "additionalProperties": False,
            },
        },
        "required": [replicas],
        "additionalProperties": False,
    }
    top = {"apiVersion": {"const": version}, "kind": {"const": kind}, "metadata": {"type": "object"}, "spec": spec}
    return {"type": "object", "properties": top, "required": list(top), "additionalProperties": False}


SCHEMAS = {
    "PyTorchJob": create_schema(
        "kubeflow.org/v1",
        "PyTorchJob",
        ("Master", "Worker"),
        "pytorchReplicaSpecs",
        {"nprocPerNode": {"type": "string"}, "elasticPolicy": {"type": "object"}},
    ),
    "MPIJob": create_schema(
        "kubeflow.org/v2beta1",
        "MPIJob",
        ("Launcher", "Worker"),
        "mpiReplicaSpecs",
        {
            "slotsPerWorker": {"type": "integer", "minimum": 1},
            "sshAuthMountPath": {"type": "string"},
            "mpiImplementation": {"enum": ["OpenMPI", "Intel", "MPICH"]},
        },
    ),
}


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a script in the current folder, and remove variables that change the output from the environment."""
    for name in ("OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "train_digits.py"
    path.write_text("")
    monkeypatch.chdir(tmp_path)
    return path


def submit(*arguments: str, **variables: str) -> Result:
    return CliRunner().invoke(unitrain, ["submit", *arguments], env=variables)


def print_job(*arguments: str, **variables: str) -> str:
    result = submit("--dry-run", *arguments, **variables)
    assert result.exit_code == 0, result.output
    return result.stdout


def create_manifest(*arguments: str, **variables: str) -> dict[str, Any]:
    """Return the manifest after it was validated with the schemas of Kubernetes and Kubeflow."""
    found: dict[str, Any] = yaml.safe_load(print_job("--to", "kubernetes", *arguments, **variables))
    if found["kind"] == "TrainJob":
        read = TrainerV1alpha1TrainJob.from_dict(found)
        assert read is not None
        assert read.to_dict() == found  # from_dict ignores unknown fields
        trainer, patches = found["spec"]["trainer"], found["spec"].get("runtimePatches", [])
        pods = [pod_of_patch(patch) for patch in patches] or [{"containers": [{"name": "node"}]}]
        for pod in pods:
            container = {key: trainer[key] for key in ("image", "command", "env") if key in trainer}
            (node,) = pod["containers"]
            resources = {"resources": trainer["resourcesPerNode"]} if "resourcesPerNode" in trainer else {}
            check_pod({**pod, "containers": [{**node, **container, **resources}]})
        return found
    jsonschema.validate(found, SCHEMAS[found["kind"]])
    for replica in found["spec"].get("pytorchReplicaSpecs", found["spec"].get("mpiReplicaSpecs")).values():
        check_pod(replica["template"]["spec"])
    return found


def check_pod(spec: dict[str, Any]) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
    kubernetes_validate.validate(pod, "1.33", strict=True)


def pod_of_patch(patch: dict[str, Any]) -> dict[str, Any]:
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert job["name"] == "node"
    spec: dict[str, Any] = job["template"]["spec"]["template"]["spec"]
    return spec


def test_batch_script_for_slurm_contains_directives_and_the_srun_command(script: Path) -> None:
    submit_options = [
        "--nodes",
        "2",
        "--gpus-per-node",
        "4",
        "--cpus-per-task",
        "8",
        "--memory",
        "64G",
        "--time",
        "12:00:00",
    ]
    submit_options += ["--partition", "gpu", "--account", "me", "-x", "LEVEL=a b", "--qos=high", "--exclusive"]
    text = print_job("--to", "slurm", *submit_options, script.name, "--epochs", "9 0")
    head, _, body = text.partition("\n\n")
    assert head.splitlines() == ["#!/bin/bash", *(f"#SBATCH {option}" for option in (
        "--job-name=train_digits", "--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--signal=USR1@120", "--requeue",
        "--output=%x-%j.out", "--open-mode=append", "--gpus-per-node=4", "--cpus-per-task=8", "--mem=64G",
        "--time=12:00:00", "--partition=gpu", "--account=me", "--qos=high", "--exclusive",
    ))]  # fmt: skip
    assert "export UNITRAIN_BACKEND" not in body  # the default backend under srun is ddp
    assert "a b" not in body
    assert f"{sys.executable} train_digits.py --epochs '9 0'\n" in body
    assert "export UNITRAIN_BACKEND=horovod\n" in print_job("--to", "slurm", "--backend", "horovod", script.name)
    chosen = print_job("--to", "slurm", "--job-name", "a", "--output", "b.out", "--signal-seconds", "60", script.name)
    assert "#SBATCH --signal=USR1@60\n" in chosen
    assert "USR1@120" not in chosen
    assert "%x-%j" not in chosen


def test_directives_quote_values_with_spaces(script: Path) -> None:
    """Slurm splits a #SBATCH line at unquoted spaces."""
    text = print_job("--to", "slurm", "--job-name", "a b", "--output", "my logs/%j.out", "--comment=it's", script.name)
    directives = [line for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert "#SBATCH --job-name='a b'" in directives
    assert "#SBATCH --output='my logs/%j.out'" in directives
    assert [shlex.split(line)[-1] for line in directives if "comment" in line] == ["--comment=it's"]


@pytest.mark.parametrize("code", [0, 1, 75])
def test_job_is_requeued_only_after_the_exit_code_of_a_preemption(code: int, script: Path, tmp_path: Path) -> None:
    text = print_job("--to", "slurm", "--nodes", "2", "-np", "2", "-x", "LEVEL=3", script.name, "a b")
    write_program(tmp_path, "scontrol", 'echo "scontrol $*" >> log; [ "$1" != show ] || printf "n1\\nn2\\n"')
    write_program(tmp_path, "srun", f'echo "srun $MASTER_ADDR:$MASTER_PORT $OMP_NUM_THREADS $LEVEL" >> log; '
            f'for word in "$@"; do echo "<$word>" >> log; done; exit {code}')  # fmt: skip
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "4071", "SLURM_JOB_NODELIST": "n[1-2]",
               "SLURM_CPUS_PER_TASK": "6", "LEVEL": "3"}  # fmt: skip
    done = subprocess.run(["bash", "-u", "-c", text], env=environ, cwd=tmp_path, check=False, timeout=30)
    log = (tmp_path / "log").read_text().splitlines()
    assert done.returncode == code
    assert log[:2] == ["scontrol show hostnames n[1-2]", "srun n1:29571 6 3"]
    again = ["scontrol requeue 4071"] if code == 75 else []
    assert log[log.index("<train_digits.py>") :] == ["<train_digits.py>", "<a b>", *again]
    assert "<--cpus-per-task=6>" in log


def test_each_attempt_has_a_new_key_that_is_not_displayed(script: Path, tmp_path: Path) -> None:
    text = print_job("--to", "slurm", script.name)
    write_program(tmp_path, "srun", 'echo "$UNITRAIN_JOB_KEY"; echo "$*" >&2')
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "4071"}

    def run(**variables: str) -> tuple[str, str]:
        done = subprocess.run(["bash", "-u", "-c", text], env={**environ, **variables}, cwd=tmp_path, check=True,
                              capture_output=True, text=True, timeout=30)  # fmt: skip
        return done.stdout.strip(), done.stderr

    (first, words), (second, _) = run(), run()
    assert re.fullmatch(r"[0-9a-f]{64}", first)
    assert re.fullmatch(r"[0-9a-f]{64}", second)
    assert first != second
    assert first not in words
    assert "--export ALL" in words, "srun must pass the key to the ranks in the environment"
    assert run(UNITRAIN_JOB_KEY="mine")[0] == "mine"


def test_trainer_handles_the_signal_that_slurm_sends(script: Path) -> None:
    from unitrain import TrainConfig
    from unitrain.errors import Preempted

    text = print_job("--to", "slurm", script.name)
    assert "--signal=USR1@" in text
    assert "SIGUSR1" in TrainConfig(max_epochs=1).preemption_signals
    assert f'"$code" -eq {Preempted(None).code} ' in text


def test_pytorchjob_has_a_master_and_workers_with_torchrun(script: Path) -> None:
    submit_options = [
        "--kind",
        "PyTorchJob",
        "--nodes",
        "3",
        "--gpus-per-node",
        "4",
        "--cpus-per-task",
        "2",
        "--memory",
        "64G",
        "--time",
        "2-1",
    ]
    found = create_manifest(
        *submit_options, "--image", "registry/train:1", "--namespace", "team", "-x", "LEVEL=3", script.name, "-v"
    )
    assert (found["kind"], found["metadata"]) == ("PyTorchJob", {"name": "train-digits", "namespace": "team"})
    spec = found["spec"]
    assert (spec["nprocPerNode"], spec["runPolicy"]["activeDeadlineSeconds"]) == ("4", 49 * 3600)
    replicas = spec["pytorchReplicaSpecs"]
    assert [(name, one["replicas"]) for name, one in replicas.items()] == [("Master", 1), ("Worker", 2)]
    container = replicas["Worker"]["template"]["spec"]["containers"][0]
    assert container["name"] == "pytorch"
    assert container["command"] == ["torchrun", "--", "train_digits.py", "-v"]
    secret = {"name": "train-digits-env", "key": "LEVEL"}
    assert container["env"] == [{"name": "LEVEL", "valueFrom": {"secretKeyRef": secret}}]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 4, "cpu": "8", "memory": "64Gi"}}
    one_node = create_manifest("--kind", "PyTorchJob", "--image", "a", script.name)
    assert list(one_node["spec"]["pytorchReplicaSpecs"]) == ["Master"]


def test_trainjob_contains_the_resources_and_the_command(script: Path) -> None:
    submit_options = ["--nodes", "2", "--gpus-per-node", "4", "--image", "a", "--backend", "horovod"]
    found = create_manifest(*submit_options, "--time", "90", script.name)
    assert (found["apiVersion"], found["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    (patch,) = found["spec"].pop("runtimePatches")
    assert patch["manager"] == "unitrain/submit"
    pod = pod_of_patch(patch)
    assert pod["terminationGracePeriodSeconds"] == 120
    assert [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]] == ["/dev/shm"]
    assert found["spec"] == {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": {
            "image": "a",
            "command": ["torchrun", "train_digits.py"],
            "numNodes": 2,
            "numProcPerNode": 4,
            "env": [{"name": "UNITRAIN_BACKEND", "value": "horovod"}],
            "resourcesPerNode": {"limits": {"nvidia.com/gpu": 4}},
        },
        "activeDeadlineSeconds": 5400,
    }


def test_trainjob_may_use_another_runtime_and_folder(script: Path, tmp_path: Path) -> None:
    found = create_manifest("--runtime", "team-torch", "--image", "a", script.name)
    assert found["spec"]["runtimeRef"] == {"name": "team-torch"}
    assert "runtimePatches" not in found["spec"]  # unitrain cannot patch the pods of an unknown runtime
    folder = tmp_path / "my runs"
    folder.mkdir()
    write_program(tmp_path, "torchrun", 'pwd; printf "%s\\n" "$@"')
    result = CliRunner().invoke(unitrain, ["translate", "--to", "kubernetes", f"cd '{folder}' && torchrun t.py 'a b'"])
    assert result.exit_code == 0, result.output
    command = yaml.safe_load(result.stdout)["spec"]["trainer"]["command"]
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    words = subprocess.check_output(command, env=environ, text=True, timeout=30).splitlines()
    assert words == [str(folder), "t.py", "a b"]


@pytest.mark.parametrize("kind", ["MPIJob", "TrainJob"])
@pytest.mark.parametrize("backend", ["horovod", "ddp"])
def test_mpirun_starts_the_ranks_of_mpi_jobs_in_kubernetes(
    backend: str, kind: str, script: Path, tmp_path: Path
) -> None:
    submit_options = ["--kind", "MPIJob"] if kind == "MPIJob" else ["--mpi-runtime", "mpi-train"]
    found = create_manifest(
        "--backend", backend, *submit_options, "--nodes", "2", "-np", "8", "--image", "a", script.name
    )
    spec = found["spec"]
    if kind == "MPIJob":
        assert spec["slotsPerWorker"] == 4
        assert [(name, one["replicas"]) for name, one in spec["mpiReplicaSpecs"].items()] == [
            ("Launcher", 1),
            ("Worker", 2),
        ]
        launcher = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    else:
        launcher = spec["trainer"]
        assert (spec["runtimeRef"], launcher["numNodes"], launcher["numProcPerNode"]) == ({"name": "mpi-train"}, 2, 4)
        # Kubeflow Trainer rejects jobs that set these variables.
        assert not {one["name"] for one in launcher["env"] if one["name"].startswith("OMPI_MCA_")}
    variables = {one["name"]: one["value"] for one in launcher["env"]}
    (tmp_path / "hostfile").write_text("w-0.train slots=4\nw-1.train slots=4\n")
    write_program(tmp_path, "mpirun", 'echo "$MASTER_ADDR:$MASTER_PORT:$UNITRAIN_BACKEND"; printf "%s\\n" "$@"')
    environ = {
        **variables,
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "OMPI_MCA_orte_default_hostfile": str(tmp_path / "hostfile"),
    }
    notes, *words = subprocess.check_output(launcher["command"], env=environ, text=True, timeout=30).splitlines()
    assert notes == ("::" if backend == "horovod" else "w-0.train:29500:ddp")
    assert words[:2] == ["-np", "8"]
    assert words[-2:] == ["python", "train_digits.py"]
    rendezvous = () if backend == "horovod" else ("UNITRAIN_BACKEND", "MASTER_ADDR", "MASTER_PORT")
    assert {words[place + 1] for place, word in enumerate(words) if word == "-x"} == {
        "PATH",
        "LD_LIBRARY_PATH",
        *rendezvous,
    }


@pytest.mark.parametrize("backend", ["horovod", "ddp"])
def test_default_kind_is_a_trainjob_in_the_default_runtime_of_kubeflow_trainer(backend: str, script: Path) -> None:
    arguments = ("--to", "kubernetes", "--backend", backend, "--image", "a", script.name)
    found = yaml.safe_load(print_job(*arguments))
    assert (found["kind"], found["spec"]["runtimeRef"]) == ("TrainJob", {"name": "torch-distributed"})
    notes = submit("--dry-run", *arguments).stderr
    assert "needs Kubeflow Trainer 2.2 or later with the ClusterTrainingRuntime 'torch-distributed'" in notes
    assert ("For MPI, use: unitrain submit --mpi-runtime NAME, or --kind MPIJob." in notes) == (backend == "horovod")


def test_job_has_the_name_of_its_configuration_file_and_a_note_about_keys_to_resume(script: Path) -> None:
    file = script.with_name("digits.yaml")
    file.write_text("model: digits_parts.create_network\n")
    result = submit("--dry-run", "--to", "slurm", "--nodes", "2", "--gpus-per-node", "2", file.name)
    assert "#SBATCH --job-name=digits\n" in result.stdout
    assert "the configuration needs the keys resume: auto and output_dir." in result.stderr


KINDS = {"PyTorchJob": "-worker-{}", "MPIJob": "-worker-{}", "TrainJob": "-node-0-{}-abcde"}


@pytest.mark.parametrize("nodes", [1, 2, 12, 101])
@pytest.mark.parametrize("kind", KINDS)
def test_job_names_in_kubernetes_are_valid_labels(kind: str, nodes: int, script: Path, tmp_path: Path) -> None:
    """The operators derive names of pods and services from the job name. They must be DNS labels (RFC 1035)."""
    submit_options = ["--to", "kubernetes", "--kind", kind, "--nodes", str(nodes), "--image", "a"]

    def name_after(file: str) -> str:
        (tmp_path / file).touch()
        name = yaml.safe_load(print_job(*submit_options, file))["metadata"]["name"]
        last = KINDS[kind].format(max(0, nodes - 2 if kind == "PyTorchJob" else nodes - 1))
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", f"{name}{last}")
        return str(name)

    assert name_after("3d-unet.py") == "job-3d-unet"
    assert name_after("__main__.py") == "main"
    assert name_after("Train_UNet2.py") == "train-unet2"
    assert name_after("4.py") == "job-4"
    longest = name_after("x" * 80 + ".py")
    assert set(longest) == {"x"}
    assert name_after(longest[:-1] + "_y" + ".py") == longest[:-1], "a name must not end with a dash"
    name = f"a{longest[1:-1]}1"
    assert yaml.safe_load(print_job(*submit_options, "--job-name", name, script.name))["metadata"]["name"] == name
    for invalid_name in ("3d-unet", f"{name}2", "a" * 63, "a-", "-a", "a.b", "a\n", ""):
        result = submit("--dry-run", *submit_options, "--job-name", invalid_name, script.name)
        assert result.exit_code == 2
        assert f"is not a valid name for a {kind}: it must begin with a letter" in result.stderr
        assert f"have at most {len(longest)} characters" in result.stderr
        suggested = result.stderr.rpartition("--job-name ")[2].strip()
        assert (
            yaml.safe_load(print_job(*submit_options, "--job-name", suggested, script.name))["metadata"]["name"]
            == suggested
        )


def test_launcher_options_are_passed_to_the_launcher_in_the_pods(script: Path) -> None:
    def translated_command(line: str, *options: str) -> str:
        result = CliRunner().invoke(unitrain, ["translate", "--to", "kubernetes", *options, line])
        spec = yaml.safe_load(result.stdout)["spec"]
        assert "left out" not in result.stderr
        if "trainer" in spec:
            return " ".join(spec["trainer"]["command"])
        replica = next(iter((spec.get("pytorchReplicaSpecs") or spec["mpiReplicaSpecs"]).values()))
        return " ".join(replica["template"]["spec"]["containers"][0]["command"])

    for options in ((), ("--kind", "PyTorchJob")):
        assert translated_command("torchrun --nproc-per-node 2 --tee 3 t.py", *options) == "torchrun --tee 3 t.py"
    line = "OMPI_MCA_x=1 mpirun -np 2 --report-bindings -bind-to none python t.py"
    assert translated_command(line, "--kind", "MPIJob") == (
        "mpirun -np 2 -x OMPI_MCA_x -x PATH -x LD_LIBRARY_PATH --bind-to none --map-by slot "
        "-mca odls_base_sigkill_timeout 4 --report-bindings python t.py"
    )


def test_kind_is_rejected_for_targets_other_than_kubernetes() -> None:
    result = CliRunner().invoke(unitrain, ["translate", "--to", "srun", "--kind", "MPIJob", "torchrun t.py"])
    assert result.exit_code == 2
    assert "--kind MPIJob is an option for kubernetes, but --to is srun. Leave --kind out" in result.stderr


def test_secrets_are_not_written_to_manifests_and_scripts(script: Path) -> None:
    submit_options = ["-x", "HF_TOKEN", "-x", "LEVEL", script.name]
    variables = {"HF_TOKEN": "abc", "LEVEL": "abcd"}
    for kind in ("PyTorchJob", "TrainJob", "MPIJob"):
        result = submit("--dry-run", "--to", "kubernetes", "--kind", kind, "--image", "a", *submit_options, **variables)
        assert "abc" not in result.output
        assert (
            'kubectl create secret generic train-digits-env --from-file=HF_TOKEN=<(printf %s "$HF_TOKEN") '
            '--from-file=LEVEL=<(printf %s "$LEVEL")'
        ) in result.stderr
        named = ("--namespace", "team", "--kind", kind, "--image", "a", *submit_options)
        assert (
            "train-digits-env --namespace team --from"
            in submit("--dry-run", "--to", "kubernetes", *named, **variables).stderr
        )
        found = create_manifest("--kind", kind, "--image", "a", *submit_options, **variables)
        env = str(found)
        assert (
            "{'name': 'HF_TOKEN', 'valueFrom': {'secretKeyRef': {'name': 'train-digits-env', 'key': 'HF_TOKEN'}}}"
            in env
        )
        assert "'key': 'LEVEL'" in env
    assert "abc" not in print_job("--to", "slurm", *submit_options, **variables)


@pytest.mark.parametrize("texts", [["DB=hunter2", "EMPTY="], ["DB", "EMPTY"]])
def test_values_are_passed_to_sbatch_in_its_environment(texts: list[str], script: Path, tmp_path: Path) -> None:
    write_program(tmp_path, "sbatch", 'echo "$* $DB,$EMPTY" > log; cat > taken')
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "DB": "hunter2", "EMPTY": ""}
    result = submit("--to", "slurm", *(f"-x{text}" for text in texts), script.name, **variables)
    assert (tmp_path / "log").read_text() == " hunter2,\n"
    assert "hunter2" not in (tmp_path / "taken").read_text() + result.output


@pytest.mark.parametrize("texts", [["DB=hunter2", "EMPTY="], ["DB", "EMPTY"]])
@pytest.mark.parametrize("kind", ["PyTorchJob", "TrainJob", "MPIJob"])
def test_values_are_passed_to_kubectl_in_a_secret(kind: str, texts: list[str], script: Path, tmp_path: Path) -> None:
    write_program(tmp_path, "kubectl", 'echo "$*" > log; cat > taken')
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "DB": "hunter2", "EMPTY": ""}
    options = ["--image", "a", "--namespace", "team", "--kind", kind, *(f"-x{text}" for text in texts)]
    result = submit("--to", "kubernetes", *options, script.name, **variables)
    assert "hunter2" not in (tmp_path / "log").read_text() + result.output
    secret, manifest = yaml.safe_load_all((tmp_path / "taken").read_text())
    assert secret == {
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "train-digits-env", "namespace": "team"},
        "type": "Opaque", "stringData": {"DB": "hunter2", "EMPTY": ""},
    }  # fmt: skip
    assert manifest == yaml.safe_load(result.stdout)
    for name in ("DB", "EMPTY"):
        assert f"'secretKeyRef': {{'name': 'train-digits-env', 'key': '{name}'}}" in str(manifest)


@pytest.mark.parametrize(("target", "command"), [("slurm", "sbatch"), ("kubernetes", "kubectl apply -f -")])
def test_submit_prints_the_job_and_passes_it_to_the_scheduler(
    target: str, command: str, script: Path, tmp_path: Path
) -> None:
    name = command.partition(" ")[0]
    write_program(tmp_path, name, 'echo "$0 $*" | sed s,.*/,, > log; cat > taken; exit 3')
    image = ["--image", "a"] if target == "kubernetes" else []
    result = submit("--to", target, *image, script.name, PATH=f"{tmp_path}:/usr/bin:/bin")
    assert result.exit_code == 3
    assert (tmp_path / "log").read_text().strip() == command
    assert (tmp_path / "taken").read_text() == print_job("--to", target, *image, script.name) == result.stdout
    assert "resume=" in result.stderr or target == "kubernetes"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--to slrum T", "Unknown scheduler 'slrum'. Did you mean 'slurm'? Available: slurm, kubernetes."),
        ("--to slurm --backend dpd T", "Unknown backend 'dpd'. Did you mean 'ddp'? Available: ddp, horovod, local."),
        ("--to slurm --time 4h T", "--time must be minutes, or as in 4:00:00 and 2-12, got '4h'. Use: --time 4:00:00"),
        ("--to slurm --memory lots T", "--memory must be a number with K, M, G or T, got 'lots'. Use: --memory 64G"),
        ("--to slurm --nodes 3 -np 2 T", "-np 2 leaves some of 3 nodes without a rank. Use: --nodes 2"),
        (
            "--to slurm --nodes 1000000000 T",
            "Invalid value for '--nodes': 1000000000 is not in the range 1<=x<=65536.",
        ),
        ("--to slurm --image a T", "--image a is an option for kubernetes, but --to is slurm. Leave --image out"),
        (
            "--to kubernetes --partition a T",
            "--partition a is an option for slurm, but --to is kubernetes. Leave --partition out",
        ),
        (
            "--to kubernetes --qos=high T",
            (
                "unitrain submit has no option '--qos=high' for kubernetes. Edit the manifest instead: "
                "--dry-run > job.yaml"
            ),
        ),
        (
            "--to kubernetes --kind Job T",
            "--kind must be one of TrainJob, PyTorchJob, MPIJob, got 'Job'. Use: --kind TrainJob",
        ),
        (
            "--to kubernetes --job-name My_Job T",
            (
                "--job-name 'My_Job' is not a valid name for a TrainJob: it must begin with a letter, not end with a "
                "dash, contain only lowercase letters, digits and dashes, and have at most 48 characters, because the "
                "names of the pods are at most 63 characters long and end in -node-0-0-abcde. Use: --job-name my-job"
            ),
        ),
        (
            "--to kubernetes --nodes 2 -np 3 --image a T",
            (
                "TrainJob starts the same number of processes on each host, but the hosts of this job have 2, "
                "1. Use equal slots, as in: -np 4 with 2 slots per host"
            ),
        ),
        (
            "--to slurm --runtime a T",
            "--runtime a is an option for kubernetes, but --to is slurm. Leave --runtime out",
        ),
        (
            "--to kubernetes --kind MPIJob --mpi-runtime a T",
            "--mpi-runtime a is an option for a TrainJob, but --kind is MPIJob. Leave --mpi-runtime or --kind out",
        ),
        (
            "--to kubernetes --runtime a --mpi-runtime b T",
            "A TrainJob has one runtime, but --runtime is a and --mpi-runtime is b. Leave one of them out",
        ),
        (
            "--to kubernetes --runtime My_Runtime T",
            (
                "--runtime must be the name of a ClusterTrainingRuntime, got 'My_Runtime'. List them with: kubectl "
                "get clustertrainingruntimes"
            ),
        ),
        (
            "--to slurm train_digit.py",
            "Script 'train_digit.py' does not exist. Did you mean 'train_digits.py'? "
            "Options of unitrain go before the script.",
        ),
        (
            "--to slurm --qos high T",
            (
                "Script 'high' does not exist. Options of unitrain go before the script. Write options of "
                "sbatch as one word each: --qos=high"
            ),
        ),
        (
            "--to slurm -J digits T",
            (
                "Script 'digits' does not exist. Options of unitrain go before the script. Write options of "
                "sbatch as one word each: -Jdigits"
            ),
        ),
        ("--to slurm --requeue", "The command lacks a script. End it as in: train.py"),
    ],
    ids=str,
)
def test_invalid_arguments_are_reported_with_a_fix(arguments: str, message: str, script: Path) -> None:
    result = submit("--dry-run", *shlex.split(arguments.replace(" T", f" {script.name}")))
    assert result.exit_code == 2, result.output
    assert result.stderr.rpartition("\nError: ")[2].strip() == message


def test_submit_reports_a_missing_scheduler_and_image(script: Path, tmp_path: Path) -> None:
    assert "A Kubernetes job needs an image that contains the script. Add --image NAME" in (
        submit("--to", "kubernetes", script.name).stderr
    )
    assert "sbatch, which submits the job, is not on PATH. Run the command on a host that has it, or save the job" in (
        submit("--to", "slurm", script.name, PATH=str(tmp_path)).stderr
    )


PLAIN = st.recursive(
    st.text(max_size=12)
    | st.integers()
    | st.booleans()
    | st.sampled_from(["no", "1e3", "~", "0x1", "a: b", "- a", "12:30"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


# The Hypothesis deadline is disabled, because a busy machine may exceed it.
@given(st.dictionaries(st.text(max_size=6), PLAIN, max_size=4))
def test_yaml_of_manifests_round_trips(data: dict[str, Any]) -> None:
    assert yaml.safe_load(dump_manifest(data)) == data
