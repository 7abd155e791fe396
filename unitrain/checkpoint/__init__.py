"""Checkpoints: saving, loading and converting the state of a run.

checkpointer    Checkpointer: saves and loads the checkpoints of a run
files           the file format
writer          background writing, and which checkpoints are kept
state_copy      copies of state in host memory, in types that load safely
folder_lock     the lock that lets one job write to a folder
output_folder   actions of rank 0 in the folder, and the record of the job that owns it
conversion      reading checkpoints of other programs
"""
