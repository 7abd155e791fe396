"""Differential fuzzer: compares random training runs with plain torch in one process.

- `cases.py` draws and simplifies random cases, which are plain data.
- `parts.py` builds the user's side of a case in plain torch: model, loss, data, optimizer, scheduler and metrics.
- `oracle.py` computes the expected results in one process, in float64, without unitrain.
- `subject.py` runs the same case through unitrain on real ranks.
- `loops.py` draws, runs and checks training loops without the Trainer, with random forward and backward passes.
- `collectives.py` draws, runs and checks single collectives with random operations, dtypes and values.
- `known.py` contains the smallest cases of known defects. CI runs these cases.
- `runner.py` keeps ranks alive between cases, compares the results, and shrinks a failing case.

To repeat and shrink a case, run `python -m tests.fuzzer --seed 123` or `python -m tests.fuzzer --case '{...}'`.
"""
