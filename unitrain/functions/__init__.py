"""`unitrain.run`: call a function on several ranks of this machine, from a notebook or a script.

run    starts the ranks, prints their output and returns their results
rank   program of each rank: makes the call and stores its outcome
call   files through which calls and outcomes are passed between the two
"""
