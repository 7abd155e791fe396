"""`unitrain migrate` neither deletes nor duplicates user code, and the converted script is valid Python."""

from __future__ import annotations

import pytest

from tests.support.migration import convert, in_ddp, in_horovod, problems
from unitrain.errors import ConfigError
from unitrain.migrate import migrate

OPTIMIZER = """\
model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
opt = hvd.DistributedOptimizer(opt, named_parameters=model.named_parameters())
"""


def converted_lines(script: str) -> str:
    """Return the part of the converted script between the start and the shutdown of the backend."""
    return convert(script).partition("backend = unitrain.init()\n")[2].partition("last = 1\n")[0]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('print(f"{hvd.allreduce(x, op=hvd.Sum)}")', "print(f\"{backend.allreduce(x, 'sum')}\")"),
        ("print(f'{hvd.allreduce(x, op=hvd.Sum)}')", "print(f'{backend.allreduce(x, \"sum\")}')"),
        (
            'print(f"{hvd.allreduce(x, average=False).item():.3f}")',
            "print(f\"{backend.allreduce(x.detach(), 'sum').item():.3f}\")",
        ),
        ('print(f"""{hvd.allreduce(x, op=hvd.Min)}""")', 'print(f"""{backend.allreduce(x, "min")}""")'),
        ('print(f"{hvd.Compression.fp16!r}")', "print(f\"{'fp16'!r}\")"),
        ("print(f'{f\"{hvd.allreduce(x)}\"}')", "print(f'{f\"{backend.allreduce(x)}\"}')"),
    ],
)
def test_string_inside_an_f_string_uses_the_other_quote_character(line: str, expected: str) -> None:
    assert converted_lines(in_horovod(f"{line}\nlast = 1")) == f"{expected}\n"


@pytest.mark.parametrize("name", ["hvd.allreduce(x, op=hvd.Sum)", "hvd.Compression.fp16"])
def test_string_inside_f_strings_with_both_quote_characters_is_refused(name: str) -> None:
    line = "print(f'{f\"{" + name + "}\"}')"
    assert problems(in_horovod(f"{line}\nlast = 1")) == {5: name}


def test_converted_line_that_is_not_valid_python_is_refused() -> None:
    result = migrate(in_horovod("y = 1\nx = hvd.broadcast(y, root := 1)\nlast = 1"))
    assert result.source is None
    (problem,) = result.problems
    assert (problem.line, problem.name) == (6, "x = backend.broadcast(y, root=root := 1)")
    assert problem.fix.startswith("The converted line is not valid Python (invalid syntax).")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = [hvd.rank()\n", "Line 2 is not valid Python: .* was never closed"),
        ("hvd.rank()\nreturn\n", "Line 3 is not valid Python: 'return' outside function"),
        ("x = 1\0\n", "Line 2 is not valid Python: it contains a null byte"),
        (f"x = {'[' * 2000}{']' * 2000}\n", "Line 2 is not valid Python: too many nested parentheses"),
        (f"hvd.init()\nx = {'+'.join(['1'] * 5000)}\n", "an expression with too many nested terms"),
    ],
)
def test_source_that_cannot_be_parsed_is_refused(source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        migrate(f"import horovod.torch as hvd\n{source}")


def test_byte_order_mark_and_invalid_escape_sequences_are_accepted() -> None:
    convert("\ufeffimport horovod.torch as hvd\nhvd.init()\nprint('\\d', hvd.rank())\n")


@pytest.mark.parametrize(
    "tensor", ["x", "x.grad", "xs[0]", "xs[-1].data", "xs[i]", "xs[1:n]", "state['w']", "self.nets[0].weight.grad"]
)
def test_in_place_collective_on_a_variable_is_converted(tensor: str) -> None:
    lines = converted_lines(in_horovod(f"y = hvd.broadcast_({tensor}, 0)\nlast = 1"))
    assert lines == f"y = {tensor}.copy_(backend.broadcast({tensor}, root=0))\n"


@pytest.mark.parametrize(
    "tensor", ["total.mul_(10)", "queue.pop()", "next(x).grad", "xs[next(i)]", "xs[: pop()]", "(y := f())", "x + y"]
)
@pytest.mark.parametrize("collective", ["hvd.allreduce_({}, op=hvd.Sum)", "hvd.broadcast_({}, 0)"])
def test_in_place_collective_is_refused_if_its_tensor_would_be_evaluated_twice(collective: str, tensor: str) -> None:
    call = collective.format(tensor)
    assert problems(in_horovod(f"{call}\nlast = 1")) == {5: call}


@pytest.mark.parametrize(
    ("target", "model"), [("opt", "build()"), ("opt", "nets[next(i)]"), ("opts[make()]", "model"), ("f().opt", "model")]
)
def test_optimizer_is_refused_if_the_model_or_target_would_be_evaluated_twice(target: str, model: str) -> None:
    script = in_horovod(
        f"{target} = hvd.DistributedOptimizer(opt, named_parameters={model}.named_parameters())\nlast = 1"
    )
    assert list(problems(script)) == [5]


def test_calls_in_the_arguments_of_a_wrapped_optimizer_are_converted() -> None:
    optimizer = "torch.optim.SGD(model.parameters(), lr=0.1 * {})"
    line = (
        f"opt = hvd.DistributedOptimizer({optimizer.format('hvd.size()')}, named_parameters=model.named_parameters())"
    )
    expected = optimizer.format("backend.size")
    assert converted_lines(in_horovod(f"{line}\nlast = 1")) == (
        f"model = backend.distributed_model(model)\nopt = backend.distributed_optimizer({expected}, model)\n"
    )
    state = "hvd.broadcast_optimizer_state(opt, root_rank=0)"
    assert converted_lines(in_horovod(f"{line}\n{state}\nlast = 1")) == (
        f"opt = {expected}\nmodel = backend.distributed_model(model)\nopt = backend.distributed_optimizer(opt, model)\n"
    )


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("opt.synchronize()\n", ""),
        ("with opt.skip_synchronize():\n    opt.step()\n", "opt.step()\n"),
        ("with opt.skip_synchronize(): opt.step(); x = 1\n", "opt.step(); x = 1\n"),
        ("def step(o):\n    o.synchronize()\n    o.step()\nstep(opt)\n", "def step(o):\n    o.step()\nstep(opt)\n"),
        (
            "class Loop:\n    def __init__(self, o):\n        self.o = o\n    def step(self):\n"
            "        self.o.synchronize()\n        self.o.step()\nLoop(o=opt).step()\n",
            "class Loop:\n    def __init__(self, o):\n        self.o = o\n    def step(self):\n        self.o.step()\n"
            "Loop(o=opt).step()\n",
        ),
    ],
)
def test_synchronize_of_the_optimizer_is_removed(lines: str, expected: str) -> None:
    assert (
        converted_lines(in_horovod(f"{OPTIMIZER}{lines}last = 1")).partition("optimizer(opt, model)\n")[2] == expected
    )


