"""Convert the command line of one launcher to another launcher.

    job = parse("horovodrun -np 16 -H a:8,b:8 python train.py")
    for line in build(job, "torchrun").lines:
        print(line.host, line.shell())

A launcher's module parses its command line into a `Job` and builds its command line from a `Job`. Options that are not
part of the job are stored in `Job.launcher_options`. The same launcher receives them unchanged; for other launchers,
they are converted to equivalent options or variables, or to a remark with an alternative. The package does not query
the machine, except to read hostfiles that a command line names.

- `dispatch`: `parse`, `build`, and the launchers that each of them supports
- `job`: `Job` and `LauncherOption`
- `torchrun`, `horovodrun`, `openmpi`, `mpich`, `srun`, `unitrain`: the syntax of one launcher each
- `sbatch`, `kubernetes`: batch scripts and manifests, which are only written
- `options`: parser of launcher options, driven by a table
- `hosts`: hosts in command lines and hostfiles, process placement
- `words`: splitting and quoting of command lines
- `writing`: command lines, remarks, and advice about options without an equivalent
"""

from unitrain.launchers.translation.dispatch import TARGETS, build, parse
from unitrain.launchers.translation.job import Job
from unitrain.launchers.translation.writing import CommandLine, Translation

__all__ = ["TARGETS", "CommandLine", "Job", "Translation", "build", "parse"]
