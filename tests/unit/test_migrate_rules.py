"""`unitrain migrate` neither deletes nor duplicates user code, and the converted script is valid Python."""

from __future__ import annotations

import pytest

from tests.support.migration import convert, ddp_script, find_problems, horovod_script
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
    assert converted_lines(horovod_script(f"{line}\nlast = 1")) == f"{expected}\n"


@pytest.mark.parametrize("name", ["hvd.allreduce(x, op=hvd.Sum)", "hvd.Compression.fp16"])
def test_string_inside_f_strings_with_both_quote_characters_is_refused(name: str) -> None:
    line = "print(f'{f\"{" + name + "}\"}')"
    assert find_problems(horovod_script(f"{line}\nlast = 1")) == {5: name}


def test_converted_line_that_is_not_valid_python_is_refused() -> None:
    result = migrate(horovod_script("y = 1\nx = hvd.broadcast(y, root := 1)\nlast = 1"))
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


@pytest.mark.parametrize("header", ["# coding: nope\n", "#!/usr/bin/env python\n# -*- coding: nope -*-\n"])
def test_unknown_encoding_in_a_comment_is_refused(header: str) -> None:
    with pytest.raises(ConfigError, match=rf"Line {header.count(chr(10))} is not valid Python: unknown encoding: nope"):
        migrate(f"{header}import horovod.torch as hvd\nhvd.init()\n")


def test_byte_order_mark_and_invalid_escape_sequences_are_accepted() -> None:
    convert("\ufeffimport horovod.torch as hvd\nhvd.init()\nprint('\\d', hvd.rank())\n")


@pytest.mark.parametrize(
    "tensor", ["x", "x.grad", "xs[0]", "xs[-1].data", "xs[i]", "xs[1:n]", "state['w']", "self.nets[0].weight.grad"]
)
def test_in_place_collective_on_a_variable_is_converted(tensor: str) -> None:
    lines = converted_lines(horovod_script(f"y = hvd.broadcast_({tensor}, 0)\nlast = 1"))
    assert lines == f"y = {tensor}.copy_(backend.broadcast({tensor}, root=0))\n"


@pytest.mark.parametrize(
    "tensor", ["total.mul_(10)", "queue.pop()", "next(x).grad", "xs[next(i)]", "xs[: pop()]", "(y := f())", "x + y"]
)
@pytest.mark.parametrize("collective", ["hvd.allreduce_({}, op=hvd.Sum)", "hvd.broadcast_({}, 0)"])
def test_in_place_collective_is_refused_if_its_tensor_would_be_evaluated_twice(collective: str, tensor: str) -> None:
    call = collective.format(tensor)
    assert find_problems(horovod_script(f"{call}\nlast = 1")) == {5: call}


@pytest.mark.parametrize(
    ("target", "model"), [("opt", "build()"), ("opt", "nets[next(i)]"), ("opts[make()]", "model"), ("f().opt", "model")]
)
def test_optimizer_is_refused_if_the_model_or_target_would_be_evaluated_twice(target: str, model: str) -> None:
    script = horovod_script(
        f"{target} = hvd.DistributedOptimizer(opt, named_parameters={model}.named_parameters())\nlast = 1"
    )
    assert list(find_problems(script)) == [5]