@pytest.mark.parametrize(
    "lines",
    [
        "meter = Meter()\nmeter.synchronize()\n",
        "class Loop:\n    def __init__(self):\n        self.meter = Meter()\n    def end(self):\n"
        "        self.meter.synchronize()\n",
        "def stop(timer):\n    timer.synchronize()\n    return timer.t\n",
        "torch.cuda.current_stream().synchronize()\n",
        "event = torch.cuda.Event() if cuda else None\nif event:\n    event.synchronize()\n",
    ],
)
def test_synchronize_of_other_objects_is_kept(lines: str) -> None:
    assert converted_lines(in_horovod(f"{OPTIMIZER}{lines}last = 1")).endswith(f"optimizer(opt, model)\n{lines}")


def test_synchronize_of_an_unknown_object_is_kept_and_mentioned() -> None:
    result = migrate(in_horovod(f"{OPTIMIZER}def f(timer):\n    timer.synchronize()\nlast = 1"))
    assert (9, "unchanged: if this object is the optimizer, remove the call") in {
        (reason.line, reason.text) for reason in result.reasons
    }


def test_synchronize_in_a_function_that_is_called_with_several_objects_is_refused() -> None:
    lines = "def finish(x):\n    x.synchronize()\nfinish(opt)\nfinish(meter)\n"
    assert problems(in_horovod(f"{OPTIMIZER}{lines}last = 1")) == {9: "x.synchronize()"}


def test_skip_synchronize_of_an_unknown_object_is_refused() -> None:
    lines = "with other.skip_synchronize():\n    other.step()\n"
    assert problems(in_horovod(f"{OPTIMIZER}{lines}last = 1")) == {8: "other.skip_synchronize()"}


def test_end_training_is_removed_only_if_the_object_is_the_accelerator() -> None:
    header = "from accelerate import Accelerator\naccelerator = Accelerator()\n"
    lines = "def stop(a):\n    print(a)\n    a.end_training()\nstop(accelerator)\naccelerator.end_training()\n"
    converted = convert(f"{header}run = Run()\nrun.end_training()\n{lines}last = 1\n")
    assert "run = Run()\nrun.end_training()\ndef stop(a):\n    print(a)\nstop(accelerator)\nlast = 1\n" in converted
    assert problems(f"{header}{lines}stop(run)\nlast = 1\n") == {5: "a.end_training()"}


@pytest.mark.parametrize(
    "start",
    [
        "for r in range(2): mp.Process(target=run, args=(r, 2)).start()",
        "mp.get_context('spawn').Process(target=run).start()",
        "mp.start_processes(run, nprocs=2)",
        "mp.Pool(2).map(run, range(2))",
        "mp.Process(target=outer).start()",
    ],
)
@pytest.mark.parametrize("end", ["dist.destroy_process_group()", "train()"])
def test_scripts_that_start_their_own_ranks_are_refused(start: str, end: str) -> None:
    script = (
        "import torch.multiprocessing as mp\nimport torch.distributed as dist\ndef run(r, n):\n"
        f"    dist.init_process_group('gloo')\n    {end}\ndef outer():\n    run(0, 1)\n{start}\n"
    )
    assert 8 in problems(script)


