"""Differential fuzzer: compares random training runs and random sequences of calls with plain torch in one process.

- `cases.py` draws and simplifies random cases, which are plain data.
- `parts.py` builds the user's side of a case in plain torch: model, loss, data, optimizer, scheduler and metrics.
- `oracle.py` computes the expected results in one process, in float64, without unitrain.
- `subject.py` runs the same case through unitrain on real ranks.
- `loops.py` draws, runs and checks training loops without the Trainer, with random forward and backward passes.
- `collectives.py` draws, runs and checks single collectives with random operations, dtypes and values.
- `sequences.py` draws random programs: sequences of calls on several Trainers and own loops in the same processes, such
  as fit, stop, an exception, fit again, load the best checkpoint, and a resume on other ranks.
- `sequence_subject.py` runs programs on real ranks, `sequence_oracle.py` executes the same programs in plain torch, and
  `sequence_loops.py` contains the loops, which both share.
- `user_objects.py` contains optimizers with modes and global statistics, and samplers with their own generators.
- `known.py` contains the smallest cases of known defects. CI runs these cases.
- `runner.py` keeps ranks alive between cases, compares the results, and shrinks a failing case.

To repeat and shrink a case, run `python -m tests.fuzzer --seed 123`, `--sequence 123` or `--case '{...}'`.

Where unitrain may refuse a program with an error, `sequence_oracle.allowed_refusals` lists the reason and the classes
of the error, which all ranks must raise. The command prints how often each reason occurred.
"""