def test_calls_in_the_arguments_of_a_wrapped_optimizer_are_converted() -> None:
    optimizer = "torch.optim.SGD(model.parameters(), lr=0.1 * {})"
    line = (
        f"opt = hvd.DistributedOptimizer({optimizer.format('hvd.size()')}, named_parameters=model.named_parameters())"
    )
    expected = optimizer.format("backend.size")
    assert converted_lines(horovod_script(f"{line}\nlast = 1")) == (
        f"model = backend.distributed_model(model)\nopt = backend.distributed_optimizer({expected}, model)\n"
    )
    state = "hvd.broadcast_optimizer_state(opt, root_rank=0)"
    assert converted_lines(horovod_script(f"{line}\n{state}\nlast = 1")) == (
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
        converted_lines(horovod_script(f"{OPTIMIZER}{lines}last = 1")).partition("optimizer(opt, model)\n")[2]
        == expected
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
    assert converted_lines(horovod_script(f"{OPTIMIZER}{lines}last = 1")).endswith(f"optimizer(opt, model)\n{lines}")


def test_synchronize_of_an_unknown_object_is_kept_and_mentioned() -> None:
    result = migrate(horovod_script(f"{OPTIMIZER}def f(timer):\n    timer.synchronize()\nlast = 1"))
    assert (9, "unchanged: if this object is the optimizer, remove the call") in {
        (reason.line, reason.text) for reason in result.reasons
    }


def test_synchronize_in_a_function_that_is_called_with_several_objects_is_refused() -> None:
    lines = "def finish(x):\n    x.synchronize()\nfinish(opt)\nfinish(meter)\n"
    assert find_problems(horovod_script(f"{OPTIMIZER}{lines}last = 1")) == {9: "x.synchronize()"}


def test_skip_synchronize_of_an_unknown_object_is_refused() -> None:
    lines = "with other.skip_synchronize():\n    other.step()\n"
    assert find_problems(horovod_script(f"{OPTIMIZER}{lines}last = 1")) == {8: "other.skip_synchronize()"}


def test_end_training_is_removed_only_if_the_object_is_the_accelerator() -> None:
    header = "from accelerate import Accelerator\naccelerator = Accelerator()\n"
    lines = "def stop(a):\n    print(a)\n    a.end_training()\nstop(accelerator)\naccelerator.end_training()\n"
    converted = convert(f"{header}run = Run()\nrun.end_training()\n{lines}last = 1\n")
    assert "run = Run()\nrun.end_training()\ndef stop(a):\n    print(a)\nstop(accelerator)\nlast = 1\n" in converted
    assert find_problems(f"{header}{lines}stop(run)\nlast = 1\n") == {5: "a.end_training()"}


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
    assert 8 in find_problems(script)


def test_scripts_that_start_other_processes_are_converted() -> None:
    line = "mp.Process(target=load).start()"
    assert line in convert(ddp_script(f"def load(): pass\n{line}\nlast = 1", "import torch.multiprocessing as mp"))


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
    assert find_problems(script) == {4: f"rank={rank}"}


def test_rank_that_is_passed_to_a_function_is_refused() -> None:
    script = (
        "import torch.distributed as dist\ndef setup(rank, n):\n    dist.init_process_group(rank=rank, world_size=n)\n"
        "def main():\n    setup(args.rank, 2)\n    print(args.rank)\nmain()\n"
    )
    assert find_problems(script) == {3: "rank=rank"}


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
def test_unsupported_uses_of_launcher_variables_are_refused(line: str) -> None:
    assert list(find_problems(ddp_script(line.replace("; ", "\n") + "\nlast = 1"))) == [6 + line.count(";")]


def test_launcher_variable_that_is_read_through_an_alias_is_converted() -> None:
    lines = "env = os.environ\nrank = int(env['RANK'])\nsize = int(env.get('WORLD_SIZE', 1))\n"
    assert "rank = backend.rank\nsize = backend.size\n" in convert(ddp_script(f"{lines}last = 1"))


@pytest.mark.parametrize("use", ["total = hvd.allreduce(result)", "report()"])
def test_use_of_the_backend_after_the_main_function_is_refused(use: str) -> None:
    script = (
        "import horovod.torch as hvd\ndef main():\n    hvd.init()\n    return 1\ndef report():\n    print(hvd.rank())\n"
        f"if __name__ == '__main__':\n    result = main()\n    {use}\n"
    )
    assert list(find_problems(script)) == [9]


@pytest.mark.parametrize("end", ["exit(0)", "quit()", "os._exit(0)", "raise SystemExit(0)"])
def test_each_form_of_exit_before_the_backend_is_shut_down_is_refused(end: str) -> None:
    assert find_problems(ddp_script(end)) == {6: end}


def test_name_of_the_backend_differs_from_all_variables() -> None:
    converted = convert(horovod_script("backend = unitrain_backend = 1\nprint(hvd.rank())"))
    assert "unitrain_unitrain_backend = unitrain.init()\n" in converted


@pytest.mark.parametrize(("argument", "is_mentioned"), [("", True), (", broadcast_buffers=False", False)])
def test_reasons_mention_broadcast_buffers_if_ddp_broadcasts_buffers(argument: str, is_mentioned: bool) -> None:
    result = migrate(ddp_script(f"net = torch.nn.parallel.DistributedDataParallel(net{argument})\nlast = 1"))
    assert result.source is not None
    texts = [reason.text for reason in result.reasons if reason.line == 6]
    assert any("unitrain.broadcast_buffers(model, backend)" in text for text in texts) is is_mentioned


STARTED_IN_SETUP = """\
import os
import sys
import torch.distributed as dist
def setup():
    dist.init_process_group()
def rank():
    return int(os.environ["RANK"])
def main():
{body}
    dist.destroy_process_group()
if __name__ == "__main__":
{call}
"""


def script_that_starts_in_setup(body: str, call: str = "main()") -> str:
    lines = ("\n".join(f"    {line}" for line in text.split("\n")) for text in (body, call))
    return STARTED_IN_SETUP.format(body=next(lines), call=next(lines))


@pytest.mark.parametrize(
    "body",
    [
        "print(int(os.environ['RANK']))\nsetup()",
        "print(rank())\nsetup()",
        "if len(sys.argv) > 1:\n    setup()\nprint(rank())",
        "if len(sys.argv) > 1:\n    setup()\nelse:\n    print('one rank')",
        "for _ in sys.argv[1:]:\n    setup()\nprint(rank())",
        "try:\n    setup()\nexcept RuntimeError:\n    pass\nprint(rank())",
        "print(*map(rank, [])); setup()",
    ],
)
def test_backend_is_started_around_the_main_function_if_it_is_used_before_the_start(body: str) -> None:
    converted = convert(script_that_starts_in_setup(body))
    assert "    with unitrain.init() as backend:\n        main()\n" in converted
    assert converted.count("unitrain.init") == 1


@pytest.mark.parametrize(
    "body",
    [
        "setup()\nprint(rank())",
        "print('start')\nif len(sys.argv) > 9:\n    sys.exit(1)\nsetup()\nprint(rank())",
        "if sys.argv:\n    setup()\nelse:\n    raise SystemExit\nprint(rank())",
        "if sys.argv: setup()\nis_first = not sys.argv or rank() == 0\nif not sys.argv: return print(is_first)",
        "try:\n    setup()\n    print(rank())\nfinally:\n    print(rank())",
        "show = lambda: print(rank())\nsetup()\nshow()",
    ],
)
def test_backend_is_started_in_place_if_each_use_follows_the_start(body: str) -> None:
    converted = convert(script_that_starts_in_setup(body))
    assert "def setup():\n    global backend\n    backend = unitrain.init()\n" in converted
    assert "    backend.shutdown()\n" in converted


def test_backend_is_started_under_the_main_guard_if_it_is_used_there() -> None:
    converted = convert(
        script_that_starts_in_setup("setup()", 'size = int(os.environ["WORLD_SIZE"])\nmain()\nprint(size)')
    )
    assert converted.endswith(
        "def main():\n    backend.shutdown()\n"
        'if __name__ == "__main__":\n    backend = unitrain.init()\n    size = backend.size\n'
        "    main()\n    print(size)\n"
    )


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("import torch.distributed as dist\n{}log()\ndist.init_process_group()\nx = 1\n", 4),
        ("import horovod.torch as hvd\n{}def main():\n    hvd.init()\n    log()\nlog()\nmain()\n", 4),
        ("import horovod.torch as hvd\n{}def main():\n    hvd.init()\ndef show(f=log()): pass\nmain()\n", 4),
        (
            "import torch.distributed as dist\n{}class Loop:\n    def __init__(self):\n        log()\n"
            "loop = Loop()\ndist.init_process_group()\nx = 1\n",
            4,
        ),
        (
            "import torch.distributed as dist\n{}class Loop:\n    def run(self):\n        log()\n"
            "loop = Loop()\nloop.run()\ndist.init_process_group()\nx = 1\n",
            4,
        ),
    ],
)
def test_function_that_uses_the_backend_before_the_start_is_refused(script: str, line: int) -> None:
    log = 'import os\ndef log():\n    print(int(os.environ["RANK"]))\n'
    assert find_problems(script.format(log)) == {line: 'int(os.environ["RANK"])'}


