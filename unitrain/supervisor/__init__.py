"""`unitrain launch`: plans a launch, starts it, and supervises the job until its end.

launch_plan  a launch request, validated and turned into a plan, and its execution
submission   batch scripts and manifests for `unitrain submit`
checks       checks that all commands which start ranks make first
supervisor   Job and Supervisor: attempts at a job, and restarts after failures and changes of hosts
ranks        connections to the ranks, which detect when and how a rank has ended
membership   selection of the hosts of an elastic job
rank_logs    log file of each rank
"""
