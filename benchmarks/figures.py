"""The measured figures in the text of README.md and docs/, computed from the tables in benchmarks/results.

`python benchmarks/figures.py` writes the current values into the pages. A test compares the pages with the tables, and
requires an entry here for each paragraph that states a measured ratio.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"

# A page, a part of its text with {} for each figure, and a function that returns the figures.
Figures = tuple[str, str, Callable[[], list[str]]]


def rows(table: str, *cells: str) -> list[list[str]]:
    """Return the rows of the table in `results/<table>.md` that contain all `cells`, as lists of cells."""
    found = []
    for line in (RESULTS / f"{table}.md").read_text().splitlines():
        row = [cell.strip().replace("**", "") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if row and all(cell in row for cell in cells):
            found.append(row)
    if not found:
        raise LookupError(f"results/{table}.md has no row with the cells {', '.join(cells)}.")
    return found


def number(table: str, *cells: str, column: int, group: int = 0) -> float:
    """Return a number of the first row that contains `cells`; `group` counts the numbers of the cell."""
    return float(re.findall(r"-?\d[\d,]*\.?\d*", rows(table, *cells)[0][column])[group].replace(",", ""))


def rounded(value: float, decimals: int = 2) -> str:
    """Return `value` with this many decimals; halves are rounded up, as a reader of the table would."""
    return str(Decimal(repr(value)).quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP))


def text_number(table: str, pattern: str, group: int = 1) -> str:
    """Return the number that `pattern` captures in the text of `results/<table>.md`."""
    match = re.search(pattern, (RESULTS / f"{table}.md").read_text())
    if match is None:
        raise LookupError(f"results/{table}.md does not contain {pattern!r}.")
    return match[group].rstrip(".,")


def column_of(table: str, *cells: str, columns: tuple[int, ...], decimals: int = 2) -> list[str]:
    """Return the first numbers of several columns of a row."""
    return [rounded(number(table, *cells, column=column), decimals) for column in columns]


def goodput(*waiting: str) -> list[str]:
    """Return the smallest and the largest goodput of jobs with standby ranks that wait this long in each step."""
    values = [
        number("goodput", backend, "standby", wait, column=6) for wait in waiting for backend in ("ddp", "horovod")
    ]
    return [f"{min(values):.0f}", f"{max(values):.0f}"]


def recovery(method: str, columns: tuple[int, ...], *cells: str) -> list[str]:
    """Return the shortest and the longest recovery from the killed ranks in `columns`, in seconds."""
    values = [
        float(cell.split()[0]) for row in rows("recovery", method, *cells) for cell in (row[i] for i in columns) if cell
    ]
    return [f"{min(values):.1f}", f"{max(values):.1f}"]


def memory_checkpoint_step_ratios() -> list[str]:
    """Return the smallest and the largest ratio of step times with a checkpoint in memory per step and without."""
    ratios = [
        number("recovery", hosts, backend, "standby and memory", column=7)
        / number("recovery", hosts, backend, "restart", column=7)
        for hosts in ("1", "2")
        for backend in ("ddp", "horovod")
    ]
    return [f"{min(ratios):.1f}", f"{max(ratios):.1f}"]


def slow_ranks() -> list[str]:
    """Return the correct reports, the slowdowns, the false alarms, the runs without slowdowns, and the cost."""
    total = rows("slow_ranks", "total")[0]
    return [
        total[2],
        total[1],
        text_number("slow_ranks", r"runs without slowdowns: \*\*(\d+)\*\*"),
        text_number("slow_ranks", r"False alarms in (\d+) runs"),
        text_number("slow_ranks", r"µs\*\*, ([\d.]+) % of the step"),
    ]


def hierarchical() -> list[str]:
    """Return the time of the hierarchical allreduce for two bandwidths and backends, relative to all ranks."""
    return [
        rounded(number("hierarchical_reduction", rate, backend, "hierarchical allreduce", column=5))
        for rate in ("200mbit", "1gbit")
        for backend in ("ddp", "horovod")
    ]


def tuned(title: str, setting: str, *groups: int) -> list[str]:
    """Return the factor of a setting that `unitrain tune` measured; groups 2 and 3 are the quartiles."""
    section = (RESULTS / "slow_network.md").read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    pattern = r"factor of ([\d.]+) \(between ([\d.]+) and ([\d.]+) in"
    line = next(line for line in section.splitlines() if setting in line and re.search(pattern, line))
    match = re.search(pattern, line)
    assert match is not None
    return [rounded(float(match[group])) for group in groups or (1,)]


def low_communication(network: str, backend: str, method: str, column: int) -> float:
    """Return a value of the small model on this network: column 6 is the step, 8 the speed."""
    return number("low_communication", network, backend, method, column=column)


def allreduce_ratios() -> list[str]:
    """Return the smallest and the largest time of an allreduce of 1 MB or more, relative to that of the library."""
    ratios = [
        number("allreduce", f"unitrain, {backend}", column=column) / number("allreduce", library, column=column)
        for backend, library in (("ddp", "torch.distributed"), ("horovod", "horovod.torch"))
        for column in (2, 3, 4)
    ]
    return [rounded(min(ratios)), rounded(max(ratios))]


def latency_steps() -> list[str]:
    """Return the steps of three methods on both backends at 100 Mbit/s with a round-trip time of 50 ms."""
    return [
        f"{low_communication('100mbit, 50 ms round-trip time', backend, method, 6):.0f}"
        for method in ("synchronous", "synchronous, PowerSGD", "DiLoCo")
        for backend in ("horovod", "ddp")
    ]


def large_model_speeds() -> list[str]:
    """Return the speeds with the larger model: without communication, and of three methods on both backends."""
    section = (RESULTS / "low_communication.md").read_text().split("### 12,7")[1]

    def speed(backend: str, method: str) -> str:
        cells = (re.split(r"\s*\|\s*", line) for line in section.splitlines())
        row = next(row for row in cells if len(row) > 9 and row[2] == backend and row[3] == method)
        return f"{float(row[9]):.0f}"

    methods = ("DiLoCo", "DiLoCo, int8", "DiLoCo, streaming")
    return [speed("ddp", "without communication")] + [
        speed(backend, method) for method in methods for backend in ("ddp", "horovod")
    ]


def gpu_ratios(*backends: str) -> list[str]:
    """Return the throughput of the Trainer relative to a loop by hand on one GPU."""
    return [rounded(number("gpu_check", backend, "resnet50: Trainer / loop by hand", column=2)) for backend in backends]


def sharded_steps(setting: str) -> list[str]:
    """Return the step times with sharding relative to replicated training, of ddp and horovod."""
    return column_of("sharding", setting, columns=(1, 3))


def pipeline_memory(*names: str) -> list[str]:
    """Return the memory of the larger stage of the residual network, in percent of one process."""
    return [f"{number('pipeline', name, column=2):.0f}" for name in names]


def with_quartiles(table: str, *cells: str, columns: tuple[int, ...]) -> list[str]:
    """Return the medians and quartiles in several columns of a row."""
    return [rounded(number(table, *cells, column=column, group=group)) for column in columns for group in range(3)]


def table_row(page: str, label: str, figures: Callable[[], list[str]], cell: str = "{}") -> Figures:
    """Return the entry of a row of a table in a page, whose cells have the form `cell`."""
    cells = " | ".join([cell] * (len(figures()) // cell.count("{}")))
    return page, f"| {label} | {cells} |", figures


def low_communication_row(label: str, method: str, networks: tuple[str, ...]) -> Figures:
    """Return the entry of a row with the speed of `method` relative to synchronous training on ddp."""

    def speeds() -> list[str]:
        values = [low_communication(network, "ddp", method, 8) for network in networks]
        return [f"{value:.1f}" if value >= 10 else f"{value:.2f}" for value in values]

    cells = " | ".join(["{}"] * len(networks))
    end = " | |" if networks == NETWORKS else " |"  # the column of the loss
    return "docs/guides/low_communication.md", f"| {label} | {cells}{end}\n", speeds


def low_communication_loss(label: str, method: str, columns: int) -> Figures:
    """Return the entry of the last cell of a row with speeds, the change of the loss."""
    pattern = " | ".join([f"| {label}", *["{}"] * columns, "{}%"])

    def change() -> list[str]:
        speeds = low_communication_row(label, method, NETWORKS)[2]()
        return [*speeds, f"{number('low_communication', method, '0.004', column=3):+.1f}"]

    return "docs/guides/low_communication.md", pattern, change


NETWORKS = ("10mbit", "50mbit", "100mbit", "1gbit", "10gbit")
SLOW_NETWORKS = tuple(f"{network}, 50 ms round-trip time" for network in ("10mbit", "100mbit", "1gbit"))
METHODS = {
    '`compression="bf16"`': "synchronous, bf16",
    "`PowerSGD(rank=4, start_step=20)`": "synchronous, PowerSGD",
    "local SGD, 25 steps": "local SGD",
    "DiLoCo, 25 steps": "DiLoCo",
    "DiLoCo, 25 steps, bf16": "DiLoCo, bf16",
    "DiLoCo, 25 steps, int8": "DiLoCo, int8",
    "DiLoCo, 25 steps, streaming": "DiLoCo, streaming",
}

FIGURES: tuple[Figures, ...] = (
    *(
        table_row(
            "README.md",
            f"`{label}`",
            lambda backend=backend: [
                figure
                for model in ("tiny", "25M")
                for figure in with_quartiles("step_overhead", backend, model, columns=(4,))
            ],
            "{} [{}, {}]",
        )
        for label, backend in (("DistributedDataParallel", "ddp"), ("hvd.DistributedOptimizer", "horovod"))
    ),
    *(
        table_row(
            "README.md",
            label,
            lambda row=row: with_quartiles("allreduce", row, columns=(1, 2, 3, 4)),
            "{} [{}, {}]",
        )
        for label, row in (
            ("`torch.distributed`", "torch.distributed"),
            ("`horovod.torch`", "horovod.torch"),
            ("unitrain, `ddp`", "unitrain, ddp"),
            ("unitrain, `horovod`", "unitrain, horovod"),
        )
    ),
    *(low_communication_row(label, method, SLOW_NETWORKS) for label, method in METHODS.items()),
    *(low_communication_loss(label, method, len(NETWORKS)) for label, method in METHODS.items()),
    *(
        low_communication_row("without communication", "without communication", networks)
        for networks in (NETWORKS, SLOW_NETWORKS)
    ),
    (
        "docs/guides/low_communication.md",
        "bf16 was {} to {} times as fast as synchronous training, and PowerSGD {} to {} times",
        lambda: [
            f"{extreme(low_communication(network, 'ddp', method, 8) for network in SLOW_NETWORKS[1:]):.1f}"
            for method in ("synchronous, bf16", "synchronous, PowerSGD")
            for extreme in (min, max)
        ],
    ),
    (
        "docs/benchmarks.md",
        "unitrain takes {} to {} times as long as the library of the same backend",
        allreduce_ratios,
    ),
    table_row(
        "docs/guides/memory.md",
        '`shard="state"`',
        lambda: [
            *column_of("sharding", 'shard="state"', columns=(1, 3)),
            *column_of("sharding", 'shard="state"', "12.000 (+0.00%)", columns=(1,)),
        ],
    ),
    *(
        table_row(
            "docs/guides/memory.md",
            f"`{shard}` | {'all blocks' if blocks == 'blocks' else blocks}",
            lambda shard=shard, blocks=blocks: [
                f"{number('memory_limits', shard, blocks, column=2):.0f}",
                f"{number('memory_limits', shard, blocks, column=3):.1f}",
            ],
        )
        for shard in ('"none"', '"state"', '"gradients"', '"parameters"')
        for blocks in ("none", "blocks")
    ),
    (
        "README.md",
        "throughput of the `Trainer` was {} (`ddp`) and {} times (`horovod`) that of a loop by hand",
        lambda: gpu_ratios("ddp", "horovod"),
    ),
    (
        "docs/guides/elastic.md",
        "completed {}% to {}% of the steps that a job without faults",
        lambda: goodput("20 ms", "100 ms"),
    ),
    (
        "docs/guides/elastic.md",
        "with a checkpoint per epoch, completed {}%",
        lambda: [f"{number('goodput', 'torchrun', '20 ms', column=6):.0f}"],
    ),
    ("docs/guides/elastic.md", "slow the training down, and {}% to {}% remained", lambda: goodput("0 ms")),
    (
        "docs/guides/elastic.md",
        "a step took {} to {} times as long with a checkpoint in memory after every step",
        memory_checkpoint_step_ratios,
    ),
    (
        "docs/guides/elastic.md",
        "all ranks completed a step again {} to {} s after a rank, rank 0 or the ranks of a host were killed",
        lambda: recovery("standby and memory", (3, 4, 5)),
    ),
    (
        "docs/guides/elastic.md",
        "takes {} s if all ranks of a host are killed",
        lambda: column_of("recovery", "horovod elastic", columns=(5,), decimals=1),
    ),
    (
        "docs/guides/elastic.md",
        "takes {} s if one of several ranks of a host is killed",
        lambda: column_of("recovery", "horovod elastic", columns=(3,), decimals=1),
    ),
    (
        "docs/guides/slow_ranks.md",
        "{} of {} slowdowns were reported with the right rank and cause only, and {} of {} runs without slowdowns had "
        "a report. The cost was {}% of a step of 20 ms",
        slow_ranks,
    ),
    (
        "docs/guides/modes.md",
        "at 200 Mbit/s, a step took {} times as long on `ddp` and {} times on `horovod`; at 1 Gbit/s, {} and {} times",
        hierarchical,
    ),
    (
        "docs/benchmarks.md",
        "a step took {} times as long as with an allreduce over all ranks on `ddp`, and {} times on `horovod`. At 1 "
        "Gbit/s, it took {} and {} times as long",
        hierarchical,
    ),
    (
        "docs/benchmarks.md",
        "a step is {} times as fast on `ddp` and {} times as fast on `horovod`; with fp16 compression, {} and {} times",
        lambda: [
            tuned(f"1gbit, 1 rank per host, {backend}", f'"{dtype}"')[0]
            for dtype in ("bf16", "fp16")
            for backend in ("ddp", "horovod")
        ],
    ),
    (
        "docs/benchmarks.md",
        "it was {} [{}, {}] times as fast as the default settings",
        lambda: tuned("200mbit, 2 ranks per host, ddp", "HIERARCHICAL", 1, 2, 3),
    ),
    (
        "docs/guides/tune.md",
        "bf16 compression was {} times as fast on `ddp` and {} times as fast on `horovod`",
        lambda: [tuned(f"1gbit, 1 rank per host, {backend}", '"bf16"')[0] for backend in ("ddp", "horovod")],
    ),
    (
        "docs/guides/tune.md",
        "which was {} times as fast",
        lambda: tuned("200mbit, 2 ranks per host, ddp", "HIERARCHICAL"),
    ),
    (
        "docs/guides/logical_ranks.md",
        "takes {} (`ddp`) and {} (`horovod`) times as long as with the ordinary reduction",
        lambda: column_of("logical_ranks", "a logical rank per process", columns=(1, 2)),
    ),
    (
        "docs/guides/memory.md",
        "Activation checkpointing multiplies the largest batch by {}, or by {} together with",
        lambda: [
            rounded(number("memory_limits", shard, "blocks", column=2, group=1), 1) for shard in ('"none"', '"state"')
        ],
    ),
    (
        "docs/guides/memory.md",
        'multiplies the largest model by {}, `shard="parameters"` by {}, and `shard="parameters"` with activation '
        "checkpointing by {}",
        lambda: [
            rounded(number("memory_limits", shard, blocks, column=3, group=1))
            for shard, blocks in (('"state"', "none"), ('"parameters"', "none"), ('"parameters"', "blocks"))
        ],
    ),
    (
        "docs/guides/memory.md",
        'step time with `shard="state"` was {} (ddp) and {} (horovod) times that with',
        lambda: [
            rounded(float(text_number("sharding", rf"\*\*([0-9.]+)\*\* \[[0-9., ]+\] \({backend}\)")))
            for backend in ("ddp", "horovod")
        ],
    ),
    (
        "docs/guides/memory.md",
        "took {}, {} and {} bytes per parameter on 2, 3 and 4 ranks",
        lambda: column_of("sharding", 'shard="parameters"', "8.000 (+0.00%)", columns=(1, 2, 3)),
    ),
    (
        "docs/guides/memory.md",
        "a step took {} (ddp) and {} (horovod) times as long as with replicated parameters",
        lambda: sharded_steps('shard="parameters"'),
    ),
    (
        "docs/guides/pipeline.md",
        "needs {}% of the memory of one process that computes the whole batch at once, {}% with activation "
        "checkpointing, and {}% with checkpointing and 8 micro-batches",
        lambda: pipeline_memory(
            "2 stages, 1F1B", "2 stages, 1F1B, checkpointing", "2 stages, 1F1B, 8 micro-batches, checkpointing"
        ),
    ),
    (
        "docs/guides/pipeline.md",
        "one process with 4 accumulated micro-batches needs {}% of that memory",
        lambda: pipeline_memory("one process, 4 micro-batches"),
    ),
    (
        "docs/guides/low_communication.md",
        "a synchronous step takes {} ms (ddp: {} ms), a step with PowerSGD {} ms ({} ms), and a step with DiLoCo {} ms "
        "({} ms)",
        latency_steps,
    ),
    (
        "docs/guides/low_communication.md",
        "takes {} times as long as one without communication at 100 Mbit/s on ddp. There, DiLoCo with 25 local steps "
        "was {} times as fast as synchronous training on ddp and {} times on horovod, with int8 {} and {} times, and "
        "with streaming {} and {} times",
        large_model_speeds,
    ),
    *(
        (
            page,
            "{} runs " + verb + " {} times with SIGKILL" if page.endswith("benchmarks.md") else verb,
            lambda: [
                text_number("chaos", r"(\d+) runs were killed with SIGKILL a total of (\d+) times", group)
                for group in (1, 2)
            ],
        )
        for page, verb in (
            ("docs/benchmarks.md", "were killed"),
            ("docs/guides/checkpoints.md", "{} runs were resumed on different backends and on 1 to 3 ranks after a "
             "total of {} kills with SIGKILL"),
        )
    ),
    *(
        (
            page,
            "parameters differed by at most {} from those of an uninterrupted run",
            lambda: [text_number("chaos", r"differ by at most \*\*([\d.e-]+)\*\*")],
        )
        for page in ("docs/benchmarks.md", "docs/guides/checkpoints.md")
    ),
)  # fmt: skip


def pattern_of(template: str) -> re.Pattern[str]:
    """Return the pattern that matches the text with any figures, across line breaks."""
    return re.compile(
        r"([+-]?\d(?:[\w.,+-]*\w)?)".join(r"\s+".join(map(re.escape, part.split(" "))) for part in template.split("{}"))
    )


def replaced(text: str, template: str, figures: list[str]) -> str:
    """Return the text of a page with the figures in it replaced. Raise LookupError if it does not contain the text."""
    match = pattern_of(template).search(text)
    if match is None:
        raise LookupError(f"No page text matches {template!r}.")
    parts, end = [], 0
    for group, figure in enumerate(figures, start=1):
        parts += [text[end : match.start(group)], figure]
        end = match.end(group)
    return "".join([*parts, text[end:]])


def updated_pages() -> Iterator[tuple[Path, str, str]]:
    """Yield each page with figures: its path, its text, and its text with the current figures."""
    for page in dict.fromkeys(page for page, _, _ in FIGURES):
        old = new = (REPOSITORY / page).read_text()
        for name, template, figures in FIGURES:
            if name == page:
                new = replaced(new, template, figures())
        yield REPOSITORY / page, old, new


def main() -> None:
    """Write the current figures into the pages."""
    for path, old, new in updated_pages():
        if new != old:
            path.write_text(new)
            print(f"{path.relative_to(REPOSITORY)} updated")


if __name__ == "__main__":
    main()