@pytest.mark.parametrize("line", ["atexit.register(dist.destroy_process_group)", "stop = dist.destroy_process_group"])
def test_shutdown_that_is_not_called_is_refused(line: str) -> None:
    assert find_problems(ddp_script(f"{line}\nlast = 1", "import atexit")) == {6: "dist.destroy_process_group"}


WRAP = "    opt = hvd.DistributedOptimizer(opt, named_parameters=net.named_parameters())\n"
WRAP_IN_FUNCTION = f"""\
import torch
import horovod.torch as hvd
def wrap(net, opt):
{WRAP}    return opt
class Loop:
    def __init__(self, model):
        self.model = model
    def step(self):
        self.model(1)
def main():
    hvd.init()
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=1)
    opt = wrap(model, opt)
    model(1)
main()
"""


@pytest.mark.parametrize(
    ("script", "used"),
    [
        (WRAP_IN_FUNCTION, "line 16 uses model,"),
        (WRAP_IN_FUNCTION.replace("model(1)\nmain", "evaluate(model)\nmain"), "line 16 uses model,"),
        (
            WRAP_IN_FUNCTION.replace("wrap(model, opt)\n    model(1)", "wrap(opt=opt, net=model)\n    model.train()"),
            "line 16 uses model,",
        ),
        (horovod_script("model = net = Net()\nopt = SGD()\n" + WRAP.replace("    ", "") + "model(1)\nx = 1"), "line 8"),
        (
            horovod_script("net = Net()\nmodel = net\nopt = SGD()\n" + WRAP.replace("    ", "") + "model(1)\nx = 1"),
            "line 9",
        ),
        (
            horovod_script("model = Net()\nnet = model\nopt = SGD()\n" + WRAP.replace("    ", "") + "model(1)\nx = 1"),
            "line 9",
        ),
    ],
)
def test_model_that_is_also_used_through_another_variable_is_refused(script: str, used: str) -> None:
    result = migrate(script)
    assert result.source is None
    (problem,) = result.problems
    assert problem.name == WRAP.strip()[6:]
    assert used in problem.fix


