"""From the command line of one launcher to that of another.

    job = read("horovodrun -np 16 -H a:8,b:8 python train.py")
    for line in write(job, "torchrun").lines:
        print(line.host, line.shell())

Each launcher is a file that reads and writes its line; what stands between them is a `Job`. An option that is nothing
of a job's is kept with it: the same launcher gets it back, another one its counterpart, or the user a remark with what
to do instead. Nothing here looks at the machine but for files of hosts that a line names.
"""

from unitrain.launchers.translation.job import Job
from unitrain.launchers.translation.reading import read
from unitrain.launchers.translation.targets import TARGETS, write
from unitrain.launchers.translation.writing import Line, Written

__all__ = ["TARGETS", "Job", "Line", "Written", "read", "write"]
