"""Differential fuzzer: random training runs, compared with plain torch in one process.

- `cases.py` draws a random case, which is plain data, and simplifies it.
- `parts.py` builds the user's side of a case: model, loss, data, optimizer, scheduler and metrics. It is plain torch.
- `oracle.py` computes the result in one process, in float64, without unitrain. It defines the expected results.
- `subject.py` runs the same case through unitrain on real ranks.
- `loops.py` does the same for training loops without the Trainer: random forward passes, backward passes and steps.
- `collectives.py` does the same for single collectives with random operations, dtypes and values.
- `known.py` contains the smallest cases of the defects that were found. They run in every test run.
- `runner.py` keeps ranks alive between cases, compares the results, and shrinks a failing case.

Repeat and shrink a case with `python -m tests.fuzzer --seed 123`, or `python -m tests.fuzzer --case '{...}'`.
"""
