"""Differential fuzzer: random training runs, compared with plain torch in one process.

- `cases.py` draws a random case, which is plain data, and simplifies it.
- `parts.py` builds the user's side of a case: model, loss, data, optimizer, scheduler and metrics. It is plain torch.
- `oracle.py` computes the result in one process, in float64, without unitrain. It defines the promise.
- `subject.py` runs the same case through unitrain on real ranks.
- `loops.py` is the same for training loops without the Trainer: random forwards, backwards and steps.
- `collectives.py` is the same for single collectives with random operations, dtypes and values.
- `known.py` has the smallest cases of defects that were found; they run always.
- `runner.py` keeps ranks alive between cases, compares the results, and shrinks a failing case.

Repeat and shrink a case with `python -m tests.fuzzer --seed 123`, or `python -m tests.fuzzer --case '{...}'`.
"""
