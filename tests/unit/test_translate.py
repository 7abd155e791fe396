"""Translation of command lines: parsing, building, and a remark for every option that is left out."""

from __future__ import annotations

import argparse
import os
import random
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from requirements import needs_open_mpi

from unitrain.cli import unitrain as command
from unitrain.cli.launch import launch
from unitrain.launchers import Host, LaunchError, read_hostfile
from unitrain.launchers.translation import (
    TARGETS,
    Job,
    build,
    horovodrun,
    mpich,
    openmpi,
    parse,
    srun,
    torchrun,
    unitrain,
)
from unitrain.launchers.translation.job import LauncherOption
from unitrain.launchers.translation.options import Syntax
from unitrain.launchers.translation.words import join, split, split_assignments

COMMAND_TARGETS = sorted(set(TARGETS) - {"sbatch", "kubernetes"})


def translated_lines(line: str, target: str) -> list[str]:
    return [one.shell() for one in build(parse(line), target).lines]


def remarks(line: str, target: str) -> str:
    return "\n".join(build(parse(line), target).remarks)


def create_job(
    program: tuple[str, ...] = ("python", "t.py"), counts: tuple[int, ...] = (1,), hosts: str = "", **more: object
) -> Job:
    fields: dict[str, object] = {
        "program": program,
        "ranks_per_host": counts,
        "hosts": tuple(hosts.split()),
        "backend": "ddp",
        **more,
    }
    return Job(**fields)  # type: ignore[arg-type]


# --- parsing ---


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "horovodrun -np 16 -H a:8,b:8 python train.py",
            create_job(("python", "train.py"), counts=(8, 8), hosts="a b", backend="horovod"),
        ),
        ("horovodrun -np 3 -H a:2,b:2 --gloo python t.py", create_job(counts=(2, 1), hosts="a b", backend="horovod")),
        ("horovodrun -H a:2,b:2 python t.py", create_job(counts=(2, 2), hosts="a b", backend="horovod")),
        ("torchrun t.py -np 3", create_job(("python", "t.py", "-np", "3"))),
        ("torchrun --standalone --nproc_per_node=4 t.py", create_job(counts=(4,))),
        ("torchrun --standalone --rdzv-endpoint localhost:0 --master-addr a t.py", create_job()),
        ("torchrun --nproc-per-node 4 -m pkg.train -v", create_job(("python", "-m", "pkg.train", "-v"), counts=(4,))),
        ("torchrun --nproc 2 --no-python ./run.sh a", create_job(("./run.sh", "a"), counts=(2,))),
        (
            "/v/bin/python -m torch.distributed.run --nproc-per-node 2 t.py",
            create_job(("/v/bin/python", "t.py"), counts=(2,)),
        ),
        (
            "python3 -m torch.distributed.run --nproc_per_node 2 --master_port 1234 t.py",
            create_job(("python3", "t.py"), counts=(2,), port=1234),
        ),
        (
            "torchrun --nnodes 2 --node-rank 1 --nproc-per-node 8 --master-addr a --master-port 29500 t.py",
            create_job(counts=(8, 8), address="a"),
        ),
        (
            "torchrun --nnodes 2:2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint a:29400 t.py",
            create_job(counts=(8, 8), address="a", port=29400),
        ),
        ("torchrun --nproc-per-node 2 --rdzv-backend=c10d --rdzv-endpoint=localhost:0 t.py", create_job(counts=(2,))),
        ("torchrun --nnodes 2 --rdzv-endpoint a t.py", create_job(counts=(1, 1), address="a")),
        (
            "torchrun --nnodes 2 --rdzv-endpoint a --master-port 1234 t.py",
            create_job(counts=(1, 1), address="a", port=1234),
        ),
        ("torchrun --nnodes 2 --rdzv-endpoint [::1] t.py", create_job(counts=(1, 1), address="[::1]")),
        ("torchrun --nnodes 2 --rdzv-endpoint [::1]:1234 t.py", create_job(counts=(1, 1), address="[::1]", port=1234)),
        ("torchrun --max-restarts=3 t.py", create_job(max_restarts=3)),
        ("horovodrun -np=4 python t.py", create_job(counts=(4,), backend="horovod")),
        ("unitrain launch -np=4 t.py", create_job(counts=(4,), backend="ddp")),
        (
            "/v/bin/python -P -m unitrain.bootstrap.torchrun --standalone --nproc-per-node 2 t.py",
            create_job(("/v/bin/python", "t.py"), counts=(2,)),
        ),
        (
            "/v/bin/python -P -m unitrain.backends.horovod.horovodrun -np 2 --gloo /v/bin/python t.py",
            create_job(("/v/bin/python", "t.py"), counts=(2,), backend="horovod"),
        ),
        (
            "mpirun -np 4 -H a:2,b:2 -x A -x B=c --wdir /data python t.py",
            create_job(
                counts=(2, 2),
                hosts="a b",
                forwarded=("A",),
                environment={"B": "c"},
                directory="/data",
                backend="horovod",
            ),
        ),
        ("mpirun --n 4 -host a,a,b,b python t.py", create_job(counts=(2, 2), hosts="a b", backend="horovod")),
        ("mpirun -np 4 -H localhost:4 python t.py", create_job(counts=(4,), backend="horovod")),
        ("mpirun -np 16 --map-by ppr:8:node python t.py", create_job(counts=(8, 8), backend="horovod")),
        ("mpirun -np 6 -npernode 4 python t.py", create_job(counts=(4, 2), backend="horovod")),
        ("mpirun -N 2 -H a:8,b:8 python t.py", create_job(counts=(2, 2), hosts="a b", backend="horovod")),
        ("orterun -np 2 -bind-to none -map-by slot python t.py", create_job(counts=(2,), backend="horovod")),
        (
            "mpiexec -n 4 -genv A 1 -genv MASTER_ADDR a -hosts a,b -ppn 2 python t.py",
            create_job(counts=(2, 2), hosts="a b", environment={"A": "1"}, backend="horovod"),
        ),
        (
            "mpiexec -n 4 -hosts a:2,b:2 -genvlist A,B -wdir /d python t.py",
            create_job(counts=(2, 2), hosts="a b", forwarded=("A", "B"), directory="/d", backend="horovod"),
        ),
        (
            "srun -N 2 -n 5 -w n[01-02] -D /d --export=ALL,A=1,B python t.py",
            create_job(counts=(3, 2), hosts="n01 n02", directory="/d", environment={"A": "1"}, forwarded=("B",)),
        ),
        ("srun -n8 --ntasks-per-node=4 -K1 --wait=0 python t.py", create_job(counts=(4, 4))),
        (
            "unitrain launch -np 4 --max-restarts 2 -x A=1 -x B t.py -v",
            create_job(("python", "t.py", "-v"), counts=(4,), max_restarts=2, environment={"A": "1"}, forwarded=("B",)),
        ),
        (
            "unitrain launch --launcher mpirun -H a:2,b:2 t.py",
            create_job(counts=(2, 2), hosts="a b", backend="horovod"),
        ),
        ("UNITRAIN_BACKEND=horovod unitrain launch --backend ddp -np 2 t.py", create_job(counts=(2,), backend="ddp")),
        (
            "UNITRAIN_BACKEND=horovod python -m unitrain launch -np 2 --launcher-args=--verbose t.py",
            create_job(
                counts=(2,),
                backend="horovod",
                launcher_options=(LauncherOption("horovodrun", ("--verbose",), "other"),),
            ),
        ),
        ("python t.py", create_job()),
        ("PET_NNODES=2 PET_MASTER_ADDR=a torchrun --nproc-per-node 2 t.py", create_job(counts=(2, 2), address="a")),
        ("python -m torch.distributed.launch --use_env --nproc_per_node=2 t.py", create_job(counts=(2,))),
        ("python -u -m torch.distributed.run --nproc_per_node=2 t.py", create_job(counts=(2,))),
        ("python -u -m horovod.runner.launch -np 2 python t.py", create_job(counts=(2,), backend="horovod")),
        ("python -u t.py", create_job(("python", "-u", "t.py"))),
        (
            "A=1 env B='2 3' UNITRAIN_BACKEND=ddp horovodrun -np 1 python t.py",
            create_job(environment={"A": "1", "B": "2 3"}),
        ),
        ("cd '/my data' && MASTER_PORT=1234 torchrun t.py", create_job(directory="/my data", port=1234)),
        ("torchrun \\\n  --nproc-per-node 2 \\\n  t.py  # the small one\n", create_job(counts=(2,))),
    ],
    ids=str,
)
def test_parse_returns_the_job_of_a_command_line(line: str, expected: Job) -> None:
    assert parse(line) == expected


