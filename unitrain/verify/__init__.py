"""`unitrain verify`: train a script on every backend and compare the numbers.

runs            make the runs of a verification, one after the other
commands        run a command with a time limit and terminate every process that it started (also used by `tune`)
train_function  the program of each rank if the user names a function instead of a script
recorder        record the steps of a run, in the training processes
record          the files of a run: the request, and the record of each rank
digests         digests of samples and tensors
difference      compare the numbers of two runs
verdict         decide whether runs have the same numbers, and name the cause if they do not
report          print the verdict as a table, or write it as JSON
"""
