"""`unitrain doctor`: check a host, or the ranks and hosts of a job, and suggest fixes.

examination  collect the reports of all ranks, also from a launch, and evaluate them
facts        facts about the host and the software of one rank
peers        checks between the ranks: addresses, reachability, clocks, shared folder
findings     evaluate the reports of all ranks
display      print the result
"""