def test_parse_accepts_hostfiles(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# ours\na slots=2\n\nb slots = 2 max_slots=4\n")
    for line in (f"mpirun -np 4 --hostfile {file} python t.py", f"horovodrun -np 4 -hostfile {file} python t.py"):
        assert (parse(line).hosts, parse(line).ranks_per_host) == (("a", "b"), (2, 2))
    file.write_text("a:2\nb:2\n")
    assert parse(f"mpiexec -n 4 -f {file} python t.py").ranks_per_host == (2, 2)
    with pytest.raises(LaunchError) as caught:
        parse(f"horovodrun -np 4 --hostfile {file}s python t.py")
    assert str(caught.value) == (
        f"--hostfile {file}s cannot be read: No such file or directory. Check the path, or pass the hosts: "
        "--hosts node1:4,node2:4"
    )


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        # Recorded from srun of Slurm 22.05.8 on two nodes with four GPUs each, which rejects --gpus without --nodes.
        ("--gpus=4 --ntasks-per-gpu=1 -N 2", (2, 2)),
        ("--gpus-per-node=2 --ntasks-per-gpu=1", (2,)),
        ("--gpus=8 --ntasks-per-gpu=1", (8,)),
        ("-G a100:4 --ntasks-per-gpu=2", (8,)),
        ("-G a100:2,h100:2 --ntasks-per-gpu=1", (4,)),
        ("--gres=gpu:2 --ntasks-per-gpu=2", (4,)),
        ("--gres=gpu:a100:2,license:1 --ntasks-per-gpu=1", (2,)),
        ("--gres=gpu --ntasks-per-gpu=3", (3,)),
        ("--gres=gpu:1g.10gb --ntasks-per-gpu=2", (2,)),
        ("--gres=gpu:1g.10gb:3 --ntasks-per-gpu=1", (3,)),
        ("-n 4 --ntasks-per-gpu=2", (4,)),
        ("-w a,b --gpus=4 --ntasks-per-gpu=1", (2, 2)),
    ],
    ids=str,
)
def test_tasks_of_srun_are_derived_from_its_gpus(options: str, counts: tuple[int, ...]) -> None:
    found = parse(f"srun {options} python t.py")
    assert found.ranks_per_host == counts
    gpu_options = [option for option in options.split() if option.startswith(("--gpus", "--gres"))]
    assert set(gpu_options) <= {
        word for other in found.launcher_options for word in other.equivalents.get("sbatch", ())
    }


