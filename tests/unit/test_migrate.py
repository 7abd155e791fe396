"""Conversion of training scripts: rules, reasons, and refused constructs. Ranks are not started."""

from __future__ import annotations

import cProfile
import errno
import os
import pstats
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from click.testing import CliRunner

from tests.support.migration import convert, ddp_script, find_problems, horovod_script
from unitrain.cli import unitrain as command
from unitrain.errors import ConfigError
from unitrain.migrate import migrate, num_changed_lines, unified_diff
from unitrain.migrate.edits import Edits, parse_statement
from unitrain.migrate.script import Script

HOROVOD = """
import torch
import horovod.torch as hvd

def save(model):
    torch.save(model.state_dict(), "model.pt")

def main():
    hvd.init()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
    # Wrap the optimizer.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for inputs in [torch.ones(3, 2)]:
        loss = model(inputs).mean()
        loss.backward()
        optimizer.step()
    if hvd.rank() == 0:
        save(model)

if __name__ == "__main__":
    main()
"""
DDP = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(2, 1), device_ids=[local_rank], find_unused_parameters=True)
    with model.no_sync():
        model(torch.ones(3, 2)).sum().backward()
    print(model.module.weight, int(os.environ["RANK"]))
    dist.destroy_process_group()

main()
"""


def test_horovod_script_is_converted() -> None:
    assert convert(HOROVOD) == dedent("""\
        import torch
        import unitrain

        def save(model):
            torch.save(backend.unwrap(model).state_dict(), "model.pt")

        def main():
            model = torch.nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * backend.size)
            model = backend.distributed_model(model)
            optimizer = backend.distributed_optimizer(optimizer, model)
            for inputs in [torch.ones(3, 2)]:
                loss = model(inputs).mean()
                loss.backward()
                optimizer.step()
            if backend.rank == 0:
                save(model)

        if __name__ == "__main__":
            with unitrain.init() as backend:
                main()
        """)


def test_ddp_script_is_converted() -> None:
    assert convert(DDP) == dedent("""\
        import os
        import torch
        import unitrain

        def main():
            backend = unitrain.init()
            local_rank = backend.local_rank
            model = backend.distributed_model(torch.nn.Linear(2, 1), find_unused_parameters=True)
            with backend.no_sync(model):
                model(torch.ones(3, 2)).sum().backward()
            print(backend.unwrap(model).weight, backend.rank)
            backend.shutdown()

        main()
        """)


@pytest.mark.parametrize(
    ("library", "call", "rank", "settings"),
    [
        ("from accelerate import Accelerator", "Accelerator(mixed_precision='no')", "process_index", ""),
        (
            "from lightning.fabric import Fabric",
            "Fabric(strategy='ddp')",
            "global_rank",
            ", use Fabric(strategy='ddp', devices=RANKS_PER_HOST), and call fabric.launch()",
        ),
    ],
)
def test_accelerate_and_fabric_use_the_process_group_of_the_backend(
    library: str, call: str, rank: str, settings: str
) -> None:
    check = (
        f"assert backend.allgather_object(trainer.{rank}) == [*range(backend.size)], "
        f'"Start it with: unitrain launch --launcher torchrun{settings}"\n'
    )
    converted = convert(f"{library}\n\ndef main():\n    trainer = {call}\n\nmain()\n")
    assert converted == (
        f"{library}\nimport unitrain\n\ndef main():\n    trainer = {call}\n    {check}\n"
        "with unitrain.init() as backend:\n    main()\n"
    )
    converted = convert(f"{library}\ntrainer = {call}\nlast = 1\n")
    start = "backend = unitrain.init()\n"
    assert converted == (f"{library}\nimport unitrain\n{start}trainer = {call}\n{check}last = 1\nbackend.shutdown()\n")
    assert find_problems(f"{library}\ntrain({call})\nlast = 1\n") == {2: call}


def test_settings_that_do_not_use_ddp_are_refused() -> None:
    fabric = "from lightning.fabric import Fabric\nfabric = Fabric(strategy='fsdp')\nlast = 1\n"
    assert find_problems(fabric) == {2: "strategy"}
    script = "from accelerate import Accelerator\naccelerator = Accelerator({})\n{}accelerator.end_training()\nx = 1\n"
    assert "end_training" not in convert(script.format("", ""))
    assert find_problems(script.format("", "accelerator.init_trackers('run')\n")) == {4: "accelerator.end_training()"}
    assert find_problems(script.format("fsdp_plugin=plugin", "")) == {2: "fsdp_plugin"}


@pytest.mark.parametrize("line", ["dist.barrier()", "DistributedSampler(data)"])
def test_attributes_of_ddp_models_are_kept_if_the_script_needs_a_process_group(line: str) -> None:
    header = "from torch.utils.data import DistributedSampler"
    body = "model = torch.nn.parallel.DistributedDataParallel(m)\nmodel.module.save()\nlast = 1"
    assert "\nmodel.module.save()\n" in convert(ddp_script(f"{line}\n{body}", header))
    other = "DistributedSampler(data, num_replicas=2, rank=0)\n"
    assert "\nbackend.unwrap(model).save()\n" in convert(ddp_script(f"{other}{body}", header))


def test_each_changed_line_of_the_original_script_has_a_reason() -> None:
    result = migrate(HOROVOD)
    assert result.source is not None
    before = HOROVOD.splitlines()
    removed = {number for number, line in enumerate(before, 1) if line and line not in result.source.splitlines()}
    comment = next(number for number, line in enumerate(before, 1) if line.strip().startswith("#"))
    assert removed - {comment} <= {reason.line for reason in result.reasons}
    texts = " ".join(reason.text for reason in result.reasons)
    assert "without the hidden optimizer step" in texts
    assert result.libraries == ("Horovod",)


@pytest.mark.parametrize(
    ("line", "converted"),
    [
        ("x = hvd.allreduce(y, name='y')", "x = backend.allreduce(y)"),
        ("x = hvd.allreduce(y, average=False)", 'x = backend.allreduce(y, "sum")'),
        ("x = hvd.allreduce(y, op=hvd.Max)", 'x = backend.allreduce(y, "max")'),
        ("x = hvd.allreduce(loss, name='y').item()", "x = backend.allreduce(loss.detach()).item()"),
        ("hvd.allreduce_(y)", "y.copy_(backend.allreduce(y.detach()))"),
        ("x = hvd.broadcast(y, 0, name='y')", "x = backend.broadcast(y, root=0)"),
        ("x = hvd.broadcast_object(y, root_rank=1)", "x = backend.broadcast_object(y, root=1)"),
        ("x = hvd.allgather_object(y)", "x = backend.allgather_object(y)"),
        ("x = hvd.allgather(y).sum()", "x = backend.allgather(y).sum()"),
        ("hvd.barrier()", "backend.barrier()"),
        ("print(hvd.local_rank(), hvd.local_size())", "print(backend.local_rank, backend.local_size)"),
        ("lr = 0.1 * hvd.size() if scale else 0.1", "lr = 0.1 * backend.size if scale else 0.1"),
        ("c = hvd.Compression.fp16 if half else hvd.Compression.none", 'c = "fp16" if half else "none"'),
        ("torch.cuda.synchronize()", "torch.cuda.synchronize()"),
        ("torch.cuda.current_stream().synchronize()", "torch.cuda.current_stream().synchronize()"),
        (
            "event = torch.cuda.Event()\nevent.record()\nevent.synchronize()",
            "event = torch.cuda.Event()\nevent.record()\nevent.synchronize()",
        ),
    ],
)
def test_supported_call_of_horovod_is_converted(line: str, converted: str) -> None:
    assert convert(horovod_script(line + "\nlast = 1")) == (
        f"import torch\nimport unitrain\n\nbackend = unitrain.init()\n{converted}\nlast = 1\nbackend.shutdown()\n"
    )


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("hvd.join()", "hvd.join"),
        ("x = hvd.allreduce(y, op=hvd.Adasum)", "hvd.allreduce(y, op=hvd.Adasum)"),
        ("x = hvd.allreduce(y, prescale_factor=2.0)", "hvd.allreduce(y, prescale_factor=2.0)"),
        ("x = hvd.allreduce(*y)", "hvd.allreduce(*y)"),
        ("x = hvd.allreduce(y, process_set=z)", "hvd.allreduce(y, process_set=z)"),
        ("x = hvd.alltoall(y)", "hvd.alltoall"),
        ("x = hvd.nccl_built()", "hvd.nccl_built"),
        ("x = [hvd.rank]", "hvd.rank"),
        ("x = hvd", "hvd"),
        ("hvd.broadcast_parameters(x, root_rank=0)", "hvd.broadcast_parameters(x, root_rank=0)"),
        ("class State(hvd.elastic.TorchState): pass", "hvd.elastic.TorchState"),
        ("os.environ['MASTER_ADDR'] = 'localhost'", "os.environ['MASTER_ADDR']"),
        ("os.environ['CUDA_VISIBLE_DEVICES'] = str(gpu)", "os.environ['CUDA_VISIBLE_DEVICES'] = str(gpu)"),
    ],
)
def test_unsupported_call_of_horovod_is_refused(line: str, name: str) -> None:
    assert find_problems(horovod_script(line, "import os")) == {5: name}


def script_with_optimizer(before: str, wrapping: str, after: str = "") -> str:
    create = "model = Net()\noptimizer = torch.optim.SGD(model.parameters(), lr=1)\n"
    return horovod_script(f"{create}{before}{wrapping}\n{after}last = 1")


PARAMETERS = "hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n"
STATE = "hvd.broadcast_optimizer_state(optimizer, root_rank=0)\n"
WRAPPER = "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters()"
MODEL_LINE = "model = backend.distributed_model(model)\n"
OPTIMIZER_LINE = "optimizer = backend.distributed_optimizer(optimizer, model)\n"


@pytest.mark.parametrize(
    ("before", "wrapping", "after", "expected"),
    [
        (PARAMETERS, f"{WRAPPER})", "", MODEL_LINE + OPTIMIZER_LINE),
        (STATE + PARAMETERS, f"{WRAPPER})", "", MODEL_LINE + OPTIMIZER_LINE),
        ("", f"{WRAPPER})", "load(model)\n" + PARAMETERS, "load(model)\n" + MODEL_LINE + OPTIMIZER_LINE),
        ("", f"{WRAPPER})", STATE + "load(model)\n" + PARAMETERS, "load(model)\n" + MODEL_LINE + OPTIMIZER_LINE),
        ("", f"{WRAPPER})", "", MODEL_LINE + OPTIMIZER_LINE),
        ("", "optimizer = hvd.DistributedOptimizer(optimizer)", "", MODEL_LINE + OPTIMIZER_LINE),
        (
            "",
            "other = hvd.DistributedOptimizer(optimizer)",
            "",
            MODEL_LINE + OPTIMIZER_LINE.replace("o", "other = o", 1),
        ),
        (
            PARAMETERS,
            f"{WRAPPER}, compression=hvd.Compression.fp16, op=hvd.Average, backward_passes_per_step=2)",
            "",
            MODEL_LINE.replace("(model)", '(model, compression="fp16")') + OPTIMIZER_LINE,
        ),
    ],
)
def test_model_is_wrapped_after_its_state_is_loaded(before: str, wrapping: str, after: str, expected: str) -> None:
    expected = expected.replace("other = optimizer = ", "other = ")
    converted = convert(script_with_optimizer(before, wrapping, after))
    assert converted.partition("lr=1)\n")[2] == f"{expected}last = 1\nbackend.shutdown()\n"


@pytest.mark.parametrize(
    ("wrapping", "after", "found"),
    [
        (f"{WRAPPER}, op=hvd.Sum)", "", {7: "op"}),
        (f"{WRAPPER}, op=hvd.Adasum if ada else hvd.Average)", "", {7: "hvd.Adasum"}),
        (f"{WRAPPER}, process_set=one)", "", {7: "process_set"}),
        ("optimizer = hvd.DistributedOptimizer(make())", "", {7: "named_parameters"}),
        (f"{WRAPPER})", PARAMETERS.replace("=0", "=1"), {8: PARAMETERS.replace("=0", "=1").strip()}),
        (f"{WRAPPER})", f"if resumed:\n    {PARAMETERS}", {9: PARAMETERS.strip()}),
        (f"{WRAPPER})\n{WRAPPER})", "", {7: f"{WRAPPER})"[12:], 8: f"{WRAPPER})"[12:]}),
    ],
)
def test_unsupported_optimizer_of_horovod_is_refused(wrapping: str, after: str, found: dict[int, str]) -> None:
    result = find_problems(script_with_optimizer("", wrapping, after))
    assert result == found


@pytest.mark.parametrize(
    ("line", "converted"),
    [
        ("x = int(os.environ['RANK'])", "x = backend.rank"),
        ("x = int(os.environ.get('WORLD_SIZE', 1))", "x = backend.size"),
        ("x = int(os.getenv('LOCAL_RANK', '0'))", "x = backend.local_rank"),
        ("x = int(os.environ['SLURM_PROCID'])", "x = backend.rank"),
        ("net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(net)", "net = unitrain.sync_batch_norm(net, backend)"),
        ("dist.all_reduce(x, op=dist.ReduceOp.SUM)", "dist.all_reduce(x, op=dist.ReduceOp.SUM)"),
    ],
)
def test_supported_call_of_torch_distributed_is_converted(line: str, converted: str) -> None:
    result = convert(ddp_script(line + "\nlast = 1"))
    assert result.partition("backend = unitrain.init()\n")[2] == f"{converted}\nlast = 1\nbackend.shutdown()\n"


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("is_distributed = int(os.environ.get('RANK', -1)) != -1", "os.environ.get('RANK', -1)"),
        ("is_distributed = 'WORLD_SIZE' in os.environ", "'WORLD_SIZE' in os.environ"),
        ("rank = os.environ['RANK']", "os.environ['RANK']"),
        ("parser.add_argument('--local_rank', type=int)", "parser.add_argument('--local_rank', type=int)"),
        ("x = dist.get_backend()", "dist.get_backend"),
        ("x = dist.new_subgroups()", "dist.new_subgroups"),
        ("torch.multiprocessing.spawn(main)", "torch.multiprocessing.spawn"),
        ("model = torch.nn.parallel.DistributedDataParallel(m, static_graph=True)", "static_graph"),
        ("model = torch.nn.parallel.DistributedDataParallel(m, process_group=g)", "process_group"),
        ("m = torch.nn.parallel.DistributedDataParallel(m); m.join()", "torch.nn.parallel.DistributedDataParallel(m)"),
        ("import torch.distributed.fsdp as f; f.fully_shard(model)", "f.fully_shard"),
        ("dist.destroy_process_group(group)", "dist.destroy_process_group(group)"),
        ("dist.init_process_group()", "dist.init_process_group()"),
    ],
)
def test_unsupported_call_of_torch_distributed_is_refused(line: str, name: str) -> None:
    assert find_problems(ddp_script(f"{line}\nlast = 1")).get(6) == name


def test_communication_hook_of_a_distributed_model_is_refused() -> None:
    wrapper = "model = torch.nn.parallel.DistributedDataParallel(m)\n"
    assert find_problems(ddp_script(f"{wrapper}model.register_comm_hook(None, hook)\nlast = 1")) == {
        7: "model.register_comm_hook"
    }
    line = "model.require_backward_grad_sync = False"
    assert find_problems(ddp_script(f"{wrapper}{line}\nlast = 1")) == {7: "model.require_backward_grad_sync"}


@pytest.mark.parametrize("module", ["pytorch_lightning", "lightning", "lightning.pytorch", "transformers"])
def test_trainers_of_other_libraries_are_refused(module: str) -> None:
    header = f"from {module} import Trainer"
    assert find_problems(horovod_script("trainer = Trainer(accelerator='horovod')\nlast = 1", header)) == {5: "Trainer"}


def test_models_are_tracked_through_functions_and_attributes() -> None:
    converted = convert("""
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        class Loop:
            def __init__(self, network, other):
                self.network = network
                self.other = other

            def save(self):
                return self.network.module.state_dict(), self.other.module

        def build():
            model = DistributedDataParallel(make())
            return model

        def main():
            dist.init_process_group()
            net = build()
            Loop(net, other=make()).save()
            dist.destroy_process_group()

        main()
        """)
    assert "return backend.unwrap(self.network).state_dict(), self.other.module" in converted
    assert "global backend\n" in converted


def test_conditional_or_missing_init_and_use_before_init_are_refused() -> None:
    assert find_problems("""
        import torch.distributed as dist
        if distributed:
            dist.init_process_group()
        """) == {3: "dist.init_process_group()"}
    assert find_problems("""
        import horovod.torch as hvd
        size = hvd.size()
        hvd.init()
        """) == {2: "hvd.size()"}
    assert find_problems("""
        import horovod.torch as hvd
        size = hvd.size()
        def main():
            hvd.init()
        main()
        """) == {2: "hvd.size()"}
    assert find_problems("""
        import horovod.torch as hvd
        def main():
            hvd.init()
        """) == {3: "hvd.init()"}
    assert find_problems("import horovod.torch as hvd\nprint(hvd.rank())\n") == {
        1: "This file uses Horovod, but does not start it"
    }


def test_arguments_of_init_process_group_are_converted_or_refused() -> None:
    script = "import torch.distributed as dist\ndist.init_process_group({})\nlast = 1\n"
    converted = convert(script.format("'nccl', timeout=timedelta(minutes=5), rank=0, world_size=2"))
    assert "backend = unitrain.init(timeout_seconds=(timedelta(minutes=5)).total_seconds())\n" in converted
    assert "backend = unitrain.init()\n" in convert(script.format("'nccl', timeout=None"))
    assert find_problems(script.format("'nccl', init_method='tcp://a:1'")) == {2: "init_method"}
    assert find_problems(script.format("store=s")) == {2: "store"}


def test_exit_before_the_backend_is_shut_down_is_refused() -> None:
    assert find_problems(f"import sys\n{ddp_script('sys.exit(0)')}") == {7: "sys.exit(0)"}


def test_name_of_the_backend_does_not_collide_with_a_variable() -> None:
    converted = convert(horovod_script("backend = 'x'\nprint(backend, hvd.rank())"))
    assert "unitrain_backend = unitrain.init()\nbackend = 'x'\nprint(backend, unitrain_backend.rank)\n" in converted


@pytest.mark.parametrize(
    ("module", "fix"),
    [
        ("horovod.torch", "import horovod.torch as hvd, and then hvd.rank()"),
        ("torch.distributed", "import torch.distributed as dist, and then dist.get_rank()"),
        ("torch.nn.parallel", "from torch.nn.parallel import DistributedDataParallel, and then "),
    ],
)
@pytest.mark.parametrize("other", ["", "import horovod.torch as hvd\nhvd.init()\n"])
def test_wildcard_imports_are_refused(module: str, fix: str, other: str) -> None:
    result = migrate(f"import torch\nfrom {module} import *\n{other}allreduce(rank())\n")
    assert result.source is None
    (problem,) = result.problems
    assert (problem.line, problem.name) == (2, f"from {module} import *")
    assert f"Import the module by name, and use its name in each call: {fix}" in problem.fix


@pytest.mark.parametrize(
    "expression",
    [
        "importlib.import_module('horovod.torch')",
        "importlib.import_module('.torch', package='horovod')",
        "__import__('horovod.torch')",
        "sys.modules['torch.distributed']",
    ],
)
@pytest.mark.parametrize("other", ["", "import horovod.torch as hvd\nhvd.init()\n"])
def test_imports_by_a_string_are_refused(expression: str, other: str) -> None:
    result = migrate(f"import importlib, sys\n{other}x = {expression}\n")
    assert [problem.name for problem in result.problems] == [expression]
    assert result.problems[0].fix.startswith("Import the module with an import statement: import ")


@pytest.mark.parametrize(
    "expression",
    [
        "globals()['hvd']",
        "vars().get('hvd')",
        "exec('x = hvd.rank()')",
        "eval(f'hvd.{name}()')",
        "exec('import horovod.torch')",
        "exec(compile('hvd' '.size()', 's', 'eval'))",
    ],
)
def test_names_in_strings_are_refused(expression: str) -> None:
    assert expression in find_problems(horovod_script(f"name = 'rank'\nx = {expression}\nlast = 1")).values()


def test_strings_that_use_other_names_are_kept() -> None:
    lines = (
        "a = globals()['x']\nb = eval('torch.float32')\nexec('my_hvd = x.hvd')\nimport importlib\n"
        "c = importlib.import_module('json')\nmodel.eval()\n"
    )
    assert lines in convert(horovod_script(f"{lines}last = 1", "from user.all import *\nfrom .horovod.torch import *"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("print('a')\n", "neither Horovod nor DDP"),
        ("import unitrain\nimport horovod.torch as hvd\nunitrain.init()\nhvd.rank()\n", "already uses unitrain"),
        ("print 'a'\n", "Line 1 is not valid Python"),
        ("import horovod_utils\nhorovod_utils.train()\n", "neither Horovod nor DDP"),
    ],
)
def test_scripts_that_cannot_be_converted_are_refused(source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        migrate(source)


def test_user_modules_with_the_name_of_a_library_are_kept() -> None:
    own = "from .horovod import helper\nfrom . import horovod\n"
    assert own in convert(horovod_script("print(hvd.rank())", own))


def test_statements_are_inserted_before_a_removed_statement() -> None:
    edits = Edits(Script("a = 1\nb = 2\n"))
    second = edits.script.module.body[1]
    edits.remove_statement(second)
    edits.insert_before(second, [parse_statement("c = 3")])
    assert edits.source() == "a = 1\nc = 3\n"


def test_number_of_changed_lines_counts_replaced_lines_once_and_ignores_comments() -> None:
    assert num_changed_lines("a\nb\nc\n", "a\nx\nc\n") == 1
    assert num_changed_lines("a\nb\nc\n", "a\nx\ny\nc\n") == 2
    assert num_changed_lines("# a\n\nb\n", "b\n") == 0
    assert num_changed_lines(DDP, DDP) == 0


def test_form_feed_does_not_end_a_line_of_the_diff() -> None:
    diff = unified_diff("a = '\f'\nb = 1\n", "a = '\f'\nb = 2\n", "train.py")
    assert diff.endswith("\n a = '\f'\n-b = 1\n+b = 2\n")


def test_command_prints_a_diff_that_git_can_apply_and_the_reasons(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(HOROVOD)
    result = CliRunner().invoke(command, ["migrate", str(path)])
    assert result.exit_code == 0
    converted = migrate(HOROVOD).source
    assert converted is not None
    assert result.stdout == unified_diff(HOROVOD, converted, str(path))
    assert f"{path}:9: not needed: the with statement starts and shuts down the backend.\n" in result.stderr
    assert path.read_text() == HOROVOD
    patch = subprocess.run(["git", "apply", "-p0", "--unsafe-paths", "--directory=/"], input=result.stdout, text=True,
                           cwd=tmp_path, capture_output=True, timeout=60, check=False)  # fmt: skip
    assert patch.returncode == 0, patch.stderr
    assert path.read_text() == converted


def test_command_writes_the_script_and_keeps_the_original(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(HOROVOD)
    assert CliRunner().invoke(command, ["migrate", "--write", str(path)]).exit_code == 0
    assert path.read_text() == migrate(HOROVOD).source
    assert (tmp_path / "train.py.orig").read_text() == HOROVOD
    path.write_text(HOROVOD)
    again = CliRunner().invoke(command, ["migrate", "--write", str(path)])
    assert again.exit_code == 2
    assert "train.py.orig already exists. Move it away" in again.stderr
    assert path.read_text() == HOROVOD


def test_command_reports_a_script_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    path = tmp_path / "train.py"
    path.write_text(HOROVOD)
    monkeypatch.setattr(Path, "write_bytes", refuse)
    result = CliRunner().invoke(command, ["migrate", "--write", str(path)])
    assert result.exit_code == 1
    assert f"Error: {path} or {path}.orig cannot be written: Permission denied." in result.stderr


def test_command_lists_the_lines_that_it_cannot_convert(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(horovod_script("hvd.join()"))
    result = CliRunner().invoke(command, ["migrate", "--write", str(path)])
    assert result.exit_code == 1
    assert f"{path}:5: hvd.join: Remove it if all ranks have the same number of batches" in result.stderr
    assert f"{path} was not converted: 1 problem.\n" in result.stderr
    assert result.stdout == ""
    assert path.read_text() == horovod_script("hvd.join()")
    path.write_text("print(1)\n")
    assert CliRunner().invoke(command, ["migrate", str(path)]).exit_code == 2


def test_command_rejects_a_fifo_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    os.mkfifo(path)
    done = subprocess.run(
        [sys.executable, "-m", "unitrain", "migrate", str(path)],
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert f"{path} is not a regular file. Pass the path of the script." in done.stderr


def test_work_is_proportional_to_the_number_of_lines() -> None:
    def num_calls(num_functions: int) -> int:
        function = "def f{0}(a):\n    print(a)\n    return torch.relu(a)\nx{0} = f{0}({0})\n"
        script = horovod_script("".join(map(function.format, range(num_functions))) + "print(hvd.rank())")
        profile = cProfile.Profile()
        profile.runcall(migrate, script)
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]

    assert num_calls(80) < 2.2 * num_calls(40)


def test_missing_libcst_is_reported_with_the_extra(tmp_path: Path) -> None:
    """The command installs the extra from the source folder, because `unitrain` on PyPI is a different project."""
    path = tmp_path / "train.py"
    path.write_text(HOROVOD)
    program = "import sys; sys.modules['libcst'] = None; from unitrain.cli import unitrain; unitrain()"
    done = subprocess.run(
        [sys.executable, "-c", program, "migrate", str(path)], text=True, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert 'Install it, in the source folder of unitrain, with: pip install ".[migrate]"' in done.stderr
