"""`unitrain.run`: call a function on several ranks of this machine, from a notebook or a script.

run    start the ranks, print their output and return their results
rank   program of each rank: execute the call and store its outcome
call   files that transfer the call to the ranks and the outcomes back
"""
