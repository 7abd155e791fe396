"""Supervision of a job by `unitrain launch`.

supervisor   Job and Supervisor: attempts at a job, and restarts after failures and changes of hosts
ranks        connections to the ranks: which ones have ended, and how
membership   selection of the hosts of an elastic job
rank_logs    log file of each rank
"""
