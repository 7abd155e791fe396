"""`unitrain doctor`: diagnose a host, or the ranks and hosts of a job, and suggest fixes.

examination  collect the reports of all ranks, optionally launching them, and evaluate the reports
facts        collect the host and software configuration of one rank
peers        checks between ranks: addresses, reachability, clocks, shared folder
findings     evaluate the reports of all ranks
display      print the result
"""