def test_remarks_state_that_the_number_of_tasks_of_srun_is_not_specified() -> None:
    assert parse("srun -N 2 python t.py").ranks_per_host == (1, 1)
    assert "The srun command does not specify the number of tasks" in remarks("srun -N 2 python t.py", "sbatch")
    assert "does not specify" not in remarks("srun -N 2 --ntasks-per-node 2 python t.py", "sbatch")
    assert "the number of hosts for 8 tasks" in remarks("srun --gpus=8 --ntasks-per-gpu=1 python t.py", "sbatch")


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        # Recorded from mpirun of Open MPI 4.1.4 on three hosts with two cores each.
        ("a max_slots=8 slots=3\nb slots=1 max-slots=2\n", "", [("a", 3), ("b", 1)]),
        ("a max_slots=3\nb max-slots=1\n", "", [("a", 3), ("b", 1)]),
        ("a\na\na\nb slots=2\n", "", [("a", 3), ("b", 2)]),
        ("a slots=2\nb\n", "-np 4", [("a", 2), ("b", 2)]),
        ("a slots=2\nb\nc\n", "-np 3", [("a", 2), ("b", 1)]),
        ("a slots=4\nb\n", "-np 4", [("a", 4)]),
        ("a\nb\n", "-np 1", [("a", 1)]),
        ("a\n", "-np 8", [("a", 8)]),
        ("a\nb\n", "-np 4 -N 2", [("a", 2), ("b", 2)]),
        ("a\nb\n", "-np 3 --map-by node", [("a", 2), ("b", 1)]),
        ("a slots=1\nb\nc\n", "-np 4 --map-by node", [("a", 1), ("b", 2), ("c", 1)]),
        ("a slots=1\nb slots=4\n", "-H b:2", [("b", 2)]),
    ],
    ids=str,
)
def test_hostfile_of_open_mpi_determines_hosts_and_ranks(
    text: str, options: str, expected: list[tuple[str, int]], tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text(text)
    found = parse(f"mpirun --hostfile {tmp_path}/hosts {options} python t.py")
    assert list(zip(found.hosts, found.ranks_per_host, strict=True)) == expected


@pytest.mark.parametrize("options", ["", "-np 3", "--map-by node"])
def test_unknown_slots_that_determine_placement_are_rejected(options: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a\nb\n")
    with pytest.raises(LaunchError) as caught:
        parse(f"mpirun --hostfile {tmp_path}/hosts {options} python t.py")
    assert str(caught.value) == (
        "The hostfile has no slots for 'a': mpirun starts one process per core there, and the number of cores "
        "is unknown here. Write the number of slots into the file, as in: a slots=8"
    )


def placement_by_mpirun(options: str) -> list[tuple[str, int]]:
    """Return the hosts and their numbers of processes, as printed by mpirun (Open MPI) with --do-not-launch."""
    environ = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = ["mpirun", "--do-not-launch", "--display-map", "--bind-to", "none", *options.split(), "true"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    nodes = re.findall(r"Data for node: (\w+)\t.*Num procs: (\d+)", done.stdout)
    return [(name, int(count)) for name, count in nodes]


def test_oversubscribed_hosts_of_open_mpi_get_more_ranks_than_slots() -> None:
    option = LauncherOption("mpirun", ("--oversubscribe",), "unneeded")
    found = parse("mpirun --oversubscribe -np 4 -H localhost python t.py")
    assert found == create_job(counts=(4,), backend="horovod", launcher_options=(option,))
    found = parse("mpirun -np 8 -H a:1,b:4 --oversubscribe python t.py")
    assert list(zip(found.hosts, found.ranks_per_host, strict=True)) == [("a", 3), ("b", 5)]


@needs_open_mpi
def test_placement_equals_that_of_open_mpi() -> None:
    generator = random.Random(0)
    for number in range(4):
        slots = [generator.randint(1, 6) for _ in range(generator.randint(2, 5))]
        size = generator.randint(1, sum(slots))
        hosts = ",".join(f"{name}:{count}" for name, count in zip("abcde", slots, strict=False))
        options = f"-H {hosts} -np {size} --map-by {'slot' if number == 0 else 'node'}"
        found = parse(f"mpirun {options} python t.py")
        assert list(zip(found.hosts, found.ranks_per_host, strict=True)) == placement_by_mpirun(options), options
    for options in ("-H a:1,b:4 -np 5 --bynode", "-H a:1,b:2 -np 6 --map-by node:oversubscribe",
                    "-H a:1,b:4,c:2 -np 9 --bynode --oversubscribe", "-H a:1,b:4,c:2 -np 9 --oversubscribe",
                    "-H a:2,b:1,c:1 -np 11 --map-by slot:oversubscribe"):  # fmt: skip
        found = parse(f"mpirun {options} python t.py")
        assert list(zip(found.hosts, found.ranks_per_host, strict=True)) == placement_by_mpirun(options), options


def test_remarks_name_hosts_with_an_unknown_number_of_cores(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb\nc\n")
    assert "mpirun starts at most one process per core on b, c; the number of cores is unknown here." in (
        remarks(f"mpirun --hostfile {tmp_path}/hosts -np 4 --map-by node python t.py", "torchrun")
    )


def test_modifiers_of_map_by_are_kept() -> None:
    for option in ("--map-by slot:PE=4", "--map-by ppr:2:node:PE=4", "--map-by node:oversubscribe"):
        line = f"mpirun -np 2 -H a:2,b:2 {option} python t.py"
        assert f"{option} of mpirun is left out: " in remarks(line, "torchrun")
        assert option in translated_lines(line, "mpirun")[0]


DISCOVERED = "horovodrun -np 4 --min-np 2 --max-np 8 --host-discovery-script ./hosts.sh --reset-limit 5 python t.py"


def test_host_discovery_is_translated_or_rejected() -> None:
    assert translated_lines(DISCOVERED, "unitrain") == [
        "unitrain launch --backend horovod --elastic 2:8 --host-discovery-script ./hosts.sh --max-restarts 5 t.py"
    ]
    assert "hvd.elastic is not used" in remarks(DISCOVERED, "unitrain")
    (same,) = translated_lines(DISCOVERED, "horovodrun")
    assert "--host-discovery-script ./hosts.sh" in same
    assert " -H " not in same
    (again,) = translated_lines("unitrain launch --elastic 1:3 --host-discovery-script ./hosts.sh t.py", "unitrain")
    assert again == "unitrain launch --backend ddp --elastic 1:3 --host-discovery-script ./hosts.sh t.py"
    for target in sorted(set(TARGETS) - {"horovodrun", "unitrain"}):
        with pytest.raises(LaunchError) as caught:
            build(parse(DISCOVERED), target)
        assert str(caught.value) == (
            f"The script './hosts.sh' lists the hosts while the job runs, but {target} needs them at the start. "
            "Name them with their slots, as in: --hosts node1:2,node2:2"
        )
    code, out, notes = run_translate_command(DISCOVERED, "--to", "mpiexec", "--hosts", "a:2,b:2")
    assert code == 0
    assert out.startswith("mpiexec -n 4 -hosts a:2,b:2 ")
    assert "--host-discovery-script ./hosts.sh of horovodrun is left out: " in notes


def test_options_of_unitrain_launch_have_equivalents(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    line = f"unitrain launch --backend horovod --hostfile {tmp_path}/hosts --interface eth1 -m pkg.t --epochs 3"
    assert translated_lines(line, "horovodrun") == [
        "horovodrun -np 4 -H a:2,b:2 --gloo --network-interfaces eth1 --disable-cache python -m pkg.t --epochs 3"
    ]
    (mpirun,) = translated_lines(line, "mpirun")
    assert "-x GLOO_SOCKET_IFNAME=eth1 " in mpirun
    assert "-mca btl_tcp_if_include eth1 " in mpirun
    assert mpirun.endswith(" python -m pkg.t --epochs 3")
    assert translated_lines(line, "torchrun")[1].startswith("UNITRAIN_BACKEND=horovod GLOO_SOCKET_IFNAME=eth1 ")
    assert translated_lines(line, "unitrain") == [
        "unitrain launch --backend horovod -np 4 -H a:2,b:2 --interface eth1 -m pkg.t --epochs 3"
    ]
    assert translated_lines("unitrain launch -np 2 run.yaml --lr 1", "horovodrun")[0].endswith(
        " python -m unitrain train run.yaml --lr 1"
    )
    for option in ("--log-dir logs", "--untuned", "--standby", "--elastic-timeout 5", "--elastic 2:8"):
        line = f"unitrain launch {option} t.py"
        assert f" {option} " in translated_lines(line, "unitrain")[0]
        assert f"{option} of unitrain launch is left out: " in remarks(line, "torchrun")
    assert parse("unitrain launch --elastic 2:8 -H a:4,b:2 t.py").ranks_per_host == (4, 2)
    assert parse("unitrain launch --elastic 2:4 t.py").ranks_per_host == (4,)
    line = "unitrain launch --devices 1,3 -H a:4,b:4 t.py"
    assert translated_lines(line, "srun")[0].startswith("CUDA_VISIBLE_DEVICES=1,3 ")
    assert parse(line).ranks_per_host == (2, 2)
    assert "-np 3 -x CUDA_VISIBLE_DEVICES=0,1,2 " in translated_lines("unitrain launch --devices 3 t.py", "unitrain")[0]
    assert (
        "-np 2 -x CUDA_VISIBLE_DEVICES= " in translated_lines("unitrain launch --devices 0 -np 2 t.py", "unitrain")[0]
    )
    assert translated_lines("torchrun --nproc-per-node 2 -m pkg.t -v", "unitrain") == [
        "unitrain launch --backend ddp -np 2 -m pkg.t -v"
    ]
    line = "unitrain launch --elastic 2:8 --max-restarts 0 t.py"
    assert " --elastic 2:8 " in translated_lines(line, "unitrain")[0]
    assert " --max-restarts 0 " in translated_lines(line, "unitrain")[0]
    assert "--max-restarts" not in translated_lines("unitrain launch --elastic 2:8 t.py", "unitrain")[0]
    assert " --max-restarts 3 " in translated_lines("unitrain launch --elastic 2:8 t.py", "torchrun")[0]
    assert "srun uses the hosts of the allocation" in remarks("unitrain launch --launcher srun -np 8 t.py", "mpirun")


def test_hostfile_of_unitrain_launch_is_parsed_like_in_a_launch(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    line = f"unitrain launch --hostfile {hostfile} t.py"
    hostfile.write_text("a max_slots=4\na\nb:2 # two\n")
    hosts = read_hostfile(hostfile)
    assert parse(line).named_hosts == hosts == (Host("a", 2), Host("b", 2))
    for text, message in (("a slot=4\n", "Line 'a slot=4' of "), ("# none\n", "--hostfile ")):
        hostfile.write_text(text)
        for read in (lambda: parse(line), lambda: read_hostfile(hostfile)):
            with pytest.raises(LaunchError) as caught:
                read()
            assert str(caught.value).startswith(message)
    with pytest.raises(LaunchError, match="both name the hosts"):
        parse(f"unitrain launch -H a --hostfile {hostfile} t.py")


# --- building ---


def test_torchrun_translation_has_one_line_per_host() -> None:
    translated = build(parse("horovodrun -np 12 -H a:8,b:8 python train.py --lr 0.1"), "torchrun")
    common = "--master-addr a --master-port 29500 -- train.py --lr 0.1"
    assert [(line.host, line.shell()) for line in translated.lines] == [
        ("a", f"UNITRAIN_BACKEND=horovod torchrun --nnodes 2 --node-rank 0 --nproc-per-node 8 {common}"),
        ("b", f"UNITRAIN_BACKEND=horovod torchrun --nnodes 2 --node-rank 1 --nproc-per-node 4 {common}"),
    ]


def test_torchrun_with_restarts_on_several_hosts_uses_c10d() -> None:
    """The static rendezvous of --master-addr does not support restarts. A c10d rendezvous on the first host does."""
    from torch.distributed.run import get_args_parser, parse_min_max_nnodes

    given = "--rdzv-backend c10d --rdzv-endpoint a:29400 --rdzv-id 7 --rdzv-conf is_host=1,timeout=900 --local-addr b"
    for line, job_id in (
        (f"torchrun --nnodes 2 --nproc-per-node 4 --max-restarts 3 {given} --tee 3 t.py --lr 1", "7"),
        ("unitrain launch --hosts a:4,b:4 --max-restarts 3 -x MASTER_PORT=29400 t.py --lr 1", "unitrain"),
    ):
        job = replace(parse(line), hosts=("a", "b"))
        translated = build(job, "torchrun")
        for place, (host, one) in enumerate(zip("ab", translated.lines, strict=True)):
            words = split(one.shell())
            assert words[:2] == ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "torchrun"]
            found = get_args_parser().parse_args(words[2:])
            assert (parse_min_max_nnodes(found.nnodes), found.nproc_per_node) == ((2, 2), "4")
            assert (found.max_restarts, found.rdzv_backend, found.rdzv_endpoint) == (3, "c10d", "a:29400")
            assert (found.rdzv_id, found.local_addr, one.host) == (job_id, host, host)
            conf = dict(pair.split("=") for pair in found.rdzv_conf.split(","))
            assert conf["is_host"] == ("true" if place == 0 else "false")
            assert conf.get("timeout") == ("900" if job_id == "7" else None)
            assert found.tee == ("3" if job_id == "7" else "0")
            assert (found.training_script, found.training_script_args) == ("t.py", ["--lr", "1"])
        assert "The rendezvous assigns the node ranks" in "\n".join(translated.remarks)
    (one,) = translated_lines("torchrun --nproc-per-node 2 --max-restarts 3 t.py", "torchrun")
    assert "--standalone --nproc-per-node 2 --max-restarts 3 t.py" in one


def test_local_addr_is_left_out_for_several_hosts() -> None:
    line = "torchrun --nnodes 2 --master-addr a --local-addr b --rdzv-conf timeout=9 t.py"
    assert all(
        "--local-addr" not in one and "--rdzv-conf timeout=9" in one for one in translated_lines(line, "torchrun")
    )
    assert "--local-addr b is left out: each host needs its own address." in remarks(line, "torchrun")
    line = "torchrun --nnodes 2 --master-addr a --rdzv-backend etcd-v2 --rdzv-endpoint e:2379 t.py"
    assert parse(line).address == "a", "etcd may run on another host than rank 0"
    assert all("e:2379" not in one for one in translated_lines(line, "torchrun"))
    assert "--rdzv-backend etcd-v2 is left out" in remarks(line, "torchrun")


@pytest.mark.parametrize(
    ("line", "target", "expected"),
    [
        (
            "torchrun --nproc-per-node 2 -m pkg.t",
            "horovodrun",
            "UNITRAIN_BACKEND=ddp horovodrun -np 2 --gloo python -m pkg.t",
        ),
        (
            "horovodrun -np 2 python -u t.py",
            "torchrun",
            "UNITRAIN_BACKEND=horovod torchrun --standalone --nproc-per-node 2 t.py",
        ),
        (
            "horovodrun -np 2 /v/bin/python t.py",
            "torchrun",
            "UNITRAIN_BACKEND=horovod /v/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 t.py",
        ),
        (
            "horovodrun -np 2 python -O t.py",
            "torchrun",
            "UNITRAIN_BACKEND=horovod torchrun --standalone --nproc-per-node 2 --no-python -- python -O t.py",
        ),
        (
            "horovodrun -np 2 ./run.sh",
            "torchrun",
            "UNITRAIN_BACKEND=horovod torchrun --standalone --nproc-per-node 2 --no-python ./run.sh",
        ),
        (
            "horovodrun -np 2 -H a,b --cycle-time-ms 1 --fusion-threshold-mb 32 python t.py",
            "mpiexec",
            (
                "mpiexec -n 2 -hosts a:1,b:1 -genv HOROVOD_FUSION_THRESHOLD 33554432 -genv HOROVOD_CYCLE_TIME 1 "
                "-genv MASTER_ADDR a -genv MASTER_PORT 29500 python t.py"
            ),
        ),
        (
            "horovodrun -np 2 -H a,b -p 2222 -i key python t.py",
            "mpirun",
            (
                "mpirun -np 2 -H a:1,b:1 -x PATH -x MASTER_ADDR=a -x MASTER_PORT=29500 --bind-to none --map-by "
                "slot -mca odls_base_sigkill_timeout 4 -mca plm_rsh_args '-p 2222 -i key -o "
                "StrictHostKeyChecking=accept-new' python t.py"
            ),
        ),
        (
            "torchrun --nproc-per-node 2 t.py",
            "mpirun",
            (
                "mpirun -np 2 -H localhost:2 -x UNITRAIN_BACKEND=ddp -x MASTER_ADDR=127.0.0.1 -x "
                "MASTER_PORT=29500 --bind-to none --map-by slot -mca odls_base_sigkill_timeout 4 python t.py"
            ),
        ),
        (
            "HF_TOKEN=abc torchrun t.py",
            "mpirun",
            (
                "HF_TOKEN=... mpirun -np 1 -H localhost:1 -x HF_TOKEN -x UNITRAIN_BACKEND=ddp -x "
                "MASTER_ADDR=127.0.0.1 -x MASTER_PORT=29500 --bind-to none --map-by slot -mca "
                "odls_base_sigkill_timeout 4 python t.py"
            ),
        ),
        (
            "mpirun -np 2 python t.py",
            "srun",
            (
                "UNITRAIN_BACKEND=horovod MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 srun --nodes 1 --ntasks 2 "
                "--ntasks-per-node 2 --kill-on-bad-exit=1 --export ALL --wait 0 python t.py"
            ),
        ),
        (
            "mpirun -np 2 -mca odls_base_sigkill_timeout 60 python t.py",
            "torchrun",
            "UNITRAIN_BACKEND=horovod torchrun --standalone --nproc-per-node 2 --shutdown-timeout 60 t.py",
        ),
        (
            "torchrun --nproc-per-node 2 --max-restarts 3 t.py",
            "unitrain",
            "unitrain launch --backend ddp -np 2 --max-restarts 3 t.py",
        ),
        (
            "horovodrun -np 2 -H a,b --mpi -p 22 python t.py",
            "unitrain",
            "unitrain launch --backend horovod -np 2 -H a:1,b:1 --mpi --launcher-args '-p 22' t.py",
        ),
        (
            "srun -N 2 -w a,b python t.py",
            "unitrain",
            (
                "unitrain launch --backend ddp --launcher mpirun -np 2 -H a:1,b:1 -x MASTER_ADDR=a -x "
                "MASTER_PORT=29500 t.py"
            ),
        ),
        ("cd /data && mpirun -np 1 python t.py", "horovodrun", "cd /data && horovodrun -np 1 --gloo python t.py"),
        (
            "srun -n 2 -D /data python t.py",
            "mpiexec",
            (
                "mpiexec -n 2 -genv UNITRAIN_BACKEND ddp -genv MASTER_ADDR 127.0.0.1 -genv MASTER_PORT 29500 "
                "-wdir /data python t.py"
            ),
        ),
        (
            """torchrun t.py "$HOME/a b" 'c $d' *.txt ~ $ARGS e\\ f""",
            "horovodrun",
            """UNITRAIN_BACKEND=ddp horovodrun -np 1 --gloo python t.py "$HOME"'/a b' 'c $d' *.txt ~ $ARGS 'e f'""",
        ),
    ],
    ids=str,
)
def test_command_line_is_translated(line: str, target: str, expected: str) -> None:
    assert translated_lines(line, target) == [expected]


def test_quoted_words_are_equivalent_for_a_shell() -> None:
    line = """torchrun t.py "$WHERE/a b" 'c $d' "e\\"f" g\\ h "" ~ "it's" `echo x` $(echo "y z") "$(echo "p q")" """
    environ = {"PATH": os.environ["PATH"], "HOME": "/root", "WHERE": "over there"}
    as_typed = [
        subprocess.check_output(["bash", "-c", f"printf '%s|' {text}"], env=environ, text=True)
        for text in (line.partition("t.py")[2], translated_lines(line, "horovodrun")[0].partition("t.py")[2])
    ]
    assert as_typed[0] == as_typed[1]
    assert "over there/a b|c $d|" in as_typed[0]


# Text that bash expands or unescapes, and similar text that bash does not change.
PIECES = [
    "shard-", "a", ",", "..", "{0..9}", "{1..9..3}", "{01..3}", "{c..a}", "{a,b}", "{a,{b,c}}", "{,x}", "{", "}", "{}",
    "{a}", "{a..1}", "{a,'b c'}", "{'a,b'}", "{a\\,b}", '{"a":1,"b":2}', "'{a,b}'", '"{a,b}"', "\\{", "$WHERE",
    "${WHERE}", r"$'\t'", r"$'it\'s'", r"$'\x41\101\u00e9\U1F600'", r"$'\xc3\xa9'", r"$'\xe9'", r"$'a\0b'",
    r"$'\q\?\\\e\cA'", r"$'\ud800'", r"$'\UFFFFFFFF'", '$"hi there"', "\"$'x'\"", "~", "=", "*.none", "'$'",
]  # fmt: skip


def test_braces_and_quoted_escapes_are_equivalent_for_bash() -> None:
    generator = random.Random(0)
    expansion = [*PIECES, *("".join(generator.choices(PIECES, k=generator.randint(2, 4))) for _ in range(400))]
    expansion += ["$", "a$", "$WHERE'a b'", "{$WHERE,$(echo p q)}"]
    translated = [join(split(f"p {words}")[1:]) for words in expansion]
    as_typed = [
        subprocess.run(
            ["bash", "-c", "\n".join(f"printf '<%s>' {words}; echo" for words in lines)],
            env={"PATH": os.environ["PATH"], "HOME": "/root", "WHERE": "over", "LC_ALL": "C.UTF-8"},
            stdout=subprocess.PIPE,
            check=True,
            timeout=60,
        ).stdout
        for lines in (expansion, translated)
    ]
    assert as_typed[0] == as_typed[1]
    assert b"<shard-0><shard-1>" in as_typed[0] or b"<0><1><2>" in as_typed[0]
    assert translated_lines(r"torchrun t.py --files shard-{0..9} --sep $'\t'", "mpirun")[0].endswith(
        "t.py --files shard-{0..9} --sep '\t'"
    )
    with pytest.raises(
        LaunchError, match=r"'shard-\{0..9\}' needs a shell to expand it, but containers run their command without one"
    ):
        build(parse("torchrun t.py shard-{0..9}"), "kubernetes")
    assert "{}" in (build(parse("torchrun t.py {}"), "kubernetes").text or "")
    with pytest.raises(LaunchError, match=r"is not closed"):
        parse("torchrun t.py $'a")


def test_max_restarts_becomes_the_backoff_limit_of_a_kubernetes_job() -> None:
    for options, limit in (("", 3), ("--max-restarts 0 ", 0), ("--max-restarts 2 ", 2)):
        text = build(parse(f"torchrun {options}t.py"), "kubernetes", "PyTorchJob").text or ""
        assert f"backoffLimit: {limit}\n" in text


# --- remarks ---

# For each launcher, options of several kinds that other launchers may not support.
UNSHARED_OPTIONS = {
    "torchrun": "torchrun --nproc-per-node 2 --rdzv-id 7 --tee 3 --shutdown-timeout 9 --numa-binding node t.py",
    "horovodrun": "horovodrun -np 2 --output-filename logs --start-timeout 60 --verbose --min-np 1 python t.py",
    "mpirun": "mpirun -np 2 --report-bindings --tag-output --rankfile r --mca btl ^openib --mca orte_x 1 python t.py",
    "mpiexec": "mpiexec -n 2 -bind-to core -prepend-rank -iface eth1 -rmk pbs python t.py",
    "unitrain launch": "unitrain launch --elastic 2:2 --log-dir logs --untuned --elastic-timeout 9 t.py",
    "srun": "srun -n 2 -N 1 --mem=4G -l --cpu-bind=none --mpi=pmix --distribution=cyclic python t.py",
}


def container_commands(manifest: object) -> Iterator[list[str]]:
    """Yield the commands of all containers in a manifest."""
    if isinstance(manifest, dict):
        yield from [manifest["command"]] if "command" in manifest else []
    if isinstance(manifest, dict | list):
        for below in manifest.values() if isinstance(manifest, dict) else manifest:
            yield from container_commands(below)


@pytest.mark.parametrize("target", sorted(TARGETS))
@pytest.mark.parametrize("launcher", sorted(UNSHARED_OPTIONS))
def test_every_option_is_translated_or_remarked(launcher: str, target: str) -> None:
    line = UNSHARED_OPTIONS[launcher]
    job = parse(line)
    assert len(job.launcher_options) >= 4
    translated = build(job, target)
    result = (translated.text or "") + "\n".join(one.shell() for one in translated.lines)
    if target == "kubernetes":
        result = "\n".join(join(words) for words in container_commands(yaml.safe_load(result)))
    for other in job.launcher_options:
        kept = [join(other.words), *(join(words) for words in other.equivalents.values())]
        matching_remarks = [
            remark for remark in translated.remarks if remark.startswith(f"{join(other.words)} of {launcher} is left ")
        ]
        assert matching_remarks or any(words in result for words in kept), (other, result, translated.remarks)
        if target == launcher:
            assert join(other.words) in result
            assert not matching_remarks
        for remark in matching_remarks:
            assert re.search(r"is left out: [^.]+\..*$", remark), remark


def test_remarks_name_an_alternative() -> None:
    assert remarks("torchrun --tee 3 t.py", "mpirun") == (
        "--tee 3 of torchrun is left out: use --output-filename FOLDER, or --tag-output."
    )
    assert remarks("horovodrun -np 2 --output-filename logs python t.py", "kubernetes").startswith(
        "--output-filename logs of horovodrun is left out: use kubectl logs."
    )
    assert remarks("torchrun --max-restarts 3 t.py", "srun") == (
        "--max-restarts 3 is left out: the launcher does not restart the job. To let unitrain restart it, use: "
        "unitrain launch --max-restarts 3 ..."
    )
    assert remarks("torchrun --nnodes 1:2 --nproc-per-node 2 --master-addr a t.py", "srun").startswith(
        "--nnodes 1:2 may run on fewer hosts than 2. The translated command uses all 2."
    )
    assert remarks("horovodrun -np 1 -H a:1,b:1 python t.py", "horovodrun") == (
        "b would not get a process, so it is omitted from the host list."
    )
    assert "assigns ranks to hosts round-robin" in remarks(
        "mpirun -np 4 -H a:2,b:2 --map-by node python t.py", "torchrun"
    )
    for target, notes in (
        ("mpirun", ""),
        ("torchrun", "OMPI_MCA_btl is left out: only Open MPI reads this variable."),
    ):
        line = "OMPI_MCA_btl=tcp,self mpirun -np 2 python t.py"
        assert remarks(line, target).startswith(notes)
        assert translated_lines(line, target)[0].startswith("OMPI_MCA_btl=... mpirun -np 2 -H") == (not notes)
    with_ddp = build(replace(parse("OMPI_MCA_btl=tcp,self mpirun -np 2 python t.py"), backend="ddp"), "unitrain")
    assert with_ddp.remarks[0].startswith("OMPI_MCA_btl is left out: ")
    assert with_ddp.lines[0].shell() == "unitrain launch --backend ddp -np 2 t.py"
    assert remarks("srun -n 2 -N 1 --cpu-bind=none python t.py", "unitrain") == (
        "--cpu-bind=none of srun is left out: pass an option of the launcher with --launcher-args."
    )
    assert remarks("python -m torch.distributed.launch t.py", "unitrain") == (
        "torch.distributed.launch passes --local-rank=N to the script: make it read LOCAL_RANK instead."
    )
    assert "set A on each host." in remarks("mpirun -np 2 -H a,b -x A python t.py", "torchrun")


# --- parsing inverts building ---

NAMES = st.from_regex(r"[a-z][a-z0-9]{0,5}", fullmatch=True)
WORDS = st.text(st.characters(exclude_characters="\ue000\ue001\x00", exclude_categories=("Cs",)), max_size=8).filter(
    lambda word: word not in (":", "env")
)
PORTS = st.none() | st.integers(1024, 65535).filter(lambda port: port != 29500)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    several = draw(st.booleans())
    hosts = tuple(draw(st.lists(NAMES.filter(lambda name: name != "localhost"), min_size=2, max_size=4, unique=True)))
    counts = tuple(draw(st.lists(st.integers(1, 16), min_size=len(hosts), max_size=len(hosts))))
    python = draw(st.sampled_from(["python", "/opt/v/bin/python3.11"]))
    start = draw(st.sampled_from([("train.py",), ("-m", "pkg.train"), ("-O", "train.py")]))
    return Job(
        program=(python, *start, *draw(st.lists(WORDS, max_size=3))),
        ranks_per_host=counts if several else counts[:1],
        hosts=hosts if several else (),
        backend=draw(st.sampled_from(["ddp", "horovod", "mine"])),
        environment=draw(st.dictionaries(st.sampled_from(["A", "LEVEL", "NCCL_DEBUG"]), WORDS, max_size=2)),
        public_names=frozenset(["A", "LEVEL", "NCCL_DEBUG"]),
        port=draw(PORTS),
    )


@settings(max_examples=150)
@given(jobs(), st.sampled_from(COMMAND_TARGETS))
def test_parse_inverts_build(job: Job, target: str) -> None:
    if target == "unitrain":
        job = replace(job, program=("python", "train.py", *job.program[3:]))
    if target == "srun":
        job = replace(
            job, ranks_per_host=(job.ranks_per_host[0],) * len(job.ranks_per_host)
        )  # Slurm distributes tasks evenly
    if target == "horovodrun":
        job = replace(job, port=None)  # the rendezvous uses the default port
    if target == "mpirun" and job.backend == "horovod" and len(job.ranks_per_host) == 1:
        job = replace(job, port=None)
    if target == "unitrain" and (job.backend == "horovod" or job.port is None):
        job = replace(job, port=None)
    for line in build(job, target).lines:
        found = parse(line.shell())
        # The commands of torchrun name only the first host.
        expected = replace(job, hosts=(), address=job.hosts[0]) if target == "torchrun" and job.hosts else job
        if target == "torchrun" and len(set(job.ranks_per_host)) > 1:
            expected = replace(expected, ranks_per_host=found.ranks_per_host)
        assert replace(found, remarks=(), public_names=job.public_names) == expected, line.shell()


@pytest.mark.parametrize("target", [*COMMAND_TARGETS, "sbatch", "kubernetes"])
@pytest.mark.parametrize(
    "line",
    [
        "mpirun -np 2 -x DB_PASSWORD1=hunter2 -x OPENAI=hunter2 python t.py",
        "DB_PASSWORD1=hunter2 OPENAI=hunter2 horovodrun -np 2 python t.py",
        'horovodrun -np 2 --mpi --mpi-args="-x DB_PASSWORD1=hunter2 -x OPENAI=hunter2" python t.py',
        "srun -n 2 -N 1 --export=ALL,DB_PASSWORD1=hunter2,OPENAI=hunter2 python t.py",
        "mpiexec -n 2 -genv DB_PASSWORD1 hunter2 -genv OPENAI hunter2 python t.py",
        "unitrain launch -np 2 -x DB_PASSWORD1=hunter2 -x OPENAI=hunter2 t.py",
        "OMPI_MCA_btl=hunter2 DB_PASSWORD1=1 OPENAI=1 mpirun -np 2 python t.py",
    ],
)
def test_values_of_variables_are_not_shown(line: str, target: str) -> None:
    translated = build(parse(line), target)
    text = "\n".join([translated.text or "", *(line.shell() for line in translated.lines), *translated.remarks])
    assert "hunter2" not in text
    assert "DB_PASSWORD1" in text
    assert "OPENAI" in text
    if translated.lines:
        assert "DB_PASSWORD1=..." in text


@pytest.mark.parametrize("target", [*COMMAND_TARGETS, "sbatch", "kubernetes"])
@pytest.mark.parametrize(
    "line",
    [
        "horovodrun -np 4 -H localhost:2,10.0.0.2:2 python train.py",
        "mpirun -np 4 -H 127.0.0.1:2,10.0.0.2:2 python train.py",
        "torchrun --nnodes 2 --nproc-per-node 2 --master-addr localhost train.py",
        "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint [::1]:29400 train.py",
    ],
)
def test_localhost_as_the_first_of_several_hosts_is_rejected(line: str, target: str) -> None:
    with pytest.raises(LaunchError, match=r"connect to the first host, but on each host .* refers to that host itself"):
        build(parse(line), target)


def test_options_nested_in_mpi_args_are_translated() -> None:
    line = 'horovodrun -np 2 --mpi-args="-x FOO=1 -x BAR --mca btl_tcp_if_include eth1 --bind-to core" python t.py'
    job = parse(line)
    assert (job.environment, job.forwarded) == ({"FOO": "1"}, ("BAR",))
    (torchrun,) = translated_lines(line, "torchrun")
    assert "FOO=... " in torchrun
    assert "NCCL_SOCKET_IFNAME=eth1 " in torchrun
    assert "GLOO_SOCKET_IFNAME=eth1 " in torchrun
    assert "--mpi-args" not in remarks(line, "torchrun")
    assert "--bind-to core of mpirun is left out: use --numa-binding" in remarks(line, "torchrun")
    (mpirun,) = translated_lines(line, "mpirun")
    assert "--mca btl_tcp_if_include eth1" in mpirun
    assert "-x FOO " in mpirun
    (horovodrun,) = translated_lines(line, "horovodrun")
    assert "--mpi-args '-x FOO -x BAR --bind-to core --mca btl_tcp_if_include eth1'" in horovodrun


@pytest.mark.parametrize(
    ("line", "target", "note"),
    [
        ("horovodrun -np 2 --verbose python t.py", "torchrun", "--verbose of horovodrun is left out: it only inspects"),
        (
            "horovodrun -np 2 --start-timeout 9 python t.py",
            "mpirun",
            "--start-timeout 9 of horovodrun is left out: it ",
        ),
        ("mpirun -np 2 --report-bindings python t.py", "torchrun", "--report-bindings of mpirun is left out: it only "),
        ("mpirun -np 2 --timeout 60 python t.py", "torchrun", "Check whether the job depends on it"),
        ("mpirun -np 2 --oversubscribe python t.py", "torchrun", "--oversubscribe of mpirun is left out: it is not ne"),
        ("mpirun -np 2 --tag-output python t.py", "unitrain", "is left out: use --log-dir FOLDER."),
        ("srun -n 2 -N 1 -t 9 python t.py", "torchrun", "-t 9 of srun is left out: it is a setting of Slurm's queue."),
        (
            "srun -n 2 -N 1 --mem 9G python t.py",
            "mpirun",
            "--mem 9G of srun is left out: the launcher does not request",
        ),
        ("torchrun --role x t.py", "mpirun", "Check whether the job depends on it"),
        (
            "srun -w a,b -n 4 --gpus-per-node 2 -p long python t.py",
            "srun",
            ": salloc --nodelist a,b --nodes 2 --ntasks-per-node 2 --gpus-per-node 2 -p long",
        ),
        (
            "srun -n 2 -N 2 torchrun --nnodes 2 t.py",
            "sbatch",
            "The program that srun starts is a launcher, which is not translated: torchrun --nnodes 2 t.py.",
        ),
    ],
)
def test_remarks_fit_the_option_and_the_target(line: str, target: str, note: str) -> None:
    assert note in remarks(line, target)


@settings(max_examples=200)
@given(st.lists(WORDS, max_size=5))
def test_split_inverts_join(words: list[str]) -> None:
    assert split(join(words)) == words
    assert split(shlex.join(words)) == words
    assert split_assignments([f"A={word}" for word in words]) == ({"A": words[-1]} if words else {}, [])


# --- errors ---


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "'' does not contain a command. Give the command that starts the job, as in: 'torchrun train.py'"),
        (
            "deepspeed train.py",
            (
                "'deepspeed' is not a launcher that can be translated. Give a command of one of these: "
                "torchrun, horovodrun, mpirun, mpiexec, srun, python and unitrain launch."
            ),
        ),
        (
            "torchrun --nproc-per-nod3 2 t.py",
            (
                "torchrun has no option '--nproc-per-nod3'. Did you mean '--nproc-per-node'? Options of the "
                "program go after the program."
            ),
        ),
        (
            "torchrun --nproc-per-node gpu t.py",
            (
                "--nproc-per-node gpu depends on the host that runs torchrun, so the number is unknown here. "
                "Write the number, as in: --nproc-per-node 8"
            ),
        ),
        (
            "torchrun --nproc-per-node $N t.py",
            (
                "--nproc-per-node must be a whole number of at least 1, got '$N'. Write a number, as in: "
                "--nproc-per-node 2"
            ),
        ),
        (
            "torchrun --nproc-per-node 0 t.py",
            (
                "--nproc-per-node must be a whole number of at least 1, got '0'. Write a number, as in: "
                "--nproc-per-node 2"
            ),
        ),
        (
            "unitrain launch -x UNITRAIN_BACKEND=horovod t.py",
            (
                "-x UNITRAIN_BACKEND=horovod is not supported, because unitrain launch sets this variable. Use: "
                "--backend horovod"
            ),
        ),
        ("torchrun --standalone", "The torchrun command does not name a program. End it as in: python train.py"),
        ("torchrun --nproc-per-node", "--nproc-per-node of torchrun lacks its value. Write it after --nproc-per-node"),
        (
            "torchrun --standalone=1 t.py",
            "--standalone of torchrun takes no value, got '--standalone=1'. Write: --standalone",
        ),
        ("horovodrun python t.py", "The horovodrun command lacks the number of processes. Add: -np N"),
        (
            "horovodrun -np 4 -H a:1,b:1 python t.py",
            (
                "-np requests 4 processes, but the hosts have 2 slots. Use -np 2, or give the hosts more slots: "
                "-H a:3,b:1"
            ),
        ),
        (
            "horovodrun -np 4 -H a:x python t.py",
            "Host 'a:x' must have a positive whole number of slots, got 'x'. Use: -H a:1",
        ),
        ("mpirun python t.py", "The mpirun command lacks the number of processes. Add: -np N"),
        (
            "mpirun -np 1 python a.py : -np 1 python b.py",
            (
                "The mpirun command starts several programs, separated by ':', which other launchers do not "
                "support. Start one script that branches on its rank"
            ),
        ),
        (
            "mpirun -np 2 -nonsense python t.py",
            "mpirun has no option '-nonsense'. Options of the program go after the program.",
        ),
        *(
            (
                f"srun {options}python t.py",
                (
                    "The srun command does not specify the number of tasks. In a batch script, the #SBATCH lines "
                    "specify it. Add --ntasks to the command, as in: srun --ntasks 8"
                ),
            )
            for options in ("", "--cpus-per-task 4 --gpus 8 ")
        ),
        (
            "srun --ntasks-per-gpu 1 python t.py",
            (
                "The srun command has --ntasks-per-gpu but does not request GPUs, so the number of tasks "
                "depends on the allocation. Add --ntasks, as in: srun --ntasks 8"
            ),
        ),
        (
            "srun -N 2 --gpus-per-node 2 --ntasks-per-gpu 3 python t.py",
            (
                "How many tasks srun starts for --nodes 2 --gpus-per-node 2 --ntasks-per-gpu 3 depends on the "
                "version of Slurm. Add their number to the command, as in: srun --ntasks 12"
            ),
        ),
        (
            "srun -N 2 -w 'n[1,]' python t.py",
            "--nodelist 'n[1,]' cannot be parsed. List the host names, as in: --nodelist n1,n2",
        ),
        ("srun -N 3 -w 'n[3-1]' python t.py", "--nodelist 'n[3-1]' contains the descending range 3-1. Write: 1-3"),
        ("srun -N 2 -w a python t.py", "--nodelist a names 1 of the 2 hosts. Name all hosts, or none"),
        (
            "unitrain launch --host-discovery-script ./hosts.sh t.py",
            (
                "--host-discovery-script './hosts.sh' is for elastic jobs, and --elastic is missing. Add the allowed "
                "number of ranks: --elastic 1:8"
            ),
        ),
        ("python", "python needs a script. End the command as in: python train.py"),
        ("torchrun t.py 'a", "' in \"'a\" is not closed. Close it, or put a \\ before it"),
        (
            "torchrun t.py | tee log",
            (
                "The command line continues with '| tee log' after the command. Give only the command that "
                "starts the job, without pipes and redirections, in quotes, as in: unitrain translate "
                "'horovodrun -np 2 python train.py' --to torchrun"
            ),
        ),
    ],
    ids=str,
)
def test_invalid_command_lines_are_rejected(line: str, message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse(line)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("line", "target", "message"),
    [
        (
            "srun -N 2 --ntasks-per-node 4 python t.py",
            "torchrun",
            (
                "torchrun needs the names of all 2 hosts, but the command names none. Name them, as in: --hosts "
                "node1:4,node2:4"
            ),
        ),
        (
            "torchrun --nnodes 2 --nproc-per-node 4 --master-addr a t.py",
            "horovodrun",
            (
                "horovodrun needs the names of all 2 hosts, but the command names only 'a'. Name them, as in: "
                "--hosts a:4,node2:4"
            ),
        ),
        (
            "mpirun -np 2 ./run.sh",
            "unitrain",
            (
                "unitrain launch runs Python scripts, but the job runs: ./run.sh. Use a Python script, or "
                "choose another launcher, as in: --to torchrun"
            ),
        ),
        (
            "torchrun t.py",
            "horovod",
            (
                "Unknown target 'horovod'. Did you mean 'horovodrun'? Available: torchrun, horovodrun, mpirun, "
                "mpiexec, srun, sbatch, kubernetes, unitrain."
            ),
        ),
        *(
            (
                line,
                "kubernetes",
                (
                    f"{word!r} needs a shell to expand it, but containers run their command without one. Write its "
                    "value instead, or start a shell: bash -c '...'"
                ),
            )
            for line, word in (
                ("cd $HOME/runs && torchrun t.py", "$HOME/runs"),
                ("torchrun --log-dir $HOME/logs t.py", "$HOME/logs"),
            )
        ),
        (
            "srun -n 2 -o $HOME/%j.out python t.py",
            "sbatch",
            (
                "'--output=$HOME/%j.out' needs a shell to expand it, but Slurm expands nothing in #SBATCH "
                "lines. Write its value instead"
            ),
        ),
        (
            "torchrun t.py $HOME",
            "kubernetes",
            (
                "'$HOME' needs a shell to expand it, but containers run their command without one. Write its "
                "value instead, or start a shell: bash -c '...'"
            ),
        ),
        (
            "horovodrun -np 3 -H a:2,b:1 python t.py",
            "kubernetes",
            (
                "TrainJob starts the same number of processes on each host, but the hosts of this job have 2, 1. "
                "Use equal slots, as in: -np 4 with 2 slots per host"
            ),
        ),
    ],
    ids=str,
)
def test_unsupported_jobs_are_rejected(line: str, target: str, message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        build(parse(line), target)
    assert str(caught.value) == message


# --- completeness of the option tables ---


def missing_options(syntax: Syntax, options: Sequence[tuple[Sequence[str], int]]) -> list[str]:
    """Return the spellings of options that are missing from a table, or that take a different number of values
    there."""
    return [
        spelled
        for spellings, arity in options
        for spelled in spellings
        if max(syntax.arity.get(syntax.aliases.get(spelled, spelled), -2), 0 if arity == 0 else -2) != arity
    ]


def option_arities(parser: argparse.ArgumentParser) -> list[tuple[Sequence[str], int]]:
    def arity(action: argparse.Action) -> int:
        return action.nargs if isinstance(action.nargs, int) else 1

    return [(action.option_strings, arity(action)) for action in parser._actions if action.option_strings]


def test_syntax_has_every_option_of_torchrun() -> None:
    from torch.distributed.run import get_args_parser

    known = option_arities(get_args_parser())
    assert len(known) > 30
    assert not missing_options(torchrun.SYNTAX, known)


def test_syntax_has_every_option_of_horovodrun(monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod.runner import launch

    found: list[argparse.ArgumentParser] = []

    def capture_parser(self: argparse.ArgumentParser, *_: object, **__: object) -> None:
        found.append(self)
        raise SystemExit

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", capture_parser)
    with pytest.raises(SystemExit):
        launch.parse_args()
    known = option_arities(found[0])
    assert len(known) > 50
    assert not missing_options(horovodrun.SYNTAX, known)


@pytest.mark.parametrize(
    "option", [*horovodrun._VARIABLE_BY_OPTION, *horovodrun._SWITCHES, "--fusion-threshold-mb", "--tcp"]
)
def test_tuning_options_of_horovodrun_become_variables(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod.runner import launch
    from horovod.runner.common.util import config_parser

    value = [] if horovodrun.SYNTAX.arity[option] == 0 else ["INFO" if option == "--log-level" else "1"]
    overlapping = ["--autotune"] if option.startswith("--autotune-") else []
    overlapping = ["--timeline-filename", "f"] if option.endswith("timeline-mark-cycles") else overlapping
    monkeypatch.setattr("sys.argv", ["horovodrun", "-np", "1", *overlapping, option, *value, "python", "t.py"])
    expected: dict[str, str] = {}
    config_parser.set_env_from_args(expected, launch.parse_args())
    job = parse(f"horovodrun -np 1 {join([*overlapping, option, *value])} python t.py")
    found = {name: value for other in job.launcher_options for name, value in other.variables.items()}
    assert found
    assert {name: as_number(value) for name, value in found.items()} == {
        name: as_number(expected[name]) for name in found
    }


def as_number(text: str) -> object:
    return float(text) if re.fullmatch(r"[0-9.]+", text) else text


@needs_open_mpi
def test_syntax_has_every_option_of_open_mpi() -> None:
    environ = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    found = subprocess.check_output(["mpirun", "--help", "unsupported"], env=environ, text=True, timeout=60)
    known = [
        ([f"--{name.lstrip('-')}" if len(name.lstrip("-")) > 1 else name for name in line.split()[0].split("|")],
         len(re.findall(r"<arg\d+>", line)))
        for line in found.splitlines()
        if re.match(r" {0,3}-", line)
    ]  # fmt: skip
    assert len(known) > 80
    assert not [
        name
        for spellings, arity in known
        for name in spellings
        if openmpi.SYNTAX.parse([name, *["x"] * arity, "program"])[0][0].values != ("x",) * arity
    ]


def test_syntax_has_every_option_of_unitrain_launch() -> None:
    known = [
        ((*option.opts, *option.secondary_opts), 0 if option.is_flag else 1)
        for option in launch.params
        if isinstance(option, click.Option)
    ]
    assert len(known) > 15
    assert not missing_options(unitrain.SYNTAX, known)


def test_syntax_has_every_option_of_hydra_and_srun() -> None:
    """The versions are MPICH 4.0.2 and Slurm 22.05."""
    taken, program = mpich.SYNTAX.parse(
        shlex.split(
            "-genv A 1 -genvlist A,B -genvnone -f hosts -ppn 2 -bind-to core -launcher ssh -prepend-rank -n 2 ./a -n"
        )
    )
    assert [one.name for one in taken][-1] == "-n"
    assert program == ("./a", "-n")
    taken, program = srun.SYNTAX.parse(
        shlex.split(
            "-N2 -n 4 --exclusive -K --immediate=5 -G4 --gpus-per-task 1 -J name -lu ./a -l".replace("-lu", "-l -u")
        )
    )
    assert program == ("./a", "-l")
    assert {one.name: one.values for one in taken}["--immediate"] == ("5",)
    assert not unitrain.SYNTAX.parse(["--gloo", "t.py"])[0][0].values


# --- the command ---


def run_translate_command(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(command, ["translate", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_translate_command_prints_lines_and_notes() -> None:
    code, out, notes = run_translate_command(
        "horovodrun -np 4 -H a:2,b:2 --verbose python train.py", "--to", "torchrun", "--backend", "ddp"
    )
    assert code == 0
    common = "--nproc-per-node 2 --master-addr a --master-port 29500 train.py"
    first, second = (f"torchrun --nnodes 2 --node-rank {number} {common}" for number in range(2))
    assert out.splitlines() == ["# on a", first, "# on b", second]
    assert notes.startswith("note: --verbose of horovodrun is left out: ")
    assert run_translate_command("--to", "horovodrun", "--", "torchrun", "t.py", "a b")[1] == (
        "UNITRAIN_BACKEND=ddp horovodrun -np 1 --gloo python t.py 'a b'\n"
    )
    assert run_translate_command("srun -N 2 python t.py", "--to", "mpiexec", "--hosts", "a:1,b:1")[1].startswith(
        "mpiexec -n 2 -hosts a:1,b:1"
    )
    assert run_translate_command("torchrun t.py", "--to", "sbatch")[1].startswith("#!/bin/bash\n#SBATCH --job-name=t\n")


def test_translate_command_reports_invalid_arguments() -> None:
    code, _, notes = run_translate_command("torchrun t.py", "--to", "horovodru")
    assert code == 2
    assert notes.endswith("mpiexec, srun, sbatch, kubernetes, unitrain.\n")
    assert (
        "Unknown backend 'dpd'. Did you mean 'ddp'?"
        in run_translate_command("torchrun t.py", "--to", "srun", "--backend", "dpd")[2]
    )


def test_batch_script_quotes_values_and_rejects_line_breaks() -> None:
    """In a #SBATCH line, Slurm does not expand variables, and it splits values at spaces."""
    text = build(parse("cd $HOME/runs && torchrun --nproc-per-node 2 t.py"), "sbatch").text or ""
    assert "cd $HOME/runs || exit\n" in text
    assert "--chdir" not in text
    assert text.isascii()
    text = build(parse("cd '/data/my runs' && torchrun --nproc-per-node 2 t.py"), "sbatch").text or ""
    assert "#SBATCH --chdir='/data/my runs'\n" in text
    injected = parse("torchrun t.py")
    for value in ("/data\n#SBATCH --uid=0", "/data\r"):
        with pytest.raises(LaunchError, match="contains a line break or control character"):
            build(replace(injected, directory=value), "sbatch")
