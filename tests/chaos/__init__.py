"""Chaos tests: training jobs with random, overlapping faults must have the results of undisturbed jobs.

    python -m tests.chaos --trials 100 --first 0

A seed determines a trial (`trials.py`): the backend, the launcher, the number of ranks and hosts, the options of the
run, and faults in given phases. `training.py` is the training script. It reports the phases, and injects the faults
that occur inside a rank. `faults.py` injects all other faults. `job.py` starts the job. `runner.py` restarts the job if
the launcher exits with an error, and checks the outcome with `oracle.py`. `report.py` writes tables of the outcomes.
"""

import sys
from pathlib import Path

# In pytest, `pythonpath` in pyproject.toml already adds tests/support.
if (_support := str(Path(__file__).parents[1] / "support")) not in sys.path:
    sys.path.insert(0, _support)
