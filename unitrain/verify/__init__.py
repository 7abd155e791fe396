"""`unitrain verify`: train a script on every backend and compare the results numerically.

runs               execute the runs of a verification sequentially
commands           run a command with a time limit and terminate all its processes (also used by `tune` and `memory`)
train_function     the program of each rank if the target is a function instead of a script
recorder           record the steps of a run (runs in the training processes)
pipeline_recorder  record the steps of a Pipeline instead of a Trainer
snapshots          copies and digests of the state of a run
record             the files of a run: the request, and one record per rank
digests            digests of samples and tensors
difference         compare the recorded numbers of two runs
bits               compare runs bit by bit, for runs with logical ranks
verdict            decide whether runs have the same results, and report known causes of differences
report             print the verdict as a table, or write it as JSON
"""
