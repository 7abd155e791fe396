"""Chaos tests: training jobs that are disturbed by random, overlapping faults, and must end as if undisturbed.

    python -m tests.chaos --trials 100 --first 0

A seed determines a trial (`trials.py`): the backend, the launcher, the number of ranks and hosts, the options of the
run, and faults at given phases. `training.py` is the training script; it reports the phases and injects the faults that
a rank injects itself. `faults.py` injects the others. `job.py` starts the job, and `runner.py` starts it again when
the launcher exits with an error, and checks the outcome with `oracle.py`. `report.py` writes the counts.
"""

import sys
from pathlib import Path

# pytest adds this folder as well (pyproject.toml).
if (_support := str(Path(__file__).parents[1] / "support")) not in sys.path:
    sys.path.insert(0, _support)