def test_scripts_that_start_other_processes_are_converted() -> None:
    line = "mp.Process(target=load).start()"
    assert line in convert(in_ddp(f"def load(): pass\n{line}\nlast = 1", "import torch.multiprocessing as mp"))


@pytest.mark.parametrize(
    ("before", "rank", "after"),
    [
        ("", "args.rank", "print(args.rank)"),
        ("", "int(args.rank)", "print(args.rank)"),
        ("rank = args.rank", "rank", "print(args.rank)"),
        ("", "get_rank()", "sampler = Sampler(rank=get_rank())"),
        ("", "args.node * 2 + gpu", "print(args.node)"),
    ],
)
def test_rank_variable_that_is_also_used_elsewhere_is_refused(before: str, rank: str, after: str) -> None:
    script = f"import os\nimport torch.distributed as dist\n{before}\ndist.init_process_group(rank={rank})\n{after}\n"
    assert problems(script) == {4: f"rank={rank}"}


def test_rank_that_is_passed_to_a_function_is_refused() -> None:
    script = (
        "import torch.distributed as dist\ndef setup(rank, n):\n    dist.init_process_group(rank=rank, world_size=n)\n"
        "def main():\n    setup(args.rank, 2)\n    print(args.rank)\nmain()\n"
    )
    assert problems(script) == {3: "rank=rank"}


@pytest.mark.parametrize(
    ("before", "rank"),
    [
        ("", "args.rank"),
        ("", "0"),
        ("rank = int(os.environ['RANK'])", "rank"),
        ("args.rank = int(os.environ['SLURM_PROCID'])", "args.rank"),
    ],
)
def test_rank_of_the_launcher_is_converted(before: str, rank: str) -> None:
    script = (
        f"import os\nimport torch.distributed as dist\ndef main():\n    {before or 'pass'}\n"
        f"    dist.init_process_group(rank={rank})\n"
    )
    use = f"    print({rank})\n" if before else ""
    assert "unitrain.init()" in convert(f"{script}{use}    dist.destroy_process_group()\nmain()\n")


@pytest.mark.parametrize(
    "line",
    [
        "env = os.environ; rank = env['RANK']",
        "os.environ.setdefault('RANK', '0')",
        "os.environ.update({'MASTER_ADDR': 'localhost'})",
        "os.environ.update(MASTER_PORT='29500')",
        "os.putenv('RANK', '0')",
    ],
)
def test_each_form_of_reading_a_launcher_variable_is_refused(line: str) -> None:
    assert list(problems(in_ddp(line.replace("; ", "\n") + "\nlast = 1"))) == [6 + line.count(";")]


def test_launcher_variable_that_is_read_through_an_alias_is_converted() -> None:
    lines = "env = os.environ\nrank = int(env['RANK'])\nsize = int(env.get('WORLD_SIZE', 1))\n"
    assert "rank = backend.rank\nsize = backend.size\n" in convert(in_ddp(f"{lines}last = 1"))


@pytest.mark.parametrize("use", ["total = hvd.allreduce(result)", "report()"])
def test_use_of_the_backend_after_the_main_function_is_refused(use: str) -> None:
    script = (
        "import horovod.torch as hvd\ndef main():\n    hvd.init()\n    return 1\ndef report():\n    print(hvd.rank())\n"
        f"if __name__ == '__main__':\n    result = main()\n    {use}\n"
    )
    assert list(problems(script)) == [9]


@pytest.mark.parametrize("end", ["exit(0)", "quit()", "os._exit(0)", "raise SystemExit(0)"])
def test_each_form_of_exit_before_the_backend_is_shut_down_is_refused(end: str) -> None:
    assert problems(in_ddp(end)) == {6: end}


def test_name_of_the_backend_differs_from_all_variables() -> None:
    converted = convert(in_horovod("backend = unitrain_backend = 1\nprint(hvd.rank())"))
    assert "unitrain_unitrain_backend = unitrain.init()\n" in converted


@pytest.mark.parametrize(("argument", "is_mentioned"), [("", True), (", broadcast_buffers=False", False)])
def test_reasons_mention_broadcast_buffers_if_ddp_broadcasts_buffers(argument: str, is_mentioned: bool) -> None:
    result = migrate(in_ddp(f"net = torch.nn.parallel.DistributedDataParallel(net{argument})\nlast = 1"))
    assert result.source is not None
    texts = [reason.text for reason in result.reasons if reason.line == 6]
    assert any("unitrain.broadcast_buffers(model, backend)" in text for text in texts) is is_mentioned
