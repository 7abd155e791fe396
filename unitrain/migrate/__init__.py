"""`unitrain migrate`: convert a training script that uses Horovod, DDP, Accelerate or Fabric.

migration       the entry point: apply all rules to a script, and return the new source, the reasons and the problems
script          a parsed script: the names that its expressions refer to, positions, functions and blocks
edits           replacements of expressions and statements, and the source that results
diff            the unified diff, and the number of changed lines
startup         placement of the `unitrain.init` call and of the shutdown of the backend
execution       the order in which the statements of a script run, to find uses of the backend before its start
calls           arguments of a call by parameter name
models          the variables that hold distributed models
aliases         other variables of the model that is wrapped
environment_variables  reads of RANK, WORLD_SIZE and others
imports         imports that are added and removed
horovod, ddp, trainers  the rules of each library; `trainers` is for Accelerate and Fabric
indirect        wildcard imports, imports whose module name is a string, and names in strings
unsupported     names that cannot be converted, each with a fix

Only names that the rules list are converted. Names of torch.distributed that work on every backend (`ddp.KEPT_NAMES`)
and names of Accelerate and Fabric remain in the script. Every other name of Horovod, torch.distributed, DeepSpeed and
apex.parallel is a problem, which is reported with its line, and the script is then not converted.
"""

from unitrain.migrate.diff import num_changed_lines, unified_diff
from unitrain.migrate.migration import Migration, migrate

__all__ = ["Migration", "migrate", "num_changed_lines", "unified_diff"]