def test_object_that_stores_the_model_before_it_is_wrapped_is_refused() -> None:
    script = WRAP_IN_FUNCTION.replace("    opt = torch", "    loop = Loop(model)\n    opt = torch")
    script = script.replace("opt = wrap(model, opt)\n    model(1)", WRAP.strip().replace("net.", "model."))
    (problem,) = migrate(script.replace(f"def wrap(net, opt):\n{WRAP}    return opt\n", "")).problems
    assert "line 7 uses self.model" in problem.fix


@pytest.mark.parametrize(
    "script",
    [
        WRAP_IN_FUNCTION.replace("model(1)\nmain", "torch.save(model.state_dict(), 'm')\nmain"),
        WRAP_IN_FUNCTION.replace("opt = wrap(", "model, opt = wrap(").replace("return opt", "return net, opt"),
        WRAP_IN_FUNCTION.replace("wrap(model, opt)", "wrap(Net(), opt)"),
        horovod_script("net = Net()\nmodel = copy(net)\nopt = SGD()\n" + WRAP.replace("    ", "") + "model(1)\nx = 1"),
    ],
)
def test_model_is_wrapped_if_no_other_variable_is_used_for_training(script: str) -> None:
    assert "net = backend.distributed_model(net)\n" in convert(script)


def test_members_of_a_model_that_a_function_returns_with_others_are_converted() -> None:
    script = WRAP_IN_FUNCTION.replace("opt = wrap(", "model, opt = wrap(").replace("return opt", "return net, opt")
    script = script.replace("model(1)\nmain", "print(model.state_dict())\nmain")
    assert "    print(backend.unwrap(model).state_dict())\n" in convert(script)


