"""Checkpoints: saving, loading and converting the state of a run.

checkpointer    Checkpointer: saves and loads the checkpoints of a run
files           the file format
writer          background writing, and retention of checkpoints
state_copy      copies of state in host memory, in types that load safely
folder_lock     the lock on the folder: one job at a time may write to it
output_folder   file accesses of rank 0 in the folder, and the record of the job that owns it
conversion      reading of other programs' checkpoints
"""
