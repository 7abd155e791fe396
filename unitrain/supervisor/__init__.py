"""`unitrain launch`: plan a launch, execute it, and supervise the job until it exits.

launch_plan  validate a launch request, plan it, and execute the plan
submission   batch scripts and manifests for `unitrain submit`
checks       checks shared by all commands that start ranks
supervisor   Job and Supervisor: run attempts of a job, and restart it after failures and host changes
ranks        connections to the ranks, which detect their exits
membership   select the hosts of an elastic job
rank_logs    one log file per rank
"""