@pytest.mark.parametrize("scope", ["global", "nonlocal"])
def test_variable_of_the_model_must_be_declared_in_the_function_that_wraps_it(scope: str) -> None:
    indent = "    " if scope == "nonlocal" else ""
    start = "def main():\n" if indent else ""
    wrap = f"net = Net()\ndef wrap(opt):\n{WRAP}    return opt\nopt = wrap(SGD())\nnet(1)\n"
    script = f"import horovod.torch as hvd\nhvd.init()\n{start}" + "".join(
        indent + line for line in wrap.splitlines(keepends=True)
    )
    script += "main()\nx = 1\n" if indent else "x = 1\n"
    (problem,) = migrate(script).problems
    assert f"Add the statement `{scope} net` to the start of this function" in problem.fix
    assert "net = backend.distributed_model(net)" in convert(
        script.replace("(opt):\n", f"(opt):\n{indent}    {scope} net\n")
    )


def test_optimizer_of_another_function_does_not_determine_the_model() -> None:
    script = (
        "import horovod.torch as hvd\nhvd.init()\ndef other():\n    opt = SGD(net.parameters())\n    return opt\n"
        "def main(opt):\n    opt = hvd.DistributedOptimizer(opt)\nmain(other())\nx = 1\n"
    )
    assert find_problems(script) == {7: "named_parameters"}


def reasons_for_line(script: str, line: int) -> str:
    result = migrate(script)
    assert result.source is not None, result.problems
    return "\n".join(reason.text for reason in result.reasons if reason.line == line)


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("device_ids=[0]", "device_ids is removed: move the inputs to backend.device"),
        ("bucket_cap_mb=50", "UNITRAIN_BUCKETS_MB"),
        ("gradient_as_bucket_view=True", "UNITRAIN_BUCKET_VIEW=0"),
    ],
)
def test_removed_arguments_of_ddp_are_mentioned(argument: str, hint: str) -> None:
    script = ddp_script(f"net = torch.nn.parallel.DistributedDataParallel(net, {argument})\nlast = 1")
    assert hint in reasons_for_line(script, 6)
    name = argument.partition("=")[0]
    assert name not in reasons_for_line(script.replace(argument, f"{name}=None"), 6)


@pytest.mark.parametrize(
    ("argument", "fix"),
    [
        ("static_graph=True", "find_unused_parameters=True"),
        ("forward_sync_buffers=False", "Rename it to broadcast_buffers"),
        ("**options", "with find_unused_parameters and broadcast_buffers by name"),
        ("process_group=g", "over all ranks"),
    ],
)
def test_refused_arguments_of_ddp_are_reported_with_a_fix(argument: str, fix: str) -> None:
    (problem,) = migrate(
        ddp_script(f"net = torch.nn.parallel.DistributedDataParallel(net, {argument})\nlast = 1")
    ).problems
    assert fix in problem.fix


def test_defaults_of_ddp_are_removed() -> None:
    options = "process_group=None, static_graph=False, broadcast_buffers=None, find_unused_parameters=True"
    line = f"net = torch.nn.parallel.DistributedDataParallel(net, {options})"
    assert "net = backend.distributed_model(net, find_unused_parameters=True)\n" in convert(
        ddp_script(f"{line}\nlast = 1")
    )


def test_differences_from_the_optimizer_of_horovod_are_mentioned() -> None:
    script = horovod_script(f"{OPTIMIZER[:-2]}, gradient_predivide_factor=2.0, num_groups=3)\nlast = 1")
    texts = reasons_for_line(script, 7)
    for text in ("find_unused_parameters=True", "gradient_predivide_factor is removed", "num_groups is removed"):
        assert text in texts


