"""`unitrain launch`: plan a launch, execute it, and supervise the job until it exits.

launch_plan  validate a launch request, plan it, and execute the plan
submission   batch scripts and manifests for `unitrain submit`
following    state and log of a submitted job for `unitrain follow`, with slurm_job and kubernetes_job
checks       checks shared by all commands that start ranks
supervisor   Supervisor: run attempts of a job, and restart it after failures and host changes
attempt      a job, and one attempt of it: the launcher's process and the connections to its ranks
standby      the ranks of the next attempt, started in advance
standby_rank the program of these ranks
ranks        connections to the ranks, which detect their exits
membership   select the hosts of an elastic job
rank_logs    one log file per rank
"""