def test_reason_for_the_line_of_the_optimizer_refers_to_its_replacement() -> None:
    script = horovod_script(f"{OPTIMIZER}hvd.broadcast_parameters(model.state_dict(), 0)\nlast = 1")
    assert reasons_for_line(script, 7) == "replaced by the calls below"
    before = "hvd.broadcast_optimizer_state(opt, 0)\nopt = hvd.Dist"
    script = horovod_script(f"{OPTIMIZER.replace('opt = hvd.Dist', before)}last = 1")
    assert reasons_for_line(script, 7) == "replaced by the call of distributed_optimizer below"


def test_members_of_a_model_in_a_container_are_mentioned() -> None:
    script = ddp_script("nets = {0: torch.nn.parallel.DistributedDataParallel(net)}\nnets[0].module.save()\nlast = 1")
    assert "if nets[0] is a distributed model, use backend.unwrap(nets[0])" in reasons_for_line(script, 7)


@pytest.mark.parametrize(
    ("function", "use"),
    [
        ("return torch.nn.parallel.DistributedDataParallel(net)", "model = wrap()"),
        ("return 1, torch.nn.parallel.DistributedDataParallel(net)", "x, model = wrap()"),
        ("pass", "model = torch.nn.parallel.DistributedDataParallel(net) if x else net"),
    ],
)
def test_members_of_ddp_models_are_converted_for_each_form_of_assignment(function: str, use: str) -> None:
    script = ddp_script(f"def wrap():\n    {function}\n{use}\nprint(model.module)\nlast = 1")
    assert "print(backend.unwrap(model))\n" in convert(script)


INIT_SCRIPT = "import torch\nimport torch.distributed as dist\ndist.init_process_group({})\n{}\nlast = 1\n"


@pytest.mark.parametrize("line", ["x = 1", "model = Net().to('cpu')", "x = y.to(torch.float64)", "x = 'a'"])
def test_script_for_cpus_remains_on_cpus(line: str) -> None:
    assert 'backend = unitrain.init(device="cpu")\n' in convert(INIT_SCRIPT.format("'gloo'", line))
    timeout = convert(INIT_SCRIPT.format("'gloo', timeout=t", line))
    assert 'backend = unitrain.init(device="cpu", timeout_seconds=(t).total_seconds())\n' in timeout


@pytest.mark.parametrize(
    "line",
    ["model = Net().cuda()", "model = Net().to(rank)", "device = args.device", "x = y.to('cuda:0')", "n = args.gpu"],
)
def test_gloo_is_mentioned_if_the_script_may_use_gpus(line: str) -> None:
    script = INIT_SCRIPT.format("backend='gloo'", line)
    assert "backend = unitrain.init()\n" in convert(script)
    assert "UNITRAIN_TRANSPORT=gloo" in reasons_for_line(script, 3)
    assert 'unitrain.init(device="cpu")' in reasons_for_line(script, 3)


@pytest.mark.parametrize(
    ("transport", "hint"),
    [
        ("args.backend", "args.backend no longer selects the transport"),
        ("'mpi'", "mpi is not selected"),
        ("'gloo' if torch.cuda.is_available() else 'nccl'", "no longer selects the transport"),
        ("'nccl'", None),
        ("None", None),
        ("'nccl' if torch.cuda.is_available() else 'gloo'", None),
        ("'cpu:gloo,cuda:nccl'", None),
    ],
)
def test_transport_of_the_script_is_mentioned_unless_unitrain_selects_it(transport: str, hint: str | None) -> None:
    texts = reasons_for_line(INIT_SCRIPT.format(transport, "x = 1"), 3)
    assert ("UNITRAIN_TRANSPORT" in texts) is (hint is not None)
    assert hint is None or hint in texts


def test_device_of_init_process_group_is_mentioned() -> None:
    assert "device_id is removed" in reasons_for_line(INIT_SCRIPT.format("'nccl', device_id=device", "x = 1"), 3)
    assert find_problems(INIT_SCRIPT.format("'nccl', _ranks=[0]", "x = 1")) == {3: "_ranks"}
